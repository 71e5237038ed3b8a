// The exact recurrence, token after token, in one parallel region.
//
// Each thread owns a range of channels: it computes their rows of W_g and W_mh against h_{t-1} for all sequences, then
// their h_t; one barrier per token publishes it. Its share of the gate weights stays in its own L2 where it fits. The
// products are those of `linear`, bit for bit, so neither batch nor threads nor how tokens are cut into calls matters.
#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

void gated_recurrence(Cpu& cpu, const GatedRecurrence<Host>& op) {
  const GateInputs<Host>& in = op.in;
  const std::int64_t batch = in.z.batch;
  const std::int64_t time = in.z.time;
  const std::int64_t dim = in.z.dim;
  if (batch == 0 || time == 0) return;
  const auto matvec = simd().matvec.matvec[static_cast<std::size_t>(op.gate_weight.format.code)];
  const auto step = simd().recurrence.step;

  constexpr std::int64_t kGrain = 16;         // channels; a cache line of h has one writer
  constexpr std::int64_t kLeastCost = 16384;  // multiply-adds per token worth a second thread
  const std::int64_t grains = (dim + kGrain - 1) / kGrain;
  const std::int64_t team =
      std::clamp<std::int64_t>(std::min(2 * dim * dim * batch / kLeastCost, grains), 1, cpu.threads());
  // Products of a tile of channels and sequences at a time, s above g.
  const std::int64_t sequences = std::min<std::int64_t>(batch, 48);
  const std::int64_t tile = static_cast<std::int64_t>(Cpu::kScratchFloats) / 2 / sequences / kGrain * kGrain;

  const auto advance = [&](std::int64_t t, std::int64_t begin, std::int64_t end, float* scratch) {
    for (std::int64_t b0 = 0; b0 < batch; b0 += sequences) {
      const std::int64_t count = std::min(sequences, batch - b0);
      for (std::int64_t c = begin; c < end; c += tile) {
        const std::int64_t channels = std::min(tile, end - c);
        float* s = scratch;
        float* g = scratch + count * channels;
        const float* h = in.h.at(b0, 0, t);
        matvec(h, in.h.batch_stride, count, op.gate_weight.middle_rows(c, channels).data, dim, channels, s, channels);
        matvec(h, in.h.batch_stride, count, op.gate_weight.middle_rows(dim + c, channels).data, dim, channels, g,
               channels);
        for (std::int64_t b = 0; b < count; ++b) {
          step({.s = s + b * channels,
                .bias = op.gate_bias == nullptr ? nullptr : op.gate_bias + c,
                .g = g + b * channels,
                .z = in.z.at(b0 + b, 0, t) + c,
                .zm = in.zm.at(b0 + b, 0, t) + c,
                .gamma = in.gamma.at(b0 + b, 0, t) + c,
                .h = in.h.at(b0 + b, 0, t) + c,
                .h_next = in.h.at(b0 + b, 0, t + 1) + c,
                .mdi_mix = in.mdi_mix,
                .channels = channels});
        }
      }
    }
  };

  if (team == 1) {
    for (std::int64_t t = 0; t < time; ++t) advance(t, 0, dim, cpu.scratch(0));
    return;
  }
  if (time == 1) {  // a decode step: nobody waits for anybody's h
    cpu.pool().parallel_for(
        dim, (grains + team - 1) / team * kGrain,
        [&](std::int64_t begin, std::int64_t end, int thread) { advance(0, begin, end, cpu.scratch(thread)); });
    return;
  }
  cpu.pool().run([&](int thread) {
    const std::int64_t begin = std::min(grains * std::min<std::int64_t>(thread, team) / team * kGrain, dim);
    const std::int64_t end = std::min(grains * std::min<std::int64_t>(thread + 1, team) / team * kGrain, dim);
    for (std::int64_t t = 0; t < time; ++t) {
      if (t != 0) cpu.pool().barrier();  // h_{t-1} is whole
      if (begin < end) advance(t, begin, end, cpu.scratch(thread));
    }
  });
}

}  // namespace mmrec::kernels
