// One token of the recurrence of 9 to 128 rows of bf16, with the products that make its gates and decay
// (GatedAdvance in kernels/ops.h), on the tensor cores of sm_90a. Ring and exchange of sums: few_rows.cuh.
//
// A cluster owns 64 channels. Its 8 blocks multiply what these need: three have a third of k each of the state's part
// of the first gate, three of the second gate's, and one has each decay network's last layer, or two share the only
// one. They send each other sums, and each finishes 8 rows: it adds up the gates, advances the state, and adds to x.
// All that this needs from memory has been on its way since the predecessor ended, because the warpgroup that finishes
// rows has nothing else to do.
//
// Bytes: the weights once from memory, once more from L2 where there are more than 64 rows; the rows' operands once.
// Deterministic. A row's bits depend on the row and the weights alone.
#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/few_rows.cuh"
#include "kernels/cuda/recurrence/equations.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kAdvanceThreads = kCopyingWarp * 32 + 32;
constexpr int kOfGate = 3;  // blocks
constexpr int kFirstDecay = 2 * kOfGate;

struct AdvanceParams {
  TensorMap w[3] = {};  // of the gates, the decay, the context's decay
  TensorMap x[3] = {};
  int k_blocks[3] = {};
  GatedAdvance<Device, BFloat16> op = {};
};

/// What a block multiplies: rows of W from `output` on.
struct AdvancePlace : FewRowsPlace {
  int product;

  __device__ AdvancePlace(const AdvanceParams& p, int channel) : FewRowsPlace{} {
    slice = static_cast<int>(ptx::cluster_rank());
    const bool has_context = p.op.context_decay.hidden.data != nullptr;
    const bool is_gate = slice < kFirstDecay;
    product = is_gate || !has_context ? (is_gate ? 0 : 1) : slice - kFirstDecay + 1;
    output = channel + (is_gate && slice >= kOfGate ? static_cast<int>(p.op.h.cols) : 0);
    const int parts = is_gate ? kOfGate : has_context ? 1 : 2;
    const int part = is_gate ? slice % kOfGate : has_context ? 0 : slice - kFirstDecay;
    k_begin = p.k_blocks[product] * part / parts;
    k_end = p.k_blocks[product] * (part + 1) / parts;
  }
};

