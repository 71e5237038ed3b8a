// A request to a Generator that was found good.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/callback.h"
#include "engine/continuation.h"
#include "engine/state_format.h"
#include "mmrec/generator.h"
#include "models/executor.h"

namespace mmrec::engine {

struct RunningRequest {
  Generator::RequestId id;
  std::vector<int> prompt;
  std::shared_ptr<const Session> start;
  std::optional<models::HostState> state;
  std::int64_t position;   // consumed so far, those of the starting state included
  bool has_state = false;  // its slot is its own, not yet what was there before
  std::function<void(GenerateResult)> on_finish;
  Continuation text;

  /// Its last token is not consumed.
  bool is_behind() const { return has_state && static_cast<std::uint64_t>(position) < text.step(); }
};

/// Throws as Generator::submit says. The request's callbacks for text and tokens throw nothing: `fault` has it, and
/// outlives the request. `shape` is that of one sequence on `executor`.
std::unique_ptr<RunningRequest> checked_request(GeneratorRequest&& request, Generator::RequestId id,
                                                const Tokenizer& tokenizer, const StateShape& shape,
                                                const models::Executor& executor, CallbackFault& fault);

}  // namespace mmrec::engine
