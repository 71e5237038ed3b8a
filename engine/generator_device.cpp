// What must stay true: what one request does wrong, be it a NaN or an exception, changes no other.
#include "engine/generator_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "engine/access.h"
#include "mmrec/errors.h"

namespace mmrec::engine {
namespace {

constexpr int kMostSlots = 65536;
constexpr int kMostDefaultSlots = 64;
constexpr std::size_t kMostFetched = 64;  // rows of logits at a time

int slot_count(const GeneratorOptions& options, models::Executor& executor) {
  if (options.slots < 0 || options.slots > kMostSlots) {
    throw std::invalid_argument(
        fmt::format("generator option slots: found {}, expected 0..{}", options.slots, kMostSlots));
  }
  const int wanted =
      options.slots > 0 ? options.slots : std::clamp(executor.sequences_of_a_call(), 1, kMostDefaultSlots);
  if (options.memory_bytes == 0) return wanted;
  const std::uint64_t fit = options.memory_bytes / executor.slot_bytes();
  if (fit == 0) {
    throw std::invalid_argument(fmt::format("generator option memory_bytes: found {}, expected at least {}, one state",
                                            options.memory_bytes, executor.slot_bytes()));
  }
  return static_cast<int>(std::min(static_cast<std::uint64_t>(wanted), fit));
}

models::ExecutionOptions execution_of(const GeneratorOptions& options) {
  check_options(options.session);
  return execution_options(options.session);
}

/// What goes wrong here is this request's alone.
template <class Call>
void alone(Continuation& text, Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    text.fail(error.what());
  }
}

}  // namespace

GeneratorDevice::GeneratorDevice(const Model& model, const GeneratorOptions& options)
    : execution_(execution_of(options)),
      slots_(Access::executor(model), slot_count(options, *Access::executor(model)), execution_),
      running_(static_cast<std::size_t>(slots_.count())),
      vocab_(static_cast<std::size_t>(model.info().vocab_size)) {}

std::size_t GeneratorDevice::count() const {
  return static_cast<std::size_t>(
      std::count_if(running_.begin(), running_.end(), [](const auto& request) { return bool(request); }));
}

void GeneratorDevice::put_in_place(std::size_t index) {
  attempt({&index, 1}, [&] {
    RunningRequest& request = *running_[index];
    const models::Slot to = slot(index);
    if (request.start && request.start->position() != request.position) {
      request.text.fail(fmt::format("start: found the session at position {}, expected {}, where it was",
                                    request.start->position(), request.position));
    } else if (request.start) {
      const models::Slots& from = Access::slots(*request.start);
      if (from.executor() == slots_.executor()) {
        executor().copy(from.first(), to, 1);
      } else {
        executor().load(to, from.executor()->save(from.first(), 1, request.position));
      }
    } else if (request.state) {
      executor().load(to, *request.state);
    } else {
      executor().clear(to, 1);
    }
    request.start.reset();
    request.state.reset();
  });
}

void GeneratorDevice::compute() noexcept {
  is_whole_ = fault_.guard([&] {
    drawn_.assign(running_.size(), {});
    step(those([](const RunningRequest& r) { return r.is_behind(); }));
    prefill(those([](const RunningRequest& r) { return !r.prompt.empty(); }));
    draw(those([](const RunningRequest&) { return true; }));
    return true;
  });
}

void GeneratorDevice::take(CallbackFault& fault, PrefillStats& stats) {
  fault_.move_to(fault);
  stats += std::exchange(stats_, {});
  for (const std::size_t i : those([](const RunningRequest&) { return true; })) {
    Continuation& text = running_[i]->text;
    if (is_whole_) {
      alone(text, [&] { text.take(drawn_[i]); });
    } else {
      text.fail("the round did not come to its end");
    }
  }
}

void GeneratorDevice::step(std::span<const std::size_t> going) {
  if (going.empty()) return;
  attempt(going, [&] {
    std::vector<int> tokens;
    std::vector<models::Run> runs;
    for (const std::size_t i : going) {
      runs.push_back({slot(i), running_[i]->position++, std::ssize(tokens), 1});
      tokens.push_back(*running_[i]->text.unconsumed());
    }
    executor().step(tokens, runs, execution_);
  });
}

void GeneratorDevice::prefill(std::span<const std::size_t> joining) {
  if (joining.empty()) return;
  attempt(joining, [&] {
    std::vector<int> tokens;
    std::vector<models::Run> runs;
    for (const std::size_t i : joining) {
      RunningRequest& request = *running_[i];
      runs.push_back({slot(i), request.position, std::ssize(tokens), std::ssize(request.prompt)});
      tokens.insert(tokens.end(), request.prompt.begin(), request.prompt.end());
      request.position += std::ssize(request.prompt);
      request.prompt = {};
    }
    stats_ += executor().run({.tokens = tokens, .runs = runs}, execution_).stats;
  });
}

// One token of each, by the executor where that can.
void GeneratorDevice::draw(std::span<const std::size_t> drawing) {
  attempt(drawing, [&] {
    const bool can_draw = draw_on_executor(drawing);
    draw_on_host(drawing, can_draw);
  });
}

// False where it cannot.
bool GeneratorDevice::draw_on_executor(std::span<const std::size_t> drawing) {
  std::vector<models::Draw> draws;
  std::vector<std::size_t> of;
  bool logprobs = false;
  for (const std::size_t i : drawing) {
    const Continuation& text = running_[i]->text;
    if (text.draws_on_host()) continue;
    of.push_back(i);
    draws.push_back({slot(i), text.options().sampler, text.options().sequence, text.step()});
    logprobs = logprobs || text.options().logprobs;
  }
  std::vector<int> tokens(draws.size());
  std::vector<float> values(logprobs ? draws.size() : 0);
  if (draws.empty() || !executor().draw(draws, tokens, values)) return false;
  for (std::size_t n = 0; n < of.size(); ++n) drawn_[of[n]] = {tokens[n], logprobs ? values[n] : 0.0F};
  return true;
}

// Those that the executor left: it cannot draw, needs to know the tokens so far, or found nothing to draw, for which
// the host's sampler knows the words. Logits of slots side by side are fetched together.
void GeneratorDevice::draw_on_host(std::span<const std::size_t> drawing, bool can_draw) {
  for (std::size_t begin = 0; begin < drawing.size();) {
    std::size_t count = 0;
    while (count < kMostFetched && begin + count < drawing.size() && drawing[begin + count] == drawing[begin] + count &&
           drawn_[drawing[begin + count]].token < 0) {
      ++count;
    }
    if (count == 0) {
      ++begin;
      continue;
    }
    logits_.resize(std::max(logits_.size(), count * vocab_));
    executor().logits(slot(drawing[begin]), static_cast<int>(count), std::span(logits_).first(count * vocab_));
    for (std::size_t n = 0; n < count; ++n, ++begin) {
      Continuation& text = running_[drawing[begin]]->text;
      alone(text, [&] {
        drawn_[drawing[begin]] = text.sample(std::span(logits_).subspan(n * vocab_, vocab_));
        if (can_draw && !text.draws_on_host()) {
          throw NumericError(fmt::format("step {}: the device found no token to draw", text.step()));
        }
      });
    }
  }
}

}  // namespace mmrec::engine
