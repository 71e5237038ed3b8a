// y = act(x Wᵀ + bias) + residual_scale residual on the tensor cores of sm_90a, for many rows.
//
// The products are gemm_sm90.cuh's. A consumer warp owns 16 rows of the tile: it passes their sums through 4 KB of
// shared memory of its own, 64 columns at a time, so that a lane gets 4 (or for a 16-bit y 8) neighbours of a row,
// always of the same columns, adds their bias, applies the activation, adds the residual and stores 16 bytes. All of
// that is a loop of few instructions: unrolled over a thread's 128 sums it would not fit the instruction cache. Pieces
// of 16 bytes lie at places permuted by row, so that the lanes of an access meet in no bank. Each result is rounded
// once.
//
// The other consumer multiplies meanwhile: the first kLead x 512 clocks of an epilogue cost the tensor cores nothing,
// and gelu (element.cuh) takes 13 instructions of each of a thread's 128 sums.
//
// Jobs of one call share a launch, their tiles dealt to the same blocks: matrices too small to fill the device do so
// together. Tiles are 128 x 256, 128 x 128 or 128 x 64, whichever ends first. One block an SM.
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

template <class Y, int kColumns>
class LinearEpilogue {
 public:
  struct Parameters {
    LinearOutput<Y> job[kMostJobs];
  };
  static constexpr int kWarpRows = 16;
  static constexpr int kChunk = 64;  // columns that pass through the staging memory at a time
  static constexpr int kRowBytes = kChunk * 4;
  static constexpr int kStagingBytes = kWarpRows * kRowBytes;
  static constexpr int kSharedBytes = 8 * kStagingBytes;

  __device__ LinearEpilogue(const Parameters& parameters, std::byte* shared, std::byte*)
      : p_(parameters),
        lane_(static_cast<int>(threadIdx.x) % 32),
        staging_(shared + static_cast<int>(threadIdx.x) / 32 * kStagingBytes) {}

  /// Asks for the residual to be brought to L2.
  __device__ void begin(const GemmPlace& place) const {
    const LinearOutput<Y>& out = p_.job[place.job];
    if (out.residual == nullptr) return;
    constexpr int kLine = 128 / static_cast<int>(sizeof(Y));
    constexpr int kLines = kColumns / kLine;  // of a row
    const int row = warp_row(place) + lane_ / kLines;
    const int column = place.column + lane_ % kLines * kLine;
    if (column >= out.columns) return;
#pragma unroll 1
    for (int r = row; r < min(warp_row(place) + kWarpRows, out.rows); r += 32 / kLines) {
      ptx::prefetch_l2(out.residual + r * out.residual_stride + column);
    }
  }

  template <int kSize>
  __device__ void finish(const GemmPlace& place, const float (&sum)[kSize]) {
    static_assert(2 * kSize == kColumns);
    const LinearOutput<Y>& out = p_.job[place.job];
    lane_ = ptx::opaque(lane_);  // no addresses kept from tile to tile
#pragma unroll
    for (int chunk = 0; chunk < kColumns / kChunk; ++chunk) {
      __syncwarp();  // what was staged before has been read
      stage(sum + chunk * kChunk / 2);
      __syncwarp();
      store_chunk(out, warp_row(place), place.column + chunk * kChunk + lane_ % kPieces * kPiece);
    }
  }

 private:
  static constexpr int kPiece = 16 / static_cast<int>(sizeof(Y));  // columns of a lane
  static constexpr int kPieces = kChunk / kPiece;                  // of a row
  static constexpr int kRowsAtOnce = 32 / kPieces;                 // of a warp
  static constexpr int kRounds = kWarpRows / kRowsAtOnce;
  static constexpr int kBatch = 16 / kPiece;  // rounds whose residuals are asked for together

  __device__ static int warp_row(const GemmPlace& place) {
    return place.row + static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  }

  /// Columns 4 quad..4 quad + 3 of staged row `row`. Half a warp writes the same two neighbouring quads of 4 rows, 0 to
  /// 3 or 4 to 7 of 8, and 8 lanes read of one row every quad of 8, or where a lane takes two of them, every second.
  __device__ float* staged(int row, int quad) const {
    const int turn = row % 4 * 2 + row / 4 % 2;
    const int place = sizeof(Y) == 4 ? quad ^ turn : quad % 2 * 8 + (quad / 2 ^ turn ^ quad % 2);
    return reinterpret_cast<float*>(staging_ + row * kRowBytes + place * 16);
  }

  __device__ void stage(const float* sum) const {
#pragma unroll
    for (int j = 0; j < kChunk / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float2*>(staged(lane_ / 4 + 8 * half, 2 * j + lane_ % 4 / 2) + lane_ % 2 * 2) =
            make_float2(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
      }
    }
  }

