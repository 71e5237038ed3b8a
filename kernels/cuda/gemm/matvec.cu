// y = act(W x + bias) + residual_scale residual for 1 to 8 rows x, W [out, in] of type A streamed once.
//
// A block owns 8 outputs of one job; its 8 warps cut `in` among themselves in runs of whole steps (matvec.cuh) and add
// up in order. The order of a sum follows from `in` alone.
//
// Bytes: every weight once; x once per block from L2, out / 8 times in all. Jobs of one call share a launch, so that
// small matrices fill the device together.
#include "kernels/cuda/gemm/matvec.cuh"

namespace mmrec::kernels {
namespace {

template <class A, class Y>
struct Job {
  const A* x;
  const A* weight;
  LinearOutput<Y> out;
  std::int64_t x_stride;
  const float* x_squares;  // or null
  ScaledRows<Device, A> scaled;
  int in;
  unsigned first_block;
};

template <class A, class Y>
struct Jobs {
  Job<A, Y> job[kMostMatvecJobs];
  int count;
};

template <class A, class Y, int kRows, Pace kPace>
__global__ void __launch_bounds__(kThreads, blocks_per_processor<A>(kRows, kPace))
    matvec_kernel(const __grid_constant__ Jobs<A, Y> jobs) {
  __shared__ float partial[kWarps][kTileColumns][kBlockOutputs];
  __shared__ float factors[kTileColumns];
  ptx::allow_successor();
  int index = 0;
  while (index + 1 < jobs.count && blockIdx.x >= jobs.job[index + 1].first_block) ++index;
  const Job<A, Y>& job = jobs.job[index];
  const LinearOutput<Y>& out = job.out;
  const int first_output = static_cast<int>(blockIdx.x - job.first_block) * kBlockOutputs;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int share = (job.in + kWarps * kStep<A> - 1) / (kWarps * kStep<A>)*kStep<A>;
  WarpProduct<A, kRows, kPace> product(job.weight + std::int64_t{first_output} * job.in, out.columns - first_output,
                                       job.in, warp * share, (warp + 1) * share, job.x, job.x_stride, out.rows);
  // This thread will finish output `output` of row `row`.
  const int row = static_cast<int>(threadIdx.x) / kBlockOutputs;
  const int output = first_output + static_cast<int>(threadIdx.x) % kBlockOutputs;
  const bool finishes = row < out.rows && output < out.columns;
  const float bias = finishes && out.bias != nullptr ? __ldg(out.bias + output) : 0.0F;

  ptx::wait_for_predecessor();
  float residual = 0.0F;
  if (finishes && out.residual != nullptr) residual = read(out.residual + row * out.residual_stride + output);
  product.load_x();
  const bool is_scaled = job.x_squares != nullptr && warp < out.rows;
  ScaledFactor factor;
  if (is_scaled) factor.load_first(job.x_squares, job.in, warp);
  product.multiply(partial[warp]);
  if (is_scaled) {
    const float found = factor.find(job.x_squares, job.in, warp);
    if (threadIdx.x % 32 == 0) factors[warp] = found;
  }
  __syncthreads();

  if (row >= kTileColumns) return;
  const bool scales = job.scaled.squares != nullptr;
  const float weight[1] = {finishes && scales ? __ldg(job.scaled.weight + output) : 0.0F};
  float y[1] = {partial[0][row][threadIdx.x % kBlockOutputs]};
#pragma unroll
  for (int i = 1; i < kWarps; ++i) y[0] += partial[i][row][threadIdx.x % kBlockOutputs];
  y[0] = activate(__fmaf_rn(y[0], job.x_squares != nullptr ? factors[row] : 1.0F, bias), out.activation);
  y[0] = __fmaf_rn(out.residual_scale, residual, y[0]);
  if (finishes) out.y[row * out.y_stride + output] = narrow<Y>(y[0]);
  if (scales) leave_scaled<kFewScaledPart>(job.scaled, finishes, row, output, y, weight);
}

/// A launch of all jobs, for no more than kRows rows.
template <int kRows, class A, class Y>
void launch_jobs(Cuda& cuda, std::span<const Linear<Device, A, Y>> given) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(A));
  Jobs<A, Y> jobs = {};
  unsigned blocks = 0;
  std::int64_t most_steps = 0;  // of a warp
  bool aligned = true;
  for (const Linear<Device, A, Y>& job : given) {
    const std::int64_t in = job.weight.cols;
    const A* weight = job.weight.template as<A>();
    jobs.job[jobs.count++] = {.x = job.x.data,
                              .weight = weight,
                              .out = linear_output(job),
                              .x_stride = job.x.stride,
                              .x_squares = job.x_squares,
                              .scaled = job.scaled,
                              .in = static_cast<int>(in),
                              .first_block = blocks};
    blocks += static_cast<unsigned>(ceil_div(job.weight.rows, kBlockOutputs));
    most_steps = std::max(most_steps, ceil_div(in, kWarps * kStep<A>));
    aligned = aligned && takes_16_bytes(weight, in * kBytes) && takes_16_bytes(job.x.data, job.x.stride * kBytes);
  }
  const auto kernel = !aligned                 ? matvec_kernel<A, Y, kRows, Pace::kUnaligned>
                      : most_steps > kFewSteps ? matvec_kernel<A, Y, kRows, Pace::kStream>
                                               : matvec_kernel<A, Y, kRows, Pace::kAtOnce>;
  launch(cuda.stream(), overlapping(cuda, dim3(blocks), dim3(kThreads)), kernel, jobs);
}

}  // namespace

template <class A, class Y>
void matvec(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs) {
  if constexpr (sizeof(A) == 4) {
    std::int64_t rows = 0;
    for (const Linear<Device, A, Y>& job : jobs) rows = std::max(rows, job.x.rows);
    if (rows <= 1) return launch_jobs<1>(cuda, jobs);
    if (rows <= 2) return launch_jobs<2>(cuda, jobs);
    if (rows <= 4) return launch_jobs<4>(cuda, jobs);
  }
  launch_jobs<8>(cuda, jobs);
}

#define MMREC_INSTANTIATE(A, Y) template void matvec(Cuda&, std::span<const Linear<Device, A, Y>>);
MMREC_INSTANTIATE(float, float)
MMREC_FOR_EACH_HALF_PRODUCT(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
