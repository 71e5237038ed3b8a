// The recurrence that is normed at every token (kernels/ops.h has its equations), by any operands and on any device:
//   p = (1 − m + γ) ⊙ h₋₁ + m ⊙ z,  m = σ(zm + W h₋₁ + b),  h = clamp(s ⊙ p / √(mean p² + 1e-6), ±100)
//
// First tokens without a state, kRows: a block norms a row; 4 bytes an element of zm and h, 2 sizes of A.
//
// kGang: a gang of blocks that stay resident has some runs, the columns of a tile, and each of its blocks some
// channels, whose rows of W stay in shared memory as far as they fit; the rest is read from L2 for every token. As many
// gangs as there is room for work side by side, each with as many blocks as its rows of W ask for or more. A token has
// one exchange: p and the blocks' sums of its squares go to L2, all of the gang meet, and everyone norms all of p for
// its next products, so nothing is exchanged twice. Buffers alternate from meeting
// to meeting: a block that writes p for one has met all blocks that read what was written two meetings before.
//
// The order of every sum follows from D and the number of blocks alone.
#include <algorithm>
#include <stdexcept>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/gemm/operands.cuh"
#include "kernels/cuda/gemm/tile_product.cuh"
#include "kernels/cuda/recurrence/algo.h"
#include "kernels/cuda/recurrence/equations.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kThreads = 32 * kTileWarps;

template <class A>
__global__ void __launch_bounds__(kThreads) normed_rows_kernel(const __grid_constant__ NormedRecurrence<Device, A> op) {
  __shared__ double of_warp[kThreads / 32];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const BankRun run = op.runs.list[blockIdx.x];
  if (run.rows == 0) return;
  const std::int64_t dim = op.z.cols;
  const std::int64_t row = run.first;
  const auto part = [&](std::int64_t c) {
    const float bias = op.gate_bias == nullptr ? 0.0F : __ldg(op.gate_bias + c);
    return normed_step(__ldcg(op.zm.row(row) + c) + bias, read(op.z.row(row) + c), 0.0F, 0.0F);
  };
  constexpr int kHeld = 4;  // channels of a thread whose p is kept; p of the others is computed twice
  float held[kHeld];
  double squares = 0.0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const std::int64_t c = std::int64_t{i} * kThreads + threadIdx.x;
    held[i] = c < dim ? part(c) : 0.0F;
  }
#pragma unroll
  for (const float one : held) squares = fma(static_cast<double>(one), static_cast<double>(one), squares);
  for (std::int64_t c = std::int64_t{kHeld} * kThreads + threadIdx.x; c < dim; c += kThreads) {
    const auto p = static_cast<double>(part(c));
    squares = fma(p, p, squares);
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = squares;
  __syncthreads();
  double sum = 0.0;
#pragma unroll
  for (const double one : of_warp) sum += one;
  const float scale = norm_factor(sum / static_cast<double>(dim), inside_root());
  const auto put = [&](std::int64_t c, float p) {
    const float h = within_limit(__ldg(op.norm + c) * p * scale);
    op.h.row(row)[c] = h;
    if constexpr (sizeof(A) == 2) op.h_rounded.row(row)[c] = narrow<A>(h);
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const std::int64_t c = std::int64_t{i} * kThreads + threadIdx.x;
    if (c < dim) put(c, held[i]);
  }
  for (std::int64_t c = std::int64_t{kHeld} * kThreads + threadIdx.x; c < dim; c += kThreads) put(c, part(c));
}

/// How the runs are shared out.
struct GangPlan {
  int blocks = 1;  // of a gang
  int gangs = 1;
  int columns = 1;   // runs that a gang takes at once
  int channels = 1;  // of a block, at most
  int resident = 0;  // rows of W of a block in shared memory
  int row_bytes = 0;
  int sums_bytes = 0;
  int shared_bytes = 0;
};

template <class A>
struct GangParams {
  NormedRecurrence<Device, A> op;
  GangPlan plan;
  float* exchange;       // of each gang: p [2, columns, D], sums of squares [2, columns, blocks]
  std::uint32_t* flags;  // kFlagsOfGang of each gang: how often its blocks have met, and how many are done
  bool vectors;          // rows of W can be read 16 bytes at a time
};
constexpr int kFlagsOfGang = 64;

