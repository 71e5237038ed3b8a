// The three scans over time, against a float64 loop over time. What they promise alike is tested once, for every scan
// and type; values that are special to one of them follow. Longer than other files: it is three ops and their algos.

#include "tests/ops/op_test.h"
#if defined(MMREC_TEST_CUDA)
#include "kernels/cuda/scan/algo.h"
#endif

namespace mmrec::kernels::test {
namespace {

#if !defined(MMREC_TEST_CUDA)
enum class ScanAlgo : std::uint8_t { kOnly };
#endif

/// `op` by `algo`, which only a GPU can force.
template <class Op>
ScanAlgo scan(Backend& on, const Op& op, [[maybe_unused]] std::optional<ScanAlgo> algo = {}) {
  const auto call = [&](auto... forced) {
    if constexpr (requires { op.log_a; }) {
      return decay_scan(on, op, forced...);
    } else if constexpr (requires { op.gamma; }) {
      return exp_product_scan(on, op, forced...);
    } else {
      return logsumexp_scan(on, op, forced...);
    }
  };
#if defined(MMREC_TEST_CUDA)
  return call(algo);
#else
  call();
  return {};
#endif
}

struct ScanLayout {
  std::int64_t batch = 1, heads = 1, time = 0, dim = 0;
  std::int64_t padding = 0;   // unused elements after every row
  std::int64_t offset = 0;    // unused elements before the first: 1 leaves nothing aligned
  bool heads_inside = false;  // [B, T, H, d] instead of [B, H, T, d]
  std::int64_t channels() const { return batch * heads * dim; }
};
std::ostream& operator<<(std::ostream& out, const ScanLayout& l) {
  return out << "B " << l.batch << ", H " << l.heads << ", T " << l.time << ", D " << l.dim << " + " << l.padding
             << ", offset " << l.offset << (l.heads_inside ? ", heads inside" : "");
}

/// A host copy of an operand, filled with NaN.
template <class T>
class ScanOperand {
 public:
  explicit ScanOperand(const ScanLayout& layout) : layout_(layout) {
    const std::int64_t row = layout.dim + layout.padding;
    view_.batch = layout.batch, view_.heads = layout.heads, view_.time = layout.time, view_.dim = layout.dim;
    view_.time_stride = layout.heads_inside ? row * layout.heads : row;
    view_.head_stride = layout.heads_inside ? row : row * layout.time;
    view_.batch_stride = row * layout.time * layout.heads;
    data.assign(static_cast<std::size_t>(layout.offset + view_.batch_stride * layout.batch), nan_of<T>());
  }

  const ScanLayout& layout() const { return layout_; }
  /// `channel` counts batch, head and dim.
  T& at(std::int64_t channel, std::int64_t time) { return data[index(channel, time)]; }
  double value(std::int64_t channel, std::int64_t time) const {
    return static_cast<double>(to_float(data[index(channel, time)]));
  }
  /// Every element by next(time, channel, draws), whose draws follow from (seed, time, channel) alone.
  template <class Next>
  ScanOperand& fill(std::uint64_t seed, const Next& next) {
    const std::int64_t channels = layout_.channels();
    parallel_for(channels / std::max<std::int64_t>(layout_.dim, 1) * layout_.time, [&](std::int64_t row) {
      const std::int64_t t = row % layout_.time, first = row / layout_.time * layout_.dim;
      T* to = data.data() + first_index(first) + static_cast<std::size_t>(t * view_.time_stride);
      for (std::int64_t c = first; c < first + layout_.dim; ++c) {
        Draws draws(seed, static_cast<std::uint64_t>(t * channels + c));
        *to++ = from_float<T>(static_cast<float>(next(t, c, draws)));
      }
    });
    return *this;
  }
  template <class Next>
  ScanOperand& fill(const Next& next) {
    return fill(0, [&](std::int64_t t, std::int64_t c, Draws&) { return next(t, c); });
  }
  /// Where a channel's first time lies in `data`; the next lies `time_stride` after it.
  std::size_t first_index(std::int64_t channel) const {
    const std::int64_t sequence = channel / layout_.dim;
    return static_cast<std::size_t>(layout_.offset + sequence / layout_.heads * view_.batch_stride +
                                    sequence % layout_.heads * view_.head_stride + channel % layout_.dim);
  }
  std::size_t time_stride() const { return static_cast<std::size_t>(view_.time_stride); }
  /// Times [first, first + count) of the view on backend memory that holds `data`.
  SequenceView<T, Space> on(Buffer<T>& buffer, std::int64_t first, std::int64_t count) const {
    SequenceView<T, Space> view = view_;
    view.data = buffer.data() + layout_.offset + first * view.time_stride;
    view.time = count;
    return view;
  }
  /// Whether every element between the rows is NaN still.
  bool gaps_are_unwritten() const {
    for (std::int64_t i = 0; i < std::ssize(data); ++i) {
      const bool gap = i < layout_.offset || (i - layout_.offset) % (layout_.dim + layout_.padding) >= layout_.dim;
      if (gap && !std::isnan(to_float(data[static_cast<std::size_t>(i)]))) return false;
    }
    return true;
  }

  std::vector<T> data;

 private:
  std::size_t index(std::int64_t channel, std::int64_t time) const {
    return first_index(channel) + static_cast<std::size_t>(time) * time_stride();
  }

  ScanLayout layout_;
  SequenceView<T, Space> view_;
};

/// Largest error relative to what is allowed, and where.
class WorstError {
 public:
  void add(double got, double expected, double allowed, std::int64_t time, std::int64_t channel) {
    if (got == expected || (std::isnan(got) && std::isnan(expected))) return;
    const double error = std::abs(got - expected) / allowed;
    if (error <= worst_) return;
    worst_ = std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
    time_ = time, channel_ = channel;
  }
  void add(const WorstError& other) {
    if (other.worst_ > worst_) *this = other;
  }
  ::testing::AssertionResult below(double bound) const {
    if (worst_ < bound) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << worst_ << " times the error allowed, at time " << time_ << ", channel "
                                         << channel_;
  }

