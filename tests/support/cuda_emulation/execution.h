// Grids, blocks and warps: how the threads of a kernel take turns and where they meet.
//
// Every thread is a fiber. Threads run until they wait, in half of the blocks in the order of their index, in the
// others in the reverse order: what passes in one order only lacks a barrier. When no thread can go on, the process
// ends with a list of who waits where.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "include/vector_types.h"

// The built-in variables: those of the thread that is running.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

namespace mmrec::cuda_emulation {

struct Block;

/// Ends the process with the message and the running thread's coordinates.
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

/// What one thread has asked for to be done asynchronously, in groups. It is done at the last moment that the
/// architecture allows, when the thread waits for the group. So a missing wait shows as stale data.
class AsyncGroups {
 public:
  void add(std::function<void()> work) { open_.push_back(std::move(work)); }
  /// Closes the group of the work added since the last commit; it may be empty.
  void commit() {
    groups_.push_back(std::move(open_));
    open_.clear();
  }
  /// Does the work of groups, the oldest first, until at most `pending` groups are left.
  void wait(std::size_t pending) {
    while (groups_.size() > pending) {
      for (const auto& work : groups_.front()) work();
      groups_.erase(groups_.begin());
    }
  }
  /// Nothing waits to be done.
  bool idle() const {
    if (!open_.empty()) return false;
    for (const auto& group : groups_) {
      if (!group.empty()) return false;
    }
    return true;
  }

 private:
  std::vector<std::function<void()>> open_;
  std::vector<std::vector<std::function<void()>>> groups_;
};

struct Thread {
  enum class State : std::uint8_t { kReady, kWaiting, kExited };
  uint3 index = {};
  Block* block = nullptr;
  int lane = 0;  // 0..31 in its warp
  State state = State::kReady;
  bool paused = false;           // gave up its turn to wait for a change in memory
  const char* where = nullptr;   // what it waits at
  AsyncGroups products;          // wgmma
  bool products_fenced = false;  // wgmma.fence has been executed
};

/// Lanes of a warp that meet under one mask.
struct Meeting {
  std::uint32_t mask = 0;
  std::uint32_t arrived = 0;
  const char* what = nullptr;
  int leader = -1;                      // the lane that was woken to act, or -1
  std::array<void*, 32> operands = {};  // of those that arrived
};

struct Warp {
  Thread* threads = nullptr;
  std::uint32_t live = 0;  // lanes that exist and have not exited
  std::uint32_t open = 0;  // which meetings are in use; a lane is in one at most
  std::array<Meeting, 32> meetings;
};

struct Barrier {
  unsigned arrived = 0;
  unsigned expected = 0;  // threads, or 0 for all that live
  std::vector<Thread*> waiting;
};

/// A copy on its way into a block's shared memory, and the barrier there that it reports its bytes to.
struct BulkLoad {
  std::uint64_t* barrier = nullptr;
  std::size_t bytes = 0;
  std::function<void()> copy;
};

struct Block {
  uint3 index = {};
  unsigned live = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::array<Barrier, 16> barriers;
  std::array<Barrier, 8> warpgroups;
  /// The block's shared memory: offset 0 is a multiple of 1,024, the dynamic part starts at kDynamicSharedOffset.
  std::byte* shared_window = nullptr;
  std::size_t shared_bytes = 0;  // of the dynamic part
  std::vector<BulkLoad> bulk_loads;
  Block* cluster = nullptr;  // first block of the cluster
  unsigned cluster_size = 1;
  unsigned cluster_rank = 0;
  Barrier* cluster_barrier = nullptr;
};

/// As little alignment as the declaration of dynamic shared memory promises (128 bytes), so that code which needs more
/// and does not see to it fails here.
inline constexpr std::size_t kDynamicSharedOffset = 128;

struct Grid {
  dim3 grid;
  dim3 block;
  unsigned cluster_size = 1;  // along x
  std::size_t shared_bytes = 0;
  bool cooperative = false;  // all blocks alive at once
};

/// Runs `kernel` once for every thread of the grid. Grids of several host threads take turns.
void run(const Grid& grid, const std::function<void()>& kernel);

// What follows is for code that runs inside a kernel.

extern Thread* current_thread;
inline Thread& this_thread() { return *current_thread; }

/// Lets others run; for loops that wait for a change in memory. A kernel whose threads do nothing else is reported.
void pause(const char* where);

/// Barrier `id` of the block. `threads` that take part, 0 for all that have not exited. `arrive` does not wait.
void meet_block(unsigned id, const char* where, unsigned threads = 0);
void arrive_at_block(unsigned id, unsigned threads);
/// The caller's warpgroup, whose threads all live.
void meet_warpgroup(const char* where);
/// All threads of the cluster.
void meet_cluster(const char* where);

/// Waits for the other lanes of the mask that have not exited; true for one of them, which then acts on all operands
/// and calls dismiss().
bool join_lanes(std::uint32_t mask, const char* what, void* operand, Meeting*& meeting);
void dismiss(Meeting& meeting);

/// The lanes of `mask` meet; one of them runs `action(lanes)`, where lanes[i] points to what lane i brought, or is null
/// if lane i does not take part. All go on afterwards.
template <class Operand, class Action>
void meet_lanes(std::uint32_t mask, const char* what, Operand& mine, Action action) {
  Meeting* meeting = nullptr;
  if (!join_lanes(mask, what, &mine, meeting)) return;
  std::array<Operand*, 32> lanes;
  for (std::size_t i = 0; i < 32; ++i) lanes[i] = static_cast<Operand*>(meeting->operands[i]);
  action(lanes.data());
  dismiss(*meeting);
}

}  // namespace mmrec::cuda_emulation