  /// What is staged, of 16 rows from `first`; the lane's columns begin at `column`.
  __device__ void store_chunk(const LinearOutput<Y>& out, int first, int column) const {
    const int count = min(kPiece, out.columns - column);
    if (count <= 0) return;
    const bool vectors = out.vectors && count == kPiece;
    float bias[kPiece] = {};
    if (out.bias != nullptr) load_piece(out.bias + column, count, vectors, bias);
#pragma unroll 1
    for (int round = 0; round < kRounds; round += kBatch) {
      float residual[kBatch][kPiece] = {};
      if (out.residual != nullptr) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int row = first + lane_row(round + i);
          if (row < out.rows)
            load_piece(out.residual + row * out.residual_stride + column, count, vectors, residual[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = first + lane_row(round + i);
        if (row < out.rows) store_piece(out, row, column, count, vectors, lane_row(round + i), bias, residual[i]);
      }
    }
  }
  __device__ int lane_row(int round) const { return round * kRowsAtOnce + lane_ / kPieces; }

  template <class T>
  __device__ static void load_piece(const T* from, int count, bool vectors, float (&to)[kPiece]) {
#pragma unroll
    for (int i = 0; i < kPiece; i += 4) {
      float four[4] = {};
      if (vectors) {
        load(from + i, four);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float one[1] = {0.0F};
          if (i + e < count) load(from + i + e, one);
          four[e] = one[0];
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) to[i + e] = four[e];
    }
  }

  __device__ void store_piece(const LinearOutput<Y>& out, int row, int column, int count, bool vectors, int staged_row,
                              const float (&bias)[kPiece], const float (&residual)[kPiece]) const {
    float values[kPiece];
#pragma unroll
    for (int i = 0; i < kPiece; i += 4) {
      const auto v = *reinterpret_cast<const float4*>(staged(staged_row, (lane_ % kPieces * kPiece + i) / 4));
      values[i] = v.x + bias[i];
      values[i + 1] = v.y + bias[i + 1];
      values[i + 2] = v.z + bias[i + 2];
      values[i + 3] = v.w + bias[i + 3];
    }
    if (out.activation == Activation::kGelu) {
#pragma unroll
      for (float& x : values) x = gelu(x);
    } else if (out.activation == Activation::kRelu) {
#pragma unroll
      for (float& x : values) x = x < 0.0F ? 0.0F : x;  // NaN stays
    }
#pragma unroll
    for (int i = 0; i < kPiece; ++i) values[i] = __fmaf_rn(out.residual_scale, residual[i], values[i]);
    Y* to = out.y + row * out.y_stride + column;
    if (!vectors) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        if (i < count) to[i] = narrow<Y>(values[i]);
      }
    } else if constexpr (sizeof(Y) == 4) {
      store(to, values);
    } else {
      __stcg(reinterpret_cast<uint4*>(to),
             make_uint4(ptx::to_pair<Y>(values[0], values[1]), ptx::to_pair<Y>(values[2], values[3]),
                        ptx::to_pair<Y>(values[4], values[5]), ptx::to_pair<Y>(values[6], values[7])));
    }
  }

  const Parameters& p_;
  int lane_;
  std::byte* staging_;
};

/// Clocks that the jobs take by this tile, about: waves of tiles, each of which multiplies for `block_clocks` a k-block
/// and is finished in `finish_clocks`, as measured on an H200.
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
  using Epilogue = LinearEpilogue<Y, Tile::kColumns>;
  typename Epilogue::Parameters outputs = {};
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    set_gemm_job<Tile>(products, static_cast<int>(i), matrix_stack(jobs[i].x), matrix_stack(jobs[i].weight));
    outputs.job[i] = linear_output(jobs[i]);
  }
  launch_gemm_sm90<Tile, A, Epilogue>(cuda, products, outputs, true);
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
  while (!jobs.empty()) {
    const auto some = jobs.first(std::min<std::size_t>(jobs.size(), kMostJobs));
    const double wide = clocks<WideTile>(cuda, some, 1024, 3000);
    const double square = clocks<SquareTile>(cuda, some, 560, 1500);
    const double slim = clocks<SlimTile>(cuda, some, 440, 800);
    if (wide < std::min(square, slim)) {
      launch_jobs<WideTile>(cuda, some);
    } else if (square < slim) {
      launch_jobs<SquareTile>(cuda, some);
    } else {
      launch_jobs<SlimTile>(cuda, some);
    }
    jobs = jobs.subspan(some.size());
  }
}

template bool gemm_sm90_supported(const Cuda&, MatrixView<const BFloat16, Device>, const WeightView<Device>&);
template bool gemm_sm90_supported(const Cuda&, MatrixView<const Float16, Device>, const WeightView<Device>&);
template void linear_sm90(Cuda&, std::span<const Linear<Device, BFloat16, BFloat16>>);
template void linear_sm90(Cuda&, std::span<const Linear<Device, BFloat16, float>>);
template void linear_sm90(Cuda&, std::span<const Linear<Device, Float16, Float16>>);
template void linear_sm90(Cuda&, std::span<const Linear<Device, Float16, float>>);

}  // namespace mmrec::kernels
