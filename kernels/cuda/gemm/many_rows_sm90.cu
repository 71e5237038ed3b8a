// y = act(x Wᵀ + bias) + residual_scale residual on the tensor cores of sm_90a, for many rows.
//
// The products are sm90.cuh's; its epilogue works on the sums in registers. A consumer warp owns 16 rows of
// the tile. It adds the bias and applies the activation in place, then passes its rows through 4 KB of shared memory of
// its own, 256 bytes of each row at a time, so that a row meets the residual and is stored in runs of 256 bytes (128
// where floats pass for a 16-bit y). Sums pass as floats if a residual follows or y is float, else as Y: each result is
// rounded once. Pieces of 16 bytes lie at places permuted by row, so that the lanes of an access meet in no bank.
//
// The other consumer multiplies meanwhile: the first kLead x 512 clocks of an epilogue cost the tensor cores nothing,
// and gelu (element.cuh) takes 13 instructions of each of a thread's 128 sums.
//
// Jobs of one call share a launch, their tiles dealt to the same blocks: matrices too small to fill the device do so
// together. Tiles are 128 x 256, 128 x 128 or 128 x 64, whichever ends first. One block an SM.
//
// Bytes moved: x once, W once per group of rows (sm90.cuh), residual and y once. Deterministic: the order of a
// sum is that of k, whatever the tile.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/operands.cuh"
#include "kernels/cuda/gemm/sm90.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

/// kListed: rows of y lie where a list says, and there is no residual.
template <class A, class Y, int kColumns, bool kListed>
class LinearEpilogue {
 public:
  struct Parameters {
    LinearOutput<Y> job[kMostGemmJobs];
    ProductScales scales[kMostGemmJobs];  // where A is Float8
  };
  static constexpr int kWarpRows = 16;
  static constexpr int kStagingBytes = kWarpRows * 256;
  static constexpr int kSharedBytes = 8 * kStagingBytes;

  __device__ LinearEpilogue(const Parameters& parameters, std::byte* shared, std::byte*)
      : p_(parameters),
        lane_(static_cast<int>(threadIdx.x) % 32),
        staging_(shared + static_cast<int>(threadIdx.x) / 32 * kStagingBytes) {}

  /// Asks for the scales and the bias, and for the residual to be brought to L2.
  __device__ void begin(const GemmPlace& place) {
    const LinearOutput<Y>& out = p_.job[place.job];
    if (out.residual != nullptr) prefetch_residual(out, place);
    if constexpr (kScaled) load_scales(place);
    if (out.bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      const int column = place.column + lane_ * kBiases + i;
      bias_[i] = column < out.columns ? __ldg(out.bias + column) : 0.0F;
    }
  }

  template <int kSize>
  __device__ void finish(const GemmPlace& place, float (&sum)[kSize]) {
    static_assert(2 * kSize == kColumns);
    lane_ = ptx::opaque(lane_);  // no addresses kept from tile to tile
    const LinearOutput<Y>& out = p_.job[place.job];
    const int row = warp_row(place);
    if (row >= out.rows || place.column >= out.columns) return;
    const bool whole = out.vectors && row + kWarpRows <= out.rows && place.column + kColumns <= out.columns;
    if constexpr (kScaled) {
      spread(scale_, [&](int i, float scale) { sum[i] *= scale * row_scale_[i / 2 % 2]; });
    }
    if (out.bias != nullptr) spread(bias_, [&](int i, float bias) { sum[i] += bias; });
    if (out.activation == Activation::kGelu) {
#pragma unroll
      for (float& x : sum) x = gelu(x);
    } else if (out.activation == Activation::kRelu) {
#pragma unroll
      for (float& x : sum) x = relu(x);
    } else if (out.activation == Activation::kGeluTanh) {
#pragma unroll
      for (float& x : sum) x = gelu_tanh(x);
    }
    if constexpr (sizeof(Y) == 2) {
      if (out.residual == nullptr) return put<Y>(out, row, place.column, whole, sum);
    }
    put<float>(out, row, place.column, whole, sum);
  }

 private:
  static constexpr bool kScaled = std::is_same_v<A, Float8>;
  static constexpr int kBiases = kColumns / 32;  // of a lane

  __device__ static int warp_row(const GemmPlace& place) {
    return place.row + static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  }