 private:
  double worst_ = 0.0;
  std::int64_t time_ = -1, channel_ = -1;
};

// What is special to a scan: its operands, drawn by variants (the usual ones first), its step in float64 and the error
// allowed of an output (log_y too, where there is one) and of a carry.

struct Decay {
  static constexpr const char* kName = "decay";
  static constexpr float kTimed = 1.0F;  // the variant that benches time
  static constexpr std::size_t kInputs = 2;
  static constexpr float kVariants[] = {0.0F, 1.0F};
  static constexpr int kUsual = 1;

  template <class T>
  static DecayScan<T, Space> op(const std::vector<SequenceView<T, Space>>& in, SequenceView<T, Space> out,
                                SequenceView<float, Space> /*log*/, const float* carry_in, float* carry_out) {
    return {in[0], in[1], out, carry_in, carry_out};
  }
  /// Decays in [0.9, 1], one in twenty exactly 1, short spans of up to 1.2; b of both signs with zeros. Variant 1: b
  /// and the logarithms of decays in [-0.1, 0).
  static double draw(std::size_t input, float variant, std::int64_t t, Draws& draw) {
    if (variant == 1.0F) return draw.uniform(-0.1, 0.0);
    if (input == 1) return draw.uniform(0.0, 1.0) < 0.1 ? 0.0 : draw.normal(0.0, 0.1);
    if (draw.uniform(0.0, 1.0) < 0.05) return 0.0;
    return std::log(t % 1024 < 8 ? draw.uniform(1.0, 1.2) : draw.uniform(0.9, 1.0));
  }
  static double draw_carry(float, Draws& draw) { return draw.normal(0.0, 0.1); }

  static constexpr double kIdentity = 0.0;
  struct State {
    double x, size;
  };
  static State start(double carry) { return {carry, std::abs(carry)}; }
  static void step(State& s, const std::array<double, 2>& in) {
    const double a = std::exp(in[0]);
    s = {a * s.x + in[1], a * s.size + std::abs(in[1])};
  }
  /// Relative where terms do not cancel, else relative to a part of the sum of magnitudes. On a GPU, which computes a
  /// step in fp32, the part is a twentieth, and 1e-5 of it is four units in the last place. Rounding to T comes on top.
  static double allowed(const State& s) {
    return 1e-5 * (std::max(std::abs(s.x), (kOnCuda ? 0.05 : 0.01) * s.size) + 1e-30);
  }
  template <class T>
  static void check(const State& s, double got, const float* /*log*/, WorstError& worst, std::int64_t t,
                    std::int64_t ch) {
    const double rounding = sizeof(T) == 2 ? kHalfUnit<T> * std::abs(s.x) * 1.001 + 0x1p-25 : 0.0;
    worst.add(std::isnan(got) ? got : s.x + std::max(0.0, std::abs(got - s.x) - rounding), s.x, allowed(s), t, ch);
  }
  static void check_carry(const State& s, double got, WorstError& worst, std::int64_t ch) {
    worst.add(got, s.x, allowed(s), -1, ch);
  }
  /// Of what cuts may change: each rounds the state to fp32, and a memory of ten to twenty steps adds that many up.
  static double allowed_by_cuts(double expected) { return 2e-5 * std::max(std::abs(expected), 0.02); }
};

struct ExpProduct {
  static constexpr const char* kName = "exp_product";
  static constexpr float kTimed = 0.9F;
  static constexpr std::size_t kInputs = 1;
  static constexpr float kVariants[] = {0.9F, 0.0F};  // the least gate
  static constexpr int kUsual = 2;

  template <class T>
  static ExpProductScan<T, Space> op(const std::vector<SequenceView<T, Space>>& in, SequenceView<T, Space> out,
                                     SequenceView<float, Space> log, const float* carry_in, float* carry_out) {
    return {in[0], out, log, carry_in, carry_out};
  }
  /// Gates in [low, 1], one in twenty exactly 1.
  static double draw(std::size_t, float low, std::int64_t, Draws& draw) {
    return draw.uniform(0.0, 1.0) < 0.05 ? 1.0 : draw.uniform(static_cast<double>(low), 1.0);
  }
  static double draw_carry(float, Draws& draw) { return draw.uniform(-1.0, 0.0); }

  static constexpr double kIdentity = 0.0;
  using State = double;
  static State start(double carry) { return carry; }
  static double log_gate(double gamma) { return std::clamp(std::log(gamma + 1e-8), -50.0, 0.0); }
  static void step(State& sum, const std::array<double, 1>& in) { sum += log_gate(in[0]); }
  static double allowed(const State& sum) { return 1e-6 * (std::abs(sum) + 1e-30); }
  template <class T>
  static void check(const State& sum, double got, const float* log, WorstError& worst, std::int64_t t,
                    std::int64_t ch) {
    if (log != nullptr) worst.add(static_cast<double>(*log), sum, allowed(sum), t, ch);
    // e^L is as far off as L is, and then rounded.
    const double y = std::exp(sum);
    const double scale =
        y * (kHalfUnit<T> * 1.01 + 1e-6 * (1.0 + std::abs(sum))) + (std::is_same_v<T, Float16> ? 0x1p-25 : 1.2e-38);
    worst.add(got, y, scale, t, ch);
  }
  static void check_carry(const State& sum, double got, WorstError& worst, std::int64_t ch) {
    worst.add(got, sum, allowed(sum), -1, ch);
  }
  static double allowed_by_cuts(double expected) { return 1e-5 * std::abs(expected); }
};

struct LogSumExp {
  static constexpr const char* kName = "logsumexp";
  static constexpr float kTimed = 1.0F;
  static constexpr std::size_t kInputs = 1;
  // Deviations of x. The last takes the stepwise path, which reads x again.
  static constexpr float kVariants[] = {3.0F, 30.0F, 1000.0F};
  static constexpr int kUsual = 1;
  static constexpr double kNothing = -std::numeric_limits<double>::infinity();

  template <class T>
  static LogSumExpScan<T, Space> op(const std::vector<SequenceView<T, Space>>& in, SequenceView<T, Space> out,
                                    SequenceView<float, Space> /*log*/, const float* carry_in, float* carry_out) {
    return {in[0], out, carry_in, carry_out};
  }
  static double draw(std::size_t, float spread, std::int64_t, Draws& draw) {
    return draw.normal(0.0, static_cast<double>(spread));
  }
  static double draw_carry(float spread, Draws& draw) { return draw.normal(0.0, static_cast<double>(spread)); }

