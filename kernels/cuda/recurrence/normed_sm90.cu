// The recurrence that is normed at every token, by clusters of 16 blocks (kernels/ops.h has its equations):
//   p = (1 − m + γ) ⊙ h₋₁ + m ⊙ z,  m = σ(zm + W h₋₁ + b),  h = clamp(s ⊙ p / √(mean p² + 1e-6), ±100)
//
// A cluster has 8 runs, the columns of the tensor core's tile; runs beyond go to other clusters. A block owns D / 16
// channels, whose rows of W stay in its registers for all tokens: for D = 1024 in 16 bits 128 KB. Warp w multiplies the
// row tiles of parity w % 2 along the eighth w / 2 of k; its sums meet in shared memory.
//
// One exchange a token: the norm needs all channels, so a block sends what does not wait for it, s ⊙ p rounded to A,
// with the sums of its squares, and the receiver divides the sums of the products, W (s ⊙ p) / rms = W h. Only
// where the limit of ±100 may act, which the norm's weights tell beforehand, is it applied to the operands, as ±100
// rms. The store into the other blocks' shared memory counts its bytes at a barrier there (st.async). p of token t lies
// in buffer t % 2: its sender has received all of p of t − 1, and the senders of that had read p of t − 2 before. A
// block waits for all that is sent to it, so it may exit without regard to others.
//
// Bytes of a token: z, zm, γ and h once, asked for a token ahead; through the cluster 2 D a block and run. Chain of a
// token: the barrier, operands from shared memory, 4 products of the tensor core, the warps' sums, the gate, the sends.
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/gemm/tile_product.cuh"
#include "kernels/cuda/recurrence/algo.h"
#include "kernels/cuda/recurrence/equations.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kBlocks = 16;  // of a cluster
constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kParts = 8;              // of k
constexpr int kUnit = kBlocks * 16;    // D is a multiple: a tile of 16 rows for every block
constexpr int kSquares = 2 * kBlocks;  // sums of squares of a run's token: two warps of every block
constexpr int kMostUnits = 4;

/// Shared memory of a block, for D = kUnit * kUnits.
template <int kUnits>
struct Layout {
  static constexpr int kDim = kUnit * kUnits;
  static constexpr int kChannels = 16 * kUnits;
  static constexpr int kRowBytes = padded_row(kDim * 2);
  static constexpr int kVectorBytes = kTileColumns * kRowBytes;
  static constexpr int kSumsPitch = kChannels + 4;  // banks: 8 per column pair
  static constexpr int kSquaresAt = 2 * kVectorBytes;
  static constexpr int kSumsAt = kSquaresAt + 2 * kTileColumns * kSquares * 8;
  static constexpr int kSumsBytes = kParts * kTileColumns * kSumsPitch * 4;
  static constexpr int kBarriersAt = kSumsAt + 2 * kSumsBytes;
  static constexpr int kBytes = kBarriersAt + 16;
  static_assert(kBarriersAt % 8 == 0);
};

template <class A, int kUnits>
class ClusterRecurrence {
  using Place = Layout<kUnits>;
  static constexpr int kTiles = (kUnits + 1) / 2;  // of a warp at most

 public:
  __device__ explicit ClusterRecurrence(const NormedRecurrence<Device, A>& op)
      : op_(op),
        shared_(ptx::shared_memory<std::byte>()),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        rank_(static_cast<int>(ptx::cluster_rank())),
        column_(warp_ / 2),
        channel_(warp_ % 2 * 32 + lane_) {}

