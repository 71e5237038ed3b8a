// Continuous batching: rounds of one packed prefill of those who join, one step of all others and one draw.
//
// What must stay true: callbacks are called outside the executor; what one request does, be it a NaN or an exception,
// changes no other; a drawn token is consumed in the next round, when it is known that its sequence goes on. An
// executor that steps by itself does so while the host looks at the text: whose text ends there has taken a step too
// many, which nobody sees.
#include "mmrec/generator.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <stdexcept>
#include <utility>

#include "engine/access.h"
#include "engine/generator_request.h"
#include "mmrec/errors.h"

namespace mmrec {
namespace {

using Request = engine::RunningRequest;

constexpr int kMostSlots = 65536;
constexpr int kMostDefaultSlots = 64;
constexpr std::size_t kMostFetched = 64;  // rows of logits at a time
constexpr std::size_t kParties = 8;       // of those who fill all slots: who joins together
constexpr int kMostHeld = 32;             // rounds that a slot stays free for others

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
  engine::check_options(options.session);
  return engine::execution_options(options.session);
}

}  // namespace

struct Generator::Impl {
  Impl(const Model& model, Tokenizer its_tokenizer, const GeneratorOptions& options)
      : tokenizer(std::move(its_tokenizer)),
        shape(engine::shape_of(engine::Access::config(model), 1, model.info().fingerprint)),
        execution(execution_of(options)),
        slots(engine::Access::executor(model), slot_count(options, *engine::Access::executor(model)), execution),
        running(static_cast<std::size_t>(slots.count())) {}

  models::Executor& executor() const { return *slots.executor(); }
  models::Slot slot(std::size_t index) const { return slots[static_cast<int>(index)]; }

  void finish(std::unique_ptr<Request> request) {
    if (!request->on_finish) return;
    fault.guard([&] { return request->on_finish(std::move(request->text.result())), true; });
  }

  // --- A round

  void round() {
    const RequestId end = next_id;  // what callbacks submit waits
    for (std::size_t n = dropped.size(); n > 0; --n) {
      dropped.front()->text.goes_on();  // which ends it
      std::unique_ptr<Request> request = std::move(dropped.front());
      dropped.pop_front();
      finish(std::move(request));
    }
    for (std::unique_ptr<Request>& request : running) {
      if (request) ask(request);
    }
    admit(end);
    step(those([](const Request& r) { return r.is_behind(); }),
         [&](std::size_t i) { return *running[i]->text.unconsumed(); });
    prefill(those([](const Request& r) { return !r.has_state; }));
    draw(those([](const Request&) { return true; }));
    for (std::unique_ptr<Request>& request : running) {
      if (request && request->text.is_over()) finish(std::move(request));
    }
  }

