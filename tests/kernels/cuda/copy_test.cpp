// copy_rows and fill_zero: exact, rounded to nearest even where the destination is narrower, and nothing beyond the
// rows.
#include "kernels/cuda/runtime/cuda.h"
#include "tests/kernels/cuda/dense_testing.h"

namespace mmrec::kernels::test {
namespace {

class CudaCopyTest : public CudaTest {
 protected:
  template <class A>
  void check() {
    for (const std::int64_t cols : {1, 7, 48, 1000, 4096}) {
      for (const std::int64_t rows : {1, 3, 130}) {
        if (small_sizes() && rows * cols > 20000) continue;
        for (const Layout from_layout : {kPacked, kAlignedGaps, kUnaligned}) {
          for (const Layout to_layout : {kPacked, kAlignedGaps, kUnaligned}) {
            DeviceMatrix<float> from = random_matrix<float>(cuda(), rows, cols, from_layout, 1, 100.0);
            DeviceMatrix<A> to(cuda(), rows, cols, to_layout);
            copy_rows<A>(cuda(), from.view(), to.view());
            std::vector<A> expected;
            for (const float value : from.values()) expected.push_back(from_float<A>(value));
            EXPECT_TRUE(same_bits(to.download(), expected)) << rows << " x " << cols;
          }
        }
      }
    }
  }
};

TEST(CudaArchitectures, CodeRunsWhereCudaSaysSo) {
  for (const char* runs : {"80-real", "80-virtual", "80", "75-virtual 90", "90-real 86-real 80-real", "all"}) {
    EXPECT_TRUE(has_code_for(runs, 80)) << runs;
  }
  for (const char* cannot : {"", "90", "90-real", "86-real 89-real", "75-real"}) {
    EXPECT_FALSE(has_code_for(cannot, 80)) << cannot;
  }
  EXPECT_TRUE(has_code_for("80-real", 86));
  EXPECT_TRUE(has_code_for("90-virtual", 120));
  EXPECT_FALSE(has_code_for("80-real 90-real", 120));
}

TEST_F(CudaCopyTest, RoundsToNearestEven) {
  check<float>();
  check<BFloat16>();
  check<Float16>();
}

TEST_F(CudaCopyTest, SpecialValues) {
  // Ties, the largest value that does not overflow, what overflows, subnormal results, infinities.
  const std::vector<float> values = {1.00390625F, 1.01171875F, 65519.9F, 65520.0F, 3.4e38F,   -3.4e38F,
                                     5.9e-8F,     2.98e-8F,    -6.1e-5F, INFINITY, -INFINITY, -0.0F,
                                     1.00048828F, 1.00146484F, 1.0e-40F, 0.0F};
  const auto count = static_cast<std::int64_t>(values.size());
  DeviceMatrix<float> from(cuda(), values, 1, count);
  DeviceMatrix<BFloat16> bfloats(cuda(), 1, count);
  DeviceMatrix<Float16> halves(cuda(), 1, count);
  copy_rows<BFloat16>(cuda(), from.view(), bfloats.view());
  copy_rows<Float16>(cuda(), from.view(), halves.view());
  const std::vector<BFloat16> got_bfloats = bfloats.download();
  const std::vector<Float16> got_halves = halves.download();
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(got_bfloats[i].bits, from_float<BFloat16>(values[i]).bits) << values[i];
    EXPECT_EQ(got_halves[i].bits, from_float<Float16>(values[i]).bits) << values[i];
  }
}

TEST_F(CudaCopyTest, FillZero) {
  for (const std::int64_t cols : {1, 7, 48, 1000}) {
    for (const Layout layout : {kPacked, kAlignedGaps, kUnaligned}) {
      DeviceMatrix<float> to(cuda(), 5, cols, layout);
      fill_zero(cuda(), to.view());
      EXPECT_TRUE(same_bits(to.download(), std::vector<float>(static_cast<std::size_t>(5 * cols), 0.0F)));
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
