#include "execution.h"

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "fiber.h"
#include "sanitizer.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace mmrec::cuda_emulation {

Thread* current_thread = nullptr;

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kWarpgroup = 128;
/// Rounds in which every thread that ran only paused, after which nothing is expected to change any more.
constexpr int kIdleRounds = 10'000;

std::mutex one_grid_at_a_time;

std::string name_of(const Thread& thread) {
  char text[160];
  std::snprintf(text, sizeof text, "block (%u, %u, %u) thread (%u, %u, %u)", thread.block->index.x,
                thread.block->index.y, thread.block->index.z, thread.index.x, thread.index.y, thread.index.z);
  return text;
}

/// Runs kernel threads, one after another.
class Worker {
 public:
  /// Until the thread waits, pauses or has exited.
  void resume() { fiber_.resume(); }
  void prefetch() const { fiber_.prefetch(); }
  void start(const std::function<void()>& kernel) { kernel_ = &kernel; }

 private:
  static void loop(void* self) {
    for (;;) {
      (*static_cast<Worker*>(self)->kernel_)();
      leave();
      Fiber::suspend();
    }
  }
  static void leave();

  const std::function<void()>* kernel_ = nullptr;
  Fiber fiber_{&Worker::loop, this};
};

std::vector<std::unique_ptr<Worker>>& workers() {
  static std::vector<std::unique_ptr<Worker>> pool;
  return pool;
}

void wait(const char* where) {
  Thread& self = *current_thread;
  self.state = Thread::State::kWaiting;
  self.where = where;
  Fiber::suspend();
}

bool open_if_complete(Barrier& barrier, unsigned live) {
  const unsigned expected = barrier.expected == 0 ? live : barrier.expected;
  if (barrier.arrived == 0 || barrier.arrived < expected) return false;
  for (Thread* thread : barrier.waiting) thread->state = Thread::State::kReady;
  barrier.waiting.clear();
  barrier.arrived = 0;
  return true;
}

void arrive(Barrier& barrier, unsigned threads, unsigned live, const char* where, bool waits) {
  if (barrier.arrived != 0 && barrier.expected != threads) {
    fail("%s: %u threads expected, others expected %u", where, threads, barrier.expected);
  }
  barrier.expected = threads;
  ++barrier.arrived;
  if (open_if_complete(barrier, live) || !waits) return;
  barrier.waiting.push_back(current_thread);
  wait(where);
}

unsigned live_in_cluster(const Block& block) {
  unsigned live = 0;
  for (unsigned i = 0; i < block.cluster_size; ++i) live += block.cluster[i].live;
  return live;
}

Warp& warp_of(const Thread& thread) {
  return thread.block->warps[static_cast<std::size_t>(&thread - thread.block->threads.data()) / kWarp];
}

/// A thread that has exited is waited for nowhere.
void Worker::leave() {
  Thread& self = *current_thread;
  if (!self.products.idle()) fail("the thread exits without having waited for its wgmma products");
  self.state = Thread::State::kExited;
  --self.block->live;
  for (Barrier& barrier : self.block->barriers) {
    if (barrier.expected == 0) open_if_complete(barrier, self.block->live);
  }
  open_if_complete(*self.block->cluster_barrier, live_in_cluster(*self.block));
  Warp& warp = warp_of(self);
  warp.live &= ~(1U << self.lane);
  for (std::uint32_t left = warp.open; left != 0; left &= left - 1) {
    Meeting& meeting = warp.meetings[static_cast<std::size_t>(std::countr_zero(left))];
    if (meeting.leader >= 0 || (meeting.mask & warp.live & ~meeting.arrived) != 0) continue;
    meeting.leader = std::countr_zero(meeting.arrived);
    warp.threads[meeting.leader].state = Thread::State::kReady;
  }
}