  __device__ void prefetch_residual(const LinearOutput<Y>& out, const GemmPlace& place) const {
    constexpr int kLine = 128 / static_cast<int>(sizeof(Y));
    constexpr int kLines = kColumns / kLine;  // of a row
    const int column = place.column + lane_ % kLines * kLine;
    if (column >= out.columns) return;
#pragma unroll 1
    for (int r = warp_row(place) + lane_ / kLines; r < min(warp_row(place) + kWarpRows, out.rows); r += 32 / kLines) {
      ptx::prefetch_l2(out.residual + r * out.residual_stride + column);
    }
  }

  /// Four neighbours of the residual, as they are stored.
  struct Four {
    union {
      std::conditional_t<sizeof(Y) == 4, uint4, uint2> bits;
      Y values[4];
    };
    __device__ Four() {}
  };

  /// How rows of S pass through the staging memory, as many of their bytes as fit at a time.
  template <class S>
  struct Staging {
    static constexpr int kRowBytes = std::min(256, kColumns* static_cast<int>(sizeof(S)));
    static constexpr int kPieces = kRowBytes / 16;                      // of a row
    static constexpr int kElements = 16 / static_cast<int>(sizeof(S));  // of a piece
    static constexpr int kChunkColumns = kPieces * kElements;
    static constexpr int kChunks = kColumns / kChunkColumns;
    static constexpr int kRowsAtOnce = 32 / kPieces;  // that a warp's access covers
    static constexpr int kRounds = kWarpRows / kRowsAtOnce;
  };

  __device__ void load_scales(const GemmPlace& place) {
    const LinearOutput<Y>& out = p_.job[place.job];
    const ProductScales& scales = p_.scales[place.job];
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      const int column = min(place.column + lane_ * kBiases + i, out.columns - 1);
      scale_[i] = scales.of_output(column);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_scale_[half] = __ldcg(scales.x + min(warp_row(place) + lane_ / 4 + 8 * half, out.rows - 1));
    }
  }

  /// f(i, value) for each sum i and its column's value, of which lanes have kBiases each: they pass through the staging
  /// memory.
  template <class F>
  __device__ void spread(const float (&mine)[kBiases], const F& f) const {
    auto* values = reinterpret_cast<float*>(staging_);
    __syncwarp();  // what was staged before has been read
#pragma unroll
    for (int i = 0; i < kBiases; i += 2) {
      *reinterpret_cast<float2*>(values + lane_ * kBiases + i) = make_float2(mine[i], mine[i + 1]);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float2 value = *reinterpret_cast<const float2*>(values + 8 * j + lane_ % 4 * 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        f(4 * j + 2 * half, value.x);
        f(4 * j + 2 * half + 1, value.y);
      }
    }
  }

  /// Piece `piece` of staged row `row`. Writers hold 8 rows and a quad's run of 16 bytes of S in each: the run's pieces
  /// are apart by row % 8, or where it has two of them, an even one and the next, by pairs of pieces.
  template <class S>
  __device__ std::byte* staged(int row, int piece) const {
    const int turn = sizeof(S) == 2 ? row % 8 : row % 4 * 2 + row / 4 % 2;
    return staging_ + row * Staging<S>::kRowBytes + (piece ^ turn) * 16;
  }

  /// Through the staging memory to y, a chunk of columns at a time.
  template <class S, int kSize>
  __device__ void put(const LinearOutput<Y>& out, int row, int column, bool whole, const float (&sum)[kSize]) const {
    using Chunk = Staging<S>;
    const int top = row + lane_ / Chunk::kPieces;  // the lane's first row
    const int left = column + lane_ % Chunk::kPieces * Chunk::kElements;
    Four residual[Chunk::kRounds];
#pragma unroll
    for (int chunk = 0; chunk < Chunk::kChunks; ++chunk) {
      const int at = left + chunk * Chunk::kChunkColumns;
      if (whole) fetch<S>(out, top, at, residual);
      __syncwarp();  // what was staged before has been read
      stage<S>(sum + chunk * Chunk::kChunkColumns / 2);
      __syncwarp();
      if (whole) {
#pragma unroll
        for (int i = 0; i < Chunk::kRounds; ++i) store_piece<S>(out, top, at, i, residual[i]);
      } else {
#pragma unroll 1
        for (int i = 0; i < Chunk::kRounds; ++i) store_inside<S>(out, top, at, i);
      }
    }
  }

  /// The sums of a chunk's columns.
  template <class S>
  __device__ void stage(const float* sum) const {
#pragma unroll
    for (int j = 0; j < Staging<S>::kChunkColumns / 8; ++j) {
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

  /// Where the lane's piece of round i is staged, and its row from the first.
  template <class S>
  __device__ const std::byte* lane_piece(int i) const {
    using Chunk = Staging<S>;
    return staged<S>(Chunk::kRowsAtOnce * i + lane_ / Chunk::kPieces, lane_ % Chunk::kPieces);
  }

  /// The residual of the lane's pieces.
  template <class S, int kRounds>
  __device__ void fetch(const LinearOutput<Y>& out, int top, int column, Four (&residual)[kRounds]) const {
    if constexpr (sizeof(S) == 4) {
      if (out.residual == nullptr) return;
#pragma unroll
      for (int i = 0; i < kRounds; ++i) residual[i] = fetch_piece(out, top + Staging<S>::kRowsAtOnce * i, column);
    }
  }
  __device__ static Four fetch_piece(const LinearOutput<Y>& out, int row, int column) {
    const Y* from = out.residual + row * out.residual_stride + column;
    Four piece;
    piece.bits = __ldcg(reinterpret_cast<const decltype(Four::bits)*>(from));
    return piece;
  }

  __device__ static Y* row_of(const LinearOutput<Y>& out, int row) {
    if constexpr (kListed) return out.y_rows[row];
    return out.y + row * out.y_stride;
  }

  /// A whole piece.
  template <class S>
  __device__ void store_piece(const LinearOutput<Y>& out, int top, int column, int i, const Four& residual) const {
    Y* to = row_of(out, top + Staging<S>::kRowsAtOnce * i) + column;
    if constexpr (sizeof(S) == 2) {
      __stcg(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(lane_piece<S>(i)));
    } else {
      const float4 v = *reinterpret_cast<const float4*>(lane_piece<S>(i));
      float values[4] = {v.x, v.y, v.z, v.w};
      if (out.residual != nullptr) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          values[e] = __fmaf_rn(out.residual_scale, widen(residual.values[e]), values[e]);
        }
      }
      store(to, values);
    }
  }

  /// What of the piece lies inside of y: whole, or element by element.
  template <class S>
  __device__ void store_inside(const LinearOutput<Y>& out, int top, int column, int i) const {
    const auto* from = reinterpret_cast<const S*>(lane_piece<S>(i));
    const int row = top + Staging<S>::kRowsAtOnce * i;
    if (row >= out.rows) return;
    const int count = min(Staging<S>::kElements, out.columns - column);
    if (out.vectors && count == Staging<S>::kElements) {
      Four residual;
      if (out.residual != nullptr) residual = fetch_piece(out, row, column);
      return store_piece<S>(out, top, column, i, residual);
    }
    for (int e = 0; e < count; ++e) {
      float residual[1] = {0.0F};
      if (out.residual != nullptr) load(out.residual + row * out.residual_stride + (column + e), residual);
      row_of(out, row)[column + e] = narrow<Y>(__fmaf_rn(out.residual_scale, residual[0], widen(from[e])));
    }
  }

  const Parameters& p_;
  int lane_;
  std::byte* staging_;
  float bias_[kBiases] = {};
  float scale_[kBiases], row_scale_[2];  // where kScaled
};

