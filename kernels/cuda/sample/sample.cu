// Drawing tokens on the device, so that an id crosses the bus instead of a row of logits.
//
// One block a row. A first pass over the row finds the largest logit and whether there are faults; greedy choice ends
// there. Every later question is of one kind: in some order of the candidates, which is the first up to which their
// amounts sum to at least so much? For top-k the order is (logit falling, id rising) and each candidate counts one; for
// top-p it is the same order and amounts are weights e^((logit − largest) / temperature); for the draw ids rise and
// amounts are weights. All are answered by histograms over 1,024 bins of successive digits of the candidate's place in
// the order: sum per bin, scan over the bins, next digit inside the bin that crosses. The first digit of the order by
// logits is not one of its bits but the distance from the largest logit in steps of 1/22 of log2 of the weight, which
// spreads logits evenly over the bins and mostly leaves one candidate in the bin that matters.
//
// As soon as what is left fits, it moves from the row to a list in shared memory. With a top-k of some dozens the row
// is read three times (L2 or L1 hold it) and all else happens among these dozens. Bytes: 12 V, or 4 V if greedy, of
// which device memory delivers 4 V at most. One block of 1,024 threads on a multiprocessor: a decode step has few rows,
// so it is the latency of one that counts.
//
// Deterministic, with atomics: weights are integers in units of 2⁻⁴⁴ of the largest (lighter ones are never drawn), so
// sums do not depend on their order. They have the precision of fp32; a host that sums in fp64 draws the same token
// unless a boundary between tokens lies within some 10⁻⁷ of the number drawn.
//
// Long, because all of it is one kernel whose parts share a block's memory.
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/philox.h"

namespace mmrec::kernels {

namespace {

using Atomic64 = unsigned long long;  // 64 bits as atomics know them

constexpr int kThreads = 1024;
constexpr int kDigitBits = 10;
constexpr int kBins = 1 << kDigitBits;
static_assert(kBins == kThreads, "a thread looks after each bin");
constexpr std::uint32_t kMostListed = 4096;

constexpr float kLargestFinite = std::numeric_limits<float>::max();
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kStepsPerOctave = 22.0F;  // 46 octaves: more than have a weight
constexpr float kUnits = 0x1p44F;         // of the largest weight

// A candidate's place in the order by logits, smallest first: the linear digit, then the logit's bits turned so that
// larger ones come first, then the id.
constexpr int kIdBits = 18;
static_assert((std::int64_t{1} << kIdBits) == kMostSampleWords);
constexpr Atomic64 kIdMask = (Atomic64{1} << kIdBits) - 1;
constexpr int kLinearShift = 32 + kIdBits;
/// Ids of one bin of the first digit by ids, and of the second.
constexpr int kIdsOfBin = static_cast<int>(kMostSampleWords / kBins);

/// Falls as x rises; −0 and +0 are one.
__device__ std::uint32_t falling_bits(float x) {
  const std::uint32_t bits = __float_as_uint(x + 0.0F);
  return (bits >> 31) != 0 ? bits : ~bits & 0x7fffffffU;
}
__device__ float from_falling_bits(std::uint32_t bits) {
  return __uint_as_float((bits >> 31) != 0 ? bits : ~bits & 0x7fffffffU);
}

struct Shared {
  Atomic64 first;  // candidate: falling bits and id
  Atomic64 last;   // place of what min-p keeps
  std::uint32_t is_faulty;
  std::uint32_t list_size;
  Atomic64 listed[kMostListed];           // places
  std::uint32_t count[kBins];             // candidates in a bin
  std::uint32_t low[kBins], high[kBins];  // their weights, in two words
  Atomic64 partial[kThreads / 32];
  Atomic64 amount;
  // The bin that pick() chose.
  std::uint32_t bin, bin_count, count_before;
  Atomic64 bin_sum, remaining;
};

/// Sum over the threads up to this one. s.partial may be used again after another barrier.
__device__ Atomic64 scan(Shared& s, Atomic64 x, Atomic64& total) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32;
  const auto scan_warp = [lane](Atomic64 y) {
#pragma unroll
    for (unsigned distance = 1; distance < 32; distance *= 2) {
      const Atomic64 before = __shfl_up_sync(0xffffffffU, y, distance);
      if (lane >= distance) y += before;
    }
    return y;
  };
  x = scan_warp(x);
  if (lane == 31) s.partial[warp] = x;
  __syncthreads();
  const Atomic64 warps = scan_warp(s.partial[lane]);
  total = __shfl_sync(0xffffffffU, warps, 31);
  const Atomic64 before = __shfl_sync(0xffffffffU, warps, static_cast<int>((warp + 31) % 32));
  return warp == 0 ? x : before + x;
}

/// One row in the hands of its block: all threads make the same calls.
class Row {
 public:
  __device__ Row(Shared& shared, const SampleRule& rule, const float* logits, int words, bool takes_vectors)
      : s_(shared),
        rule_(rule),
        logits_(logits),
        words_(words),
        limit_(rule.options.vocab_limit > 0 ? min(words, rule.options.vocab_limit) : words),
        takes_vectors_(takes_vectors) {}

