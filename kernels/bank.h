// Ops of models whose recurrence norms its own state and whose memory is a bank of past states (models/mmrec_jax).
// Rules and notation are those of kernels/backend.h.
//
// The rows of a call are those of several runs, one sequence each, packed one after another; they lie anywhere, so a
// list in memory of Space says where their rows, states and banks are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/backend.h"

namespace mmrec::kernels {

/// A run of one sequence: rows [first, first + rows) of a call.
struct BankRun {
  float* state = nullptr;  // h before the run and behind it, [D] a layer; null: the run begins at 0 and leaves nothing
  float* bank = nullptr;   // [S, D], 16-byte aligned; null: the run has none
  std::int32_t first = 0;
  std::int32_t rows = 0;
  std::int32_t used = 0;  // rows of the bank that are written when the call begins

  /// Rows that are written when layer `layer` of the call begins, every layer before having written its own.
  MMREC_HOST_DEVICE constexpr std::int64_t used_before(std::int64_t layer, std::int64_t slots) const {
    const std::int64_t n = used + layer * rows;
    return n < slots ? n : slots;
  }
};

/// The runs of a call, in any order; devices take some together that follow each other, so runs of like length should.
template <class Space>
struct BankRuns {
  const BankRun* list = nullptr;     // [count], in memory of Space
  const BankRun* on_host = nullptr;  // the same; list itself for Host
  std::int64_t count = 0;
  std::int64_t most_rows = 0;  // of a run
};

/// The recurrence whose state is normed at every token, run by run, from h_{-1} = 0 or the run's state:
///   m_t = σ(zm_t + W h_{t-1} + b),  p_t = (1 − m_t + γ_t) ⊙ h_{t-1} + m_t ⊙ z_t
///   h_t = clamp(norm ⊙ p_t / √(mean(p_t²) + 1e-6), ±100)
/// z, zm, gamma, h [n, D]; gate_weight W [D, D], gate_bias b [D]. W multiplies h_rounded: h rounded to A, the same
/// memory as h for A = float. A run's state lies layer * D floats behind what the list says. Where runs have no state
/// (all or none have one) nothing is multiplied at their first tokens, and where no run has a second one γ is not read.
/// Squares are summed in fp64 or, on a device, in fp32 by a fixed order. A run's bits do not depend on the others, nor,
/// where they have states, on how tokens are cut into calls.
template <class Space, class A = float>
struct NormedRecurrence {
  MatrixView<const A, Space> z;
  MatrixView<const float, Space> zm;
  MatrixView<const float, Space> gamma;  // may be empty where nothing has an h_{t-1} but 0
  MatrixView<float, Space> h;
  MatrixView<A, Space> h_rounded;
  WeightView<Space> gate_weight;
  const float* gate_bias = nullptr;
  const float* norm = nullptr;
  BankRuns<Space> runs;
  bool carries = false;  // runs have states
  std::int64_t layer = 0;
};

/// Softmax attention of one head to all S rows of a run's bank, key and value alike:
///   out = softmax(scale q · Bankᵀ) · Bank
/// over S = `slots` rows, of which the unwritten count with score 0 and value 0. q, out [n, D]; out may alias q.
/// scratch, `scratch_bytes` long and 16-byte aligned, is for devices: bank_scratch_bytes() says how much is of use.
template <class Space, class A = float>
struct BankAttention {
  MatrixView<const A, Space> q;
  MatrixView<A, Space> out;
  float scale = 1.0F;
  BankRuns<Space> runs;
  std::int64_t slots = 0;
  std::int64_t layer = 0;
  std::byte* scratch = nullptr;
  std::size_t scratch_bytes = 0;
};

/// Puts a run's h, [n, D], into its bank: with n rows written, row i goes to row n + i while that is below S, the
/// others to rows 0, 1, …. Requires: no run has more than S rows.
template <class Space>
struct BankWrite {
  MatrixView<const float, Space> h;
  BankRuns<Space> runs;
  std::int64_t slots = 0;
  std::int64_t layer = 0;
};

/// Makes a list of runs whose slots lie evenly spaced, in memory of Space: run i is `first` with i times its rows added
/// to its first row, and its state and bank i * apart bytes further. Of backends whose lists are not the host's.
template <class Space>
struct SpacedRuns {
  BankRun first;
  std::int64_t apart = 0;
  std::int64_t count = 0;
  BankRun* list = nullptr;
};

}  // namespace mmrec::kernels
