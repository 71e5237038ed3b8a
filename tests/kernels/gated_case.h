// Inputs of the gated recurrence and its plain float64 rendering, for the tests of gated_recurrence and gated_scan.
#pragma once

#include "kernels/cpu/cpu.h"
#include "test_util.h"

namespace mmrec::kernels::test {

struct GatedCase {
  std::int64_t batch, time, dim;
  std::vector<float> z, zm, gamma, carry, bias;
  Weights gates;  // [2 dim, dim]
  float mdi_mix = 0.1F;

  GatedCase(std::int64_t batch_size, std::int64_t tokens, std::int64_t channels, DType dtype, unsigned seed)
      : batch(batch_size),
        time(tokens),
        dim(channels),
        z(random_floats(batch * time * dim, seed, -2.0F, 2.0F)),
        zm(random_floats(batch * time * dim, seed + 1, -2.0F, 2.0F)),
        gamma(random_floats(batch * time * dim, seed + 2, 0.05F, 0.85F)),
        carry(random_floats(batch * dim, seed + 3)),
        bias(random_floats(dim, seed + 4)),
        gates(random_weights(2 * dim, dim, dtype, seed + 5, 1.0F / std::sqrt(static_cast<float>(dim)))) {}

  /// [batch, time + 1, dim]: the carry, then poison.
  std::vector<float> fresh_state() const {
    std::vector<float> h = poisoned(batch * (time + 1) * dim);
    for (std::int64_t b = 0; b < batch; ++b) {
      std::copy_n(carry.begin() + b * dim, dim, h.begin() + b * (time + 1) * dim);
    }
    return h;
  }

  /// Tokens first..first + count of all sequences.
  GatedRecurrence<Host> recurrence(std::vector<float>& h, std::int64_t first, std::int64_t count) const {
    const auto part = [&](const std::vector<float>& x) {
      SequenceView<const float, Host> view(x.data() + first * dim, batch, count, dim);
      view.batch_stride = time * dim;
      return view;
    };
    GatedRecurrence<Host> op;
    op.in.z = part(z);
    op.in.zm = part(zm);
    op.in.gamma = part(gamma);
    op.in.h = {h.data() + first * dim, batch, count + 1, dim};
    op.in.h.batch_stride = (time + 1) * dim;
    op.in.mdi_mix = mdi_mix;
    op.gate_weight = gates.view();
    op.gate_bias = bias.data();
    return op;
  }

  std::vector<double> reference() const {
    std::vector<double> h(static_cast<std::size_t>(batch * (time + 1) * dim));
    const double mu = static_cast<double>(mdi_mix);
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t c = 0; c < dim; ++c) {
        h[static_cast<std::size_t>(b * (time + 1) * dim + c)] =
            static_cast<double>(carry[static_cast<std::size_t>(b * dim + c)]);
      }
      for (std::int64_t t = 0; t < time; ++t) {
        const double* before = &h[static_cast<std::size_t>((b * (time + 1) + t) * dim)];
        for (std::int64_t c = 0; c < dim; ++c) {
          const auto i = static_cast<std::size_t>((b * time + t) * dim + c);
          double s = static_cast<double>(bias[static_cast<std::size_t>(c)]);
          double g = static_cast<double>(zm[i]);
          for (std::int64_t k = 0; k < dim; ++k) {
            s += gates.at(c, k) * before[k];
            g += gates.at(dim + c, k) * before[k];
          }
          s = sigmoid(s);
          g = sigmoid(g);
          const double y = static_cast<double>(gamma[i]);
          h[static_cast<std::size_t>((b * (time + 1) + t + 1) * dim + c)] =
              (y + mu * (1.0 - g + y)) * before[c] + static_cast<double>(z[i]) * (s + mu * g);
        }
      }
    }
    return h;
  }
};

}  // namespace mmrec::kernels::test
