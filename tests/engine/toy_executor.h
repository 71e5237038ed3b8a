// An executor small enough to check by eye, for tests of the engine that need no weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
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
      : config_(std::move(config)), log_(std::move(log)), logits_of_(logits ? std::move(logits) : toy_logit) {}

  models::StateLayout layout() const { return models::state_layout(config_); }

  std::size_t slot_bytes() const override { return sizeof(State); }
  models::Slot acquire(int count, const models::ExecutionOptions& options) override {
    if (log_) {
      if (count > log_->most_slots) throw std::bad_alloc();
      log_->acquired.push_back(count);
      log_->options = options;
    }
    auto* first = new State[static_cast<std::size_t>(count)];
    const auto slot = reinterpret_cast<models::Slot>(first);
    zero(slot, count);
    return slot;
  }
  int sequences_of_a_call() override { return 3; }
  void release(models::Slot first) noexcept override { delete[] & at(first); }
  void clear(models::Slot first, int count) override { zero(first, count); }
  void copy(models::Slot from, models::Slot to, int count, std::int64_t position) override {
    for (int b = 0; b < count; ++b) checked(from, b, position);
    if (log_) ++log_->copies;
    std::copy_n(&at(from), count, &at(to));
  }

  models::HostState save(models::Slot first, int count, std::int64_t position) override {
    if (log_) ++log_->through_host;
    models::HostState all = models::zero_state(layout(), count, position);
    for (models::HostState::Part& part : all.parts) std::visit([](auto& values) { values.clear(); }, part.values);
    for (std::size_t layer = 0; layer < layers(); ++layer) {
      for (int b = 0; b < count; ++b) {
        const State& state = checked(first, b, position);
        append(all.get("h"), state.h, layer);
        append(all.get("memory"), state.memory, layer, filled(position));
        append(all.get<double>("segment_sum"), state.segment_sum, layer);
      }
    }
    for (int b = 0; b < count; ++b) append(all.get("logits"), at(first, b).logits);
    return all;
  }
  void load(models::Slot first, const models::HostState& all) override {
    if (log_) ++log_->through_host;
    const auto batch = static_cast<std::size_t>(all.batch);
    for (std::size_t b = 0; b < batch; ++b) {
      State& state = at(first, static_cast<int>(b));
      state = {};
      state.position = all.position;
      for (std::size_t layer = 0; layer < layers(); ++layer) {
        take(state.h, all.get("h"), layer, b, batch);
        take(state.memory, all.get("memory"), layer, b, batch);
        state.memory.resize(state.memory.size() + memory_floats() - filled(all.position));
        take(state.segment_sum, all.get<double>("segment_sum"), layer, b, batch);
      }
      const std::vector<float>& logits = all.get("logits");
      const std::size_t vocab = logits.size() / batch;
      state.logits.assign(logits.begin() + static_cast<std::ptrdiff_t>(b * vocab),
                          logits.begin() + static_cast<std::ptrdiff_t>((b + 1) * vocab));
    }
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
      const std::vector<float>& from = at(first, b).logits;
      std::copy(from.begin(), from.end(), to.begin() + b * std::ssize(from));
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
      const Sample sample = sampled(next_, recent_);
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

  /// Of one sequence; as models::HostState with a batch of 1.
  struct State {
    std::int64_t position = 0;
    std::vector<float> h, memory;
    std::vector<double> segment_sum;
    std::vector<float> logits;
  };

  static State& at(models::Slot first, int sequence = 0) { return reinterpret_cast<State*>(first)[sequence]; }
  /// What the sampler draws, or why there is nothing.
  static Sample sampled(const models::Draw& draw, std::span<const int> recent) {
    try {
      return Sampler(draw.options).sample(at(draw.slot).logits, recent, draw.step, draw.sequence);
    } catch (const NumericError&) {
      const std::vector<float>& logits = at(draw.slot).logits;
      const bool is_sound = std::all_of(logits.begin(), logits.end(), [](float x) { return x < HUGE_VALF; });
      return {is_sound ? kNoCandidate : kFaultyRow, 0.0F};
    }
  }
  static State& checked(models::Slot first, int sequence, std::int64_t position) {
    State& state = at(first, sequence);
    if (state.position != position) throw std::logic_error("the caller is mistaken about a sequence's position");
    return state;
  }
  /// Floats of one layer's memory; and those that segments have filled.
  std::size_t memory_floats() const { return static_cast<std::size_t>(config_.memory_slots * config_.model_dim); }
  std::size_t filled(std::int64_t position) const {
    return static_cast<std::size_t>(std::min(config_.memory_slots, position / config_.memory_segment) *
                                    config_.model_dim);
  }
  std::size_t layers() const { return static_cast<std::size_t>(config_.num_layers); }

  void record(std::span<const models::Run> runs) {
    if (!log_) return;
    std::vector<std::int64_t>& rows = log_->calls.emplace_back();
    for (const models::Run& run : runs) rows.push_back(run.rows);
  }
  void zero(models::Slot first, int count) {
    const std::size_t cells = layers() * static_cast<std::size_t>(config_.model_dim);
    for (int b = 0; b < count; ++b) {
      at(first, b) = {0,
                      std::vector<float>(cells),
                      std::vector<float>(cells * static_cast<std::size_t>(config_.memory_slots)),
                      std::vector<double>(cells),
                      {}};
    }
  }

  template <class T>
  static void append(std::vector<T>& to, const std::vector<T>& from) {
    to.insert(to.end(), from.begin(), from.end());
  }
  template <class T>
  void append(std::vector<T>& to, const std::vector<T>& from, std::size_t layer, std::size_t most = SIZE_MAX) const {
    const std::size_t per = from.size() / layers();
    const auto begin = from.begin() + static_cast<std::ptrdiff_t>(layer * per);
    to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(std::min(per, most)));
  }
  template <class T>
  void take(std::vector<T>& to, const std::vector<T>& from, std::size_t layer, std::size_t b, std::size_t batch) const {
    const std::size_t per = from.size() / layers() / batch;
    const auto begin = from.begin() + static_cast<std::ptrdiff_t>((layer * batch + b) * per);
    to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(per));
  }

  void consume(const models::Run& run, std::int64_t row, const models::Work& work) {
    State& state = checked(run.slot, 0, run.position + row);
    const auto at_row = static_cast<std::size_t>(run.first_row + row);
    const int token = work.tokens[at_row];
    const bool is_scored = state.position > 0 && !(work.is_piece && row == 0);
    if (!work.logprobs.empty()) work.logprobs[at_row] = is_scored ? logprob(state.logits, token) : 0.0F;
    remember(state, token);
    ++state.position;
    const double summary = summarise(state);
    state.logits.resize(static_cast<std::size_t>(config_.vocab_size));
    for (std::size_t v = 0; v < state.logits.size(); ++v) {
      state.logits[v] = logits_of_(summary, state.position, static_cast<int>(v));
    }
    if (work.is_piece && row + 1 == run.rows && at_row + 1 < work.tokens.size()) {
      work.logprobs[at_row + 1] = logprob(state.logits, work.tokens[at_row + 1]);
    }
  }

  void remember(State& state, int token) const {
    const auto dim = static_cast<std::size_t>(config_.model_dim);
    const auto slots = static_cast<std::size_t>(config_.memory_slots);
    for (std::size_t layer = 0; layer < layers(); ++layer) {
      for (std::size_t d = 0; d < dim; ++d) {
        const std::size_t cell = layer * dim + d;
        state.h[cell] = 0.9F * state.h[cell] + static_cast<float>(wave(token + 1.0 + static_cast<double>(d + layer)));
        state.segment_sum[cell] += static_cast<double>(state.h[cell]);
        if ((state.position + 1) % config_.memory_segment == 0) {
          const auto slot = static_cast<std::size_t>(state.position / config_.memory_segment % config_.memory_slots);
          state.memory[(layer * slots + slot) * dim + d] =
              static_cast<float>(state.segment_sum[cell] / static_cast<double>(config_.memory_segment));
          state.segment_sum[cell] = 0.0;
        }
      }
    }
  }

  static double summarise(const State& state) {
    double sum = 0.0;
    for (const float x : state.h) sum += static_cast<double>(x);
    for (const float x : state.memory) sum += static_cast<double>(x);
    for (const double x : state.segment_sum) sum += x;
    return sum;
  }

  static float logprob(std::span<const float> logits, int token) {
    double sum = 0.0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x));
    return static_cast<float>(static_cast<double>(logits[static_cast<std::size_t>(token)]) - std::log(sum));
  }

  models::Config config_;
  std::shared_ptr<ToyLog> log_;
  Logits logits_of_;
};

inline constexpr std::uint64_t kToyFingerprint = 0x1122334455667788;

inline Session toy_session(int batch = 1, const models::Config& config = toy_config(),
                           std::uint64_t fingerprint = kToyFingerprint) {
  return engine::Access::session(std::make_shared<ToyExecutor>(config), models::state_layout(config), config.vocab_size,
                                 fingerprint, batch, {});
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
