// decay_gate against fp64, with one gate and with two, at the clamps, at infinities and in place.
#include "tests/kernels/cuda/dense_testing.h"

namespace mmrec::kernels::test {
namespace {

double logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double clamped(double x) { return std::isnan(x) ? x : std::min(std::max(x, 1e-6), 1.0 - 1e-6); }

class CudaDecayGateTest : public CudaTest {};

TEST_F(CudaDecayGateTest, MatchesFloat64) {
  for (const std::int64_t dim : {1, 7, 48, 1000, 4096}) {
    for (const std::int64_t rows : {1, 5, 130}) {
      if (small_sizes() && rows * dim > 20000) continue;
      for (const Layout layout : {kPacked, kAlignedGaps, kUnaligned}) {
        for (const bool two : {false, true}) {
          for (const int alias : {0, 1, 2}) {
            if (alias == 2 && !two) continue;
            DeviceMatrix<float> a = random_matrix<float>(cuda(), rows, dim, layout, 1, 6.0);
            DeviceMatrix<float> c = random_matrix<float>(cuda(), rows, dim, kPacked, 2, 6.0);
            DeviceMatrix<float> fresh(cuda(), rows, dim, layout);
            DeviceMatrix<float>& gamma = alias == 0 ? fresh : alias == 1 ? a : c;
            DecayGate<Device> op{.a = a.view(), .gamma = gamma.view()};
            if (two) op.c = c.view();
            decay_gate(cuda(), op);
            const std::vector<float> got = gamma.download();
            for (std::int64_t r = 0; r < rows; ++r) {
              for (std::int64_t i = 0; i < dim; ++i) {
                const double want = clamped(logistic(a(r, i)) * (two ? logistic(c(r, i)) : 1.0));
                // eˣ carries the rounding of x log₂e, so small gates lose a little.
                ASSERT_NEAR(static_cast<double>(got[static_cast<std::size_t>(r * dim + i)]), want,
                            want * (4e-7 - 2e-7 * std::log(want)))
                    << rows << " x " << dim << ", alias " << alias;
              }
            }
          }
        }
      }
    }
  }
}

TEST_F(CudaDecayGateTest, Extremes) {
  const std::vector<float> values = {INFINITY, -INFINITY, NAN, 200.0F, -200.0F, 88.5F, -88.5F, 3e38F, -3e38F, 0.0F};
  const auto count = static_cast<std::int64_t>(values.size());
  DeviceMatrix<float> a(cuda(), values, 1, count);
  DeviceMatrix<float> c(cuda(), std::vector<float>(values.size(), 200.0F), 1, count);
  for (const bool two : {false, true}) {
    DeviceMatrix<float> gamma(cuda(), 1, count);
    DecayGate<Device> op{.a = a.view(), .gamma = gamma.view()};
    if (two) op.c = c.view();
    decay_gate(cuda(), op);
    const std::vector<float> got = gamma.download();
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(rounds_to(got[i], clamped(logistic(static_cast<double>(values[i]))), 1e-7)) << values[i];
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
