// The one virtual seam: a model on a backend, and the state of every sequence that runs on it. The engine talks to
// executors and knows no backend.
//
// The work of a call is a list of runs: some tokens of one sequence each. An executor owns what computing needs
// (threads or a stream, scratch, activations, recorded graphs) and a pool of slots, each the state of one sequence.
// The holder of slots knows their sequences' positions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "mmrec/prefill.h"
#include "mmrec/sampler_options.h"
#include "models/runtime/host_state.h"

namespace mmrec::kernels {
class LinearObserver;
}

namespace mmrec::models {

/// The state of one sequence, in memory of its executor. Only the executor reads it.
using Slot = std::byte*;

/// Rows [first_row, first_row + rows) of a call's tokens: those of the sequence in `slot` from `position` on. rows
/// >= 1.
struct Run {
  Slot slot = nullptr;
  std::int64_t position = 0;
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
};

/// The ways that a chunk may go through a net; all compute the same equations (models/mmrec/choose_path.h).
enum class Path : std::uint8_t { kAny, kReference, kTogether, kPacked, kRows, kWholeStep };

/// How a call computes, besides what it computes.
struct ExecutionOptions {
  int threads = 0;  // of a processor; <= 0: all. No meaning on a device
  PrefillMode prefill = PrefillMode::kAuto;
  float sweep_tolerance = 0.0F;  // 0: the backend's own for its precision
  int max_sweeps = 64;
  Path path = Path::kAny;  // for tests: run() takes this path where it may be taken, else the reference
  kernels::LinearObserver* observer = nullptr;  // of a processor's products, on any of its threads
};

/// The options of a call as the backend resolved them: neither kAuto nor a tolerance of 0.
struct RecurrenceOptions {
  bool sweeps = false;
  float tolerance = 0.0F;
  int max_sweeps = 64;
  Path path = Path::kAny;
  bool may_take(Path which) const { return path == Path::kAny || path == which; }
};

/// Asked between the chunks of a call, with how many rows of each run are done; false makes the next chunk the last.
using Progress = std::function<bool(std::span<const std::int64_t> rows_done)>;

/// Tokens of sequences that differ; token ids must lie in [0, vocab_size).
struct Work {
  std::span<const int> tokens;     // [N]
  std::span<const Run> runs;       // in order of rows
  std::span<float> logprobs = {};  // [N] or empty: receives log p of each token given all before it, 0 at position 0
  Progress progress = {};
  /// A piece of its only run: the call before scored the first token, whose element of `logprobs` becomes 0. If another
  /// piece follows, `tokens` and `logprobs` have one element more than the run has rows: the first token of that piece.
  bool is_piece = false;
  bool wants_logits = true;  // else what the slots hold of logits afterwards is undefined
  bool whole_calls = false;  // of mmrec-jax: log-probs of calls as long as its bank, which see later tokens too
};

/// How the next token of a sequence is drawn: from its logits where they are, by the chain of `options`, with the
/// random number of (seed, sequence, step). The repetition penalty counts for the tokens of `recent`, oldest first,
/// that its window reaches.
struct Draw {
  Slot slot = nullptr;
  SamplerOptions options;
  std::uint64_t sequence = 0;
  std::uint64_t step = 0;
  std::span<const int> recent = {};
};

/// A decode loop on the device, without host round trips. While it exists, no other call may use its slot, and it must
/// be destroyed before the slot is released. One thread at a time.
class TokenStream {
 public:
  TokenStream() = default;
  TokenStream(const TokenStream&) = delete;
  TokenStream& operator=(const TokenStream&) = delete;
  virtual ~TokenStream() = default;

  /// Enqueues the draw of the next token, and before it, unless it is the first, the step that consumes the token drawn
  /// last. At most kAhead tokens may wait to be fetched.
  virtual void enqueue() = 0;
  static constexpr int kAhead = 3;
  /// Waits for the oldest token that was not fetched: what Executor::draw says of it.
  virtual std::pair<int, float> fetch() = 0;
};

/// The result of a call.
struct Done {
  std::vector<std::int64_t> rows;  // of each run
  PrefillStats stats;
  unsigned paths = 0;  // bits: those that its chunks have taken
  void add(Path path) { paths |= 1U << static_cast<unsigned>(path); }
  bool has_taken(Path path) const { return (paths >> static_cast<unsigned>(path) & 1U) != 0; }
};

/// Thread-safe: calls of several threads take turns where they must.
class Executor {
 public:
  Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  virtual ~Executor() = default;

  // --- State. Slots of one acquire() lie side by side, slot_bytes() apart.

