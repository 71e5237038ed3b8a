// A request to a generator, and a device: its places, the requests in them, and what their rounds compute.
//
// A device draws for as many requests as there are slots, and has places for some more. There the prompts of those that
// come next are consumed, several together, so that no slot waits for a prompt.
//
// Must stay true: a fault of one request, a NaN or an exception, changes no other request.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/generate/continuation.h"
#include "engine/generate/drawer.h"
#include "engine/require.h"
#include "engine/session/access.h"
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
  std::size_t consumed = 0;      // tokens of the prompt
  std::shared_ptr<const Session> start = {};
  std::optional<models::HostState> state = {};
  std::int64_t position = 0;  // consumed so far, those of the starting state included
  bool has_slot = false;      // which it keeps to its end
  std::function<void(GenerateResult)> on_finish = {};

  std::span<const int> rest() const { return std::span(prompt).subspan(consumed); }
  bool has_joined() const { return prompt.empty(); }
  /// Waits for a slot.
  bool is_ready() const { return has_joined() && !has_slot; }
  /// Its last token is not consumed.
  bool is_behind() const { return has_joined() && static_cast<std::uint64_t>(position) < text.step(); }
};

class GeneratorDevice {
 public:
  GeneratorDevice(const Model& model, const GeneratorOptions& options)
      : execution_(execution_options(options.session)),
        slots_(static_cast<std::size_t>(slot_count(options, *Access::executor(model)))),
        places_(Access::executor(model), place_count(options, slots_, *Access::executor(model)), execution_),
        running_(static_cast<std::size_t>(places_.count())),
        vocab_(static_cast<std::size_t>(model.info().vocab_size)) {}

  std::size_t slots() const { return slots_; }
  /// So many requests join together while more wait: as many as have places but no slots.
  std::size_t party() const { return std::max<std::size_t>(running_.size() - slots_, 1); }
  /// By place, null where it is free.
  std::vector<std::unique_ptr<RunningRequest>>& running() { return running_; }
  const std::vector<std::unique_ptr<RunningRequest>>& running() const { return running_; }
  std::size_t count() const {
    return static_cast<std::size_t>(std::ranges::count_if(running_, [](const auto& request) { return bool(request); }));
  }

  /// Puts the states from which new requests start into their places, whose indices rise. Empty slots side by side are
  /// cleared together: on a device each call takes some microseconds.
  void put_in_place(std::span<const std::size_t> joining) {
    while (!joining.empty()) {
      const auto is_empty = [&](std::size_t n) {
        const RunningRequest& request = *running_[joining[n]];
        return !request.start && !request.state && joining[n] == joining[0] + n;
      };
      std::size_t count = 0;
      while (count < joining.size() && is_empty(count)) ++count;
      if (count == 0) {
        put_in_place(joining[0]);
      } else {
        attempt(joining.first(count), [&] { executor().clear(slot(joining[0]), static_cast<int>(count)); });
      }
      joining = joining.subspan(std::max<std::size_t>(count, 1));
    }
  }

  /// The next token of each sequence: one step of the sequences with a token that is not consumed, one prefill of new
  /// prompts or of pieces of them, one draw of all that have consumed theirs. If the executor steps by itself, it goes
  /// on with these tokens while the host looks at their texts, if it can without the host between. A sequence whose
  /// text ends there has taken one step too many, which nobody sees. Calls no callback. May run in another thread; its
  /// requests must then be left alone.
  void compute() noexcept {
    is_whole_ = fault_.guard([&] {
      drawn_.assign(running_.size(), {});
      step(those([](const RunningRequest& r) { return r.is_behind(); }),
           [&](std::size_t i) { return *running_[i]->text.unconsumed(); });
      prefill(those([](const RunningRequest& r) { return !r.has_joined(); }));
      give_slots();
      if (drawing_.empty()) return true;
      const bool has_stepped = draw(drawing_);
      find_likeliest(drawing_);
      if (executor().steps_by_itself() && !has_stepped) step_ahead(drawing_);
      return true;
    });
  }
  /// Gives these tokens to their texts; faults of the device go to `fault`.
  void take(CallbackFault& fault, PrefillStats& stats) {
    fault_.move_to(fault);
    stats += std::exchange(stats_, {});
    for (const std::size_t i : those([](const RunningRequest&) { return true; })) {
      Continuation& text = running_[i]->text;
      try {
        if (!is_whole_) throw std::runtime_error("the round did not come to its end");
        if (running_[i]->has_slot) text.take(drawn_[i], likeliest_[i]);
      } catch (const std::exception& error) {  // of this request alone
        text.fail(error.what());
      }
    }
  }

 private:
  static constexpr int kMostSlots = 65536;
  static constexpr std::int64_t kPiecesAlone = 8;  // in a call that nobody waits for but a cancelling caller
  static constexpr int kMostDefaultSlots = 1024;   // more were hardly faster on an H200, and each joins later
  static constexpr std::size_t kMostWaiting = 64;  // whose prompts together fill a device

