// A long sequence's chunk on a GPU in parts that go through the layers side by side, each a little behind the one
// before it.
//
// What follows the recurrence goes segment by segment and op by op. Where segments are short and the model is small
// such an op takes a few of the multiprocessors, and its latency is what counts. A layer of a part needs its own x and
// what the same layer of the part before has left in the state: its recurrence h, and what follows it the memory and
// the segment's sum. So while a part is in layer l, the next one can be in that layer's recurrence, or in layer l - 1.
// Each part is what a chunk of its tokens would be, to the bit.
//
// Parts take workers in turn. A worker has a stream, activations and a thread, because sweeps make the host wait. Many
// small ops take the host longer to launch than the device to run, so a worker records what of a whole part depends on
// neither its position nor its sequence: a layer up to the recurrence, and what follows that where all segments attend.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/mark.h"
#include "models/mmrec/listed_runs.h"
#include "models/mmrec/staggered.h"

namespace mmrec::models {

template <class A>
class Staggered<kernels::Cuda, A> {
 public:
  using Cuda = kernels::Cuda;
  static constexpr int kWorkers = 8;  // on few processors too, because they mostly wait

  Staggered(const Config& config, const ModelView<kernels::Device>& model, Cuda& main, const ChunkPlan& plan,
            const SlotLayout& slot)
      : config_(config), model_(model), main_(main), plan_(plan), slot_(slot) {}

  bool takes(const Chunk& chunk) const {
    const Batch& b = chunk.batches.front();
    return plan_.part != 0 && !chunk.packed && chunk.batches.size() == 1 && b.sequences == 1 &&
           b.position + b.tokens > plan_.part_end(b.position);
  }

  Path run(const Chunk& chunk, kernels::MatrixView<A, kernels::Device> normed, Done& done) {
    if (!threads_) threads_.emplace(kWorkers);
    cut(chunk);
    const std::size_t workers = make_workers(chunk.options);
    enqueued_.assign(parts_.size(), {});
    fault_ = nullptr;
    threads_->run([&](int thread) {
      const auto worker = static_cast<std::size_t>(thread);
      if (worker >= workers) return;
      try {
        workers_[worker]->backend.make_current();
        for (std::size_t i = worker; i < parts_.size(); i += workers) {
          run_part(i, *workers_[worker], *workers_[(worker + workers - 1) % workers], chunk, normed);
        }
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!fault_) fault_ = std::current_exception();
        changed_.notify_all();
      }
    });
    for (std::size_t i = 0; i < workers; ++i) {
      main_.follow(workers_[i]->backend);
      done.stats += workers_[i]->done.stats;
    }
    if (fault_) std::rethrow_exception(fault_);
    return Path::kReference;
  }

 private:
  /// What a layer leaves to the next part, in this order.
  enum Stage : std::uint8_t { kRecurrence, kMemory };
  static constexpr std::size_t kStages = 2;

  struct Worker {
    explicit Worker(const Staggered& of)
        : backend(of.main_.device()),
          stack(of.config_, of.model_, backend, plan_of_part(of.plan_), of.slot_),
          terms(stack.block().terms),
          tables(backend),
          pieces(terms, tables),
          layers(static_cast<std::size_t>(of.config_.num_layers)) {}
    static ChunkPlan plan_of_part(ChunkPlan plan) {
      plan.tokens = plan.rows = plan.part;
      plan.window = std::min(plan.window, plan.part);
      plan.alone = 0;
      return plan;
    }
    struct Layer {
      std::array<kernels::Mark, kStages> marks;  // behind the stages of the newest part
      kernels::Recorded inputs, finish;          // of whole parts
    };
    Cuda backend;
    Stack<Cuda, A> stack;
    BlockTerms<Cuda, A>& terms;
    Tables<Cuda> tables;
    ListedRuns<Cuda, A> pieces;  // of the newest part
    std::vector<Batch> piece_runs;
    std::vector<Layer> layers;
    Done done;
  };
  struct Stopped {};  // another worker has failed

  /// As many as there are threads, parts and memory for; parts have the same bits in any number of workers.
  std::size_t make_workers(const RecurrenceOptions& options) {
    const std::size_t most = std::min(static_cast<std::size_t>(threads_->threads()), parts_.size());
    for (std::size_t i = 0; i < most; ++i) {
      try {
        if (!workers_[i]) workers_[i] = std::make_unique<Worker>(*this);
        workers_[i]->stack.work().reserve(1, options.sweeps);
      } catch (const kernels::OutOfDeviceMemory&) {
        workers_[i] = nullptr;
        if (i == 0) throw;
        return i;
      }
      workers_[i]->backend.follow(main_);
      workers_[i]->done = {};
    }
    return most;
  }

