// One token of the recurrence of 9 to 128 rows of bf16, with the products that make its gates and decay
// (GatedAdvance in kernels/ops.h), on the tensor cores of sm_90a. Ring and exchange of sums: few_rows_ring.cuh.
//
// A cluster owns 64 channels, whose products its 8 blocks share out (advance.cuh). They send each other sums, and each
// finishes 8 rows. All that this needs from memory has been on its way since the predecessor ended, because the
// warpgroup that finishes rows has nothing else to do.
//
// Bytes: the weights once from memory, once more from L2 where there are more than 64 rows; the rows' operands once.
// Deterministic. A row's bits depend on the row and the weights alone.
#include "kernels/cuda/gemm/advance.cuh"
#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/few_rows_ring.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kAdvanceThreads = kCopyingWarp * 32 + 32;
static_assert(kCluster == kAdvanceShares);

struct AdvanceParams {
  TensorMap w[3] = {};  // of the gates, the decay, the context's decay
  TensorMap x[3] = {};
  int k_blocks[3] = {};
  GatedAdvance<Device, BFloat16> op = {};
};

/// blockIdx.y: rows of x, kRows at once, 32 or 64.
template <int kRows>
__global__ void __launch_bounds__(kAdvanceThreads, 2) advance_kernel(const __grid_constant__ AdvanceParams p) {
  using Stage = FewRowsStage<kRows>;
  using Share = FewRowsShare<kRows, kCluster>;
  static_assert(Share::kOfSlice == kRowGroup && kRowGroup * kOutputThreads == kWarpgroup);
  ptx::allow_successor();
  const FewRowsRing<kRows> ring;
  const int channel = static_cast<int>(blockIdx.x) / kCluster * kOutputs;
  const int first_row = static_cast<int>(blockIdx.y) * kRows;
  const int rows = min(static_cast<int>(p.op.h.rows) - first_row, kRows);
  FewRowsPlace place = {};
  place.slice = static_cast<int>(ptx::cluster_rank());
  const AdvanceShare share(place.slice, p.op.context_decay.hidden.data != nullptr);
  const int k_begin = share.begin(p.k_blocks[share.product]);
  const int count = share.end(p.k_blocks[share.product]) - k_begin;
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32, 0);

  if (warp == kCopyingWarp) {
    if (threadIdx.x % 32 != 0) return ptx::cluster_wait();
    const int output = channel + (share.is_second_gate ? static_cast<int>(p.op.h.cols) : 0);
    return copy_plain_stages(ring, p.w[share.product], p.x[share.product], k_begin, count, output, first_row);
  }
  if (warp < kWarpgroup / 32) {
    ptx::cluster_wait();
    float sum[kRows / 2] = {};
    multiply<BFloat16, Stage>(ring, count, sum);
    leave_sums<kCluster>(ring, place, rows, sum);
    ptx::named_barrier_arrive(kSumsBarrier, kFinishers);
    return;
  }
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
  const int row = place.slice * kRowGroup + thread / kOutputThreads;
  const int output = thread % kOutputThreads * kGroup;
  AdvancedRow<BFloat16, kGroup, kScaledPart> mine(p.op, row < rows ? first_row + row : -1, channel + output);
  ptx::cluster_wait();
  ptx::wait_for_predecessor();
  mine.load();
  ptx::named_barrier_sync(kSumsBarrier, kFinishers);
  ptx::mbarrier_wait(ring.arrived, 0);
  float part[kCluster][kGroup];
  load_sums<kCluster>(ring, place, thread / kOutputThreads, output, part);
  mine.finish(part);
}

template <int kRows>
void launch_advance(Cuda& cuda, const GatedAdvance<Device, BFloat16>& op) {
  AdvanceParams p;
  p.op = op;
  const auto set = [&](int i, MatrixView<const BFloat16, Device> x, const WeightView<Device>& weight) {
    p.w[i] = make_tensor_map(matrix_stack<BFloat16>(weight), kOutputs, 1, /*wide=*/false);
    p.x[i] = make_tensor_map(matrix_stack(x), kRows);
    p.k_blocks[i] = static_cast<int>(ceil_div(weight.cols, kDepth));
  };
  set(0, op.h, op.gate_weight);
  set(1, op.decay.hidden, op.decay.weight);
  if (op.context_decay.hidden.data != nullptr) set(2, op.context_decay.hidden, op.context_decay.weight);
  const LaunchConfig config = {.grid = dims(op.h.cols / kOutputs * kCluster, ceil_div(op.h.rows, kRows)),
                               .block = dim3(kAdvanceThreads),
                               .shared_bytes = FewRowsRing<kRows>::kSharedBytes,
                               .cluster = kCluster,
                               .overlap_predecessor = true};
  launch(cuda.stream(), config, advance_kernel<kRows>, p);
}

}  // namespace

void few_advance_sm90(Cuda& cuda, const GatedAdvance<Device, BFloat16>& op) {
  op.h.rows <= 32 ? launch_advance<32>(cuda, op) : launch_advance<64>(cuda, op);
}

}  // namespace mmrec::kernels
