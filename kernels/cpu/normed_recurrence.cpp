// The recurrence that is normed at every token, token after token, in one parallel region.
//
// As in gated_recurrence.cpp runs of any lengths go together, so that one reading of the gate matrix serves all that
// have a token, and threads share runs where there are enough for each, else channels. A token has two parts, because
// the norm needs all channels: p and the sums of its squares over pieces of kPiece channels, then the norm, whose sum
// over pieces is formed in their order. The products are those of `linear`, bit for bit, so neither neighbours nor
// threads nor how tokens are cut into calls matters.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {
namespace {

constexpr std::int64_t kPiece = 64;         // channels
constexpr std::int64_t kLeastCost = 16384;  // multiply-adds per token worth a second thread
constexpr std::int64_t kMostRuns = 48;      // runs that go together
constexpr std::int64_t kGroupRuns = 24;     // the same where a thread has runs of its own
constexpr std::int64_t kLeastRuns = 4;      // runs of a thread whose products are no longer bound by reading
constexpr std::int64_t kPanelBytes = std::int64_t{192} * 1024;  // of weights that stay in L2 for all runs' rows
constexpr std::int64_t kHalf = static_cast<std::int64_t>(Cpu::kScratchFloats) / 2;
constexpr float kLimit = 100.0F;

/// The squares of a group's runs, [runs, pieces], lie in the first half of a thread's scratch; products in the second.
double* squares_in(float* scratch) { return reinterpret_cast<double*>(scratch); }

std::int64_t pieces_of(std::int64_t dim) { return (dim + kPiece - 1) / kPiece; }
/// Runs of a group, so that their squares have room.
std::int64_t most_runs(std::int64_t dim, std::int64_t wanted) {
  return std::clamp<std::int64_t>(kHalf / 2 / pieces_of(dim), 1, wanted);
}

/// Runs [first, first + count), by falling length.
class Group {
 public:
  Group(const NormedRecurrence<Host>& op, std::int64_t first, std::int64_t count) : op_(op) {
    for (std::int64_t i = first; i < first + count; ++i) {
      if (op.runs.list[i].rows > 0) runs_[static_cast<std::size_t>(count_++)] = op.runs.list + i;
    }
    std::sort(runs_.begin(), runs_.begin() + count_, [](const BankRun* a, const BankRun* b) {
      return a->rows != b->rows ? a->rows > b->rows : a->first < b->first;
    });
  }

  std::int64_t count() const { return count_; }
  std::int64_t longest() const { return count_ == 0 ? 0 : runs_.front()->rows; }

  /// p of channels begin..end at time t, of all runs that have one; begin is a multiple of kPiece.
  void advance(std::int64_t t, std::int64_t begin, std::int64_t end, double* squares, float* products) const {
    const std::int64_t dim = op_.gate_weight.cols;
    const auto matvec = simd().matvec.matvec_rows[static_cast<std::size_t>(op_.gate_weight.format.code)];
    std::array<const float*, kMostRuns> h{};
    const std::int64_t n = standing(t);
    for (std::int64_t i = 0; i < n; ++i) h[static_cast<std::size_t>(i)] = before(*run(i), t);
    const bool has_product = t > 0 || op_.carries;
    const std::int64_t cached = kPanelBytes / static_cast<std::int64_t>(bytes_of(op_.gate_weight.format, 1, dim));
    const std::int64_t most = n <= kLeastRuns ? kHalf / n : std::min(kHalf / n, cached);
    const std::int64_t tile = std::max(most / kPiece * kPiece, kPiece);
    for (std::int64_t c = begin; c < end; c += tile) {
      const std::int64_t channels = std::min(tile, end - c);
      if (has_product) {
        matvec(h.data(), n, op_.gate_weight.middle_rows(c, channels).data, dim, channels, products, channels);
      }
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t row = run(i)->first + t;
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
  void settle(std::int64_t t, std::int64_t begin, std::int64_t end, const double* squares) const {
    const std::int64_t dim = op_.gate_weight.cols;
    const std::int64_t pieces = pieces_of(dim);
    for (std::int64_t i = 0; i < standing(t); ++i) {
      double sum = 0.0;
      for (std::int64_t piece = 0; piece < pieces; ++piece) sum += squares[i * pieces + piece];
      const auto scale = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(dim) + 1e-6));
      float* const h = op_.h.row(run(i)->first + t) + begin;
      simd().recurrence.norm_within(op_.norm + begin, scale, kLimit, h, end - begin);
      if (op_.carries && t + 1 == run(i)->rows) std::copy_n(h, end - begin, state_of(*run(i)) + begin);
    }
  }