template <class A>
class Gang {
 public:
  __device__ explicit Gang(const GangParams<A>& params)
      : p_(params),
        op_(params.op),
        shared_(ptx::shared_memory<std::byte>()),
        thread_(static_cast<int>(threadIdx.x)),
        gang_(static_cast<int>(blockIdx.x) / params.plan.blocks),
        member_(static_cast<int>(blockIdx.x) % params.plan.blocks),
        dim_(static_cast<int>(params.op.z.cols)),
        first_(static_cast<int>(std::int64_t{dim_} * member_ / params.plan.blocks)),
        channels_(static_cast<int>(std::int64_t{dim_} * (member_ + 1) / params.plan.blocks) - first_),
        sums_(reinterpret_cast<float*>(shared_)),
        met_(params.flags + std::int64_t{gang_} * kFlagsOfGang) {
    const GangPlan& plan = params.plan;
    own_h_ = reinterpret_cast<float*>(shared_ + plan.sums_bytes);
    scales_ = own_h_ + plan.columns * plan.channels;
    vectors_ = shared_ + plan.sums_bytes + (plan.columns * plan.channels + kTileColumns + 3) / 4 * 16;
    weights_ = vectors_ + plan.columns * plan.row_bytes;
    const std::int64_t floats = std::int64_t{2} * plan.columns * (dim_ + plan.blocks);
    exchange_ = params.exchange + gang_ * floats;
  }

  __device__ void run() {
    for (int i = thread_; i < p_.plan.columns * p_.plan.row_bytes; i += kThreads) vectors_[i] = std::byte{0};
    hold_weights();
    __syncthreads();
    const auto columns = std::int64_t{p_.plan.columns};
    std::uint32_t meetings = 0;
    for (std::int64_t g = gang_; g * columns < op_.runs.count; g += p_.plan.gangs) {
      count_ = static_cast<int>(min(columns, op_.runs.count - g * columns));
      runs_ = op_.runs.list + g * columns;
      int longest = 0;
      for (int c = 0; c < count_; ++c) longest = max(longest, runs_[c].rows);
      for (int t = 0; t <= longest; ++t) {
        if (t == 0) begin();
        if (t > 0) settle(t - 1, meetings - 1);
        __syncthreads();
        if (t == longest) break;
        const bool multiplies = t > 0 || op_.carries;
        if (multiplies) {
          multiply();
          __syncthreads();
        }
        advance(t, meetings, multiplies);
        meet(++meetings);
      }
    }
    leave();
  }

 private:
  /// What is written for a meeting: p of a run, and the blocks' sums of its squares.
  __device__ float* parts(std::uint32_t meeting, int column) const {
    return exchange_ + (std::int64_t{meeting & 1} * p_.plan.columns + column) * dim_;
  }
  __device__ float* squares(std::uint32_t meeting, int column) const {
    return exchange_ + std::int64_t{2} * p_.plan.columns * dim_ +
           (std::int64_t{meeting & 1} * p_.plan.columns + column) * p_.plan.blocks;
  }
  __device__ A* vector(int column) const { return reinterpret_cast<A*>(vectors_ + column * p_.plan.row_bytes); }
  __device__ bool owns(int channel) const { return channel >= first_ && channel < first_ + channels_; }

  __device__ void hold_weights() const {
    const auto* const weight = static_cast<const A*>(op_.gate_weight.data);
    const int width = p_.plan.row_bytes / static_cast<int>(sizeof(A));
    for (int row = 0; row < min(channels_, p_.plan.resident); ++row) {
      A* const to = reinterpret_cast<A*>(weights_ + static_cast<std::size_t>(row) * p_.plan.row_bytes);
      const A* const from = weight + std::int64_t{first_ + row} * dim_;
      for (int c = thread_; c < width; c += kThreads) to[c] = c < dim_ ? from[c] : A{};
    }
  }

  /// h₋₁ of the runs' first tokens.
  __device__ void begin() const {
    for (int column = 0; column < count_; ++column) {
      const float* const state = op_.carries ? runs_[column].state + op_.layer * dim_ : nullptr;
      for (int c = thread_; c < dim_; c += kThreads) {
        const float h = state == nullptr ? 0.0F : __ldcg(state + c);
        vector(column)[c] = narrow<A>(h);
        if (owns(c)) own_h_[column * p_.plan.channels + c - first_] = h;
      }
    }
  }

  /// h of token t; all blocks have its p.
  __device__ void settle(int t, std::uint32_t meeting) const {
    const int warp = thread_ / 32;
    if (warp < count_ && t < runs_[warp].rows) {
      float sum = 0.0F;
      for (int i = thread_ % 32; i < p_.plan.blocks; i += 32) sum += __ldcg(squares(meeting, warp) + i);
      scales_[warp] = norm_factor(static_cast<double>(warp_sum(sum)) / static_cast<double>(dim_), inside_root());
    }
    __syncthreads();
    for (int column = 0; column < count_; ++column) {
      const BankRun& run = runs_[column];
      if (t >= run.rows) continue;
      const float scale = scales_[column];
      const float* const p = parts(meeting, column);
      for (int c = thread_; c < dim_; c += kThreads) {
        const float h = within_limit(__ldg(op_.norm + c) * __ldcg(p + c) * scale);
        vector(column)[c] = narrow<A>(h);
        if (!owns(c)) continue;
        own_h_[column * p_.plan.channels + c - first_] = h;
        op_.h.row(run.first + t)[c] = h;
        if constexpr (sizeof(A) == 2) op_.h_rounded.row(run.first + t)[c] = narrow<A>(h);
        if (op_.carries && t + 1 == run.rows) run.state[op_.layer * dim_ + c] = h;
      }
    }
  }

