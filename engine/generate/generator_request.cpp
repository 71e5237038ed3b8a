// Everything is checked before anything is changed.
#include "engine/generate/generator_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "engine/session/access.h"

namespace mmrec::engine {
namespace {

/// What the sequence has consumed before the prompt, as far as anyone knows.
std::span<const int> known_tokens(const GeneratorRequest& request) {
  if (!request.options.context.empty()) return request.options.context;
  return request.start ? request.start->recent_tokens() : std::span<const int>();
}

/// What generate() would find in a session that has consumed the prompt too.
std::vector<int> tokens_before(const GeneratorRequest& request) {
  const std::span<const int> known = known_tokens(request);
  std::vector<int> all(known.begin(), known.end());
  all.insert(all.end(), request.prompt.begin(), request.prompt.end());
  constexpr auto kMost = static_cast<std::size_t>(Session::kRecentTokens);
  if (request.options.context.empty() && all.size() > kMost) all.erase(all.begin(), all.end() - Session::kRecentTokens);
  return all;
}

/// Callbacks that throw nothing.
GenerateOptions guarded(GenerateOptions options, CallbackFault& fault) {
  if (options.on_text) {
    options.on_text = [&fault, ask = std::move(options.on_text)](std::string_view text) {
      return fault.guard([&] { return ask(text); });
    };
  }
  if (options.on_token) {
    options.on_token = [&fault, ask = std::move(options.on_token)](int token, float logprob) {
      return fault.guard([&] { return ask(token, logprob); });
    };
  }
  if (options.cancelled) {
    options.cancelled = [&fault, ask = std::move(options.cancelled)] { return !fault.guard([&] { return !ask(); }); };
  }
  return options;
}

}  // namespace

std::unique_ptr<RunningRequest> checked_request(GeneratorRequest&& request, Generator::RequestId id,
                                                const Tokenizer& tokenizer, const StateShape& shape,
                                                std::span<const Model> models, CallbackFault& fault) {
  const std::int64_t vocab_size = models.front().info().vocab_size;
  std::optional<models::HostState> state;
  std::int64_t position = 0;
  if (request.start && !request.state.empty()) {
    throw std::invalid_argument("request: found a session to start from and a saved state, expected one of them");
  }
  if (request.start) {
    if (request.start->batch() != 1) {
      throw std::invalid_argument(
          fmt::format("start: found a session of batch {}, expected 1", request.start->batch()));
    }
    const std::shared_ptr<models::Executor>& executor = Access::slots(*request.start).executor();
    if (std::none_of(models.begin(), models.end(), [&](const Model& m) { return Access::executor(m) == executor; })) {
      throw std::invalid_argument("start: found a session of another model, expected one of the generator's");
    }
    position = request.start->position();
  } else if (!request.state.empty()) {
    state = decode_state(request.state, shape);
    position = state->position;
  } else if (!request.options.context.empty()) {
    throw std::invalid_argument(
        fmt::format("context: found {} tokens without a state that has consumed them", request.options.context.size()));
  }
  check_ids(request.prompt, vocab_size, "prompt");
  const std::int64_t joins_at = position + std::ssize(request.prompt);
  if (joins_at == 0) {
    throw std::invalid_argument("prompt: found no tokens and no state to go on from, expected at least one token");
  }
  const std::vector<int> before = tokens_before(request);
  auto running = std::make_unique<RunningRequest>(
      id, Continuation(tokenizer, vocab_size, guarded(std::move(request.options), fault), before, joins_at));
  running->prompt = std::move(request.prompt);
  running->start = std::move(request.start);
  running->state = std::move(state);
  running->position = position;
  running->on_finish = std::move(request.on_finish);
  return running;
}

}  // namespace mmrec::engine
