// What the tests of the recurrence on the device share: random operands with z as a part of wider rows, as in the
// model, the state with its carry, and one time's float64 arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>
#include <vector>

#include "kernels/cuda/recurrence/algo.h"
#include "tests/kernels/cuda/cuda_testing.h"

namespace mmrec::kernels::test {

struct GatedSize {
  std::int64_t batch, time, dim;
  std::size_t rows() const { return static_cast<std::size_t>(batch * time); }
  std::size_t elements() const { return static_cast<std::size_t>(batch * time * dim); }
};

template <class A>
inline constexpr DType kGatedType = DType::kF32;
template <>
inline constexpr DType kGatedType<BFloat16> = DType::kBF16;
template <>
inline constexpr DType kGatedType<Float16> = DType::kF16;

inline double logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }

template <class A>
struct GatedCase {
  GatedSize size;
  std::vector<A> wide;  // [B, T, 3D], z in the middle
  std::vector<A> zm;    // [B, T, D]
  std::vector<float> gamma, carry, bias;
  std::vector<A> weight;  // [2D, D]
  float mix = 0.1F;

  explicit GatedCase(const GatedSize& s, std::uint64_t stream = 0)
      : size(s),
        wide(random_uniform<A>(3 * s.elements(), -2.0, 2.0, stream)),
        zm(random_uniform<A>(s.elements(), -2.0, 2.0, stream + 1)),
        gamma(random_uniform<float>(s.elements(), 0.05, 0.85, stream + 2)),
        carry(random_normal<float>(static_cast<std::size_t>(s.batch * s.dim), 0.0, 1.0, stream + 3)),
        bias(random_normal<float>(static_cast<std::size_t>(s.dim), 0.0, 1.0, stream + 4)),
        weight(random_normal<A>(static_cast<std::size_t>(2 * s.dim * s.dim), 0.0,
                                1.0 / std::sqrt(static_cast<double>(s.dim)), stream + 5)) {}

  double z_at(std::int64_t b, std::int64_t t, std::int64_t c) const {
    return static_cast<double>(to_float(wide[index(b, t, 0) * 3 + static_cast<std::size_t>(size.dim + c)]));
  }
  /// h_t of channel c from h_{t-1} and the products with it.
  double next(std::int64_t b, std::int64_t t, std::int64_t c, double before, double s, double g) const {
    const auto gamma_t = static_cast<double>(gamma[index(b, t, c)]);
    s = logistic(s);
    g = logistic(g + static_cast<double>(to_float(zm[index(b, t, c)])));
    const auto mu = static_cast<double>(mix);
    return (gamma_t + mu * (1.0 - g + gamma_t)) * before + z_at(b, t, c) * (s + mu * g);
  }
  double bias_at(std::int64_t c) const {
    return bias.empty() ? 0.0 : static_cast<double>(bias[static_cast<std::size_t>(c)]);
  }
  std::size_t index(std::int64_t b, std::int64_t t, std::int64_t c) const {
    return static_cast<std::size_t>((b * size.time + t) * size.dim + c);
  }
  /// Of h, which has a row more.
  std::size_t state_index(std::int64_t b, std::int64_t row, std::int64_t c) const {
    return static_cast<std::size_t>((b * (size.time + 1) + row) * size.dim + c);
  }
  std::size_t states() const { return static_cast<std::size_t>(size.batch * (size.time + 1) * size.dim); }

  /// [B, T + 1, D]: the carry, then what comes later is NaN.
  std::vector<float> fresh_state() const {
    std::vector<float> h(states(), std::nanf(""));
    for (std::int64_t b = 0; b < size.batch; ++b) {
      std::copy_n(carry.begin() + b * size.dim, size.dim,
                  h.begin() + static_cast<std::ptrdiff_t>(state_index(b, 0, 0)));
    }
    return h;
  }
};

