// A block's part of a row of logits, in shared memory: consecutive ids, loaded once, as falling bits, with penalties
// applied and what may not be drawn left out. One block holds the whole row, or the blocks of a cluster share it.
//
// A part that does not fit is loaded again, piece by piece, for every visit. The row itself is only read. Loops over
// the part stay loops, and what one thread can do is done by one: a kernel that runs for some microseconds waits for
// its instructions as much as for its data.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/cuda/sample/order.cuh"

namespace mmrec::kernels::sampling {

inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kBatch = 4;  // vectors of 4 logits that a thread loads at a time
inline constexpr int kBatchIds = 4 * kThreads * kBatch;
inline constexpr int kWarpIds = 128;  // a warp's vectors lie side by side; parts and pieces are multiples
inline constexpr int kDigitBits = 10;
inline constexpr int kBins = 1 << kDigitBits;
inline constexpr int kOwnBins = kBins / kThreads;  // that a thread looks after
inline constexpr std::uint32_t kMostListed = 3072;
inline constexpr std::uint32_t kMostFew = 256;

inline constexpr int kMostPiece = 65536;
inline constexpr unsigned kRuleWords = sizeof(SampleRule) / sizeof(Atomic64);
static_assert(sizeof(SampleRule) % sizeof(Atomic64) == 0 && std::is_trivially_copyable_v<SampleRule>);

struct Shared {
  alignas(16) std::uint32_t count[kBins];  // candidates in a bin
  alignas(16) std::uint32_t low[kBins];    // their weights, in two words
  alignas(16) std::uint32_t high[kBins];
  Atomic64 listed[kMostListed];               // candidates of this part
  Atomic64 few[kMostFew], weights[kMostFew];  // of all parts
  Atomic64 few_of_part[kMostFew];
  SampleRule rule;
  Atomic64 partial[kWarps];
  std::uint32_t partial_count[kWarps];
  std::uint32_t first_of_warp[kWarps];
  std::uint32_t first_falling, first_id;  // of this part
  std::uint32_t list_size, few_size, drawable, distance;
  // What one thread computes for all: the number drawn, the logarithm of the least weight, the scale of the weights,
  // and the place of the token in its ring.
  double drawn, log_least;
  float scale;
  std::uint32_t ring_place;
  Atomic64 amount, last;
  int token;
  // The bin that Chain::pick chose.
  std::uint32_t bin, bin_count, count_before;
  Atomic64 bin_sum, remaining;
  alignas(16) std::uint32_t row[4];  // and more: a piece of the part
};

/// Bytes of shared memory for pieces of `piece` ids.
constexpr std::size_t shared_bytes(int piece) { return sizeof(Shared) + static_cast<std::size_t>(piece) * 4; }
/// Ids of a part where `blocks` share a row.
constexpr int part_of(int words, int blocks) {
  return (words + kWarpIds * blocks - 1) / (kWarpIds * blocks) * kWarpIds;
}

/// The blocks that share a row.
template <bool kCluster>
class Group {
 public:
  __device__ explicit Group(int blocks) : blocks_(blocks) {}
  __device__ int blocks() const { return kCluster ? blocks_ : 1; }
  __device__ int rank() const {
    if constexpr (kCluster) return static_cast<int>(ptx::cluster_rank());
    return 0;
  }
  /// A barrier of all; what they have written to shared memory is seen by all.
  __device__ void sync() const {
    if constexpr (kCluster) {
      ptx::cluster_sync_memory();
    } else {
      __syncthreads();
    }
  }
  /// What lies at this place in another block.
  template <class T>
  __device__ T load(const T* at, int rank) const {
    if constexpr (kCluster) {
      return ptx::load_from_cluster(at, static_cast<unsigned>(rank));
    } else {
      return *at;
    }
  }
  /// The block looks at no other from here on, until stay() or the end.
  __device__ void leave() {
    if constexpr (kCluster) ptx::cluster_arrive();
    has_left_ = true;
  }
  __device__ void stay() {
    if (!has_left_) leave();
    if constexpr (kCluster) ptx::cluster_wait();
    has_left_ = false;
  }

