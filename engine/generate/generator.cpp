// Continuous batching. A round is one packed prefill of new requests, one step of all others and one draw. Each of
// several devices has its own rounds and computes them in its own thread.
//
// Must stay true: callbacks are called in the caller's thread, outside the executor. A fault of one request, a NaN or
// an exception, changes no other request. While a device computes a round, the caller's thread does nothing with its
// requests but cancel().
#include "mmrec/generator.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/generate/generator_device.h"
#include "engine/require.h"
#include "engine/session/access.h"
#include "engine/session/callback.h"
#include "engine/session/state_format.h"
#include "kernels/cpu/thread_pool.h"

namespace mmrec {
namespace {

using Request = engine::RunningRequest;

/// The tokens that generate() would find in a session after the prompt.
std::vector<int> tokens_before(const GeneratorRequest& request) {
  std::span<const int> known = request.options.context;
  if (known.empty() && request.start) known = request.start->recent_tokens();
  std::vector<int> all(known.begin(), known.end());
  all.insert(all.end(), request.prompt.begin(), request.prompt.end());
  constexpr auto kMost = static_cast<std::size_t>(Session::kRecentTokens);
  if (request.options.context.empty() && all.size() > kMost) all.erase(all.begin(), all.end() - Session::kRecentTokens);
  return all;
}

/// Callbacks that throw nothing: `fault` keeps what they throw.
GenerateOptions guarded(GenerateOptions options, engine::CallbackFault& fault) {
  const auto guard = [&fault](auto& callback) {
    if (!callback) return;
    callback = [&fault, ask = std::move(callback)](auto... given) {
      return fault.guard([&] { return ask(given...); });
    };
  };
  guard(options.on_text);
  guard(options.on_token);
  if (options.cancelled) {
    options.cancelled = [&fault, ask = std::move(options.cancelled)] { return !fault.guard([&] { return !ask(); }); };
  }
  return options;
}

/// Throws as Generator::submit says, before anything is changed. The request's callbacks for text and tokens throw
/// nothing: `fault`, which outlives the request, keeps what they throw. `shape` is that of one sequence of `models`.
std::unique_ptr<Request> checked_request(GeneratorRequest&& request, Generator::RequestId id,
                                         const Tokenizer& tokenizer, const engine::StateShape& shape,
                                         std::span<const Model> models, engine::CallbackFault& fault) {
  const std::int64_t vocab_size = models.front().info().vocab_size;
  std::optional<models::HostState> state;
  std::int64_t position = 0;
  engine::require(!request.start || request.state.empty(),
                  "request: found a session to start from and a saved state, expected one of them");
  if (request.start) {
    engine::require(request.start->batch() == 1, "start: found a session of batch {}, expected 1",
                    request.start->batch());
    const std::shared_ptr<models::Executor>& executor = engine::Access::slots(*request.start).executor();
    const bool is_ours =
        std::ranges::any_of(models, [&](const Model& m) { return engine::Access::executor(m) == executor; });
    engine::require(is_ours, "start: found a session of another model, expected one of the generator's");
    position = request.start->position();
  } else if (!request.state.empty()) {
    state = engine::decode_state(request.state, shape);
    position = state->position;
  } else {
    engine::require(request.options.context.empty(), "context: found {} tokens without a state that has consumed them",
                    request.options.context.size());
  }
  engine::check_ids(request.prompt, vocab_size, "prompt ");
  const std::int64_t joins_at = position + std::ssize(request.prompt);
  engine::require(joins_at != 0, "prompt: found no tokens and no state to go on from, expected at least one token");
  const std::vector<int> before = tokens_before(request);
  auto running = std::make_unique<Request>(
      id, engine::Continuation(tokenizer, vocab_size, guarded(std::move(request.options), fault), before, joins_at));
  running->prompt = std::move(request.prompt);
  running->start = std::move(request.start);
  running->state = std::move(state);
  running->position = position;
  running->on_finish = std::move(request.on_finish);
  return running;
}

enum class Round : std::uint8_t { kNone, kComputing, kDone };

/// A device, and the thread that computes its rounds where there are several.
struct Worker {
  Worker(const Model& model, const GeneratorOptions& options) : device(model, options) {}
  engine::GeneratorDevice device;
  Round round = Round::kNone;
  std::jthread thread;  // ends with its worker
};

}  // namespace

struct Generator::Impl {
  Impl(std::vector<Model> its_models, Tokenizer its_tokenizer, const GeneratorOptions& options)
      : models(std::move(its_models)), tokenizer(std::move(its_tokenizer)) {
    engine::check_replicas(models);
    const Model& first = models.front();
    shape = {first.info().fingerprint, 1, engine::Access::layout(first)};
    for (const Model& model : models) workers.emplace_back(model, options);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// Of all devices.
  template <class Of>
  std::size_t sum(const Of& of) const {
    std::size_t all = 0;
    for (const Worker& worker : workers) all += of(worker.device);
    return all;
  }
  /// Requests with a place.
  std::size_t placed() const { return sum(std::mem_fn(&engine::GeneratorDevice::count)); }
  /// Those with a slot, or who have one as soon as their prompts are consumed.
  std::size_t running() const {
    return sum([](const auto& device) { return std::min(device.count(), device.slots()); });
  }

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
    for (Worker& worker : workers) {
      if (round_of(worker) != Round::kNone) continue;
      for (std::unique_ptr<Request>& request : worker.device.running()) {
        if (request && (!request->is_ready() || request->text.is_cancelled())) ask(request);
      }
      admit(worker, end);
      if (worker.device.count() > 0) start(worker);
    }
    wait_for_one();
    for (Worker& worker : workers) {
      if (round_of(worker) == Round::kDone) complete(worker);
    }
  }