  /// Slots whose sequences go on and are such.
  template <class Is>
  std::vector<std::size_t> those(Is is) const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < running.size(); ++i) {
      if (running[i] && !running[i]->text.is_over() && is(*running[i])) found.push_back(i);
    }
    return found;
  }

  /// Whether it goes on: else it finishes here.
  void ask(std::unique_ptr<Request>& request) {
    if (!request->text.goes_on()) finish(std::move(request));
  }

  /// Requests take the lowest free slots, so that those in use lie close together. While more wait than there is room
  /// for, some are let in together: the prompts of several take hardly longer than one, and nobody steps meanwhile.
  void admit(RequestId end) {
    const auto free = static_cast<std::size_t>(std::count(running.begin(), running.end(), nullptr));
    const std::size_t together = std::max<std::size_t>(running.size() / kParties, 1);
    const bool is_enough = free == running.size() || free >= std::min(together, waiting.size());
    if (free > 0 && !is_enough && held++ < kMostHeld) return;
    if (free > 0) held = 0;
    for (std::unique_ptr<Request>& place : running) {
      while (!place && !waiting.empty() && waiting.begin()->first < end) {
        place = std::move(waiting.extract(waiting.begin()).mapped());
        ask(place);
      }
    }
  }

  /// token_of(slot): what its sequence consumes.
  template <class TokenOf>
  void step(std::span<const std::size_t> going, TokenOf token_of) {
    if (going.empty()) return;
    attempt(going, [&] {
      tokens.clear();
      runs.clear();
      for (const std::size_t i : going) {
        runs.push_back({slot(i), running[i]->position++, std::ssize(tokens), 1});
        tokens.push_back(token_of(i));
      }
      executor().step(tokens, runs, execution);
    });
  }

  void prefill(std::span<const std::size_t> joining) {
    attempt(joining, [&] {
      tokens.clear();
      runs.clear();
      for (const std::size_t i : joining) {
        Request& request = *running[i];
        if (!put_in_place(request, slot(i)) || request.prompt.empty()) continue;
        runs.push_back({slot(i), request.position, std::ssize(tokens), std::ssize(request.prompt)});
        tokens.insert(tokens.end(), request.prompt.begin(), request.prompt.end());
        request.position += std::ssize(request.prompt);
        request.prompt = {};
      }
      if (!runs.empty()) stats += executor().run({.tokens = tokens, .runs = runs}, execution).stats;
    });
  }

  /// What the request starts from. False if that is no longer there.
  bool put_in_place(Request& request, models::Slot to) const {
    if (request.start && request.start->position() != request.position) {
      request.text.fail(fmt::format("start: found the session at position {}, expected {}, where it was",
                                    request.start->position(), request.position));
      return false;
    }
    if (request.start) {
      executor().copy(engine::Access::slots(*request.start).first(), to, 1);
    } else if (request.state) {
      executor().load(to, *request.state);
    } else {
      executor().clear(to, 1);
    }
    request.start.reset();
    request.state.reset();
    request.has_state = true;
    return true;
  }

  /// One token of each, by the executor where that can, and what becomes of it.
  void draw(std::span<const std::size_t> drawing) {
    drawn.assign(running.size(), {});
    attempt(drawing, [&] {
      const bool can_draw = draw_on_executor(drawing);
      draw_on_host(drawing, can_draw);
    });
    if (executor().steps_by_itself()) step_ahead(drawing);
    for (const std::size_t i : drawing) {
      engine::Continuation& text = running[i]->text;
      if (!text.is_over()) alone(text, [&] { text.take(drawn[i]); });
    }
  }

  /// The step of those whose sequences go on unless their texts end them.
  void step_ahead(std::span<const std::size_t> drawing) {
    std::vector<std::size_t> going;
    for (const std::size_t i : drawing) {
      const engine::Continuation& text = running[i]->text;
      if (!text.is_over() && !text.ends_with(drawn[i].token)) going.push_back(i);
    }
    step(going, [&](std::size_t i) { return drawn[i].token; });
  }

  /// False where it cannot.
  bool draw_on_executor(std::span<const std::size_t> drawing) {
    draws.clear();
    bool logprobs = false;
    for (const std::size_t i : drawing) {
      const engine::Continuation& text = running[i]->text;
      draws.push_back({slot(i), text.options().sampler, text.options().sequence, text.step(), text.recent()});
      logprobs = logprobs || text.options().logprobs;
    }
    drawn_tokens.resize(draws.size());
    drawn_logprobs.resize(logprobs ? draws.size() : 0);
    if (draws.empty() || !executor().draw(draws, drawn_tokens, drawn_logprobs)) return false;
    for (std::size_t n = 0; n < drawing.size(); ++n) {
      drawn[drawing[n]] = {drawn_tokens[n], logprobs ? drawn_logprobs[n] : 0.0F};
    }
    return true;
  }

  /// Those that the executor left: it cannot draw, or found nothing to draw, for which the host's sampler knows the
  /// words. Logits of slots side by side are fetched together.
  void draw_on_host(std::span<const std::size_t> drawing, bool can_draw) {
    const auto vocab = static_cast<std::size_t>(shape.vocab_size);
    for (std::size_t begin = 0; begin < drawing.size();) {
      std::size_t count = 0;
      while (count < kMostFetched && begin + count < drawing.size() &&
             drawing[begin + count] == drawing[begin] + count && drawn[drawing[begin + count]].token < 0) {
        ++count;
      }
      if (count == 0) {
        ++begin;
        continue;
      }
      logits.resize(std::max(logits.size(), count * vocab));
      executor().logits(slot(drawing[begin]), static_cast<int>(count), std::span(logits).first(count * vocab));
      for (std::size_t n = 0; n < count; ++n, ++begin) {
        engine::Continuation& text = running[drawing[begin]]->text;
        alone(text, [&] {
          drawn[drawing[begin]] = text.sample(std::span(logits).subspan(n * vocab, vocab));
          if (can_draw) throw NumericError(fmt::format("step {}: the device found no token to draw", text.step()));
        });
      }
    }
  }

  // --- Faults

  /// What goes wrong here is this request's alone.
  template <class Call>
  static void alone(engine::Continuation& text, Call call) {
    try {
      call();
    } catch (const std::exception& error) {
      text.fail(error.what());
    }
  }

  /// A call of the executor: if it fails, those in it have no state that is known.
  template <class Call>
  void attempt(std::span<const std::size_t> of, Call call) {
    try {
      call();
    } catch (const std::exception& error) {
      fault.keep();
      for (const std::size_t i : of) running[i]->text.fail(error.what());
    }
  }

  Tokenizer tokenizer;
  engine::StateShape shape;  // of one sequence
  models::ExecutionOptions execution;
  models::Slots slots;
  std::map<RequestId, std::unique_ptr<Request>> waiting;  // in order
  std::vector<std::unique_ptr<Request>> running;          // [slots], null where free
  std::deque<std::unique_ptr<Request>> dropped;           // cancelled while they waited
  RequestId next_id = 1;
  int held = 0;  // rounds in which a free slot waited for others
  bool is_in_round = false;
  engine::CallbackFault fault;
  PrefillStats stats;

  // Scratch of a round.
  std::vector<int> tokens;
  std::vector<models::Run> runs;
  std::vector<models::Draw> draws;
  std::vector<int> drawn_tokens;      // of draws
  std::vector<float> drawn_logprobs;  // of draws, or empty
  std::vector<Sample> drawn;          // of slots; token -1: none yet
  std::vector<float> logits;          // of slots side by side, [n, V]
};

