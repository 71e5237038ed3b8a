// How tiles of a scan hand the carry on: one pass, by looking back.
//
// A chain is up to 32 adjacent channels through all chunks of time, looked after by one warp of whichever block has the
// chunk's tile; a lane is a channel. For each chunk a channel has a record of 16 bytes, written and read whole: what it
// is (nothing yet, the chunk's total, the carry after the chunk) and three words of it. So a record needs no fence
// between what it says and that it says so, and publishing waits for none of the block's other stores.
//
// The total is published as soon as it is known. The carry before a chunk is found at the nearest chunk before that
// has published its own, and the totals of the chunks between are applied to it, oldest first: carry = advance(carry,
// total), the very operation by which those chunks compute the carries that they publish. So the bits do not depend on
// where a carry was found. Carries are as wide as the operator wants (fp64).
//
// Few channels make long chains: hundreds of chunks of one chain are in work at once. There `group` chunks hand on as
// one: a chunk adds up the totals of its group's chunks before it, the last one publishes the group's total and carry,
// and looking back is for groups. Elsewhere a group is one chunk.
//
// Records lie in a ring of groups, which stays in L2 and does not grow with time. A group takes over its records only
// when all that may look at what they held are past that. Statuses count, so a reused record is not mistaken. After the
// last chunk its warp clears the chain: records are zero between launches.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cuda/isa/ptx.cuh"

namespace mmrec::kernels {

inline constexpr std::uint32_t kScanWindow = 31;  // groups to look back at most: one less than a warp has lanes
inline constexpr std::uint32_t kScanGroup = 8;    // chunks of a group, where it is not one

/// fp64 as two words of a record.
__device__ inline void put_double(double x, std::uint32_t& low, std::uint32_t& high) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  low = static_cast<std::uint32_t>(bits);
  high = static_cast<std::uint32_t>(bits >> 32);
}
__device__ inline double get_double(std::uint32_t low, std::uint32_t high) {
  return std::bit_cast<double>(std::uint64_t{high} << 32 | low);
}

/// What all chains of a launch share.
struct ScanChains {
  uint4* records = nullptr;  // zeros, [chain][ring][group][channel]: the group's own, then its chunks' but the last's
  std::uint32_t chunks = 0;
  std::uint32_t group = 1;   // chunks; 1 or kScanGroup
  std::uint32_t window = 0;  // groups to look back
  std::uint32_t ring = 0;    // groups: a power of two, more than twice the window
  std::uint32_t width = 0;   // channels of a chain
};

/// A chain as its warp sees it; all 32 lanes call everything. Op is that of scan.cuh.
template <class Op>
class ScanChain {
 public:
  using Total = typename Op::Total;
  using Carry = typename Op::Carry;

  __device__ ScanChain(const ScanChains& chains, std::uint32_t chain, int lane)
      : chains_(chains),
        records_(chains.records + std::size_t{chain} * chains.ring * chains.group * chains.width),
        lane_(static_cast<std::uint32_t>(lane)) {}

  /// Until nobody can touch any more what the chunk's records held before: group - ring wrote it, the `window` groups
  /// after that looked at it. Before the last chunk also until early groups have settled, for finish().
  __device__ void wait_for_records(std::uint32_t chunk) const {
    const std::uint32_t group = chunk / chains_.group;
    if (group >= chains_.ring) {
      const std::uint32_t old = group - chains_.ring;
      for (;;) {
        const bool own = says(old, 0, channel(), kCarry);  // see settle()
        const bool others = lane_ > chains_.window || says(old + lane_, 0, 0, past());
        if (__all_sync(0xffffffffU, own && others)) break;
        ptx::spin_pause();
      }
    }
    if (chunk + 1 == chains_.chunks && group > kSettled) settle(group - min(group, chains_.ring), group - kSettled);
  }

