// A request to a generator, and a device: its slots, the requests in them, and what their rounds compute.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/generate/continuation.h"
#include "engine/generate/drawer.h"
#include "engine/session/callback.h"
#include "mmrec/generator.h"
#include "mmrec/model.h"
#include "models/runtime/executor.h"

namespace mmrec::engine {

/// A request that passed the checks of Generator::submit.
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

class GeneratorDevice {
 public:
  GeneratorDevice(const Model& model, const GeneratorOptions& options);

  /// By slot, null where it is free.
  std::vector<std::unique_ptr<RunningRequest>>& running() { return running_; }
  const std::vector<std::unique_ptr<RunningRequest>>& running() const { return running_; }
  std::size_t count() const;

  /// Puts the state from which a new request starts into its slot.
  void put_in_place(std::size_t index);
  /// The next token of each sequence: one step of the sequences with a token that is not consumed, one prefill of new
  /// prompts, one draw. If the executor steps by itself, it goes on with these tokens while the host looks at their
  /// texts. A sequence whose text ends there has taken one step too many, which nobody sees. Calls no callback. May run
  /// in another thread; its requests must then be left alone.
  void compute() noexcept;
  /// Gives these tokens to their texts; faults of the device go to `fault`.
  void take(CallbackFault& fault, PrefillStats& stats);

 private:
  /// Slots of the sequences that go on and for which is(request).
  template <class Is>
  std::vector<std::size_t> those(Is is) const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < running_.size(); ++i) {
      if (running_[i] && !running_[i]->text.is_over() && is(*running_[i])) found.push_back(i);
    }
    return found;
  }

  /// token_of(slot): what its sequence consumes.
  template <class TokenOf>
  void step(std::span<const std::size_t> going, TokenOf token_of);
  void prefill(std::span<const std::size_t> joining);
  void draw(std::span<const std::size_t> drawing);
  void step_ahead(std::span<const std::size_t> drawing);
  /// The likeliest tokens, for the texts that want them.
  void find_likeliest(std::span<const std::size_t> drawing);

  /// Makes a call of the executor. If it fails, the state of the sequences in it is unknown: they fail too.
  template <class Call>
  void attempt(std::span<const std::size_t> of, Call call) {
    try {
      call();
    } catch (const std::exception& error) {
      fault_.keep();
      for (const std::size_t i : of) running_[i]->text.fail(error.what());
    }
  }

  models::Executor& executor() const { return *slots_.executor(); }
  /// The logits of `count` slots from `first` on, until the next call.
  std::span<const float> logits(models::Slot first, std::size_t count) {
    logits_.resize(std::max(logits_.size(), count * vocab_));
    const auto rows = std::span(logits_).first(count * vocab_);
    executor().logits(first, static_cast<int>(count), rows);
    return rows;
  }
  models::Slot slot(std::size_t index) const { return slots_[static_cast<int>(index)]; }

  models::ExecutionOptions execution_;
  models::Slots slots_;
  std::vector<std::unique_ptr<RunningRequest>> running_;  // [slots]
  std::size_t vocab_;
  std::vector<Sample> drawn_;                   // [slots], in this round
  std::vector<std::vector<Sample>> likeliest_;  // [slots], likewise
  bool is_whole_ = true;                        // this round came to its end
  CallbackFault fault_;
  PrefillStats stats_;  // of this round

  // Scratch of a round.
  std::vector<int> tokens_;
  std::vector<models::Run> runs_;
  std::vector<models::Draw> draws_;
  std::vector<Sample> samples_;  // of draws_
  Drawer drawer_;
  std::vector<float> logits_;  // of slots side by side, [n, V]
};

}  // namespace mmrec::engine
