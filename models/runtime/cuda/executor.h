// Executors on a GPU: the forward pass of a net on kernels::Cuda, with recorded steps and draws on the device.
//
// All sessions of a model share one stream: calls take turns, and what one of them has enqueued is done before what the
// next one enqueues.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cuda/runtime/cuda.h"
#include "models/runtime/cuda/draw_rules.h"
#include "models/runtime/cuda/upload.h"
#include "models/runtime/executor_base.h"
#include "models/runtime/forward.h"
#include "models/runtime/model.h"

namespace mmrec::models {

inline constexpr float kFloatTolerance = 1e-5F;
/// Half a unit in the last place of bf16, relative: finer than the rounding of what enters the gates.
inline constexpr float kHalfTolerance = 1e-3F;

template <class A>
RecurrenceOptions resolve_on_cuda(const ExecutionOptions& options) {
  const float tolerance = std::is_same_v<A, float> ? kFloatTolerance : kHalfTolerance;
  return {.sweeps = options.prefill != PrefillMode::kSteps,
          .tolerance = options.sweep_tolerance == 0.0F ? tolerance : options.sweep_tolerance,
          .max_sweeps = options.max_sweeps,
          .path = options.path};
}

/// Operands of products are of A.
template <class Arch, class A>
class CudaExecutor final : public ExecutorBase<CudaExecutor<Arch, A>, kernels::Cuda> {
  using Base = ExecutorBase<CudaExecutor, kernels::Cuda>;
  using Base::pool_, Base::pool_mutex_;
  using Config = typename Arch::Config;
  using Weights = DeviceWeights<Arch>;
  using Forward = models::Forward<typename Arch::template Net<kernels::Cuda, A>>;

 public:
  CudaExecutor(Config config, std::shared_ptr<const Weights> weights, bool batch_invariant)
      : Base(state_layout(config)),
        config_(std::move(config)),
        weights_(std::move(weights)),
        batch_invariant_(batch_invariant) {}

  struct Worker {
    Worker(const Config& config, const Weights& weights, bool batch_invariant)
        : backend(weights.gpu()), forward(config, weights.view(), backend, plan(config, backend, batch_invariant)) {
      backend.scratch();  // before states take the rest of the memory
      if (weights.multiplies_fp8()) backend.parts();
    }
    static ChunkPlan plan(const Config& config, kernels::Cuda& backend, bool batch_invariant) {
      backend.set_batch_invariant(batch_invariant);
      return chunk_plan(config, backend);
    }
    kernels::Cuda backend;
    Forward forward;
  };
  /// The worker, for one thread at a time.
  struct Turn {
    std::unique_lock<std::mutex> lock;
    Worker* worker;
    Worker* operator->() const { return worker; }
  };
  Turn worker(const ExecutionOptions& options, std::int64_t sequences) {
    return take(std::unique_lock(mutex_), options, sequences);
  }
  Turn take(std::unique_lock<std::mutex> lock, const ExecutionOptions& options, std::int64_t sequences) {
    if (!worker_) worker_.emplace(config_, *weights_, batch_invariant_);
    worker_->backend.make_current();
    if (stream_ != nullptr) std::exchange(stream_, nullptr)->keep_token(*worker_);
    if (worker_->forward.reserve(sequences, resolve_on_cuda<A>(options).sweeps)) {  // the old activations are gone
      forget_steps();
      drawn_for_.clear();
    }
    return {std::move(lock), &*worker_};
  }
  Turn any_worker() { return worker({.prefill = PrefillMode::kSteps}, 1); }

  void release(Slot first) noexcept override {
    const std::lock_guard lock(pool_mutex_);
    pool_.release(first);
  }

  /// Enough that chunks are full for most of the call.
  int sequences_of_a_call() override {
    constexpr std::size_t kMost = 4096;
    const std::size_t fit = kernels::device_memory(weights_->gpu()).free / 8 / this->slot_bytes();
    return static_cast<int>(std::clamp<std::size_t>(fit, 1, kMost));
  }

  Done run(const Work& work, const ExecutionOptions& options) override {
    const Turn turn = worker(options, count_of(work.runs));
    drawn_for_.clear();
    return turn->forward.run(work, resolve_on_cuda<A>(options));
  }

