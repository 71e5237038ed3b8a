// y = act(x Wᵀ + bias) + residual_scale residual on the tensor cores of sm_90a, for 9 to 64 rows of bf16 and a
// quantised W, of which compact rows (compact.h) are streamed once. Tiles and epilogue: few_rows.cuh.
//
// As in few_rows_sm90.cu, but the left operand, W, lies in registers, to which both warpgroups widen numbers, each
// every other k-block of two groups: that takes longer than a product. Numbers become bf16 as they are, exactly, and
// their scales meet the sums: of all products, or of each group's. A lane of the tensor core needs two neighbours of
// each 8 inputs, and compact rows have 8 of them together for another kernel's lanes, so a thread loads a word of each
// lane's piece and takes half of it.
//
// The widening limits the rate. A stage of the ring holds one k-block, or half of one where x has 64 rows, so that
// there are more stages. With more rows this is slower than few_rows_sm90.cu.
//
// Bytes: compact rows once from memory; x as in few_rows_sm90.cu. Deterministic. A row's bits depend on the row, the
// weights and the epilogue's operands alone.
#include <algorithm>

#include "kernels/cuda/gemm/compact.h"
#include "kernels/cuda/gemm/few_rows.cuh"

namespace mmrec::kernels {
namespace {

static_assert(kDepth == kCompactGroup);
constexpr int kBlockGroups = 2;                  // of a k-block
constexpr int kScalesOfRow = 16;                 // bytes: of 4 groups
constexpr int kCompactThreads = kNormWarp * 32;  // the copying warp finds the norms as well: registers are few

template <class Y>
struct CompactJobs {
  TensorMap w[kMostGemmJobs];
  TensorMap scales[kMostGemmJobs];  // the same bytes
  TensorMap x[kMostGemmJobs];
  FewRowsJob<Y> job[kMostGemmJobs];
  CompactView rows[kMostGemmJobs];
  int groups[kMostGemmJobs];
};

/// The numbers of a tile of W.
template <DType kCode, bool kGroups>
struct Numbers {
  static constexpr DType kType = kCode;
  static constexpr bool kByGroups = kGroups;
  static constexpr WeightFormat kFormat = {kCode, kGroups ? kCompactGroup : 0};
  static constexpr int kGroupBytes = compact_group_bytes(kFormat);
};

/// A stage of the ring: W, x by groups, scales of groups. kRows: of x, 32 or 64.
template <int kRows, class N>
struct CompactStage {
  static constexpr int kGroups = kRows == 32 ? kBlockGroups : 1;
  static constexpr int kWRowBytes = kGroups * N::kGroupBytes;
  static constexpr int kWBytes = kOutputs * kWRowBytes;
  static constexpr int kXBytes = kRows * kRowBytes;  // of a group
  static constexpr int kScalesAt = kWBytes + kGroups * kXBytes;
  static constexpr int kBytes = kScalesAt + (N::kByGroups ? kOutputs * kScalesOfRow : 0);
  static constexpr int kCount = std::min(FewRowsRing<kRows>::kBytes / kBytes, kMostStages);
  static_assert(kWBytes % kAlignment == 0 && kBytes % kAlignment == 0);
};

/// f of a tile's numbers.
template <class F>
__device__ inline void by_numbers(const CompactView& rows, const FewRowsPlace& place, const F& f) {
  const DType code = place.output < rows.own_rows ? rows.format.code : DType::kI8;
  if (code == DType::kI4) return f(Numbers<DType::kI4, true>());
  if (code == DType::kF8) return f(Numbers<DType::kF8, false>());
  rows.format.group != 0 ? f(Numbers<DType::kI8, true>()) : f(Numbers<DType::kI8, false>());
}

/// Where rows have a group's numbers, and 16 bytes with its scale: 16-bit elements from the row's beginning.
struct GroupPlace {
  int numbers, scales;
};
template <class N>
__device__ inline GroupPlace group_place(int group, int groups) {
  const int in_chunk = group % kCompactChunkGroups;
  const int of_chunk = min(kCompactChunkGroups, groups - (group - in_chunk));
  const int numbers = compact_group_at(N::kFormat, group);
  const int behind = (of_chunk - in_chunk) * N::kGroupBytes;  // the chunk's numbers
  return {numbers / 2, (numbers + behind + in_chunk * 4 / kScalesOfRow * kScalesOfRow) / 2};
}

template <int kRows, class N, class Y>
__device__ inline void copy(const CompactJobs<Y>& jobs, const FewRowsPlace& place, const FewRowsRing<kRows>& ring) {
  using Stage = CompactStage<kRows, N>;
  const int groups = jobs.groups[place.job];
  const std::uint64_t hint = ptx::evict_first();
  const auto load_w = [&](int k, int stage) {
    std::byte* const to = ring.stages + stage * Stage::kBytes;
    const GroupPlace at = group_place<N>(place.k_begin * kBlockGroups + k * Stage::kGroups, groups);
    ptx::mbarrier_arrive_expect(&ring.full[stage], Stage::kBytes);
    ptx::load_box(to, &jobs.w[place.job], &ring.full[stage], at.numbers, place.output, 0, hint);
    if constexpr (N::kByGroups) {
      ptx::load_box(to + Stage::kScalesAt, &jobs.scales[place.job], &ring.full[stage], at.scales, place.output, 0);
    }
  };
  const auto load_x = [&](int k, int stage) {
    std::byte* const to = ring.stages + stage * Stage::kBytes + Stage::kWBytes;
    for (int g = 0; g < Stage::kGroups; ++g) {
      ptx::load_box(to + g * Stage::kXBytes, &jobs.x[place.job], &ring.full[stage],
                    (place.k_begin * kBlockGroups + k * Stage::kGroups + g) * kDepth, 0, 0);
    }
  };
  copy_stages<Stage::kCount>(ring, (place.k_end - place.k_begin) * kBlockGroups / Stage::kGroups, load_w, load_x);
}

/// Two BFloat16 2^7 and two -2^7. The compiler must not know that a block is one thread deep: of (x & a) | b with two
/// known constants it makes two instructions.
struct Biases {
  std::uint32_t plus = 0x43004300U + (blockDim.z - 1U);
  std::uint32_t minus = 0xc300c300U + (blockDim.z - 1U);
};
/// Bytes `first` and first + 1 of a word, signed integers, as two BFloat16. 2^7 + the lower 7 bits, less 2^7, or 2^8 of
/// a negative one.
__device__ inline std::uint32_t widen_integers(std::uint32_t word, unsigned first, const Biases& biases) {
  const std::uint32_t pair = __byte_perm(word, 0, 0x4140U + 0x101U * first);
  return ptx::add_pair((pair & 0x007f007fU) | biases.plus, (pair & 0x00800080U) | biases.minus);
}
/// Those of Float8. Shifted by 4 bits they are BFloat16 but for 2^120.
__device__ inline std::uint32_t widen_float8(std::uint32_t word, unsigned first) {
  const std::uint32_t pair = __byte_perm(word, 0, 0x1404U + 0x1010U * first);
  return ptx::mul_pair((pair >> 4 & 0x07f007f0U) | (pair & 0x80008000U), 0x7b807b80U);
}

/// The thread's part of tiles of 64 outputs by a group's inputs, for four products each. kPitchOfRows: of a k-block.
template <class N, int kPitchOfRows>
class TileWidener {
 public:
  __device__ TileWidener() {
    // The swizzle (ptx::load_box) moves pieces among those of a row.
    constexpr int kPieces = kPitchOfRows / 16;
    const int moved = row() * kPitchOfRows / 128 % kPieces * 16;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      at_[t] = row() * kPitchOfRows + lane_ % 4 / 2 * (N::kGroupBytes / 8) + ((t * (N::kGroupBytes / 4)) ^ moved);
    }
  }
  /// The thread's first output of a tile; the second is 8 behind.
  __device__ int row() const { return static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane_ / 4; }
  /// Group `group` of the k-block at w.
  __device__ void widen(const std::byte* w, int group, std::uint32_t (&a)[4][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // outputs 8 apart
#pragma unroll
      for (int t = 0; t < 4; ++t) {  // 8 inputs of each half of the group
        std::uint32_t words[2];
        const std::byte* const at = w + (at_[t] ^ (group * N::kGroupBytes)) + r * 8 * kPitchOfRows;
        if constexpr (N::kType == DType::kI4) {  // 16 times the numbers
          const auto both = *reinterpret_cast<const std::uint32_t*>(at);
          words[0] = both & 0xf0f0f0f0U, words[1] = both << 4 & 0xf0f0f0f0U;
        } else {
          const auto both = *reinterpret_cast<const uint2*>(at);
          words[0] = both.x, words[1] = both.y;
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          std::uint32_t& to = a[2 * m + t / 2][t % 2 * 2 + r];
          if constexpr (N::kType == DType::kF8) {
            to = widen_float8(words[m], first_);
          } else {
            to = widen_integers(words[m], first_, biases_);
          }
        }
      }
    }
  }

