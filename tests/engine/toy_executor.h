// An executor small enough to check by eye, for tests of the engine that need no weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/session/access.h"
#include "mmrec/errors.h"
#include "mmrec/sampler.h"
#include "models/mmrec/config.h"
#include "models/mmrec/state.h"
#include "models/runtime/executor.h"

namespace mmrec::test {

/// What a toy executor was asked, and how it shall behave.
struct ToyLog {
  std::vector<int> acquired = {};                     // slots of each acquire()
  std::vector<std::vector<std::int64_t>> calls = {};  // rows of each run of each run() and step()
  models::ExecutionOptions options = {};              // of the last acquire()
  int drawn = 0;                                      // draws made where the logits are
  int fetched = 0;                                    // times logits were brought to the host
  int copies = 0;
  int through_host = 0;  // states saved or loaded

  int most_slots = 1 << 20;   // set by a test: for more there is no memory
  bool ahead = false;         // set by a test: sequences draw by themselves
  bool draws = false;         // set by a test: it draws by itself, as a device does
  bool steps = false;         // set by a test: it says that it steps by itself
  std::int64_t chunk = 16;    // rows of a run between two questions
  bool one_by_one = false;    // runs after one another instead of together
  std::int64_t piece = 4096;  // set by a test: rows of a piece of a prompt
};

inline std::shared_ptr<ToyLog> logged(ToyLog log = {}) { return std::make_shared<ToyLog>(std::move(log)); }

inline models::Config toy_config(std::int64_t vocab = 11) {
  models::Config config;
  config.vocab_size = vocab;
  config.model_dim = 4;
  config.num_layers = 2;
  config.num_heads = 1;
  config.ffn_dim = 4;
  config.memory_segment = 5;
  config.memory_slots = 3;
  return config;
}

/// Between -1 and 1, continuous, and cheaper than a sine, of which a document of a million tokens would need many.
inline double wave(double x) {
  x *= 0.16;
  return 4.0 * std::abs(std::abs(x - static_cast<double>(static_cast<std::int64_t>(x))) - 0.5) - 1.0;
}
/// The logits of a toy executor that is given no others.
inline float toy_logit(double summary, std::int64_t /*position*/, int token) {
  return static_cast<float>(3.0 * wave(summary + 0.7 * token));
}

/// A recurrent model in form: hidden state, memory ring and running sum as models::HostState has them, every logit a
/// function of all of them, sequences independent, no result dependent on how tokens are cut into calls. It keeps count
/// of each sequence's position, and fails where a caller has another one in mind.
class ToyExecutor final : public models::Executor {
 public:
  /// Logits [V] of the next token from a summary of the state and the tokens consumed by the sequence.
  using Logits = std::function<float(double summary, std::int64_t position, int token)>;

  explicit ToyExecutor(models::Config config, std::shared_ptr<ToyLog> log = nullptr, Logits logits = {})
      : config_(std::move(config)),
        layout_(models::state_layout(config_)),
        log_(std::move(log)),
        logits_of_(logits ? std::move(logits) : toy_logit) {
    layout_.slot_bytes += sizeof(std::int64_t);  // behind the state a slot has its position
  }

  std::size_t slot_bytes() const override { return layout_.slot_bytes; }
  models::Slot acquire(int count, const models::ExecutionOptions& options) override {
    if (log_) {
      if (count > log_->most_slots) throw std::bad_alloc();
      log_->acquired.push_back(count);
      log_->options = options;
    }
    return new std::byte[static_cast<std::size_t>(count) * slot_bytes()]();
  }
  int sequences_of_a_call() override { return 3; }
  void release(models::Slot first) noexcept override { delete[] first; }
  void clear(models::Slot first, int count) override {
    std::fill_n(first, static_cast<std::size_t>(count) * slot_bytes(), std::byte{0});
  }
  void copy(models::Slot from, models::Slot to, int count, std::int64_t position) override {
    for (int b = 0; b < count; ++b) check(slot(from, b), position);
    if (log_) ++log_->copies;
    std::copy_n(from, static_cast<std::size_t>(count) * slot_bytes(), to);
  }

