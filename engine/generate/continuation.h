// A sequence that is continued: its next draw, its text, and where and why it ends. It does not know which device
// computes it. generate() and Generator share it; they differ only in how they step and draw.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/generate/stop_matcher.h"
#include "mmrec/generate.h"
#include "models/runtime/executor.h"

namespace mmrec::engine {

class Continuation {
 public:
  /// The sequence has consumed `position` tokens; `before` are the last of them. `vocab` is the model's.
  /// options.context may go afterwards. Throws std::invalid_argument.
  Continuation(const Tokenizer& tokenizer, std::int64_t vocab, const GenerateOptions& options,
               std::span<const int> before, std::int64_t position);

  /// The caller must ask this before each token: whether to draw it. After false, is_over() is true.
  bool goes_on();
  /// Whether this token ends the sequence for another reason than its text. cancel() may still come.
  bool ends_with(int token) const;
  /// Takes the drawn token, and what append_likeliest() makes of its logits. Requires: !is_over().
  void take(const Sample& drawn, std::span<const Sample> likeliest = {});
  /// Appends the likeliest tokens of `logits` [vocab] that are wanted: falling, ties in the order of ids, each with its
  /// log-softmax over all of `logits`, in double. Requires: finite logits or -inf, not all of them.
  void append_likeliest(std::span<const float> logits, std::vector<Sample>& to) const;
  /// Draws no more tokens: the next call of goes_on() or take() ends it as options.cancelled would.
  void cancel() { cancelled_ = true; }
  /// Ends it with FinishReason::kError; text that is held back is dropped.
  void fail(const std::string& error);

  bool is_over() const { return over_; }
  /// The last token drawn, which the sequence has not consumed; nullptr before the first.
  const int* unconsumed() const { return result_.tokens.empty() ? nullptr : &result_.tokens.back(); }
  const GenerateOptions& options() const { return options_; }  // vocab_limit is at most what the tokenizer knows
  /// Keys the random number of the next draw.
  std::uint64_t step() const { return first_step_ + result_.tokens.size(); }
  /// The next draw from the logits of `slot`; valid until the next call that is not const.
  models::Draw draw(models::Slot slot) const { return {slot, options_.sampler, options_.sequence, step(), recent_}; }

  GenerateResult& result() { return result_; }

 private:
  bool is_eos(int token) const;
  void end(FinishReason reason);
  bool deliver(const std::string& text);

  GenerateOptions options_;
  StreamDecoder decoder_;
  StopMatcher stops_;
  std::vector<int> recent_;  // oldest first
  std::uint64_t first_step_;
  bool cancelled_ = false;
  bool over_ = false;
  GenerateResult result_;
};

}  // namespace mmrec::engine
