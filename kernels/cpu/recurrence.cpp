// The exact recurrences, gated and normed, token after token, in one parallel region.
//
// Sequences of any lengths go together: one reading of the gate weights multiplies, at each time, all that still have a
// token. Threads share the work by one of two algorithms, chosen by the number of sequences alone (kLeastRuns):
//  * Enough sequences for each thread: every thread takes groups of whole sequences and waits for no other.
//  * Fewer: each thread owns a range of channels. It computes their rows of the gates' product with h_{t-1} for all
//    sequences, then their h_t; a barrier per token publishes it. Its share of the gate weights stays in its own L2
//    where it fits. The norm needs all channels, so a normed token has two parts with a barrier between them: p and the
//    sums of its squares over pieces of kPiece channels, then the norm, which sums the pieces in their order.
// The products are those of `linear`, bit for bit, so bits depend neither on neighbours or threads nor on how tokens
// are cut into calls.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {
namespace {

constexpr std::int64_t kLeastCost = 16384;  // multiply-adds per token worth a second thread
constexpr std::int64_t kMostRuns = 48;      // sequences that go together
constexpr std::int64_t kGroupRuns = 24;     // the same where a thread has sequences of its own
constexpr std::int64_t kLeastRuns = 4;      // sequences of a thread whose products are no longer bound by reading
constexpr std::int64_t kPanelBytes = std::int64_t{192} * 1024;  // of weights that stay in L2 for all sequences' rows
constexpr std::int64_t kHalf = static_cast<std::int64_t>(Cpu::kScratchFloats) / 2;

/// Some of an op's sequences, by falling length. Run has time().
template <class Run>
class Group {
 public:
  std::int64_t count() const { return count_; }
  std::int64_t longest() const { return count_ == 0 ? 0 : run(0).time(); }

 protected:
  void add(const Run& run) { runs_[static_cast<std::size_t>(count_++)] = run; }
  template <class Before>
  void sort(const Before& before) {
    std::sort(runs_.begin(), runs_.begin() + count_, before);
  }
  const Run& run(std::int64_t i) const { return runs_[static_cast<std::size_t>(i)]; }
  /// Those that have a token at time t come first.
  std::int64_t standing(std::int64_t t) const {
    std::int64_t n = 0;
    while (n < count_ && run(n).time() > t) ++n;
    return n;
  }
  /// Channels whose products with n states are formed at a time: they fit half a scratch, and their weights L2.
  static std::int64_t tile(std::int64_t n, const WeightView<Host>& weight, std::int64_t grain) {
    const std::int64_t cached = kPanelBytes / static_cast<std::int64_t>(bytes_of(weight.format, 1, weight.cols));
    const std::int64_t most = n <= kLeastRuns ? kHalf / n : std::min(kHalf / n, cached);
    return std::max(most / grain * grain, grain);
  }

 private:
  std::array<Run, kMostRuns> runs_{};
  std::int64_t count_ = 0;
};

struct GatedRun {
  const GateInputs<Host>* in = nullptr;
  std::int64_t b = 0;
  std::int64_t time() const { return in->z.time; }
};

/// Sequences [first, first + count) of all inputs.
class GatedGroup : public Group<GatedRun> {
 public:
  using Op = GatedRecurrences<Host>;
  static constexpr std::int64_t kGrain = 16;  // channels; a cache line of h has one writer
  static constexpr bool kNorms = false;

  GatedGroup(const Op& op, std::int64_t first, std::int64_t count) : op_(op) {
    for (const GateInputs<Host>& in : op.in) {
      for (std::int64_t b = std::max<std::int64_t>(first, 0); b < std::min(first + count, in.z.batch); ++b) {
        if (in.z.time > 0) add({&in, b});
      }
      first -= in.z.batch;
    }
    sort([](const GatedRun& a, const GatedRun& b) { return a.time() > b.time(); });
  }

  std::int64_t cost() const { return 2 * op_.gate_weight.cols * op_.gate_weight.cols * count(); }

  /// Channels begin..end of h at time t, of all sequences that have one.
  void advance(std::int64_t t, std::int64_t begin, std::int64_t end, float* scratch, float* /*common*/) const {
    const std::int64_t dim = op_.gate_weight.cols;
    const auto matvec = simd().matvec.matvec[op_.gate_weight.format.code];
    const auto step = simd().recurrence.step;
    std::array<const float*, kMostRuns> h{};
    const std::int64_t n = standing(t);
    for (std::int64_t i = 0; i < n; ++i) h[static_cast<std::size_t>(i)] = run(i).in->h.at(run(i).b, 0, t);
    const std::int64_t tile = Group::tile(n, op_.gate_weight, kGrain);
    for (std::int64_t c = begin; c < end; c += tile) {
      const std::int64_t channels = std::min(tile, end - c);
      float* s = scratch;
      float* g = scratch + n * channels;
      matvec(h.data(), n, op_.gate_weight.middle_rows(c, channels), s, channels);
      matvec(h.data(), n, op_.gate_weight.middle_rows(dim + c, channels), g, channels);
      for (std::int64_t i = 0; i < n; ++i) {
        const auto [input, b] = run(i);
        const GateInputs<Host>& in = *input;
        step({.s = s + i * channels,
              .bias = op_.gate_bias == nullptr ? nullptr : op_.gate_bias + c,
              .g = g + i * channels,
              .z = in.z.at(b, 0, t) + c,
              .zm = in.zm.at(b, 0, t) + c,
              .gamma = in.gamma.at(b, 0, t) + c,
              .h = in.h.at(b, 0, t) + c,
              .h_next = in.h.at(b, 0, t + 1) + c,
              .mdi_mix = in.mdi_mix,
              .channels = channels});
      }
    }
  }

