// One token of the recurrence of few rows, with the products that make its gates and decay (GatedAdvance in
// kernels/ops.h). A block owns 8 channels of 8 rows, whose products its 8 warps share out (advance.cuh, matvec.cuh).
//
// Bytes: the weights once for 8 rows; the rows' operands once. Deterministic. A row's bits depend on the row and the
// weights alone.
#include "kernels/cuda/gemm/advance.cuh"
#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/matvec.cuh"

namespace mmrec::kernels {
namespace {

static_assert(kWarps == kAdvanceShares && kBlockOutputs == kFewScaledPart);

template <class A, int kRows, Pace kPace>
__global__ void __launch_bounds__(kThreads, 2) advance_kernel(const __grid_constant__ GatedAdvance<Device, A> op) {
  __shared__ float partial[kWarps][kTileColumns][kBlockOutputs];
  ptx::allow_successor();
  const int channel = static_cast<int>(blockIdx.x) * kBlockOutputs;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int first_row = static_cast<int>(blockIdx.y) * kTileColumns;
  const int rows = min(static_cast<int>(op.h.rows) - first_row, kTileColumns);
  const AdvanceShare share(warp, op.context_decay.hidden.data != nullptr);
  const auto& decay = share.product == 2 ? op.context_decay : op.decay;
  const WeightView<Device>& weight = share.product == 0 ? op.gate_weight : decay.weight;
  const MatrixView<const A, Device>& x = share.product == 0 ? op.h : decay.hidden;
  const auto in = static_cast<int>(weight.cols);
  const int steps = (in + kStep<A> - 1) / kStep<A>;
  const std::int64_t first_output = channel + (share.is_second_gate ? op.h.cols : 0);
  WarpProduct<A, kRows, kPace> product(reinterpret_cast<const A*>(weight.data) + first_output * in, kBlockOutputs, in,
                                       share.begin(steps) * kStep<A>, share.end(steps) * kStep<A>, x.row(first_row),
                                       x.stride, rows);
  const int row = static_cast<int>(threadIdx.x) / kBlockOutputs;
  const int output = static_cast<int>(threadIdx.x) % kBlockOutputs;
  AdvancedRow<A, 1, kFewScaledPart> mine(op, row < rows ? first_row + row : -1, channel + output);

  ptx::wait_for_predecessor();
  product.load_x();
  if (row < kTileColumns) mine.load();
  product.multiply(partial[warp]);
  __syncthreads();
  if (row >= kTileColumns) return;
  float part[kAdvanceShares][1];
#pragma unroll
  for (int i = 0; i < kAdvanceShares; ++i) part[i][0] = partial[i][row][output];
  mine.finish(part);
}

template <int kRows, class A>
void launch_advance(Cuda& cuda, const GatedAdvance<Device, A>& op) {
  const std::int64_t of_gates = ceil_div(ceil_div(op.h.cols, kStep<A>), AdvanceShare::kOfGate);
  const std::int64_t of_decay = ceil_div(op.decay.weight.cols, kStep<A>);
  const auto kernel = std::max(of_gates, of_decay) > kFewSteps ? advance_kernel<A, kRows, Pace::kStream>
                                                               : advance_kernel<A, kRows, Pace::kAtOnce>;
  launch(cuda.stream(),
         overlapping(cuda, dims(op.h.cols / kBlockOutputs, ceil_div(op.h.rows, kTileColumns)), dim3(kThreads)), kernel,
         op);
}

}  // namespace

template <class A>
void gated_advance(Cuda& cuda, const GatedAdvance<Device, A>& op) {
  const std::int64_t rows = op.h.rows;
  if constexpr (sizeof(A) == 4) {
    if (rows <= 1) return launch_advance<1>(cuda, op);
    if (rows <= 2) return launch_advance<2>(cuda, op);
    if (rows <= 4) return launch_advance<4>(cuda, op);
  } else if (op.part == kScaledPart) {
    return few_advance_sm90(cuda, op);
  }
  launch_advance<kTileColumns>(cuda, op);
}

template void gated_advance(Cuda&, const GatedAdvance<Device, float>&);
template void gated_advance(Cuda&, const GatedAdvance<Device, BFloat16>&);

}  // namespace mmrec::kernels