/// Products of parts (algo.h): those of parts 0 and 2 and of 1 and 1, of 0 and 1, of 0 and 0. The smallest come first,
/// so that the tensor cores, whose sums may truncate, add them before the sums are large.
constexpr GemmPasses kPassesOfParts = {.count = 6, .x = 0b00'01'00'10'00'01, .w = 0b00'00'01'00'10'01};

/// Whether sums are those of slices, as kFewRows cuts k.
template <class A, class Y>
bool folds(const Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs, bool parts) {
  return cuda.batch_invariant() && !parts &&
         std::ranges::any_of(jobs, [](const auto& j) { return j.force_row_kernel && few_rows_slices(j.weight) > 1; });
}

/// About how many clocks the jobs take with this tile. A wave of tiles takes `block_clocks` for each k-block and then
/// `finish_clocks`, as measured on an H200.
template <class Tile, class A, class Y>
double clocks(const Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs, const GemmPasses& passes,
              double block_clocks, double finish_clocks) {
  double tiles = 0.0;
  double sum = 0.0;
  for (const Linear<Device, A, Y>& job : jobs) {
    const GemmProblem problem = gemm_problem<Tile>(1, job.x.rows, job.weight.rows, matrix_stack(job.x).columns, passes);
    const double count = static_cast<double>(problem.row_tiles) * problem.column_tiles;
    tiles += count;
    sum += count * (problem.k_blocks * block_clocks + finish_clocks);
  }
  const int clusters = cuda.processors() / Tile::kClusterRows;
  return std::ceil(tiles / clusters) * sum / tiles;
}