  /// The token, or -1.
  __device__ int sample() {
    find_first();
    if (s_.is_faulty != 0 || s_.first == ~Atomic64{0}) return -1;
    if (rule_.options.temperature == 0.0F) return static_cast<int>(s_.first & kIdMask);
    top_ = from_falling_bits(static_cast<std::uint32_t>(s_.first >> kIdBits));
    scale_ = 2.0F * 1.4426950408889634F / rule_.options.temperature;
    if (rule_.options.top_k > 0) {
      cut<false>([this](Atomic64 total) { return min(static_cast<Atomic64>(rule_.options.top_k), total); });
    }
    if (rule_.options.top_p < 1.0F) {
      cut<true>([this](Atomic64 total) {
        const double wanted = ceil(static_cast<double>(rule_.options.top_p) * static_cast<double>(total));
        return min(max(static_cast<Atomic64>(wanted), Atomic64{1}), total);
      });
    }
    if (rule_.options.min_p > 0.0F) cut_min_p();
    return draw();
  }

 private:
  /// Calls visit(logit, id) for the ids below `end`; several vectors are loaded before the first is looked at.
  template <class Visit>
  __device__ void visit_row(int end, Visit visit) const {
    constexpr int kVectors = 4;
    for (int first = 4 * static_cast<int>(threadIdx.x); first < end; first += 4 * kThreads * kVectors) {
      float4 x[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) x[v] = load(first + 4 * kThreads * v, end);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int id = first + 4 * kThreads * v;
        visit(x[v].x, id);
        visit(x[v].y, id + 1);
        visit(x[v].z, id + 2);
        visit(x[v].w, id + 3);
      }
    }
  }
  /// Logits of 4 ids; -inf from `end` on.
  __device__ float4 load(int id, int end) const {
    if (takes_vectors_ && id + 4 <= end) return *reinterpret_cast<const float4*>(logits_ + id);
    const auto one = [&](int i) { return i < end ? logits_[i] : kMinusInfinity; };
    return make_float4(one(id), one(id + 1), one(id + 2), one(id + 3));
  }

