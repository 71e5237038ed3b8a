// y = weight ⊙ x / (‖x‖₂/√D + 1e-6) per row, rounded to A. x comes from memory or from a computation. And the residual
// stream y = x + h + 0.1 v + bias, with and without the norm of its rows. Long, because all sources share one kernel.
//
// A block owns a row; a thread owns every blockDim-th group of 4 channels. The first kHeld groups stay in registers
// between the sum and the product; the others are read again from L2. The norm's weight does not depend on the previous
// kernel, so it is loaded before that one ends. Squares are summed in fp64, in an order that follows from D alone:
// within a thread, over the lanes of a warp, over warps in order.
//
// The optional ops of kernels/ops.h norm rows of one token each where they are computed. A step of many sequences uses
// three of them a layer, between products. Beside the norms other blocks do independent work at the same time: they
// round the state that the next products read, and add to the segments' sums.
//
// Bytes per channel: what a source reads and leaves, and the size of A written.
//
// A SOURCE of rows is a class with
//   kVectors                       whether rows are whole vectors of 4 channels, y's and the weight too
//   auto find(group)               finds what the group's channels are computed from: a function that loads the
//                                  Operands. It is made before the kernel waits for its predecessor
//   void apply(group, operands, x) computes them, and may write them and others
//   void again(group, x)           gives them once more
// and, if other blocks are to do something beside the norms,
//   unsigned asides()              how many of them for a row
//   void aside(number, group)      by such a block for each of the row's groups
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/recurrence/equations.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kMostNormThreads = 512;
/// Groups of a thread in registers: of rows of one token one, so that a row has many threads, whose loads are all under
/// way at once; else two, which are all of them up to D = 4096.
constexpr int kHeldOfTokens = 1;
constexpr int kHeldOfRows = 2;

/// 4 channels of a row of `cols`.
template <bool kVectors>
struct RowGroup {
  std::int64_t row, number, cols;

  template <class T>
  __device__ void load(const T* from, float (&to)[kGroup]) const {
    load_group<kVectors>(from, number, cols, to);
  }
  template <class T>
  __device__ void load(const MatrixView<T, Device>& from, float (&to)[kGroup]) const {
    load(static_cast<const T*>(from.row(row)), to);
  }
  /// Leaves zeros where the row is null.
  template <class T>
  __device__ void load(const RowsView<T, Device>& from, float (&to)[kGroup]) const {
    if (const T* const at = from.row(row); at != nullptr) load(at, to);
  }
  template <class T>
  __device__ void store(T* to, const float (&from)[kGroup]) const {
    store_group<kVectors>(to, number, cols, from);
  }
  template <class T>
  __device__ void store(const MatrixView<T, Device>& to, const float (&from)[kGroup]) const {
    store(to.row(row), from);
  }
  template <class T>
  __device__ void store(const RowsView<T, Device>& to, const float (&from)[kGroup]) const {
    if (T* const at = to.row(row); at != nullptr) store(at, from);
  }
};

/// Rows of a matrix, and what sources have in common that leave x in memory.
template <bool kInVectors, class T = const float>
struct MatrixRows {
  static constexpr bool kVectors = kInVectors;
  using Group = RowGroup<kVectors>;
  MatrixView<T, Device> x;

  struct Operands {
    float x[kGroup];
  };
  __device__ auto find(const Group& group) const {
    return [this, group] {
      Operands operands;
      group.load(x, operands.x);
      return operands;
    };
  }
  __device__ void apply(const Group& /*group*/, const Operands& operands, float (&to)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) to[i] = operands.x[i];
  }
  __device__ void again(const Group& group, float (&to)[kGroup]) const { group.load(x, to); }
};

/// The residual stream of a block.
template <class A, bool kInVectors>
struct ResidualRows {
  static constexpr bool kVectors = kInVectors;
  using Group = RowGroup<kVectors>;
  BlockResidual<Device, A> op;

  struct Operands {
    float x[kGroup], h[kGroup], v[kGroup], bias[kGroup];
    float* y;  // the row
  };
  __device__ auto find(const Group& group) const {
    return [this, group] {
      const std::int64_t b = quotient(group.row, op.y.time);
      const std::int64_t t = group.row - b * op.y.time;
      Operands o = {};
      group.load(op.x.at(b, 0, t), o.x);
      group.load(op.h.at(b, 0, t), o.h);
      group.load(op.v.at(b, 0, t), o.v);
      if (op.bias != nullptr) group.load(op.bias + b * op.bias_stride, o.bias);
      o.y = op.y.at(b, 0, t);
      return o;
    };
  }
  __device__ void apply(const Group& group, const Operands& o, float (&y)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) y[i] = residual_sum(o.x[i], o.h[i], o.v[i]) + o.bias[i];
    group.store(o.y, y);
  }
  __device__ void again(const Group& group, float (&y)[kGroup]) const {
    const std::int64_t b = quotient(group.row, op.y.time);
    group.load(op.y.at(b, 0, group.row - b * op.y.time), y);
  }

  /// Without the norm, a thread for a group: map_rows_by<kGroup>.
  template <int kWidth>
  __device__ void apply(std::int64_t row, std::int64_t col) const {
    static_assert(kWidth == kGroup);
    const Group group{row, col / kGroup, op.y.dim};
    float y[kGroup];
    apply(group, find(group)(), y);
  }
};

