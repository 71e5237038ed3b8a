// A block's part of a row of logits, in registers: consecutive ids, loaded once, with penalties applied and what may
// not be drawn left out. One block holds the whole row, or the blocks of a cluster share it.
//
// A thread holds kVectors vectors of 4 logits. A part that is longer is loaded again, piece by piece, for every visit.
// The row itself is only read: which of its ids are penalised is marked by bits in shared memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/cuda/sample/order.cuh"

namespace mmrec::kernels::sampling {

inline constexpr int kThreads = 1024;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kVectors = 4;
inline constexpr int kPiece = 4 * kThreads * kVectors;  // ids that a block's registers hold
inline constexpr int kWarpIds = 128;                    // a warp's vectors lie side by side; parts begin at a multiple
inline constexpr int kDigitBits = 10;
inline constexpr int kBins = 1 << kDigitBits;
static_assert(kBins == kThreads, "a thread looks after each bin");
inline constexpr std::uint32_t kMostListed = 3072;
inline constexpr std::uint32_t kMostFew = 256;

inline constexpr unsigned kRuleWords = sizeof(SampleRule) / sizeof(Atomic64);
static_assert(sizeof(SampleRule) % sizeof(Atomic64) == 0 && std::is_trivially_copyable_v<SampleRule>);

/// The first candidate of a block's part.
struct Summary {
  std::uint32_t falling, id;
};

struct Shared {
  alignas(16) std::uint32_t count[kBins];  // candidates in a bin
  alignas(16) std::uint32_t low[kBins];    // their weights, in two words
  alignas(16) std::uint32_t high[kBins];
  Atomic64 listed[kMostListed];               // candidates of this part
  Atomic64 few[kMostFew], weights[kMostFew];  // of all parts
  SampleRule rule;
  Atomic64 partial[kWarps];
  std::uint32_t partial_count[kWarps];
  std::uint32_t first_falling[kWarps], first_id[kWarps];  // of each warp
  Summary summary;
  std::uint32_t list_size, few_size, drawable, distance;
  double drawn, log_min_p;
  Atomic64 amount;
  int token;
  // The bin that Chain::pick chose.
  std::uint32_t bin, bin_count, count_before;
  Atomic64 bin_sum, remaining;
  std::uint32_t marks[1];  // and more: of penalised ids
};

/// Bytes of shared memory for parts of so many ids.
constexpr std::size_t shared_bytes(int part) { return sizeof(Shared) + static_cast<std::size_t>(part) / 8; }
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

/// In the hands of its block: all threads make the same calls.
template <bool kCluster>
class Slice {
 public:
  __device__ Slice(Shared& shared, const SampleRule* from, const float* row, int words, bool takes_vectors, int blocks)
      : group(blocks), s_(shared), row_(row), takes_vectors_(takes_vectors) {
    const int part = part_of(words, group.blocks());
    begin_ = min(words, group.rank() * part);
    end_ = min(words, begin_ + part);
    fetch(0);  // under way while the rule comes
    if (threadIdx.x < kRuleWords)
      reinterpret_cast<Atomic64*>(&s_.rule)[threadIdx.x] =
          __ldcg(reinterpret_cast<const Atomic64*>(from) + threadIdx.x);
    s_.count[threadIdx.x] = s_.low[threadIdx.x] = 0;
    if (threadIdx.x == 0) s_.list_size = s_.few_size = s_.drawable = 0;
    for (int i = static_cast<int>(threadIdx.x); i < (end_ - begin_ + 31) / 32; i += kThreads) s_.marks[i] = 0;
    __syncthreads();
    limit_ = rule().options.vocab_limit > 0 ? rule().options.vocab_limit : words;
    mark_recent();
    settle(0);
  }

  Group<kCluster> group;
  __device__ const SampleRule& rule() const { return s_.rule; }

  /// Calls visit(logit, id) for all ids of the part, rising in each thread; -inf is no candidate.
  template <class Visit>
  __device__ void visit(Visit look) {
    const int pieces = (end_ - begin_ + kPiece - 1) / kPiece;
    for (int piece = 0; piece < pieces; ++piece) {
      if (piece != loaded_) {
        fetch(piece);
        settle(piece);
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int id = id_of(piece, v);
        if (id - 4 * static_cast<int>(threadIdx.x) >= end_) break;  // the same for all threads
        look(x_[v].x, id);
        look(x_[v].y, id + 1);
        look(x_[v].z, id + 2);
        look(x_[v].w, id + 3);
      }
    }
  }
  /// The same, four ids of one thread at a time: visit(float4, first id). A warp's lie side by side.
  template <class Visit>
  __device__ void visit_vectors(Visit look) {
    const int pieces = (end_ - begin_ + kPiece - 1) / kPiece;
    for (int piece = 0; piece < pieces; ++piece) {
      if (piece != loaded_) {
        fetch(piece);
        settle(piece);
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int id = id_of(piece, v);
        if (id - 4 * static_cast<int>(threadIdx.x) >= end_) break;
        look(x_[v], id);
      }
    }
  }
  /// One logit, of any id: -inf if it is not of this part.
  __device__ float logit(int id) const {
    if (id < begin_ || id >= min(end_, limit_)) return kMinusInfinity;
    float x = __ldcg(row_ + id);
    if (penalises() && (s_.marks[(id - begin_) / 32] >> (id % 32) & 1) != 0) penalise(x);
    return x;
  }

