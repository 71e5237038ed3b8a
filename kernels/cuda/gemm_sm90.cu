// y = act(x Wᵀ + bias) + residual_scale residual on the tensor cores of sm_90a, for many rows.
//
// The products are gemm_sm90.cuh's; its epilogue works on the sums in registers. A consumer warp owns 16 rows of the
// tile. It adds the bias and applies the activation in place, then passes its rows through 4 KB of shared memory of its
// own, 256 bytes of each row at a time, so that a row meets the residual and is stored in runs of 256 bytes (128 where
// floats pass for a 16-bit y). Sums pass as floats if a residual follows or y is float, else as Y: each result is
// rounded once. Pieces of 16 bytes lie at places permuted by row, so that the lanes of an access meet in no bank.
//
// The other consumer multiplies meanwhile: the first kLead x 512 clocks of an epilogue cost the tensor cores nothing,
// and gelu (element.cuh) takes 13 instructions of each of a thread's 128 sums.
//
// Jobs of one call share a launch, their tiles dealt to the same blocks: matrices too small to fill the device do so
// together. Tiles are 128 x 256, or 128 x 128 where that ends sooner. One block an SM.
//
// Bytes moved: x once, W once per group of rows (gemm_sm90.cuh), residual and y once. Deterministic: the order of a sum
// is that of k, whatever the tile.
#include "kernels/cuda/gemm_sm90.cuh"

#include <limits>
#include <type_traits>

#include "kernels/cuda/gemm_sm90.h"
#include "kernels/cuda/linear_sm90.cuh"
#include "kernels/cuda/rows.cuh"

namespace mmrec::kernels {

namespace {

constexpr int kMostJobs = 4;

template <class Y>
class LinearEpilogue {
 public:
  struct Parameters {
    LinearOutput<Y> job[kMostJobs];
  };
  static constexpr int kWarpRows = 16;
  static constexpr int kRowBytes = 256;  // of a row that are staged at a time
  static constexpr int kStagingBytes = kWarpRows * kRowBytes;
  static constexpr int kSharedBytes = 8 * kStagingBytes;

  __device__ LinearEpilogue(const Parameters& parameters, std::byte* shared, std::byte*)
      : p_(parameters),
        lane_(static_cast<int>(threadIdx.x) % 32),
        staging_(shared + static_cast<int>(threadIdx.x) / 32 * kStagingBytes) {}
  __device__ void begin(const GemmPlace&) {}

  template <int kSize>
  __device__ void finish(const GemmPlace& place, float (&sum)[kSize]) {
    const LinearOutput<Y>& out = p_.job[place.job];
    const int row = place.row + static_cast<int>(threadIdx.x) / 32 * kWarpRows;
    if (row >= out.rows || place.column >= out.columns) return;
    const bool whole = out.vectors && row + kWarpRows <= out.rows && place.column + 2 * kSize <= out.columns;
    if (out.bias != nullptr) add_bias(out, place.column, whole, sum);
    if (out.activation == Activation::kGelu) {
#pragma unroll
      for (float& x : sum) x = gelu(x);
    } else if (out.activation == Activation::kRelu) {
#pragma unroll
      for (float& x : sum) x = x < 0.0F ? 0.0F : x;  // NaN stays
    }
    if constexpr (sizeof(Y) == 2) {
      if (out.residual == nullptr) return put<Y>(out, row, place.column, whole, sum);
    }
    put<float>(out, row, place.column, whole, sum);
  }

 private:
  static constexpr int kPieces = kRowBytes / 16;            // of a staged row
  static constexpr int kRounds = kWarpRows * kPieces / 32;  // accesses of a lane to move what is staged

  template <int kSize>
  __device__ void add_bias(const LinearOutput<Y>& out, int column, bool whole, float (&sum)[kSize]) const {
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j) {
      const int at = column + 8 * j + lane_ % 4 * 2;
      float2 bias = make_float2(0.0F, 0.0F);
      if (whole) {
        bias = __ldg(reinterpret_cast<const float2*>(out.bias + at));
      } else {
        if (at < out.columns) bias.x = __ldg(out.bias + at);
        if (at + 1 < out.columns) bias.y = __ldg(out.bias + at + 1);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[4 * j + 2 * half] += bias.x;
        sum[4 * j + 2 * half + 1] += bias.y;
      }
    }
  }

