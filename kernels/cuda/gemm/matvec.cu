// y = act(W x + bias) + residual_scale residual for 1 to 8 rows x, W [out, in] of type A streamed once.
//
// A block owns 8 outputs of one job; its 8 warps cut `in` among themselves in runs of whole steps. In a warp lane 4g +
// t loads pieces of 16 bytes of weight row g: a step is 4 pieces, 64 contiguous bytes of each of 8 rows. kAhead steps
// are in flight per warp, 4 KB, and the first of them before the kernel waits for its predecessor, which has no part in
// the weights: in a chain of products a matrix is on its way while the vector it will meet is still being computed.
//
// 16-bit operands meet in the tensor core: x is the left operand, 8 tokens with the first half of every piece in its
// rows 0..7 and the same tokens with the second half in rows 8..15; the 8 weight rows are the columns of the right one,
// one half at a time. A piece holds consecutive elements of k where the instruction's layout wants pairs from two
// places; as both operands are permuted alike, the products are the same. All of 1..8 tokens run the same instructions,
// each in rows of its own. fp32 operands are multiplied by ordinary fused multiply-adds, to full precision.
//
// Order of a sum: a lane's elements in order (the tensor core's own order within 16), the lanes of a row (fp32), the
// warps in order. It follows from `in` alone.
//
// Bytes: every weight once; x once per block from L2, out / 8 times in all. Jobs of one call share a launch, so that
// small matrices fill the device together.
#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/operands.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kOutputs = 8;  // of a block
constexpr int kAhead = 8;    // steps of weights in flight
constexpr int kFewSteps = 4;
static_assert(kTileColumns == 8);

template <class A>
constexpr int kPiece = 16 / static_cast<int>(sizeof(A));  // elements
template <class A>
constexpr int kStep = 4 * kPiece<A>;

template <class A, class Y>
struct Job {
  const A* x;
  const A* weight;
  LinearOutput<Y> out;
  std::int64_t x_stride;
  int in;
  unsigned first_block;
};

template <class A, class Y>
struct Jobs {
  Job<A, Y> job[kMostMatvecJobs];
  int count;
};

/// The products of a warp's steps, a lane's part of them. kRows is the number of rows, or one above it.
template <class A, int kRows>
struct Products {
  static constexpr int kFragments = 1;  // pieces of x that a lane needs for one step
  static constexpr int kAheadX = 4;     // steps of x in flight
  float low[4] = {};                    // of the first 8 bytes of every piece, in the product's rows 0..7
  float high[4] = {};                   // of the last 8 bytes, in its rows 8..15

  /// x holds row g.
  __device__ void add(const uint4& w, const uint4 (&x)[1]) {
    const std::uint32_t a[4] = {x[0].x, x[0].z, x[0].y, x[0].w};
    ptx::mma_m16n8k16<A>(low, a, {w.x, w.y});
    ptx::mma_m16n8k16<A>(high, a, {w.z, w.w});
  }
  __device__ void finish(float (&partial)[kTileColumns][kOutputs], int g, int t) const {
    partial[g][2 * t] = low[0] + high[2];
    partial[g][2 * t + 1] = low[1] + high[3];
  }
};

template <int kRows>
struct Products<float, kRows> {
  static constexpr int kFragments = kRows;
  static constexpr int kAheadX = kRows <= 2 ? 4 : 8 / kRows;
  float sums[kRows] = {};

  /// x holds all rows.
  __device__ void add(const uint4& w, const uint4 (&x)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = __fmaf_rn(__uint_as_float(w.x), __uint_as_float(x[r].x), sums[r]);
      sums[r] = __fmaf_rn(__uint_as_float(w.y), __uint_as_float(x[r].y), sums[r]);
      sums[r] = __fmaf_rn(__uint_as_float(w.z), __uint_as_float(x[r].z), sums[r]);
      sums[r] = __fmaf_rn(__uint_as_float(w.w), __uint_as_float(x[r].w), sums[r]);
    }
  }
  __device__ void finish(float (&partial)[kTileColumns][kOutputs], int g, int t) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sum = sums[r];
      sum += __shfl_xor_sync(0xffffffffU, sum, 1);
      sum += __shfl_xor_sync(0xffffffffU, sum, 2);
      if (t == r % 4) partial[r][g] = sum;
    }
  }
};

/// How a kernel goes through a warp's share: at most kFewSteps, all in flight at once; any number, kAhead in flight;
/// any number of steps of operands without alignment, kFewSteps in flight.
enum class Pace : std::uint8_t { kAtOnce, kStream, kUnaligned };

/// Blocks of a multiprocessor that registers have to suffice for: as many as what is in flight leaves room for.
template <class A>
constexpr unsigned blocks_per_processor(int rows, Pace pace) {
  if (pace == Pace::kUnaligned || (sizeof(A) == 4 && rows >= (pace == Pace::kStream ? 2 : 4))) return 2;
  return pace == Pace::kAtOnce ? 4 : 3;
}