  static int slot_count(const GeneratorOptions& options, models::Executor& executor) {
    require(options.slots >= 0 && options.slots <= kMostSlots, "generator option slots: found {}, expected 0..{}",
            options.slots, kMostSlots);
    auto count = static_cast<std::uint64_t>(options.slots);
    if (count == 0) {
      count = static_cast<std::uint64_t>(std::clamp(executor.sequences_of_a_step(), 1, kMostDefaultSlots));
      if (options.requests > 0) count = std::min(count, options.requests);
    }
    if (options.memory_bytes > 0) {
      const std::uint64_t fit = options.memory_bytes / executor.slot_bytes();
      require(fit != 0, "generator option memory_bytes: found {}, expected at least {}, one state",
              options.memory_bytes, executor.slot_bytes());
      count = std::min(count, fit);
    }
    return static_cast<int>(count);
  }

  /// Half as many more as slots, up to kMostWaiting, unless there are fewer requests or no memory.
  static int place_count(const GeneratorOptions& options, std::size_t slots, models::Executor& executor) {
    std::size_t ahead = std::min(slots / 2, kMostWaiting);
    if (options.requests > 0) ahead = std::min<std::size_t>(ahead, std::max(options.requests, slots) - slots);
    if (options.memory_bytes > 0)
      ahead = std::min<std::size_t>(ahead, options.memory_bytes / executor.slot_bytes() - slots);
    return static_cast<int>(slots + ahead);
  }