  models::HostState save(models::Slot first, int count, std::int64_t position) override {
    if (log_) ++log_->through_host;
    for (int b = 0; b < count; ++b) check(slot(first, b), position);
    models::HostState all = models::zero_state(layout_, count, position);
    models::for_each_piece(
        all, layout_, [&](auto* values, std::size_t at, std::size_t bytes) { std::memcpy(values, first + at, bytes); });
    return all;
  }
  void load(models::Slot first, const models::HostState& all) override {
    if (log_) ++log_->through_host;
    const auto batch = static_cast<int>(all.batch);
    clear(first, batch);
    for (int b = 0; b < batch; ++b) position_of(slot(first, b)) = all.position;
    models::for_each_piece(all, layout_, [&](const auto* values, std::size_t at, std::size_t bytes) {
      std::memcpy(first + at, values, bytes);
    });
  }

  models::Done run(const models::Work& work, const models::ExecutionOptions& /*options*/) override {
    record(work.runs);
    models::Done done;
    done.rows.assign(work.runs.size(), 0);
    for (bool is_last = false;;) {
      bool is_done = true;
      for (std::size_t i = 0; i < work.runs.size(); ++i) {
        const models::Run& run = work.runs[i];
        std::int64_t& rows = done.rows[i];
        const std::int64_t end = std::min(run.rows, rows + (log_ ? log_->chunk : 16));
        const bool waits = log_ && log_->one_by_one && !is_done;
        for (; !waits && rows < end; ++rows) consume(run, rows, work);
        is_done = is_done && rows == run.rows;
      }
      if (is_done || is_last) break;
      if (work.progress) is_last = !work.progress(done.rows);
    }
    for (const std::int64_t rows : done.rows) done.stats += {rows, 2 * rows, 3, 1};
    return done;
  }
  std::int64_t rows_of_a_piece(std::size_t /*prompts*/) const override { return log_ ? log_->piece : 4096; }
  std::int64_t piece(std::int64_t, std::int64_t rows, std::int64_t most) override {
    return std::clamp<std::int64_t>(most, 1, rows);
  }
  bool steps_by_itself() const override { return log_ && log_->steps; }
  void step(std::span<const int> tokens, std::span<const models::Run> runs,
            const models::ExecutionOptions& /*options*/) override {
    record(runs);
    for (const models::Run& run : runs) consume(run, 0, {.tokens = tokens, .runs = runs});
  }

  void logits(models::Slot first, int count, std::span<float> to) override {
    if (log_) ++log_->fetched;
    for (int b = 0; b < count; ++b) {
      const std::span<float> from = part(slot(first, b), kLogits);
      std::ranges::copy(from, to.begin() + b * std::ssize(from));
    }
  }
  bool draw(std::span<const models::Draw> draws, std::span<int> tokens, std::span<float> logprobs) override {
    if (!log_ || !log_->draws) return false;
    ++log_->drawn;
    for (std::size_t b = 0; b < tokens.size(); ++b) {
      const Sample sample = sampled(draws[b], draws[b].recent);
      tokens[b] = sample.token;
      if (!logprobs.empty()) logprobs[b] = sample.logprob;
    }
    return true;
  }
  bool draw_and_step(std::span<const models::Draw> draws, std::span<const models::Run> runs, std::span<int> tokens,
                     std::span<float> logprobs) override {
    if (!steps_by_itself() || !draw(draws, tokens, logprobs)) return false;
    std::vector<int> consumed(tokens.begin(), tokens.end());
    for (int& token : consumed) token = std::max(token, 0);
    step(consumed, runs, {});
    return true;
  }
  std::unique_ptr<models::TokenStream> draw_ahead(const models::Draw& first, std::int64_t position,
                                                  bool logprobs) override {
    if (!log_ || !log_->ahead) return nullptr;
    return std::make_unique<Stream>(*this, first, position, logprobs);
  }