  virtual std::size_t slot_bytes() const = 0;
  /// `count` slots at position 0, and all memory that calls of so many sequences need. Throws std::bad_alloc.
  virtual Slot acquire(int count, const ExecutionOptions& options) = 0;
  virtual void release(Slot first) noexcept = 0;
  /// Back to position 0.
  virtual void clear(Slot first, int count) = 0;
  /// `position` is where the sequences are that are copied.
  virtual void copy(Slot from, Slot to, int count, std::int64_t position) = 0;
  /// State of `count` sequences at `position` in host memory, and back; shapes are those of the configuration.
  virtual HostState save(Slot first, int count, std::int64_t position) = 0;
  virtual void load(Slot first, const HostState& state) = 0;

  /// The number of sequences that a call should have if there are so many. Depends on the free memory.
  virtual int sequences_of_a_call() = 0;
  /// The same for sequences that are drawn together, token by token.
  virtual int sequences_of_a_step() { return sequences_of_a_call(); }

  // --- Work

  /// How many rows of so many prompts a call should have while other sequences wait for it.
  virtual std::int64_t rows_of_a_piece(std::size_t prompts) const = 0;
  /// The rows of a run of `rows` from `position` on that a call may take so that the next one goes on as if both were
  /// one: at most `most`, unless the first place to cut lies beyond. All of them where a run must not be cut.
  virtual std::int64_t piece(std::int64_t position, std::int64_t rows, std::int64_t most) = 0;
  /// Consumes the tokens and leaves the next token's logits in every run's slot, if they are wanted.
  virtual Done run(const Work& work, const ExecutionOptions& options) = 0;
  /// Whether step() returns before its work is done, so that the host can do something meanwhile.
  virtual bool steps_by_itself() const { return false; }
  /// The same for one token of each sequence, always exactly; on a device it may return before the work is done.
  virtual void step(std::span<const int> tokens, std::span<const Run> runs, const ExecutionOptions& options) = 0;

  /// The next token's logits, [count, V], to host memory. Requires: position >= 1.
  virtual void logits(Slot first, int count, std::span<float> to) = 0;

  /// Instead of a token: of a row that has a NaN or +inf, and of one from which nothing may be drawn.
  static constexpr int kFaultyRow = -1, kNoCandidate = -2;
  /// Draws the next token of each sequence, or one of these. Where `logprobs` is not empty it receives each token's
  /// log-softmax of the raw logits. False where this executor cannot draw: nothing has happened then.
  virtual bool draw(std::span<const Draw> draws, std::span<int> tokens, std::span<float> logprobs) {
    static_cast<void>(draws), static_cast<void>(tokens), static_cast<void>(logprobs);
    return false;
  }

  /// The same, and the step of each of these sequences that consumes its token (or some other, where none was drawn),
  /// enqueued before the tokens are known. Returns when they are, and mostly before the step is done. `runs` has one
  /// row of each draw's slot, in their order. False where this executor cannot: nothing has happened then.
  virtual bool draw_and_step(std::span<const Draw> draws, std::span<const Run> runs, std::span<int> tokens,
                             std::span<float> logprobs) {
    static_cast<void>(draws), static_cast<void>(runs), static_cast<void>(tokens), static_cast<void>(logprobs);
    return false;
  }

  /// Work of the host: body(item, thread) for each item in [0, count) on threads that the executor has, if any;
  /// 0 <= thread < kMostThreads. `body` must not throw and not call the executor.
  virtual void share(std::int64_t count, const ExecutionOptions& options,
                     const std::function<void(std::int64_t, int)>& body) {
    static_cast<void>(options);
    for (std::int64_t item = 0; item < count; ++item) body(item, 0);
  }
  static constexpr int kMostThreads = 256;

  /// Starts a decode loop of the sequence at `position`. Its draws have the options of `first` and the steps that
  /// follow, and its tokens become recent ones. Null if this executor cannot.
  virtual std::unique_ptr<TokenStream> draw_ahead(const Draw& first, std::int64_t position, bool logprobs) {
    static_cast<void>(first), static_cast<void>(position), static_cast<void>(logprobs);
    return nullptr;
  }
};

/// Slots of an executor, given back when this goes. Movable; keeps the executor alive.
class Slots {
 public:
  Slots() = default;
  Slots(std::shared_ptr<Executor> executor, int count, const ExecutionOptions& options)
      : executor_(std::move(executor)), first_(executor_->acquire(count, options)), count_(count) {}
  Slots(Slots&& other) noexcept
      : executor_(std::move(other.executor_)), first_(std::exchange(other.first_, nullptr)), count_(other.count_) {}
  Slots& operator=(Slots&& other) noexcept {
    std::swap(executor_, other.executor_);
    std::swap(first_, other.first_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~Slots() {
    if (first_ != nullptr) executor_->release(first_);
  }

  const std::shared_ptr<Executor>& executor() const { return executor_; }
  Slot first() const { return first_; }
  Slot operator[](int sequence) const { return first_ + static_cast<std::size_t>(sequence) * executor_->slot_bytes(); }
  int count() const { return count_; }

 private:
  std::shared_ptr<Executor> executor_;
  Slot first_ = nullptr;
  int count_ = 0;
};

}  // namespace mmrec::models
