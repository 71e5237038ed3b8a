// out = softmax(q · slotsᵀ / √d) · slots per head, slots being keys and values alike. Long, because both ways to
// spread the one arithmetic are here.
//
// A slot row of a head is cut into 4-channel pieces that a group of lanes holds in turn, the lane's pieces of q and of
// the sums in registers (softmax.cuh). Slots are taken in chunks of fixed size, whose softmaxes are merged in
// order by the (max, sum) monoid: one arithmetic, two ways to spread it, and a row's bits do not depend on how many
// rows there are.
//
//  * attend_tile, many tokens: a block owns one head of 2 tokens per group of lanes. It brings tiles of slots into
//    shared memory, where all its tokens read them.
//  * attend_split, few tokens: a block owns one head of one token, a group of lanes a chunk; the chunks meet in shared
//    memory and are merged in order there. Slots come from L2.
//  * attend_any, heads of more than 1,024 channels or without 4-channel alignment, whatever the number of tokens: a
//    block owns one head of one token; its warps form scores, its threads the channels.
//
// Exponents are base 2, the scale 1/√d · log₂e goes into q.
// Bytes: q read and out written once; slots once per block, from L2.
#include <bit>

#include "kernels/cuda/attention/algo.h"
#include "kernels/cuda/attention/softmax.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 4;           // slots whose scores are formed together
constexpr int kTileFloats = 4096;   // of slots in shared memory
constexpr int kChunkFloats = 1024;  // of slots that are merged at once, unless that is less than a batch
constexpr int kMostWidth = 1024;    // channels of a head, beyond which attend_any takes over
constexpr std::int64_t kManyTokens = 16;

/// How a head of d channels lies over lanes. A slot row is padded with zeros to `width` channels, a power of two.
struct Spread {
  int lanes;  // of a group
  int width;
  int chunk;  // slots
  int tile;   // slots, whole chunks
};

/// One sequence's queries and slots.
template <class A>
struct Attending {
  const A* q;
  A* out;
  const float* memory;
  std::int64_t time, slots;
};

/// What all kernels are given. With `runs` these are the sequences, rows of the first of q.
template <class A>
struct Attention {
  MemoryAttention<Device, A> op;
  const AttendingRun* runs;
  std::int64_t offset;  // of their slots
  int d;
  float scale;  // of scores, for exponents base 2
  Spread spread;

  __device__ Attending<A> sequence(std::int64_t b) const {
    if (runs == nullptr) {
      return {op.q.at(b, 0, 0), op.out.at(b, 0, 0), op.slots.at(b, 0, 0), op.q.time, op.slots.time};
    }
    const AttendingRun run = runs[b];
    return {op.q.at(0, 0, run.first), op.out.at(0, 0, run.first), run.slots + offset, run.rows, run.count};
  }
};

/// The softmax of one chunk of `count` slots for kTokens tokens, whose q a group of lanes holds. All lanes of a warp
/// bring the same `most_slots` >= count; going on past count changes nothing. slot(j, i) is the lane's piece i of slot
/// j, 0 <= j < max(count, 1). kHold: slots are read once and held in registers, else they are read again for the
/// values.
template <bool kHold, int kTokens, int kValues, class Slot>
__device__ void attend_chunk(const float (&q)[kTokens][kValues], int lanes, int count, int most_slots, const Slot& slot,
                             Softmax<kValues> (&result)[kTokens]) {
  constexpr int kPieces = kValues / kGroup;
#pragma unroll
  for (Softmax<kValues>& r : result) r = {};
  const int last = max(count, 1) - 1;
  for (int first = 0; first < most_slots; first += kBatch) {
    float4 held[kHold ? kBatch : 1][kHold ? kPieces : 1];
    float scores[kTokens][kBatch] = {};
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float4 k = slot(min(first + j, last), i);
        if constexpr (kHold) held[j][i] = k;
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
          float& score = scores[n][j];
          score = __fmaf_rn(q[n][kGroup * i], k.x, score);
          score = __fmaf_rn(q[n][kGroup * i + 1], k.y, score);
          score = __fmaf_rn(q[n][kGroup * i + 2], k.z, score);
          score = __fmaf_rn(q[n][kGroup * i + 3], k.w, score);
        }
      }
    }
    for (int offset = 1; offset < lanes; offset *= 2) {
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) scores[n][j] += __shfl_xor_sync(0xffffffffU, scores[n][j], offset);
      }
    }
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j >= count) scores[n][j] = kNothing;
      }
      result[n].take(scores[n]);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float4 v = kHold ? held[kHold ? j : 0][kHold ? i : 0] : slot(min(first + j, last), i);
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
          float* values = result[n].values + kGroup * i;
          values[0] = __fmaf_rn(scores[n][j], v.x, values[0]);
          values[1] = __fmaf_rn(scores[n][j], v.y, values[1]);
          values[2] = __fmaf_rn(scores[n][j], v.z, values[2]);
          values[3] = __fmaf_rn(scores[n][j], v.w, values[3]);
        }
      }
    }
  }
}

