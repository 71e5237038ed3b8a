// The CUDA runner: forward.h on kernels::Cuda, one activation type per precision, decode steps replayed from graphs.
#include "models/runner_cuda.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/graph.h"
#include "models/mmrec/cuda/ops.h"
#include "models/mmrec/cuda/weights.h"
#include "models/mmrec/forward.h"

namespace mmrec::models {
namespace {

using kernels::DType;

/// Rows enough to fill the device in every product. A window is a tile of a sweep, of 128 times and 128 channels, for
/// every multiprocessor, so that what its sweeps go over again and again stays in L2; two tiles where products take
/// most of a sweep. Cut to a power of 2: whole windows fill a chunk.
ChunkPlan plan_of(const Config& config, int processors) {
  constexpr std::int64_t kTokens = 4096;
  const std::int64_t tiles = (config.model_dim <= 1024 ? 1 : 2) * std::int64_t{processors};
  const std::int64_t fits = std::int64_t{128} * 128 * tiles / config.model_dim;
  const auto window = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(fits)));
  return {.tokens = kTokens,
          .tile = 1,
          .rows = 8192,
          .window = std::clamp<std::int64_t>(window, 256, kTokens),
          .spans_segments = config.carry_state};
}

template <class A>
RunnerOptions resolve(RunnerOptions options) {
  if (options.prefill == PrefillMode::kAuto) options.prefill = PrefillMode::kSweeps;
  if (options.sweep_tolerance == 0.0F) {
    options.sweep_tolerance = std::is_same_v<A, float> ? kFloatTolerance : kHalfTolerance;
  }
  return options;
}

template <class A>
class CudaRunner final : public Runner {
 public:
  CudaRunner(Config config, std::shared_ptr<const CudaWeights> weights, int batch, const RunnerOptions& options)
      : config_(std::move(config)),
        weights_(std::move(weights)),
        options_(resolve<A>(options)),
        forward_(config_, weights_->view(), cuda_, batch, options_, plan_of(config_, cuda_.processors())),
        logits_host_(static_cast<std::size_t>(batch * config_.vocab_size)),
        rules_(static_cast<std::size_t>(batch)),
        drawn_(static_cast<std::size_t>(batch)) {}

  std::span<const float> prefill(std::span<const int> tokens) override {
    run(tokens, /*exact=*/false, nullptr);
    return logits();
  }

  std::span<const float> step(std::span<const int> tokens) override {
    advance(tokens);
    return logits();
  }

  void advance(std::span<const int> tokens) override {
    if (!forward_.steps_at_once()) return run(tokens, /*exact=*/true, nullptr);
    cuda_.make_current();
    logits_fetched_ = false;
    const bool are_there = has_drawn_ && std::equal(tokens.begin(), tokens.end(), drawn_.data());
    if (!are_there) forward_.load_step(tokens);
    has_drawn_ = false;
    enqueue_step();
    forward_.finish_step();
  }

  void score(std::span<const int> tokens, std::span<float> logprobs) override {
    run(tokens, /*exact=*/false, logprobs.data());
  }

  std::span<const float> logits() const override {
    if (forward_.position() == 0) return {};
    if (!logits_fetched_) {
      cuda_.make_current();
      forward_.fetch_logits(logits_host_.data());
      logits_fetched_ = true;
    }
    return {logits_host_.data(), logits_host_.size()};
  }

  bool draw(const DrawOptions& options, std::uint64_t step, std::uint64_t first_sequence,
            std::span<int> tokens) override {
    if (config_.vocab_size > kernels::kMostSampleWords) return false;
    cuda_.make_current();
    const Draw wanted{options, step, first_sequence};
    if (next_draw_ != wanted) upload_rules(wanted);
    next_draw_.reset();
    has_drawn_ = false;
    std::fill_n(drawn_.data(), tokens.size(), kPending);
    // They stay on the device too: mostly the next step takes just these.
    kernels::sample_tokens(cuda_, {.logits = forward_.logits(),
                                   .rules = rules_.data(),
                                   .tokens = drawn_.data(),
                                   .copy = forward_.steps_at_once() ? forward_.step_tokens() : nullptr});
    await_drawn();
    has_drawn_ = forward_.steps_at_once();
    std::copy_n(drawn_.data(), tokens.size(), tokens.data());
    next_draw_ = Draw{options, step + 1, first_sequence};
    return true;
  }

  std::int64_t position() const override { return forward_.position(); }
  int batch() const override { return forward_.batch(); }
  PrefillStats prefill_stats() const override { return forward_.stats(); }

  void reset() override {
    cuda_.make_current();
    logits_fetched_ = false;
    forward_.reset();
  }

  std::unique_ptr<Runner> clone() const override {
    auto copy = std::make_unique<CudaRunner>(config_, weights_, forward_.batch(), options_);
    copy->import_state(export_state());
    copy->forward_.set_stats(forward_.stats());
    return copy;
  }

  HostState export_state() const override {
    cuda_.make_current();
    return forward_.export_state();
  }

  void import_state(const HostState& state) override {
    cuda_.make_current();
    logits_fetched_ = false;
    forward_.import_state(state);
  }

 private:
  static constexpr int kPending = -2;  // no token
  using StepKey = typename Forward<kernels::Cuda, A>::StepKey;

  struct Draw {
    DrawOptions options;
    std::uint64_t step = 0;
    std::uint64_t first_sequence = 0;
    bool operator==(const Draw&) const = default;
  };

