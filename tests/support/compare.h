// How far apart numbers are, and what they are compared with.
#pragma once

#include "tests/support/prelude.h"

namespace mmrec::test {

/// The largest |x|, `least` at the least.
template <class Values>
double largest_of(const Values& values, double least = 0.0) {
  for (const auto x : values) least = std::max(least, std::abs(static_cast<double>(x)));
  return least;
}
/// The largest difference; infinite for NaN or another number of values.
template <class Got, class Want>
double largest_difference(const Got& got, const Want& want) {
  if (got.size() != want.size()) return INFINITY;
  double most = 0.0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double d = std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    most = std::isnan(d) ? INFINITY : std::max(most, d);
  }
  return most;
}
/// The same as a share of the largest value wanted, `least` at the least.
template <class Got, class Want>
double largest_share(const Got& got, const Want& want, double least = 0.0) {
  const double most = largest_of(want, least), difference = largest_difference(got, want);
  return most == 0.0 ? difference : difference / most;
}

/// Columns [begin, begin + count) of the first `rows` rows of values [rows, width].
template <class Values>
auto columns_of(const Values& values, std::int64_t width, std::int64_t rows, std::int64_t begin, std::int64_t count) {
  std::vector<typename Values::value_type> part;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto first = values.begin() + row * width + begin;
    part.insert(part.end(), first, first + count);
  }
  return part;
}

/// log p of a token under logits.
inline double logprob_under(std::span<const float> logits, int token) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - top);
  return static_cast<double>(logits[static_cast<std::size_t>(token)]) - top - std::log(sum);
}
/// log p of ids [batch, count] at times 1.., under logits [batch, time, V].
inline std::vector<double> logprobs_under(std::span<const float> logits, std::int64_t time, std::int64_t vocab,
                                          std::span<const int> ids, std::int64_t batch) {
  const auto count = static_cast<std::int64_t>(ids.size()) / batch;
  std::vector<double> all;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t t = 0; t + 1 < count; ++t) {
      const auto row =
          logits.subspan(static_cast<std::size_t>((b * time + t) * vocab), static_cast<std::size_t>(vocab));
      all.push_back(logprob_under(row, ids[static_cast<std::size_t>(b * count + t + 1)]));
    }
  }
  return all;
}

}  // namespace mmrec::test
