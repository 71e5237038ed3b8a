// Runs over a bank of past states, and the recurrence that is normed, in plain float64: for the tests of both backends.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/ops.h"
#include "tests/kernels/test_util.h"

namespace mmrec::kernels::test {

/// Lengths of runs that are packed one after another, with unused rows in front of each.
struct RunShapes {
  std::vector<std::int32_t> rows;
  std::int32_t gap = 0;

  std::int64_t total() const {
    std::int64_t sum = 0;
    for (const std::int32_t n : rows) sum += n + gap;
    return sum;
  }
  std::int64_t longest() const { return rows.empty() ? 0 : *std::max_element(rows.begin(), rows.end()); }
  std::vector<BankRun> list() const {
    std::vector<BankRun> runs;
    std::int32_t first = 0;
    for (const std::int32_t n : rows) {
      runs.push_back({.first = first + gap, .rows = n});
      first += n + gap;
    }
    return runs;
  }
};

/// Operands of normed_recurrence, as float64 numbers that their types hold exactly.
struct NormedCase {
  RunShapes shapes;
  std::int64_t dim = 0;
  bool carries = false;
  std::vector<double> z, zm, gamma;  // [total, dim]
  std::vector<double> weight;        // [dim, dim]
  std::vector<double> bias, norm;    // [dim]
  std::vector<double> state;         // [runs, dim]

  /// h [total, dim], zeros in gaps, and the states behind the runs. `round` is what the product sees of h. Each token
  /// goes on from the one before or, where `seen` is given, from that one's row there: roundings grow from token to
  /// token, so of hundreds only each by itself is comparable.
  template <class Round>
  std::vector<double> reference(std::vector<double>& state_after, const Round& round,
                                const std::vector<double>& seen = {}) const {
    std::vector<double> h(z.size(), 0.0);
    state_after = state;
    const auto d = static_cast<std::size_t>(dim);
    const std::vector<BankRun> runs = shapes.list();
    for (std::size_t r = 0; r < runs.size(); ++r) {
      std::vector<double> before(d, 0.0);
      if (carries) std::copy_n(state.begin() + static_cast<std::ptrdiff_t>(r * d), d, before.begin());
      for (std::int32_t t = 0; t < runs[r].rows; ++t) {
        const std::size_t row = static_cast<std::size_t>(runs[r].first + t) * d;
        std::vector<double> p(d);
        double squares = 0.0;
        for (std::size_t c = 0; c < d; ++c) {
          double gate = zm[row + c] + bias[c];
          for (std::size_t k = 0; k < d; ++k) gate += weight[c * d + k] * round(before[k]);
          const double m = sigmoid(gate);
          p[c] = (1.0 - m + gamma[row + c]) * before[c] + m * z[row + c];
          squares += p[c] * p[c];
        }
        const double root = std::sqrt(squares / static_cast<double>(dim) + 1e-6);
        for (std::size_t c = 0; c < d; ++c) before[c] = h[row + c] = std::clamp(norm[c] * p[c] / root, -100.0, 100.0);
        if (!seen.empty() && t + 1 < runs[r].rows) {
          std::copy_n(seen.begin() + static_cast<std::ptrdiff_t>(row), d, before.begin());
        }
      }
      if (carries && runs[r].rows > 0)
        std::copy(before.begin(), before.end(), state_after.begin() + static_cast<std::ptrdiff_t>(r * d));
    }
    return h;
  }
};

/// softmax(scale q . bank) . bank of one row, the bank's rows from `used` on being zeros. bank [slots, dim].
inline std::vector<double> attend_reference(const std::vector<double>& q, const std::vector<double>& bank,
                                            std::int64_t used, std::int64_t slots, double scale) {
  const std::size_t d = q.size();
  std::vector<double> score(static_cast<std::size_t>(slots), 0.0);
  for (std::size_t j = 0; j < static_cast<std::size_t>(used); ++j) {
    for (std::size_t i = 0; i < d; ++i) score[j] += scale * q[i] * bank[j * d + i];
  }
  const double top = *std::max_element(score.begin(), score.end());
  double sum = 0.0;
  for (double& s : score) sum += s = std::exp(s - top);
  std::vector<double> out(d, 0.0);
  for (std::size_t j = 0; j < static_cast<std::size_t>(used); ++j) {
    for (std::size_t i = 0; i < d; ++i) out[i] += score[j] / sum * bank[j * d + i];
  }
  return out;
}

}  // namespace mmrec::kernels::test