template <class Tile, bool kListed, class A, class Y>
void launch_jobs(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs, const XForm& form) {
  GemmJobs<kMostGemmJobs> products = {};
  using Epilogue = LinearEpilogue<A, Y, Tile::kColumns, kListed>;
  typename Epilogue::Parameters outputs = {};
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    MatrixStack x = matrix_stack(jobs[i].x), w = matrix_stack<A>(jobs[i].weight);
    if (form.part_stride != 0) {
      x.depth = w.depth = kParts;
      x.depth_stride = form.part_stride, w.depth_stride = jobs[i].weight.part_stride;
    }
    set_gemm_job<Tile>(products, static_cast<int>(i), x, w, form.part_stride != 0 ? kPassesOfParts : GemmPasses());
    if constexpr (Tile::kFolds) products.problem[i].slices = few_rows_slices(jobs[i].weight);
    outputs.job[i] = linear_output(jobs[i]);
    outputs.scales[i] = product_scales(form.scales, jobs[i].weight);
  }
  launch_gemm_sm90<Tile, A, Epilogue>(cuda, products, outputs, true);
}

/// Jobs with a list are logits: no others share their launch.
template <class Tile, class A, class Y>
void launch_jobs(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs, const XForm& form) {
  if constexpr (std::is_same_v<Y, float>) {
    if (jobs.front().y_rows != nullptr) return launch_jobs<Tile, true>(cuda, jobs, form);
  }
  launch_jobs<Tile, false>(cuda, jobs, form);
}

}  // namespace

template <class A>
bool gemm_sm90_supported(const Cuda& cuda, MatrixView<const A, Device> x, const WeightView<Device>& weight) {
  constexpr std::int64_t kMostTiles = std::numeric_limits<std::int32_t>::max() / std::int64_t{kMostGemmJobs};
  return cuda.compute_capability() == 90 && has_tensor_map(matrix_stack(x)) &&
         has_tensor_map(matrix_stack<A>(weight)) && (x.rows / 128 + 2) * (weight.rows / 128 + 2) <= kMostTiles;
}

template <class A, class Y>
GemmTile choose_tile(const Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs, bool parts) {
  const GemmPasses passes = parts ? kPassesOfParts : GemmPasses();
  const double wide = clocks<WideTile>(cuda, jobs, passes, 1024, 3000);
  const double square = clocks<SquareTile>(cuda, jobs, passes, 560, 1500);
  const double slim = clocks<SlimTile>(cuda, jobs, passes, 440, 800);
  if (wide < std::min(square, slim) && !folds(cuda, jobs, parts)) return GemmTile::kWide;
  return square < slim ? GemmTile::kSquare : GemmTile::kSlim;
}

template <class A, class Y>
void linear_many_rows_sm90(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs, GemmTile tile, const XForm& x) {
  if (tile == GemmTile::kAuto) tile = choose_tile(cuda, jobs, x.part_stride != 0);
  if constexpr (!std::is_same_v<A, Float8>) {
    if (folds(cuda, jobs, x.part_stride != 0)) {
      return tile == GemmTile::kSlim ? launch_jobs<FoldingTile<SlimTile>, false>(cuda, jobs, x)
                                     : launch_jobs<FoldingTile<SquareTile>, false>(cuda, jobs, x);
    }
  }
  switch (tile) {
    case GemmTile::kWide:
      return launch_jobs<WideTile>(cuda, jobs, x);
    case GemmTile::kSquare:
      return launch_jobs<SquareTile>(cuda, jobs, x);
    default:
      return launch_jobs<SlimTile>(cuda, jobs, x);
  }
}

#define MMREC_INSTANTIATE(A) \
  template bool gemm_sm90_supported(const Cuda&, MatrixView<const A, Device>, const WeightView<Device>&);
MMREC_FOR_EACH_HALF(MMREC_INSTANTIATE)
#define MMREC_INSTANTIATE_PRODUCT(A, Y)                                                    \
  template GemmTile choose_tile(const Cuda&, std::span<const Linear<Device, A, Y>>, bool); \
  template void linear_many_rows_sm90(Cuda&, std::span<const Linear<Device, A, Y>>, GemmTile, const XForm&);
MMREC_FOR_EACH_HALF_PRODUCT(MMREC_INSTANTIATE_PRODUCT)
MMREC_INSTANTIATE_PRODUCT(Float8, BFloat16)
MMREC_INSTANTIATE_PRODUCT(Float8, float)

}  // namespace mmrec::kernels
