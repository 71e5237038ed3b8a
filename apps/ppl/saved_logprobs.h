// --save-logprobs and --compare: log-probs beside those that were saved before, token by token. docs/file-formats.md
// has the file of distributions.
//
// Must stay true: memory is that of two distributions and a number for each token. A file that is not of this corpus,
// vocabulary and tokenizer is refused where that shows (RejectedFile naming the place, found and expected).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "apps/common/output.h"
#include "apps/ppl/score.h"
#include "mmrec/model.h"

namespace mmrec::apps {

/// What a file of distributions belongs to.
struct DistributionSource {
  std::uint64_t model = 0;      // fingerprints
  std::uint64_t tokenizer = 0;  // 0: token ids were scored
  std::int64_t vocab_size = 0;
};

/// Whether the file begins as those of --save-logprobs do.
bool is_distributions(const std::string& path);

/// Compares with the lines of mmrec-ppl --per-token: "diff_tokens", "diff_mean" and "diff_max" of the differences'
/// absolute values, and "diff_bias", their mean (of this run's log-probs less those saved). Null without tokens.
std::unique_ptr<DocumentSink> token_comparison(const std::string& file);

/// Distributions over the whole vocabulary, one for each scored token. Saves them to `save` if it is set. Compares them
/// with the file `compare` if it is set: "diff_*" as above, of the log-probs of the tokens themselves; and of the
/// Kullback-Leibler divergence of this run's distribution from the saved one, in nats: "kl_mean", "kl_stderr",
/// "kl_median", "kl_p99", "kl_max"; and "same_top", the share of tokens where both have the same likeliest.
std::unique_ptr<DocumentSink> distributions(const Model& model, const SessionOptions& options, Output* save,
                                            const std::optional<std::string>& compare,
                                            const DistributionSource& source);

}  // namespace mmrec::apps
