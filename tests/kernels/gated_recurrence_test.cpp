// gated_recurrence against float64; the same bits for any cut into calls, any batch, any threads and beside any others.
#include "gated_case.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels::test {
namespace {

TEST(GatedRecurrenceTest, MatchesFloat64) {
  unsigned seed = 1;
  for (const int threads : {1, 2, 5}) {
    Cpu cpu(threads);
    for (const DType dtype : kAllDTypes) {
      for (const std::int64_t dim : {1, 7, 31, 48, 100, 384}) {
        for (const std::int64_t batch : {1, 2, 5}) {
          GatedCase c(batch, dim > 100 ? 4 : 23, dim, dtype, seed += 10);
          c.mdi_mix = seed % 20 == 1 ? 0.0F : 0.1F;
          std::vector<float> h = c.fresh_state();
          gated_recurrence(cpu, c.recurrence(h, 0, c.time));
          EXPECT_LT(max_error(h, c.reference()), 1e-5) << batch << " x " << dim << " " << name_of(dtype);
        }
      }
    }
  }
}

TEST(GatedRecurrenceTest, BitsDependOnNeitherCutsNorBatchNorThreads) {
  for (const std::int64_t dim : {48, 104, 384}) {
    const GatedCase c(3, 10, dim, DType::kBF16, 77);
    Cpu one(1);
    std::vector<float> expected = c.fresh_state();
    gated_recurrence(one, c.recurrence(expected, 0, 10));
    for (const int threads : {1, 2, 5}) {
      Cpu cpu(threads);
      for (const std::vector<std::int64_t>& cuts : {std::vector<std::int64_t>{10}, {1, 2, 7}, {4, 6}, {1, 1, 8}}) {
        std::vector<float> h = c.fresh_state();
        std::int64_t first = 0;
        for (const std::int64_t count : cuts) {
          gated_recurrence(cpu, c.recurrence(h, first, count));
          first += count;
        }
        EXPECT_TRUE(same_bits(h, expected)) << threads << " threads, " << cuts.size() << " calls, dim " << dim;
      }
      std::vector<float> h = c.fresh_state();
      for (std::int64_t b = 0; b < c.batch; ++b) {  // each sequence alone
        GatedRecurrence<Host> op = c.recurrence(h, 0, 10);
        for (auto* view : {&op.in.z, &op.in.zm, &op.in.gamma}) {
          view->data = view->at(b, 0, 0);
          view->batch = 1;
        }
        op.in.h.data = op.in.h.at(b, 0, 0);
        op.in.h.batch = 1;
        gated_recurrence(cpu, op);
      }
      EXPECT_TRUE(same_bits(h, expected)) << "sequences alone";
    }
  }
}

// Lengths fall, rise and repeat; few sequences share channels, many are shared between threads in groups.
TEST(GatedRecurrenceTest, SequencesOfAnyLengthsGoTogether) {
  unsigned seed = 900;
  for (const std::int64_t dim : {7, 48, 200}) {
    for (const std::int64_t inputs : {1, 2, 5, 13, 30, 61}) {
      const Weights gates = random_weights(2 * dim, dim, kAllDTypes[seed % 3], seed, 0.1F);
      std::vector<GatedCase> cases;
      std::vector<std::vector<float>> alone;
      Cpu one(1);
      for (std::int64_t i = 0; i < inputs; ++i) {
        GatedCase& c = cases.emplace_back(1 + i % 3, (i * 7) % 19, dim, DType::kF32, seed += 10);
        c.gates = gates;
        c.bias = cases.front().bias;
        alone.push_back(c.fresh_state());
        gated_recurrence(one, c.recurrence(alone.back(), 0, c.time));
        EXPECT_LT(max_error(alone.back(), c.reference()), 1e-5);
      }
      for (const int threads : {1, 2, 5}) {
        Cpu cpu(threads);
        std::vector<std::vector<float>> together;
        std::vector<GateInputs<Host>> in;
        for (const GatedCase& c : cases) {
          together.push_back(c.fresh_state());
          in.push_back(c.recurrence(together.back(), 0, c.time).in);
        }
        gated_recurrences(cpu, {.in = in, .gate_weight = gates.view(), .gate_bias = cases.front().bias.data()});
        for (std::size_t i = 0; i < cases.size(); ++i) {
          EXPECT_TRUE(same_bits(together[i], alone[i]))
              << i << " of " << inputs << ", dim " << dim << ", " << threads << " threads";
        }
      }
    }
  }
}

TEST(GatedRecurrenceTest, StepInEveryInstructionSet) {
  for (const SimdKernels* table : supported_simd_kernels()) {
    for (const std::int64_t n : {1, 5, 16, 37}) {
      const std::vector<float> s = random_floats(n, 1, -4.0F, 4.0F);
      const std::vector<float> g = random_floats(n, 2, -4.0F, 4.0F);
      const std::vector<float> z = random_floats(n, 3);
      const std::vector<float> zm = random_floats(n, 4);
      const std::vector<float> gamma = random_floats(n, 5, 0.0F, 1.0F);
      const std::vector<float> h = random_floats(n, 6);
      std::vector<float> next = poisoned(n + 1);
      table->recurrence.step(
          {s.data(), h.data(), g.data(), z.data(), zm.data(), gamma.data(), h.data(), next.data(), 0.1F, n});
      EXPECT_TRUE(std::isnan(next.back()));
      for (std::size_t i = 0; i < h.size(); ++i) {
        const double ss = sigmoid(static_cast<double>(s[i]) + static_cast<double>(h[i]));
        const double gg = sigmoid(static_cast<double>(g[i]) + static_cast<double>(zm[i]));
        const double y = static_cast<double>(gamma[i]);
        const double mu = static_cast<double>(0.1F);
        EXPECT_NEAR(static_cast<double>(next[i]),
                    (y + mu * (1.0 - gg + y)) * static_cast<double>(h[i]) + static_cast<double>(z[i]) * (ss + mu * gg),
                    6e-7)
            << table->name;
      }
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
