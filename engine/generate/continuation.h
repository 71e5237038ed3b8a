// A sequence that is being continued, apart from who computes it: what the next draw is, what becomes of a drawn token,
// where the text ends and why. generate() and Generator differ in how they step and draw, and in nothing else.
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
  /// Of a sequence that has consumed `position` tokens, the last of which were `before`. `vocab` is the model's.
  /// options.context need not live on. Throws std::invalid_argument.
  Continuation(const Tokenizer& tokenizer, std::int64_t vocab, const GenerateOptions& options,
               std::span<const int> before, std::int64_t position);

  /// To be asked before each token: whether it shall be drawn. If not, is_over() from then on.
  bool goes_on();
  /// Whether it ends with this token, whatever its text says; cancel() aside, which may come meanwhile.
  bool ends_with(int token) const;
  /// What was drawn, once, and what append_likeliest() makes of the logits it was drawn from. Requires: !is_over().
  void take(const Sample& drawn, std::span<const Sample> likeliest = {});
  /// Appends the likeliest tokens of `logits` [vocab] that are wanted: falling, ties in the order of ids, each with its
  /// log-softmax over all of `logits`, in double. Requires: finite logits or -inf, not all of them.
  void append_likeliest(std::span<const float> logits, std::vector<Sample>& to) const;
  /// No more tokens: the next of goes_on() and take() ends it as options.cancelled would.
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
