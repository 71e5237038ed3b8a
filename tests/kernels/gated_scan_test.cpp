// gated_scan: one sweep against float64, its change and magnitude, and its fixed point, which is gated_recurrence.
#include <algorithm>

#include "gated_case.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels::test {
namespace {

struct Sweep {
  std::vector<float> gate, change, magnitude;
};

/// Gates from the iterate in h for times first.., then one sweep.
Sweep sweep(Cpu& cpu, const GatedCase& c, std::vector<float>& h, std::int64_t first) {
  Sweep s{poisoned(c.batch * c.time * 2 * c.dim), poisoned(c.time), poisoned(c.time)};
  std::vector<float> bias = c.bias;
  bias.resize(static_cast<std::size_t>(2 * c.dim), 0.0F);
  for (std::int64_t b = 0; b < c.batch; ++b) {
    Linear<Host> job;
    job.x = {h.data() + (b * (c.time + 1) + first) * c.dim, c.time - first, c.dim};
    job.weight = c.gates.view();
    job.bias = bias.data();
    job.y = {s.gate.data() + (b * c.time + first) * 2 * c.dim, c.time - first, 2 * c.dim};
    linear(cpu, {&job, 1});
  }
  gated_scan(cpu, {.in = c.recurrence(h, 0, c.time).in,
                   .gate = {s.gate.data(), c.batch, c.time, 2 * c.dim},
                   .first = first,
                   .change = s.change.data(),
                   .magnitude = s.magnitude.data()});
  return s;
}

std::vector<float> zero_state(const GatedCase& c) {
  std::vector<float> h = c.fresh_state();
  for (float& v : h) v = std::isnan(v) ? 0.0F : v;
  return h;
}

TEST(GatedScanTest, OneSweepMatchesFloat64) {
  unsigned seed = 1;
  for (const std::int64_t dim : {1, 7, 48, 64, 100, 384}) {
    for (const std::int64_t first : {0, 5}) {
      const GatedCase c(3, 40, dim, DType::kF32, seed += 10);
      std::vector<float> h = random_floats(c.batch * (c.time + 1) * c.dim, seed + 7);
      const std::vector<float> old = h;
      Cpu cpu(2);
      const Sweep s = sweep(cpu, c, h, first);
      std::vector<double> expected(old.begin(), old.end());
      std::vector<double> change(static_cast<std::size_t>(c.time), 0.0);
      std::vector<double> magnitude(static_cast<std::size_t>(c.time), 0.0);
      for (std::int64_t b = 0; b < c.batch; ++b) {
        for (std::int64_t t = first; t < c.time; ++t) {
          for (std::int64_t k = 0; k < dim; ++k) {
            const auto in = static_cast<std::size_t>((b * c.time + t) * dim + k);
            const auto row = static_cast<std::size_t>((b * (c.time + 1) + t) * dim + k);
            const auto gate = static_cast<std::size_t>((b * c.time + t) * 2 * dim + k);
            const double ss = sigmoid(static_cast<double>(s.gate[gate]));
            const double gg = sigmoid(static_cast<double>(c.zm[in]) +
                                      static_cast<double>(s.gate[gate + static_cast<std::size_t>(dim)]));
            const double y = static_cast<double>(c.gamma[in]);
            const double next =
                (y + 0.1 * (1.0 - gg + y)) * expected[row] + static_cast<double>(c.z[in]) * (ss + 0.1 * gg);
            const auto to = row + static_cast<std::size_t>(dim);
            auto& top = change[static_cast<std::size_t>(t)];
            top = std::max(top, std::abs(next - static_cast<double>(old[to])));
            magnitude[static_cast<std::size_t>(t)] = std::max(magnitude[static_cast<std::size_t>(t)], std::abs(next));
            expected[to] = next;
          }
        }
      }
      EXPECT_LT(max_error(h, expected), 5e-6) << dim << " from " << first;
      for (std::int64_t t = 0; t < c.time; ++t) {
        const auto i = static_cast<std::size_t>(t);
        if (t < first) {
          EXPECT_TRUE(std::isnan(s.change[i]) && std::isnan(s.magnitude[i])) << "written before `first`";
        } else {
          EXPECT_NEAR(static_cast<double>(s.change[i]), change[i], 1e-5);
          EXPECT_NEAR(static_cast<double>(s.magnitude[i]), magnitude[i], 1e-5);
        }
      }
    }
  }
}

TEST(GatedScanTest, ReachesTheExactRecurrenceBitForBit) {
  for (const std::int64_t dim : {48, 100}) {
    const GatedCase c(2, 63, dim, DType::kBF16, 5);
    Cpu cpu(2);
    std::vector<float> exact = c.fresh_state();
    gated_recurrence(cpu, c.recurrence(exact, 0, c.time));
    std::vector<float> h = zero_state(c);
    int sweeps = 0;
    for (float left = 1.0F; left > 0.0F; ++sweeps) {
      ASSERT_LE(sweeps, c.time);  // after k sweeps at least k tokens are exact
      const Sweep s = sweep(cpu, c, h, 0);
      left = *std::max_element(s.change.begin(), s.change.end());
    }
    EXPECT_TRUE(same_bits(h, exact)) << dim;
    EXPECT_LT(sweeps, c.time);
  }
}

TEST(GatedScanTest, BitsDependOnNeitherThreadsNorTheFrozenPrefix) {
  const GatedCase c(3, 60, 200, DType::kF32, 9);
  Cpu one(1);
  std::vector<float> expected = zero_state(c);
  Sweep last;
  for (int i = 0; i < 3; ++i) last = sweep(one, c, expected, 0);
  for (const int threads : {2, 5}) {
    Cpu cpu(threads);
    std::vector<float> h = zero_state(c);
    Sweep s;
    for (int i = 0; i < 3; ++i) s = sweep(cpu, c, h, i);  // after i sweeps the first i tokens stand
    EXPECT_TRUE(same_bits(h, expected));
    EXPECT_TRUE(same_bits({s.change.data() + 2, 58}, {last.change.data() + 2, 58}));
    EXPECT_TRUE(same_bits({s.magnitude.data() + 2, 58}, {last.magnitude.data() + 2, 58}));
  }
}

TEST(GatedScanTest, NanNeverLooksConverged) {
  for (const SimdKernels* table : supported_simd_kernels()) {
    for (const std::size_t bad : {0U, 3U, 20U, 52U}) {
      const std::int64_t n = 53;
      std::vector<float> z = random_floats(2 * n, 1);
      z[bad] = std::numeric_limits<float>::quiet_NaN();
      const std::vector<float> x = random_floats(2 * n, 2);
      std::vector<float> h(static_cast<std::size_t>(3 * n), 0.0F);
      std::vector<float> change(2, 0.0F);
      std::vector<float> magnitude(2, 0.0F);
      table->recurrence.scan({x.data(), x.data(), n, z.data(), n, x.data(), n, x.data(), n, h.data(), n, 0.1F, 2, n,
                              change.data(), magnitude.data()});
      for (const std::size_t t : {0U, 1U}) {
        EXPECT_TRUE(std::isinf(change[t]) && std::isinf(magnitude[t])) << table->name << " entry " << bad;
      }
    }
  }
}

TEST(GatedScanTest, EveryInstructionSetEqualsItsOwnSteps) {
  for (const SimdKernels* table : supported_simd_kernels()) {
    for (const std::int64_t n : {1, 4, 17, 64}) {
      const std::int64_t time = 9;
      const std::vector<float> s = random_floats(time * n, 1);
      const std::vector<float> g = random_floats(time * n, 2);
      const std::vector<float> z = random_floats(time * n, 3);
      const std::vector<float> zm = random_floats(time * n, 4);
      const std::vector<float> gamma = random_floats(time * n, 5, 0.0F, 1.0F);
      std::vector<float> h = random_floats((time + 1) * n, 6);
      std::vector<float> steps = h;
      std::vector<float> change(static_cast<std::size_t>(time), 0.0F);
      std::vector<float> magnitude = change;
      table->recurrence.scan({s.data(), g.data(), n, z.data(), n, zm.data(), n, gamma.data(), n, h.data(), n, 0.1F,
                              time, n, change.data(), magnitude.data()});
      for (std::int64_t t = 0; t < time; ++t) {
        table->recurrence.step({s.data() + t * n, nullptr, g.data() + t * n, z.data() + t * n, zm.data() + t * n,
                                gamma.data() + t * n, steps.data() + t * n, steps.data() + (t + 1) * n, 0.1F, n});
      }
      EXPECT_TRUE(same_bits(h, steps)) << table->name;
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
