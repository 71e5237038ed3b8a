// rmsnorm against fp64: every output type, long rows, the epsilon beside the root and inside, values whose squares
// overflow fp32, bits that depend on the row alone.
#include "tests/kernels/cuda/dense_testing.h"

namespace mmrec::kernels::test {
namespace {

std::vector<double> reference(const DeviceMatrix<float>& x, const std::vector<float>& weight, std::int64_t rows,
                              NormEpsilon epsilon = NormEpsilon::kBesideRoot) {
  const auto dim = static_cast<std::int64_t>(weight.size());
  std::vector<double> y;
  for (std::int64_t r = 0; r < rows; ++r) {
    double squares = 0.0;
    for (std::int64_t c = 0; c < dim; ++c) squares += x(r, c) * x(r, c);
    const double mean = squares / static_cast<double>(dim);
    const double norm = epsilon == NormEpsilon::kInsideRoot ? std::sqrt(mean + 1e-6) : std::sqrt(mean) + 1e-6;
    for (std::int64_t c = 0; c < dim; ++c) {
      y.push_back(static_cast<double>(weight[static_cast<std::size_t>(c)]) * x(r, c) / norm);
    }
  }
  return y;
}

template <class A>
void expect_close(const std::vector<A>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(rounds_to(got[i], want[i], 5e-7 * std::abs(want[i])))
        << "entry " << i << ": " << to_float(got[i]) << " for " << want[i];
  }
}

class CudaRmsnormTest : public CudaTest {
 protected:
  template <class A>
  void check() {
    for (const std::int64_t dim : {1, 7, 31, 48, 384, 1000, 2048, 4096, 8191, 8192, 9001, 16384}) {
      const std::vector<float> weight = random_uniform<float>(static_cast<std::size_t>(dim), 0.5, 1.5, 2);
      const DeviceBuffer<float> device_weight = to_device(weight);
      for (const std::int64_t rows : {1, 3, 130}) {
        if (small_sizes() && rows * dim > 50000) continue;
        std::vector<A> first;
        for (const Layout layout : {kPacked, kAlignedGaps, kUnaligned}) {
          DeviceMatrix<float> x = random_matrix<float>(cuda(), rows, dim, layout, 1, 3.0);
          DeviceMatrix<A> y(cuda(), rows, dim, layout);
          rmsnorm<A>(cuda(), x.view(), device_weight.data(), y.view());
          const std::vector<A> got = y.download();
          if (first.empty()) {
            SCOPED_TRACE(testing::Message() << rows << " x " << dim);
            expect_close(got, reference(x, weight, rows));
            first = got;
          }
          EXPECT_TRUE(same_bits(got, first)) << rows << " x " << dim << ", pad " << layout.pad;
        }
      }
    }
  }
};

TEST_F(CudaRmsnormTest, MatchesFloat64InAnyLayout) {
  check<float>();
  check<BFloat16>();
  check<Float16>();
}

TEST_F(CudaRmsnormTest, EpsilonCountsWhereTheRowIsSmallAndLargeSquaresDoNotOverflow) {
  const std::vector<float> weight(48, 1.0F);
  const DeviceBuffer<float> device_weight = to_device(weight);
  for (const double scale : {0.0, 1e-30, 1e-20, 1e-7, 1e-6, 1e-3, 1e18, 1e30}) {
    DeviceMatrix<float> x = random_matrix<float>(cuda(), 1, 48, kPacked, 3, scale);
    for (const NormEpsilon epsilon : {NormEpsilon::kBesideRoot, NormEpsilon::kInsideRoot}) {
      DeviceMatrix<float> y(cuda(), 1, 48);
      rmsnorm<float>(cuda(), x.view(), device_weight.data(), y.view(), epsilon);
      SCOPED_TRACE(scale);
      expect_close(y.download(), reference(x, weight, 1, epsilon));
    }
  }
}

TEST_F(CudaRmsnormTest, InPlaceAndAloneGiveTheSameBits) {
  constexpr std::int64_t kRows = 9;
  for (const std::int64_t dim : {100, 9001}) {
    const DeviceBuffer<float> weight = to_device(random_normal<float>(static_cast<std::size_t>(dim), 1.0, 0.1, 4));
    DeviceMatrix<float> x = random_matrix<float>(cuda(), kRows, dim, kPacked, 5);
    DeviceMatrix<float> y(cuda(), kRows, dim);
    rmsnorm<float>(cuda(), x.view(), weight.data(), y.view());
    DeviceMatrix<float> alone(cuda(), kRows, dim);
    for (std::int64_t r = 0; r < kRows; ++r) {
      rmsnorm<float>(cuda(), x.view().middle_rows(r, 1), weight.data(), alone.view().middle_rows(r, 1));
    }
    EXPECT_TRUE(same_bits(alone.download(), y.download())) << dim;
    rmsnorm<float>(cuda(), x.view(), weight.data(), x.view());
    EXPECT_TRUE(same_bits(x.download(), y.download())) << dim;
  }
}

TEST_F(CudaRmsnormTest, NanStaysInItsRow) {
  std::vector<float> values = random_normal<float>(3 * 64, 0.0, 1.0, 6);
  values[64 + 17] = NAN;
  DeviceMatrix<float> x(cuda(), values, 3, 64);
  DeviceMatrix<BFloat16> y(cuda(), 3, 64);
  const DeviceBuffer<float> weight = to_device(std::vector<float>(64, 1.0F));
  rmsnorm<BFloat16>(cuda(), x.view(), weight.data(), y.view());
  const std::vector<BFloat16> got = y.download();
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(to_float(got[i])), i / 64 == 1) << i;
}

}  // namespace
}  // namespace mmrec::kernels::test
