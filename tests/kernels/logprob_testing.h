// What the tests of both log-prob ops share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/tensor.h"
#include "tests/support/host_threads.h"

namespace mmrec::kernels {

/// logsumexp of a row in float64: plain two passes.
template <class T>
double reference_log_sum(const T* row, std::int64_t cols) {
  double max = -std::numeric_limits<double>::infinity();
  for (std::int64_t v = 0; v < cols; ++v) max = std::fmax(max, static_cast<double>(to_float(row[v])));
  double sum = 0.0;
  for (std::int64_t v = 0; v < cols; ++v) sum += std::exp(static_cast<double>(to_float(row[v])) - max);
  return max + std::log(sum);
}

/// log p of the targets of the listed rows in float64: hidden [rows, stride], head [vocab, dim].
template <class A>
std::vector<double> reference_hidden_logprobs(const std::vector<A>& hidden, std::int64_t stride,
                                              const std::vector<A>& head, std::int64_t dim,
                                              const std::vector<int>& targets, const std::vector<std::int64_t>& rows) {
  const auto vocab = static_cast<std::int64_t>(head.size()) / dim;
  const auto count = static_cast<std::int64_t>(rows.size());
  std::vector<double> x;  // the rows themselves
  for (const std::int64_t r : rows) {
    for (std::int64_t i = 0; i < dim; ++i) {
      x.push_back(static_cast<double>(to_float(hidden[static_cast<std::size_t>(r * stride + i)])));
    }
  }
  std::vector<double> logits(static_cast<std::size_t>(count * vocab));
  mmrec::test::parallel_for(vocab, [&](std::int64_t v) {
    std::vector<double> word(static_cast<std::size_t>(dim));
    for (std::int64_t i = 0; i < dim; ++i) {
      word[static_cast<std::size_t>(i)] = static_cast<double>(to_float(head[static_cast<std::size_t>(v * dim + i)]));
    }
    for (std::int64_t n = 0; n < count; ++n) {
      double sum = 0.0;
      for (std::int64_t i = 0; i < dim; ++i) {
        sum += x[static_cast<std::size_t>(n * dim + i)] * word[static_cast<std::size_t>(i)];
      }
      logits[static_cast<std::size_t>(n * vocab + v)] = sum;
    }
  });
  return mmrec::test::parallel_map(count, [&](std::int64_t n) {
    const double* row = logits.data() + n * vocab;
    const double max = *std::max_element(row, row + vocab);
    double sum = 0.0;
    for (std::int64_t v = 0; v < vocab; ++v) sum += std::exp(row[v] - max);
    return row[targets[static_cast<std::size_t>(rows[static_cast<std::size_t>(n)])]] - max - std::log(sum);
  });
}

inline constexpr float kPoison = 12345.5F;  // a value no op writes

}  // namespace mmrec::kernels
