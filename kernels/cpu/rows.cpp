// Ops that work row by row: embedding, norms, gates, residuals, copies; and a segment's sums.
//
// A segment's sum grows in fp64 and in order of time, so how the segment was cut into calls changes no bit.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {
namespace {

/// f(row) for every row of `cols` elements, shared out to threads.
template <class F>
void for_each_row(Cpu& cpu, std::int64_t rows, std::int64_t cols, const F& f) {
  cpu.pool().parallel_for(rows, rows_per_thread(cols), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) f(r);
  });
}

}  // namespace

void embed(Cpu& cpu, const WeightView<Host>& table, const int* tokens, MatrixView<float, Host> x) {
  const auto widen = simd().matvec.widen[table.format.code];
  for_each_row(cpu, x.rows, x.cols, [&](std::int64_t r) { widen(table.middle_rows(tokens[r], 1), x.row(r)); });
}

void rmsnorm(Cpu& cpu, MatrixView<const float, Host> x, const float* weight, MatrixView<float, Host> y,
             NormEpsilon epsilon) {
  const PointwiseKernels& kernels = simd().pointwise;
  const double beside = epsilon == NormEpsilon::kBesideRoot ? 1e-6 : 0.0;
  const double inside = epsilon == NormEpsilon::kInsideRoot ? 1e-6 : 0.0;
  for_each_row(cpu, x.rows, x.cols, [&](std::int64_t r) {
    const double mean = kernels.sum_squares(x.row(r), x.cols) / static_cast<double>(x.cols);
    const double root = std::sqrt(mean + inside) + beside;
    kernels.scale_by(x.row(r), weight, static_cast<float>(1.0 / root), y.row(r), x.cols);
  });
}

void decay_gate(Cpu& cpu, const DecayGate<Host>& op) {
  for_each_row(cpu, op.gamma.rows, op.gamma.cols, [&, run = simd().pointwise.decay_gate](std::int64_t r) {
    run(op.a.row(r), op.c.data == nullptr ? nullptr : op.c.row(r), op.gamma.row(r), op.gamma.cols);
  });
}

void block_residual(Cpu& cpu, const BlockResidual<Host>& op) {
  const auto run = simd().pointwise.block_residual;
  for_each_row(cpu, op.y.batch * op.y.time, op.y.dim, [&](std::int64_t r) {
    const std::int64_t b = r / op.y.time;
    const std::int64_t t = r % op.y.time;
    run(op.x.at(b, 0, t), op.h.at(b, 0, t), op.v.at(b, 0, t),
        op.bias == nullptr ? nullptr : op.bias + b * op.bias_stride, op.y.at(b, 0, t), op.y.dim);
  });
}

// Copies between state and activations are small, so they run on the calling thread.
void copy_rows(Cpu& /*cpu*/, MatrixView<const float, Host> from, MatrixView<float, Host> to) {
  for (std::int64_t r = 0; r < from.rows; ++r) std::copy_n(from.row(r), from.cols, to.row(r));
}

void fill_zero(Cpu& /*cpu*/, MatrixView<float, Host> to) {
  for (std::int64_t r = 0; r < to.rows; ++r) std::fill_n(to.row(r), to.cols, 0.0F);
}

void segment_sum(Cpu& cpu, const SegmentSum<Host>& op) {
  const auto add_rows = simd().pointwise.add_rows;
  constexpr std::int64_t kChannels = 64;
  const std::int64_t tiles = (op.x.dim + kChannels - 1) / kChannels;
  const std::int64_t grain = 1 + kElementsPerThread / (kChannels * (op.x.time + 1));
  cpu.pool().parallel_for(op.x.batch * tiles, grain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t b = i / tiles;
      const std::int64_t c = i % tiles * kChannels;
      const std::int64_t channels = std::min(op.x.dim - c, kChannels);
      add_rows(op.x.at(b, 0, 0) + c, op.x.time_stride, op.x.time, op.sum.row(b) + c, channels);
    }
  });
}

void segment_close(Cpu& /*cpu*/, MatrixView<double, Host> sum, std::int64_t segment, MatrixView<float, Host> slot) {
  for (std::int64_t b = 0; b < slot.rows; ++b) {
    for (std::int64_t c = 0; c < slot.cols; ++c) {
      slot.row(b)[c] = static_cast<float>(sum.row(b)[c] / static_cast<double>(segment));
      sum.row(b)[c] = 0.0;
    }
  }
}

}  // namespace mmrec::kernels
