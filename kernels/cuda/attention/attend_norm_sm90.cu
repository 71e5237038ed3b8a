// What rows of one token each attend to, from the query on (AttendNorm in kernels/ops.h), in one kernel.
//
// A cluster has 8 rows, a block of it one head: its 64 channels of the query, of what the head attends to, and of the
// output. A warp has 8 outputs of either product along half of k (gemm/matvec.cuh). The first weights come into
// registers and those of the output into shared memory before the predecessor has ended, slots while the query is
// multiplied. Blocks send each other what their heads attended to (st.async).
//
// Two warps attend for a row: four groups of 16 lanes take every fourth slot, 8 at a time, and are merged in order. So
// a row's bits depend on the row, the weights and its slots alone.
//
// Bytes: weights once for 8 rows, slots and rows once, attended rows once to each block.
#include "kernels/cuda/attention/softmax.cuh"
#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/matvec.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kHead = 64;       // channels
constexpr int kMostHeads = 16;  // blocks of a cluster
constexpr int kFewHeads = 8;    // of which many clusters find room
constexpr int kUnits = kHead / kBlockOutputs;
constexpr int kShares = 2;  // of k
constexpr int kAttendWarps = kShares * kUnits;
constexpr int kAttendThreads = 32 * kAttendWarps;
constexpr int kRowWarps = 2;  // that attend for a row
static_assert(kRowWarps * kTileColumns == kAttendWarps);
constexpr int kRowLanes = kHead / kGroup;
constexpr int kLaneGroups = 32 / kRowLanes * kRowWarps;     // of a row
constexpr int kSlotsAtOnce = 8;                             // of a group
constexpr int kMostSlots = 2 * kLaneGroups * kSlotsAtOnce;  // for which it is chosen

struct AttendParams {
  AttendNorm<Device, BFloat16> op;
  float scale;  // of scores, for exponents base 2
};

/// Bytes from one row of a vector in shared memory to the next: in other banks.
constexpr int row_pitch(std::int64_t dim) { return static_cast<int>(dim) * int{sizeof(BFloat16)} + 64; }

struct alignas(16) AttendShared {
  float sums[kShares][kUnits][kTileColumns][kBlockOutputs];  // of either product
  float query[kTileColumns][kHead];
  float4 values[kTileColumns][kRowLanes];  // of the slots that a row's second warp takes
  float2 softmax[kTileColumns];            // their maximum and sum
  std::uint64_t arrived;                   // attended rows
  std::uint64_t weights;                   // of the output

  /// Four neighbouring sums of a row.
  __device__ float4 sum(int row, int channel) const {
    const auto of = [&](int share) {
      return *reinterpret_cast<const float4*>(&sums[share][channel / kBlockOutputs][row][channel % kBlockOutputs]);
    };
    const float4 a = of(0), b = of(1);
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
  }
};

/// A lane's four channels of the slots of a row that its group takes.
class RowSlots {
 public:
  __device__ RowSlots(const AttendNorm<Device, BFloat16>& op, int row, int channel, int group)
      : group_(group), stride_(op.x.cols) {
    if (row >= op.x.rows) return;
    if (op.runs == nullptr) {
      from_ = op.slots.at(row, 0, 0) + channel;
      stride_ = op.slots.time_stride;
      count_ = static_cast<int>(op.slots.time);
    } else {
      const AttendingRun run = op.runs[row];
      from_ = run.slots + op.offset + channel;
      count_ = run.count;
    }
  }
  __device__ int count() const { return count_; }
  __device__ int slot(int first, int i) const { return first + i * kLaneGroups + group_; }
  __device__ void load(int first, float4 (&slots)[kSlotsAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      slots[i] = make_float4(0, 0, 0, 0);
      if (slot(first, i) < count_) slots[i] = __ldcg(reinterpret_cast<const float4*>(from_ + slot(first, i) * stride_));
    }
  }

 private:
  int group_;
  int count_ = 0;
  std::int64_t stride_;
  const float* from_ = nullptr;
};

