// Must stay true: a fault of one request, a NaN or an exception, changes no other request.
#include "engine/generate/generator_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "engine/require.h"
#include "engine/session/access.h"

namespace mmrec::engine {
namespace {

constexpr int kMostSlots = 65536;
constexpr int kMostDefaultSlots = 64;

int slot_count(const GeneratorOptions& options, models::Executor& executor) {
  require(options.slots >= 0 && options.slots <= kMostSlots, "generator option slots: found {}, expected 0..{}",
          options.slots, kMostSlots);
  const int wanted =
      options.slots > 0 ? options.slots : std::clamp(executor.sequences_of_a_call(), 1, kMostDefaultSlots);
  if (options.memory_bytes == 0) return wanted;
  const std::uint64_t fit = options.memory_bytes / executor.slot_bytes();
  require(fit != 0, "generator option memory_bytes: found {}, expected at least {}, one state", options.memory_bytes,
          executor.slot_bytes());
  return static_cast<int>(std::min(static_cast<std::uint64_t>(wanted), fit));
}

models::ExecutionOptions execution_of(const GeneratorOptions& options) {
  check_options(options.session);
  return execution_options(options.session);
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
        executor().copy(from.first(), to, 1, request.position);
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
    step(those([](const RunningRequest& r) { return r.is_behind(); }),
         [&](std::size_t i) { return *running_[i]->text.unconsumed(); });
    prefill(those([](const RunningRequest& r) { return !r.prompt.empty(); }));
    const std::vector<std::size_t> drawing = those([](const RunningRequest&) { return true; });
    draw(drawing);
    find_likeliest(drawing);
    if (executor().steps_by_itself()) step_ahead(drawing);
    return true;
  });
}

void GeneratorDevice::take(CallbackFault& fault, PrefillStats& stats) {
  fault_.move_to(fault);
  stats += std::exchange(stats_, {});
  for (const std::size_t i : those([](const RunningRequest&) { return true; })) {
    Continuation& text = running_[i]->text;
    try {
      if (!is_whole_) throw std::runtime_error("the round did not come to its end");
      text.take(drawn_[i], likeliest_[i]);
    } catch (const std::exception& error) {  // of this request alone
      text.fail(error.what());
    }
  }
}

template <class TokenOf>
void GeneratorDevice::step(std::span<const std::size_t> going, TokenOf token_of) {
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

void GeneratorDevice::prefill(std::span<const std::size_t> joining) {
  if (joining.empty()) return;
  attempt(joining, [&] {
    tokens_.clear();
    runs_.clear();
    for (const std::size_t i : joining) {
      RunningRequest& request = *running_[i];
      runs_.push_back({slot(i), request.position, std::ssize(tokens_), std::ssize(request.prompt)});
      tokens_.insert(tokens_.end(), request.prompt.begin(), request.prompt.end());
      request.position += std::ssize(request.prompt);
      request.prompt = {};
    }
    stats_ += executor().run({.tokens = tokens_, .runs = runs_}, execution_).stats;
  });
}

// One token of each.
void GeneratorDevice::draw(std::span<const std::size_t> drawing) {
  attempt(drawing, [&] {
    draws_.clear();
    bool logprobs = false;
    for (const std::size_t i : drawing) {
      draws_.push_back(running_[i]->text.draw(slot(i)));
      logprobs = logprobs || running_[i]->text.options().logprobs;
    }
    samples_.assign(draws_.size(), {});
    drawer_.draw(
        executor(), draws_, logprobs, samples_,
        [&](std::size_t first, std::size_t count) { return logits(draws_[first].slot, count); },
        [&](std::size_t n, const std::exception& error) { running_[drawing[n]]->text.fail(error.what()); });
    for (std::size_t n = 0; n < drawing.size(); ++n) drawn_[drawing[n]] = samples_[n];
  });
}

void GeneratorDevice::find_likeliest(std::span<const std::size_t> drawing) {
  likeliest_.resize(running_.size());
  for (const std::size_t i : drawing) {
    likeliest_[i].clear();
    const Continuation& text = running_[i]->text;
    if (text.is_over() || text.options().top_logprobs == 0) continue;
    attempt({&i, 1}, [&] { text.append_likeliest(logits(slot(i), 1), likeliest_[i]); });
  }
}

// The step of those whose sequences go on unless their texts end them.
void GeneratorDevice::step_ahead(std::span<const std::size_t> drawing) {
  std::vector<std::size_t> going;
  for (const std::size_t i : drawing) {
    const Continuation& text = running_[i]->text;
    if (!text.is_over() && !text.ends_with(drawn_[i].token)) going.push_back(i);
  }
  step(going, [&](std::size_t i) { return drawn_[i].token; });
}

}  // namespace mmrec::engine