/// Blocks that are alive together.
class Residents {
 public:
  Residents(const Grid& grid, unsigned count) : grid_(grid), blocks_(count), cluster_barriers_(count) {
    const std::size_t bytes = kDynamicSharedOffset + grid.shared_bytes;
    for (Block& block : blocks_) {
      block.shared_window = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{1024}));
      poison(block.shared_window, kDynamicSharedOffset);
      block.threads.resize(std::size_t{grid.block.x} * grid.block.y * grid.block.z);
      block.warps.resize((block.threads.size() + kWarp - 1) / kWarp);
    }
    while (workers().size() < count * blocks_[0].threads.size()) workers().push_back(std::make_unique<Worker>());
  }
  Residents(const Residents&) = delete;
  Residents& operator=(const Residents&) = delete;
  ~Residents() {
    for (Block& block : blocks_) {
      unpoison(block.shared_window, kDynamicSharedOffset);
      ::operator delete (block.shared_window, std::align_val_t{1024});
    }
  }

  void run(std::uint64_t first_block, const std::function<void()>& kernel) {
    for (std::size_t i = 0; i < blocks_.size(); ++i) reset(i, first_block + i, kernel);
    take_turns(first_block);
    for (const Block& block : blocks_) {
      if (!block.bulk_loads.empty())
        fail("block %u has exited with copies into its shared memory on their way", block.index.x);
    }
  }

 private:
  void reset(std::size_t position, std::uint64_t linear, const std::function<void()>& kernel) {
    Block& block = blocks_[position];
    block.index = {static_cast<unsigned>(linear % grid_.grid.x),
                   static_cast<unsigned>(linear / grid_.grid.x % grid_.grid.y),
                   static_cast<unsigned>(linear / grid_.grid.x / grid_.grid.y)};
    block.live = static_cast<unsigned>(block.threads.size());
    block.shared_bytes = grid_.shared_bytes;
    std::memset(block.shared_window + kDynamicSharedOffset, 0xff, grid_.shared_bytes);
    block.cluster_size = grid_.cluster_size;
    block.cluster_rank = static_cast<unsigned>(position % grid_.cluster_size);
    block.cluster = &block - block.cluster_rank;
    block.cluster_barrier = &cluster_barriers_[position / grid_.cluster_size];
    block.barriers.fill({});
    block.warpgroups.fill({});
    for (Warp& warp : block.warps) warp.live = warp.open = 0;
    for (std::size_t i = 0; i < block.threads.size(); ++i) {
      Thread& thread = block.threads[i];
      const unsigned n = static_cast<unsigned>(i);
      thread.index = {n % grid_.block.x, n / grid_.block.x % grid_.block.y, n / grid_.block.x / grid_.block.y};
      thread.block = &block;
      thread.lane = static_cast<int>(n % kWarp);
      thread.state = Thread::State::kReady;
      thread.products = {};
      thread.products_fenced = false;
      Warp& warp = block.warps[i / kWarp];
      if (thread.lane == 0) warp.threads = &thread;
      warp.live |= 1U << thread.lane;
      workers()[position * block.threads.size() + i]->start(kernel);
    }
  }

  void take_turns(std::uint64_t first_block) {
    blockDim = grid_.block;
    gridDim = grid_.grid;
    const std::size_t threads = blocks_[0].threads.size();
    const std::vector<std::unique_ptr<Worker>>& pool = workers();
    constexpr std::size_t kAhead = 6;  // threads whose stacks are fetched before their turns
    int idle_rounds = 0;
    for (;;) {
      bool alive = false;
      bool ran = false;
      bool progress = false;
      for (std::size_t position = 0; position < blocks_.size(); ++position) {
        alive |= blocks_[position].live != 0;
        if (blocks_[position].live == 0) continue;
        const bool reverse = runs_in_reverse(first_block + position);
        for (std::size_t i = 0; i < threads; ++i) {
          const std::size_t n = reverse ? threads - 1 - i : i;
          if (i + kAhead < threads) pool[position * threads + (reverse ? n - kAhead : n + kAhead)]->prefetch();
          Thread& thread = blocks_[position].threads[n];
          if (thread.state != Thread::State::kReady) continue;
          thread.paused = false;
          current_thread = &thread;
          threadIdx = thread.index;
          blockIdx = thread.block->index;
          pool[position * threads + n]->resume();
          current_thread = nullptr;
          ran = true;
          progress |= !thread.paused;
        }
      }
      if (!alive) return;
      if (!ran) report("deadlock: every thread waits");
      idle_rounds = progress ? 0 : idle_rounds + 1;
      if (idle_rounds > kIdleRounds) report("livelock: threads wait in loops for what does not happen");
    }
  }

  [[noreturn]] void report(const char* what) const {
    std::fprintf(stderr, "CUDA emulation: %s\n", what);
    struct Group {
      std::string first;
      unsigned count = 0;
    };
    std::map<std::string, Group> groups;
    for (const Block& block : blocks_) {
      for (const Thread& thread : block.threads) {
        const bool exited = thread.state == Thread::State::kExited;
        Group& group = groups[exited ? "have exited" : std::string("wait at ") + thread.where];
        if (group.count++ == 0) group.first = name_of(thread);
      }
    }
    for (const auto& [where, group] : groups) {
      std::fprintf(stderr, "  %u threads %s; the first: %s\n", group.count, where.c_str(), group.first.c_str());
    }
    std::abort();
  }

  /// Neighbouring blocks take different orders, and so does a block at another launch: not simply at every second one,
  /// because programs repeat launches in pairs.
  bool runs_in_reverse(std::uint64_t block) const {
    return ((block + static_cast<std::uint64_t>(std::popcount(launch_))) & 1U) != 0;
  }

  static std::uint64_t next_launch() {
    static std::uint64_t launches = 0;
    return launches++;
  }

  const Grid& grid_;
  const std::uint64_t launch_ = next_launch();
  std::vector<Block> blocks_;
  std::vector<Barrier> cluster_barriers_;
};

}  // namespace

