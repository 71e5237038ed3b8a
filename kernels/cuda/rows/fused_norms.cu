// Rows of one token each that are normed where they are computed: the optional ops of kernels/backend.h, as sources of
// rmsnorm.cuh. A step of many sequences goes through three of them a layer, between products.
//
// Beside the norms other blocks do what depends on them for its place in time alone: they round the state that the next
// products read, and add to the segments' sums.
#include "kernels/cuda/recurrence/equations.cuh"
#include "kernels/cuda/rows/rmsnorm.cuh"

namespace mmrec::kernels {
namespace {

/// Groups of a thread in registers: one, so that a row has many threads, whose loads are all under way at once.
constexpr int kHeldGroups = 1;

/// All of a row's groups, by the threads of a block.
template <class Do>
__device__ inline void for_each_group(std::int64_t cols, Do visit) {
  for (std::int64_t group = threadIdx.x; group * kGroup < cols; group += blockDim.x) visit(group);
}

template <class A>
struct RoundRow {
  RoundState<Device, A> state;

  unsigned asides() const { return state.rounded.data == nullptr ? 0 : 1; }
  __device__ void operator()(std::int64_t row, std::int64_t cols) const {
    for_each_group(cols, [&](std::int64_t group) {
      float value[kGroup];
      load_group<true>(state.h.row(row), group, cols, value);
      store_group<true>(state.rounded.row(row), group, cols, value);
    });
  }
};

/// What the sources have in common: x, which they leave in memory.
struct StoredRow {
  static constexpr bool kVectors = true;
  MatrixView<float, Device> x;

  __device__ void again(std::int64_t row, std::int64_t group, std::int64_t cols, float (&to)[kGroup]) const {
    load_group<kVectors>(x.row(row), group, cols, to);
  }
};

/// x = the embedding of the row's token.
template <class A>
struct EmbedRow : StoredRow {
  const A* table;
  const int* tokens;
  RoundRow<A> round;

  struct Operands {
    float x[kGroup];
  };
  __device__ Operands fetch(std::int64_t row, std::int64_t group, std::int64_t cols) const {
    Operands operands;
    load_group<kVectors>(table + __ldcg(tokens + row) * cols, group, cols, operands.x);
    return operands;
  }
  __device__ void apply(std::int64_t row, std::int64_t group, std::int64_t cols, const Operands& operands,
                        float (&to)[kGroup]) const {
    store_group<kVectors>(x.row(row), group, cols, operands.x);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) to[i] = operands.x[i];
  }
  unsigned asides() const { return round.asides(); }
  __device__ void aside(unsigned /*number*/, std::int64_t row, std::int64_t cols) const { round(row, cols); }
};

/// The recurrence by a token, from its products, and x = x + h + 0.1 v + c.
template <class A>
struct AdvanceRow : StoredRow {
  AdvanceNorm<Device, A> op;

  struct Operands {
    float z[kGroup], v[kGroup], zm[kGroup], s[kGroup], g[kGroup], s_bias[kGroup], decay[kGroup], context_decay[kGroup],
        h[kGroup], x[kGroup], c[kGroup];
  };
  __device__ Operands fetch(std::int64_t row, std::int64_t group, std::int64_t cols) const {
    Operands o = {};
    load_group<kVectors>(op.z.row(row), group, cols, o.z);
    load_group<kVectors>(op.v.row(row), group, cols, o.v);
    load_group<kVectors>(op.zm.row(row), group, cols, o.zm);
    load_group<kVectors>(op.gates.row(row), group, cols, o.s);
    load_group<kVectors>(op.gates.row(row) + cols, group, cols, o.g);
    load_group<kVectors>(op.decay.row(row), group, cols, o.decay);
    load_group<kVectors>(op.h.row(row), group, cols, o.h);
    load_group<kVectors>(x.row(row), group, cols, o.x);
    if (op.gate_bias != nullptr) load_group<kVectors>(op.gate_bias, group, cols, o.s_bias);
    if (op.context_decay.data != nullptr) load_group<kVectors>(op.context_decay.row(row), group, cols, o.context_decay);
    if (op.c.data != nullptr) load_group<kVectors>(op.c.row(row), group, cols, o.c);
    return o;
  }
  __device__ void apply(std::int64_t row, std::int64_t group, std::int64_t cols, const Operands& o,
                        float (&to)[kGroup]) const {
    float state[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float gamma = decay_of(o.decay[i], op.context_decay.data != nullptr, o.context_decay[i]);
      state[i] = gated_step(o.s[i] + o.s_bias[i], o.zm[i] + o.g[i], o.z[i], gamma, op.mdi_mix)(o.h[i]);
      to[i] = residual_sum(o.x[i], state[i], o.v[i]) + o.c[i];
    }
    store_group<kVectors>(op.h.row(row), group, cols, state);
    store_group<kVectors>(op.h_rounded.row(row), group, cols, state);
    store_group<kVectors>(x.row(row), group, cols, to);
  }
};

/// x as it is, and beside the norms sum += x.
template <class A>
struct SumRow : MatrixRows<true> {
  MatrixView<double, Device> sum;
  RoundRow<A> round;

  unsigned asides() const { return 1 + round.asides(); }
  __device__ void aside(unsigned number, std::int64_t row, std::int64_t cols) const {
    if (number != 0) return round(row, cols);
    for_each_group(cols, [&](std::int64_t group) {
      double* at = sum.row(row) + group * kGroup;
      double before[kGroup];
      float value[kGroup];
      load_group<true>(x.row(row), group, cols, value);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) before[i] = __ldcg(at + i);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) at[i] = before[i] + static_cast<double>(value[i]);
    });
  }
};

}  // namespace

template <class A>
void embed_norm(Cuda& cuda, const EmbedNorm<Device, A>& op) {
  const EmbedRow<A> source{{op.x}, static_cast<const A*>(op.table.data), op.tokens, {op.next}};
  norm_rows<kHeldGroups>(cuda, source, op.norm, op.u);
}

template <class A>
void advance_norm(Cuda& cuda, const AdvanceNorm<Device, A>& op) {
  norm_rows<kHeldGroups>(cuda, AdvanceRow<A>{{op.x}, op}, op.norm, op.u);
}

template <class A>
void sum_norm(Cuda& cuda, const SumNorm<Device, A>& op) {
  norm_rows<kHeldGroups>(cuda, SumRow<A>{{op.x}, op.sum, {op.next}}, op.norm, op.u);
}

bool token_rows_pay(const Cuda& cuda, std::int64_t sequences, std::int64_t dim) {
  return cuda.compute_capability() >= 90 && sequences > kTileColumns && dim % kGroup == 0;
}

template void embed_norm(Cuda&, const EmbedNorm<Device, BFloat16>&);
template void embed_norm(Cuda&, const EmbedNorm<Device, Float16>&);
template void advance_norm(Cuda&, const AdvanceNorm<Device, BFloat16>&);
template void advance_norm(Cuda&, const AdvanceNorm<Device, Float16>&);
template void sum_norm(Cuda&, const SumNorm<Device, BFloat16>&);
template void sum_norm(Cuda&, const SumNorm<Device, Float16>&);

}  // namespace mmrec::kernels