  /// Half a chunk; of a small model, whose launches take longer than its rows, most of one: some milliseconds.
  std::int64_t rows_of_a_piece(std::size_t /*prompts*/) const override {
    constexpr std::uint64_t kSmall = std::uint64_t{128} << 20;  // bytes
    return weights_->bytes() < kSmall ? 7168 : 4096;
  }

  bool steps_by_itself() const override { return true; }
  void step(std::span<const int> tokens, std::span<const Run> runs, const ExecutionOptions& options) override {
    const Turn turn = worker(options, count_of(runs));
    Forward& forward = turn->forward;
    if (!forward.is_step(runs)) {
      drawn_for_.clear();
      RecurrenceOptions exact = resolve_on_cuda<A>(options);
      exact.sweeps = false;
      forward.run({.tokens = tokens, .runs = runs}, exact);
      return;
    }
    const bool are_there = std::equal(runs.begin(), runs.end(), drawn_for_.begin(), drawn_for_.end(),
                                      [](const Run& run, Slot slot) { return run.slot == slot; }) &&
                           std::equal(tokens.begin(), tokens.end(), drawn_.data());
    if (!are_there) forward.load_tokens(tokens);
    drawn_for_.clear();
    enqueue(*worker_, runs);
  }

  std::unique_ptr<TokenStream> draw_ahead(const Draw& first, std::int64_t position, bool logprobs) override {
    if (!can_draw(first, config_.vocab_size)) return nullptr;
    return std::make_unique<Stream>(*this, first, position, logprobs);
  }

  /// Through page-locked memory, which takes a part of the time.
  void logits(Slot first, int count, std::span<float> to) override {
    const Turn turn = any_worker();
    if (logits_.size() < to.size()) logits_ = kernels::PinnedBuffer<float>(to.size());
    turn->backend.download_rows(turn->forward.logits(first, count), logits_.data());
    std::copy_n(logits_.data(), to.size(), to.data());
  }

  bool draw(std::span<const Draw> draws, std::span<int> tokens, std::span<float> logprobs) override {
    if (!can_draw_all(draws)) return false;
    const Turn turn = worker({.prefill = PrefillMode::kSteps}, std::ssize(draws));
    enqueue_draws(draws, !logprobs.empty());
    fetch_draws(tokens, logprobs);
    drawn_for_ = slots_;
    return true;
  }

  bool draw_and_step(std::span<const Draw> draws, std::span<const Run> runs, std::span<int> tokens,
                     std::span<float> logprobs) override {
    if (!can_draw_all(draws)) return false;
    const Turn turn = worker({.prefill = PrefillMode::kSteps}, std::ssize(draws));
    if (!turn->forward.is_step(runs)) return false;
    enqueue_draws(draws, !logprobs.empty());
    try {
      enqueue(*worker_, runs);
    } catch (...) {
      turn->backend.synchronize();  // the draws write to what the next call uses
      throw;
    }
    fetch_draws(tokens, logprobs);
    return true;
  }

 private:
  static_assert(Executor::kFaultyRow == kernels::kFaultyRow && Executor::kNoCandidate == kernels::kNoCandidate);
  static constexpr int kPending = std::numeric_limits<int>::min();  // no token
  static constexpr std::uint32_t kNoScore = ~std::uint32_t{0};      // a NaN that no kernel makes

  bool can_draw_all(std::span<const Draw> draws) const {
    return std::all_of(draws.begin(), draws.end(), [&](const Draw& d) { return can_draw(d, config_.vocab_size); });
  }
  kernels::SampleRule* rules_of(DrawRules& rules, std::span<const Draw> draws) {
    return rules.for_draws(worker_->backend, draws,
                           [&](Slot slot) -> const float* { return worker_->forward.logits(slot, 1).data; });
  }
  // The tokens stay on the device too: mostly the next step takes just these.
  void enqueue_draws(std::span<const Draw> draws, bool logprobs) {
    Worker& worker = *worker_;
    kernels::SampleRule* const rules = rules_of(rules_, draws);
    drawn_for_.clear();
    if (drawn_.size() < draws.size()) drawn_ = kernels::PinnedBuffer<int>(draws.size());
    std::fill_n(drawn_.data(), draws.size(), kPending);
    if (logprobs) {
      if (scores_.size() < draws.size()) scores_ = kernels::PinnedBuffer<std::uint32_t>(draws.size());
      std::fill_n(scores_.data(), draws.size(), kNoScore);
    }
    slots_.clear();
    for (const Draw& draw : draws) slots_.push_back(draw.slot);
    sample(worker, logprobs ? worker.forward.logits(slots_) : worker.forward.logits_in_place(slots_), rules,
           drawn_.data(), logprobs ? reinterpret_cast<float*>(scores_.data()) : nullptr);
  }
  void fetch_draws(std::span<int> tokens, std::span<float> logprobs) {
    const kernels::Cuda& cuda = worker_->backend;
    for (int& token : std::span(drawn_.data(), tokens.size())) await(cuda, token, kPending);
    std::copy_n(drawn_.data(), tokens.size(), tokens.data());
    for (std::size_t i = 0; i < logprobs.size(); ++i) {
      await(cuda, scores_.data()[i], kNoScore);
      logprobs[i] = std::bit_cast<float>(scores_.data()[i]);
    }
    rules_.have_drawn(tokens);
  }