 private:
  int blocks_;
  bool has_left_ = false;
};

/// Where a block's part lies, and whose logits are penalised.
inline constexpr int kRecent = kMostSampleWindow / kThreads;
struct Place {
  const float* row;
  bool takes_vectors;
  int piece;               // ids of a piece
  int begin = 0, end = 0;  // ids
  int limit = 0;           // those that may be drawn are below
  float penalty = 1.0F;
  int recent[kRecent] = {};  // this thread's part of the recent tokens, however often they came; -1: none
};

__device__ inline int padded(int ids) { return (ids + kWarpIds - 1) / kWarpIds * kWarpIds; }

/// A batch of logits from `first` on as they are; -inf past the part's end. All that a kernel before may have written
/// is read past L1, because this one starts while that one drains.
__device__ inline void fetch(const Place& place, int first, float4 (&batch)[kBatch]) {
#pragma unroll
  for (int v = 0; v < kBatch; ++v) {
    const int id = first + 4 * (kThreads * v + static_cast<int>(threadIdx.x));
    if (place.takes_vectors && id + 4 <= place.end) {
      batch[v] = __ldcg(reinterpret_cast<const float4*>(place.row + id));
      continue;
    }
    const auto one = [&](int i) { return i < place.end ? __ldcg(place.row + i) : -INFINITY; };
    batch[v] = make_float4(one(id), one(id + 1), one(id + 2), one(id + 3));
  }
}
/// Writes a piece to shared memory; `batch` is its first part. Takes out tokens that may not be drawn and applies the
/// penalties. Returns whether this thread saw a fault.
__device__ inline bool fill(Shared& s, const Place& place, int piece, float4 (&batch)[kBatch]) {
  bool is_faulty = false;
  const int first = place.begin + piece * place.piece;
  const int ids = padded(min(place.piece, place.end - first));
  for (int from = 0;;) {
#pragma unroll
    for (int v = 0; v < kBatch; ++v) {
      const int i = from + 4 * (kThreads * v + static_cast<int>(threadIdx.x));
      if (i >= ids) break;
      const float4 x = batch[v];
      is_faulty |=
          !(x.x <= kLargestFinite) | !(x.y <= kLargestFinite) | !(x.z <= kLargestFinite) | !(x.w <= kLargestFinite);
      uint4 bits = make_uint4(falling_bits(x.x), falling_bits(x.y), falling_bits(x.z), falling_bits(x.w));
      if (const int left = place.limit - first - i; left < 4) {
        if (left < 1) bits.x = kNone;
        if (left < 2) bits.y = kNone;
        if (left < 3) bits.z = kNone;
        bits.w = kNone;
      }
      *reinterpret_cast<uint4*>(s.row + i) = bits;
    }
    from += kBatchIds;
    if (from >= ids) break;
    fetch(place, first + from, batch);
  }
  __syncthreads();
  if (place.penalty == 1.0F) return is_faulty;
  std::uint32_t penalised[kRecent];
#pragma unroll
  for (int n = 0; n < kRecent; ++n) {
    const int i = place.recent[n] - first;
    penalised[n] = kNone;
    if (place.recent[n] < 0 || i < 0 || i >= ids || s.row[i] == kNone) continue;
    const float x = from_falling_bits(s.row[i]);
    const float y = x > 0.0F ? x / place.penalty : x * place.penalty;
    penalised[n] = falling_bits(fminf(fmaxf(y, -kLargestFinite), kLargestFinite));
  }
  __syncthreads();  // all have read
#pragma unroll
  for (int n = 0; n < kRecent; ++n) {
    if (penalised[n] != kNone) s.row[place.recent[n] - first] = penalised[n];  // equal ones write the same
  }
  __syncthreads();
  return is_faulty;
}
/// Another piece than the one that is there. Not inlined: blocks with one piece do without it.
__device__ __noinline__ inline bool reload(Shared& s, Place place, int piece) {
  __syncthreads();  // nobody looks at the old one any more
  float4 batch[kBatch];
  fetch(place, place.begin + piece * place.piece, batch);
  return fill(s, place, piece, batch);
}

/// In the hands of its block: all threads make the same calls.
template <bool kCluster>
class Slice {
 public:
  __device__ Slice(Shared& shared, const SampleRule* from, const float* row, int words, bool takes_vectors, int blocks,
                   int piece)
      : group(blocks), s_(shared), place_{row, takes_vectors, piece} {
    const auto thread = static_cast<int>(threadIdx.x);
    Atomic64 word = 0;
    if (threadIdx.x < kRuleWords) word = __ldcg(reinterpret_cast<const Atomic64*>(from) + thread);
    const int part = part_of(words, group.blocks());
    place_.begin = min(words, group.rank() * part);
    place_.end = min(words, place_.begin + part);
    float4 batch[kBatch];  // under way while the rule comes
    fetch(place_, place_.begin, batch);
#pragma unroll 1
    for (int i = thread; i < kBins; i += kThreads) s_.count[i] = s_.low[i] = 0;
    if (thread == 0) {
      s_.list_size = s_.few_size = s_.drawable = 0;
      s_.first_id = ~std::uint32_t{0};
    }
    if (threadIdx.x < kRuleWords) reinterpret_cast<Atomic64*>(&s_.rule)[thread] = word;
    __syncthreads();
    place_.limit = rule().options.vocab_limit > 0 ? rule().options.vocab_limit : words;
    find_recent();
    is_faulty_ = fill(s_, place_, 0, batch);
  }

