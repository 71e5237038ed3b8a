// A request to a Generator that was found good.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/generate/continuation.h"
#include "engine/session/callback.h"
#include "engine/session/state_format.h"
#include "mmrec/generator.h"
#include "models/runtime/executor.h"

namespace mmrec::engine {

struct RunningRequest {
  RunningRequest(Generator::RequestId its_id, Continuation&& its_text) : id(its_id), text(std::move(its_text)) {}

  Generator::RequestId id;
  Continuation text;
  std::vector<int> prompt = {};  // until it is consumed
  std::shared_ptr<const Session> start = {};
  std::optional<models::HostState> state = {};
  std::int64_t position = 0;  // consumed so far, those of the starting state included
  std::function<void(GenerateResult)> on_finish = {};

  /// Its last token is not consumed.
  bool is_behind() const { return prompt.empty() && static_cast<std::uint64_t>(position) < text.step(); }
};

/// Throws as Generator::submit says. The request's callbacks for text and tokens throw nothing: `fault` has it, and
/// outlives the request. `shape` is that of one sequence of `models`, the generator's.
std::unique_ptr<RunningRequest> checked_request(GeneratorRequest&& request, Generator::RequestId id,
                                                const Tokenizer& tokenizer, const StateShape& shape,
                                                std::span<const Model> models, CallbackFault& fault);

}  // namespace mmrec::engine
