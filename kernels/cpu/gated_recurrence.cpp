// The exact recurrence, token after token, in one parallel region.
//
// Sequences of any lengths go together: at each time those that still have a token are multiplied with one reading of
// the gate weights. Threads share the work in one of two ways, by the number of sequences alone (kLeastRuns):
//  * Enough sequences for each thread: every thread takes groups of whole sequences, and nobody waits for anybody.
//  * Fewer: each thread owns a range of channels: it computes their rows of W_g and W_mh against h_{t-1} for all
//    sequences, then their h_t; one barrier per token publishes it. Its share of the gate weights stays in its own L2
//    where it fits.
// The products are those of `linear`, bit for bit, so neither neighbours nor threads nor how tokens are cut into calls
// matters.
#include <algorithm>
#include <array>
#include <atomic>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {
namespace {

constexpr std::int64_t kGrain = 16;         // channels; a cache line of h has one writer
constexpr std::int64_t kLeastCost = 16384;  // multiply-adds per token worth a second thread
constexpr std::int64_t kMostRuns = 48;      // sequences that go together
constexpr std::int64_t kGroupRuns = 24;     // the same where a thread has sequences of its own
constexpr std::int64_t kLeastRuns = 4;      // sequences of a thread whose products are no longer bound by reading
constexpr std::int64_t kPanelBytes = std::int64_t{192} * 1024;  // of weights that stay in L2 for all sequences' rows

/// One sequence.
struct Run {
  const GateInputs<Host>* in = nullptr;
  std::int64_t b = 0;
  std::int64_t time() const { return in->z.time; }
};

/// Sequences [first, first + count) of all inputs, by falling length.
class Group {
 public:
  Group(const GatedRecurrences<Host>& op, std::int64_t first, std::int64_t count) : op_(op) {
    for (const GateInputs<Host>& in : op.in) {
      for (std::int64_t b = std::max<std::int64_t>(first, 0); b < std::min(first + count, in.z.batch); ++b) {
        if (in.z.time > 0) runs_[static_cast<std::size_t>(count_++)] = {&in, b};
      }
      first -= in.z.batch;
    }
    std::sort(runs_.begin(), runs_.begin() + count_, [](const Run& a, const Run& b) { return a.time() > b.time(); });
  }

  std::int64_t count() const { return count_; }
  std::int64_t longest() const { return count_ == 0 ? 0 : runs_.front().time(); }

  /// Channels begin..end of h at time t, of all sequences that have one.
  void advance(std::int64_t t, std::int64_t begin, std::int64_t end, float* scratch) const {
    const std::int64_t dim = op_.gate_weight.cols;
    const auto matvec = simd().matvec.matvec_rows[static_cast<std::size_t>(op_.gate_weight.format.code)];
    const auto step = simd().recurrence.step;
    std::array<const float*, kMostRuns> h{};
    std::int64_t n = 0;
    for (; n < count_ && runs_[static_cast<std::size_t>(n)].time() > t; ++n) {
      const Run& run = runs_[static_cast<std::size_t>(n)];
      h[static_cast<std::size_t>(n)] = run.in->h.at(run.b, 0, t);
    }
    // Products of a tile of channels at a time, s above g.
    const std::int64_t held = static_cast<std::int64_t>(Cpu::kScratchFloats) / 2 / n;
    const std::int64_t cached = kPanelBytes / static_cast<std::int64_t>(bytes_of(op_.gate_weight.format, 1, dim));
    const std::int64_t most = n <= kLeastRuns ? held : std::min(held, cached);
    const std::int64_t tile = std::max(most / kGrain * kGrain, kGrain);
    for (std::int64_t c = begin; c < end; c += tile) {
      const std::int64_t channels = std::min(tile, end - c);
      float* s = scratch;
      float* g = scratch + n * channels;
      matvec(h.data(), n, op_.gate_weight.middle_rows(c, channels).data, dim, channels, s, channels);
      matvec(h.data(), n, op_.gate_weight.middle_rows(dim + c, channels).data, dim, channels, g, channels);
      for (std::int64_t i = 0; i < n; ++i) {
        const Run& run = runs_[static_cast<std::size_t>(i)];
        const GateInputs<Host>& in = *run.in;
        step({.s = s + i * channels,
              .bias = op_.gate_bias == nullptr ? nullptr : op_.gate_bias + c,
              .g = g + i * channels,
              .z = in.z.at(run.b, 0, t) + c,
              .zm = in.zm.at(run.b, 0, t) + c,
              .gamma = in.gamma.at(run.b, 0, t) + c,
              .h = in.h.at(run.b, 0, t) + c,
              .h_next = in.h.at(run.b, 0, t + 1) + c,
              .mdi_mix = in.mdi_mix,
              .channels = channels});
      }
    }
  }