 private:
  const Op& op_;
};

struct NormedRun {
  const BankRun* at = nullptr;
  std::int64_t time() const { return at->rows; }
};

/// Runs [first, first + count). The squares of a group's runs, [runs, pieces], lie in the first half of a scratch that
/// all threads of the group have in common, products in the second half of each thread's.
class NormedGroup : public Group<NormedRun> {
 public:
  using Op = NormedRecurrence<Host>;
  static constexpr std::int64_t kPiece = 64, kGrain = kPiece;  // channels
  static constexpr bool kNorms = true;

  NormedGroup(const Op& op, std::int64_t first, std::int64_t count) : op_(op) {
    for (std::int64_t i = first; i < first + count; ++i) {
      if (op.runs.list[i].rows > 0) add({op.runs.list + i});
    }
    sort([](const NormedRun& a, const NormedRun& b) {
      return a.time() != b.time() ? a.time() > b.time() : a.at->first < b.at->first;
    });
  }

  static std::int64_t pieces_of(std::int64_t dim) { return (dim + kPiece - 1) / kPiece; }
  /// Runs of a group, so that their squares have room.
  static std::int64_t most_runs(std::int64_t dim, std::int64_t wanted) {
    return std::clamp<std::int64_t>(kHalf / 2 / pieces_of(dim), 1, wanted);
  }

  std::int64_t cost() const { return op_.gate_weight.cols * op_.gate_weight.cols * count(); }

  /// p of channels begin..end at time t, of all runs that have one; begin is a multiple of kPiece.
  void advance(std::int64_t t, std::int64_t begin, std::int64_t end, float* scratch, float* common) const {
    const std::int64_t dim = op_.gate_weight.cols;
    const auto matvec = simd().matvec.matvec[op_.gate_weight.format.code];
    auto* const squares = reinterpret_cast<double*>(common);
    float* const products = scratch + kHalf;
    std::array<const float*, kMostRuns> h{};
    const std::int64_t n = standing(t);
    for (std::int64_t i = 0; i < n; ++i) h[static_cast<std::size_t>(i)] = before(*run(i).at, t);
    const bool has_product = t > 0 || op_.carries;
    const std::int64_t tile = Group::tile(n, op_.gate_weight, kPiece);
    for (std::int64_t c = begin; c < end; c += tile) {
      const std::int64_t channels = std::min(tile, end - c);
      if (has_product) {
        matvec(h.data(), n, op_.gate_weight.middle_rows(c, channels), products, channels);
      }
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t row = run(i).at->first + t;
        float* const p = op_.h.row(row) + c;
        simd().recurrence.normed_step({.product = has_product ? products + i * channels : nullptr,
                                       .bias = op_.gate_bias == nullptr ? nullptr : op_.gate_bias + c,
                                       .zm = op_.zm.row(row) + c,
                                       .z = op_.z.row(row) + c,
                                       .gamma = has_product ? op_.gamma.row(row) + c : nullptr,
                                       .h = has_product ? h[static_cast<std::size_t>(i)] + c : nullptr,
                                       .p = p,
                                       .channels = channels});
        for (std::int64_t piece = 0; piece < channels; piece += kPiece) {
          squares[i * pieces_of(dim) + (c + piece) / kPiece] =
              simd().pointwise.sum_squares(p + piece, std::min(kPiece, channels - piece));
        }
      }
    }
  }

  /// h of channels begin..end from p, when all squares are there.
  void settle(std::int64_t t, std::int64_t begin, std::int64_t end, const float* common) const {
    constexpr float kLimit = 100.0F;
    const auto* const squares = reinterpret_cast<const double*>(common);
    const std::int64_t dim = op_.gate_weight.cols;
    const std::int64_t pieces = pieces_of(dim);
    for (std::int64_t i = 0; i < standing(t); ++i) {
      const BankRun& of = *run(i).at;
      double sum = 0.0;
      for (std::int64_t piece = 0; piece < pieces; ++piece) sum += squares[i * pieces + piece];
      const auto scale = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(dim) + 1e-6));
      float* const h = op_.h.row(of.first + t) + begin;
      simd().recurrence.norm_within(op_.norm + begin, scale, kLimit, h, end - begin);
      if (op_.carries && t + 1 == of.rows) std::copy_n(h, end - begin, state_of(of) + begin);
    }
  }

 private:
  float* state_of(const BankRun& of) const { return of.state + op_.layer * op_.gate_weight.cols; }
  const float* before(const BankRun& of, std::int64_t t) const {
    if (t > 0) return op_.h.row(of.first + t - 1);
    return op_.carries ? state_of(of) : nullptr;
  }

  const Op& op_;
};