/// The residual stream of packed runs, with a context for each.
template <class A, bool kInVectors>
struct PackedRows : MatrixRows<kInVectors, float> {
  using Group = RowGroup<kInVectors>;
  PackedResidualNorm<Device, A> op;

  struct Operands {
    float x[kGroup], h[kGroup], v[kGroup], c[kGroup];
  };
  __device__ auto find(const Group& group) const {
    return [this, group] {
      const int run = __ldg(op.of_row + group.row);
      const std::byte* const context = run < 0 ? nullptr : op.context[run];
      const float* const c = context == nullptr ? op.bias : reinterpret_cast<const float*>(context + op.offset);
      Operands o = {};
      group.load(op.x, o.x);
      group.load(op.h, o.h);
      group.load(op.v, o.v);
      if (c != nullptr) group.load(c, o.c);
      return o;
    };
  }
  __device__ void apply(const Group& group, const Operands& o, float (&y)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) y[i] = residual_sum(o.x[i], o.h[i], o.v[i]) + o.c[i];
    group.store(op.x, y);
  }
};

using TokenGroup = RowGroup<true>;

/// The state's rounding, beside the norms.
template <class A>
struct RoundRow {
  RoundState<Device, A> state;

  unsigned asides() const { return state.rounded.data == nullptr ? 0 : 1; }
  __device__ void aside(unsigned /*number*/, const TokenGroup& group) const {
    float value[kGroup] = {};
    group.load(state.h, value);
    group.store(state.rounded, value);
  }
};

/// x = the embedding of the row's token.
template <class A>
struct EmbedRow : MatrixRows<true, float>, RoundRow<A> {
  const A* table;
  const int* tokens;
  const std::int32_t* token_of;

  __device__ auto find(const Group& group) const {
    return [this, group] {
      Operands operands;
      const std::int64_t number = token_of == nullptr ? group.row : __ldcg(token_of + group.row);
      group.load(table + __ldcg(tokens + number) * group.cols, operands.x);
      return operands;
    };
  }
  __device__ void apply(const Group& group, const Operands& operands, float (&to)[kGroup]) const {
    group.store(x, operands.x);
    MatrixRows::apply(group, operands, to);
  }
};

/// The recurrence by a token, from its products, and x = x + h + 0.1 v + c.
template <class A>
struct AdvanceRow : MatrixRows<true, float> {
  AdvanceNorm<Device, A> op;

  struct Operands {
    float z[kGroup], v[kGroup], zm[kGroup], s[kGroup], g[kGroup], s_bias[kGroup], decay[kGroup], context_decay[kGroup],
        h[kGroup], x[kGroup], c[kGroup];
    float* state;
  };
  /// All loads are under way together: what may be null is loaded from elsewhere then, because the few predicates of a
  /// thread would make loads wait for each other.
  __device__ auto find(const Group& group) const {
    const std::int64_t at = group.number * kGroup;
    const auto in = [&](auto* row) { return row + at; };
    const auto* const x = in(this->x.row(group.row));
    const auto or_x = [&](const float* row) { return row == nullptr ? x : in(row); };
    const float* const context = op.c.row(group.row);
    const bool has_c = context != nullptr || op.c_bias != nullptr;
    float* const state = op.h.row(group.row);
    const A *const z = in(op.z.row(group.row)), *const v = in(op.v.row(group.row)),
                   *const zm = in(op.zm.row(group.row));
    const float *const s = in(op.gates.row(group.row)), *const s_bias = or_x(op.gate_bias),
                       *const decay = in(op.decay.row(group.row)),
                       *const context_decay = or_x(op.context_decay.row(group.row)), *const h = or_x(state),
                       *const c = or_x(context != nullptr ? context : op.c_bias);
    return [=, this] {
      Operands o = {};
      if (at >= group.cols) return o;
      load(z, o.z);
      load(v, o.v);
      load(zm, o.zm);
      load(s, o.s);
      load(s + group.cols, o.g);
      load(s_bias, o.s_bias);
      load(decay, o.decay);
      load(context_decay, o.context_decay);
      load(h, o.h);
      load(x, o.x);
      load(c, o.c);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        o.s_bias[i] = op.gate_bias == nullptr ? 0.0F : o.s_bias[i];
        o.h[i] = state == nullptr ? 0.0F : o.h[i];
        o.c[i] = has_c ? o.c[i] : 0.0F;
      }
      if (state != nullptr) o.state = state + at;
      return o;
    };
  }
  __device__ void apply(const Group& group, const Operands& o, float (&to)[kGroup]) const {
    float state[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float gamma = decay_of(o.decay[i], op.context_decay.data != nullptr, o.context_decay[i]);
      state[i] = gated_step(o.s[i] + o.s_bias[i], o.zm[i] + o.g[i], o.z[i], gamma, op.mdi_mix)(o.h[i]);
      to[i] = residual_sum(o.x[i], state[i], o.v[i]) + o.c[i];
    }
    if (o.state != nullptr) store(o.state, state);
    group.store(op.h_rounded, state);
    group.store(x, to);
  }
};

