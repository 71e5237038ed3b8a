// What the tests of the gated recurrence share: random operands with z as a part of wider rows, as in the model, the
// state with its carry, and one time's float64 arithmetic.
#pragma once

#include "tests/ops/op_test.h"
#if defined(MMREC_TEST_CUDA)
#include "kernels/cuda/recurrence/algo.h"
#endif

namespace mmrec::kernels::test {

#if !defined(MMREC_TEST_CUDA)
enum class SweepAlgo : std::uint8_t { kProductAndScan };
#endif

struct GatedSize {
  std::int64_t batch, time, dim;
  std::size_t rows() const { return static_cast<std::size_t>(batch * time); }
  std::size_t elements() const { return static_cast<std::size_t>(batch * time * dim); }
};
inline std::ostream& operator<<(std::ostream& out, const GatedSize& s) {
  return out << s.batch << " x " << s.time << " x " << s.dim;
}

template <class A>
struct GatedCase {
  GatedSize size;
  WeightFormat format;
  std::vector<A> wide;  // [B, T, 3D], z in the middle
  std::vector<A> zm;    // [B, T, D]
  std::vector<float> gamma, carry, bias;
  std::vector<double> weight;  // [2D, D], as its format stores it
  float mix = 0.1F;

  explicit GatedCase(const GatedSize& s, std::uint64_t stream = 0, WeightFormat weights = kDTypeOf<A>)
      : size(s),
        format(weights),
        wide(random_uniform<A>(3 * s.elements(), -2.0, 2.0, stream)),
        zm(random_uniform<A>(s.elements(), -2.0, 2.0, stream + 1)),
        gamma(random_uniform<float>(s.elements(), 0.05, 0.85, stream + 2)),
        carry(random_normal<float>(static_cast<std::size_t>(s.batch * s.dim), 0.0, 1.0, stream + 3)),
        bias(random_normal<float>(static_cast<std::size_t>(s.dim), 0.0, 1.0, stream + 4)) {
    weight = random_weights(2 * s.dim, s.dim, format, stream + 5, 1.0 / std::sqrt(static_cast<double>(s.dim)));
  }
  /// Of one sequence alone.
  GatedCase alone(std::int64_t b) const {
    GatedCase one = *this;
    one.size.batch = 1;
    one.wide = sequence(wide, b);
    one.zm = sequence(zm, b);
    one.gamma = sequence(gamma, b);
    one.carry = sequence(carry, b);
    return one;
  }
  /// The part of sequence b in what has equal parts for all.
  template <class T>
  std::vector<T> sequence(const std::vector<T>& of_all, std::int64_t b) const {
    const auto count = static_cast<std::ptrdiff_t>(of_all.size()) / size.batch;
    return {of_all.begin() + b * count, of_all.begin() + (b + 1) * count};
  }

  double z_at(std::int64_t b, std::int64_t t, std::int64_t c) const {
    return static_cast<double>(to_float(wide[index(b, t, 0) * 3 + static_cast<std::size_t>(size.dim + c)]));
  }
  /// h_t of channel c from h_{t-1} and the products with it.
  double next(std::int64_t b, std::int64_t t, std::int64_t c, double before, double s, double g) const {
    const auto gamma_t = static_cast<double>(gamma[index(b, t, c)]);
    s = sigmoid(s);
    g = sigmoid(g + static_cast<double>(to_float(zm[index(b, t, c)])));
    const auto mu = static_cast<double>(mix);
    return (gamma_t + mu * (1.0 - g + gamma_t)) * before + z_at(b, t, c) * (s + mu * g);
  }
  /// The same of the products with states `seen` [D].
  double next(std::int64_t b, std::int64_t t, std::int64_t c, double before, const double* seen) const {
    double s = bias.empty() ? 0.0 : static_cast<double>(bias[static_cast<std::size_t>(c)]), g = 0.0;
    const double* row_s = weight.data() + c * size.dim;
    const double* row_g = weight.data() + (size.dim + c) * size.dim;
    for (std::int64_t k = 0; k < size.dim; ++k) {
      s += seen[k] * row_s[k];
      g += seen[k] * row_g[k];
    }
    return next(b, t, c, before, s, g);
  }
  std::size_t index(std::int64_t b, std::int64_t t, std::int64_t c) const {
    return static_cast<std::size_t>((b * size.time + t) * size.dim + c);
  }
  /// Of h, which has a row more.
  std::size_t state_index(std::int64_t b, std::int64_t row, std::int64_t c) const {
    return static_cast<std::size_t>((b * (size.time + 1) + row) * size.dim + c);
  }
  std::size_t states() const { return static_cast<std::size_t>(size.batch * (size.time + 1) * size.dim); }