  void upload_rules(const Draw& draw) {
    std::vector<kernels::SampleRule> rules;
    for (std::size_t b = 0; b < rules_.size(); ++b) {
      rules.push_back({.temperature = draw.options.temperature,
                       .top_k = draw.options.top_k,
                       .top_p = draw.options.top_p,
                       .min_p = draw.options.min_p,
                       .vocab_limit = draw.options.vocab_limit,
                       .seed = draw.options.seed,
                       .sequence = draw.first_sequence + b,
                       .step = draw.step});
    }
    cuda_.upload(rules.data(), rules_.data(), rules.size());
  }

  /// Returns when the device has written all tokens, which is some microseconds before the stream is known to be idle.
  void await_drawn() {
    constexpr int kPolls = 1024;  // between questions whether it still works at it
    const auto is_pending = [](int& token) {
      return std::atomic_ref(token).load(std::memory_order_acquire) == kPending;
    };
    for (int& token : std::span(drawn_.data(), drawn_.size())) {
      for (int n = 1; is_pending(token); ++n) {
        if (n % kPolls == 0 && cuda_.is_idle() && is_pending(token)) {
          throw std::logic_error("the device drew no token");
        }
      }
    }
  }

  void run(std::span<const int> tokens, bool exact, float* logprobs) {
    cuda_.make_current();
    logits_fetched_ = false;
    has_drawn_ = false;
    forward_.run(tokens, exact, logprobs);
  }

  // The first step of a kind runs op by op, the second is recorded, all later ones are replayed. A step that closes a
  // memory segment comes once per segment and is never recorded.
  void enqueue_step() {
    const StepKey key = forward_.step_key();
    const bool closes_segment = std::get<1>(key) >= 0;
    if (closes_segment || seen_steps_.insert(key).second) return forward_.enqueue_step();
    auto graph = graphs_.find(key);
    if (graph == graphs_.end()) {
      graph = graphs_.emplace(key, kernels::Graph(cuda_, [this] { forward_.enqueue_step(); })).first;
    }
    graph->second.launch(cuda_);
  }

  Config config_;
  std::shared_ptr<const CudaWeights> weights_;
  RunnerOptions options_;
  kernels::Cuda cuda_;
  Forward<kernels::Cuda, A> forward_;
  mutable kernels::PinnedBuffer<float> logits_host_;  // [B, V]
  mutable bool logits_fetched_ = false;
  kernels::DeviceBuffer<kernels::SampleRule> rules_;  // [B]
  kernels::PinnedBuffer<int> drawn_;                  // [B], written by the device
  bool has_drawn_ = false;                            // drawn_ is what forward_.step_tokens() holds
  std::optional<Draw> next_draw_;                     // what rules_ says
  std::set<StepKey> seen_steps_;
  std::map<StepKey, kernels::Graph> graphs_;
};

DType type_of(const HostWeights& weights, Precision precision) {
  switch (precision) {
    case Precision::kF32:
      return DType::kF32;
    case Precision::kF16:
      return DType::kF16;
    case Precision::kBF16:
      return DType::kBF16;
    case Precision::kAuto:
      break;
  }
  // The stored type where all matrices agree.
  const DType first = weights.embedding.dtype;
  const auto agrees = [first](const HostMatrix& matrix) { return matrix.rows == 0 || matrix.dtype == first; };
  bool all = agrees(weights.head);
  for (const LayerWeights& w : weights.layers) {
    for (const HostMatrix* matrix : {&w.qvzk, &w.gate, &w.gate_z, &w.gamma_in, &w.gamma_up, &w.context_in,
                                     &w.context_up, &w.memory_q, &w.memory_out, &w.ffn_in, &w.ffn_out}) {
      all = all && agrees(*matrix);
    }
  }
  return all ? first : DType::kF32;
}

}  // namespace

std::string cuda_unusable_reason() { return kernels::cuda_unusable_reason(); }

CudaDeviceInfo cuda_device_info() {
  const kernels::DeviceMemory memory = kernels::device_memory();
  return {kernels::device_name(), memory.total, memory.free};
}

std::shared_ptr<const CudaWeights> upload_weights(const HostWeights& weights, Precision precision) {
  const std::string reason = cuda_unusable_reason();
  if (!reason.empty()) throw std::runtime_error(reason);
  return std::make_shared<const CudaWeights>(weights, type_of(weights, precision));
}

std::uint64_t device_bytes(const CudaWeights& weights) { return weights.bytes(); }

Precision precision_of(const CudaWeights& weights) {
  switch (weights.type()) {
    case DType::kF16:
      return Precision::kF16;
    case DType::kBF16:
      return Precision::kBF16;
    case DType::kF32:
      break;
  }
  return Precision::kF32;
}

std::unique_ptr<Runner> make_cuda_runner(const Config& config, std::shared_ptr<const CudaWeights> weights, int batch,
                                         const RunnerOptions& options) {
  switch (weights->type()) {
    case DType::kF16:
      return std::make_unique<CudaRunner<kernels::Float16>>(config, std::move(weights), batch, options);
    case DType::kBF16:
      return std::make_unique<CudaRunner<kernels::BFloat16>>(config, std::move(weights), batch, options);
    case DType::kF32:
      break;
  }
  return std::make_unique<CudaRunner<float>>(config, std::move(weights), batch, options);
}

}  // namespace mmrec::models
