// What must stay true: what one request does wrong, be it a NaN or an exception, changes no other.
#include "engine/generate/generator_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "engine/session/access.h"
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
    if (is_whole_) {
      alone(text, [&] { text.take(drawn_[i], likeliest_[i]); });
    } else {
      text.fail("the round did not come to its end");
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

// One token of each, by the executor where that can.
void GeneratorDevice::draw(std::span<const std::size_t> drawing) {
  attempt(drawing, [&] {
    const bool can_draw = draw_on_executor(drawing);
    draw_on_host(drawing, can_draw);
  });
}

void GeneratorDevice::find_likeliest(std::span<const std::size_t> drawing) {
  likeliest_.resize(running_.size());
  for (const std::size_t i : drawing) {
    likeliest_[i].clear();
    const Continuation& text = running_[i]->text;
    if (text.is_over() || text.options().top_logprobs == 0) continue;
    attempt({&i, 1}, [&] {
      logits_.resize(std::max(logits_.size(), vocab_));
      executor().logits(slot(i), 1, std::span(logits_).first(vocab_));
      text.append_likeliest(std::span(logits_).first(vocab_), likeliest_[i]);
    });
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

// False where it cannot.
bool GeneratorDevice::draw_on_executor(std::span<const std::size_t> drawing) {
  draws_.clear();
  bool logprobs = false;
  for (const std::size_t i : drawing) {
    const Continuation& text = running_[i]->text;
    draws_.push_back({slot(i), text.options().sampler, text.options().sequence, text.step(), text.recent()});
    logprobs = logprobs || text.options().logprobs;
  }
  drawn_tokens_.resize(draws_.size());
  drawn_logprobs_.resize(logprobs ? draws_.size() : 0);
  if (draws_.empty() || !executor().draw(draws_, drawn_tokens_, drawn_logprobs_)) return false;
  for (std::size_t n = 0; n < drawing.size(); ++n) {
    drawn_[drawing[n]] = {drawn_tokens_[n], logprobs ? drawn_logprobs_[n] : 0.0F};
  }
  return true;
}

// Those that the executor left: it cannot draw, or found nothing to draw, for which the host's sampler knows the words.
// Logits of slots side by side are fetched together.
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
        if (can_draw) throw NumericError(fmt::format("step {}: the device found no token to draw", text.step()));
      });
    }
  }
}

}  // namespace mmrec::engine
