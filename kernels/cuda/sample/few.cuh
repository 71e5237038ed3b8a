// Drawing one token from one row of logits, by a block or by the blocks of a cluster: the kernel, and the chain for a
// top-k of some dozens, which draws among few.
//
// A block reads its part twice: for the largest logit of each thread, and for the logits that are not below a bound
// that at least k of those reach. That bound is no farther than a bin behind the k-th largest logit, so little more
// than k candidates come through; blocks that share a row exchange theirs, and where these are many the bound is drawn
// once more, among all of them. The rest compares every candidate with every other, spread over all threads: the number
// and weight of those before it in order of logits decide top-k and top-p, the weight of those before it in order of
// ids the draw. All blocks do the same, and one of them writes.
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/sample/chain.cuh"
#include "kernels/cuda/sample/slice.cuh"
#include "kernels/philox.h"

namespace mmrec::kernels::sampling {

/// Not among few: nothing has been decided.
inline constexpr int kTooMany = -2;

template <bool kCluster>
class Few {
 public:
  static constexpr int kMostTopK = 128;

  __device__ static bool takes(const SampleRule& rule) {
    return rule.options.temperature != 0.0F && rule.options.top_k > 0 && rule.options.top_k <= kMostTopK;
  }

  __device__ Few(Shared& shared, Slice<kCluster>& slice) : s_(shared), slice_(slice) {}

  /// How many of its candidates a block may hand on.
  __device__ std::uint32_t most_listed() const {
    return min(kMostListed, static_cast<std::uint32_t>(kOwn * kThreads / slice_.group.blocks()));
  }

  /// Lists those of the part that may be among the first of the row. `top` is the part's first, `first` each thread's.
  __device__ void list(std::uint32_t top, std::uint32_t first) {
    if (first != kNone) atomicAdd(&s_.count[distance_bin(first - top)], 1U);
    __syncthreads();
    pick(s_.count);
    prepare();
    __syncthreads();
    const std::uint32_t distance = s_.distance;
    const std::uint32_t last = distance < kNone - 1 - top ? top + distance : kNone - 1;
    slice_.visit_pieces([&](int first_id, int ids) {
      // First which vectors have any, then what they have: few lanes do, so the warp goes there once.
      const int own = 4 * static_cast<int>(threadIdx.x);
      static_assert(kMostPiece <= 4 * kThreads * 32);
      std::uint32_t found = 0;
      std::uint32_t bit = 1;
#pragma unroll 4
      for (int i = own; i < ids; i += 4 * kThreads, bit *= 2) {
        if (Slice<kCluster>::first_of(*reinterpret_cast<const uint4*>(s_.row + i)) <= last) found |= bit;
      }
      for (; found != 0; found &= found - 1) {
        const int i = own + 4 * kThreads * (__ffs(static_cast<int>(found)) - 1);
        append(*reinterpret_cast<const uint4*>(s_.row + i), first_id + i, last);
      }
    });
  }

  /// Draws from the lists of all blocks; no list is too long.
  __device__ int draw(std::uint32_t top, std::uint32_t listed) {
    Atomic64* keys = s_.listed;
    std::uint32_t count = listed;
    if (kCluster || listed > most_compared()) {
      keys = s_.few;
      count = gather(top, listed);
      if (count > kMostFew) return kTooMany;
    }
    const std::uint32_t threads = count <= 64 ? kThreads / 2 : kThreads;  // more would cost more than they do
    if (threadIdx.x < threads) draw_from(keys, count, from_falling_bits(top), threads);
    __syncthreads();
    return s_.token;
  }

 private:
  static constexpr int kOwn = 4;  // listed candidates that a thread takes
  static_assert(kMostFew < 1U << (64 - Comparison::kCountShift) && kMostFew * kUnits < 0x1p54F);

  __device__ std::uint32_t top_k() const { return static_cast<std::uint32_t>(slice_.rule().options.top_k); }
  /// Up to this many candidates are compared with each other without another bound.
  __device__ std::uint32_t most_compared() const { return max(64U, top_k() + top_k() / 4); }

  /// Those of 4 ids that come up to `last` to the list.
  __device__ void append(const uint4& x, int id, std::uint32_t last) {
    const std::uint32_t falling[] = {x.x, x.y, x.z, x.w};
    std::uint32_t count = 0;
#pragma unroll
    for (const std::uint32_t bits : falling) count += bits <= last ? 1 : 0;
    std::uint32_t place = atomicAdd(&s_.list_size, count);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (falling[n] <= last && place < kMostListed) s_.listed[place++] = key_of(falling[n], id + n);
    }
  }