 private:
  const BankRun* run(std::int64_t i) const { return runs_[static_cast<std::size_t>(i)]; }
  std::int64_t standing(std::int64_t t) const {
    std::int64_t n = 0;
    while (n < count_ && run(n)->rows > t) ++n;
    return n;
  }
  float* state_of(const BankRun& of) const { return of.state + op_.layer * op_.gate_weight.cols; }
  const float* before(const BankRun& of, std::int64_t t) const {
    if (t > 0) return op_.h.row(of.first + t - 1);
    return op_.carries ? state_of(of) : nullptr;
  }

  const NormedRecurrence<Host>& op_;
  std::array<const BankRun*, kMostRuns> runs_{};
  std::int64_t count_ = 0;
};

// Threads take groups of whole runs.
void share_runs(Cpu& cpu, const NormedRecurrence<Host>& op, std::int64_t team) {
  const std::int64_t dim = op.gate_weight.cols;
  const std::int64_t most = most_runs(dim, kGroupRuns);
  const std::int64_t groups = (op.runs.count + most * team - 1) / (most * team) * team;
  std::atomic<std::int64_t> next{0};
  const auto work = [&](int thread) {
    float* const scratch = cpu.scratch(thread);
    for (;;) {
      const std::int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= groups) return;
      const std::int64_t first = op.runs.count * i / groups;
      const Group group(op, first, op.runs.count * (i + 1) / groups - first);
      for (std::int64_t t = 0; t < group.longest(); ++t) {
        group.advance(t, 0, dim, squares_in(scratch), scratch + kHalf);
        group.settle(t, 0, dim, squares_in(scratch));
      }
    }
  };
  if (team == 1) return work(0);
  cpu.pool().run_sharing(work);
}

// Threads share the channels of each step.
void share_channels(Cpu& cpu, const NormedRecurrence<Host>& op, const Group& group) {
  const std::int64_t dim = op.gate_weight.cols;
  const std::int64_t pieces = pieces_of(dim);
  const std::int64_t team =
      std::clamp<std::int64_t>(std::min(dim * dim * group.count() / kLeastCost, pieces), 1, cpu.threads());
  const std::int64_t time = group.longest();
  double* const squares = squares_in(cpu.scratch(0));
  if (team == 1) {
    for (std::int64_t t = 0; t < time; ++t) {
      group.advance(t, 0, dim, squares, cpu.scratch(0) + kHalf);
      group.settle(t, 0, dim, squares);
    }
    return;
  }
  cpu.pool().run([&](int thread) {
    const std::int64_t begin = std::min(pieces * std::min<std::int64_t>(thread, team) / team * kPiece, dim);
    const std::int64_t end = std::min(pieces * std::min<std::int64_t>(thread + 1, team) / team * kPiece, dim);
    for (std::int64_t t = 0; t < time; ++t) {
      if (t != 0) cpu.pool().barrier();  // h_{t-1} is whole, and its squares have been read
      if (begin < end) group.advance(t, begin, end, squares, cpu.scratch(thread) + kHalf);
      cpu.pool().barrier();  // all squares are there
      if (begin < end) group.settle(t, begin, end, squares);
    }
  });
}

}  // namespace

void normed_recurrence(Cpu& cpu, const NormedRecurrence<Host>& op) {
  const std::int64_t runs = op.runs.count;
  const std::int64_t threads = cpu.threads();
  const bool multiplies = op.carries || op.runs.most_rows > 1;
  if (runs == 0 || op.runs.most_rows == 0) return;
  if (threads == 1 || !multiplies || runs >= kLeastRuns * threads) return share_runs(cpu, op, threads);
  const std::int64_t most = most_runs(op.gate_weight.cols, kMostRuns);
  for (std::int64_t first = 0; first < runs; first += most) {
    const Group group(op, first, std::min(most, runs - first));
    if (group.count() > 0) share_channels(cpu, op, group);
  }
}

}  // namespace mmrec::kernels