/// A lane's channels of a head of q, scaled: pieces lane, lane + lanes, … of 4 channels.
template <int kValues, class A>
__device__ inline void load_query(const Attention<A>& given, const A* q, int lane, float (&to)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues / kGroup; ++i) {
    float piece[kGroup];
    load_group<true>(q, i * given.spread.lanes + lane, given.d, piece);
#pragma unroll
    for (int c = 0; c < kGroup; ++c) to[i * kGroup + c] = piece[c] * given.scale;
  }
}

/// blockIdx.x: a tile of tokens of a sequence; blockIdx.y: a head.
template <class A, int kValues>
__global__ void __launch_bounds__(kThreads, kValues <= 8 ? 2 : 1)
    attend_tile(const __grid_constant__ Attention<A> given) {
  constexpr int kTokens = kValues <= 16 ? 2 : 1;
  constexpr int kPieces = kValues / kGroup;
  __shared__ float4 tile[kTileFloats / kGroup];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const MemoryAttention<Device, A>& op = given.op;
  const Spread& spread = given.spread;
  const int groups = kThreads / spread.lanes;
  const int lane = static_cast<int>(threadIdx.x) % spread.lanes;
  const std::int64_t tokens = std::int64_t{groups} * kTokens;  // of a block
  const std::int64_t tiles = (op.q.time + tokens - 1) / tokens;
  const std::int64_t b = quotient(blockIdx.x, tiles);
  const std::int64_t first_of_block = (blockIdx.x - b * tiles) * tokens;
  const std::int64_t first_token = first_of_block + static_cast<int>(threadIdx.x) / spread.lanes;
  const std::int64_t first_channel = std::int64_t{blockIdx.y} * given.d;
  const Attending<A> s = given.sequence(b);
  if (first_of_block >= s.time) return;

  float q[kTokens][kValues];
#pragma unroll
  for (int n = 0; n < kTokens; ++n) {
    const std::int64_t t = min(first_token + n * groups, s.time - 1);
    load_query(given, s.q + t * op.q.time_stride + first_channel, lane, q[n]);
  }

  const int row_pieces = spread.width / kGroup;
  Softmax<kValues> total[kTokens];
  for (std::int64_t first = 0; first < s.slots; first += spread.tile) {
    const int slots = static_cast<int>(min(s.slots - first, std::int64_t{spread.tile}));
    __syncthreads();  // all are done with the tile before
    for (int i = static_cast<int>(threadIdx.x); i < slots * row_pieces; i += kThreads) {
      float piece[kGroup];
      load_group<true>(s.memory + (first + i / row_pieces) * op.slots.time_stride + first_channel, i % row_pieces,
                       given.d, piece);
      tile[i] = make_float4(piece[0], piece[1], piece[2], piece[3]);
    }
    __syncthreads();
    for (int begin = 0; begin < slots; begin += spread.chunk) {
      const float4* chunk = tile + begin * row_pieces + lane;
      const int count = min(spread.chunk, slots - begin);
      Softmax<kValues> part[kTokens];
      attend_chunk<false>(
          q, spread.lanes, count, count, [&](int j, int i) { return chunk[j * row_pieces + i * spread.lanes]; }, part);
#pragma unroll
      for (int n = 0; n < kTokens; ++n) merge(total[n], part[n]);
    }
  }

#pragma unroll
  for (int n = 0; n < kTokens; ++n) {
    const std::int64_t t = first_token + n * groups;
    if (t >= s.time) continue;
    const float inverse = 1.0F / total[n].sum;
    A* out = s.out + t * op.out.time_stride + first_channel;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      float piece[kGroup];
#pragma unroll
      for (int c = 0; c < kGroup; ++c) piece[c] = total[n].values[kGroup * i + c] * inverse;
      store_group<true>(out, i * spread.lanes + lane, given.d, piece);
    }
  }
}