/// All tokens of a group, by one thread.
template <class Group>
void run_alone(const Group& group, std::int64_t dim, float* scratch) {
  for (std::int64_t t = 0; t < group.longest(); ++t) {
    group.advance(t, 0, dim, scratch, scratch);
    if constexpr (Group::kNorms) group.settle(t, 0, dim, scratch);
  }
}

/// Threads take groups of up to `most` whole sequences.
template <class Group>
void share_runs(Cpu& cpu, const typename Group::Op& op, std::int64_t runs, std::int64_t most) {
  const std::int64_t team = cpu.threads();
  const std::int64_t groups = (runs + most * team - 1) / (most * team) * team;
  cpu.pool().share_items(groups, [&](std::int64_t i, int thread) {
    const std::int64_t first = runs * i / groups;
    const Group group(op, first, runs * (i + 1) / groups - first);
    run_alone(group, op.gate_weight.cols, cpu.scratch(thread));
  });
}

/// Threads share the channels of each step; groups of up to `most` sequences go one after another.
template <class Group>
void share_channels(Cpu& cpu, const typename Group::Op& op, std::int64_t runs, std::int64_t most) {
  const std::int64_t dim = op.gate_weight.cols;
  const std::int64_t grains = (dim + Group::kGrain - 1) / Group::kGrain;
  for (std::int64_t first = 0; first < runs; first += most) {
    const Group group(op, first, std::min(most, runs - first));
    if (group.count() == 0) continue;
    const std::int64_t team = std::clamp<std::int64_t>(std::min(group.cost() / kLeastCost, grains), 1, cpu.threads());
    float* const common = cpu.scratch(0);
    if (team == 1) {
      run_alone(group, dim, common);
    } else if (!Group::kNorms && group.longest() == 1) {  // a decode step: nobody waits for anybody's h
      cpu.pool().parallel_for(dim, (grains + team - 1) / team * Group::kGrain,
                              [&](std::int64_t begin, std::int64_t end, int thread) {
                                group.advance(0, begin, end, cpu.scratch(thread), common);
                              });
    } else {
      cpu.pool().run([&](int thread) {
        const auto border = [&](std::int64_t i) {
          return std::min(grains * std::min(i, team) / team * Group::kGrain, dim);
        };
        const std::int64_t begin = border(thread), end = border(thread + 1);
        for (std::int64_t t = 0; t < group.longest(); ++t) {
          if (t != 0) cpu.pool().barrier();  // h_{t-1} is whole, and its squares have been read
          if (begin < end) group.advance(t, begin, end, cpu.scratch(thread), common);
          if constexpr (Group::kNorms) {
            cpu.pool().barrier();  // all squares are there
            if (begin < end) group.settle(t, begin, end, common);
          }
        }
      });
    }
  }
}

/// Of the products with the states that are there now.
void tell(LinearObserver& observer, const GatedRecurrences<Host>& op) {
  for (const GateInputs<Host>& in : op.in) {
    for (std::int64_t b = 0; b < in.z.batch; ++b) {
      const Linear<Host> product = {.x = {in.h.at(b, 0, 0), in.z.time, in.h.dim, in.h.time_stride},
                                    .weight = op.gate_weight};
      observer.observe({&product, 1});
    }
  }
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
  if (longest > 1 && runs >= kLeastRuns * cpu.threads()) {
    share_runs<GatedGroup>(cpu, op, runs, kGroupRuns);
  } else {
    share_channels<GatedGroup>(cpu, op, runs, kMostRuns);
  }
  if (cpu.observer != nullptr) tell(*cpu.observer, op);
}

void gated_recurrence(Cpu& cpu, const GatedRecurrence<Host>& op) {
  gated_recurrences(cpu, {.in = {&op.in, 1}, .gate_weight = op.gate_weight, .gate_bias = op.gate_bias});
}

void normed_recurrence(Cpu& cpu, const NormedRecurrence<Host>& op) {
  const std::int64_t runs = op.runs.count;
  const std::int64_t dim = op.gate_weight.cols;
  const bool multiplies = op.carries || op.runs.most_rows > 1;
  if (runs == 0 || op.runs.most_rows == 0) return;
  if (cpu.threads() == 1 || !multiplies || runs >= kLeastRuns * cpu.threads()) {
    return share_runs<NormedGroup>(cpu, op, runs, NormedGroup::most_runs(dim, kGroupRuns));
  }
  share_channels<NormedGroup>(cpu, op, runs, NormedGroup::most_runs(dim, kMostRuns));
}

}  // namespace mmrec::kernels
