// block_residual: y = x + h + 0.1 v + bias over strided sequences, in place, with every kind of bias.
#include "tests/kernels/cuda/dense_testing.h"

namespace mmrec::kernels::test {
namespace {

enum class Bias : std::uint8_t { kNone, kShared, kPerSequence };

class CudaBlockResidualTest : public CudaTest {
 protected:
  template <class A>
  void check() {
    constexpr std::int64_t kBatch = 3;
    for (const std::int64_t dim : {1, 7, 48, 1000, 4096}) {
      for (const std::int64_t time : {1, 3, 65}) {
        if (small_sizes() && time * dim > 8000) continue;
        for (const Layout layout : {kPacked, kAlignedGaps, kUnaligned}) {
          // h has the carry as its row 0; v is a part of wider rows.
          DeviceMatrix<float> h = random_matrix<float>(cuda(), kBatch * (time + 1), dim, kPacked, 2);
          DeviceMatrix<A> v = random_matrix<A>(cuda(), kBatch * time, dim, layout, 3);
          DeviceMatrix<float> bias = random_matrix<float>(cuda(), kBatch, dim, kPacked, 4);
          DeviceMatrix<float> norm = random_matrix<float>(cuda(), 1, dim, kPacked, 5);
          DeviceMatrix<A> normed(cuda(), kBatch * time, dim, layout);
          for (const Bias kind : {Bias::kNone, Bias::kShared, Bias::kPerSequence}) {
            DeviceMatrix<float> x = random_matrix<float>(cuda(), kBatch * time, dim, layout, 1);
            DeviceMatrix<float> y(cuda(), kBatch * time, dim, layout);
            BlockResidual<Device, A> op{.x = sequences(x.view(), kBatch, time, 0, time),
                                        .h = sequences(h.view(), kBatch, time + 1, 1, time),
                                        .v = sequences(v.view(), kBatch, time, 0, time),
                                        .bias = kind == Bias::kNone ? nullptr : bias.view().data,
                                        .bias_stride = kind == Bias::kPerSequence ? dim : 0,
                                        .y = sequences(y.view(), kBatch, time, 0, time)};
            block_residual(cuda(), op);
            std::vector<double> expected;
            for (std::int64_t r = 0; r < kBatch * time; ++r) {
              const std::int64_t b = r / time;
              const std::int64_t bias_row = kind == Bias::kPerSequence ? b : 0;
              for (std::int64_t c = 0; c < dim; ++c) {
                expected.push_back(x(r, c) + h(r + b + 1, c) + 0.1 * v(r, c) +
                                   (kind == Bias::kNone ? 0.0 : bias(bias_row, c)));
              }
            }
            const std::vector<float> got = y.download();
            EXPECT_LT(largest_error(got, expected), 4e-7) << time << " x " << dim;
            // With the norm: the bits of the two ops.
            rmsnorm(cuda(), MatrixView<const float, Device>(y.view()), norm.view().data, normed.view());
            const std::vector<A> want = normed.download();
            DeviceMatrix<float> again(cuda(), kBatch * time, dim, layout);
            op.y = sequences(again.view(), kBatch, time, 0, time);
            DeviceMatrix<A> u(cuda(), kBatch * time, dim, layout);
            block_residual_norm(cuda(), op, norm.view().data, u.view());
            EXPECT_TRUE(same_bits(again.download(), got));
            EXPECT_TRUE(same_bits(u.download(), want));
            op.y = sequences(x.view(), kBatch, time, 0, time);
            block_residual(cuda(), op);
            EXPECT_TRUE(same_bits(x.download(), got)) << "in place";
          }
        }
      }
    }
  }
};

TEST_F(CudaBlockResidualTest, MatchesFloat64) {
  check<float>();
  check<BFloat16>();
  check<Float16>();
}

}  // namespace
}  // namespace mmrec::kernels::test
