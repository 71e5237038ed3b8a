// What the tests of both log-prob ops share.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/tensor.h"

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

inline constexpr float kPoison = 12345.5F;  // a value no op writes

}  // namespace mmrec::kernels