  void cut(const Chunk& chunk) {
    const Batch& b = chunk.batches.front();
    parts_.clear();
    for (std::int64_t first = 0; first < b.tokens; first += parts_.back().tokens) {
      const std::int64_t position = b.position + first;
      parts_.push_back({.slot = b.slot,
                        .position = position,
                        .sequences = 1,
                        .tokens = std::min(b.tokens - first, plan_.part_end(position) - position)});
    }
  }

  void run_part(std::size_t number, Worker& worker, Worker& before, const Chunk& chunk,
                kernels::MatrixView<A, kernels::Device> normed) {
    const Batch& b = parts_[number];
    const std::int64_t first = b.position - parts_.front().position;
    const bool follows = number > 0 && &before != &worker;
    const Chunk part{.tokens = chunk.tokens + first,
                     .batches = {&b, 1},
                     .rows = b.tokens,
                     .ragged = chunk.ragged,
                     .options = chunk.options};
    Block<Cuda, A>& block = worker.stack.block();
    worker.stack.work().ragged = chunk.ragged;
    const bool is_whole = b.tokens == plan_.part && !chunk.ragged;
    const bool is_listed = is_whole && list_pieces(b, worker);
    block.begin(part);
    for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
      typename Worker::Layer& of_layer = worker.layers[static_cast<std::size_t>(layer)];
      const auto stage = [&](Stage which, const auto& ops) {
        if (follows) {
          await(number - 1, which, layer);
          before.layers[static_cast<std::size_t>(layer)].marks[which].await(worker.backend.stream());
        }
        ops();
        of_layer.marks[which].set(worker.backend.stream());
        const std::lock_guard lock(mutex_);
        enqueued_[number][which] = layer + 1;
        changed_.notify_all();
      };
      const auto inputs = [&] { block.inputs(layer, part); };
      is_whole ? of_layer.inputs.run(worker.backend, inputs) : inputs();
      stage(kRecurrence, [&] {
        block.recur(layer, b, chunk.options, worker.done);
        worker.terms.carry_out(layer, b);
      });
      stage(kMemory, [&] {
        if (!is_listed) return block.finish(layer, b);
        of_layer.finish.run(worker.backend, [&] { finish_listed(layer, b, worker); });
      });
    }
    worker.stack.norm_by(worker.backend, {.count = b.tokens}, normed.middle_rows(first, b.tokens));
  }
  /// Until a part's stage of a layer is enqueued.
  void await(std::size_t part, Stage stage, std::int64_t layer) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return fault_ || enqueued_[part][stage] > layer; });
    if (fault_) throw Stopped();
  }

  /// Lists the pieces of a whole part if they lie as those of all such parts do and attend to two slots or more.
  bool list_pieces(const Batch& b, Worker& worker) {
    constexpr std::int64_t kLeast = 32;  // tokens: shorter pieces are summed in another order
    const std::int64_t segment = config_.memory_segment, piece = std::min(segment, plan_.part);
    if (piece < kLeast || plan_.part % piece != 0 || segment % piece != 0) return false;
    if (b.position < 2 * segment || worker.terms.attending(b).tokens != b.tokens) return false;
    worker.piece_runs.clear();
    for (std::int64_t first = 0; first < b.tokens; first += piece) {
      worker.piece_runs.push_back(
          {.slot = b.slot, .position = b.position + first, .first_row = first, .sequences = 1, .tokens = piece});
    }
    worker.tables.clear();
    worker.pieces.lay_out(worker.piece_runs);
    worker.tables.send();
    if (worker.tables.take_moved()) {
      for (auto& layer : worker.layers) layer.finish = {};
    }
    return true;
  }
  /// Block::finish() by the lists, to the bit.
  static void finish_listed(std::int64_t layer, const Batch& b, Worker& worker) {
    const auto& w = worker.terms.layer(layer);
    worker.terms.prepare_attention(w, b, {0, b.tokens});
    for (std::size_t i = 0; i < worker.piece_runs.size(); ++i) {
      const Batch& run = worker.piece_runs[i];
      const Piece piece{run.first_row, run.tokens};
      worker.pieces.attend(w, layer, b, piece, static_cast<std::int64_t>(i), 1);
      worker.terms.feed_forward(w, b, piece);
      worker.pieces.remember(layer, b.tokens, static_cast<std::int64_t>(i), 1);
    }
  }

  const Config& config_;
  const ModelView<kernels::Device>& model_;
  Cuda& main_;
  const ChunkPlan plan_;
  const SlotLayout slot_;
  std::optional<kernels::ThreadPool> threads_;
  std::array<std::unique_ptr<Worker>, kWorkers> workers_;
  std::vector<Batch> parts_;  // of the chunk at hand
  std::mutex mutex_;          // guards all that follows
  std::condition_variable changed_;
  std::vector<std::array<std::int64_t, kStages>> enqueued_;  // layers of each part
  std::exception_ptr fault_;                                 // the first
};

}  // namespace mmrec::models