  __device__ void run() {
    hold_weights();
    ptx::wait_for_predecessor();
    const std::int64_t first = std::int64_t{blockIdx.x / kBlocks} * kTileColumns;
    const auto columns = static_cast<int>(min(std::int64_t{kTileColumns}, op_.runs.count - first));
    int longest = 0;
    for (int c = 0; c < columns; ++c) longest = max(longest, op_.runs.list[first + c].rows);
    if (longest == 0) return;  // the same for all blocks
    const bool has_run = column_ < columns;
    const BankRun run = op_.runs.list[first + min(column_, columns - 1)];
    const bool owns = has_run && channel_ < Place::kChannels;
    const int channel = rank_ * Place::kChannels + channel_;
    const float norm = owns ? __ldg(op_.norm + channel) : 0.0F;
    const float bias = owns && op_.gate_bias != nullptr ? __ldg(op_.gate_bias + channel) : 0.0F;
    const auto bytes = static_cast<unsigned>(columns * (Place::kDim * 2 + kSquares * 8));

    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) ptx::mbarrier_init(barrier(i), 1);
      ptx::mbarrier_init_fence();
      ptx::mbarrier_arrive_expect(barrier(0), bytes);
      if (longest > 1) ptx::mbarrier_arrive_expect(barrier(1), bytes);
    }
    if (op_.carries) load_states(first, columns);
    const bool limits = may_reach_limit();
    __syncthreads();      // the states are there
    ptx::cluster_sync();  // all barriers are there

    float h = 0.0F;
    if (op_.carries && owns) h = __ldcg(run.state + op_.layer * Place::kDim + channel);
    float p = 0.0F;
    Operands operands = fetch(owns, run, channel, 0);
    for (int t = 0;; ++t) {
      const int before = (t + 1) & 1;  // the buffer of t - 1
      float scale = 1.0F;
      if (t > 0) {
        ptx::mbarrier_wait(barrier(before), static_cast<std::uint32_t>((t - 1) >> 1 & 1));
        if (threadIdx.x == 0 && t + 1 < longest) ptx::mbarrier_arrive_expect(barrier(before), bytes);
        if (has_run) scale = scale_of(warp_sum(squares(before, column_)[2 * lane_]));
        h = within_limit(norm * p * scale);
        if (owns && t <= run.rows) put(run, channel, t - 1, h);
        if (t == longest) break;
      }
      const bool multiplies = t > 0 || op_.carries;
      if (multiplies) {
        multiply(before, t > 0 && limits);
        __syncthreads();
      }
      if (!has_run) continue;  // its warps have nothing that anyone waits for
      const float gate = (multiplies && owns ? scale * total(before) : 0.0F) + (operands.zm + bias);
      p = normed_step(gate, operands.z, operands.gamma, h);
      send(t & 1, norm * p, owns ? p * p : 0.0F);
      operands = fetch(owns, run, channel, t + 1);
    }
  }

 private:
  struct Operands {
    float z = 0.0F, zm = 0.0F, gamma = 0.0F;
  };

  __device__ std::uint64_t* barrier(int buffer) const {
    return reinterpret_cast<std::uint64_t*>(shared_ + Place::kBarriersAt) + buffer;
  }
  __device__ std::byte* vector(int buffer, int column) const {
    return shared_ + buffer * Place::kVectorBytes + column * Place::kRowBytes;
  }
  /// Pairs of floats; the first of each is a sum.
  __device__ float* squares(int buffer, int column) const {
    return reinterpret_cast<float*>(shared_ + Place::kSquaresAt) + (buffer * kTileColumns + column) * kSquares * 2;
  }
  /// Of the products with a buffer's vectors: those of the token before may still be read.
  __device__ float* sums(int buffer, int part, int column) const {
    return reinterpret_cast<float*>(shared_ + Place::kSumsAt + buffer * Place::kSumsBytes) +
           (part * kTileColumns + column) * Place::kSumsPitch;
  }
  __device__ static float scale_of(float squares) {
    return 1.0F / sqrtf(__fmaf_rn(squares, 1.0F / static_cast<float>(Place::kDim), 1e-6F));
  }

  /// Row tile i of this warp, which may have one less.
  __device__ int tile(int i) const { return warp_ % 2 + 2 * i; }

  __device__ void hold_weights() {
    const auto* const weight = static_cast<const std::byte*>(op_.gate_weight.data);
    const int g = lane_ / 4;
    const int first = warp_ / 2 * kUnits * kStepBytes + lane_ % 4 * kPieceBytes;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int s = 0; s < kUnits; ++s) {
        if (tile(i) >= kUnits) continue;
        const std::int64_t row = rank_ * Place::kChannels + tile(i) * kTileRows + g;
        const std::byte* const at = weight + row * Place::kDim * 2 + first + s * kStepBytes;
        low_[i][s] = __ldg(reinterpret_cast<const uint4*>(at));
        high_[i][s] = __ldg(reinterpret_cast<const uint4*>(at + std::int64_t{8} * Place::kDim * 2));
      }
    }
  }

  /// The runs' states as the operands of the first products: to buffer 1.
  __device__ void load_states(std::int64_t first, int columns) {
    for (int i = static_cast<int>(threadIdx.x); i < columns * Place::kDim; i += kThreads) {
      const int column = i / Place::kDim;
      const int channel = i % Place::kDim;
      const float* const state = op_.runs.list[first + column].state + op_.layer * Place::kDim;
      reinterpret_cast<A*>(vector(1, column))[channel] = narrow<A>(__ldcg(state + channel));
    }
  }

  /// |h| is at most |s| √D.
  __device__ bool may_reach_limit() const {
    constexpr float kRootDim = kUnits == 1 ? 16.0F : kUnits == 2 ? 22.7F : kUnits == 3 ? 27.8F : 32.0F;
    bool reaches = false;
    for (int c = lane_; c < Place::kDim; c += 32) {
      reaches = reaches || !(fabsf(__ldg(op_.norm + c)) * kRootDim < kNormedLimit);
    }
    return __any_sync(0xffffffffU, static_cast<int>(reaches)) != 0;
  }

  __device__ Operands fetch(bool owns, const BankRun& run, int channel, int t) const {
    Operands operands;
    if (!owns || t >= run.rows) return operands;
    operands.z = read(op_.z.row(run.first + t) + channel);
    operands.zm = __ldcg(op_.zm.row(run.first + t) + channel);
    operands.gamma = __ldcg(op_.gamma.row(run.first + t) + channel);
    return operands;
  }

  __device__ void put(const BankRun& run, int channel, int t, float h) const {
    op_.h.row(run.first + t)[channel] = h;
    op_.h_rounded.row(run.first + t)[channel] = narrow<A>(h);
    if (op_.carries && t + 1 == run.rows) run.state[op_.layer * Place::kDim + channel] = h;
  }

  /// This warp's part of the products with a buffer's vectors.
  __device__ void multiply(int buffer, bool limits) {
    const int g = lane_ / 4;
    const std::byte* const at = vector(buffer, g) + warp_ / 2 * kUnits * kStepBytes + lane_ % 4 * kPieceBytes;
    uint4 x[kUnits];
#pragma unroll
    for (int s = 0; s < kUnits; ++s) x[s] = *reinterpret_cast<const uint4*>(at + s * kStepBytes);
    if (limits) limit(buffer, g, x);
    TileSums tiles[kTiles];
#pragma unroll
    for (int s = 0; s < kUnits; ++s) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (tile(i) < kUnits) multiply_step<A>(tiles[i], low_[i][s], high_[i][s], x[s], kTileColumns);
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (tile(i) >= kUnits) continue;
      for_each_value(kTileRows, kTileColumns, [&](int v, int row, int column) {
        sums(buffer, warp_ / 2, column)[tile(i) * kTileRows + row] = tiles[i].chains[0][v] + tiles[i].chains[1][v];
      });
    }
  }

  /// Limits h, where s ⊙ p = h rms. A NaN returns through the sums of squares.
  __device__ void limit(int buffer, int column, uint4 (&x)[kUnits]) const {
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kSquares / 4; ++i) sum += squares(buffer, column)[2 * (lane_ % 4 + 4 * i)];
    sum += __shfl_xor_sync(0xffffffffU, sum, 1);
    sum += __shfl_xor_sync(0xffffffffU, sum, 2);
    const float most = kNormedLimit / scale_of(sum);
    const std::uint32_t high = ptx::to_pair<A>(most, most);
    const std::uint32_t low = ptx::to_pair<A>(-most, -most);
    const auto within = [&](std::uint32_t pair) { return ptx::max_pair<A>(ptx::min_pair<A>(pair, high), low); };