  static constexpr double kIdentity = kNothing;
  /// log(sum) relative to a fixed reference where it can be: no million roundings in the reference itself.
  struct State {
    double m, sum;
    double y() const { return m == kNothing ? kNothing : m + std::log(sum); }
  };
  static State start(double carry) { return {carry, carry == kNothing ? 0.0 : 1.0}; }
  static void step(State& s, const std::array<double, 1>& in) {
    const double x = in[0];
    if (x > s.m) {
      s = {x, s.m == kNothing ? 1.0 : s.sum * std::exp(s.m - x) + 1.0};
    } else if (x != kNothing) {
      s.sum += std::exp(x - s.m);
    }
  }
  /// Relative to max(1, |y|): y crosses zero, where the sum of exponentials is 1.
  static double allowed(double y) { return std::isinf(y) ? 1e-6 : 1e-6 * std::max(1.0, std::abs(y)); }
  template <class T>
  static void check(const State& s, double got, const float* /*log*/, WorstError& worst, std::int64_t t,
                    std::int64_t ch) {
    const double y = s.y();
    const double rounding = sizeof(T) == 2 ? kHalfUnit<T> * std::abs(y) * 1.001 : 0.0;
    const double beyond = std::isinf(y) ? (got == y ? 0.0 : 1.0) : std::max(0.0, std::abs(got - y) - rounding);
    worst.add(std::isnan(got) ? got : beyond, 0.0, allowed(y), t, ch);
  }
  static void check_carry(const State& s, double got, WorstError& worst, std::int64_t ch) {
    worst.add(got, s.y(), allowed(s.y()), -1, ch);
  }
  static double allowed_by_cuts(double expected) { return 1e-5 * std::max(1.0, std::abs(expected)); }
};

template <class Kind, class T>
struct Case {
  std::vector<ScanOperand<T>> in;
  std::vector<float> carry_in;  // empty: none

  /// NaN throughout, no carry.
  explicit Case(const ScanLayout& layout) : in(Kind::kInputs, ScanOperand<T>(layout)) {}
  Case(const ScanLayout& layout, std::uint64_t stream, float variant = Kind::kVariants[0]) : Case(layout) {
    for (std::size_t i = 0; i < in.size(); ++i) {
      in[i].fill(test_seed() + 3 * stream + i,
                 [&](std::int64_t t, std::int64_t, Draws& draws) { return Kind::draw(i, variant, t, draws); });
    }
    carry_in = random_values<float>(static_cast<std::size_t>(layout.channels()), 3 * stream + 2,
                                    [&](Draws& draws) { return Kind::draw_carry(variant, draws); });
  }
  const ScanLayout& layout() const { return in[0].layout(); }
};

template <class T>
struct Result {
  ScanOperand<T> y;
  ScanOperand<float> log_y;  // of exp_product
  std::vector<float> carry_out;
  ScanAlgo algo = {};
};
using test::same_bits;
template <class T>
bool same_bits(const Result<T>& a, const Result<T>& b) {
  return same_bits(a.y.data, b.y.data) && same_bits(a.log_y.data, b.log_y.data) && same_bits(a.carry_out, b.carry_out);
}

struct Run {
  std::optional<ScanAlgo> algo = {};
  int over = -1;         // the output lies over this input, and carry_out over carry_in
  std::int64_t cut = 0;  // in calls of so many times, which hand the carry on
  bool logs = true;
};

/// A case in the backend's memory.
template <class Kind, class T>
class Operands {
 public:
  Operands(Backend& on, const Case<Kind, T>& c, const Run& how = {})
      : on_(on),
        layout_(c.layout()),
        how_(how),
        views_(c.layout()),
        log_views_(kLogs && how.logs ? layout_ : ScanLayout{}) {
    for (const auto& operand : c.in) in_.push_back(upload(on, operand.data));
    if (how.over < 0) fresh_ = upload(on, views_.data);
    log_y_ = upload(on, log_views_.data);
    carry_in_ = upload(on, c.carry_in);
    carry_out_ = unwritten<float>(on, static_cast<std::size_t>(layout_.channels()));
    views_.data = {};  // result() fills them
    log_views_.data = {};
  }

  ScanAlgo call() {
    const std::int64_t time = layout_.time, cut = how_.cut == 0 ? std::max<std::int64_t>(time, 1) : how_.cut;
    ScanAlgo algo = {};
    for (std::int64_t t = 0; t < time; t += cut) {
      const std::int64_t n = std::min(cut, time - t);
      std::vector<SequenceView<T, Space>> views;
      for (Buffer<T>& in : in_) views.push_back(views_.on(in, t, n));
      const auto logs = log_y_.size() != 0 ? log_views_.on(log_y_, t, n) : SequenceView<float, Space>{};
      algo = scan(on_, Kind::op(views, views_.on(y(), t, n), logs, carry_in_.data(), carry().data()), how_.algo);
    }
    return algo;
  }
  Result<T> result() {
    Result<T> r{views_, log_views_, download(on_, carry())};
    r.y.data = download(on_, y());
    r.log_y.data = download(on_, log_y_);
    EXPECT_TRUE(r.y.gaps_are_unwritten()) << layout_;
    return r;
  }

 private:
  static constexpr bool kLogs = std::is_same_v<Kind, ExpProduct>;
  Buffer<T>& y() { return how_.over < 0 ? fresh_ : in_[static_cast<std::size_t>(how_.over)]; }
  Buffer<float>& carry() { return how_.over < 0 && how_.cut == 0 ? carry_out_ : carry_in_; }

