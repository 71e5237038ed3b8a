// The CPU runner: forward.h on kernels::Cpu.
#include <utility>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "models/mmrec/forward.h"
#include "models/runner.h"

namespace mmrec::models {
namespace {

/// kAuto on processors is kSteps for every model and length: measured on widths 384 to 8,192, bf16 and fp32, 256 to
/// 2,048 tokens, steps were 1.1 to 1.8 times as fast (docs/performance.md). Sweeps multiply the gate products, which
/// pays only where arithmetic is far cheaper than reading the gates once per token.
RunnerOptions resolve(RunnerOptions options) {
  if (options.prefill == PrefillMode::kAuto) options.prefill = PrefillMode::kSteps;
  if (options.sweep_tolerance == 0.0F) options.sweep_tolerance = kFloatTolerance;
  return options;
}

/// Windows of two row tiles: short ones converge in fewer sweeps and their activations stay in cache.
constexpr ChunkPlan kPlan{.tokens = 2 * kernels::kRowTile,
                          .tile = kernels::kRowTile,
                          .rows = 8 * kernels::kRowTile,
                          .window = 2 * kernels::kRowTile};

class CpuRunner final : public Runner {
 public:
  CpuRunner(Config config, std::shared_ptr<const HostWeights> weights, int batch, const RunnerOptions& options)
      : config_(std::move(config)),
        weights_(std::move(weights)),
        options_(resolve(options)),
        cpu_(options.threads),
        forward_(config_, view_of(*weights_), cpu_, batch, options_, kPlan) {}

  std::span<const float> prefill(std::span<const int> tokens) override {
    forward_.run(tokens, /*exact=*/false, nullptr);
    return logits();
  }

  std::span<const float> step(std::span<const int> tokens) override {
    forward_.run(tokens, /*exact=*/true, nullptr);
    return logits();
  }

  void advance(std::span<const int> tokens) override { forward_.run(tokens, /*exact=*/true, nullptr); }

  void score(std::span<const int> tokens, std::span<float> logprobs) override {
    forward_.run(tokens, /*exact=*/false, logprobs.data());
  }

  std::span<const float> logits() const override {
    if (forward_.position() == 0) return {};
    const auto rows = forward_.logits();
    if (rows.rows == 1) return {rows.data, static_cast<std::size_t>(rows.cols)};
    logits_.resize(static_cast<std::size_t>(rows.rows * rows.cols));
    forward_.fetch_logits(logits_.data());
    return logits_;
  }

  std::int64_t position() const override { return forward_.position(); }
  int batch() const override { return forward_.batch(); }
  PrefillStats prefill_stats() const override { return forward_.stats(); }
  void reset() override { forward_.reset(); }

  std::unique_ptr<Runner> clone() const override {
    auto copy = std::make_unique<CpuRunner>(config_, weights_, forward_.batch(), options_);
    copy->forward_.import_state(forward_.export_state());
    copy->forward_.set_stats(forward_.stats());
    return copy;
  }

  HostState export_state() const override { return forward_.export_state(); }
  void import_state(const HostState& state) override { forward_.import_state(state); }

 private:
  Config config_;
  std::shared_ptr<const HostWeights> weights_;
  RunnerOptions options_;
  kernels::Cpu cpu_;
  Forward<kernels::Cpu> forward_;
  mutable std::vector<float> logits_;  // [B, V] where the rows lie apart
};

}  // namespace

std::unique_ptr<Runner> make_cpu_runner(const Config& config, std::shared_ptr<const HostWeights> weights, int batch,
                                        const RunnerOptions& options) {
  return std::make_unique<CpuRunner>(config, std::move(weights), batch, options);
}

}  // namespace mmrec::models