  /// [B, T + 1, D]: the carry, then what comes later is `rest`.
  std::vector<float> fresh_state(float rest = kNan) const {
    std::vector<float> h(states(), rest);
    for (std::int64_t b = 0; b < size.batch; ++b) {
      std::copy_n(carry.begin() + b * size.dim, size.dim,
                  h.begin() + static_cast<std::ptrdiff_t>(state_index(b, 0, 0)));
    }
    return h;
  }
  /// The exact states, [B, T + 1, D].
  std::vector<double> exact_states() const {
    std::vector<double> h = widened(fresh_state());
    for (std::int64_t b = 0; b < size.batch; ++b) {
      for (std::int64_t t = 0; t < size.time; ++t) {
        const double* before = h.data() + state_index(b, t, 0);
        for (std::int64_t c = 0; c < size.dim; ++c) h[state_index(b, t + 1, c)] = next(b, t, c, before[c], before);
      }
    }
    return h;
  }
};

template <class A>
std::vector<A> rounded_to(const std::vector<float>& values) {
  std::vector<A> rounded;
  for (const float value : values) rounded.push_back(from_float<A>(value));
  return rounded;
}

/// The first entry at which `rounded` is not h rounded to A; as many as there are where it is throughout.
template <class A>
std::size_t first_not_rounded(const std::vector<float>& h, const std::vector<A>& rounded) {
  return static_cast<std::size_t>(first_failure(static_cast<std::int64_t>(h.size()), [&](std::int64_t i) {
    const auto k = static_cast<std::size_t>(i);
    return to_float(rounded[k]) == to_float(from_float<A>(h[k]));
  }));
}

/// Largest error of any h against float64 from the h before it, which the products see `rounded`: the bound is that of
/// one time, whatever the element type. Leaves out the times of which `leaves_out` says so.
template <class A>
double one_time_error(const GatedCase<A>& c, const std::vector<float>& h, const std::vector<A>& rounded,
                      const std::function<bool(std::int64_t)>& leaves_out = {}) {
  const std::vector<double> seen = widened(rounded);
  // A channel's two rows of the matrix stay in the cache while the states pass by.
  return parallel_max(c.size.dim, [&](std::int64_t i) {
    double worst = 0.0;
    for (std::int64_t b = 0; b < c.size.batch; ++b) {
      for (std::int64_t t = 0; t < c.size.time; ++t) {
        if (leaves_out && leaves_out(t)) continue;
        const double want =
            c.next(b, t, i, static_cast<double>(h[c.state_index(b, t, i)]), seen.data() + c.state_index(b, t, 0));
        const double error =
            std::abs(static_cast<double>(h[c.state_index(b, t + 1, i)]) - want) / (1.0 + std::abs(want));
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
    }
    return worst;
  });
}

/// A case in the backend's memory, with its states.
template <class A>
class GatedOn {
 public:
  GatedOn(Backend& on, const GatedCase<A>& c, const std::vector<float>& h) : GatedOn(on, c, h, rounded_to<A>(h)) {}
  GatedOn(Backend& on, const GatedCase<A>& c, const std::vector<float>& h, const std::vector<A>& rounded)
      : on_(on),
        size_(c.size),
        mix_(c.mix),
        wide_(upload(on, c.wide)),
        zm_(upload(on, c.zm)),
        rounded_(upload(on, rounded)),
        gamma_(upload(on, c.gamma)),
        bias_(upload(on, c.bias)),
        h_(upload(on, h)),
        weight_(on, c.weight, 2 * c.size.dim, c.size.dim, c.format) {}

  /// Of tokens [first, first + count) of every sequence.
  GateInputs<Space, A> inputs(std::int64_t first, std::int64_t count) {
    const std::int64_t dim = size_.dim;
    const auto part = [&](auto* data, std::int64_t stride, std::int64_t rows, std::int64_t times) {
      SequenceView<std::remove_pointer_t<decltype(data)>, Space> view(data + first * stride, size_.batch, times, dim);
      view.time_stride = stride;
      view.batch_stride = rows * stride;
      return view;
    };
    GateInputs<Space, A> in;
    in.z = part(wide_.data() + dim, 3 * dim, size_.time, count);
    in.zm = part(zm_.data(), dim, size_.time, count);
    in.gamma = part(gamma_.data(), dim, size_.time, count);
    in.h = part(h_.data(), dim, size_.time + 1, count + 1);
    if constexpr (std::is_same_v<A, float>) {
      in.h_rounded = in.h;
    } else {
      in.h_rounded = part(rounded_.data(), dim, size_.time + 1, count + 1);
    }
    in.mdi_mix = mix_;
    return in;
  }
  GateInputs<Space, A> inputs() { return inputs(0, size_.time); }
  WeightView<Space> gate_weight() const { return weight_.view(); }
  const float* gate_bias() const { return bias_.size() == 0 ? nullptr : bias_.data(); }

  /// Makes h the states.
  void restart(const std::vector<float>& h) {
    const std::vector<A> rounded = rounded_to<A>(h);
    on_.upload(h.data(), h_.data(), h.size());
    on_.upload(rounded.data(), rounded_.data(), rounded.size());
  }
  std::vector<float> states() const { return download(on_, h_); }
  /// As the products see them.
  std::vector<A> rounded_states() const {
    if constexpr (std::is_same_v<A, float>) {
      return states();
    } else {
      return download(on_, rounded_);
    }
  }

 private:
  Backend& on_;
  GatedSize size_;
  float mix_;
  Buffer<A> wide_, zm_, rounded_;
  Buffer<float> gamma_, bias_, h_;
  Weights weight_;
};

/// How a test runs the loop of sweeps, and what comes of it.
struct SweepOptions {
  std::int64_t window = 64;
  float tolerance = 1e-6F;
  int max_sweeps = 64;
  std::optional<SweepAlgo> algo = {};
};
template <class A>
struct SweepResult {
  std::vector<float> h;
  std::vector<A> rounded;
  SweepCounts counts;
};
/// A case with the states h in the backend's memory, and the loop of sweeps over it.
template <class A>
struct SweepsOn {
  Backend& on;
  SweepOptions options;
  std::int64_t dim;
  GatedOn<A> state;
  Buffer<float> gate, change;

  SweepsOn(Backend& backend, const GatedCase<A>& c, const std::vector<float>& h, const SweepOptions& o)
      : on(backend),
        options(o),
        dim(c.size.dim),
        state(on, c, h),
        gate(unwritten<float>(on, static_cast<std::size_t>(o.window * 2 * dim))),
        change(unwritten<float>(on, static_cast<std::size_t>(2 * o.window))) {}
  GatedSweeps<Space, A> op() {
    return {.in = state.inputs(),
            .gate_weight = state.gate_weight(),
            .gate_bias = state.gate_bias(),
            .tolerance = options.tolerance,
            .max_sweeps = options.max_sweeps,
            .gate = {gate.data(), options.window, 2 * dim},
            .change = change.data()};
  }
#if defined(MMREC_TEST_CUDA)
  SweepCounts call() { return gated_sweeps(on, op(), options.algo); }
  /// Of packed runs [firsts[i], ends[i]), all of which are settled then; of_row names the run of each row.
  SweepCounts call_packed(const std::vector<std::int32_t>& of_row, const std::vector<std::int32_t>& firsts,
                          const std::vector<std::int32_t>& ends) {
    const std::vector<std::uint32_t> zeros(firsts.size(), 0);
    const auto rows = upload(on, of_row), end = upload(on, ends);
    auto settled = upload(on, firsts);
    auto moving = upload(on, zeros);
    const PackedSweeps<Space, A> packed{op(), {rows.data(), end.data(), settled.data(), moving.data(), firsts, ends}};
    const SweepCounts counts = packed_sweeps(on, packed, options.algo);
    EXPECT_EQ(download(on, settled), ends);
    EXPECT_EQ(download(on, moving), zeros);
    return counts;
  }
#else
  SweepCounts call() { return gated_sweeps(on, op()); }
#endif
  SweepResult<A> result(const SweepCounts& counts) const { return {state.states(), state.rounded_states(), counts}; }
};
/// A tolerance, and the error of a time that it leaves. In 16 bits the last sweep's gates may have seen another
/// rounding of some of the states.
template <class A>
inline constexpr float kSweepTolerance = sizeof(A) == 4 ? 1e-6F : 1e-4F;
template <class A>
inline constexpr double kSweepBound = std::is_same_v<A, float>     ? 2e-5
                                      : std::is_same_v<A, Float16> ? 2e-3
                                                                   : 1e-2;

}  // namespace mmrec::kernels::test