template <class A>
std::vector<A> rounded_to(const std::vector<float>& values) {
  std::vector<A> rounded(values.size());
  parallel_for(static_cast<std::int64_t>(values.size()), [&](std::int64_t i) {
    rounded[static_cast<std::size_t>(i)] = from_float<A>(values[static_cast<std::size_t>(i)]);
  });
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
/// one time, whatever the element type. Times of which `leaves_out` says so are not looked at.
template <class A>
double one_time_error(const GatedCase<A>& c, const std::vector<float>& h, const std::vector<A>& rounded,
                      const std::function<bool(std::int64_t)>& leaves_out = {}) {
  const auto [batch, time, dim] = c.size;
  const std::vector<double> seen = widened(rounded);
  return parallel_max(dim, [&, batch = batch, time = time, dim = dim](std::int64_t i) {
    // Rows i of the two matrices; in this order they stay in the cache while the states pass by.
    std::vector<double> row(static_cast<std::size_t>(2 * dim));
    for (std::int64_t k = 0; k < dim; ++k) {
      row[static_cast<std::size_t>(2 * k)] =
          static_cast<double>(to_float(c.weight[static_cast<std::size_t>(i * dim + k)]));
      row[static_cast<std::size_t>(2 * k + 1)] =
          static_cast<double>(to_float(c.weight[static_cast<std::size_t>((dim + i) * dim + k)]));
    }
    double worst = 0.0;
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t t = 0; t < time; ++t) {
        if (leaves_out && leaves_out(t)) continue;
        const double* before = seen.data() + c.state_index(b, t, 0);
        double s = c.bias_at(i);
        double g = 0.0;
        for (std::size_t k = 0; k < static_cast<std::size_t>(dim); ++k) {
          s += before[k] * row[2 * k];
          g += before[k] * row[2 * k + 1];
        }
        const double want = c.next(b, t, i, static_cast<double>(h[c.state_index(b, t, i)]), s, g);
        const double error =
            std::abs(static_cast<double>(h[c.state_index(b, t + 1, i)]) - want) / (1.0 + std::abs(want));
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
    }
    return worst;
  });
}

/// A case on the device with its state.
template <class A>
struct GatedOnDevice {
  GatedSize size;
  float mix;
  bool has_bias;
  DeviceBuffer<A> wide, zm, weight, rounded;
  DeviceBuffer<float> gamma, bias, h;

  GateInputs<Device, A> inputs() {
    GateInputs<Device, A> in;
    in.z = {wide.data() + size.dim, size.batch, size.time, size.dim};
    in.z.time_stride = 3 * size.dim;
    in.z.batch_stride = size.time * 3 * size.dim;
    in.zm = {zm.data(), size.batch, size.time, size.dim};
    in.gamma = {gamma.data(), size.batch, size.time, size.dim};
    in.h = {h.data(), size.batch, size.time + 1, size.dim};
    if constexpr (std::is_same_v<A, float>) {
      in.h_rounded = in.h;
    } else {
      in.h_rounded = {rounded.data(), size.batch, size.time + 1, size.dim};
    }
    in.mdi_mix = mix;
    return in;
  }
  WeightView<Device> gate_weight() const { return {weight.data(), kGatedType<A>, 2 * size.dim, size.dim}; }
  const float* gate_bias() const { return has_bias ? bias.data() : nullptr; }
};

/// How a test runs the loop of sweeps, and what comes of it.
struct SweepOptions {
  std::int64_t window = 64;
  float tolerance = 1e-6F;
  int max_sweeps = 64;
  std::optional<SweepAlgo> way = {};
};
template <class A>
struct SweepResult {
  std::vector<float> h;
  std::vector<A> rounded;
  SweepCounts counts;
};

class GatedTest : public CudaTest {
 protected:
  template <class A>
  GatedOnDevice<A> on_device(const GatedCase<A>& c, const std::vector<float>& h) {
    return {c.size,
            c.mix,
            !c.bias.empty(),
            to_device(c.wide),
            to_device(c.zm),
            to_device(c.weight),
            to_device(rounded_to<A>(h)),
            to_device(c.gamma),
            to_device(c.bias),
            to_device(h)};
  }
  /// h as the products see it.
  template <class A>
  std::vector<A> rounded_of(const GatedOnDevice<A>& on) {
    if constexpr (std::is_same_v<A, float>) {
      return to_host(on.h);
    } else {
      return to_host(on.rounded);
    }
  }
};

}  // namespace mmrec::kernels::test
