// Executors on the CPU: the forward pass of a net on kernels::Cpu.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "models/runtime/executor_base.h"
#include "models/runtime/forward.h"
#include "models/runtime/model.h"
#include "models/runtime/schedule.h"

namespace mmrec::models {

/// Chunks of two row tiles: short windows of sweeps converge in fewer, and activations stay in cache.
inline constexpr ChunkPlan kCpuPlan{.tokens = 2 * kernels::kRowTile,
                                    .tile = kernels::kRowTile,
                                    .rows = 8 * kernels::kRowTile,
                                    .window = 2 * kernels::kRowTile};
inline constexpr float kCpuTolerance = 1e-5F;

/// kAuto on processors is kSteps for every model and length: measured on widths 384 to 8,192, bf16 and fp32, 256 to
/// 2,048 tokens, steps were 1.1 to 1.8 times as fast (docs/performance.md). Sweeps multiply the gate products, which
/// pays only where arithmetic is far cheaper than reading the gates once per token.
inline RecurrenceOptions resolve_on_cpu(const ExecutionOptions& options) {
  return {.sweeps = options.prefill == PrefillMode::kSweeps,
          .tolerance = options.sweep_tolerance == 0.0F ? kCpuTolerance : options.sweep_tolerance,
          .max_sweeps = options.max_sweeps,
          .path = options.path};
}

/// `Lane` is made of its `Model` and a number of threads, and has these as they were asked for (threads), a `backend`
/// and a `forward`. A model has state(), and is copied.
template <class Lane>
class CpuExecutor final : public ExecutorBase<CpuExecutor<Lane>, kernels::Cpu> {
  using Base = ExecutorBase<CpuExecutor, kernels::Cpu>;
  using Base::pool_, Base::pool_mutex_;

 public:
  using Model = typename Lane::Model;

  explicit CpuExecutor(Model model) : Base(model.state()), model_(std::move(model)) {}

  /// A lane of its own for a call.
  class Lease {
   public:
    Lease(CpuExecutor& executor, std::unique_ptr<Lane> lane) : executor_(executor), lane_(std::move(lane)) {}
    Lease(Lease&&) noexcept = default;
    Lease& operator=(Lease&&) = delete;
    ~Lease() {
      if (lane_ != nullptr) executor_.give_back(std::move(lane_));
    }
    Lane* operator->() const { return lane_.get(); }

   private:
    CpuExecutor& executor_;
    std::unique_ptr<Lane> lane_;
  };

  Lease lane(const ExecutionOptions& options, std::int64_t sequences) {
    std::unique_ptr<Lane> lane =
        take([&](const Lane& idle) { return idle.threads == options.threads; }, options.threads);
    lane->forward.reserve(sequences, resolve_on_cpu(options).sweeps);
    return {*this, std::move(lane)};
  }
  Lease any_lane() {
    Lease any(*this, take([](const Lane&) { return true; }, 1));
    any->forward.reserve(1, false);
    return any;
  }

  void release(Slot first) noexcept override {
    std::vector<std::unique_ptr<Lane>> unused;  // go without the lock
    const std::lock_guard lock(pool_mutex_);
    pool_.release(first);
    if (pool_.is_unused()) unused.swap(idle_);
  }

  /// Enough short ones for a chunk, in which products and the recurrence share the reading of weights; more would only
  /// make the rounds of long ones longer, between which progress is asked for.
  int sequences_of_a_call() override {
    constexpr std::size_t kMost = 32;
    constexpr std::size_t kMostBytes = std::size_t{256} << 20;  // of their states
    return static_cast<int>(std::clamp<std::size_t>(kMostBytes / this->slot_bytes(), 1, kMost));
  }

  Done run(const Work& work, const ExecutionOptions& options) override {
    return lane(options, static_cast<std::int64_t>(work.runs.size()))->forward.run(work, resolve_on_cpu(options));
  }
  void step(std::span<const int> tokens, std::span<const Run> runs, const ExecutionOptions& options) override {
    ExecutionOptions exact = options;
    exact.prefill = PrefillMode::kSteps;
    run({.tokens = tokens, .runs = runs}, exact);
  }

 private:
  /// An idle lane that suits, else a new one.
  template <class Suits>
  std::unique_ptr<Lane> take(Suits suits, int threads) {
    {
      const std::lock_guard lock(pool_mutex_);
      const auto found = std::find_if(idle_.begin(), idle_.end(), [&](const auto& lane) { return suits(*lane); });
      if (found != idle_.end()) {
        std::unique_ptr<Lane> lane = std::move(*found);
        idle_.erase(found);
        return lane;
      }
    }
    return std::make_unique<Lane>(model_, threads);
  }
  void give_back(std::unique_ptr<Lane> lane) noexcept {
    const std::lock_guard lock(pool_mutex_);
    try {
      idle_.push_back(std::move(lane));
    } catch (const std::bad_alloc&) {  // then it is not kept
    }
  }

  const Model model_;
  std::vector<std::unique_ptr<Lane>> idle_;  // guarded by pool_mutex_
};

/// A model on the CPU for one call at a time.
template <class Arch>
struct CpuLane {
  using Model = BoundModel<typename Arch::Config, WeightsOf<Arch>>;
  CpuLane(const Model& model, int wanted_threads)
      : threads(wanted_threads),
        backend(threads, model.weights->rounds_inputs),
        forward(model.config, view_of(*model.weights), backend, chunk_plan(model.config, backend)) {}
  int threads;
  kernels::Cpu backend;
  Forward<typename Arch::template Net<kernels::Cpu, float>> forward;
};

template <class Config>
std::shared_ptr<Executor> make_cpu_executor(const Config& config,
                                            std::shared_ptr<const WeightsOf<typename Config::Arch>> weights) {
  using Lane = CpuLane<typename Config::Arch>;
  return std::make_shared<CpuExecutor<Lane>>(typename Lane::Model{config, std::move(weights)});
}

}  // namespace mmrec::models