  /// The token drawn last waits where a step takes it from, unless another call has come between: then in `token_`.
  class Stream final : public TokenStream {
   public:
    Stream(CudaExecutor& executor, const Draw& first, std::int64_t position, bool logprobs)
        : executor_(executor), slot_(first.slot), position_(position), logprobs_(logprobs) {
      const Turn turn = executor_.any_worker();
      token_ = kernels::DeviceBuffer<int>(1);
      tokens_ = kernels::PinnedBuffer<int>(kPlaces);
      scores_ = kernels::PinnedBuffer<std::uint32_t>(kPlaces);
      // NOLINTNEXTLINE(cppcoreguidelines-prefer-member-initializer): in the worker's turn
      rule_ = executor_.rules_of(rules_, {&first, 1});
    }
    ~Stream() override {
      const std::lock_guard lock(executor_.mutex_);
      if (executor_.stream_ == this) executor_.stream_ = nullptr;
      try {
        executor_.worker_->backend.make_current();
        executor_.worker_->backend.synchronize();  // no kernel writes to what goes now
      } catch (const std::exception&) {            // a device that fails writes nothing; the next call says so
      }
    }

    void enqueue() override {
      std::unique_lock lock(executor_.mutex_);
      const bool has_token = executor_.stream_ == this;
      if (has_token) executor_.stream_ = nullptr;  // it is used here
      const Turn turn = executor_.take(std::move(lock), {.prefill = PrefillMode::kSteps}, 1);
      if (enqueued_ > 0) {
        if (!has_token) turn->backend.copy(token_.data(), turn->forward.tokens(), sizeof(int));
        const Run run{slot_, position_, 0, 1};
        executor_.drawn_for_.clear();
        executor_.enqueue(*executor_.worker_, {&run, 1});
        ++position_;
      }
      const std::size_t place = enqueued_ % kPlaces;
      tokens_.data()[place] = kPending;
      scores_.data()[place] = kNoScore;
      sample(*executor_.worker_, turn->forward.logits(slot_, 1), rule_, tokens_.data() + place,
             logprobs_ ? reinterpret_cast<float*>(scores_.data() + place) : nullptr);
      ++enqueued_;
      executor_.stream_ = this;
    }

    std::pair<int, float> fetch() override {
      const std::size_t place = fetched_++ % kPlaces;
      const kernels::Cuda& cuda = executor_.worker_->backend;
      await(cuda, tokens_.data()[place], kPending);
      if (!logprobs_) return {tokens_.data()[place], 0.0F};
      await(cuda, scores_.data()[place], kNoScore);
      return {tokens_.data()[place], std::bit_cast<float>(scores_.data()[place])};
    }

    /// Another call is about to use the place.
    void keep_token(Worker& worker) { worker.backend.copy(worker.forward.tokens(), token_.data(), sizeof(int)); }

   private:
    static constexpr std::size_t kPlaces = kAhead + 1;

    CudaExecutor& executor_;
    Slot slot_;
    std::int64_t position_;
    bool logprobs_;
    std::size_t enqueued_ = 0, fetched_ = 0;
    DrawRules rules_;
    kernels::SampleRule* rule_ = nullptr;
    kernels::DeviceBuffer<int> token_;
    kernels::PinnedBuffer<int> tokens_;            // written by the device, as these are
    kernels::PinnedBuffer<std::uint32_t> scores_;  // bits of floats
  };
  using StepKey = typename Forward::StepKey;