Generator::Generator(const Model& model, Tokenizer tokenizer, const GeneratorOptions& options)
    : impl_(std::make_unique<Impl>(model, std::move(tokenizer), options)) {}
Generator::Generator(Generator&&) noexcept = default;
Generator& Generator::operator=(Generator&&) noexcept = default;
Generator::~Generator() = default;

Generator::RequestId Generator::submit(GeneratorRequest request) {
  const RequestId id = impl_->next_id;
  impl_->waiting.emplace(id, engine::checked_request(std::move(request), id, impl_->tokenizer, impl_->shape,
                                                     impl_->executor(), impl_->fault));
  ++impl_->next_id;
  return id;
}

bool Generator::cancel(RequestId id) {
  if (const auto found = impl_->waiting.find(id); found != impl_->waiting.end()) {
    found->second->text.cancel();
    impl_->dropped.push_back(std::move(found->second));
    impl_->waiting.erase(found);
    return true;
  }
  for (const std::unique_ptr<Request>& request : impl_->running) {
    if (!request || request->id != id) continue;
    request->text.cancel();
    return true;
  }
  return false;
}

bool Generator::run_once() {
  if (impl_->is_in_round) throw std::logic_error("run_once: called by a callback of a round");
  impl_->is_in_round = true;
  impl_->fault = {};
  impl_->fault.guard([&] { return impl_->round(), true; });
  impl_->is_in_round = false;
  impl_->fault.rethrow();
  return running() > 0 || waiting() > 0;
}

void Generator::run() {
  while (run_once()) {
  }
}

int Generator::slots() const { return impl_->slots.count(); }
std::size_t Generator::waiting() const { return impl_->waiting.size() + impl_->dropped.size(); }
std::size_t Generator::running() const {
  return static_cast<std::size_t>(
      std::count_if(impl_->running.begin(), impl_->running.end(), [](const auto& request) { return bool(request); }));
}
PrefillStats Generator::prefill_stats() const { return impl_->stats; }

}  // namespace mmrec