/// The softmax of all slots that a group of lanes takes, a lane's four channels. `slots`: the first ones.
__device__ inline Softmax<kGroup> attend(const RowSlots& from, const float4& q, float4 (&slots)[kSlotsAtOnce]) {
  Softmax<kGroup> result;
  for (int first = 0; first < from.count(); first += kSlotsAtOnce * kLaneGroups) {
    if (first > 0) from.load(first, slots);
    float scores[kSlotsAtOnce];
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      scores[i] = __fmaf_rn(q.w, slots[i].w, __fmaf_rn(q.z, slots[i].z, __fmaf_rn(q.y, slots[i].y, q.x * slots[i].x)));
    }
#pragma unroll
    for (int offset = 1; offset < kRowLanes; offset *= 2) {
#pragma unroll
      for (float& score : scores) score += __shfl_xor_sync(0xffffffffU, score, offset);
    }
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) scores[i] = from.slot(first, i) < from.count() ? scores[i] : kNothing;
    result.take(scores);
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      result.values[0] = __fmaf_rn(scores[i], slots[i].x, result.values[0]);
      result.values[1] = __fmaf_rn(scores[i], slots[i].y, result.values[1]);
      result.values[2] = __fmaf_rn(scores[i], slots[i].z, result.values[2]);
      result.values[3] = __fmaf_rn(scores[i], slots[i].w, result.values[3]);
    }
  }
  return result;
}

/// The same of both groups of the warp, in all lanes.
__device__ inline Softmax<kGroup> merge_groups(const Softmax<kGroup>& mine) {
  const auto both = [&](float x, float& first, float& second) {
    const float other = __shfl_xor_sync(0xffffffffU, x, kRowLanes);
    const bool is_first = threadIdx.x % 32 < kRowLanes;
    first = is_first ? x : other, second = is_first ? other : x;
  };
  Softmax<kGroup> first, second;
  both(mine.max, first.max, second.max);
  both(mine.sum, first.sum, second.sum);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) both(mine.values[i], first.values[i], second.values[i]);
  merge(first, second);
  return first;
}

/// Sends a lane's four channels of a row's head, at `place` of every block, to all blocks: half a warp to every other.
__device__ inline void send(const float4& attended, const std::byte* place, const std::uint64_t* arrived) {
  const uint2 rounded = {ptx::to_pair<BFloat16>(attended.x, attended.y),
                         ptx::to_pair<BFloat16>(attended.z, attended.w)};
  for (unsigned to = threadIdx.x % 32 / kRowLanes; to < gridDim.x; to += 32 / kRowLanes) {
    ptx::store_async(ptx::place_in_cluster(place, to), rounded, ptx::place_in_cluster(arrived, to));
  }
}

/// Loads `rows` rows of h, for the product.
__device__ inline void stage(const AttendNorm<Device, BFloat16>& op, int first_row, int rows, std::byte* to,
                             int pitch) {
  const int pieces = static_cast<int>(op.h.cols) / Vector16<BFloat16>::kSize;
  for (int i = static_cast<int>(threadIdx.x); i < rows * pieces; i += kAttendThreads) {
    const int row = i / pieces, piece = i % pieces;
    const auto* from = reinterpret_cast<const uint4*>(op.h.row(first_row + row)) + piece;
    *reinterpret_cast<uint4*>(to + row * pitch + piece * 16) = __ldcg(from);
  }
}