  /// The first candidate of the part goes to its summary, or kFault; what each thread has comes back.
  __device__ std::uint32_t find_first() {
    std::uint32_t falling = kNone;
    auto first = ~std::uint32_t{0};
    visit([&](float x, int id) {
      if (const std::uint32_t bits = falling_bits(x); bits < falling) {
        falling = bits;
        first = static_cast<std::uint32_t>(id);
      }
    });
    const std::uint32_t of_thread = falling;
    if (is_faulty_) falling = kFault;
    reduce(falling, first);
    if (threadIdx.x % 32 == 0) {
      s_.first_falling[threadIdx.x / 32] = falling;
      s_.first_id[threadIdx.x / 32] = first;
    }
    __syncthreads();
    falling = s_.first_falling[threadIdx.x % 32];
    first = s_.first_id[threadIdx.x % 32];
    reduce(falling, first);
    falling_ = falling;
    first_ = first;
    return of_thread;
  }
  /// Of the part.
  __device__ std::uint32_t first_falling() const { return falling_; }

  /// After the parts' first candidates have been found and, if at all, listed: the first of the row, and whether no
  /// part has listed more than `most`.
  struct Whole {
    std::uint32_t falling, id;
    std::uint32_t listed;  // by all parts
    bool is_short;
  };
  __device__ Whole meet(std::uint32_t most) {
    if constexpr (!kCluster) {
      __syncthreads();
      return {falling_, first_, s_.list_size, s_.list_size <= most};
    } else {
      if (threadIdx.x == 0) s_.summary = {falling_, first_};
      group.sync();
      const auto lane = static_cast<int>(threadIdx.x % 32);
      std::uint32_t falling = kNone;
      auto first = ~std::uint32_t{0};
      std::uint32_t listed = 0;
      if (lane < group.blocks()) {
        falling = group.load(&s_.summary.falling, lane);
        first = group.load(&s_.summary.id, lane);
        listed = group.load(&s_.list_size, lane);
      }
      reduce(falling, first);
      return {falling, first, ptx::warp_sum(listed), __all_sync(0xffffffffU, static_cast<int>(listed <= most)) != 0};
    }
  }

 private:
  __device__ int id_of(int piece, int v) const {
    return begin_ + kPiece * piece + 4 * kThreads * v + 4 * static_cast<int>(threadIdx.x);
  }
  __device__ bool penalises() const {
    return rule().recent != nullptr && rule().options.repetition_penalty != 1.0F &&
           rule().options.repetition_window > 0;
  }

  /// Logits of a piece as they are; -inf past the part's end.
  __device__ void fetch(int piece) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int id = id_of(piece, v);
      if (takes_vectors_ && id + 4 <= end_) {
        x_[v] = __ldcg(reinterpret_cast<const float4*>(row_ + id));
        continue;
      }
      const auto one = [&](int i) { return i < end_ ? __ldcg(row_ + i) : kMinusInfinity; };
      x_[v] = make_float4(one(id), one(id + 1), one(id + 2), one(id + 3));
    }
    loaded_ = piece;
  }
  /// Sees faults, takes out what may not be drawn, and penalises.
  __device__ void settle(int piece) {
    const bool has_marks = penalises();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int id = id_of(piece, v);
      float4& x = x_[v];
      is_faulty_ |=
          !(x.x <= kLargestFinite) | !(x.y <= kLargestFinite) | !(x.z <= kLargestFinite) | !(x.w <= kLargestFinite);
      if (id >= limit_) x.x = kMinusInfinity;
      if (id + 1 >= limit_) x.y = kMinusInfinity;
      if (id + 2 >= limit_) x.z = kMinusInfinity;
      if (id + 3 >= limit_) x.w = kMinusInfinity;
      if (!has_marks || id >= end_) continue;
      const std::uint32_t marks = s_.marks[(id - begin_) / 32] >> (id % 32) & 15;
      if (marks == 0) continue;
      if ((marks & 1) != 0) penalise(x.x);
      if ((marks & 2) != 0) penalise(x.y);
      if ((marks & 4) != 0) penalise(x.z);
      if ((marks & 8) != 0) penalise(x.w);
    }
  }
  __device__ void penalise(float& x) const {
    if (!(fabsf(x) <= kLargestFinite)) return;
    const float penalty = rule().options.repetition_penalty;
    const float penalised = x > 0.0F ? x / penalty : x * penalty;
    x = fminf(fmaxf(penalised, -kLargestFinite), kLargestFinite);
  }
  /// However often a token came, its bit is set once.
  __device__ void mark_recent() {
    if (!penalises()) return;
    const auto window = static_cast<std::uint64_t>(rule().options.repetition_window);
    int id = -1;
    if (threadIdx.x < min(rule().recent_count, window)) id = __ldcg(rule().recent + threadIdx.x);
    if (id >= begin_ && id < end_) atomicOr(&s_.marks[(id - begin_) / 32], 1U << (id % 32));
    __syncthreads();
  }

  /// Both of the warp's first candidate.
  __device__ static void reduce(std::uint32_t& falling, std::uint32_t& id) {
    const std::uint32_t least = ptx::warp_min(falling);
    id = ptx::warp_min(falling == least ? id : ~std::uint32_t{0});
    falling = least;
  }

  Shared& s_;
  const float* row_;
  bool takes_vectors_;
  int begin_, end_;  // ids of the part
  int limit_;        // ids that may be drawn are below
  float4 x_[kVectors];
  int loaded_ = -1;  // piece
  bool is_faulty_ = false;
  std::uint32_t falling_ = kNone, first_ = ~std::uint32_t{0};
};

}  // namespace mmrec::kernels::sampling