  /// 16 bytes of row `row` of this block's, zeros behind its end.
  __device__ uint4 weight_piece(int row, int byte) const {
    if (row >= channels_) return make_uint4(0, 0, 0, 0);
    if (row < p_.plan.resident) {
      return *reinterpret_cast<const uint4*>(weights_ + static_cast<std::size_t>(row) * p_.plan.row_bytes + byte);
    }
    const int column = byte / static_cast<int>(sizeof(A));
    const A* const from = static_cast<const A*>(op_.gate_weight.data) + std::int64_t{first_ + row} * dim_ + column;
    return p_.vectors ? load_fragment<ReadOnly, true>(from, dim_ - column)
                      : load_fragment<ReadOnly, false>(from, dim_ - column);
  }

  __device__ void multiply() const {
    constexpr int kTiles = 2;
    const int warp = thread_ / 32;
    const int lane = thread_ % 32;
    const int steps = (dim_ * static_cast<int>(sizeof(A)) + kStepBytes - 1) / kStepBytes;
    const std::byte* const x_row = vectors_ + min(lane / 4, count_ - 1) * p_.plan.row_bytes;
    for (int first = 0; first < channels_; first += kTiles * kTileRows) {
      TileSums tiles[kTiles];
      for (int step = warp; step < steps; step += kTileWarps) {
        const int byte = step * kStepBytes + lane % 4 * kPieceBytes;
        const uint4 x = *reinterpret_cast<const uint4*>(x_row + byte);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const int row = first + i * kTileRows + lane / 4;
          if (first + i * kTileRows >= channels_) break;
          multiply_step<A>(tiles[i], weight_piece(row, byte), weight_piece(row + 8, byte), x, count_);
        }
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int row = first + i * kTileRows;
        if (row < channels_) store_sums(sums_, tiles[i], row, min(kTileRows, channels_ - row), count_);
      }
    }
  }

  /// p of the block's channels at token t: a warp has a run.
  __device__ void advance(int t, std::uint32_t meeting, bool multiplied) const {
    const int column = thread_ / 32;
    if (column >= count_ || t >= runs_[column].rows) return;
    const std::int64_t row = runs_[column].first + t;
    float sum = 0.0F;
    for (int i = thread_ % 32; i < channels_; i += 32) {
      const int c = first_ + i;
      float gate = __ldcg(op_.zm.row(row) + c) + (op_.gate_bias == nullptr ? 0.0F : __ldg(op_.gate_bias + c));
      if (multiplied) gate = total(sums_, i, column, count_) + gate;
      const float p = normed_step(gate, read(op_.z.row(row) + c), __ldcg(op_.gamma.row(row) + c),
                                  own_h_[column * p_.plan.channels + i]);
      __stcg(parts(meeting, column) + c, p);
      sum = __fmaf_rn(p, p, sum);
    }
    sum = warp_sum(sum);
    if (thread_ % 32 == 0) __stcg(squares(meeting, column) + member_, sum);
  }

  /// Returns when all blocks of the gang have come here so often.
  __device__ void meet(std::uint32_t times) const {
    __syncthreads();
    if (thread_ == 0) {
      ptx::add_release(met_, 1);
      while (ptx::load_acquire(met_) < times * static_cast<std::uint32_t>(p_.plan.blocks)) ptx::spin_briefly();
    }
    __syncthreads();
  }
  /// The last one leaves the flags as they were.
  __device__ void leave() const {
    __syncthreads();
    if (thread_ != 0) return;
    if (ptx::add_acq_rel(met_ + 1, 1) + 1 != static_cast<std::uint32_t>(p_.plan.blocks)) return;
    met_[0] = 0;
    met_[1] = 0;
  }

  const GangParams<A>& p_;
  const NormedRecurrence<Device, A>& op_;
  std::byte* shared_;
  int thread_, gang_, member_, dim_, first_, channels_;
  int count_ = 0;  // runs at hand
  const BankRun* runs_ = nullptr;
  float *sums_, *own_h_, *scales_, *exchange_;
  std::byte *vectors_, *weights_;
  std::uint32_t* met_;
};

template <class A>
__global__ void __launch_bounds__(kThreads, 1) normed_gang_kernel(const __grid_constant__ GangParams<A> params) {
  Gang<A>(params).run();
}