  /// The first candidate, and whether any logit is NaN or +inf.
  __device__ void find_first() {
    Atomic64 first = ~Atomic64{0};
    bool is_faulty = false;
    visit_row(words_, [&](float x, int id) {
      is_faulty |= !(x <= kLargestFinite);
      if (id < limit_ && x > kMinusInfinity)
        first = min(first, Atomic64{falling_bits(x)} << kIdBits | static_cast<Atomic64>(id));
    });
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      first = min(first, __shfl_xor_sync(0xffffffffU, first, distance));
    }
    is_faulty = __any_sync(0xffffffffU, static_cast<int>(is_faulty)) != 0;
    if (threadIdx.x == 0) {
      s_.first = ~Atomic64{0};
      s_.is_faulty = 0;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
      atomicMin(&s_.first, first);
      if (is_faulty) atomicMax(&s_.is_faulty, 1U);
    }
    __syncthreads();
  }

  /// log2 of a logit's share of the largest weight. Halves, so that the difference of any two logits is finite.
  __device__ float octaves(float x) const {
    const float half = 0.5F * x - 0.5F * top_;
    return half == 0.0F ? 0.0F : half * scale_;
  }
  __device__ static Atomic64 weight(float octaves) { return static_cast<Atomic64>(ptx::exp2_approx(octaves) * kUnits); }
  __device__ static Atomic64 place(float octaves, std::uint32_t falling, Atomic64 id) {
    const float steps = fminf(-octaves * kStepsPerOctave, static_cast<float>(kBins - 1));
    return static_cast<Atomic64>(steps) << kLinearShift | Atomic64{falling} << kIdBits | id;
  }

  /// Calls visit(place, weight) for the candidates that have a weight and have not been cut off.
  template <class Visit>
  __device__ void visit_left(Visit visit) const {
    if (in_list_) {
      for (std::uint32_t i = threadIdx.x; i < s_.list_size; i += kThreads) {
        const Atomic64 at = s_.listed[i];
        if (at <= last_) visit(at, weight(octaves(from_falling_bits(static_cast<std::uint32_t>(at >> kIdBits)))));
      }
      return;
    }
    visit_row(limit_, [&](float x, int id) { look_at(x, id, visit); });
  }
  template <class Visit>
  __device__ void look_at(float x, int id, Visit visit) const {
    const float y = octaves(x);
    const Atomic64 w = weight(y);
    if (w == 0) return;  // -inf among them
    const Atomic64 at = place(y, falling_bits(x), static_cast<Atomic64>(id));
    if (at <= last_) visit(at, w);
  }

  __device__ void clear_bins() {
    s_.count[threadIdx.x] = s_.low[threadIdx.x] = s_.high[threadIdx.x] = 0;
    __syncthreads();
  }
  __device__ void add_weight(std::uint32_t bin, Atomic64 w) {
    const auto low = static_cast<std::uint32_t>(w);
    const std::uint32_t carry = atomicAdd(&s_.low[bin], low) > ~low ? 1 : 0;  // exact whatever the order of additions
    const std::uint32_t high = static_cast<std::uint32_t>(w >> 32) + carry;
    if (high != 0) atomicAdd(&s_.high[bin], high);
  }

  /// Chooses the bin in which the sum over the bins reaches an amount: for the first digit amount_of(sum over all),
  /// which one thread computes, else what the pick before has left.
  template <bool kWeighted, class AmountOf>
  __device__ void pick(bool is_first, AmountOf amount_of) {
    __syncthreads();
    const std::uint32_t bin = threadIdx.x;
    const std::uint32_t count = s_.count[bin];
    const Atomic64 mine = kWeighted ? Atomic64{s_.high[bin]} << 32 | s_.low[bin] : Atomic64{count};
    Atomic64 amount = s_.remaining;
    Atomic64 total = 0;
    const Atomic64 up_to = scan(s_, mine, total);
    Atomic64 count_up_to = up_to;
    if constexpr (kWeighted) {
      __syncthreads();
      Atomic64 ignored = 0;
      count_up_to = scan(s_, count, ignored);
    }
    if (is_first) {
      if (threadIdx.x == 0) s_.amount = amount_of(total);
      __syncthreads();
      amount = s_.amount;
    }
    if (up_to - mine < amount && amount <= up_to) {
      s_.bin = bin;
      s_.bin_count = count;
      s_.bin_sum = mine;
      s_.count_before = static_cast<std::uint32_t>(count_up_to) - count;
      s_.remaining = amount - (up_to - mine);
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
      visit_left([&](Atomic64 at, Atomic64 w) {
        if (at >> shift >> kDigitBits != prefix) return;
        const std::uint32_t bin = static_cast<std::uint32_t>(at >> shift) % kBins;
        atomicAdd(&s_.count[bin], 1U);
        if constexpr (kWeighted) add_weight(bin, w);
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
    }
  }

  /// Moves the candidates up to `end` from the row to the list.
  __device__ void list(Atomic64 end) {
    if (threadIdx.x == 0) s_.list_size = 0;
    __syncthreads();
    visit_left([&](Atomic64 at, Atomic64) {
      if (at <= end) s_.listed[atomicAdd(&s_.list_size, 1U)] = at;
    });
    __syncthreads();
    in_list_ = true;
  }

  /// Cuts off logits whose weight e^((x − top) / T), in fp64 rounded to nearest, is below min_p.
  __device__ void cut_min_p() {
    if (threadIdx.x == 0) {
      const double least = static_cast<double>(top_) + static_cast<double>(rule_.options.temperature) *
                                                           (log(static_cast<double>(rule_.options.min_p)) - 0x1p-54);
      const auto rounded = static_cast<float>(least);
      std::uint32_t falling = falling_bits(rounded);
      if (static_cast<double>(rounded) < least) --falling;  // the next larger number
      s_.last = place(octaves(from_falling_bits(falling)), falling, kIdMask);
    }
    __syncthreads();
    last_ = min(last_, s_.last);
  }

  /// The token at whose end, in order of ids, the weights exceed the drawn share of their sum.
  __device__ int draw() {
    const auto amount_of = [this](Atomic64 total) {
      const double share = philox_uniform(rule_.options.seed, rule_.sequence, rule_.step);
      return min(static_cast<Atomic64>(share * static_cast<double>(total)) + 1, total);
    };
    clear_bins();
    if (in_list_) {
      visit_left([&](Atomic64 at, Atomic64 w) { add_weight(static_cast<std::uint32_t>(at & kIdMask) / kIdsOfBin, w); });
    } else {
      add_row_by_ids();
    }
    pick<true>(true, amount_of);
    const std::uint32_t group = s_.bin;
    clear_bins();
    const auto add = [&](Atomic64 at, Atomic64 w) {
      const auto id = static_cast<std::uint32_t>(at & kIdMask);
      if (id / kIdsOfBin == group) add_weight(id % kIdsOfBin, w);
    };
    if (in_list_) {
      visit_left(add);
    } else if (const int id = static_cast<int>(group * kIdsOfBin + threadIdx.x); threadIdx.x < kIdsOfBin) {
      if (id < limit_) look_at(logits_[id], id, add);
    }
    pick<true>(false, amount_of);
    return static_cast<int>(group * kIdsOfBin + s_.bin);
  }
  /// Neighbouring ids share a bin: a warp adds up 128 of them first.
  __device__ void add_row_by_ids() {
    constexpr int kWarpIds = 128;
    static_assert(kIdsOfBin % kWarpIds == 0);
    const auto lane = static_cast<int>(threadIdx.x % 32);
    for (int first = kWarpIds * static_cast<int>(threadIdx.x / 32); first < limit_; first += 4 * kThreads) {
      const float4 x = load(first + 4 * lane, limit_);
      Atomic64 sum = 0;
      const auto add = [&](Atomic64, Atomic64 w) { sum += w; };
      look_at(x.x, first + 4 * lane, add);
      look_at(x.y, first + 4 * lane + 1, add);
      look_at(x.z, first + 4 * lane + 2, add);
      look_at(x.w, first + 4 * lane + 3, add);
      sum = warp_sum(sum);
      if (lane == 0) add_weight(static_cast<std::uint32_t>(first) / kIdsOfBin, sum);
    }
  }

  Shared& s_;
  const SampleRule rule_;
  const float* logits_;
  int words_;
  int limit_;  // ids that may be drawn are below
  bool takes_vectors_;
  bool in_list_ = false;
  float top_ = 0.0F;
  float scale_ = 0.0F;            // 2 log2(e) / temperature
  Atomic64 last_ = ~Atomic64{0};  // last place that has not been cut off
};

/// The logits of recent tokens, penalised for as long as this lives: a thread for each, and where a token came twice
/// both do the same. All threads make and end one.
class Penalty {
 public:
  __device__ Penalty(const SampleRule& rule, float* logits) : logits_(logits) {
    const float penalty = rule.options.repetition_penalty;
    if (rule.recent == nullptr || penalty == 1.0F) return;
    const auto window = static_cast<std::uint64_t>(rule.options.repetition_window);
    if (threadIdx.x < min(rule.recent_count, window)) {
      id_ = __ldcg(rule.recent + threadIdx.x);
      before_ = logits_[id_];
      if (!(fabsf(before_) <= kLargestFinite)) id_ = -1;
    }
    __syncthreads();  // all have read
    if (id_ >= 0) {
      const float penalised = before_ > 0.0F ? before_ / penalty : before_ * penalty;
      logits_[id_] = fminf(fmaxf(penalised, -kLargestFinite), kLargestFinite);
    }
    __syncthreads();
  }
  __device__ void end() const {
    __syncthreads();  // nobody looks at them any more
    if (id_ >= 0) logits_[id_] = before_;
  }

 private:
  float* logits_;
  int id_ = -1;
  float before_ = 0.0F;
};

__global__ void __launch_bounds__(kThreads) sample_kernel(MatrixView<const float, Device> logits, SampleRule* rules,
                                                          int* tokens, int* copy, bool takes_vectors) {
  __shared__ Shared shared;
  SampleRule& rule = rules[blockIdx.x];
  const float* const row = logits.row(blockIdx.x);
  const Penalty penalty(rule, const_cast<float*>(row));  // which puts them back
  const int token = Row(shared, rule, row, static_cast<int>(logits.cols), takes_vectors).sample();
  penalty.end();
  if (threadIdx.x != 0) return;
  if (rule.recent != nullptr && rule.options.repetition_window > 0) {
    rule.recent[rule.recent_count++ % static_cast<std::uint64_t>(rule.options.repetition_window)] = max(token, 0);
  }
  tokens[blockIdx.x] = token;
  if (copy != nullptr) copy[blockIdx.x] = max(token, 0);
  ++rule.step;  // all threads have read the rule and met since
}

}  // namespace

void sample_tokens(Cuda& cuda, const SampleTokens<Device>& op) {
  if (op.logits.cols < 1 || op.logits.cols > kMostSampleWords) {
    throw std::invalid_argument("sample_tokens: found rows of " + std::to_string(op.logits.cols) +
                                " logits, expected 1 to " + std::to_string(kMostSampleWords));
  }
  const bool takes_vectors = takes_16_bytes(op.logits.data, op.logits.rows == 1 ? 0 : 4 * op.logits.stride);
  launch(cuda.stream(), {.grid = dim3(static_cast<unsigned>(op.logits.rows)), .block = dim3(kThreads)}, sample_kernel,
         op.logits, op.rules, op.tokens, op.copy, takes_vectors);
}

}  // namespace mmrec::kernels
