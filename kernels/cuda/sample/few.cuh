// Drawing among few: the chain for a top-k of some dozens.
//
// The row is looked at twice, in registers: for the largest logit of each thread, and for what is not below a bound
// that at least k of those reach. That bound is no farther than a bin behind the k-th largest logit, so little more
// than k candidates come through; blocks that share a row exchange theirs, and where these are many the bound is drawn
// once more, among all of them. The rest compares every candidate with every other, spread over all threads: the number
// and weight of those before it in order of logits decide top-k and top-p, the weight of those before it in order of
// ids the draw. All blocks do the same, and one of them writes.
#pragma once

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

  /// Lists those of the part that may be among the first of the row. `first` is the first falling bits of each thread.
  __device__ void list(std::uint32_t first) {
    const std::uint32_t top = slice_.first_falling();
    if (first != kNone) atomicAdd(&s_.count[distance_bin(first - top)], 1U);
    __syncthreads();
    pick(s_.count);
    prepare();
    __syncthreads();
    const std::uint32_t most = s_.distance;
    slice_.visit([&](float x, int id) {
      const std::uint32_t falling = falling_bits(x);
      if (falling == kNone || falling - top > most) return;
      const std::uint32_t place = atomicAdd(&s_.list_size, 1U);
      if (place < kMostListed) s_.listed[place] = key_of(falling, id);
    });
  }

  /// Of the lists of all blocks, none of which is too long.
  __device__ int draw(std::uint32_t top, std::uint32_t listed) {
    Atomic64* keys = s_.listed;
    std::uint32_t count = listed;
    if (kCluster || listed > most_compared()) {
      keys = s_.few;
      count = gather(top, listed);
      if (count > kMostFew) return kTooMany;
    }
    return draw_from(keys, count, from_falling_bits(top));
  }

 private:
  static constexpr int kOwn = 2;  // listed candidates that a thread takes
  static constexpr int kCountShift = 54;
  static_assert(kMostFew < 1U << (64 - kCountShift) && kMostFew * kUnits < 0x1p54F);

  __device__ std::uint32_t top_k() const { return static_cast<std::uint32_t>(slice_.rule().options.top_k); }
  /// So many are compared with each other as they are.
  __device__ std::uint32_t most_compared() const { return max(64U, top_k() + top_k() / 4); }

  __device__ void pick(const std::uint32_t* counts) {
    if (threadIdx.x >= 32) return;
    const std::uint32_t distance = distance_of(counts, top_k());
    if (threadIdx.x == 0) s_.distance = distance;
  }
  /// Numbers that take long, by warps that have nothing else to do.
  __device__ void prepare() {
    const SampleRule& rule = slice_.rule();
    if (threadIdx.x == 32) s_.drawn = philox_uniform(rule.options.seed, rule.sequence, rule.step);
    if (threadIdx.x == 64 && rule.options.min_p > 0.0F) s_.log_min_p = log(static_cast<double>(rule.options.min_p));
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

  __device__ int draw_from(Atomic64* keys, std::uint32_t count, float top) {
    const SamplerOptions& options = slice_.rule().options;
    const std::uint32_t thread = threadIdx.x;
    Atomic64 weight = 0;
    if (thread < count) {
      weight = Weights::of(Weights(top, options.temperature).octaves(from_falling_bits(falling_of(keys[thread]))));
      s_.weights[thread] = weight;
      if (weight == 0) keys[thread] = kNobody;
    }
    const unsigned with_weight = __ballot_sync(0xffffffffU, static_cast<int>(weight != 0));
    if (thread % 32 == 0 && with_weight != 0) {
      atomicAdd(&s_.drawable, static_cast<std::uint32_t>(__popc(with_weight)));
    }
    __syncthreads();

    // So many neighbours compare one candidate with all.
    const std::uint32_t lanes = kThreads >> (32 - __clz(static_cast<int>(max(count, 32U) - 1)));
    const std::uint32_t mine = thread / lanes;
    const bool speaks = thread % lanes == 0;
    const Atomic64 key = mine < count ? keys[mine] : kNobody;
    weight = key != kNobody ? s_.weights[mine] : 0;
    constexpr Atomic64 kOne = Atomic64{1} << kCountShift;
    Atomic64 before = 0;  // how many are, above, and their weight
    for (std::uint32_t i = thread % lanes; i < count; i += lanes) {
      if (keys[i] < key) before += s_.weights[i] + kOne;
    }
    for (std::uint32_t step = lanes / 2; step > 0; step /= 2) {
      before += __shfl_xor_sync(0xffffffffU, before, static_cast<int>(step));
    }
    const auto rank = static_cast<std::uint32_t>(before >> kCountShift);
    before &= kOne - 1;
    const std::uint32_t kept = min(top_k(), s_.drawable);
    bool is_left = key != kNobody && rank < kept;
    if (speaks && is_left && rank + 1 == kept) s_.amount = before + weight;
    __syncthreads();

    if (options.top_p < 1.0F) is_left = is_left && before < amount_of_share(options.top_p, s_.amount);
    if (options.min_p > 0.0F) {
      is_left = is_left && falling_of(key) <= last_of_min_p(top, options.temperature, s_.log_min_p);
    }
    if (speaks && mine < count) s_.weights[mine] = is_left ? weight : 0;
    __syncthreads();

    Atomic64 below = 0;  // the weight of lower ids
    Atomic64 total = 0;
    for (std::uint32_t i = thread % lanes; i < count; i += lanes) {
      const Atomic64 other = s_.weights[i];
      total += other;
      if (id_of(keys[i]) < id_of(key)) below += other;
    }
    for (std::uint32_t step = lanes / 2; step > 0; step /= 2) {
      total += __shfl_xor_sync(0xffffffffU, total, static_cast<int>(step));
      below += __shfl_xor_sync(0xffffffffU, below, static_cast<int>(step));
    }
    const Atomic64 amount = amount_drawn(s_.drawn, total);
    if (speaks && is_left && below < amount && amount <= below + weight) s_.token = id_of(key);
    __syncthreads();
    return s_.token;
  }

  Shared& s_;
  Slice<kCluster>& slice_;
};

}  // namespace mmrec::kernels::sampling