template <class A, class Y, int kRows, Pace kPace>
__global__ void __launch_bounds__(kThreads, blocks_per_processor<A>(kRows, kPace))
    matvec_kernel(const __grid_constant__ Jobs<A, Y> jobs) {
  using Sums = Products<A, kRows>;
  constexpr bool kAligned = kPace != Pace::kUnaligned;
  constexpr int kSteps = kPace == Pace::kStream ? kAhead : kFewSteps;
  __shared__ float partial[kWarps][kTileColumns][kOutputs];
  ptx::allow_successor();
  int index = 0;
  while (index + 1 < jobs.count && blockIdx.x >= jobs.job[index + 1].first_block) ++index;
  const Job<A, Y>& job = jobs.job[index];
  const LinearOutput<Y>& out = job.out;
  const int first_output = static_cast<int>(blockIdx.x - job.first_block) * kOutputs;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int g = static_cast<int>(threadIdx.x) / 4 % 8;
  const int t = static_cast<int>(threadIdx.x) % 4;

  // The warp's steps; the lane's first element and how many there are from it to the end of the warp's share.
  const int share = (job.in + kWarps * kStep<A> - 1) / (kWarps * kStep<A>);
  const int first = warp * share * kStep<A>;
  int left = min(job.in, first + share * kStep<A>) - first;
  int steps = (left + kStep<A> - 1) / kStep<A>;
  left -= t * kPiece<A>;
  // Lanes past the last output repeat it; nobody takes their sums.
  const A* weight =
      job.weight + std::int64_t{min(first_output + g, out.columns - 1)} * job.in + (first + t * kPiece<A>);
  const auto weight_piece = [&](int ahead) {
    return load_fragment<ReadOnce, kAligned>(weight + ahead * kStep<A>, left - ahead * kStep<A>);
  };
  // 16-bit operands: the lane's row is g. fp32: the lane needs all rows.
  const A* x = job.x + (first + t * kPiece<A>)+(sizeof(A) == 2 ? g : 0) * job.x_stride;
  const int rows = sizeof(A) == 2 ? out.rows - g : out.rows;
  const auto x_pieces = [&](int ahead, uint4(&to)[Sums::kFragments]) {
#pragma unroll
    for (int r = 0; r < Sums::kFragments; ++r) {
      to[r] = load_fragment<PastL1, kAligned>(x + r * job.x_stride + ahead * kStep<A>,
                                              r < rows ? left - ahead * kStep<A> : 0);
    }
  };

  uint4 w[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) w[i] = weight_piece(i);
  // This thread will finish output `output` of row `row`.
  const int row = static_cast<int>(threadIdx.x) / kOutputs;
  const int output = first_output + static_cast<int>(threadIdx.x) % kOutputs;
  const bool finishes = row < out.rows && output < out.columns;
  const float bias = finishes && out.bias != nullptr ? __ldg(out.bias + output) : 0.0F;

  ptx::wait_for_predecessor();
  float residual = 0.0F;
  if (finishes && out.residual != nullptr) residual = read(out.residual + row * out.residual_stride + output);
  uint4 fragments[Sums::kAheadX][Sums::kFragments];
#pragma unroll
  for (int i = 0; i < Sums::kAheadX; ++i) x_pieces(i, fragments[i]);
  Sums sums;
  for (; steps > 0; steps -= kSteps) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i >= steps) break;
      sums.add(w[i], fragments[i % Sums::kAheadX]);
      if constexpr (kPace != Pace::kAtOnce) w[i] = weight_piece(i + kSteps);
      if constexpr (kPace != Pace::kAtOnce || Sums::kAheadX < kSteps) {
        x_pieces(i + Sums::kAheadX, fragments[i % Sums::kAheadX]);
      }
    }
    if constexpr (kPace == Pace::kAtOnce) break;
    weight += kSteps * kStep<A>;
    x += kSteps * kStep<A>;
    left -= kSteps * kStep<A>;
  }
  sums.finish(partial[warp], g, t);
  __syncthreads();

  if (!finishes) return;
  float sum = partial[0][row][threadIdx.x % kOutputs];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) sum += partial[i][row][threadIdx.x % kOutputs];
  const float y = activate(sum + bias, out.activation);
  out.y[row * out.y_stride + output] = narrow<Y>(__fmaf_rn(out.residual_scale, residual, y));
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
    jobs.job[jobs.count++] = {job.x.data, weight, linear_output(job), job.x.stride, static_cast<int>(in), blocks};
    blocks += static_cast<unsigned>(ceil_div(job.weight.rows, kOutputs));
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
