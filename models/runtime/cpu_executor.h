// Executors on the CPU: the forward pass of a net on kernels::Cpu.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
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

template <class Arch>
class CpuExecutor final : public ExecutorBase<CpuExecutor<Arch>, kernels::Cpu> {
  using Base = ExecutorBase<CpuExecutor, kernels::Cpu>;
  using Base::pool_, Base::pool_mutex_;
  using Config = typename Arch::Config;
  using Weights = WeightsOf<Arch>;

 public:
  CpuExecutor(Config config, std::shared_ptr<const Weights> weights)
      : Base(state_layout(config)), config_(std::move(config)), weights_(std::move(weights)) {}

  struct Worker {
    Worker(const Config& config, const Weights& weights, int wanted_threads)
        : threads(wanted_threads),
          backend(threads, weights.rounds_inputs),
          forward(config, view_of(weights), backend, kCpuPlan) {}
    int threads;  // as they were asked for
    kernels::Cpu backend;
    Forward<typename Arch::template Net<kernels::Cpu, float>> forward;
  };
  struct GiveBack {
    CpuExecutor* executor;
    void operator()(Worker* worker) const noexcept { executor->give_back(std::unique_ptr<Worker>(worker)); }
  };
  /// A worker of its own for a call.
  using Lease = std::unique_ptr<Worker, GiveBack>;

  Lease worker(const ExecutionOptions& options, std::int64_t sequences) {
    Lease worker = take([&](const Worker& idle) { return idle.threads == options.threads; }, options.threads);
    worker->backend.observer = options.observer;
    worker->forward.reserve(sequences, resolve_on_cpu(options).sweeps);
    return worker;
  }
  Lease any_worker() {
    Lease any = take([](const Worker&) { return true; }, 1);
    any->backend.observer = nullptr;
    any->forward.reserve(1, false);
    return any;
  }

  void release(Slot first) noexcept override {
    std::vector<std::unique_ptr<Worker>> unused;  // go without the lock
    const std::lock_guard lock(pool_mutex_);
    pool_.release(first);
    if (pool_.is_unused()) unused.swap(idle_);
  }

  /// Enough short ones for a chunk, in which products and the recurrence share the reading of weights; more would only
  /// make the rounds of long ones longer, between which progress is asked for.
  int sequences_of_a_call() override { return fitting(32); }
  /// With the bundled model on two cores, steps of 128 take 3 % more time per token than steps of 200, those of 32 10
  /// %.
  int sequences_of_a_step() override { return fitting(128); }

  /// A chunk of each sequence, and two whole ones of eight or more, which share each reading of the gates. With the
  /// bundled model on two cores the first takes the time of four steps of 64 sequences, the other that of 19.
  std::int64_t rows_of_a_piece(std::size_t prompts) const override {
    return std::min(static_cast<std::int64_t>(prompts) * kCpuPlan.tokens, 2 * kCpuPlan.rows);
  }

  void share(std::int64_t count, const ExecutionOptions& options,
             const std::function<void(std::int64_t, int)>& body) override {
    worker(options, 1)->backend.pool().share_items(count, body);
  }

  Done run(const Work& work, const ExecutionOptions& options) override {
    return worker(options, static_cast<std::int64_t>(work.runs.size()))->forward.run(work, resolve_on_cpu(options));
  }
  void step(std::span<const int> tokens, std::span<const Run> runs, const ExecutionOptions& options) override {
    ExecutionOptions exact = options;
    exact.prefill = PrefillMode::kSteps;
    run({.tokens = tokens, .runs = runs}, exact);
  }

 private:
  /// At most `most` sequences, whose states take little memory.
  int fitting(std::size_t most) const {
    constexpr std::size_t kMostBytes = std::size_t{256} << 20;
    return static_cast<int>(std::clamp<std::size_t>(kMostBytes / this->slot_bytes(), 1, most));
  }
  /// An idle worker that suits, else a new one.
  template <class Suits>
  Lease take(Suits suits, int threads) {
    {
      const std::lock_guard lock(pool_mutex_);
      const auto found = std::find_if(idle_.begin(), idle_.end(), [&](const auto& worker) { return suits(*worker); });
      if (found != idle_.end()) {
        Lease worker(found->release(), {this});
        idle_.erase(found);
        return worker;
      }
    }
    return {new Worker(config_, *weights_, threads), {this}};
  }
  void give_back(std::unique_ptr<Worker> worker) noexcept {
    const std::lock_guard lock(pool_mutex_);
    try {
      idle_.push_back(std::move(worker));
    } catch (const std::bad_alloc&) {  // then it is not kept
    }
  }

  const Config config_;
  const std::shared_ptr<const Weights> weights_;
  std::vector<std::unique_ptr<Worker>> idle_;  // guarded by pool_mutex_
};

template <class Config>
std::shared_ptr<Executor> make_cpu_executor(const Config& config,
                                            std::shared_ptr<const WeightsOf<typename Config::Arch>> weights) {
  return std::make_shared<CpuExecutor<typename Config::Arch>>(config, std::move(weights));
}

}  // namespace mmrec::models