  Group<kCluster> group;
  __device__ const SampleRule& rule() const { return s_.rule; }

  /// Calls look(first id, ids) for every piece when it is there.
  template <class Look>
  __device__ void visit_pieces(Look look) {
    for (int piece = 0, first = place_.begin; first < place_.end; ++piece, first += place_.piece) {
      if (piece != loaded_) is_faulty_ |= reload(s_, place_, piece);
      loaded_ = piece;
      look(first, padded(min(place_.piece, place_.end - first)));
    }
  }

  /// Calls look(falling bits of 4 ids, the first id) for all ids of the part, rising in each thread; a warp's lie side
  /// by side, and all its lanes take part. kNone is no candidate.
  template <class Look>
  __device__ void visit_vectors(Look look) {
    visit_pieces([&](int first, int ids) {
#pragma unroll 2
      for (int i = 4 * static_cast<int>(threadIdx.x); i < ids; i += 4 * kThreads) {
        look(*reinterpret_cast<const uint4*>(s_.row + i), first + i);
      }
    });
  }
  /// look(falling bits, id) for all ids of the part.
  template <class Look>
  __device__ void visit(Look look) {
    visit_pieces([&](int first, int ids) {
#pragma unroll 2
      for (int i = static_cast<int>(threadIdx.x); i < ids; i += kThreads) look(s_.row[i], first + i);
    });
  }

  /// Falling bits of the part's first candidate, or kFault, to all threads; those of each thread's to `of_thread`.
  /// kWithId: its id to s.first_id, before the next barrier.
  template <bool kWithId>
  __device__ std::uint32_t find_first(std::uint32_t& of_thread) {
    std::uint32_t first = kNone;
    auto its_id = ~std::uint32_t{0};
    visit_vectors([&](const uint4& x, int id) {
      const std::uint32_t least = first_of(x);
      if (kWithId && least < first) {
        its_id = static_cast<std::uint32_t>(id + (x.x == least ? 0 : x.y == least ? 1 : x.z == least ? 2 : 3));
      }
      first = min(first, least);
    });
    of_thread = first;
    first = ptx::warp_min(is_faulty_ ? kFault : first);
    if (threadIdx.x % 32 == 0) s_.first_of_warp[threadIdx.x / 32] = first;
    __syncthreads();
    first = ptx::warp_min(s_.first_of_warp[threadIdx.x % kWarps]);
    if (kWithId && of_thread == first) atomicMin(&s_.first_id, its_id);
    return first;
  }
  __device__ static std::uint32_t first_of(const uint4& x) { return min(min(x.x, x.y), min(x.z, x.w)); }

 private:
  /// Loads the recent tokens, and works out where the next one goes.
  __device__ void find_recent() {
    const SampleRule& rule = s_.rule;
    const auto window = static_cast<std::uint64_t>(rule.options.repetition_window);
    if (threadIdx.x == kThreads - 1 && window > 0) {  // which takes its time
      s_.ring_place = static_cast<std::uint32_t>(rule.recent_count % window);
    }
    if (rule.recent != nullptr) place_.penalty = rule.options.repetition_penalty;
    if (place_.penalty == 1.0F) return;
#pragma unroll
    for (int n = 0; n < kRecent; ++n) {
      const unsigned at = threadIdx.x + static_cast<unsigned>(n * kThreads);
      place_.recent[n] = at < min(rule.recent_count, window) ? __ldcg(rule.recent + at) : -1;
    }
  }

  Shared& s_;
  Place place_;
  int loaded_ = 0;  // piece
  bool is_faulty_ = false;
};

}  // namespace mmrec::kernels::sampling
