// The rows of decode_chain.cu's norms, computed where they are normed: sources of rmsnorm.cuh. D is a multiple of 4 and
// rows are aligned to 4 channels.
#pragma once

#include "kernels/cuda/rows/rmsnorm.cuh"

namespace mmrec::kernels {

/// Groups of a thread in registers: one, so that a row has many threads, whose loads are all under way at once.
inline constexpr int kHeldGroups = 1;

/// x = the embedding of the row's token, and beside the norms h of every layer is rounded.
template <class A>
struct BeginRow {
  static constexpr bool kVectors = true;
  const A* table;
  const int* tokens;
  MatrixView<float, Device> x;
  unsigned layers;
  const float* h;           // [L, D] of the first row's sequence
  std::int64_t slot_bytes;  // from one sequence's to the next one's
  A* h_rounded;             // [L, B, D]

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
  __device__ void again(std::int64_t row, std::int64_t group, std::int64_t cols, float (&to)[kGroup]) const {
    load_group<kVectors>(x.row(row), group, cols, to);
  }
  unsigned asides() const { return layers; }
  __device__ void aside(unsigned layer, std::int64_t row, std::int64_t cols) const {
    const float* from = bytes_further(h, row * slot_bytes) + layer * cols;
    A* to = h_rounded + (layer * x.rows + row) * cols;
    for (std::int64_t group = threadIdx.x; group * kGroup < cols; group += blockDim.x) {
      float value[kGroup];
      load_group<kVectors>(from, group, cols, value);
      store_group<kVectors>(to, group, cols, value);
    }
  }
};

/// The recurrence by a token, from its products, and x += h + 0.1 v + c.
template <class A>
struct AdvanceRow {
  static constexpr bool kVectors = true;
  MatrixView<const A, Device> z, v, zm;
  MatrixView<const float, Device> gates;          // [B, 2 D]: what the gates s and g see of the state
  const float* gate_bias;                         // of s, or null
  MatrixView<const float, Device> decay;          // before its logistic function
  MatrixView<const float, Device> context_decay;  // the other factor's, or null
  float mix;
  MatrixView<float, Device> h;
  MatrixView<A, Device> h_rounded;
  MatrixView<float, Device> x;
  MatrixView<const float, Device> c = {};  // or null

  struct Operands {
    float z[kGroup], v[kGroup], zm[kGroup], s[kGroup], g[kGroup], s_bias[kGroup], decay[kGroup], context_decay[kGroup],
        h[kGroup], x[kGroup], c[kGroup];
  };
  __device__ Operands fetch(std::int64_t row, std::int64_t group, std::int64_t cols) const {
    Operands o = {};
    load_group<kVectors>(z.row(row), group, cols, o.z);
    load_group<kVectors>(v.row(row), group, cols, o.v);
    load_group<kVectors>(zm.row(row), group, cols, o.zm);
    load_group<kVectors>(gates.row(row), group, cols, o.s);
    load_group<kVectors>(gates.row(row) + cols, group, cols, o.g);
    load_group<kVectors>(decay.row(row), group, cols, o.decay);
    load_group<kVectors>(h.row(row), group, cols, o.h);
    load_group<kVectors>(x.row(row), group, cols, o.x);
    if (gate_bias != nullptr) load_group<kVectors>(gate_bias, group, cols, o.s_bias);
    if (context_decay.data != nullptr) load_group<kVectors>(context_decay.row(row), group, cols, o.context_decay);
    if (c.data != nullptr) load_group<kVectors>(c.row(row), group, cols, o.c);
    return o;
  }
  __device__ void apply(std::int64_t row, std::int64_t group, std::int64_t cols, const Operands& o,
                        float (&to)[kGroup]) const {
    float state[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float gamma = decay_of(o.decay[i], context_decay.data != nullptr, o.context_decay[i]);
      state[i] = gated_step(o.s[i] + o.s_bias[i], o.zm[i] + o.g[i], o.z[i], gamma, mix)(o.h[i]);
      to[i] = residual_sum(o.x[i], state[i], o.v[i]) + o.c[i];
    }
    store_group<kVectors>(h.row(row), group, cols, state);
    store_group<kVectors>(h_rounded.row(row), group, cols, state);
    store_group<kVectors>(x.row(row), group, cols, to);
  }
  __device__ void again(std::int64_t row, std::int64_t group, std::int64_t cols, float (&to)[kGroup]) const {
    load_group<kVectors>(x.row(row), group, cols, to);
  }
};

/// x as it is, and beside the norms sum += x.
struct RememberRow : MatrixRows<true> {
  double* sum;              // [D] of the first row's sequence
  std::int64_t slot_bytes;  // from one sequence's to the next one's

  unsigned asides() const { return 1; }
  __device__ void aside(unsigned /*number*/, std::int64_t row, std::int64_t cols) const {
    for (std::int64_t group = threadIdx.x; group * kGroup < cols; group += blockDim.x) {
      double* at = bytes_further(sum, row * slot_bytes) + group * kGroup;
      double before[kGroup];
      float value[kGroup];
      load_group<true>(x.row(row), group, cols, value);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) before[i] = __ldcg(at + i);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) at[i] = before[i] + static_cast<double>(value[i]);
    }
  }
};

}  // namespace mmrec::kernels