  /// Publishes the chunk's total and the carry after it; returns the carry before it. `channel` is the lane's channel
  /// of carry_in and carry_out, or -1.
  __device__ Carry hand_on(const Op& op, std::uint32_t chunk, const Total& total, std::int64_t channel) const {
    const std::uint32_t group = chunk / chains_.group, place = chunk % chains_.group;
    const bool hands_on = chunk + 1 < chains_.chunks, closes = place + 1 == chains_.group;
    if (!closes && hands_on) publish(group, 1 + place, kTotal, Op::put_total(total));
    Total before_in_group = total;
    if (place > 0) before_in_group = add_members(group, place);
    const Total through = place > 0 ? Op::combine(before_in_group, total) : total;
    if (closes && group != 0 && hands_on) publish(group, 0, kTotal, Op::put_total(through));

    const Carry start = group == 0 ? op.load(channel) : look_back(group);
    __syncwarp();  // no lane still looks back: statuses are asked of one channel for all
    if (!hands_on) {
      op.store(channel, Op::advance(start, through));
    } else if (closes) {
      publish(group, 0, kCarry, Op::put_carry(Op::advance(start, through)));
      if (chains_.group > 1) retire(group);
    } else {
      mark(group, 1 + place, kDone);
    }
    return place > 0 ? Op::advance(start, before_in_group) : start;
  }

  /// After hand_on(), while the rows write: clears the chain's records behind its last chunk, once nobody looks at
  /// anything any more and no carry is on its way. Early groups have settled before (wait_for_records), and members'
  /// totals were read by the chunks that closed their groups.
  __device__ void finish(std::uint32_t chunk) const {
    if (chunk + 1 != chains_.chunks) return;
    const std::uint32_t last = chunk / chains_.group;
    settle(last - min(last, min(chains_.ring, kSettled)), last);
    wait_for_members(last, chunk % chains_.group);
    __syncwarp();
    if (lane_ >= chains_.width) return;
    const std::uint32_t used = min(last + 1, chains_.ring) * chains_.group;
    for (std::uint32_t i = 0; i < used; ++i) records_[std::size_t{i} * chains_.width + lane_] = make_uint4(0, 0, 0, 0);
  }

 private:
  // What a record says, for its group: the status is 4 * group + 1 and more, so that it only grows.
  static constexpr std::uint32_t kTotal = 0, kCarry = 1, kDone = 1, kRetired = 2;
  static __device__ std::uint32_t status(std::uint32_t group, std::uint32_t what) { return 4 * group + what + 1; }

  __device__ uint4* record(std::uint32_t group, std::uint32_t slot, std::uint32_t channel) const {
    const std::size_t at = std::size_t{group & (chains_.ring - 1)} * chains_.group + slot;
    return records_ + at * chains_.width + channel;
  }
  /// The lane's own channel; of a narrower chain its last for the lanes beyond, which compute along.
  __device__ std::uint32_t channel() const { return min(lane_, chains_.width - 1); }

  __device__ void publish(std::uint32_t group, std::uint32_t slot, std::uint32_t what, uint4 record) const {
    record.x = status(group, what);
    if (lane_ < chains_.width) ptx::store_relaxed_quad(this->record(group, slot, lane_), record);
  }
  __device__ void mark(std::uint32_t group, std::uint32_t slot, std::uint32_t what) const {
    if (lane_ == 0) ptx::store_relaxed(&record(group, slot, 0)->x, status(group, what));
  }
  __device__ bool says(std::uint32_t group, std::uint32_t slot, std::uint32_t channel, std::uint32_t what) const {
    return ptx::load_relaxed(&record(group, slot, channel)->x) >= status(group, what);
  }

  /// The lane's record, once it says `what`.
  __device__ uint4 read(std::uint32_t group, std::uint32_t slot, std::uint32_t what) const {
    for (;;) {
      const uint4 found = ptx::load_relaxed_quad(record(group, slot, channel()));
      if (found.x >= status(group, what)) return found;
      ptx::spin_pause();
    }
  }