  /// Piece `piece` of staged row `row`. Writers hold 8 rows and a quad's run of 16 bytes of S in each: the run's pieces
  /// are apart by row % 8, or where it has two of them, an even one and the next, by pairs of pieces.
  template <class S>
  __device__ std::byte* staged(int row, int piece) const {
    const int turn = sizeof(S) == 2 ? row % 8 : row % 4 * 2 + row / 4 % 2;
    return staging_ + row * kRowBytes + (piece ^ turn) * 16;
  }

  /// Sums 64 (S float) or 128 (16-bit) columns at a time through the staging memory to y.
  template <class S, int kSize>
  __device__ void put(const LinearOutput<Y>& out, int row, int column, bool whole, const float (&sum)[kSize]) const {
    constexpr int kPiece = 16 / static_cast<int>(sizeof(S));  // elements
    constexpr int kColumns = kPieces * kPiece;
    // The lane's pieces are every second row's, from `top`.
    const int top = row + lane_ / kPieces;
    const int left = column + lane_ % kPieces * kPiece;
    // A chunk's residual is on its way while the chunk before is stored, where there are registers for two.
    constexpr int kAhead = sizeof(Y) == 4 ? 1 : 0;
    constexpr int kChunks = 2 * kSize / kColumns;
    float residual[1 + kAhead][kRounds][kPiece] = {};
    if (whole && kAhead != 0) fetch<S>(out, top, left, residual[0]);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int ahead = chunk + kAhead;
      if (whole && kAhead == 0) fetch<S>(out, top, left + ahead * kColumns, residual[0]);
      __syncwarp();  // what was staged before has been read
      stage<S>(sum + chunk * kColumns / 2);
      __syncwarp();
      const int at = left + chunk * kColumns;
      if (whole) {
        if (kAhead != 0 && ahead < kChunks) fetch<S>(out, top, left + ahead * kColumns, residual[ahead % 2 * kAhead]);
#pragma unroll
        for (int i = 0; i < kRounds; ++i) store_piece<S>(out, top, at, i, residual[chunk % 2 * kAhead][i]);
      } else {
#pragma unroll 1
        for (int i = 0; i < kRounds; ++i) store_ragged<S>(out, top, at, i);
      }
    }
  }

  /// The sums of as many columns as fit.
  template <class S>
  __device__ void stage(const float* sum) const {
    constexpr int kColumns = kRowBytes / static_cast<int>(sizeof(S));
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float even = sum[4 * j + 2 * half];
        const float odd = sum[4 * j + 2 * half + 1];
        const int row = lane_ / 4 + 8 * half;
        if constexpr (sizeof(S) == 2) {
          *reinterpret_cast<std::uint32_t*>(staged<S>(row, j) + lane_ % 4 * 4) = ptx::to_pair<S>(even, odd);
        } else {
          *reinterpret_cast<float2*>(staged<S>(row, 2 * j + lane_ % 4 / 2) + lane_ % 2 * 8) = make_float2(even, odd);
        }
      }
    }
  }

  /// The residual of the lane's pieces.
  template <class S, int kPiece>
  __device__ void fetch(const LinearOutput<Y>& out, int top, int column, float (&residual)[kRounds][kPiece]) const {
    if constexpr (sizeof(S) == 4) {
      if (out.residual == nullptr) return;
#pragma unroll
      for (int i = 0; i < kRounds; ++i) load(out.residual + (top + 2 * i) * out.residual_stride + column, residual[i]);
    }
  }

  /// A whole piece, row top + 2 i of y.
  template <class S, int kPiece>
  __device__ void store_piece(const LinearOutput<Y>& out, int top, int column, int i,
                              const float (&residual)[kPiece]) const {
    const std::byte* from = staged<S>(2 * i + lane_ / kPieces, lane_ % kPieces);
    Y* to = out.y + (top + 2 * i) * out.y_stride + column;
    if constexpr (sizeof(S) == 2) {
      __stcg(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(from));
    } else {
      const float4 v = *reinterpret_cast<const float4*>(from);
      const float scale = out.residual_scale;
      const float values[4] = {__fmaf_rn(scale, residual[0], v.x), __fmaf_rn(scale, residual[1], v.y),
                               __fmaf_rn(scale, residual[2], v.z), __fmaf_rn(scale, residual[3], v.w)};
      store(to, values);
    }
  }

  /// What of the piece lies inside of y, element by element.
  template <class S>
  __device__ void store_ragged(const LinearOutput<Y>& out, int top, int column, int i) const {
    const auto* from = reinterpret_cast<const S*>(staged<S>(2 * i + lane_ / kPieces, lane_ % kPieces));
    const int row = top + 2 * i;
    if (row >= out.rows) return;
    const int count = min(16 / static_cast<int>(sizeof(S)), out.columns - column);
    for (int e = 0; e < count; ++e) {
      float residual[1] = {0.0F};
      if (out.residual != nullptr) load(out.residual + row * out.residual_stride + (column + e), residual);
      out.y[row * out.y_stride + (column + e)] = narrow<Y>(__fmaf_rn(out.residual_scale, residual[0], widen(from[e])));
    }
  }

  const Parameters& p_;
  int lane_;
  std::byte* staging_;
};