/// blockIdx.x: a token of a sequence; blockIdx.y: a head. Whole warps of up to kThreads threads.
template <class A, int kValues>
__global__ void __launch_bounds__(kThreads) attend_split(const __grid_constant__ Attention<A> given) {
  __shared__ float values[kThreads * kValues];  // of every group's chunk
  __shared__ float maxima[kThreads];            // the same in all lanes of a group
  __shared__ float sums[kThreads];
  __shared__ float merged[kMostWidth];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const MemoryAttention<Device, A>& op = given.op;
  const Spread& spread = given.spread;
  const int groups = static_cast<int>(blockDim.x) / spread.lanes;
  const int lane = static_cast<int>(threadIdx.x) % spread.lanes;
  const int group = static_cast<int>(threadIdx.x) / spread.lanes;
  const std::int64_t b = quotient(blockIdx.x, op.q.time);
  const std::int64_t t = blockIdx.x - b * op.q.time;
  const std::int64_t first_channel = std::int64_t{blockIdx.y} * given.d;
  const Attending<A> s = given.sequence(b);
  if (t >= s.time) return;

  float q[1][kValues];
  load_query(given, s.q + t * op.q.time_stride + first_channel, lane, q[0]);

  // Every thread carries max and sum, and the merged values of its channels threadIdx.x, + blockDim.x, ….
  for (int c = static_cast<int>(threadIdx.x); c < spread.width; c += static_cast<int>(blockDim.x)) merged[c] = 0.0F;
  Softmax<1> total;
  const std::int64_t slots = s.slots;
  const std::int64_t slots_at_once = std::int64_t{groups} * spread.chunk;
  for (std::int64_t first = 0; first < slots; first += slots_at_once) {
    // Groups whose chunk is short or missing run along, so that the lanes of a warp stay together.
    const std::int64_t begin = first + group * spread.chunk;
    const auto of_chunk = [&](std::int64_t from) {
      return static_cast<int>(min(slots - from, std::int64_t{spread.chunk}));
    };
    Softmax<kValues> part[1];
    attend_chunk<(kValues <= 16)>(
        q, spread.lanes, begin < slots ? of_chunk(begin) : 0, of_chunk(first),
        [&](int j, int i) {
          float piece[kGroup];
          load_group<true>(s.memory + min(begin + j, slots - 1) * op.slots.time_stride + first_channel,
                           i * spread.lanes + lane, given.d, piece);
          return make_float4(piece[0], piece[1], piece[2], piece[3]);
        },
        part);
    __syncthreads();  // all are done with the chunks before
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int channel = (i / kGroup * spread.lanes + lane) * kGroup + i % kGroup;
      values[group * spread.width + channel] = part[0].values[i];
    }
    maxima[threadIdx.x] = part[0].max;
    sums[threadIdx.x] = part[0].sum;
    __syncthreads();
    const int chunks = static_cast<int>(min((slots - first + spread.chunk - 1) / spread.chunk, std::int64_t{groups}));
    Softmax<1> next = total;
    for (int c = static_cast<int>(threadIdx.x); c < spread.width; c += static_cast<int>(blockDim.x)) {
      next = total;
      next.values[0] = merged[c];
      for (int k = 0; k < chunks; ++k) {
        merge(next, Softmax<1>{maxima[k * spread.lanes], sums[k * spread.lanes], {values[k * spread.width + c]}});
      }
      merged[c] = next.values[0];
    }
    total = next;
  }

  A* out = s.out + t * op.out.time_stride + first_channel;
  const float inverse = 1.0F / total.sum;
  for (int c = static_cast<int>(threadIdx.x); c < given.d; c += static_cast<int>(blockDim.x)) {
    out[c] = narrow<A>(merged[c] * inverse);
  }
}

/// blockIdx.x: a token of a sequence; blockIdx.y: a head. Dynamic shared memory: the head's d values.
template <class A>
__global__ void __launch_bounds__(kThreads) attend_any(const __grid_constant__ Attention<A> given) {
  constexpr int kSlots = 32;  // at a time
  __shared__ float scores[kSlots];
  auto* values = ptx::shared_memory<float>();
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const MemoryAttention<Device, A>& op = given.op;
  const std::int64_t b = quotient(blockIdx.x, op.q.time);
  const std::int64_t t = blockIdx.x - b * op.q.time;
  const std::int64_t first_channel = std::int64_t{blockIdx.y} * given.d;
  const Attending<A> s = given.sequence(b);
  if (t >= s.time) return;
  const A* q = s.q + t * op.q.time_stride + first_channel;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;

  for (int c = thread; c < given.d; c += kThreads) values[c] = 0.0F;
  Softmax<1> total;
  for (std::int64_t first = 0; first < s.slots; first += kSlots) {
    const int count = static_cast<int>(min(s.slots - first, std::int64_t{kSlots}));
    __syncthreads();  // all are done with the scores before
    for (int j = thread / 32; j < kSlots; j += kThreads / 32) {
      const float* slot = s.memory + (first + min(j, count - 1)) * op.slots.time_stride + first_channel;
      float score = 0.0F;
      for (int c = lane; c < given.d; c += 32) {
        score = __fmaf_rn(read(q + c) * given.scale, read(slot + c), score);
      }
      score = warp_sum(score);
      if (lane == 0) scores[j] = j < count ? score : kNothing;
    }
    __syncthreads();
    float weights[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) weights[j] = scores[j];
    const float kept = total.take(weights);
    for (int c = thread; c < given.d; c += kThreads) {
      float value = values[c] * kept;
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (j >= count) break;
        value = __fmaf_rn(weights[j], read(s.memory + (first + j) * op.slots.time_stride + first_channel + c), value);
      }
      values[c] = value;
    }
  }
  __syncthreads();  // all are done with q, which out may alias
  A* out = s.out + t * op.out.time_stride + first_channel;
  const float inverse = 1.0F / total.sum;
  for (int c = thread; c < given.d; c += kThreads) out[c] = narrow<A>(values[c] * inverse);
}