#pragma unroll
    for (uint4& piece : x) {
      piece = make_uint4(within(piece.x), within(piece.y), within(piece.z), within(piece.w));
    }
  }

  /// The product of this thread's channel and column.
  __device__ float total(int buffer) const {
    float part[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) part[i] = sums(buffer, i, column_)[channel_];
    return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
  }

  /// Sends the warp's 32 channels of its column, 8 at a time, and their squares to all blocks.
  __device__ void send(int buffer, float value, float square) const {
    const std::uint32_t pair = round_pair<A>(value);
    const ptx::ClusterPlace there = ptx::place_in_cluster(shared_, static_cast<unsigned>(lane_ % kBlocks));
    const ptx::ClusterPlace arrival = there + (Place::kBarriersAt + buffer * 8);
    const int half = warp_ % 2 * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = (lane_ / kBlocks * 2 + i) * 8;
      const uint4 words = piece_of_lanes(pair, first);
      if (half + first >= Place::kChannels) continue;
      const int channel = rank_ * Place::kChannels + half + first;
      const int at = buffer * Place::kVectorBytes + column_ * Place::kRowBytes + channel * 2;
      ptx::store_async(there + at, words, arrival);
    }
    const float sum = warp_sum(square);
    if (lane_ < kBlocks) {
      const int at = Place::kSquaresAt + ((buffer * kTileColumns + column_) * kSquares + rank_ * 2 + warp_ % 2) * 8;
      ptx::store_async(there + at, make_uint2(__float_as_uint(sum), 0), arrival);
    }
  }

  const NormedRecurrence<Device, A>& op_;
  std::byte* shared_;
  int warp_, lane_, rank_;
  int column_, channel_;  // of this thread, behind the products
  uint4 low_[kTiles][kUnits], high_[kTiles][kUnits];
};