 private:
  class Stream final : public models::TokenStream {
   public:
    Stream(ToyExecutor& executor, const models::Draw& first, std::int64_t position, bool logprobs)
        : executor_(executor),
          next_(first),
          position_(position),
          logprobs_(logprobs),
          recent_(first.recent.begin(), first.recent.end()) {}
    void enqueue() override {
      if (has_token_) {
        const models::Run run{next_.slot, position_++, 0, 1};
        executor_.step({&token_, 1}, {&run, 1}, {});
      }
      const Sample sample = executor_.sampled(next_, recent_);
      token_ = std::max(sample.token, 0);
      waiting_.emplace_back(sample.token, logprobs_ ? sample.logprob : 0.0F);
      recent_.push_back(token_);
      if (waiting_.size() > kAhead) throw std::logic_error("too many tokens wait");
      has_token_ = true;
      next_.step += 1;
    }
    std::pair<int, float> fetch() override {
      const auto first = waiting_.front();
      waiting_.erase(waiting_.begin());
      return first;
    }

   private:
    ToyExecutor& executor_;
    models::Draw next_;
    std::int64_t position_;
    bool logprobs_;
    bool has_token_ = false;
    int token_ = 0;
    std::vector<int> recent_;
    std::vector<std::pair<int, float>> waiting_;
  };

  /// The parts of the layout, which are fp32 but for kSegmentSum.
  enum Part : std::size_t { kH, kMemory, kSegmentSum, kLogits };
  template <class T = float>
  std::span<T> part(models::Slot slot, Part which) const {
    const models::StatePart& found = layout_.parts[which];
    return {reinterpret_cast<T*>(slot + found.offset), static_cast<std::size_t>(found.rows * found.cols)};
  }
  models::Slot slot(models::Slot first, int sequence) const {
    return first + static_cast<std::size_t>(sequence) * slot_bytes();
  }
  std::int64_t& position_of(models::Slot slot) const {
    return *reinterpret_cast<std::int64_t*>(slot + slot_bytes() - sizeof(std::int64_t));
  }
  void check(models::Slot slot, std::int64_t position) const {
    if (position_of(slot) != position) throw std::logic_error("the caller is mistaken about a sequence's position");
  }
  /// What the sampler draws, or why there is nothing.
  Sample sampled(const models::Draw& draw, std::span<const int> recent) const {
    const std::span<const float> logits = part(draw.slot, kLogits);
    try {
      return Sampler(draw.options).sample(logits, recent, draw.step, draw.sequence);
    } catch (const NumericError&) {
      const bool is_sound = std::ranges::all_of(logits, [](float x) { return x < HUGE_VALF; });
      return {is_sound ? kNoCandidate : kFaultyRow, 0.0F};
    }
  }
  void record(std::span<const models::Run> runs) {
    if (!log_) return;
    std::vector<std::int64_t>& rows = log_->calls.emplace_back();
    for (const models::Run& run : runs) rows.push_back(run.rows);
  }

  void consume(const models::Run& run, std::int64_t row, const models::Work& work) {
    check(run.slot, run.position + row);
    const auto at_row = static_cast<std::size_t>(run.first_row + row);
    const int token = work.tokens[at_row];
    const std::span<float> logits = part(run.slot, kLogits);
    std::int64_t& position = position_of(run.slot);
    const bool is_scored = position > 0 && !(work.is_piece && row == 0);
    if (!work.logprobs.empty()) work.logprobs[at_row] = is_scored ? logprob(logits, token) : 0.0F;
    remember(run.slot, token);
    ++position;
    const double summary = summarise(run.slot);
    for (std::size_t v = 0; v < logits.size(); ++v) logits[v] = logits_of_(summary, position, static_cast<int>(v));
    if (work.is_piece && row + 1 == run.rows && at_row + 1 < work.tokens.size()) {
      work.logprobs[at_row + 1] = logprob(logits, work.tokens[at_row + 1]);
    }
  }

