// The chain for any rule, over the whole row.
//
// Every question is of one kind: in some order of the candidates, which is the first up to which their amounts sum to
// at least so much? For top-k the order is (logit falling, id rising) and each candidate counts one; for top-p it is
// the same order and amounts are weights; for the draw ids rise and amounts are weights. All are answered by histograms
// over 1,024 bins of successive digits of the candidate's place in the order: sum per bin, over all blocks of the row,
// scan over the bins, next digit inside the
// bin that crosses, or, once few are in it, all of them compared with each other. The first digit of the order by
// logits is not one of its bits but the distance from the largest logit in steps of 1/22 of log2 of the weight, which
// spreads logits evenly over the bins and mostly leaves one candidate in the bin that matters. As soon as what is left
// fits, it moves to a list in shared memory, of each block its own.
#pragma once

#include "kernels/cuda/sample/slice.cuh"
#include "kernels/philox.h"

namespace mmrec::kernels::sampling {

template <bool kCluster>
class Chain {
 public:
  __device__ Chain(Shared& shared, Slice<kCluster>& slice, float top)
      : s_(shared), slice_(slice), top_(top), scale_(weight_scale(slice.rule().options.temperature)) {}

  __device__ int draw() {
    const SamplerOptions& options = slice_.rule().options;
    if (options.top_k > 0) {
      cut<false>([&](Atomic64 total) { return min(static_cast<Atomic64>(options.top_k), total); });
    }
    if (options.top_p < 1.0F) {
      cut<true>([&](Atomic64 total) { return amount_of_share(options.top_p, total); });
    }
    if (has_least_weight(options)) cut_least_weight();
    return draw_by_ids();
  }

 private:
  static constexpr float kStepsPerOctave = 22.0F;  // 46 octaves: more than have a weight
  /// A candidate's place: the linear digit, then its key.
  static constexpr int kLinearShift = 32 + kIdBits;
  /// Ids of one bin of the first digit by ids, and of the second.
  static constexpr int kIdsOfBin = static_cast<int>(kMostSampleWords / kBins);
  static_assert(kIdsOfBin % kWarpIds == 0);

  __device__ static Atomic64 place(float octaves, Atomic64 key) {
    const float steps = fminf(-octaves * kStepsPerOctave, static_cast<float>(kBins - 1));
    return static_cast<Atomic64>(steps) << kLinearShift | key;
  }

  __device__ float octaves(std::uint32_t falling) const { return octaves_of(from_falling_bits(falling), top_, scale_); }

  /// Calls visit(place, weight) for the candidates of this block that have a weight and have not been cut off, up to
  /// place `end`.
  template <class Visit>
  __device__ void visit_left(Atomic64 end, Visit visit) {
    end = min(end, last_);
    if (in_list_) {
      for (std::uint32_t i = threadIdx.x; i < s_.list_size; i += kThreads) {
        const Atomic64 at = s_.listed[i];
        if (at <= end) visit(at, weight_of(octaves(falling_of(at))));
      }
      return;
    }
    slice_.visit([&](std::uint32_t falling, int id) { look_at(falling, id, end, visit); });
  }
  template <class Visit>
  __device__ void look_at(std::uint32_t falling, int id, Atomic64 end, Visit visit) const {
    const float down = octaves(falling);
    const Atomic64 at = place(down, key_of(falling, id));
    if (at > end) return;
    const Atomic64 weight = weight_of(down);
    if (weight != 0) visit(at, weight);  // -inf has none
  }

  __device__ void clear_bins() {
    slice_.group.sync();  // nobody looks at them any more
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) s_.count[i] = s_.low[i] = s_.high[i] = 0;
    __syncthreads();
  }
  __device__ void add_weight(std::uint32_t bin, Atomic64 weight) {
    const auto low = static_cast<std::uint32_t>(weight);
    const std::uint32_t carry = atomicAdd(&s_.low[bin], low) > ~low ? 1 : 0;  // exact whatever the order of additions
    const std::uint32_t high = static_cast<std::uint32_t>(weight >> 32) + carry;
    if (high != 0) atomicAdd(&s_.high[bin], high);
  }

  /// Candidates and their weight.
  struct Sums {
    std::uint32_t count;
    Atomic64 weight;
  };
  __device__ static Sums add(Sums a, Sums b) { return {a.count + b.count, a.weight + b.weight}; }

  /// Of a thread's bins, in all blocks.
  __device__ void merge(Sums (&bins)[kOwnBins]) {
    slice_.group.sync();
#pragma unroll
    for (int n = 0; n < kOwnBins; ++n) bins[n] = {0, 0};
#pragma unroll 1
    for (int i = 0; i < slice_.group.blocks(); ++i) {
      const int rank = (i + slice_.group.rank()) % slice_.group.blocks();  // each begins elsewhere
#pragma unroll
      for (int n = 0; n < kOwnBins; ++n) {
        const int bin = kOwnBins * static_cast<int>(threadIdx.x) + n;
        bins[n].count += slice_.group.load(&s_.count[bin], rank);
        bins[n].weight +=
            Atomic64{slice_.group.load(&s_.high[bin], rank)} << 32 | slice_.group.load(&s_.low[bin], rank);
      }
    }
  }

