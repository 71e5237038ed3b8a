// --compare: log-probs beside those that were saved before, token by token.
#pragma once

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "apps/common/input.h"
#include "apps/ppl/score.h"

namespace mmrec::apps {

/// Reads the lines of mmrec-ppl --per-token as documents come, so that neither has to fit in memory. The two must be of
/// the same documents and tokens: whatever differs but log-probs throws RejectedFile naming FILE:LINE, found and
/// expected.
class Comparison {
 public:
  explicit Comparison(std::string file) : file_(file), lines_(std::move(file)) {}

  void add(const ScoredDocument& scored);
  /// When all documents were added: the differences, "diff_tokens", "diff_mean" and "diff_max" of their absolute
  /// values, and "diff_bias", their mean (of this run's log-probs less those saved). Null where there is no token.
  nlohmann::ordered_json finish();

 private:
  std::string file_;
  LineReader lines_;
  std::int64_t tokens_ = 0;
  double sum_ = 0.0;
  double absolute_ = 0.0;
  double most_ = 0.0;
};

}  // namespace mmrec::apps