/// kValues channels a lane, of `lanes`.
template <int kValues, class A>
void attend(const Cuda& cuda, AttentionAlgo algo, Attention<A> given, int lanes) {
  const MemoryAttention<Device, A>& op = given.op;
  const int width = lanes * kValues;
  given.spread = {lanes, width, std::max(kChunkFloats / width, kBatch), kTileFloats / width};
  if (algo == AttentionAlgo::kTile) {
    const std::int64_t tokens = kThreads / lanes * (kValues <= 16 ? 2 : 1);
    const dim3 grid = dims(op.q.batch * ceil_div(op.q.time, tokens), op.heads);
    return launch(cuda.stream(), overlapping(cuda, grid, dim3(kThreads)), attend_tile<A, kValues>, given);
  }
  const std::int64_t threads = ceil_div(ceil_div(op.slots.time, given.spread.chunk) * lanes, 32) * 32;
  const dim3 block = dims(std::min<std::int64_t>(threads, kThreads));
  launch(cuda.stream(), overlapping(cuda, dims(op.q.batch * op.q.time, op.heads), block), attend_split<A, kValues>,
         given);
}

}  // namespace

template <class A>
AttentionAlgo choose_attention(const MemoryAttention<Device, A>& op) {
  const std::int64_t d = op.q.dim / op.heads;
  if (d > kMostWidth || d % kGroup != 0 || !takes_vectors(op.q) || !takes_vectors(op.slots) || !takes_vectors(op.out)) {
    return AttentionAlgo::kAny;
  }
  return op.q.time >= kManyTokens ? AttentionAlgo::kTile : AttentionAlgo::kSplit;
}

namespace {

template <class A>
void attend_by(Cuda& cuda, AttentionAlgo algo, const MemoryAttention<Device, A>& op, const AttendingRun* runs,
               std::int64_t offset) {
  const std::int64_t rows = op.q.batch * op.q.time;
  if (rows == 0) return;
  if (algo == AttentionAlgo::kAuto) algo = choose_attention(op);
  const auto d = static_cast<int>(op.q.dim / op.heads);
  const Attention<A> given{op, runs, offset, d, attention_scale(d - op.padding), {}};
  if (algo == AttentionAlgo::kAny) {
    LaunchConfig config = overlapping(cuda, dims(rows, op.heads), dim3(kThreads));
    config.shared_bytes = static_cast<std::size_t>(d) * sizeof(float);
    return launch(cuda.stream(), config, attend_any<A>, given);
  }
  if (d <= 16) return attend<4>(cuda, algo, given, 4);
  if (d <= 32) return attend<8>(cuda, algo, given, 4);
  if (d <= 512)
    return attend<16>(cuda, algo, given, std::max(static_cast<int>(std::bit_ceil(static_cast<unsigned>(d))) / 16, 4));
  attend<32>(cuda, algo, given, 32);
}

}  // namespace

template <class A>
void memory_attention(Cuda& cuda, const MemoryAttention<Device, A>& op, AttentionAlgo algo) {
  attend_by(cuda, algo, op, nullptr, 0);
}

template <class A>
void packed_attention(Cuda& cuda, const PackedAttention<Device, A>& op) {
  // Sizes of the largest sequence; where each lies its run says. Slots are aligned as states are.
  MemoryAttention<Device, A> all{.q = {op.q.data, op.count, op.most_rows, op.q.cols},
                                 .slots = {nullptr, op.count, op.most_slots, op.q.cols},
                                 .heads = op.heads,
                                 .out = {op.out.data, op.count, op.most_rows, op.out.cols},
                                 .padding = op.padding};
  all.q.time_stride = op.q.stride;
  all.out.time_stride = op.out.stride;
  attend_by(cuda, AttentionAlgo::kAuto, all, op.runs, op.offset);
}

#define MMREC_INSTANTIATE(A)                                                               \
  template AttentionAlgo choose_attention(const MemoryAttention<Device, A>&);              \
  template void memory_attention(Cuda&, const MemoryAttention<Device, A>&, AttentionAlgo); \
  template void packed_attention(Cuda&, const PackedAttention<Device, A>&);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