/// blockIdx.x: a head; blockIdx.y: kTileColumns rows. Dynamic shared memory: AttendShared, h of the rows, what their
/// heads attended to, and the output's weights.
template <int kPart>
__global__ void __launch_bounds__(kAttendThreads, 1) attend_norm_kernel(const __grid_constant__ AttendParams p) {
  auto& shared = *ptx::shared_memory<AttendShared>();
  const AttendNorm<Device, BFloat16>& op = p.op;
  ptx::allow_successor();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int unit = warp % kUnits, share = warp / kUnits;
  const int head = static_cast<int>(blockIdx.x);
  const int first_row = static_cast<int>(blockIdx.y) * kTileColumns;
  const int rows = min(static_cast<int>(op.x.rows) - first_row, kTileColumns);
  const auto dim = static_cast<int>(op.x.cols);
  const int pitch = row_pitch(dim), row_bytes = dim * int{sizeof(BFloat16)};
  auto* const h = reinterpret_cast<std::byte*>(&shared + 1);
  std::byte* const attended = h + kTileColumns * pitch;
  std::byte* const out_weight = attended + kTileColumns * pitch;
  if (thread == 0) {
    ptx::mbarrier_init(&shared.arrived, 1);
    ptx::mbarrier_init(&shared.weights, 1);
    ptx::mbarrier_init_fence();
    ptx::mbarrier_arrive_expect(&shared.arrived, static_cast<unsigned>(rows * row_bytes));
    ptx::mbarrier_arrive_expect(&shared.weights, static_cast<unsigned>(kHead * row_bytes));
  }
  ptx::cluster_arrive();  // before loads, which it would wait for
  const int begin = dim / kStep<BFloat16> * share / kShares * kStep<BFloat16>;
  const int end = dim / kStep<BFloat16> * (share + 1) / kShares * kStep<BFloat16>;
  const std::int64_t first_weight = std::int64_t{head} * kHead * dim;
  WarpProduct<BFloat16, kTileColumns, Pace::kStream, FromShared> query(
      reinterpret_cast<const BFloat16*>(op.query_weight.data) + first_weight + unit * kBlockOutputs * dim,
      kBlockOutputs, dim, begin, end, reinterpret_cast<const BFloat16*>(h), pitch / int{sizeof(BFloat16)}, rows);
  if (warp == 0) {
    __syncwarp();
    const auto* from = reinterpret_cast<const BFloat16*>(op.out_weight.data) + first_weight;
    for (int i = thread; i < kHead; i += 32) {
      ptx::bulk_copy(out_weight + i * pitch, from + i * dim, static_cast<unsigned>(row_bytes), &shared.weights,
                     ptx::evict_first());
    }
  }
  // A thread finishes four outputs of a row, in warps of their own, and attends with four channels for another row.
  const int row = thread / kRowLanes, of_head = thread % kRowLanes * kGroup, channel = head * kHead + of_head;
  const bool finishes = row < rows;
  const std::int64_t its_row = first_row + (finishes ? row : 0);
  const int attending = warp / kRowWarps;
  const RowSlots from(op, first_row + attending, channel, row % kLaneGroups);
  float bias[kGroup] = {};
  if (op.query_bias != nullptr) load(op.query_bias + channel, bias);

  ptx::wait_for_predecessor();
  stage(op, first_row, rows, h, pitch);
  float q[kGroup];
  load(op.q.row(its_row) + channel, q);
  float4 slots[kSlotsAtOnce];
  from.load(0, slots);
  __syncthreads();
  query.load_x();
  query.multiply(shared.sums[share][unit]);
  __syncthreads();
  if (row < kTileColumns) {
    const float4 sum = shared.sum(row, of_head);
    const float sums[kGroup] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const BFloat16 rounded = narrow<BFloat16>(__fmaf_rn(0.5F, q[i], sums[i] + bias[i]));
      shared.query[row][of_head + i] = widen(rounded) * p.scale;
    }
  }
  __syncthreads();

  const auto its_query = *reinterpret_cast<const float4*>(&shared.query[attending][of_head]);
  Softmax<kGroup> part = merge_groups(attend(from, its_query, slots));
  ptx::cluster_wait();
  if (warp % kRowWarps != 0) {
    if (thread % 32 < kRowLanes) {
      shared.values[attending][thread % kRowLanes] =
          make_float4(part.values[0], part.values[1], part.values[2], part.values[3]);
      shared.softmax[attending] = make_float2(part.max, part.sum);
    }
    ptx::named_barrier_arrive(1 + attending, 32 * kRowWarps);
  } else {
    ptx::named_barrier_sync(1 + attending, 32 * kRowWarps);
    const float4 v = shared.values[attending][thread % kRowLanes];
    merge(part, {shared.softmax[attending].x, shared.softmax[attending].y, {v.x, v.y, v.z, v.w}});
    const float inverse = part.sum == 0.0F ? 0.0F : __fdividef(1.0F, part.sum);
    if (attending < rows) {
      send(make_float4(part.values[0] * inverse, part.values[1] * inverse, part.values[2] * inverse,
                       part.values[3] * inverse),
           attended + attending * pitch + channel * int{sizeof(BFloat16)}, &shared.arrived);
    }
  }

  float x[kGroup], weight[kGroup], out_bias[kGroup] = {};
  load(op.x.row(its_row) + channel, x);
  load(op.scaled.weight + channel, weight);
  if (op.out_bias != nullptr) load(op.out_bias + channel, out_bias);
  ptx::mbarrier_wait(&shared.weights, 0);
  WarpProduct<BFloat16, kTileColumns, Pace::kStream, FromShared, FromShared> out(
      reinterpret_cast<const BFloat16*>(out_weight + unit * kBlockOutputs * pitch), kBlockOutputs,
      pitch / int{sizeof(BFloat16)}, begin, end, reinterpret_cast<const BFloat16*>(attended),
      pitch / int{sizeof(BFloat16)}, rows);
  ptx::mbarrier_wait(&shared.arrived, 0);
  out.load_x();
  out.multiply(shared.sums[share][unit]);
  __syncthreads();
  if (row >= kTileColumns) return;
  const float4 sum = shared.sum(row, of_head);
  float y[kGroup] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < kGroup; ++i) y[i] = y[i] + out_bias[i] + x[i];
  if (finishes) store(op.x.row(its_row) + channel, y);
  leave_scaled<kPart>(op.scaled, finishes, its_row, channel, y, weight);
}