  /// Draws a token of each row, to `tokens` and to where a step takes it from, and its log-prob unless that is null.
  static void sample(Worker& worker, kernels::MatrixView<const float, kernels::Device> logits,
                     kernels::SampleRule* rules, int* tokens, float* logprobs) {
    int* const on_device = worker.forward.tokens();
    kernels::sample_tokens(worker.backend, {.logits = logits, .rules = rules, .tokens = tokens, .copy = on_device});
    if (logprobs == nullptr) return;
    kernels::token_logprobs_unchecked(worker.backend,
                                      kernels::TokenLogprobs<float, int, kernels::Device>{
                                          .logits = logits, .targets = on_device, .logprobs = logprobs});
  }

  static std::int64_t count_of(std::span<const Run> runs) { return static_cast<std::int64_t>(runs.size()); }

  /// Returns when the device has written the word, which is some microseconds before the stream is known to be idle.
  template <class Word>
  static void await(const kernels::Cuda& cuda, Word& word, Word pending) {
    constexpr int kPolls = 1024;  // between questions whether it still works at it
    const auto is_pending = [&] { return std::atomic_ref(word).load(std::memory_order_acquire) == pending; };
    for (int n = 1; is_pending(); ++n) {
      if (n % kPolls == 0 && cuda.is_idle() && is_pending()) throw std::logic_error("the device drew no token");
    }
  }

  void forget_steps() {
    steps_.clear();
    graphs_ = 0;
  }
  void enqueue(Worker& worker, std::span<const Run> runs) {
    Forward& forward = worker.forward;
    const std::optional<StepKey> key = forward.begin_step(runs);
    constexpr std::size_t kMostGraphs = 256;
    const bool is_full = graphs_ >= kMostGraphs || steps_.size() >= 4 * kMostGraphs;
    if (forward.take_moved() || is_full) forget_steps();
    if (key) {
      kernels::Recorded& step = steps_[*key];
      const bool had_graph = step.has_graph();
      step.run(worker.backend, [&] { forward.step(); });
      if (step.has_graph() && !had_graph) ++graphs_;
    } else {
      forward.step();
    }
    forward.end_step();
  }

  const Config config_;
  const std::shared_ptr<const Weights> weights_;
  const bool batch_invariant_;
  std::mutex mutex_;  // guards all that follows
  std::optional<Worker> worker_;
  DrawRules rules_;
  kernels::PinnedBuffer<float> logits_;
  kernels::PinnedBuffer<int> drawn_;             // written by the device, as these are
  kernels::PinnedBuffer<std::uint32_t> scores_;  // bits of floats
  Stream* stream_ = nullptr;                     // whose token waits in forward.tokens()
  std::vector<Slot> drawn_for_;                  // those whose tokens drawn_ and forward.tokens() hold
  std::vector<Slot> slots_;                      // scratch
  std::map<StepKey, kernels::Recorded> steps_;
  std::size_t graphs_ = 0;  // of these
};

template <class Config>
CudaModel make_cuda_executor(const Config& config, const WeightsOf<typename Config::Arch>& weights, Precision precision,
                             int gpu, bool batch_invariant) {
  using Arch = typename Config::Arch;
  if (batch_invariant && !Arch::kBatchInvariant) {
    throw std::invalid_argument("load option batch_invariant: found it, but " + std::string(Config::kModelType) +
                                " has no such arithmetic on a GPU");
  }
  const Config on_gpu = padded(config);
  const Padding padding{Arch::sizes(config, nullptr), Arch::sizes(on_gpu, nullptr), on_gpu.num_heads};
  const auto on_device = std::make_shared<const DeviceWeights<Arch>>(
      weights, precision, gpu, padding, !batch_invariant && Arch::steps_compact(on_gpu, gpu));
  const bool is_plain = precision == Precision::kF32Fma;
  CudaModel model{nullptr, is_plain ? precision : precision_of(on_device->type()), on_device->bytes(),
                  on_device->saved()};
  const auto make_for = [&]<class A>() {  // the types that ops are made for
    if (on_device->type() == kernels::kDTypeOf<A>) {
      model.executor = std::make_shared<CudaExecutor<Arch, A>>(on_gpu, on_device, batch_invariant);
    }
  };
  make_for.template operator()<float>();
  make_for.template operator()<kernels::Float16>();
  make_for.template operator()<kernels::BFloat16>();
  return model;
}

}  // namespace mmrec::models
