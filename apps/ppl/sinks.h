// Things that are made of scored documents, besides the report: log-probs that are saved or compared
// (saved_logprobs.cpp), and pages for people (pages.cpp).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "apps/common/input.h"
#include "apps/common/output.h"
#include "apps/ppl/report.h"
#include "apps/ppl/score.h"
#include "mmrec/model.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// Whether the file begins as those of --save-logprobs do. Requires: nothing of it has been read.
bool is_distributions(LineReader& saved);

/// Compares with the lines of mmrec-ppl --per-token: "diff_tokens", "diff_mean" and "diff_max" of the differences'
/// absolute values, and "diff_bias", their mean (of this run's log-probs less those saved). Null without tokens.
std::unique_ptr<DocumentSink> token_comparison(std::unique_ptr<LineReader> saved);

/// Distributions over the whole vocabulary, one for each scored token. Saves them to `save` if it is set. Compares them
/// with the file `compare` if it is set: "diff_*" as above, of the log-probs of the tokens themselves; and of the
/// Kullback-Leibler divergence of this run's distribution from the saved one, in nats: "kl_mean", "kl_stderr",
/// "kl_median", "kl_p99", "kl_max"; and "same_top", the share of tokens where both have the same likeliest. `tokenizer`
/// is its fingerprint, 0 for token ids.
std::unique_ptr<DocumentSink> distributions(const Model& model, const SessionOptions& options, Output* save,
                                            std::unique_ptr<LineReader> compare, std::uint64_t tokenizer);

/// Written as documents come, a hundred bytes or so a token. Without a tokenizer it shows ids.
std::unique_ptr<DocumentSink> html_page(Output& out, std::optional<Tokenizer> tokenizer, const RunIdentity& identity);

/// An SVG. Memory is that of the classes of its drawings, whatever the size of the corpus.
std::unique_ptr<DocumentSink> loss_plot(Output& out);

/// `text` inside of HTML or SVG: characters that mean something to a parser become entities, also for attributes in
/// double quotes. Control characters that XML does not know, and bytes that are not UTF-8, become U+FFFD.
std::string html_text(std::string_view text);

}  // namespace mmrec::apps