 private:
  int lane_ = static_cast<int>(threadIdx.x) % 32;
  unsigned first_ = threadIdx.x % 2 * 2;  // of the lane's two bytes of a word
  int at_[4];
  Biases biases_;
};

/// The scale of all numbers of a row.
__device__ inline float row_scale(const CompactView& rows, int row, int groups) {
  const std::byte* const of_row = rows.data + static_cast<std::int64_t>(row) * rows.row_bytes;
  return __ldg(reinterpret_cast<const float*>(of_row + compact_scale_at(groups * kCompactGroup)));
}

/// By both warpgroups: the tile's sums of the slice, for the first one.
template <int kRows, class N, class Y>
__device__ inline void multiply(const CompactJobs<Y>& jobs, const FewRowsPlace& place, const FewRowsRing<kRows>& ring,
                                float (&sum)[kRows / 2]) {
  using Stage = CompactStage<kRows, N>;
  constexpr int kSums = kRows / 2;
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int groups = jobs.groups[place.job];
  const TileWidener<N, Stage::kWRowBytes> tile;
  const std::uint64_t x = ptx::wgmma_operand(ring.stages + Stage::kWBytes);
  const std::uint64_t x_high = x >> 32 << 32;
  int stage = warpgroup * kBlockGroups / Stage::kGroups;
  std::uint32_t parity = 0;
  int before = -1;  // the stage of the products that run
  const auto multiply_group = [&](int group, std::uint32_t(&a)[4][4]) {
    const int g = group % Stage::kGroups;
    const std::byte* const w = ring.stages + stage * Stage::kBytes;
    const std::uint32_t at =
        static_cast<std::uint32_t>(x) + static_cast<std::uint32_t>((stage * Stage::kBytes + g * Stage::kXBytes) / 16);
    tile.widen(w, g, a);
    ptx::wgmma_fence();
    if constexpr (N::kByGroups) {
      float part[kSums];
#pragma unroll
      for (std::uint32_t i = 0; i < kDepth / 16; ++i) ptx::wgmma(part, a[i], x_high | (at + 2 * i), i != 0);
      ptx::wgmma_commit();
      const std::byte* const scales = w + Stage::kScalesAt + group % (kScalesOfRow / 4) * 4;
      float scale[2];
      for (int r = 0; r < 2; ++r) {  // where there is no group x has zeros, and scales are anything
        const float here = *reinterpret_cast<const float*>(scales + (tile.row() + r * 8) * kScalesOfRow);
        scale[r] = group < groups ? here : 0.0F;
      }
      ptx::wgmma_wait_all(part);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sum[i] = __fmaf_rn(part[i], scale[i % 4 / 2], sum[i]);
    } else {
#pragma unroll
      for (std::uint32_t i = 0; i < kDepth / 16; ++i) ptx::wgmma(sum, a[i], x_high | (at + 2 * i), true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
    }
    if (g == 0 && before >= 0 && threadIdx.x % kWarpgroup == 0) ptx::mbarrier_arrive(&ring.empty[before]);
  };
  const auto await = [&] { ptx::mbarrier_wait(&ring.full[stage], parity); };
  const auto next = [&](int stages) {
    before = stage;
    stage += stages;
    if (stage >= Stage::kCount) stage -= Stage::kCount, parity ^= 1U;
  };
  std::uint32_t even[4][4], odd[4][4];  // of products that run while others are made ready
  for (int k = place.k_begin + warpgroup; k < place.k_end; k += 2) {
    await();
    multiply_group(k * kBlockGroups, even);
    if constexpr (Stage::kGroups == 1) next(1), await();
    multiply_group(k * kBlockGroups + 1, odd);
    next(Stage::kGroups == 1 ? 3 : 2);
  }
  ptx::wgmma_wait_all(sum);
  float of_rows[2] = {1.0F, 1.0F};
  if constexpr (!N::kByGroups) {
    for (int r = 0; r < 2; ++r) {
      const int row = min(place.output + tile.row() + r * 8, jobs.job[place.job].out.columns - 1);
      of_rows[r] = row_scale(jobs.rows[place.job], row, groups);
    }
  }
  // The other warpgroup's sums, [i][thread].
  auto* const others = reinterpret_cast<float*>(ring.stages) + threadIdx.x % kWarpgroup;
  ptx::named_barrier_sync(1, kFinishers);  // nobody reads the ring any more
  if (warpgroup != 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) others[i * kWarpgroup] = sum[i];
  }
  ptx::named_barrier_sync(1, kFinishers);
  if (warpgroup != 0) return;
#pragma unroll
  for (int i = 0; i < kSums; ++i) sum[i] = (sum[i] + others[i * kWarpgroup]) * of_rows[i % 4 / 2];
  ptx::named_barrier_sync(3, kWarpgroup);  // the others' are read
}

template <class Y, int kRows>
__global__ void __launch_bounds__(kCompactThreads, 2) few_compact_kernel(const __grid_constant__ CompactJobs<Y> jobs) {
  ptx::allow_successor();
  const FewRowsRing<kRows> ring;
  const FewRowsPlace place = few_rows_place(jobs.job);
  const FewRowsJob<Y>& job = jobs.job[place.job];
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32, 0);
  float bias[4] = {};  // of the outputs that the thread will finish
  if (warp == kCopyingWarp) {
    if (threadIdx.x % 32 == 0) {
      by_numbers(jobs.rows[place.job], place, [&]<class N>(N) { copy<kRows, N>(jobs, place, ring); });
    }
    if (threadIdx.x % 32 != 0) ptx::cluster_wait();
    __syncwarp();
    ptx::wait_for_predecessor();
    return find_factors(job, place, ring);
  }
  load_bias(job.out, place, bias);
  ptx::cluster_wait();
  ptx::wait_for_predecessor();
  float sum[kRows / 2] = {};
  by_numbers(jobs.rows[place.job], place, [&]<class N>(N) { multiply<kRows, N>(jobs, place, ring, sum); });
  finish_block(job, place, ring, bias, sum);
}