/// x as it is, and beside the norms sum += x, and what closes a segment.
template <class A>
struct SumRow : MatrixRows<true> {
  RowsView<double, Device> sum;
  RowsView<float, Device> closed;
  double segment;
  RoundRow<A> round;

  unsigned asides() const { return 1 + round.asides(); }
  __device__ void aside(unsigned number, const Group& group) const {
    if (number != 0) return round.aside(0, group);
    double* const row = sum.row(group.row);
    if (row == nullptr) return;
    double* const at = row + group.number * kGroup;
    double before[kGroup];
    float value[kGroup];
    group.load(x, value);
    float* const slot = closed.rows == 0 ? nullptr : closed.row(group.row);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) before[i] = __ldcg(at + i);
    add_to_segment(before, value, segment, at, slot == nullptr ? nullptr : slot + group.number * kGroup);
  }
};

template <class Source>
constexpr bool kHasAsides = requires(const Source& source) {
  source.asides();
};

__device__ inline double add_squares(const float (&x)[kGroup], double sum) {
#pragma unroll
  for (const float value : x) sum = fma(static_cast<double>(value), static_cast<double>(value), sum);
  return sum;
}

/// The sum of all threads' values, to every thread.
__device__ inline double block_sum(double value) {
  __shared__ double of_warp[kMostNormThreads / 32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += of_warp[w];
  return sum;
}

template <int kHeld, class Source, class A>
__global__ void __launch_bounds__(kMostNormThreads)
    norm_rows_kernel(const __grid_constant__ Source source, double inverse_cols, const float* weight,
                     MatrixView<A, Device> y, NormBias bias) {
  using Group = RowGroup<Source::kVectors>;
  ptx::allow_successor();
  const auto group = [&](std::int64_t number) { return Group{blockIdx.x, number, y.cols}; };
  const std::int64_t step = blockDim.x;
  float scale[kHeld][kGroup];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) group(threadIdx.x + i * step).load(weight, scale[i]);
  const auto load_first = source.find(group(threadIdx.x));
  ptx::wait_for_predecessor();
  if constexpr (kHasAsides<Source>) {
    if (blockIdx.y != 0) {
      for (std::int64_t g = threadIdx.x; g * kGroup < y.cols; g += step) source.aside(blockIdx.y - 1, group(g));
      return;
    }
  }

  typename Source::Operands operands[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) operands[i] = i == 0 ? load_first() : source.find(group(threadIdx.x + i * step))();
  float held[kHeld][kGroup];
  double squares = 0.0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    source.apply(group(threadIdx.x + i * step), operands[i], held[i]);
    squares = add_squares(held[i], squares);
  }
  for (std::int64_t g = threadIdx.x + kHeld * step; g * kGroup < y.cols; g += step) {
    float value[kGroup];
    source.apply(group(g), source.find(group(g))(), value);
    squares = add_squares(value, squares);
  }

  const float inverse = norm_factor(block_sum(squares) * inverse_cols, bias);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int c = 0; c < kGroup; ++c) held[i][c] = held[i][c] * inverse * scale[i][c];
    group(threadIdx.x + i * step).store(y, held[i]);
  }
  for (std::int64_t g = threadIdx.x + kHeld * step; g * kGroup < y.cols; g += step) {
    float value[kGroup];
    float factor[kGroup];
    source.again(group(g), value);
    group(g).load(weight, factor);
#pragma unroll
    for (int c = 0; c < kGroup; ++c) value[c] = value[c] * inverse * factor[c];
    group(g).store(y, value);
  }
}