  Backend& on_;
  ScanLayout layout_;
  Run how_;
  ScanOperand<T> views_;
  ScanOperand<float> log_views_;
  std::vector<Buffer<T>> in_;
  Buffer<T> fresh_;
  Buffer<float> log_y_, carry_in_, carry_out_;
};

template <class Kind, class T>
Result<T> run(Backend& on, const Case<Kind, T>& c, const Run& how = {}) {
  Operands<Kind, T> operands(on, c, how);
  const ScanAlgo algo = operands.call();
  Result<T> r = operands.result();
  r.algo = algo;
  return r;
}

/// The largest error relative to the one allowed. Channels that lie side by side walk side by side through time, so
/// that memory is read in its order.
template <class Kind, class T>
WorstError error(const Case<Kind, T>& c, const Result<T>& r) {
  const std::int64_t channels = c.layout().channels();
  const std::int64_t most = std::clamp<std::int64_t>(channels / (2 * host_processors()), 1, 64);
  const auto errors = parallel_map((channels + most - 1) / most, [&](std::int64_t part) {
    WorstError worst;
    std::vector<typename Kind::State> states;
    std::vector<std::size_t> at;
    const std::int64_t first = part * most, last = std::min(first + most, channels);
    for (std::int64_t ch = first; ch < last; ++ch) {
      states.push_back(Kind::start(c.carry_in.empty() ? Kind::kIdentity
                                                      : static_cast<double>(c.carry_in[static_cast<std::size_t>(ch)])));
      at.push_back(c.in[0].first_index(ch));
    }
    for (std::int64_t t = 0; t < c.layout().time; ++t) {
      for (std::size_t k = 0; k < at.size(); ++k) {
        std::array<double, Kind::kInputs> in;
        for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<double>(to_float(c.in[i].data[at[k]]));
        Kind::step(states[k], in);
        Kind::template check<T>(states[k], static_cast<double>(to_float(r.y.data[at[k]])),
                                r.log_y.data.empty() ? nullptr : &r.log_y.data[at[k]], worst, t,
                                first + static_cast<std::int64_t>(k));
        at[k] += c.in[0].time_stride();
      }
    }
    for (std::size_t k = 0; k < at.size(); ++k) {
      const std::int64_t ch = first + static_cast<std::int64_t>(k);
      Kind::check_carry(states[k], static_cast<double>(r.carry_out[static_cast<std::size_t>(ch)]), worst, ch);
    }
    return worst;
  });
  WorstError all;
  for (const WorstError& one : errors) all.add(one);
  return all;
}

template <class K, class Element>
struct Scan {
  using Kind = K;
  using T = Element;
};
struct ScanName {
  template <class S>
  static std::string GetName(int) {
    return std::string(S::Kind::kName) + "_" + name_of(kDTypeOf<typename S::T>);
  }
};

template <class S>
class ScanTest : public OpTest {
 protected:
  using Kind = typename S::Kind;
  using T = typename S::T;
  using ThisCase = Case<Kind, T>;