  __device__ void pick(const std::uint32_t* counts) {
    if (threadIdx.x >= 32) return;
    const std::uint32_t distance = distance_of(counts, top_k());
    if (threadIdx.x == 0) s_.distance = distance;
  }
  /// What takes long, by warps that have nothing else to do.
  __device__ void prepare() {
    const SampleRule& rule = slice_.rule();
    if (threadIdx.x == 32) s_.drawn = philox_uniform(rule.options.seed, rule.sequence, rule.step);
    if (threadIdx.x == 64 && has_least_weight(rule.options)) s_.log_least = log_of_least_weight(rule.options);
    if (threadIdx.x == 96) s_.scale = weight_scale(rule.options.temperature);
  }

  /// The candidates listed by all blocks, or the first of them, to s.few; how many.
  __device__ std::uint32_t gather(std::uint32_t top, std::uint32_t listed) {
    const int threads = kThreads / slice_.group.blocks();  // for each list
    const int rank = static_cast<int>(threadIdx.x) / threads;
    const std::uint32_t size = slice_.group.load(&s_.list_size, rank);
    Atomic64 mine[kOwn];
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const int i = static_cast<int>(threadIdx.x) % threads + n * threads;
      mine[n] = static_cast<std::uint32_t>(i) < size ? slice_.group.load(s_.listed + i, rank) : kNobody;
    }
    slice_.group.leave();
    auto most = ~std::uint32_t{0};
    if (listed > most_compared()) {
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        if (mine[n] != kNobody) atomicAdd(&s_.low[distance_bin(falling_of(mine[n]) - top)], 1U);
      }
      __syncthreads();
      pick(s_.low);
      __syncthreads();
      most = s_.distance;
    }
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      if (mine[n] == kNobody || falling_of(mine[n]) - top > most) continue;
      const std::uint32_t place = atomicAdd(&s_.few_size, 1U);
      if (place < kMostFew) s_.few[place] = mine[n];
    }
    __syncthreads();
    return s_.few_size;
  }

  /// By the first `threads` threads; to s.token.
  __device__ void draw_from(Atomic64* keys, std::uint32_t count, float top, std::uint32_t threads) {
    const auto meet = [threads] { ptx::named_barrier_sync(1, static_cast<int>(threads)); };
    const SamplerOptions& options = slice_.rule().options;
    const std::uint32_t thread = threadIdx.x;
    const auto compare = Comparison::of(count, threads);
    Atomic64 weight = 0;
    if (thread < compare.padded) {
      if (thread < count) {
        weight = weight_of(octaves_of(from_falling_bits(falling_of(keys[thread])), top, s_.scale));
      }
      s_.weights[thread] = weight;
      if (weight == 0) keys[thread] = kNobody;
    }
    const unsigned with_weight = __ballot_sync(0xffffffffU, static_cast<int>(weight != 0));
    if (thread % 32 == 0 && with_weight != 0) {
      atomicAdd(&s_.drawable, static_cast<std::uint32_t>(__popc(with_weight)));
    }
    meet();

    const bool speaks = compare.speaks();
    const Atomic64 key = keys[compare.mine];
    weight = s_.weights[compare.mine];
    Atomic64 sum = compare.before(key, keys, s_.weights);
    const auto rank = static_cast<std::uint32_t>(sum >> Comparison::kCountShift);
    sum &= (Atomic64{1} << Comparison::kCountShift) - 1;
    const std::uint32_t kept = min(top_k(), s_.drawable);
    bool is_left = key != kNobody && rank < kept;
    if (speaks && is_left && rank + 1 == kept) {
      s_.amount = options.top_p < 1.0F ? amount_of_share(options.top_p, sum + weight) : sum + weight;
    }
    meet();

    is_left = is_left && sum < s_.amount;
    if (has_least_weight(options)) {
      is_left = is_left && falling_of(key) <= last_of_weight(top, options.temperature, s_.log_least);
    }
    if (speaks) s_.weights[compare.mine] = is_left ? weight : 0;
    meet();

    Atomic64 below = 0;  // the weight of lower ids
    Atomic64 total = 0;
    compare.each([&](std::uint32_t i) {
      const Atomic64 other = s_.weights[i];
      total += other;
      below += id_of(keys[i]) < id_of(key) ? other : 0;
    });
    total = compare.sum(total);
    below = compare.sum(below);
    if (!speaks || !is_left) return;
    const Atomic64 amount = amount_drawn(s_.drawn, total);
    if (below < amount && amount <= below + weight) s_.token = id_of(key);
  }

  Shared& s_;
  Slice<kCluster>& slice_;
};

