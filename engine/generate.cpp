// The generation loop: draw, decode, look for a stop string, step.
#include "mmrec/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "engine/stop_matcher.h"
#include "engine/token_drawer.h"

namespace mmrec {
namespace {

void check_ids(std::span<const int> ids, std::int64_t vocab, const char* what) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) {
      throw std::invalid_argument(fmt::format("{} token {} has id {}, expected 0..{}", what, i, ids[i], vocab - 1));
    }
  }
}

/// Text from tokens as it becomes final; what cannot be delivered any more is dropped.
class Output {
 public:
  /// `before` are the tokens that the text follows; `at_start`: all of them.
  Output(const Tokenizer& tokenizer, std::span<const int> before, bool at_start, const GenerateOptions& options,
         std::string& text)
      : decoder_(tokenizer, at_start), stops_(options.stop), on_text_(options.on_text), text_(text) {
    for (const int token : before) {
      if (token < tokenizer.vocab_size()) decoder_.push(token);
    }
  }

  /// False once nothing more is wanted: stopped() or the receiver cancelled.
  bool push(int token) { return deliver(stops_.push(decoder_.push(token))) && !stops_.stopped(); }

  /// The end of the text, unless push() has returned false.
  bool finish() {
    std::string rest = stops_.push(decoder_.finish());
    return deliver(rest += stops_.finish());
  }

  bool stopped() const { return stops_.stopped(); }

 private:
  bool deliver(const std::string& text) {
    if (text.empty()) return true;
    text_ += text;
    return !on_text_ || on_text_(text);
  }

  StreamDecoder decoder_;
  engine::StopMatcher stops_;
  const std::function<bool(std::string_view)>& on_text_;
  std::string& text_;
};

}  // namespace

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kLength:
      return "length";
    case FinishReason::kEndOfSequence:
      return "eos";
    case FinishReason::kStopString:
      return "stop";
    case FinishReason::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

GenerateResult generate(Session& session, const Tokenizer& tokenizer, const GenerateOptions& options) {
  if (session.batch() != 1) {
    throw std::invalid_argument(fmt::format("generate: found a session of batch {}, expected 1", session.batch()));
  }
  if (session.position() < 1) throw std::invalid_argument("generate: found a session at position 0, expected a prompt");
  if (options.max_tokens < -1) {
    throw std::invalid_argument(fmt::format("max_tokens: found {}, expected >= -1", options.max_tokens));
  }
  check_ids(options.context, session.vocab_size(), "context");
  check_ids(options.eos_token_ids, session.vocab_size(), "end-of-sequence");

  SamplerOptions sampler_options = options.sampler;
  (void)Sampler(sampler_options);  // checks the options as they were given
  if (const int known = tokenizer.vocab_size();
      sampler_options.vocab_limit == 0 || sampler_options.vocab_limit > known) {
    sampler_options.vocab_limit = known;
  }

  GenerateResult result;
  const std::span<const int> before = options.context.empty() ? session.recent_tokens() : options.context;
  const bool has_all = static_cast<std::int64_t>(before.size()) >= session.position();
  Output output(tokenizer, before, has_all, options, result.text);
  // Only the end of what came before can count as recent.
  const std::size_t window = std::min(before.size(), static_cast<std::size_t>(sampler_options.repetition_window));

  const std::int64_t max_tokens =
      options.max_tokens < 0 ? std::numeric_limits<std::int64_t>::max() : options.max_tokens;
  engine::TokenDrawer drawer(session, sampler_options, before.last(window), options.sequence, max_tokens,
                             options.logprobs);
  for (std::int64_t n = 0; n < max_tokens; ++n) {
    if (options.cancelled && options.cancelled()) {
      result.finish_reason = FinishReason::kCancelled;
      break;
    }
    const Sample drawn = drawer.next();
    if (std::find(options.eos_token_ids.begin(), options.eos_token_ids.end(), drawn.token) !=
        options.eos_token_ids.end()) {
      result.finish_reason = FinishReason::kEndOfSequence;
      break;
    }
    result.tokens.push_back(drawn.token);
    if (options.logprobs) result.logprobs.push_back(drawn.logprob);
    if (!output.push(drawn.token)) {
      result.finish_reason = output.stopped() ? FinishReason::kStopString : FinishReason::kCancelled;
      drawer.finish();
      return result;
    }
  }
  drawer.finish();
  if (!output.finish()) {
    result.finish_reason = FinishReason::kCancelled;
  } else if (output.stopped()) {
    result.finish_reason = FinishReason::kStopString;
  }
  return result;
}

}  // namespace mmrec
