// A sequence that is continued: its next draw, its text, and where and why it ends. It does not know which device
// computes it. generate() and Generator share it; they differ only in how they step and draw.
//
// Must stay true: a result depends only on the draws and on the answers of the callbacks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/generate/stop_matcher.h"
#include "engine/require.h"
#include "engine/session/access.h"
#include "mmrec/generate.h"
#include "models/runtime/executor.h"

namespace mmrec::engine {

class Continuation {
 public:
  /// The sequence has consumed `position` tokens; `before` are the last of them. `vocab` is the model's.
  /// options.context may go afterwards. Throws std::invalid_argument.
  Continuation(const Tokenizer& tokenizer, std::int64_t vocab, const GenerateOptions& options,
               std::span<const int> before, std::int64_t position)
      : options_(checked(options, tokenizer.vocab_size(), vocab)),
        decoder_(tokenizer, static_cast<std::int64_t>(before.size()) >= position),
        stops_(options_.stop),
        first_step_(static_cast<std::uint64_t>(position)) {
    options_.stop = {};  // the matcher has them
    decoder_.skip(before);
    // Only the end of what came before can count as recent.
    const auto window = static_cast<std::size_t>(options_.sampler.repetition_window);
    const std::span<const int> recent = before.last(std::min(before.size(), window));
    recent_.assign(recent.begin(), recent.end());
  }

  /// The caller must ask this before each token: whether to draw it. After false, is_over() is true.
  bool goes_on() {
    if (over_) return false;
    if (options_.max_tokens == 0) {  // take() sees to any other length
      end(FinishReason::kLength);
    } else if (cancelled_ || (options_.cancelled && options_.cancelled())) {
      end(FinishReason::kCancelled);
    }
    return !over_;
  }
  /// Whether this token ends the sequence for another reason than its text. cancel() may still come.
  bool ends_with(int token) const { return is_eos(token) || is_next_last(); }
  /// Whether the next token is the last, whatever it is.
  bool is_next_last() const { return std::ssize(result_.tokens) + 1 == options_.max_tokens; }
  /// Takes the drawn token, and what append_likeliest() makes of its logits. Requires: !is_over().
  void take(const Sample& drawn, std::span<const Sample> likeliest = {}) {
    if (cancelled_) return end(FinishReason::kCancelled);
    if (is_eos(drawn.token)) return end(FinishReason::kEndOfSequence);
    result_.tokens.push_back(drawn.token);
    if (options_.logprobs) result_.logprobs.push_back(drawn.logprob);
    result_.top_logprobs.insert(result_.top_logprobs.end(), likeliest.begin(), likeliest.end());
    recent_.push_back(drawn.token);
    const bool wants_text =
        !options_.on_token || options_.on_token(drawn.token, options_.logprobs ? drawn.logprob : 0.0F);
    if (!wants_text || !deliver_text(drawn.token) || stops_.stopped()) {
      over_ = true;
      result_.finish_reason = stops_.stopped() ? FinishReason::kStopString : FinishReason::kCancelled;
    } else if (std::ssize(result_.tokens) == options_.max_tokens) {
      end(FinishReason::kLength);
    } else if (cancelled_) {  // by one of these callbacks
      end(FinishReason::kCancelled);
    }
  }
  /// Appends the likeliest tokens of `logits` [vocab] that are wanted: falling, ties in the order of ids, each with its
  /// log-softmax over all of `logits`, in double. Requires: finite logits or -inf, not all of them.
  void append_likeliest(std::span<const float> logits, std::vector<Sample>& to) const {
    if (options_.top_logprobs == 0) return;
    std::vector<int> ids(std::min(static_cast<std::size_t>(options_.sampler.vocab_limit), logits.size()));
    std::iota(ids.begin(), ids.end(), 0);
    const std::size_t count = std::min(static_cast<std::size_t>(options_.top_logprobs), ids.size());
    const auto logit = [&](int id) { return logits[static_cast<std::size_t>(id)]; };
    std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(count), ids.end(),
                      [&](int a, int b) { return logit(a) > logit(b) || (logit(a) == logit(b) && a < b); });
    const auto largest = static_cast<double>(*std::ranges::max_element(logits));
    double sum = 0.0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x) - largest);
    const double rest = std::log(sum);
    for (const int id : std::span(ids).first(count)) {
      // Not minus their sum, which would round the rest away where logits are huge.
      to.push_back({id, static_cast<float>(static_cast<double>(logit(id)) - largest - rest)});
    }
  }
  /// Draws no more tokens: the next call of goes_on() or take() ends it as options.cancelled would.
  void cancel() { cancelled_ = true; }
  bool is_cancelled() const { return cancelled_; }
  /// Ends it with FinishReason::kError; text that is held back is dropped.
  void fail(const std::string& error) {
    over_ = true;
    result_.finish_reason = FinishReason::kError;
    result_.error = error;
  }

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
  static GenerateOptions checked(GenerateOptions options, int known_tokens, std::int64_t vocab) {
    require(options.max_tokens >= -1, "max_tokens: found {}, expected >= -1", options.max_tokens);
    require(options.top_logprobs >= 0, "top_logprobs: found {}, expected >= 0", options.top_logprobs);
    check_ids(options.context, vocab, "context ");
    check_ids(options.eos_token_ids, vocab, "end-of-sequence ");
    const Sampler as_given(options.sampler);  // checks them
    options.context = {};
    int& limit = options.sampler.vocab_limit;
    if (limit == 0 || limit > known_tokens) limit = known_tokens;
    return options;
  }

  bool is_eos(int token) const {
    const std::vector<int>& eos = options_.eos_token_ids;
    return std::ranges::find(eos, token) != eos.end();
  }
  /// The text's end comes out, in which a stop string may yet appear.
  void end(FinishReason reason) {
    over_ = true;
    result_.finish_reason = reason;
    std::string rest = stops_.push(decoder_.finish());
    rest += stops_.finish();
    if (!deliver(rest)) {
      result_.finish_reason = FinishReason::kCancelled;
    } else if (stops_.stopped()) {
      result_.finish_reason = FinishReason::kStopString;
    }
  }
  /// What the token completes; false once the receiver has enough.
  bool deliver_text(int token) {
    if (!stops_.is_empty()) return deliver(stops_.push(decoder_.push(token)));
    const std::size_t size = result_.text.size();
    decoder_.push(token, result_.text);
    return !options_.on_text || result_.text.size() == size ||
           options_.on_text(std::string_view(result_.text).substr(size));
  }
  bool deliver(const std::string& text) {
    if (text.empty()) return true;
    result_.text += text;
    return !options_.on_text || options_.on_text(text);
  }

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
