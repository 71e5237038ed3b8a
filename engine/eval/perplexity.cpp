// Corpus measures from document scores.
#include <cmath>
#include <limits>
#include <numbers>

#include "mmrec/scorer.h"
#include "models/files/utf8.h"

namespace mmrec {
namespace {

double ratio(double numerator, std::int64_t denominator) {
  return denominator == 0 ? std::numeric_limits<double>::quiet_NaN() : numerator / static_cast<double>(denominator);
}

}  // namespace

std::int64_t count_words(std::string_view text) {
  std::int64_t words = 1;  // re.split gives one field more than there are runs of white space, empty ones included
  bool in_space = false;
  while (!text.empty()) {
    const models::Utf8Unit unit = models::first_unit(text);
    const bool is_space = models::is_python_space(unit.code);
    if (is_space && !in_space) ++words;
    in_space = is_space;
    text.remove_prefix(unit.length);
  }
  return words;
}

double DocumentSums::ppl() const { return std::exp(ratio(nll, tokens)); }

DocumentSums sums_of(const DocumentScore& score) {
  DocumentSums sums{.nll = score.nll};
  double mean = 0.0;
  for (const float logprob : score.logprobs) {
    ++sums.tokens;
    const double nll = -static_cast<double>(logprob);
    const double delta = nll - mean;
    mean += delta / static_cast<double>(sums.tokens);
    sums.nll_m2 += delta * (nll - mean);
  }
  return sums;
}

void PerplexityAccumulator::add(const DocumentSums& sums, std::int64_t bytes, std::int64_t words, std::int64_t docs) {
  sums_.docs += docs;
  sums_.bytes += bytes;
  sums_.words += words;
  sums_.nll += sums.nll;
  if (sums.tokens == 0) return;
  const auto before = static_cast<double>(sums_.tokens);
  sums_.tokens += sums.tokens;
  const auto tokens = static_cast<double>(sums.tokens);
  const double share = tokens / static_cast<double>(sums_.tokens);
  const double delta = sums.nll / tokens - mean_;
  mean_ += delta * share;
  sums_.nll_m2 += sums.nll_m2 + delta * delta * before * share;
}

PerplexitySummary PerplexityAccumulator::summary() const {
  PerplexitySummary s = sums_;
  s.ppl = std::exp(ratio(s.nll, s.tokens));
  // d exp(m) = exp(m) dm, and the standard error of the mean m is sqrt(variance / tokens).
  s.ppl_stderr = s.tokens < 2 ? std::numeric_limits<double>::quiet_NaN()
                              : s.ppl * std::sqrt(ratio(ratio(s.nll_m2, s.tokens - 1), s.tokens));
  s.bits_per_byte = ratio(s.nll, s.bytes) / std::numbers::ln2;
  s.word_ppl = std::exp(ratio(s.nll, s.words));
  s.byte_ppl = std::exp(ratio(s.nll, s.bytes));
  return s;
}

}  // namespace mmrec
