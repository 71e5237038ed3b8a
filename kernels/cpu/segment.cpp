// The mean of a block's outputs over a segment: an fp64 sum that grows in order of time, and its close. In fp64 and in
// order, so that how the segment was cut into calls leaves no trace in the bits.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

void segment_sum(Cpu& cpu, const SegmentSum<Host>& op) {
  const auto add_rows = simd().pointwise.add_rows;
  constexpr std::int64_t kChannels = 64;
  const std::int64_t tiles = (op.x.dim + kChannels - 1) / kChannels;
  const std::int64_t grain = 1 + kElementsPerThread / (kChannels * (op.x.time + 1));
  cpu.pool().parallel_for(op.x.batch * tiles, grain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t b = i / tiles;
      const std::int64_t c = i % tiles * kChannels;
      const std::int64_t channels = op.x.dim - c < kChannels ? op.x.dim - c : kChannels;
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