  /// Finishes the request unless it goes on.
  void ask(std::unique_ptr<Request>& request) {
    if (!request->text.goes_on()) finish(std::move(request));
  }

  /// Requests take the lowest free places, so that used ones lie close together. No device takes more than its share.
  /// While more requests wait than there is room for, several join together: their prompts take hardly longer than one,
  /// and no sequence steps meanwhile.
  void admit(Worker& worker, RequestId end) {
    engine::GeneratorDevice& device = worker.device;
    const std::size_t free = device.running().size() - device.count();
    if (free < std::min(device.party(), waiting.size())) return;
    const std::size_t share = (placed() + waiting.size() + workers.size() - 1) / workers.size();
    std::size_t count = device.count();
    std::vector<std::size_t> joining;
    joining.reserve(free);
    for (std::size_t i = 0; i < device.running().size() && count < share; ++i) {
      std::unique_ptr<Request>& place = device.running()[i];
      while (!place && !waiting.empty() && waiting.begin()->first < end) {
        place = std::move(waiting.extract(waiting.begin()).mapped());
        ask(place);
        if (!place) continue;
        joining.push_back(i);
        ++count;
      }
    }
    device.put_in_place(joining);
  }

  void complete(Worker& worker) {
    set(worker, Round::kNone);
    worker.device.take(fault, stats);
    for (std::unique_ptr<Request>& request : worker.device.running()) {
      if (request && request->text.is_over()) finish(std::move(request));
    }
  }

  // --- Devices. A single one computes in the caller's thread.

  void start(Worker& worker) {
    if (workers.size() > 1 && !worker.thread.joinable()) {
      try {
        const kernels::SignalsBlocked in_thread;
        worker.thread = std::jthread([this, &worker](const std::stop_token& stop) { work(worker, stop); });
      } catch (const std::system_error&) {  // no thread can be started: the caller's computes
      }
    }
    if (!worker.thread.joinable()) {
      worker.device.compute();
      set(worker, Round::kDone);
      return;
    }
    set(worker, Round::kComputing);
    has_work.notify_all();
  }

  void work(Worker& worker, const std::stop_token& stop) {
    std::unique_lock lock(mutex);
    while (has_work.wait(lock, stop, [&] { return worker.round == Round::kComputing; }) && !stop.stop_requested()) {
      lock.unlock();
      worker.device.compute();
      lock.lock();
      worker.round = Round::kDone;
      is_done.notify_one();
    }
  }

  /// Returns when a round is done, if there is one.
  void wait_for_one() {
    const auto any = [&](Round round) {
      return std::ranges::any_of(workers, [&](const Worker& w) { return w.round == round; });
    };
    std::unique_lock lock(mutex);
    is_done.wait(lock, [&] { return any(Round::kDone) || !any(Round::kComputing); });
  }
  Round round_of(const Worker& worker) {
    const std::lock_guard lock(mutex);
    return worker.round;
  }
  void set(Worker& worker, Round round) {
    const std::lock_guard lock(mutex);
    worker.round = round;
  }

  std::vector<Model> models;
  Tokenizer tokenizer;
  engine::StateShape shape;                               // of one sequence
  std::map<RequestId, std::unique_ptr<Request>> waiting;  // in order
  std::deque<std::unique_ptr<Request>> dropped;           // cancelled while they waited
  RequestId next_id = 1;
  bool is_in_round = false;
  engine::CallbackFault fault;
  PrefillStats stats;

  std::mutex mutex;  // guards the rounds' states
  std::condition_variable_any has_work;
  std::condition_variable is_done;
  std::deque<Worker> workers;
};

Generator::Generator(const Model& model, Tokenizer tokenizer, const GeneratorOptions& options)
    : Generator(std::vector{model}, std::move(tokenizer), options) {}
Generator::Generator(std::vector<Model> models, Tokenizer tokenizer, const GeneratorOptions& options)
    : impl_(std::make_unique<Impl>(std::move(models), std::move(tokenizer), options)) {}
Generator::Generator(Generator&&) noexcept = default;
Generator& Generator::operator=(Generator&&) noexcept = default;
Generator::~Generator() = default;

Generator::RequestId Generator::submit(GeneratorRequest request) {
  const RequestId id = impl_->next_id;
  impl_->waiting.emplace(
      id, checked_request(std::move(request), id, impl_->tokenizer, impl_->shape, impl_->models, impl_->fault));
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
  for (const Worker& worker : impl_->workers) {
    for (const std::unique_ptr<Request>& request : worker.device.running()) {
      if (!request || request->id != id) continue;
      request->text.cancel();
      return true;
    }
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

int Generator::slots() const { return static_cast<int>(impl_->sum(std::mem_fn(&engine::GeneratorDevice::slots))); }
std::size_t Generator::waiting() const {
  return impl_->waiting.size() + impl_->dropped.size() + impl_->placed() - impl_->running();
}
std::size_t Generator::running() const { return impl_->running(); }
PrefillStats Generator::prefill_stats() const { return impl_->stats; }

}  // namespace mmrec
