// The recurrence that is normed at every token, against float64; its bits do not depend on threads, neighbours or cuts.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"
#include "tests/kernels/bank_case.h"

namespace mmrec::kernels::test {
namespace {

struct Operands {
  RunShapes shapes;
  std::int64_t dim;
  bool carries;
  std::vector<float> z, zm, gamma, bias, norm, state;
  Weights weight;

  Operands(RunShapes runs, std::int64_t channels, bool with_state, DType dtype, unsigned seed)
      : shapes(std::move(runs)),
        dim(channels),
        carries(with_state),
        z(random_floats(shapes.total() * dim, seed, -2.0F, 2.0F)),
        zm(random_floats(shapes.total() * dim, seed + 1, -2.0F, 2.0F)),
        gamma(random_floats(shapes.total() * dim, seed + 2, 0.05F, 0.85F)),
        bias(random_floats(dim, seed + 3)),
        norm(random_floats(dim, seed + 4, 0.5F, 1.5F)),
        state(random_floats(std::ssize(shapes.rows) * dim, seed + 5)),
        weight(random_weights(dim, dim, dtype, seed + 6, 0.5F / std::sqrt(static_cast<float>(dim)))) {}

  NormedCase exact() const {
    const auto wide = [](const std::vector<float>& x) { return std::vector<double>(x.begin(), x.end()); };
    return {.shapes = shapes,
            .dim = dim,
            .carries = carries,
            .z = wide(z),
            .zm = wide(zm),
            .gamma = wide(gamma),
            .weight = weight.values,
            .bias = wide(bias),
            .norm = wide(norm),
            .state = wide(state)};
  }

  /// h [total, dim], NaN in gaps; the state goes on where there is one.
  std::vector<float> run(Cpu& cpu, std::vector<BankRun> runs, std::vector<float>& states,
                         std::int64_t layer = 0) const {
    std::vector<float> h = poisoned(shapes.total() * dim);
    std::int32_t longest = 0;
    for (std::size_t r = 0; r < runs.size(); ++r) {
      if (carries && runs[r].state == nullptr) {
        runs[r].state = states.data() + (static_cast<std::int64_t>(r) - layer) * dim;
      }
      longest = std::max(longest, runs[r].rows);
    }
    const std::int64_t rows = shapes.total();
    normed_recurrence(cpu, {.z = {z.data(), rows, dim},
                            .zm = {zm.data(), rows, dim},
                            .gamma = {gamma.data(), rows, dim},
                            .h = {h.data(), rows, dim},
                            .h_rounded = {h.data(), rows, dim},
                            .gate_weight = weight.view(),
                            .gate_bias = bias.data(),
                            .norm = norm.data(),
                            .runs = {runs.data(), runs.data(), std::ssize(runs), longest},
                            .carries = carries,
                            .layer = layer});
    return h;
  }
};

const RunShapes kShapes[] = {{{1}}, {{5}}, {{1, 1, 1}}, {{3, 9, 0, 1, 4}, 1}, {std::vector<std::int32_t>(60, 3)}};

TEST(NormedRecurrenceTest, MatchesFloat64) {
  Cpu cpu(2);
  unsigned seed = 1;
  for (const RunShapes& shapes : kShapes) {
    for (const std::int64_t dim : {1, 7, 48, 64, 200}) {
      for (const bool carries : {false, true}) {
        const Operands operands(shapes, dim, carries, kAllDTypes[seed % 3], seed);
        seed += 10;
        std::vector<float> state = operands.state;
        const std::vector<float> h = operands.run(cpu, shapes.list(), state);
        std::vector<double> state_after;
        const std::vector<double> expected = operands.exact().reference(state_after, [](double x) { return x; });
        for (const BankRun& run : shapes.list()) {
          const auto first = static_cast<std::ptrdiff_t>(run.first * dim);
          const auto count = static_cast<std::size_t>(run.rows * dim);
          EXPECT_LT(max_error({h.data() + first, count}, {expected.data() + first, count}), 1e-5) << dim;
        }
        EXPECT_LT(max_error(state, state_after), 1e-5) << dim;  // untouched where it does not go on
      }
    }
  }
}

TEST(NormedRecurrenceTest, ThreadsNeighboursAndCutsChangeNoBit) {
  const RunShapes shapes{{7, 40, 1, 13, 2}};
  const Operands operands(shapes, 300, true, DType::kF32, 77);
  Cpu one(1);
  std::vector<float> state = operands.state;
  const std::vector<float> expected = operands.run(one, shapes.list(), state);
  for (const int threads : {2, 5}) {
    Cpu cpu(threads);
    std::vector<float> same = operands.state;
    EXPECT_TRUE(same_bits(operands.run(cpu, shapes.list(), same, 2), expected)) << threads;
    EXPECT_TRUE(same_bits(same, state)) << threads;
  }
  Cpu cpu(3);
  for (std::size_t r = 0; r < shapes.rows.size(); ++r) {  // a run alone, in two calls
    BankRun run = shapes.list()[r];
    std::vector<float> alone(operands.state.begin() + static_cast<std::ptrdiff_t>(r) * 300,
                             operands.state.begin() + static_cast<std::ptrdiff_t>(r + 1) * 300);
    run.state = alone.data();
    const std::int32_t rows = run.rows;
    for (std::int32_t done = 0; done < rows;) {
      run.rows = done == 0 ? (rows + 1) / 2 : rows - done;
      const std::vector<float> h = operands.run(cpu, {run}, alone);
      const auto at = static_cast<std::size_t>(run.first) * 300;
      const auto count = static_cast<std::size_t>(run.rows) * 300;
      EXPECT_TRUE(same_bits({h.data() + at, count}, {expected.data() + at, count})) << r;
      done += run.rows;
      run.first += run.rows;
    }
    EXPECT_TRUE(same_bits(alone, {state.data() + r * 300, 300})) << r;
  }
}

TEST(NormedRecurrenceTest, EveryInstructionSet) {
  for (const SimdKernels* table : supported_simd_kernels()) {
    for (const std::int64_t n : {1, 5, 16, 37}) {
      const std::vector<float> product = random_floats(n, 1), zm = random_floats(n, 2), z = random_floats(n, 3);
      const std::vector<float> gamma = random_floats(n, 4, 0.0F, 1.0F), h = random_floats(n, 5),
                               bias = random_floats(n, 6);
      std::vector<float> p = poisoned(n);
      table->recurrence.normed_step(
          {product.data(), bias.data(), zm.data(), z.data(), gamma.data(), h.data(), p.data(), n});
      std::vector<double> expected;
      for (std::size_t i = 0; i < p.size(); ++i) {
        const double m =
            sigmoid(static_cast<double>(product[i]) + static_cast<double>(zm[i]) + static_cast<double>(bias[i]));
        expected.push_back((1.0 - m + static_cast<double>(gamma[i])) * static_cast<double>(h[i]) +
                           m * static_cast<double>(z[i]));
      }
      EXPECT_LT(max_error(p, expected), 5e-7) << table->name;
      table->recurrence.norm_within(bias.data(), 300.0F, 100.0F, p.data(), n);
      for (std::size_t i = 0; i < p.size(); ++i) {
        expected[i] = std::clamp(static_cast<double>(bias[i]) * 300.0 * expected[i], -100.0, 100.0);
      }
      EXPECT_LT(max_error(p, expected), 2e-4) << table->name;
      std::vector<float> nan = poisoned(n);
      table->recurrence.norm_within(bias.data(), 1.0F, 100.0F, nan.data(), n);
      for (const float x : nan) EXPECT_TRUE(std::isnan(x)) << table->name;
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