  void check_every(const ScanLayout& layout, std::uint64_t stream, float variant = Kind::kVariants[0]) {
    const ThisCase c(layout, stream, variant);
    on_every([&](Backend& backend) { return run(backend, c); },
             [&](const auto& r) { EXPECT_TRUE(error(c, r).below(1.0)) << layout << ", variant " << variant; });
  }
};
using Scans = ::testing::Types<Scan<Decay, float>, Scan<Decay, Float16>, Scan<Decay, BFloat16>, Scan<ExpProduct, float>,
                               Scan<ExpProduct, Float16>, Scan<ExpProduct, BFloat16>, Scan<LogSumExp, float>,
                               Scan<LogSumExp, Float16>, Scan<LogSumExp, BFloat16>>;
TYPED_TEST_SUITE(ScanTest, Scans, ScanName);

/// Pairs of time and channels: the awkward ones, small ones on the emulation. The largest is for one type of each
/// width, because what a GPU's scan does depends on the width alone.
template <class T>
std::vector<std::pair<std::int64_t, std::int64_t>> scan_sizes() {
  const std::int64_t most = !kOnCuda ? 500'000 : small_sizes() ? 1'000'000 : std::int64_t{1} << 27;
  std::vector<std::pair<std::int64_t, std::int64_t>> sizes;
  for (const std::int64_t time : {1, 2, 31, 33, 127, 128, 129, 1000, 4097, 100003}) {
    for (const std::int64_t dim : {1, 7, 48, 384, 4096}) {
      if (time * dim > most || (kOnCuda && (dim == 384 || (time > 100 && time < 130)))) continue;
      sizes.emplace_back(time, dim);
    }
  }
  if (gpu_sizes() && !std::is_same_v<T, Float16>) sizes.emplace_back(100003, 1024);
  return sizes;
}

TYPED_TEST(ScanTest, MatchesFloat64AtEverySize) {
  using Kind = typename TypeParam::Kind;
  std::uint64_t stream = 0;
  for (const auto& [time, dim] : scan_sizes<typename TypeParam::T>()) {
    for (int v = 0; v < Kind::kUsual; ++v) {
      if (v != 0 && time * dim > 50'000'000) continue;  // what is that large shows with one kind of operands
      const typename TestFixture::ThisCase c({.time = time, .dim = dim}, ++stream, Kind::kVariants[v]);
      EXPECT_TRUE(error(c, run(this->on(), c)).below(1.0)) << c.layout() << ", variant " << v;
    }
  }
}

// A CPU cuts the longer ones in time.
TYPED_TEST(ScanTest, HeadsStridesAndEveryVariantMatchFloat64) {
  for (const bool inside : {false, true}) {
    for (const std::int64_t padding : {0, 3, 8}) {
      for (const std::int64_t time : {5, kOnCuda ? 700 : 2500}) {
        for (const std::int64_t dim : {kOnCuda ? 24 : 20, 64}) {
          if (!kOnCuda && (dim == 64 || padding == 8)) continue;
          for (const float variant : TypeParam::Kind::kVariants) {
            this->check_every(
                {.batch = 2, .heads = 3, .time = time, .dim = dim, .padding = padding, .heads_inside = inside}, 7,
                variant);
          }
        }
      }
    }
  }
  if (kOnCuda) return;
  for (const ScanLayout& layout :
       {ScanLayout{.time = 20000, .dim = 16}, ScanLayout{.time = 70, .dim = 1100}, ScanLayout{.time = 300, .dim = 1024},
        ScanLayout{.batch = 2, .heads = 3, .time = 3000, .dim = 9}, ScanLayout{.time = 700, .dim = 37},
        ScanLayout{.time = 700, .dim = 15}, ScanLayout{.batch = 3, .heads = 5, .time = 400, .dim = 100}}) {
    this->check_every(layout, 13);
  }
}

TYPED_TEST(ScanTest, RepeatsToTheBitAloneAndInABatch) {
  using ThisCase = typename TestFixture::ThisCase;
  const std::int64_t time = gpu_sizes() ? 20000 : 700, dim = 144;
  const ThisCase c({.batch = 5, .time = time, .dim = dim}, 13);
  const auto first = run(this->on(), c);
  for (int i = 0; i < (gpu_sizes() ? 20 : 2); ++i) ASSERT_TRUE(same_bits(run(this->on(), c), first));
  const auto count = static_cast<std::ptrdiff_t>(time * dim);
  ThisCase alone(ScanLayout{.time = time, .dim = dim});
  const auto part = [&](const auto& of) { return std::vector(of.begin() + 3 * count, of.begin() + 4 * count); };
  for (std::size_t i = 0; i < alone.in.size(); ++i) alone.in[i].data = part(c.in[i].data);
  alone.carry_in.assign(c.carry_in.begin() + 3 * dim, c.carry_in.begin() + 4 * dim);
  EXPECT_TRUE(same_bits(run(this->on(), alone).y.data, part(first.y.data)));
}

TYPED_TEST(ScanTest, MayWriteOverItsInputsAndGoWithoutLogs) {
  for (const std::int64_t dim : {5, 16, 264}) {
    for (const float variant : TypeParam::Kind::kVariants) {
      const typename TestFixture::ThisCase c({.time = kOnCuda ? 1500 : 3000, .dim = dim}, 17, variant);
      const auto expected = run(this->on(), c);
      for (int over = 0; over < static_cast<int>(c.in.size()); ++over) {
        const auto got = run(this->on(), c, {.over = over, .logs = false});
        EXPECT_TRUE(same_bits(got.y.data, expected.y.data)) << "over input " << over << ", D " << dim;
        EXPECT_TRUE(same_bits(got.carry_out, expected.carry_out)) << "over input " << over << ", D " << dim;
      }
    }
  }
}

class DecayScanTest : public OpTest {
 protected:
  template <class T>
  void check_alignment() {
    for (const std::int64_t dim : {8, 40, 300, 1024}) {
      ScanLayout layout{.time = 600, .dim = dim};
      if (dim % 8 != 0) layout.padding = 8 - dim % 8;
      const auto a = run(on(), Case<Decay, T>(layout, 3));
      layout.offset = 1;
      const auto b = run(on(), Case<Decay, T>(layout, 3));
      EXPECT_TRUE(same_bits(a.y.data, {b.y.data.begin() + 1, b.y.data.end()})) << dim;
      EXPECT_TRUE(same_bits(a.carry_out, b.carry_out)) << dim;
    }
  }
};
TEST_F(DecayScanTest, AlignmentChangesNoBit) {
  check_alignment<float>();
  check_alignment<Float16>();
  check_alignment<BFloat16>();
}

#if defined(MMREC_TEST_CUDA)

TYPED_TEST(ScanTest, EveryAlgoGivesTheSameBitsAndIsTakenByItsShapes) {
  using enum ScanAlgo;
  using ThisCase = typename TestFixture::ThisCase;
  constexpr bool kHasColumns = std::is_same_v<typename TypeParam::Kind, Decay>;
  constexpr std::int64_t kVec = 4 / sizeof(typename TypeParam::T), kDim = 160 * kVec;
  const bool engine = this->on().compute_capability() >= 90;
  const auto algo = [&](const ScanLayout& layout) { return run(this->on(), ThisCase(layout, 8)).algo; };
  EXPECT_EQ(algo({.time = 300, .dim = kDim}), engine ? kStaged : kLoad);
  EXPECT_EQ(algo({.time = 300, .dim = kDim, .offset = 1}), kLoad);
  EXPECT_EQ(algo({.time = 300, .dim = 8}), kLoad);
  EXPECT_THROW(run(this->on(), ThisCase({.time = 300, .dim = 8}, 9), {.algo = kColumns}), std::invalid_argument);
  if (!engine) return;  // there is one algo
  if (kHasColumns) {
    EXPECT_EQ(algo({.time = 256, .dim = 3 * this->on().processors() * 32 * kVec}), kColumns);
  }
  const ThisCase c({.batch = 2, .time = 700, .dim = kHasColumns ? 520 : kDim}, 7);
  const auto expected = run(this->on(), c, {.algo = kLoad});
  EXPECT_TRUE(error(c, expected).below(1.0));
  for (const ScanAlgo other : {kStaged, kColumns, kGroups}) {
    if (other != kStaged && !kHasColumns) {
      EXPECT_THROW(run(this->on(), c, {.algo = other}), std::invalid_argument);
      continue;
    }
    const auto r = run(this->on(), c, {.algo = other});
    EXPECT_EQ(r.algo, other);
    EXPECT_TRUE(same_bits(r, expected)) << "algo " << static_cast<int>(other);
  }
}

// Wide operands: columns of one block, of two, and of four and more (160 to 384 channels on few multiprocessors, else
// 512 and 1,024). There are whole rounds and others, columns with halves and without, and columns that follow each
// other. The chosen algorithm depends on the number of multiprocessors, so each shape is tried by every algorithm.
template <class T>
void check_columns(Backend& on) {
  using enum ScanAlgo;
  for (ScanLayout layout :
       {ScanLayout{.time = 65, .dim = 520}, ScanLayout{.time = 128, .dim = 328}, ScanLayout{.time = 385, .dim = 168},
        ScanLayout{.time = 512, .dim = 328}, ScanLayout{.time = 800, .dim = 328},
        ScanLayout{.batch = 3, .time = 300, .dim = 168}, ScanLayout{.time = 2400, .dim = 160},
        ScanLayout{.time = 2400, .dim = 320}, ScanLayout{.time = 17000, .dim = 192},
        ScanLayout{.time = 8200, .dim = 384}, ScanLayout{.batch = 3, .time = 1000, .dim = 144},
        ScanLayout{.batch = 3, .time = 1000, .dim = 320}, ScanLayout{.time = 140, .dim = 4224},
        ScanLayout{.time = 17000, .dim = 1024}, ScanLayout{.time = 40000, .dim = 512},
        ScanLayout{.time = 1000, .dim = 4096}, ScanLayout{.batch = 2, .time = 1100, .dim = 4224}}) {
    if (too_large(layout.batch * layout.time * layout.dim, 3'300'000)) continue;
    const Case<Decay, T> c(layout, 19);
    const auto r = run(on, c);
    EXPECT_TRUE(error(c, r).below(1.0)) << layout;
    // Rows of up to 512 bytes hand on in another algo, which columns have not.
    const bool has_columns = on.compute_capability() >= 90 && layout.dim * sizeof(T) > 512;
    for (const ScanAlgo algo : {kColumns, kGroups}) {
      if (algo == r.algo || !has_columns) continue;
      const auto by = run(on, c, {.algo = algo});
      EXPECT_EQ(by.algo, algo);
      EXPECT_TRUE(same_bits(by, r)) << "algo " << static_cast<int>(algo) << ", " << layout;
    }
    layout.offset = 1;
    EXPECT_TRUE(same_bits(r.carry_out, run(on, Case<Decay, T>(layout, 19)).carry_out)) << layout;
  }
}
TEST_F(DecayScanTest, ColumnsOfOneBlockAndOfGroupsInFp32) { check_columns<float>(on()); }
TEST_F(DecayScanTest, ColumnsOfOneBlockAndOfGroupsInFp16) { check_columns<Float16>(on()); }
TEST_F(DecayScanTest, ColumnsOfOneBlockAndOfGroupsInBf16) { check_columns<BFloat16>(on()); }

#else

// Large enough for stores that bypass the caches; every result must be there when the call returns. Nothing cancels.
TEST_F(DecayScanTest, StreamingStores) {
  const Case<Decay, float> c({.time = 4500, .dim = 1024}, 29, 1.0F);
  EXPECT_TRUE(error(c, run(on(), c)).below(0.1));
}

#endif

// ---- in fp32 --------------------------------------------------------------------------------------------------------

class ScansTest : public OpTest {
 protected:
  template <class F>
  static void for_each_scan(const F& f) {
    f(Decay{});
    f(ExpProduct{});
    f(LogSumExp{});
  }
};

TEST_F(ScansTest, CutAnywhereAndHandCarriesOn) {
  for_each_scan([&]<class Kind>(Kind) {
    const std::int64_t time = !kOnCuda ? 2500 : small_sizes() || Kind::kInputs == 1 ? 1200 : 5000;
    for (const std::int64_t dim : {5, kOnCuda ? 64 : 300}) {
      const Case<Kind, float> c({.time = time, .dim = dim}, 14);
      const auto whole = run(on(), c);
      for (const std::int64_t step :
           {std::int64_t{1}, std::int64_t{7}, std::int64_t{64}, std::int64_t{1023}, time - 1}) {
        if (kOnCuda && step == 1) continue;
        const auto cut = run(on(), c, {.cut = step});
        WorstError worst;
        constexpr bool kLogs = std::is_same_v<Kind, ExpProduct>;
        const std::vector<float>&got = kLogs ? cut.log_y.data : cut.y.data,
              &want = kLogs ? whole.log_y.data : whole.y.data;
        for (std::size_t i = 0; i < got.size(); ++i) {
          const auto expected = static_cast<double>(want[i]);
          worst.add(static_cast<double>(got[i]), expected, Kind::allowed_by_cuts(expected),
                    static_cast<std::int64_t>(i) / dim, static_cast<std::int64_t>(i) % dim);
        }
        EXPECT_TRUE(worst.below(1.0)) << Kind::kName << ", D " << dim << ", cuts of " << step;
      }
    }
  });
}

TEST_F(ScansTest, EmptyShapesPassCarriesOn) {
  for_each_scan([&]<class Kind>(Kind) {
    const std::vector<float> carry = {-1.5F, -kInfinity};
    const Buffer<float> in = upload(on(), carry);
    Buffer<float> out = unwritten<float>(on(), 2);
    const auto pass = [&](std::int64_t batch, std::int64_t time, std::int64_t dim, const float* from, float* to) {
      const SequenceView<float, Space> empty(nullptr, batch, time, dim);
      scan(on(), Kind::template op<float>({empty, empty}, empty, {}, from, to));
    };
    pass(1, 0, 2, in.data(), out.data());
    EXPECT_EQ(download(on(), out), carry) << Kind::kName;
    pass(0, 5, 2, nullptr, nullptr);
    pass(1, 5, 0, nullptr, nullptr);
    pass(0, 5000, 2, nullptr, nullptr);
  });
}

// One channel per case that a scan in fp32 or in whole-sequence log space loses; a million steps each.
TEST_F(ScansTest, DecayOfAMillionSteps) {
  constexpr std::int64_t kSteps = 1'000'000, kCases = 9;
  Case<Decay, float> c(ScanLayout{.time = kSteps, .dim = kCases});
  c.carry_in.assign(kCases, 0.0F);
  std::mt19937_64 engine(test_seed() + 3);
  std::uniform_real_distribution<float> decay(0.9F, 1.0F), unit(0.0F, 1.0F), close(0.9999F, 1.0F), growth(1.0F, 1.2F);
  std::normal_distribution<float> input;
  for (std::int64_t t = 0; t < kSteps; ++t) {
    const float signed_b = input(engine), positive_b = unit(engine);
    const auto set = [&](std::int64_t i, float log_a, float b) { c.in[0].at(i, t) = log_a, c.in[1].at(i, t) = b; };
    set(0, std::log(decay(engine)), positive_b);
    set(1, std::log(decay(engine)), signed_b);
    set(2, 0.0F, 0.1F);                      // a = 1: grows to 1e5 by tenths
    set(3, 0.0F, signed_b);                  // a random walk
    set(4, std::log1p(-1e-6F), positive_b);  // a memory of a million steps: a itself has no fp32 neighbour
    set(5, std::log(close(engine)), signed_b);
    set(6, std::log(decay(engine)), 0.0F);  // from nothing, nothing
    set(7, t % 1000 < 20 ? std::log(growth(engine)) : std::log(decay(engine)), positive_b);
    set(8, t % 777 == 0 ? -kInfinity : 0.0F, signed_b);  // forgets now and then
  }
  const auto r = run(on(), c);
  EXPECT_TRUE(error(c, r).below(1.0));
  for (std::int64_t t = 0; t < kSteps; ++t) ASSERT_EQ(r.y.value(6, t), 0.0);
}

TEST_F(ScansTest, ExpProductOfAMillionSteps) {
  constexpr std::int64_t kSteps = 1'000'000, kCases = 7;
  std::mt19937_64 engine(test_seed() + 3);
  std::uniform_real_distribution<float> gate(0.9F, 1.0F), unit(0.0F, 1.0F), close(0.999999F, 1.0F);
  Case<ExpProduct, float> c(ScanLayout{.time = kSteps, .dim = kCases});
  c.carry_in.assign(kCases, 0.0F);
  for (std::int64_t t = 0; t < kSteps; ++t) {
    const float gates[kCases] = {gate(engine),
                                 1.0F,
                                 close(engine),
                                 1.0F - 0x1p-24F,                // the largest fp32 below 1
                                 0.9F,                           // one rounding, a million times
                                 t % 100000 == 7 ? 0.0F : 1.0F,  // γ = 0
                                 unit(engine)};
    for (std::int64_t i = 0; i < kCases; ++i) c.in[0].at(i, t) = gates[i];
  }
  const auto r = run(on(), c);
  EXPECT_TRUE(error(c, r).below(1.0));
  for (std::int64_t t = 0; t < kSteps; ++t) {
    ASSERT_EQ(r.y.value(1, t), 1.0);  // gamma = 1 is the identity, exactly
    ASSERT_EQ(r.log_y.value(1, t), 0.0);
  }
}

TEST_F(ScansTest, LogSumExpOfAMillionSteps) {
  constexpr std::int64_t kSteps = 1'000'000, kCases = 8;
  std::mt19937_64 engine(test_seed() + 3);
  std::normal_distribution<float> value;
  Case<LogSumExp, float> c(ScanLayout{.time = kSteps, .dim = kCases});
  for (std::int64_t t = 0; t < kSteps; ++t) {
    const auto s = static_cast<float>(t);
    const float x[kCases] = {value(engine),
                             -3.0F,       // equal terms: log(t + 1) - 3
                             1e-6F * s,   // a slow climb: the maximum moves at every step
                             -1e-3F * s,  // a descent: the sum stops growing
                             0.1F * s,    // a steep climb
                             50.0F * value(engine),
                             t < 500000 ? -kInfinity : value(engine),
                             1e30F};
    for (std::int64_t i = 0; i < kCases; ++i) c.in[0].at(i, t) = x[i];
  }
  EXPECT_TRUE(error(c, run(on(), c)).below(2.0));
}

TEST_F(ScansTest, DecayOfSpecialValues) {
  constexpr std::int64_t kCases = 8;
  const float decays[kCases] = {0.0F, -kInfinity, kNan, -86.5F, 60.0F, kInfinity, 80.0F, 0.0F};
  const float inputs[kCases] = {1.0F, 1.0F, 1.0F, 0.0F, 1.0F, 0.0F, 0.0F, 0.0F};
  for (const std::int64_t time : {4, 1028}) {  // in one run, and cut in time
    Case<Decay, float> c(ScanLayout{.time = time, .dim = kCases});
    c.carry_in = {0.0F, 5.0F, 5.0F, 1e38F, 0.0F, 0.0F, 0.0F, kInfinity};
    // Channel 6 decays by 80 at every step: growth over nothing, beyond any range, is nothing.
    c.in[0].fill([&](std::int64_t t, std::int64_t i) { return t == 1 || i == 6 ? decays[i] : 0.0F; });
    c.in[1].fill([&](std::int64_t, std::int64_t i) { return inputs[i]; });
    const auto r = run(on(), c);
    const auto n = static_cast<float>(time);
    EXPECT_EQ(r.carry_out[0], n);
    EXPECT_EQ(r.carry_out[1], n - 1.0F);
    EXPECT_EQ(r.y.value(2, 0), 6.0);
    EXPECT_TRUE(std::isnan(r.y.value(2, 1)) && std::isnan(r.carry_out[2]));
    const double small = 1e38 * std::exp(-86.5);  // next to the least decay there is, yet not nothing
    EXPECT_NEAR(static_cast<double>(r.carry_out[3]), small, 1e-5 * small);
    EXPECT_NEAR(static_cast<double>(r.carry_out[4]), std::exp(60.0), 1e-5 * std::exp(60.0));
    EXPECT_EQ(r.carry_out[6], 0.0F);
    if (!kOnCuda) continue;
    EXPECT_EQ(r.carry_out[5], 0.0F);
    EXPECT_EQ(r.carry_out[7], kInfinity);
  }
}

TEST_F(ScansTest, ExpProductOfSpecialValues) {
  constexpr std::int64_t kCount = 10;
  const float gates[kCount] = {0.0F,  1.0F, 1.5F, kInfinity, kNan, -1.0F, 1e-30F, 0.75F, std::nextafter(0.75F, 1.0F),
                               -1e-8F};
  Case<ExpProduct, float> c(ScanLayout{.time = 1, .dim = kCount});
  c.carry_in.assign(kCount, 0.0F);
  c.in[0].fill([&](std::int64_t, std::int64_t i) { return gates[i]; });
  const auto r = run(on(), c);
  EXPECT_NEAR(r.log_y.value(0, 0), std::log(1e-8), 1e-6 * 18.5);
  for (const std::int64_t i : {1, 2, 3}) EXPECT_EQ(r.log_y.value(i, 0), 0.0);
  for (const std::int64_t i : {4, 5}) EXPECT_TRUE(std::isnan(r.y.value(i, 0)));
  for (const std::int64_t i : {6, 7, 8}) {
    const double expected = ExpProduct::log_gate(static_cast<double>(gates[i]));
    EXPECT_NEAR(r.log_y.value(i, 0), expected, 3e-7 * std::abs(expected));
  }
  EXPECT_EQ(r.log_y.value(9, 0), -50.0);
  // A carry of -inf is a product of 0 and stays one; NaN passes on.
  for (const std::int64_t time : {1, 300}) {
    Case<ExpProduct, float> half(ScanLayout{.time = time, .dim = 2});
    half.carry_in = {-kInfinity, kNan};
    half.in[0].fill([](std::int64_t, std::int64_t) { return 0.5F; });
    const auto s = run(on(), half);
    for (std::int64_t t = 0; t < time; ++t) {
      ASSERT_EQ(s.y.value(0, t), 0.0);
      ASSERT_TRUE(std::isnan(s.y.value(1, t)));
    }
    EXPECT_EQ(s.carry_out[0], -kInfinity);
    EXPECT_TRUE(std::isnan(s.carry_out[1]));
  }
}

TEST_F(ScansTest, LogSumExpOfSpecialValues) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  for (const std::int64_t time : {6, 1030}) {  // in one run, and cut in time
    constexpr std::int64_t kCases = 7;
    const float first[kCases] = {-kInfinity, kInfinity, kNan, 1e30F, -kLargest, kLargest, -kInfinity};
    const float rest[kCases] = {-kInfinity, 0.0F, 0.0F, -1e30F, -kLargest, -kLargest, 2.0F};
    Case<LogSumExp, float> c(ScanLayout{.time = time, .dim = kCases});
    c.in[0].fill([&](std::int64_t t, std::int64_t i) { return t == 0 ? first[i] : rest[i]; });
    const auto r = run(on(), c);
    for (std::int64_t t = 0; t < time; ++t) {
      for (const std::int64_t i : {0, 1, 3, 4, 5}) ASSERT_EQ(r.y.value(i, t), static_cast<double>(first[i])) << i;
      ASSERT_TRUE(std::isnan(r.y.value(2, t)));
      if (t != 0) {
        ASSERT_NEAR(r.y.value(6, t), 2.0 + std::log(static_cast<double>(t)), 1e-5);
      }
    }
    EXPECT_EQ(r.y.value(6, 0), LogSumExp::kNothing);
    EXPECT_EQ(r.carry_out[0], -kInfinity);
    EXPECT_EQ(r.carry_out[1], kInfinity);
    EXPECT_TRUE(std::isnan(r.carry_out[2]));
    // Carries of every kind enter again.
    Case<LogSumExp, float> zero(ScanLayout{.time = time, .dim = kCases});
    zero.carry_in = {-kInfinity, kInfinity, kNan, 1e30F, -kLargest, kLargest, 0.0F};
    zero.in[0].fill([](std::int64_t, std::int64_t) { return 0.0F; });
    const auto out = run(on(), zero).carry_out;
    const double n = static_cast<double>(time);
    EXPECT_NEAR(static_cast<double>(out[0]), std::log(n), 1e-5);
    EXPECT_EQ(out[1], kInfinity);
    EXPECT_TRUE(std::isnan(out[2]));
    EXPECT_EQ(out[3], 1e30F);
    EXPECT_NEAR(static_cast<double>(out[4]), std::log(n), 1e-5);
    EXPECT_EQ(out[5], kLargest);
    EXPECT_NEAR(static_cast<double>(out[6]), std::log(n + 1.0), 1e-5);
  }
}

// ---- cases ----------------------------------------------------------------------------------------------------------

template <class Kind, class T>
OpCase& add_scan(Backend& on, OpCases& cases, const ScanLayout& layout, const char* by = "",
                 std::optional<ScanAlgo> algo = {}) {
  const double bytes = bytes_of<T>(layout.channels() * layout.time) * static_cast<double>(Kind::kInputs + 1);
  const std::string shape = join("(", layout.batch, ", ", layout.time, ", ", layout.dim, ")");
  return add_case(cases, join(Kind::kName, "_scan ", name_of(kDTypeOf<T>), by), shape, Limit::kCopy, bytes, [=, &on] {
    const auto make = [=] { return Case<Kind, T>(layout, 41, Kind::kTimed); };
    const auto in = std::make_shared<Operands<Kind, T>>(on, make(), Run{.algo = algo, .logs = false});
    const bool chosen = algo && *algo == Operands<Kind, T>(on, make()).call();
    const auto check = [=] { EXPECT_TRUE(error(make(), in->result()).below(1.0)); };
    return PreparedOp{[=] { in->call(); }, check, chosen ? "chosen" : ""};
  });
}

#if defined(MMREC_TEST_CUDA)
/// By every algorithm, some of which have nothing for a shape.
template <class Kind, class T>
void add_algos(Backend& on, OpCases& cases, const ScanLayout& layout) {
  for (const auto& [algo, name] : {std::pair{ScanAlgo::kLoad, " by load"},
                                   {ScanAlgo::kStaged, " by staged"},
                                   {ScanAlgo::kColumns, " by columns"},
                                   {ScanAlgo::kGroups, " by groups"}}) {
    add_scan<Kind, T>(on, cases, layout, name, algo).forced = true;
  }
}
#endif

void scan_cases(Backend& on, bool small, OpCases& cases) {
  const auto add = [&]<class T>(T, const ScanLayout& layout, bool all = true) {
    add_scan<Decay, T>(on, cases, layout);
    if (!all) return;
    add_scan<ExpProduct, T>(on, cases, layout);
    add_scan<LogSumExp, T>(on, cases, layout);
  };
  const auto add_all = [&]<class T>(T type) {
    if (small) return add(type, {.batch = 2, .time = 300, .dim = 40});
    add(type, {.time = 32768, .dim = 4096});
    if (kOnCuda || std::is_same_v<T, float>) {
      add(type, {.time = 131072, .dim = 1024}, !kOnCuda);
      add(type, {.batch = 8, .time = 4096, .dim = 2048}, !kOnCuda);
    }
    if (!kOnCuda || std::is_same_v<T, float>) add(type, {.time = 1048576, .dim = 16});
    if (!std::is_same_v<T, float>) return;
    add(type, {.time = 4096, .dim = 1024});
    add(type, {.time = 1024, .dim = 512});
    add(type, {.time = 65536, .dim = 16});
  };
  add_all(float{});
  add_all(BFloat16{});
#if defined(MMREC_TEST_CUDA)
  // Where columns do not fill the device.
  std::vector<std::array<std::int64_t, 3>> shapes = {{1, 300, 136}};
  if (!small) {
    shapes = {{1, 4096, 1024}, {1, 2048, 2048},  {2, 4096, 1024},   {1, 16384, 512}, {1, 32768, 768},
              {1, 65536, 384}, {1, 65536, 128},  {1, 1048576, 64},  {64, 64, 512},   {7, 3000, 700},
              {8, 1024, 768},  {1, 32768, 4096}, {1, 131072, 1024}, {8, 4096, 2048}};
  }
  for (const auto& [batch, time, dim] : shapes) {
    const ScanLayout layout{.batch = batch, .time = time, .dim = dim};
    const auto add_forced = [&]<class T>(T) {
      add_algos<Decay, T>(on, cases, layout);
      add_algos<ExpProduct, T>(on, cases, layout);
      add_algos<LogSumExp, T>(on, cases, layout);
    };
    add_forced(float{});
    add_forced(BFloat16{});
  }
#endif
}
const RegisteredCases kCases(scan_cases);

}  // namespace
}  // namespace mmrec::kernels::test