/// Clocks that the jobs take by tiles of 128 rows and some columns, about: waves of tiles, each of which multiplies
/// for `block_clocks` a k-block and is finished in `finish_clocks`.
template <class Tile, class A, class Y>
double clocks(const Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs, double block_clocks, double finish_clocks) {
  double tiles = 0.0;
  double sum = 0.0;
  for (const Linear<Device, A, Y>& job : jobs) {
    const GemmProblem problem = gemm_problem<Tile>(1, job.x.rows, job.weight.rows, job.x.cols);
    const double count = static_cast<double>(problem.row_tiles) * problem.column_tiles;
    tiles += count;
    sum += count * (problem.k_blocks * block_clocks + finish_clocks);
  }
  const double clusters = cuda.processors() / GemmLayout<Tile>::kCluster;
  return std::ceil(tiles / clusters) * sum / tiles;
}

template <class Tile, class A, class Y>
void launch_jobs(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs) {
  GemmJobs<kMostJobs> products = {};
  typename LinearEpilogue<Y>::Parameters outputs = {};
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    set_gemm_job<Tile>(products, static_cast<int>(i), matrix_stack(jobs[i].x), matrix_stack(jobs[i].weight));
    outputs.job[i] = linear_output(jobs[i]);
  }
  launch_gemm_sm90<Tile, A, LinearEpilogue<Y>>(cuda, products, outputs, true);
}

}  // namespace

template <class A>
bool gemm_sm90_supported(const Cuda& cuda, MatrixView<const A, Device> x, const WeightView<Device>& weight) {
  constexpr std::int64_t kMostTiles = std::numeric_limits<std::int32_t>::max() / kMostJobs;
  return cuda.compute_capability() == 90 && has_tensor_map(matrix_stack(x)) && has_tensor_map(matrix_stack(weight)) &&
         (x.rows / 128 + 2) * (weight.rows / 128 + 2) <= kMostTiles;
}

template <class A, class Y>
void linear_sm90(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs) {
  constexpr double kWideClocks = 1024.0, kWideFinish = 4000.0;
  constexpr double kSquareClocks = 640.0, kSquareFinish = 1300.0;
  for (; !jobs.empty(); jobs = jobs.subspan(std::min<std::size_t>(jobs.size(), kMostJobs))) {
    const auto some = jobs.first(std::min<std::size_t>(jobs.size(), kMostJobs));
    if (clocks<WideTile>(cuda, some, kWideClocks, kWideFinish) <
        clocks<SquareTile>(cuda, some, kSquareClocks, kSquareFinish)) {
      launch_jobs<WideTile>(cuda, some);
    } else {
      launch_jobs<SquareTile>(cuda, some);
    }
  }
}

template bool gemm_sm90_supported(const Cuda&, MatrixView<const BFloat16, Device>, const WeightView<Device>&);
template bool gemm_sm90_supported(const Cuda&, MatrixView<const Float16, Device>, const WeightView<Device>&);
template void linear_sm90(Cuda&, std::span<const Linear<Device, BFloat16, BFloat16>>);
template void linear_sm90(Cuda&, std::span<const Linear<Device, BFloat16, float>>);
template void linear_sm90(Cuda&, std::span<const Linear<Device, Float16, Float16>>);
template void linear_sm90(Cuda&, std::span<const Linear<Device, Float16, float>>);

}  // namespace mmrec::kernels