  /// Sums over the threads before this one, and of all weights.
  __device__ Sums scan(Sums x, Atomic64& total) {
    const Sums own = x;
    const unsigned lane = threadIdx.x % 32;
    const unsigned warp = threadIdx.x / 32;
    const auto scan_warp = [lane](Sums y) {
#pragma unroll 1
      for (unsigned distance = 1; distance < 32; distance *= 2) {
        const std::uint32_t count = __shfl_up_sync(0xffffffffU, y.count, distance);
        const Atomic64 weight = __shfl_up_sync(0xffffffffU, y.weight, distance);
        if (lane >= distance) y = add(y, {count, weight});
      }
      return y;
    };
    x = scan_warp(x);
    if (lane == 31) {
      s_.partial_count[warp] = x.count;
      s_.partial[warp] = x.weight;
    }
    __syncthreads();
    const Sums warps = scan_warp(lane < kWarps ? Sums{s_.partial_count[lane], s_.partial[lane]} : Sums{0, 0});
    total = __shfl_sync(0xffffffffU, warps.weight, 31);
    const int last = static_cast<int>((warp + 31) % 32);
    const std::uint32_t count = __shfl_sync(0xffffffffU, warps.count, last);
    const Atomic64 weight = __shfl_sync(0xffffffffU, warps.weight, last);
    if (warp != 0) x = add(x, {count, weight});
    return {x.count - own.count, x.weight - own.weight};
  }

  /// Chooses the bin in which the sum over the bins reaches an amount: for the first digit amount_of(sum over all),
  /// which one thread computes, else what the pick before has left. Amounts are weights, or else numbers.
  template <bool kWeighted, class AmountOf>
  __device__ void pick(bool is_first, AmountOf amount_of) {
    Sums bins[kOwnBins];
    merge(bins);
    Sums own = {0, 0};
#pragma unroll
    for (int n = 0; n < kOwnBins; ++n) {
      if constexpr (!kWeighted) bins[n].weight = bins[n].count;
      own = add(own, bins[n]);
    }
    Atomic64 amount = s_.remaining;
    Atomic64 total = 0;
    Sums before = scan(own, total);
    if (is_first) {
      if (threadIdx.x == 0) s_.amount = amount_of(total);
      __syncthreads();
      amount = s_.amount;
    }
#pragma unroll
    for (int n = 0; n < kOwnBins; ++n) {
      if (before.weight < amount && amount <= before.weight + bins[n].weight) {
        s_.bin = kOwnBins * threadIdx.x + static_cast<unsigned>(n);
        s_.bin_count = bins[n].count;
        s_.bin_sum = bins[n].weight;
        s_.count_before = before.count;
        s_.remaining = amount - before.weight;
      }
      before = add(before, bins[n]);
    }
    __syncthreads();
  }

  /// Cuts off what comes after the candidate with which the sum (of weights, else the number) reaches the amount.
  template <bool kWeighted, class AmountOf>
  __device__ void cut(AmountOf amount_of) {
    Atomic64 prefix = 0;
    std::uint32_t before = 0;  // candidates before the prefix
    for (int shift = kLinearShift;; shift -= kDigitBits) {
      clear_bins();
      const Atomic64 end_of_prefix = ((prefix + 1) << shift << kDigitBits) - 1;  // of the first digit: all
      visit_left(end_of_prefix, [&](Atomic64 at, Atomic64 weight) {
        if (at >> shift >> kDigitBits != prefix) return;
        const std::uint32_t bin = static_cast<std::uint32_t>(at >> shift) % kBins;
        atomicAdd(&s_.count[bin], 1U);
        if constexpr (kWeighted) add_weight(bin, weight);
      });
      pick<kWeighted>(shift == kLinearShift, amount_of);
      prefix = prefix << kDigitBits | s_.bin;
      before += s_.count_before;
      const Atomic64 end_of_bin = ((prefix + 1) << shift) - 1;
      const bool is_done = shift == 0 || s_.bin_count == 1 || s_.remaining == s_.bin_sum;
      if (!in_list_ && before + s_.bin_count <= kMostListed) list(end_of_bin);
      if (is_done) {
        last_ = min(last_, end_of_bin);
        return;
      }
      if (s_.bin_count <= kMostFew) return cut_within<kWeighted>(prefix << shift, end_of_bin);
    }
  }