  /// What a group's first record says when all that may look at what lies before the group are past that.
  __device__ std::uint32_t past() const { return chains_.group > 1 ? kRetired : kCarry; }
  /// Until groups [first, last) are past all that, and their carries have come. A warp's store of a record per channel
  /// reaches L2 in parts: that the first channel's is there says nothing of the others, so each lane looks at its own.
  __device__ void settle(std::uint32_t first, std::uint32_t last) const {
    const std::uint32_t what = lane_ == 0 ? past() : kCarry;
    for (std::uint32_t next = first; next < last;) {
      bool all = true;
#pragma unroll
      for (std::uint32_t i = 0; i < kSettled; ++i) all &= says(min(next + i, last - 1), 0, channel(), what);
      if (all) {
        next += kSettled;
      } else {
        ptx::spin_pause();
      }
    }
    __syncwarp();
  }
  /// Until the first `count` chunks of a group have looked back.
  __device__ void wait_for_members(std::uint32_t group, std::uint32_t count) const {
    while (!__all_sync(0xffffffffU, lane_ >= count || says(group, 1 + lane_, 0, kDone))) ptx::spin_pause();
  }
  __device__ void retire(std::uint32_t group) const {
    wait_for_members(group, chains_.group - 1);
    mark(group, 0, kRetired);
  }

  /// The totals of the first `count` chunks of a group.
  __device__ Total add_members(std::uint32_t group, std::uint32_t count) const {
    Total sum = Op::get_total(read(group, 1, kTotal));
    for (std::uint32_t next = 1; next < count; next += kBatch) {
      uint4 found[kBatch];
#pragma unroll
      for (std::uint32_t i = 0; i < kBatch; ++i) {
        if (next + i < count) found[i] = ptx::load_relaxed_quad(record(group, 1 + next + i, channel()));
      }
#pragma unroll
      for (std::uint32_t i = 0; i < kBatch; ++i) {
        if (next + i >= count) break;
        if (found[i].x < status(group, kTotal)) found[i] = read(group, 1 + next + i, kTotal);
        sum = Op::combine(sum, Op::get_total(found[i]));
      }
    }
    return sum;
  }

  /// The carry before a group. Lane i looks i + 1 groups back for the nearest carry behind which no total is missing;
  /// mostly it is the first one's, which is read along.
  __device__ Carry look_back(std::uint32_t group) const {
    const bool look = lane_ < min(group, chains_.window);
    std::uint32_t oldest = 0;
    for (;;) {
      const uint4 newest = ptx::load_relaxed_quad(record(group - 1, 0, channel()));
      const std::uint32_t found = look ? ptx::load_relaxed(&record(group - 1 - lane_, 0, 0)->x) : 0;
      if (__all_sync(0xffffffffU, newest.x >= status(group - 1, kCarry))) return Op::get_carry(newest);
      const unsigned totals = __ballot_sync(0xffffffffU, look && found >= status(group - 1 - lane_, kTotal));
      const unsigned carries = __ballot_sync(0xffffffffU, look && found >= status(group - 1 - lane_, kCarry));
      const int nearest = __ffs(static_cast<int>(carries)) - 1;
      if (nearest >= 0 && (~totals & ((1U << nearest) - 1)) == 0) {
        oldest = group - 1 - static_cast<std::uint32_t>(nearest);
        break;
      }
      ptx::spin_pause();
    }
    Carry carry = {};
    for (std::uint32_t next = oldest; next < group; next += kBatch) {
      uint4 found[kBatch];
#pragma unroll
      for (std::uint32_t i = 0; i < kBatch; ++i) {
        if (next + i < group) found[i] = ptx::load_relaxed_quad(record(next + i, 0, channel()));
      }
#pragma unroll
      for (std::uint32_t i = 0; i < kBatch; ++i) {
        if (next + i >= group) break;
        const std::uint32_t what = next + i == oldest ? kCarry : kTotal;
        if (found[i].x < status(next + i, what)) found[i] = read(next + i, 0, what);
        // Where a total has become a carry meanwhile, that is the sum of both: the same bits.
        const bool known = found[i].x >= status(next + i, kCarry);
        carry = known ? Op::get_carry(found[i]) : Op::advance(carry, Op::get_total(found[i]));
      }
    }
    return carry;
  }

  static constexpr std::uint32_t kBatch = 4;    // records on their way at once
  static constexpr std::uint32_t kSettled = 8;  // statuses on their way at once

  const ScanChains& chains_;
  uint4* const records_;
  const std::uint32_t lane_;
};

}  // namespace mmrec::kernels
