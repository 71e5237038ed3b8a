// The generation loop: draw, hand over, step.
#include "mmrec/generate.h"

#include <fmt/format.h>

#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/generate/continuation.h"
#include "engine/generate/token_drawer.h"

namespace mmrec {

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
    case FinishReason::kError:
      return "error";
  }
  return "unknown";
}

GenerateResult generate(Session& session, const Tokenizer& tokenizer, const GenerateOptions& options) {
  if (session.batch() != 1) {
    throw std::invalid_argument(fmt::format("generate: found a session of batch {}, expected 1", session.batch()));
  }
  if (session.position() < 1) throw std::invalid_argument("generate: found a session at position 0, expected a prompt");
  const std::span<const int> before = options.context.empty() ? session.recent_tokens() : options.context;
  engine::Continuation text(tokenizer, session.vocab_size(), options, before, session.position());
  const SamplerOptions& chain = text.options().sampler;
  const std::int64_t most = options.max_tokens < 0 ? std::numeric_limits<std::int64_t>::max() : options.max_tokens;
  const std::size_t window = std::min(before.size(), static_cast<std::size_t>(chain.repetition_window));
  engine::TokenDrawer drawer(session, chain, before.last(window), options.sequence, most, options.logprobs,
                             options.top_logprobs > 0);
  std::vector<Sample> likeliest;
  while (text.goes_on()) {
    const Sample drawn = drawer.next();
    likeliest.clear();
    if (options.top_logprobs > 0) text.append_likeliest(session.logits(), likeliest);
    text.take(drawn, likeliest);
  }
  drawer.finish();
  return std::move(text.result());
}

}  // namespace mmrec
