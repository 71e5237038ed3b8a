// linear: against float64 at awkward sizes and in every stored type; the same bits for any threads, rows and jobs; and
// the product kernel of every instruction set.
#include <cmath>
#include <limits>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"
#include "test_util.h"

namespace mmrec::kernels::test {
namespace {

struct Shape {
  std::int64_t n, in, out;
};

constexpr Shape kShapes[] = {{1, 1, 1},     {2, 7, 3},      {3, 31, 7},    {1, 48, 31},   {7, 384, 48},   {127, 48, 31},
                             {128, 31, 48}, {129, 384, 25}, {300, 48, 31}, {1, 384, 384}, {300, 384, 64}, {5, 1000, 31},
                             {26, 4096, 7}, {1, 4096, 48},  {130, 7, 1},   {49, 1000, 1}, {128, 48, 600}};

/// Rows of x . w in float64, and for each the sum of |x w|, which scales the rounding error.
struct Products {
  std::vector<double> value, size;
};
Products reference(const std::vector<float>& x, const Weights& w, std::int64_t n) {
  Products p;
  for (std::int64_t t = 0; t < n; ++t) {
    for (std::int64_t o = 0; o < w.rows; ++o) {
      double sum = 0.0;
      double size = 0.0;
      for (std::int64_t k = 0; k < w.cols; ++k) {
        const double term = static_cast<double>(x[static_cast<std::size_t>(t * w.cols + k)]) * w.at(o, k);
        sum += term;
        size += std::abs(term);
      }
      p.value.push_back(sum);
      p.size.push_back(size);
    }
  }
  return p;
}

double activate(Activation activation, double x) {
  if (activation == Activation::kGelu) return gelu(x);
  if (activation == Activation::kRelu) return x < 0.0 ? 0.0 : x;
  if (activation == Activation::kGeluTanh) return gelu_tanh(x);
  return x;
}

Linear<Host> job_of(const std::vector<float>& x, const Weights& w, std::vector<float>& y, std::int64_t n) {
  Linear<Host> job;
  job.x = {x.data(), n, w.cols};
  job.weight = w.view();
  job.y = {y.data(), n, w.rows};
  return job;
}

TEST(LinearTest, MatchesFloat64WithBiasActivationAndResidual) {
  Cpu cpu(2);
  unsigned seed = 0;
  for (const Shape& s : kShapes) {
    for (const DType dtype : kAllDTypes) {
      for (const Activation activation :
           {Activation::kNone, Activation::kGelu, Activation::kRelu, Activation::kGeluTanh}) {
        ++seed;
        const bool with_bias = seed % 2 == 0;
        const bool with_residual = seed % 5 < 3;
        const std::vector<float> x = random_floats(s.n * s.in, seed);
        const Weights w = random_weights(s.out, s.in, dtype, seed + 1000);
        const std::vector<float> bias = random_floats(s.out, seed + 2000);
        const std::vector<float> residual = random_floats(s.n * s.out, seed + 3000);
        std::vector<float> y = poisoned(s.n * s.out);
        Linear<Host> job = job_of(x, w, y, s.n);
        job.activation = activation;
        if (with_bias) job.bias = bias.data();
        if (with_residual) {
          job.residual = {residual.data(), s.n, s.out};
          job.residual_scale = 0.5F;
        }
        linear(cpu, {&job, 1});
        const Products p = reference(x, w, s.n);
        for (std::size_t i = 0; i < y.size(); ++i) {
          double expected = p.value[i] + (with_bias ? static_cast<double>(bias[i % bias.size()]) : 0.0);
          expected = activate(activation, expected) + (with_residual ? 0.5 * static_cast<double>(residual[i]) : 0.0);
          ASSERT_NEAR(static_cast<double>(y[i]), expected, 6e-7 * (1.0 + p.size[i]))
              << s.n << " x " << s.in << " -> " << s.out << " " << name_of(dtype) << " entry " << i;
        }
      }
    }
  }
}

TEST(LinearTest, TilesOfAnyMagnitudeAreAsWideAsFp32) {
  Cpu cpu(2);
  const std::int64_t n = kRowTile, in = 96, out = 40;
  for (const DType dtype : kAllDTypes) {
    const Weights w = random_weights(out, in, dtype, 7);
    for (const float scale : {1e37F, 1.0F, 1e-20F, 1e-30F}) {
      std::vector<float> x = random_floats(n * in, 11);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] *= i % 3 == 0 ? scale : scale * 1e-4F;
      std::vector<float> y = poisoned(n * out);
      const Linear<Host> job = job_of(x, w, y, n);
      linear(cpu, {&job, 1});
      const Products expected = reference(x, w, n);
      for (std::size_t i = 0; i < y.size(); ++i) {
        // Parts of x below the least normal number of fp32 may be taken for 0.
        ASSERT_NEAR(y[i], expected.value[i], 1e-6 * expected.size[i] + 1e-36) << scale << " at " << i;
      }
    }
  }
}

TEST(LinearTest, TilesMayRoundTheirInputs) {
  const std::int64_t in = 96, out = 168;
  for (const DType dtype : kAllDTypes) {
    const Weights w = random_weights(out, in, dtype, 7);
    const std::vector<float> x = random_floats((kRowTile + 3) * in, 11);
    const auto run = [&](int threads, std::int64_t n, bool rounds) {
      Cpu cpu(threads, rounds);
      std::vector<float> y = poisoned(n * out);
      const Linear<Host> job = job_of(x, w, y, n);
      linear(cpu, {&job, 1});
      return y;
    };
    std::vector<float> rounded = x;
    for (float& v : rounded) v = to_float(from_float<BFloat16>(v));
    const std::vector<float> y = run(1, kRowTile + 3, true), exact = run(1, kRowTile + 3, false);
    EXPECT_TRUE(same_bits(run(2, kRowTile + 3, true), y));
    const auto within = [&](const std::vector<float>& inputs) {
      const Products expected = reference(inputs, w, kRowTile);
      for (std::size_t i = 0; i < expected.value.size(); ++i) {
        if (std::abs(y[i] - expected.value[i]) > 1e-6 * expected.size[i]) return false;
      }
      return true;
    };
    // Without matrix instructions, and with other weights, nothing is rounded.
    EXPECT_TRUE((dtype == DType::kBF16 && within(rounded)) || same_bits(y, exact)) << name_of(dtype);
    for (std::size_t i = static_cast<std::size_t>(kRowTile * out); i < y.size(); ++i) EXPECT_EQ(y[i], exact[i]) << i;
  }
}

TEST(LinearTest, WhatIsNotFiniteStaysSo) {
  Cpu cpu(1);
  const std::int64_t n = kRowTile, in = 64, out = 24;
  for (const DType dtype : kAllDTypes) {
    const Weights w = random_weights(out, in, dtype, 8);
    std::vector<float> x = random_floats(n * in, 12);
    x[5] = std::numeric_limits<float>::quiet_NaN();
    x[static_cast<std::size_t>(in + 1)] = std::numeric_limits<float>::infinity();
    std::vector<float> y = poisoned(n * out);
    const Linear<Host> job = job_of(x, w, y, n);
    linear(cpu, {&job, 1});
    for (std::int64_t i = 0; i < n * out; ++i) {
      ASSERT_EQ(std::isfinite(y[static_cast<std::size_t>(i)]), i >= 2 * out) << i;
    }
  }
}

TEST(LinearTest, StridedViewsAndAliasedResidual) {
  Cpu cpu(2);
  for (const std::int64_t n : {1, 3, 140}) {
    const std::int64_t in = 96;
    const std::int64_t out = 50;
    const std::int64_t pad = 7;
    const std::vector<float> x = random_floats(n * (in + pad), 11);
    const Weights w = random_weights(out, in, DType::kBF16, 12);
    std::vector<float> y = random_floats(n * (out + pad), 13);
    const std::vector<float> before = y;
    Linear<Host> job;
    job.x = {x.data(), n, in, in + pad};
    job.weight = w.view();
    job.y = {y.data(), n, out, out + pad};
    job.residual = job.y;
    linear(cpu, {&job, 1});
    for (std::int64_t t = 0; t < n; ++t) {
      for (std::int64_t o = 0; o < out + pad; ++o) {
        const auto i = static_cast<std::size_t>(t * (out + pad) + o);
        double expected = static_cast<double>(before[i]);
        for (std::int64_t k = 0; o < out && k < in; ++k) {
          expected += static_cast<double>(x[static_cast<std::size_t>(t * (in + pad) + k)]) * w.at(o, k);
        }
        ASSERT_NEAR(static_cast<double>(y[i]), expected, 2e-5) << n << " row " << t << " output " << o;
      }
    }
  }
}

// Rows in no whole tile have the bits of a row alone; cuts between whole tiles change nothing.
TEST(LinearTest, BitsDependOnNeitherThreadsNorCutsOutsideTiles) {
  const std::int64_t n = 300;  // two whole tiles and 44 rows
  const std::int64_t out = 283;
  for (const DType dtype : kAllDTypes) {
    for (const std::int64_t in : {31, 384, 2000}) {
      const std::vector<float> x = random_floats(n * in, 21);
      const Weights w = random_weights(out, in, dtype, 22);
      const std::vector<float> bias = random_floats(out, 23);
      const auto run = [&](int threads, std::int64_t count, bool ragged = false) {
        Cpu cpu(threads);
        std::vector<float> y = poisoned(n * out);
        Linear<Host> job = job_of(x, w, y, n);
        job.bias = bias.data();
        job.activation = Activation::kGelu;
        job.force_row_kernel = ragged;
        for (std::int64_t first = 0; first < n; first += count) {
          Linear<Host> part = job;
          part.x = job.x.middle_rows(first, std::min(count, n - first));
          part.y = job.y.middle_rows(first, part.x.rows);
          linear(cpu, {&part, 1});
        }
        return y;
      };
      const std::vector<float> alone = run(1, 1);
      const std::vector<float> whole = run(1, n);
      for (const int threads : {1, 2, 5}) {
        for (const std::int64_t count : {1, 2, 3, 5, 7, 13, 127}) {
          ASSERT_TRUE(same_bits(run(threads, count), alone)) << threads << " threads, " << count << " rows, in " << in;
        }
        ASSERT_TRUE(same_bits(run(threads, n, true), alone)) << threads << " threads, ragged, in " << in;
        for (const std::int64_t count : {kRowTile, 2 * kRowTile, n}) {
          ASSERT_TRUE(same_bits(run(threads, count), whole)) << threads << " threads, " << count << " rows, in " << in;
        }
      }
    }
  }
}

TEST(LinearTest, JobsTogetherEqualJobsAlone) {
  for (const int threads : {1, 2, 5}) {
    Cpu cpu(threads);
    for (const std::int64_t n : {1, 4, 129}) {
      const std::vector<float> x = random_floats(n * 384, 31);
      std::vector<Weights> weights;
      for (const std::int64_t out : {384, 1, 96, 500, 7}) {
        weights.push_back(random_weights(out, 384, kAllDTypes[out % 3], static_cast<unsigned>(32 + out)));
      }
      std::vector<std::vector<float>> alone;
      std::vector<std::vector<float>> together;
      std::vector<Linear<Host>> jobs;
      for (const Weights& w : weights) {
        alone.push_back(poisoned(n * w.rows));
        together.push_back(poisoned(n * w.rows));
        const Linear<Host> job = job_of(x, w, alone.back(), n);
        linear(cpu, {&job, 1});
      }
      for (std::size_t i = 0; i < weights.size(); ++i) jobs.push_back(job_of(x, weights[i], together[i], n));
      linear(cpu, jobs);
      for (std::size_t i = 0; i < weights.size(); ++i) EXPECT_TRUE(same_bits(together[i], alone[i])) << "job " << i;
    }
  }
}

TEST(LinearTest, NothingToDo) {
  Cpu cpu(2);
  linear(cpu, {});
  std::vector<float> y;
  const Weights w = random_weights(4, 4, DType::kF32, 41);
  const Linear<Host> job = job_of({}, w, y, 0);
  linear(cpu, {&job, 1});
}

class Matvec : public testing::TestWithParam<const SimdKernels*> {};

TEST_P(Matvec, MatchesFloat64AndDoesNotDependOnTheBlock) {
  unsigned seed = 100;
  for (const std::int64_t in : {1, 3, 7, 16, 31, 48, 384, 1000, 4096}) {
    for (const std::int64_t out : {1, 2, 3, 7, 12, 29}) {
      for (const DType dtype : kAllDTypes) {
        ++seed;
        const std::int64_t n = 14;
        const std::vector<float> x = random_floats(n * in, seed);
        const Weights w = random_weights(out, in, dtype, seed + 1000);
        const auto matvec = GetParam()->matvec.matvec[dtype];
        const Products p = reference(x, w, n);
        std::vector<float> single = poisoned(n * out);
        for (std::int64_t t = 0; t < n; ++t) {
          matvec(x.data() + t * in, in, 1, w.bytes.data(), in, out, single.data() + t * out, out);
        }
        for (std::size_t i = 0; i < single.size(); ++i) {
          ASSERT_NEAR(static_cast<double>(single[i]), p.value[i], 1e-6 * (0.1 + p.size[i])) << in << " " << out;
        }
        for (std::int64_t rows = 2; rows <= n; ++rows) {
          std::vector<float> y = poisoned(rows * out);
          matvec(x.data(), in, rows, w.bytes.data(), in, out, y.data(), out);
          ASSERT_TRUE(same_bits(y, {single.data(), y.size()})) << rows << " rows, in = " << in << ", out = " << out;
        }
        for (std::int64_t o = 0; o < out; ++o) {  // each output alone
          std::vector<float> y = poisoned(n);
          matvec(x.data(), in, n, w.view().middle_rows(o, 1).data, in, 1, y.data(), 1);
          for (std::int64_t t = 0; t < n; ++t) {
            ASSERT_EQ(y[static_cast<std::size_t>(t)], single[static_cast<std::size_t>(t * out + o)]);
          }
        }
      }
    }
  }
}

TEST_P(Matvec, Epilogue) {
  for (const std::int64_t count : {1, 3, 16, 37}) {
    const std::vector<float> product = random_floats(count, 51, -3.0F, 3.0F);
    const std::vector<float> bias = random_floats(count, 52);
    const std::vector<float> residual = random_floats(count, 53);
    for (const Activation activation :
         {Activation::kNone, Activation::kGelu, Activation::kRelu, Activation::kGeluTanh}) {
      for (int use = 0; use < 4; ++use) {
        std::vector<float> y = poisoned(count + 1);
        GetParam()->matvec.epilogue[static_cast<int>(activation)](
            product.data(), (use & 1) != 0 ? bias.data() : nullptr, (use & 2) != 0 ? residual.data() : nullptr, 0.25F,
            y.data(), count);
        for (std::size_t i = 0; i < product.size(); ++i) {
          const double before = static_cast<double>(product[i]) + ((use & 1) != 0 ? static_cast<double>(bias[i]) : 0.0);
          const double expected =
              activate(activation, before) + ((use & 2) != 0 ? 0.25 * static_cast<double>(residual[i]) : 0.0);
          ASSERT_NEAR(static_cast<double>(y[i]), expected, 6e-7);
        }
        EXPECT_TRUE(std::isnan(y.back()));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Matvec,
                         testing::ValuesIn(supported_simd_kernels().begin(), supported_simd_kernels().end()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace mmrec::kernels::test