/// What a thread needs to finish four channels of a row: everything is loaded at once, from somewhere else where there
/// is nothing, and nothing waits for a predicate.
class AdvancedRow {
 public:
  /// Before the predecessor has ended. Where row < 0 nothing is stored.
  __device__ AdvancedRow(const GatedAdvance<Device, BFloat16>& op, std::int64_t row, int channel)
      : op_(op), row_(max(row, std::int64_t{0})), channel_(channel), exists_(row >= 0) {
    const AdvanceNorm<Device, BFloat16>& a = op.advance;
    state_ = a.h.row(row_);
    context_ = a.c.row(row_);
    if (context_ == nullptr) context_ = a.c_bias;
    sum_ = op.sum.rows == 0 ? nullptr : op.sum.row(row_);
    closed_ = op.closed.rows == 0 ? nullptr : op.closed.row(row_);
    next_ = op.next.rounded.data == nullptr ? nullptr : op.next.h.row(row_);
    load_or_zero(a.gate_bias, gate_bias_);
    load_or_zero(op.decay.bias, decay_bias_);
    load_or_zero(op.context_decay.bias, context_decay_bias_);
    kernels::load(a.norm + channel, weight_);
  }
  __device__ void load() {
    const AdvanceNorm<Device, BFloat16>& a = op_.advance;
    const float* const x = a.x.row(row_);
    kernels::load(x + channel_, x_);
    kernels::load((state_ == nullptr ? x : state_) + channel_, h_);
    kernels::load((context_ == nullptr ? x : context_) + channel_, c_);
    kernels::load((next_ == nullptr ? x : next_) + channel_, next_h_);
    kernels::load(a.z.row(row_) + channel_, z_);
    kernels::load(a.v.row(row_) + channel_, v_);
    kernels::load(a.zm.row(row_) + channel_, zm_);
    if (sum_ != nullptr) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) before_[i] = __ldcg(sum_ + channel_ + i);
    }
  }
  /// part: the sums of each block of the cluster.
  __device__ void finish(const float (&part)[kCluster][kGroup]) {
    const AdvanceNorm<Device, BFloat16>& a = op_.advance;
    const bool has_context = op_.context_decay.hidden.data != nullptr;
    float state[kGroup];
    float y[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float s = part[0][i] + part[1][i] + part[2][i];
      const float g = part[3][i] + part[4][i] + part[5][i];
      const float of_context = part[7][i] + context_decay_bias_[i];
      const float decay = (has_context ? part[6][i] : part[6][i] + part[7][i]) + decay_bias_[i];
      const float gamma = decay_of(decay, has_context, of_context);
      const Step step = gated_step(s + gate_bias_[i], zm_[i] + g, z_[i], gamma, a.mdi_mix);
      state[i] = step(state_ == nullptr ? 0.0F : h_[i]);
      y[i] = residual_sum(x_[i], state[i], v_[i]) + (context_ == nullptr ? 0.0F : c_[i]);
    }
    if (exists_) {
      store(a.x.row(row_) + channel_, y);
      store(a.h_rounded.row(row_) + channel_, state);
      if (state_ != nullptr) store(state_ + channel_, state);
    }
    leave_scaled(ScaledRows<Device, BFloat16>{a.norm, a.u, op_.squares}, exists_, row_, channel_, y, weight_);
    if (!exists_) return;
    if (op_.next.rounded.data != nullptr) {
#pragma unroll
      for (float& value : next_h_) value = next_ == nullptr ? 0.0F : value;
      store(op_.next.rounded.row(row_) + channel_, next_h_);
    }
    if (sum_ == nullptr) return;
    float mean[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const double sum = before_[i] + static_cast<double>(x_[i]);
      mean[i] = static_cast<float>(sum / static_cast<double>(op_.segment));
      sum_[channel_ + i] = closed_ == nullptr ? sum : 0.0;
    }
    if (closed_ != nullptr) store(closed_ + channel_, mean);
  }

 private:
  __device__ void load_or_zero(const float* from, float (&to)[kGroup]) const {
#pragma unroll
    for (float& value : to) value = 0.0F;
    if (from != nullptr) kernels::load(from + channel_, to);
  }

  const GatedAdvance<Device, BFloat16>& op_;
  std::int64_t row_;
  int channel_;
  bool exists_;
  float* state_;
  const float* context_;
  const float* next_;
  double* sum_;
  float* closed_;
  float gate_bias_[kGroup], decay_bias_[kGroup], context_decay_bias_[kGroup], weight_[kGroup];
  float x_[kGroup], h_[kGroup], c_[kGroup], next_h_[kGroup], z_[kGroup], v_[kGroup], zm_[kGroup];
  double before_[kGroup];
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
  const AdvancePlace place(p, channel);
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32, 0);

  if (warp == kCopyingWarp) {
    if (threadIdx.x % 32 != 0) return ptx::cluster_wait();
    const std::uint64_t hint = ptx::evict_first();
    const auto load_w = [&](int k, int stage) {
      ptx::mbarrier_arrive_expect(&ring.full[stage], Stage::kBytes);
      ptx::load_box(ring.stages + stage * Stage::kBytes, &p.w[place.product], &ring.full[stage],
                    (place.k_begin + k) * kDepth, place.output, 0, hint);
    };
    const auto load_x = [&](int k, int stage) {
      ptx::load_box(ring.stages + stage * Stage::kBytes + Stage::kWBytes, &p.x[place.product], &ring.full[stage],
                    (place.k_begin + k) * kDepth, first_row, 0);
    };
    return copy_stages<Stage::kCount>(ring, place.k_end - place.k_begin, load_w, load_x);
  }
  if (warp < kWarpgroup / 32) {
    ptx::cluster_wait();
    float sum[kRows / 2] = {};
    multiply<BFloat16, Stage>(ring, place.k_end - place.k_begin, sum);
    leave_sums<kCluster>(ring, place, rows, sum);
    ptx::named_barrier_arrive(kSumsBarrier, kFinishers);
    return;
  }
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
  const int row = place.slice * kRowGroup + thread / kOutputThreads;
  const int output = thread % kOutputThreads * kGroup;
  AdvancedRow mine(p.op, row < rows ? first_row + row : -1, channel + output);
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

void gated_advance(Cuda& cuda, const GatedAdvance<Device, BFloat16>& op) {
  op.h.rows <= 32 ? launch_advance<32>(cuda, op) : launch_advance<64>(cuda, op);
}

}  // namespace mmrec::kernels
