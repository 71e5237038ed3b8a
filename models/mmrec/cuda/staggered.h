// A long sequence's chunk on a GPU in parts that go through the layers side by side, each a layer behind the one before
// it.
//
// What follows the recurrence goes segment by segment and op by op. Where segments are short and the model is small
// such an op takes a few of the multiprocessors, and its latency is what counts. A layer of a part needs its own x and
// what the same layer of the part before has left in the state: h, the memory and the segment's sum. So while a part is
// in layer l, the next one can be in layer l - 1. Each part is what a chunk of its tokens would be, to the bit.
//
// Parts take kLanes lanes in turn. A lane has a stream, activations and a thread, because sweeps make the host wait.
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
#include "models/mmrec/staggered.h"

namespace mmrec::models {

template <class A>
class Staggered<kernels::Cuda, A> {
 public:
  using Cuda = kernels::Cuda;

  Staggered(const Config& config, const ModelView<kernels::Device>& model, Cuda& main, const ChunkPlan& plan,
            const SlotLayout& slot)
      : config_(config), model_(model), main_(main), plan_(plan), slot_(slot) {}

  bool takes(const Chunk& chunk) const {
    const Batch& b = chunk.batches.front();
    return plan_.part != 0 && !chunk.packed && chunk.batches.size() == 1 && b.sequences == 1 &&
           b.position % plan_.part + b.tokens > plan_.part;
  }

  Path run(const Chunk& chunk, kernels::MatrixView<A, kernels::Device> normed, Done& done) {
    if (!threads_) threads_.emplace(kLanes);
    cut(chunk);
    const std::size_t lanes = make_lanes(chunk.options);
    enqueued_.assign(parts_.size(), 0);
    fault_ = nullptr;
    threads_->run([&](int thread) {
      const auto lane = static_cast<std::size_t>(thread);
      if (lane >= lanes) return;
      try {
        lanes_[lane]->backend.make_current();
        for (std::size_t i = lane; i < parts_.size(); i += lanes) {
          run_part(i, *lanes_[lane], *lanes_[(lane + lanes - 1) % lanes], chunk, normed);
        }
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!fault_) fault_ = std::current_exception();
        changed_.notify_all();
      }
    });
    for (std::size_t i = 0; i < lanes; ++i) {
      main_.follow(lanes_[i]->backend);
      done.stats += lanes_[i]->done.stats;
    }
    if (fault_) std::rethrow_exception(fault_);
    return path_;
  }

 private:
  static constexpr int kLanes = 4;

  /// As many as there are threads, parts and memory for; parts have the same bits in any number of lanes.
  std::size_t make_lanes(const RecurrenceOptions& options) {
    const std::size_t most = std::min(static_cast<std::size_t>(threads_->threads()), parts_.size());
    for (std::size_t i = 0; i < most; ++i) {
      try {
        if (!lanes_[i]) lanes_[i] = std::make_unique<Lane>(*this);
        lanes_[i]->stack.work().reserve(1, options.sweeps);
      } catch (const kernels::OutOfDeviceMemory&) {
        lanes_[i] = nullptr;
        if (i == 0) throw;
        return i;
      }
      lanes_[i]->backend.follow(main_);
      lanes_[i]->done = {};
    }
    return most;
  }

  struct Lane {
    explicit Lane(const Staggered& of)
        : backend(of.main_.device()),
          stack(of.config_, of.model_, backend, plan_of_part(of.plan_), of.slot_),
          marks(static_cast<std::size_t>(of.config_.num_layers)) {}
    static ChunkPlan plan_of_part(ChunkPlan plan) {
      plan.tokens = plan.rows = plan.part;
      return plan;
    }
    Cuda backend;
    Stack<Cuda, A> stack;
    std::vector<kernels::Mark> marks;  // behind each layer of its newest part
    Done done;
  };
  struct Stopped {};  // another lane has failed

  void cut(const Chunk& chunk) {
    const Batch& b = chunk.batches.front();
    parts_.clear();
    for (std::int64_t first = 0; first < b.tokens; first += parts_.back().tokens) {
      const std::int64_t position = b.position + first;
      parts_.push_back({.slot = b.slot,
                        .position = position,
                        .sequences = 1,
                        .tokens = std::min(b.tokens - first, plan_.part - position % plan_.part)});
    }
  }

  void run_part(std::size_t number, Lane& lane, Lane& before, const Chunk& chunk,
                kernels::MatrixView<A, kernels::Device> normed) {
    const Batch& b = parts_[number];
    const std::int64_t first = b.position - parts_.front().position;
    const Chunk part{.tokens = chunk.tokens + first,
                     .batches = {&b, 1},
                     .rows = b.tokens,
                     .ragged = chunk.ragged,
                     .options = chunk.options};
    const Path path = lane.stack.choose(part, lane.backend);
    lane.stack.run(path, part, {}, lane.done, [&](std::int64_t layer, const auto& run_layer) {
      const auto at = static_cast<std::size_t>(layer);
      if (number > 0 && &before != &lane) {
        await(number - 1, layer);
        before.marks[at].await(lane.backend);
      }
      run_layer();
      lane.marks[at].set(lane.backend);
      const std::lock_guard lock(mutex_);
      enqueued_[number] = layer + 1;
      changed_.notify_all();
    });
    lane.stack.norm_by(lane.backend, {.count = b.tokens}, normed.middle_rows(first, b.tokens));
    if (number == 0) path_ = path;
  }
  /// Until a part's layer is enqueued.
  void await(std::size_t part, std::int64_t layer) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return fault_ || enqueued_[part] > layer; });
    if (fault_) throw Stopped();
  }

  const Config& config_;
  const ModelView<kernels::Device>& model_;
  Cuda& main_;
  const ChunkPlan plan_;
  const SlotLayout slot_;
  std::optional<kernels::ThreadPool> threads_;
  std::array<std::unique_ptr<Lane>, kLanes> lanes_;
  std::vector<Batch> parts_;  // of the chunk at hand
  Path path_ = Path::kReference;
  std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::vector<std::int64_t> enqueued_;  // layers of each part
  std::exception_ptr fault_;            // the first
};

}  // namespace mmrec::models