template <class A, int kUnits>
__global__ void __launch_bounds__(kThreads, 1)
    normed_cluster_kernel(const __grid_constant__ NormedRecurrence<Device, A> op) {
  ptx::allow_successor();
  ClusterRecurrence<A, kUnits>(op).run();
}

/// use(kernel, config) for the op's width.
template <class A, class Use>
auto with_kernel(const NormedRecurrence<Device, A>& op, const Use& use) {
  const auto of = [&]<int kUnits>() {
    const LaunchConfig config{.grid = dims(ceil_div(op.runs.count, kTileColumns) * kBlocks),
                              .block = dim3(kThreads),
                              .shared_bytes = Layout<kUnits>::kBytes,
                              .cluster = kBlocks,
                              .overlap_predecessor = true};
    return use(normed_cluster_kernel<A, kUnits>, config);
  };
  switch (op.gate_weight.cols / kUnit) {
    case 1:
      return of.template operator()<1>();
    case 2:
      return of.template operator()<2>();
    case 3:
      return of.template operator()<3>();
    default:
      return of.template operator()<kMostUnits>();
  }
}

}  // namespace

template <class A>
bool normed_cluster_supported(const Cuda& cuda, const NormedRecurrence<Device, A>& op) {
  const std::int64_t dim = op.gate_weight.cols;
  if (cuda.compute_capability() < 90 || dim % kUnit != 0 || dim == 0 || dim / kUnit > kMostUnits) return false;
  if (!takes_16_bytes(op.gate_weight.data)) return false;
  return with_kernel<A>(op, [&](auto kernel, LaunchConfig config) {
    config.grid = dim3(kBlocks);
    return holds_cluster(config, reinterpret_cast<const void*>(kernel));
  });
}

template <class A>
void normed_by_clusters(Cuda& cuda, const NormedRecurrence<Device, A>& op) {
  with_kernel<A>(op, [&](auto kernel, const LaunchConfig& config) { launch(cuda.stream(), config, kernel, op); });
}

template bool normed_cluster_supported(const Cuda&, const NormedRecurrence<Device, BFloat16>&);
template bool normed_cluster_supported(const Cuda&, const NormedRecurrence<Device, Float16>&);
template void normed_by_clusters(Cuda&, const NormedRecurrence<Device, BFloat16>&);
template void normed_by_clusters(Cuda&, const NormedRecurrence<Device, Float16>&);

}  // namespace mmrec::kernels