/// Normalises y.rows rows of the source.
template <int kHeld, class Source, class A>
void norm_rows(Cuda& cuda, const Source& source, const float* weight, MatrixView<A, Device> y, NormBias bias = {}) {
  const std::int64_t groups = ceil_div(y.cols, kGroup);
  const std::int64_t threads = std::min<std::int64_t>(ceil_div(ceil_div(groups, kHeld), 32) * 32, kMostNormThreads);
  if (threads == 0) return;
  dim3 grid = dims(y.rows);
  if constexpr (kHasAsides<Source>) grid.y += source.asides();
  launch(cuda.stream(), overlapping(cuda, grid, dims(threads)), norm_rows_kernel<kHeld, Source, A>, source,
         1.0 / static_cast<double>(y.cols), weight, y, bias);
}

template <class A>
bool in_vectors(const BlockResidual<Device, A>& op) {
  return takes_vectors(op.x) && takes_vectors(op.h) && takes_vectors(op.v) && takes_vectors(op.y) &&
         takes_vectors(op.bias, op.bias_stride);
}

}  // namespace

template <class A>
void rmsnorm(Cuda& cuda, MatrixView<const float, Device> x, const float* weight, MatrixView<A, Device> y,
             NormEpsilon epsilon) {
  const bool vectors = takes_vectors(x) && takes_vectors(y) && takes_vectors(weight, 0);
  const NormBias bias = epsilon == NormEpsilon::kInsideRoot ? inside_root() : NormBias{};
  vectors ? norm_rows<kHeldOfRows>(cuda, MatrixRows<true>{x}, weight, y, bias)
          : norm_rows<kHeldOfRows>(cuda, MatrixRows<false>{x}, weight, y, bias);
}

template <class A>
void block_residual(Cuda& cuda, const BlockResidual<Device, A>& op) {
  const std::int64_t rows = op.y.batch * op.y.time;
  in_vectors(op) ? map_rows_by<kGroup>(cuda, cuda.stream(), ResidualRows<A, true>{op}, rows, op.y.dim)
                 : map_rows_by<kGroup>(cuda, cuda.stream(), ResidualRows<A, false>{op}, rows, op.y.dim);
}

template <class A>
void block_residual_norm(Cuda& cuda, const BlockResidual<Device, A>& op, const float* weight, MatrixView<A, Device> u) {
  const bool vectors = in_vectors(op) && takes_vectors(u) && takes_vectors(weight, 0);
  vectors ? norm_rows<kHeldOfRows>(cuda, ResidualRows<A, true>{op}, weight, u)
          : norm_rows<kHeldOfRows>(cuda, ResidualRows<A, false>{op}, weight, u);
}

template <class A>
void packed_residual_norm(Cuda& cuda, const PackedResidualNorm<Device, A>& op) {
  const bool vectors = takes_vectors(op.x) && takes_vectors(op.h) && takes_vectors(op.v) && takes_vectors(op.u) &&
                       takes_vectors(op.bias, 0) && takes_vectors(op.norm, 0);
  vectors ? norm_rows<kHeldOfRows>(cuda, PackedRows<A, true>{{op.x}, op}, op.norm, op.u)
          : norm_rows<kHeldOfRows>(cuda, PackedRows<A, false>{{op.x}, op}, op.norm, op.u);
}

template <class A>
void embed_norm(Cuda& cuda, const EmbedNorm<Device, A>& op) {
  const EmbedRow<A> source{{op.x}, {op.next}, static_cast<const A*>(op.table.data), op.tokens, op.token_of};
  norm_rows<kHeldOfTokens>(cuda, source, op.norm, op.u);
}

template <class A>
void advance_norm(Cuda& cuda, const AdvanceNorm<Device, A>& op) {
  norm_rows<kHeldOfTokens>(cuda, AdvanceRow<A>{{op.x}, op}, op.norm, op.u);
}

template <class A>
void sum_norm(Cuda& cuda, const SumNorm<Device, A>& op) {
  norm_rows<kHeldOfTokens>(cuda, SumRow<A>{{op.x}, op.sum, op.closed, static_cast<double>(op.segment), {op.next}},
                           op.norm, op.u);
}

bool takes_token_rows(const Cuda& cuda, std::int64_t dim) {
  return cuda.compute_capability() >= 90 && dim % kGroup == 0;
}

#define MMREC_INSTANTIATE(A)                                                                                       \
  template void rmsnorm(Cuda&, MatrixView<const float, Device>, const float*, MatrixView<A, Device>, NormEpsilon); \
  template void block_residual(Cuda&, const BlockResidual<Device, A>&);                                            \
  template void packed_residual_norm(Cuda&, const PackedResidualNorm<Device, A>&);                                 \
  template void block_residual_norm(Cuda&, const BlockResidual<Device, A>&, const float*, MatrixView<A, Device>);  \
  template void embed_norm(Cuda&, const EmbedNorm<Device, A>&);                                                    \
  template void advance_norm(Cuda&, const AdvanceNorm<Device, A>&);                                                \
  template void sum_norm(Cuda&, const SumNorm<Device, A>&);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