LaunchConfig attend_config(const AttendNorm<Device, BFloat16>& op) {
  return {.grid = dims(op.heads, ceil_div(op.x.rows, kTileColumns)),
          .block = dim3(kAttendThreads),
          .shared_bytes =
              sizeof(AttendShared) + static_cast<std::size_t>((2 * kTileColumns + kHead) * row_pitch(op.x.cols)),
          .cluster = static_cast<unsigned>(op.heads),
          .overlap_predecessor = true};
}

auto attend_kernel(const AttendNorm<Device, BFloat16>& op) {
  return op.scaled.part == kScaledPart ? attend_norm_kernel<kScaledPart> : attend_norm_kernel<kFewScaledPart>;
}

}  // namespace

bool takes_attend_norm(const Cuda& cuda, const AttendNorm<Device, BFloat16>& op) {
  const auto is_plain = [](const WeightView<Device>& w) { return w.data != nullptr && w.compact.data == nullptr; };
  // Of more heads, each with more weights, many clusters take longer than products of many rows: one H200, 16 heads,
  // 64 rows 1.2 times as long a step. More slots are spread over more warps by packed_attention().
  const bool pays = (op.heads <= kFewHeads || op.scaled.part == kFewScaledPart) && op.most_slots <= kMostSlots;
  return pays && cuda.compute_capability() == 90 && op.x.cols == op.heads * kHead && op.heads > 1 &&
         op.heads <= kMostHeads && is_plain(op.query_weight) && is_plain(op.out_weight) &&
         holds_cluster(attend_config(op), reinterpret_cast<const void*>(attend_kernel(op)));
}

void attend_norm(Cuda& cuda, const AttendNorm<Device, BFloat16>& op) {
  launch(cuda.stream(), attend_config(op), attend_kernel(op), AttendParams{op, attention_scale(kHead - op.padding)});
}

}  // namespace mmrec::kernels