template <int kRows, class Y>
void launch_few_compact(Cuda& cuda, std::span<const Linear<Device, BFloat16, Y>> jobs) {
  constexpr int kGroups = CompactStage<kRows, Numbers<DType::kI8, false>>::kGroups;
  CompactJobs<Y> parameters = {};
  int clusters = 0;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const CompactView& rows = jobs[i].weight.compact;
    const MatrixStack stack = matrix_stack(rows, jobs[i].weight.rows);
    clusters = set_few_rows_job(jobs[i], kBlockGroups * kDepth, clusters, parameters.job[i]);
    parameters.groups[i] = static_cast<int>(jobs[i].weight.cols / kDepth);
    parameters.rows[i] = rows;
    parameters.w[i] =
        make_tensor_map(stack, kOutputs, 1, /*wide=*/false, kGroups * compact_group_bytes(rows.format) / 2);
    parameters.scales[i] = make_tensor_map(stack, kOutputs, 1, /*wide=*/false, kScalesOfRow / 2);
    parameters.x[i] = make_tensor_map(matrix_stack(jobs[i].x), kRows);
  }
  launch(cuda.stream(), few_rows_launch<kRows>(clusters, kCompactThreads), few_compact_kernel<Y, kRows>, parameters);
}

}  // namespace

template <class Y>
void linear_few_compact_sm90(Cuda& cuda, std::span<const Linear<Device, BFloat16, Y>> jobs) {
  const bool few = std::ranges::all_of(jobs, [](const auto& job) { return job.x.rows <= 32; });
  few ? launch_few_compact<32>(cuda, jobs) : launch_few_compact<64>(cuda, jobs);
}

template void linear_few_compact_sm90(Cuda&, std::span<const Linear<Device, BFloat16, BFloat16>>);
template void linear_few_compact_sm90(Cuda&, std::span<const Linear<Device, BFloat16, float>>);

}  // namespace mmrec::kernels