  /// Free slots go to those whose prompts are consumed, the oldest first. On a device each keeps its turn in a draw, so
  /// that its rule stays where it is.
  void give_slots() {
    constexpr auto kFree = ~std::size_t{0};
    std::vector<std::size_t> ready = those([](const RunningRequest& r) { return r.is_ready(); });
    std::ranges::sort(ready, {}, [&](std::size_t i) { return running_[i]->id; });
    for (std::size_t& i : drawing_) {
      if (!running_[i] || !running_[i]->has_slot || running_[i]->text.is_over()) i = kFree;
    }
    auto turn = drawing_.begin();
    for (const std::size_t i : ready) {
      turn = std::find(turn, drawing_.end(), kFree);
      if (turn == drawing_.end()) {
        if (drawing_.size() == slots_) break;
        turn = drawing_.insert(turn, kFree);
      }
      *turn = i;
      running_[i]->has_slot = true;
    }
    for (std::size_t n = 0; n < drawing_.size();) {  // the last take the turns of those that have no heirs
      if (drawing_[n] != kFree) {
        ++n;
      } else {
        drawing_[n] = drawing_.back();
        drawing_.pop_back();
      }
    }
    // The host fetches the logits of slots side by side together.
    if (!executor().steps_by_itself()) std::ranges::sort(drawing_);
  }
  /// Places of the sequences that go on and for which is(request).
  template <class Is>
  std::vector<std::size_t> those(Is is) const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < running_.size(); ++i) {
      if (running_[i] && !running_[i]->text.is_over() && is(*running_[i])) found.push_back(i);
    }
    return found;
  }

  /// The state that a request goes on from.
  void put_in_place(std::size_t index) {
    attempt({&index, 1}, [&] {
      RunningRequest& request = *running_[index];
      const models::Slot to = slot(index);
      if (request.start && request.start->position() != request.position) {
        request.text.fail(fmt::format("start: found the session at position {}, expected {}, where it was",
                                      request.start->position(), request.position));
      } else if (request.start) {
        const models::Slots& from = Access::slots(*request.start);
        if (from.executor() == places_.executor()) {
          executor().copy(from.first(), to, 1, request.position);
        } else {
          executor().load(to, from.executor()->save(from.first(), 1, request.position));
        }
      } else {
        executor().load(to, *request.state);
      }
      request.start.reset();
      request.state.reset();
    });
  }
  /// token_of(slot): what its sequence consumes.
  template <class TokenOf>
  void step(std::span<const std::size_t> going, TokenOf token_of) {
    if (going.empty()) return;
    attempt(going, [&] {
      tokens_.clear();
      runs_.clear();
      for (const std::size_t i : going) {
        runs_.push_back({slot(i), running_[i]->position++, std::ssize(tokens_), 1});
        tokens_.push_back(token_of(i));
      }
      executor().step(tokens_, runs_, execution_);
    });
  }
  /// Consumes prompts, or pieces of them: so few rows that nobody waits for long.
  void prefill(std::vector<std::size_t> joining) {
    if (joining.empty()) return;
    const auto waits = [](const auto& request) { return request && !request->text.is_over() && request->has_slot; };
    const bool others_wait = std::ranges::any_of(running_, waits);
    std::int64_t left = executor().rows_of_a_piece(joining.size()) * (others_wait ? 1 : kPiecesAlone);
    // The oldest has half of them, because a long one must come to its end too. Then the shortest come first.
    std::iter_swap(joining.begin(),
                   std::ranges::min_element(joining, {}, [&](std::size_t i) { return running_[i]->id; }));
    std::ranges::stable_sort(joining.begin() + 1, joining.end(), {},
                             [&](std::size_t i) { return running_[i]->rest().size(); });
    std::vector<std::pair<std::size_t, std::int64_t>> pieces;  // slots, and rows of each
    for (const std::size_t i : joining) {
      const RunningRequest& request = *running_[i];
      const bool is_oldest = pieces.empty();
      const std::int64_t rest = std::ssize(request.rest());
      const std::int64_t most = is_oldest && joining.size() > 1 ? left / 2 : left;
      const std::int64_t rows = rest <= most ? rest : executor().piece(request.position, rest, most);
      if (rows > most && !is_oldest) break;
      pieces.emplace_back(i, rows);
      left -= std::min(rows, most);
    }
    std::ranges::sort(pieces);
    std::vector<std::size_t> consuming;
    consuming.reserve(pieces.size());
    for (const auto& [i, rows] : pieces) consuming.push_back(i);
    attempt(consuming, [&] {
      tokens_.clear();
      runs_.clear();
      bool wants_logits = false;
      for (const auto& [i, rows] : pieces) {
        RunningRequest& request = *running_[i];
        const std::span<const int> piece = request.rest().first(static_cast<std::size_t>(rows));
        runs_.push_back({slot(i), request.position, std::ssize(tokens_), rows});
        tokens_.insert(tokens_.end(), piece.begin(), piece.end());
        request.position += rows;
        request.consumed += piece.size();
        if (!request.rest().empty()) continue;
        request.prompt = {};
        request.consumed = 0;
        wants_logits = true;
      }
      stats_ += executor().run({.tokens = tokens_, .runs = runs_, .wants_logits = wants_logits}, execution_).stats;
    });
  }
  /// One token of each. Returns whether they have stepped, too.
  bool draw(std::span<const std::size_t> drawing) {
    bool has_stepped = false;
    attempt(drawing, [&] {
      draws_.clear();
      runs_.clear();
      bool logprobs = false;
      bool likeliest = false;  // are taken from the logits before the step
      bool goes_on = false;
      for (const std::size_t i : drawing) {
        const Continuation& text = running_[i]->text;
        runs_.push_back({slot(i), running_[i]->position, std::ssize(draws_), 1});
        draws_.push_back(text.draw(slot(i)));
        logprobs = logprobs || text.options().logprobs;
        likeliest = likeliest || text.options().top_logprobs > 0;
        goes_on = goes_on || !text.is_next_last();
      }
      if (likeliest || !goes_on) runs_.clear();
      samples_.assign(draws_.size(), {});
      has_stepped = drawer_.draw(
          executor(), execution_, draws_, logprobs, samples_,
          [&](std::size_t first, std::size_t count) { return logits(draws_[first].slot, count); },
          [&](std::size_t n, const std::exception& error) { running_[drawing[n]]->text.fail(error.what()); }, runs_);
      for (std::size_t n = 0; n < drawing.size(); ++n) {
        drawn_[drawing[n]] = samples_[n];
        if (has_stepped) ++running_[drawing[n]]->position;
      }
    });
    return has_stepped;
  }
  /// The step of those whose sequences go on unless their texts end them.
  void step_ahead(std::span<const std::size_t> drawing) {
    std::vector<std::size_t> going;
    for (const std::size_t i : drawing) {
      const Continuation& text = running_[i]->text;
      if (!text.is_over() && !text.ends_with(drawn_[i].token)) going.push_back(i);
    }
    step(going, [&](std::size_t i) { return drawn_[i].token; });
  }
  /// The likeliest tokens, for the texts that want them.
  void find_likeliest(std::span<const std::size_t> drawing) {
    likeliest_.resize(running_.size());
    for (const std::size_t i : drawing) {
      likeliest_[i].clear();
      const Continuation& text = running_[i]->text;
      if (text.is_over() || text.options().top_logprobs == 0) continue;
      attempt({&i, 1}, [&] { text.append_likeliest(logits(slot(i), 1), likeliest_[i]); });
    }
  }

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

  models::Executor& executor() const { return *places_.executor(); }
  /// The logits of `count` slots from `first` on, until the next call.
  std::span<const float> logits(models::Slot first, std::size_t count) {
    logits_.resize(std::max(logits_.size(), count * vocab_));
    const auto rows = std::span(logits_).first(count * vocab_);
    executor().logits(first, static_cast<int>(count), rows);
    return rows;
  }
  models::Slot slot(std::size_t index) const { return places_[static_cast<int>(index)]; }

  models::ExecutionOptions execution_;
  std::size_t slots_;
  models::Slots places_;
  std::vector<std::unique_ptr<RunningRequest>> running_;  // [places]
  std::size_t vocab_;
  std::vector<std::size_t> drawing_;            // places of those with slots, in their turns
  std::vector<Sample> drawn_;                   // [places], in this round
  std::vector<std::vector<Sample>> likeliest_;  // [places], likewise
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