void fail(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::fputs("CUDA emulation: ", stderr);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "%s%s\n", current_thread != nullptr ? " in " : "",
               current_thread != nullptr ? name_of(*current_thread).c_str() : "");
  std::abort();
}

void run(const Grid& grid, const std::function<void()>& kernel) {
  const std::lock_guard lock(one_grid_at_a_time);
  const std::uint64_t blocks = std::uint64_t{grid.grid.x} * grid.grid.y * grid.grid.z;
  const auto together = static_cast<unsigned>(grid.cooperative ? blocks : grid.cluster_size);
  Residents residents(grid, together);
  for (std::uint64_t first = 0; first < blocks; first += together) residents.run(first, kernel);
}

void pause(const char* where) {
  current_thread->paused = true;
  current_thread->where = where;
  Fiber::suspend();
}

void meet_block(unsigned id, const char* where, unsigned threads) {
  Block& block = *current_thread->block;
  if (id >= block.barriers.size()) fail("%s: no barrier %u", where, id);
  arrive(block.barriers[id], threads, block.live, where, true);
}

void arrive_at_block(unsigned id, unsigned threads) {
  Block& block = *current_thread->block;
  if (id >= block.barriers.size() || threads == 0) fail("bar.arrive: barrier %u, %u threads", id, threads);
  arrive(block.barriers[id], threads, block.live, "bar.arrive", false);
}

void meet_warpgroup(const char* where) {
  Block& block = *current_thread->block;
  const auto thread = static_cast<std::size_t>(current_thread - block.threads.data());
  arrive(block.warpgroups[thread / kWarpgroup], kWarpgroup, block.live, where, true);
}

void meet_cluster(const char* where) {
  Block& block = *current_thread->block;
  arrive(*block.cluster_barrier, 0, live_in_cluster(block), where, true);
}

bool join_lanes(std::uint32_t mask, const char* what, void* operand, Meeting*& meeting) {
  Thread& self = *current_thread;
  Warp& warp = warp_of(self);
  const std::uint32_t bit = 1U << self.lane;
  if ((mask & bit) == 0) fail("%s: mask %08x lacks the caller's lane %d", what, mask, self.lane);
  for (std::uint32_t left = warp.open; left != 0 && meeting == nullptr; left &= left - 1) {
    Meeting& m = warp.meetings[static_cast<std::size_t>(std::countr_zero(left))];
    if (m.mask != mask) continue;
    if (m.what != what && std::strcmp(m.what, what) != 0) {
      fail("%s: other lanes of mask %08x are at %s", what, mask, m.what);
    }
    meeting = &m;
  }
  if (meeting == nullptr) {
    const int free = std::countr_one(warp.open);
    warp.open |= 1U << free;
    meeting = &warp.meetings[static_cast<std::size_t>(free)];
    *meeting = {mask, 0, what, -1, {}};
  }
  meeting->arrived |= bit;
  meeting->operands[static_cast<std::size_t>(self.lane)] = operand;
  if ((mask & warp.live & ~meeting->arrived) == 0) return true;
  wait(what);
  return meeting->leader == self.lane;
}

void dismiss(Meeting& meeting) {
  Warp& warp = warp_of(*current_thread);
  for (int lane = 0; lane < 32; ++lane) {
    if ((meeting.arrived >> lane & 1U) != 0) warp.threads[lane].state = Thread::State::kReady;
  }
  warp.open &= ~(1U << (&meeting - warp.meetings.data()));
  meeting.leader = -1;
}

}  // namespace mmrec::cuda_emulation