/// Returns the token that is drawn, or kFaultyRow or kNoCandidate (kernels/ops.h).
template <bool kCluster>
__device__ int draw(Shared& shared, Slice<kCluster>& slice) {
  const bool may_be_few = Few<kCluster>::takes(slice.rule());
  Few<kCluster> few(shared, slice);
  std::uint32_t of_thread = kNone;
  const bool is_greedy = slice.rule().options.temperature == 0.0F;
  std::uint32_t first =
      is_greedy ? slice.template find_first<true>(of_thread) : slice.template find_first<false>(of_thread);
  if (may_be_few) few.list(first, of_thread);

  // All parts meet.
  std::uint32_t id = 0;
  std::uint32_t listed = 0;
  bool is_short = true;
  if constexpr (!kCluster) {
    __syncthreads();
    id = shared.first_id;
    listed = shared.list_size;
    is_short = listed <= few.most_listed();
  } else {
    if (threadIdx.x == 0) shared.first_falling = first;
    slice.group.sync();
    const auto lane = static_cast<int>(threadIdx.x % 32);
    std::uint32_t falling = kNone;
    id = ~std::uint32_t{0};
    if (lane < slice.group.blocks()) {
      falling = slice.group.load(&shared.first_falling, lane);
      id = slice.group.load(&shared.first_id, lane);
      listed = slice.group.load(&shared.list_size, lane);
    }
    first = ptx::warp_min(falling);
    id = ptx::warp_min(falling == first ? id : ~std::uint32_t{0});
    is_short = __all_sync(0xffffffffU, static_cast<int>(listed <= few.most_listed())) != 0;
    listed = ptx::warp_sum(listed);
  }
  if (first == kFault) return kFaultyRow;
  if (first == kNone) return kNoCandidate;
  if (is_greedy) return static_cast<int>(id);
  if (may_be_few && is_short) {
    const int token = few.draw(first, listed);
    if (token != kTooMany) return token;
    slice.group.stay();
  }
  return Chain<kCluster>(shared, slice, from_falling_bits(first)).draw();
}

template <bool kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    sample_kernel(MatrixView<const float, Device> logits, SampleRule* rules, int* tokens, int* copy, bool takes_vectors,
                  int blocks, int piece) {
  ptx::wait_for_predecessor();
  Shared& shared = *ptx::shared_memory<Shared>();
  const unsigned row = kCluster ? blockIdx.x / static_cast<unsigned>(blocks) : blockIdx.x;
  const float* from = logits.row(row);
  if (logits.data == nullptr) {
    from = std::bit_cast<const float*>(__ldcg(reinterpret_cast<const Atomic64*>(&rules[row].logits)));
  }
  Slice<kCluster> slice(shared, rules + row, from, static_cast<int>(logits.cols), takes_vectors, blocks, piece);
  const int token = draw(shared, slice);
  slice.group.stay();  // all have read the rule, and nobody's memory
  if (slice.group.rank() != 0 || threadIdx.x != 0) return;
  const SampleRule& rule = slice.rule();
  if (rule.recent != nullptr && rule.options.repetition_window > 0) {
    rule.recent[shared.ring_place] = max(token, 0);
    rules[row].recent_count = rule.recent_count + 1;
  }
  rules[row].step = rule.step + 1;
  if (copy != nullptr) copy[row] = max(token, 0);
  tokens[row] = token;
}

template <bool kCluster>
void launch_sample(Cuda& cuda, int blocks, const SampleTokens<Device>& op) {
  const bool takes_vectors = takes_16_bytes(op.logits.data, op.logits.rows == 1 ? 0 : 4 * op.logits.stride);
  const auto words = static_cast<int>(op.logits.cols);
  const std::size_t most = (cuda.shared_memory_per_block() - shared_bytes(0)) / sizeof(std::uint32_t);
  const int piece =
      std::min(part_of(words, blocks), std::min(static_cast<int>(most) / kWarpIds * kWarpIds, kMostPiece));
  launch(cuda.stream(),
         {.grid = dims(op.logits.rows * blocks),
          .block = dim3(kThreads),
          .shared_bytes = shared_bytes(piece),
          .cluster = static_cast<unsigned>(blocks),
          .overlap_predecessor = true},
         sample_kernel<kCluster>, op.logits, op.rules, op.tokens, op.copy, takes_vectors, blocks, piece);
}

}  // namespace mmrec::kernels::sampling