 private:
  const GatedRecurrences<Host>& op_;
  std::array<Run, kMostRuns> runs_;
  std::int64_t count_ = 0;
};

// Threads take groups of whole sequences.
void share_runs(Cpu& cpu, const GatedRecurrences<Host>& op, std::int64_t runs, std::int64_t team) {
  const std::int64_t dim = op.gate_weight.cols;
  const std::int64_t groups = (runs + kGroupRuns * team - 1) / (kGroupRuns * team) * team;
  std::atomic<std::int64_t> next{0};
  const auto work = [&](int thread) {
    for (;;) {
      const std::int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= groups) return;
      const std::int64_t first = runs * i / groups;
      const Group group(op, first, runs * (i + 1) / groups - first);
      for (std::int64_t t = 0; t < group.longest(); ++t) group.advance(t, 0, dim, cpu.scratch(thread));
    }
  };
  if (team == 1) return work(0);
  cpu.pool().run_sharing(work);
}

// Threads share the channels of each step.
void share_channels(Cpu& cpu, const GatedRecurrences<Host>& op, const Group& group) {
  const std::int64_t dim = op.gate_weight.cols;
  const std::int64_t grains = (dim + kGrain - 1) / kGrain;
  const std::int64_t team =
      std::clamp<std::int64_t>(std::min(2 * dim * dim * group.count() / kLeastCost, grains), 1, cpu.threads());
  const std::int64_t time = group.longest();
  if (team == 1) {
    for (std::int64_t t = 0; t < time; ++t) group.advance(t, 0, dim, cpu.scratch(0));
    return;
  }
  if (time == 1) {  // a decode step: nobody waits for anybody's h
    cpu.pool().parallel_for(
        dim, (grains + team - 1) / team * kGrain,
        [&](std::int64_t begin, std::int64_t end, int thread) { group.advance(0, begin, end, cpu.scratch(thread)); });
    return;
  }
  cpu.pool().run([&](int thread) {
    const std::int64_t begin = std::min(grains * std::min<std::int64_t>(thread, team) / team * kGrain, dim);
    const std::int64_t end = std::min(grains * std::min<std::int64_t>(thread + 1, team) / team * kGrain, dim);
    for (std::int64_t t = 0; t < time; ++t) {
      if (t != 0) cpu.pool().barrier();  // h_{t-1} is whole
      if (begin < end) group.advance(t, begin, end, cpu.scratch(thread));
    }
  });
}

}  // namespace

void gated_recurrences(Cpu& cpu, const GatedRecurrences<Host>& op) {
  std::int64_t runs = 0;
  std::int64_t longest = 0;
  for (const GateInputs<Host>& in : op.in) {
    runs += in.z.batch;
    longest = std::max(longest, in.z.time);
  }
  if (runs == 0 || longest == 0) return;
  const std::int64_t threads = cpu.threads();
  if (longest > 1 && runs >= kLeastRuns * threads) return share_runs(cpu, op, runs, threads);
  for (std::int64_t first = 0; first < runs; first += kMostRuns) {
    const Group group(op, first, std::min(kMostRuns, runs - first));
    if (group.count() > 0) share_channels(cpu, op, group);
  }
}

void gated_recurrence(Cpu& cpu, const GatedRecurrence<Host>& op) {
  gated_recurrences(cpu, {.in = {&op.in, 1}, .gate_weight = op.gate_weight, .gate_bias = op.gate_bias});
}

}  // namespace mmrec::kernels