  /// The same among the few candidates from place `first` to `end`, of which what is left of the amount is to be had.
  template <bool kWeighted>
  __device__ void cut_within(Atomic64 first, Atomic64 end) {
    if (threadIdx.x == 0) s_.few_size = 0;
    __syncthreads();
    visit_left(end, [&](Atomic64 at, Atomic64) {
      if (at >= first) s_.few_of_part[atomicAdd(&s_.few_size, 1U)] = at;
    });
    slice_.group.sync();
    std::uint32_t count = 0;
#pragma unroll 1
    for (int rank = 0; rank < slice_.group.blocks(); ++rank) {
      const std::uint32_t size = slice_.group.load(&s_.few_size, rank);
      if (threadIdx.x < size) {
        const Atomic64 at = slice_.group.load(s_.few_of_part + threadIdx.x, rank);
        s_.few[count + threadIdx.x] = at;
        s_.weights[count + threadIdx.x] = kWeighted ? weight_of(octaves(falling_of(at))) : 1;
      }
      count += size;
    }
    const auto compare = Comparison::of(count, kThreads);
    for (std::uint32_t i = count + threadIdx.x; i < compare.padded; i += kThreads) {
      s_.few[i] = kNobody;
      s_.weights[i] = 0;
    }
    slice_.group.sync();  // and nobody looks at another's any more
    const Atomic64 at = s_.few[compare.mine];
    const Atomic64 sum = compare.before(at, s_.few, s_.weights) & ((Atomic64{1} << Comparison::kCountShift) - 1);
    if (compare.speaks() && sum < s_.remaining && s_.remaining <= sum + s_.weights[compare.mine]) s_.last = at;
    __syncthreads();
    last_ = min(last_, s_.last);
  }

  /// Moves the candidates up to `end` from the row to the list.
  __device__ void list(Atomic64 end) {
    if (threadIdx.x == 0) s_.list_size = 0;
    __syncthreads();
    visit_left(end, [&](Atomic64 at, Atomic64) { s_.listed[atomicAdd(&s_.list_size, 1U)] = at; });
    __syncthreads();
    in_list_ = true;
  }

  __device__ void cut_least_weight() {
    const SamplerOptions& options = slice_.rule().options;
    if (threadIdx.x == 0) s_.log_least = log_of_least_weight(options);
    __syncthreads();
    const std::uint32_t last = last_of_weight(top_, options.temperature, s_.log_least);
    last_ = min(last_, place(octaves(last), Atomic64{last} << kIdBits | kIdMask));
  }

  /// The token at whose end, in order of ids, the weights exceed the drawn share of their sum.
  __device__ int draw_by_ids() {
    const SampleRule& rule = slice_.rule();
    clear_bins();
    if (in_list_) {
      visit_left(last_, [&](Atomic64 at, Atomic64 weight) { add_weight(bits_of_id(at) / kIdsOfBin, weight); });
    } else {
      add_row_by_ids();
    }
    pick<true>(true, [&](Atomic64 total) {
      return amount_drawn(philox_uniform(rule.options.seed, rule.sequence, rule.step), total);
    });
    const std::uint32_t group = s_.bin;
    clear_bins();
    const auto look = [&](Atomic64 at, Atomic64 weight) {
      if (bits_of_id(at) / kIdsOfBin == group) add_weight(bits_of_id(at) % kIdsOfBin, weight);
    };
    if (in_list_) {
      visit_left(last_, look);
    } else {
      slice_.visit([&](std::uint32_t falling, int id) {
        if (static_cast<std::uint32_t>(id) / kIdsOfBin == group) look_at(falling, id, last_, look);
      });
    }
    pick<true>(false, [](Atomic64) { return Atomic64{0}; });
    return static_cast<int>(group * kIdsOfBin + s_.bin);
  }
  __device__ static std::uint32_t bits_of_id(Atomic64 place) { return static_cast<std::uint32_t>(place & kIdMask); }
  /// Neighbouring ids share a bin: a warp adds up kWarpIds of them first.
  __device__ void add_row_by_ids() {
    slice_.visit_vectors([&](const uint4& x, int id) {
      Atomic64 sum = 0;
      const auto count = [&](Atomic64, Atomic64 weight) { sum += weight; };
      look_at(x.x, id, last_, count);
      look_at(x.y, id + 1, last_, count);
      look_at(x.z, id + 2, last_, count);
      look_at(x.w, id + 3, last_, count);
      // In two words whose sums over a warp fit.
      constexpr int kLowBits = 26;
      const std::uint32_t low = ptx::warp_sum(static_cast<std::uint32_t>(sum & ((Atomic64{1} << kLowBits) - 1)));
      const Atomic64 high = ptx::warp_sum(static_cast<std::uint32_t>(sum >> kLowBits));
      sum = (high << kLowBits) + low;
      if (threadIdx.x % 32 == 0 && sum != 0) add_weight(static_cast<std::uint32_t>(id) / kIdsOfBin, sum);
    });
  }

  Shared& s_;
  Slice<kCluster>& slice_;
  float top_;
  float scale_;
  bool in_list_ = false;
  Atomic64 last_ = ~Atomic64{0};  // last place that has not been cut off
};

}  // namespace mmrec::kernels::sampling