/// As many gangs as there are groups of runs, of no fewer blocks than hold W if so many fit.
template <class A>
GangPlan plan_gangs(const Cuda& cuda, const NormedRecurrence<Device, A>& op) {
  constexpr int kLeastChannels = 4;  // of a block: fewer blocks meet sooner
  const auto dim = static_cast<int>(op.z.cols);
  const auto most_shared = static_cast<int>(cuda.shared_memory_per_block());
  const int processors = cuda.processors();
  GangPlan plan;
  plan.row_bytes = padded_row(dim * static_cast<int>(sizeof(A)));
  plan.columns = std::clamp(most_shared / 3 / plan.row_bytes, 1, kTileColumns);
  const auto groups = static_cast<int>(std::min<std::int64_t>(ceil_div(op.runs.count, plan.columns), processors));
  const auto fixed = [&](int channels) {
    const int tiles = (channels + kTileRows - 1) / kTileRows * kTileRows;
    plan.channels = channels;
    plan.sums_bytes = tiles * plan.columns * kTileWarps * static_cast<int>(sizeof(float));
    return plan.sums_bytes + (plan.columns * channels + kTileColumns + 3) / 4 * 16 + plan.columns * plan.row_bytes;
  };
  const int most_blocks = std::clamp(dim / kLeastChannels, 1, processors);
  const auto holds = [&](int blocks) {
    const int channels = (dim + blocks - 1) / blocks;
    return fixed(channels) + std::int64_t{channels} * plan.row_bytes <= most_shared;
  };
  int least = 1;
  while (least < most_blocks && !holds(least)) ++least;
  plan.blocks = std::clamp(processors / groups, least, most_blocks);
  plan.gangs = std::max(1, std::min(groups, processors / plan.blocks));
  const int channels = (dim + plan.blocks - 1) / plan.blocks;
  const int used = fixed(channels);
  if (used > most_shared) throw std::length_error("normed_recurrence: a state does not fit shared memory");
  plan.resident = std::min(channels, (most_shared - used) / plan.row_bytes);
  plan.shared_bytes = used + plan.resident * plan.row_bytes;
  return plan;
}

template <class A>
void by_gangs(Cuda& cuda, const NormedRecurrence<Device, A>& op) {
  const GangPlan plan = plan_gangs(cuda, op);
  const auto dim = static_cast<std::size_t>(op.z.cols);
  const std::size_t floats =
      std::size_t{2} * static_cast<std::size_t>(plan.columns) * (dim + static_cast<std::size_t>(plan.blocks));
  if (floats * sizeof(float) * static_cast<std::size_t>(plan.gangs) > Cuda::kScratchBytes) {
    throw std::length_error("normed_recurrence: the states do not fit the scratch memory");
  }
  const GangParams<A> params{.op = op,
                             .plan = plan,
                             .exchange = static_cast<float*>(cuda.scratch()),
                             .flags = cuda.flags(),
                             .vectors = takes_16_bytes(op.gate_weight.data, op.z.cols * static_cast<int>(sizeof(A)))};
  launch(cuda.stream(),
         {.grid = dims(plan.blocks * plan.gangs),
          .block = dim3(kThreads),
          .shared_bytes = static_cast<std::size_t>(plan.shared_bytes),
          .cooperative = true},
         normed_gang_kernel<A>, params);
}

}  // namespace

template <class A>
NormedAlgo choose_normed(const Cuda& cuda, const NormedRecurrence<Device, A>& op) {
  if (!op.carries && op.runs.most_rows <= 1) return NormedAlgo::kRows;
  if constexpr (sizeof(A) == 2) {
    if (normed_cluster_supported(cuda, op)) return NormedAlgo::kCluster;
  }
  return NormedAlgo::kGang;
}

template <class A>
void normed_recurrence(Cuda& cuda, const NormedRecurrence<Device, A>& op, NormedAlgo algo) {
  if (op.runs.count == 0 || op.runs.most_rows == 0 || op.z.cols == 0) return;
  if (algo == NormedAlgo::kAuto) algo = choose_normed(cuda, op);
  if (algo == NormedAlgo::kGang) return by_gangs(cuda, op);
  if constexpr (sizeof(A) == 2) {
    if (algo == NormedAlgo::kCluster) return normed_by_clusters(cuda, op);
  }
  if (algo != NormedAlgo::kRows || op.carries || op.runs.most_rows > 1) {
    throw std::invalid_argument("normed_recurrence: this algorithm does not take the op");
  }
  launch(cuda.stream(), overlapping(cuda, dims(op.runs.count), dim3(kThreads)), normed_rows_kernel<A>, op);
}

#define MMREC_INSTANTIATE(A)                                                          \
  template NormedAlgo choose_normed(const Cuda&, const NormedRecurrence<Device, A>&); \
  template void normed_recurrence(Cuda&, const NormedRecurrence<Device, A>&, NormedAlgo);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