  void remember(models::Slot slot, int token) const {
    const auto dim = static_cast<std::size_t>(config_.model_dim);
    const auto slots = static_cast<std::size_t>(config_.memory_slots);
    const std::int64_t position = position_of(slot);
    const std::span<float> h = part(slot, kH), memory = part(slot, kMemory);
    const std::span<double> segment_sum = part<double>(slot, kSegmentSum);
    for (std::size_t cell = 0; cell < h.size(); ++cell) {
      const std::size_t layer = cell / dim, d = cell % dim;
      h[cell] = 0.9F * h[cell] + static_cast<float>(wave(token + 1.0 + static_cast<double>(d + layer)));
      segment_sum[cell] += static_cast<double>(h[cell]);
      if ((position + 1) % config_.memory_segment == 0) {
        const auto filled = static_cast<std::size_t>(position / config_.memory_segment % config_.memory_slots);
        memory[(layer * slots + filled) * dim + d] =
            static_cast<float>(segment_sum[cell] / static_cast<double>(config_.memory_segment));
        segment_sum[cell] = 0.0;
      }
    }
  }

  double summarise(models::Slot slot) const {
    double sum = 0.0;
    for (const float x : part(slot, kH)) sum += static_cast<double>(x);
    for (const float x : part(slot, kMemory)) sum += static_cast<double>(x);
    for (const double x : part<double>(slot, kSegmentSum)) sum += x;
    return sum;
  }

  static float logprob(std::span<const float> logits, int token) {
    double sum = 0.0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x));
    return static_cast<float>(static_cast<double>(logits[static_cast<std::size_t>(token)]) - std::log(sum));
  }

  models::Config config_;
  models::StateLayout layout_;
  std::shared_ptr<ToyLog> log_;
  Logits logits_of_;
};

inline constexpr std::uint64_t kToyFingerprint = 0x1122334455667788;

inline Session toy_session(int batch = 1) {
  const models::Config config = toy_config();
  return engine::Access::session(std::make_shared<ToyExecutor>(config), models::state_layout(config), config.vocab_size,
                                 kToyFingerprint, batch, {});
}

inline Model toy_model(std::shared_ptr<ToyLog> log = nullptr, const models::Config& config = toy_config(),
                       ToyExecutor::Logits logits = {}, Device device = Device::kCpu,
                       std::uint64_t fingerprint = kToyFingerprint, const VariantOptions& variant = {}) {
  ModelInfo info;
  info.device = device;
  info.vocab_size = config.vocab_size;
  info.fingerprint = fingerprint;
  info.variant = variant;
  return engine::Access::model(info, models::state_layout(config),
                               std::make_shared<ToyExecutor>(config, std::move(log), std::move(logits)));
}

/// Devices with logs of their own.
struct ToyDevices {
  explicit ToyDevices(std::size_t count, const models::Config& config = toy_config(),
                      const ToyExecutor::Logits& logits = {}, Device device = Device::kCpu) {
    for (std::size_t i = 0; i < count; ++i) {
      logs.push_back(std::make_shared<ToyLog>());
      models.push_back(toy_model(logs.back(), config, logits, device));
    }
  }
  std::vector<std::shared_ptr<ToyLog>> logs;
  std::vector<Model> models;
};

/// A model that, greedily sampled, continues a prompt of `start` tokens with `script`, then repeats its last token.
inline Model scripted_model(std::vector<int> script, std::int64_t vocab, std::int64_t start = 1) {
  return toy_model(nullptr, toy_config(vocab),
                   [script = std::move(script), start](double, std::int64_t position, int token) {
                     const std::int64_t at = std::min(position - start, static_cast<std::int64_t>(script.size()) - 1);
                     return at >= 0 && token == script[static_cast<std::size_t>(at)] ? 20.0F : 0.0F;
                   });
}

}  // namespace mmrec::test
