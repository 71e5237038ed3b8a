// Distributions over the whole vocabulary, one for each scored token: saved by --save-logprobs, compared with by
// --compare. docs/file-formats.md has the file.
//
// Must stay true: memory is that of two distributions and a number for each token; a file that is not of this corpus,
// vocabulary and tokenizer is refused where that shows, naming the file, what was found and what was expected.
#pragma once

#include <cstdint>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "apps/common/output.h"
#include "apps/common/signals.h"
#include "apps/ppl/score.h"
#include "mmrec/model.h"
#include "mmrec/session.h"

namespace mmrec::apps {

/// What a file of distributions belongs to.
struct DistributionSource {
  std::uint64_t model = 0;      // fingerprints
  std::uint64_t tokenizer = 0;  // 0: token ids were scored
  std::int64_t vocab_size = 0;
};

/// A document once more, token by token, for the distributions that scores leave out.
class Distributions {
 public:
  Distributions(const Model& model, const SessionOptions& options) : session_(model.new_session(1, options)) {}

  /// visit(position, id, logprobs [vocab_size]) of each scored token, until the program is interrupted.
  template <class Visit>
  void of(const ScoredDocument& scored, Visit&& visit) {
    session_.reset();
    std::size_t consumed = 0;
    scored.for_each_token([&](std::size_t position, int id, float) {
      if (interrupt_exit_code() != 0) return;
      for (; consumed < position; ++consumed) session_.step({&scored.document.ids[consumed], 1});
      visit(position, id, log_softmax());
    });
  }

 private:
  std::span<const float> log_softmax();

  Session session_;
  std::vector<float> logprobs_;
};

/// --save-logprobs.
class DistributionWriter {
 public:
  /// Throws OutputError, as all below.
  DistributionWriter(Output& out, const DistributionSource& source);
  void add(std::int64_t document, std::size_t position, int id, std::span<const float> logprobs);
  void commit();

 private:
  Output& out_;
  std::uint64_t count_ = 0;
};

/// How far this run's distributions are from those that were saved.
class DistributionComparison {
 public:
  /// Whether the file begins as those of --save-logprobs do.
  static bool is_one(const std::string& path);

  /// Throws RejectedFile, as all below.
  DistributionComparison(std::string path, const DistributionSource& source);
  void add(std::int64_t document, std::size_t position, int id, std::span<const float> logprobs);
  /// When all were added: "diff_*" as Comparison::finish() has them, of the log-probs of the tokens themselves; and of
  /// the Kullback-Leibler divergence of this run's distribution from the saved one, in nats: "kl_mean", "kl_stderr",
  /// "kl_median", "kl_p99", "kl_max"; and "same_top", the share of tokens where both have the same likeliest.
  nlohmann::ordered_json finish();

 private:
  void read(void* to, std::size_t bytes, const char* what);
  [[noreturn]] void refuse(const std::string& found, const std::string& expected) const;

  std::string path_;
  std::ifstream in_;
  std::vector<float> saved_;
  std::vector<float> divergences_;
  std::int64_t same_top_ = 0;
  double sum_ = 0.0, absolute_ = 0.0, most_ = 0.0;
};

}  // namespace mmrec::apps
