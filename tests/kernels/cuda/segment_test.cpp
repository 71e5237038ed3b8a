// segment_sum and segment_close: the sum in fp64, however the segment is cut; the same bits for the same cuts.
#include "tests/kernels/cuda/dense_testing.h"

namespace mmrec::kernels::test {
namespace {

class CudaSegmentTest : public CudaTest {
 protected:
  void check(std::int64_t batch, std::int64_t time, std::int64_t dim, Layout layout,
             const std::vector<std::int64_t>& cuts) {
    DeviceMatrix<float> x = random_matrix<float>(cuda(), batch * time, dim, layout, 1, 5.0);
    std::vector<double> expected(static_cast<std::size_t>(batch * dim), 0.0);
    std::vector<double> bound(expected.size(), 1e-30);
    for (std::int64_t r = 0; r < batch * time; ++r) {
      for (std::int64_t c = 0; c < dim; ++c) {
        const auto i = static_cast<std::size_t>(r / time * dim + c);
        expected[i] += x(r, c);
        bound[i] += 1e-14 * std::abs(x(r, c));
      }
    }
    for (const std::int64_t cut : cuts) {
      SCOPED_TRACE(testing::Message() << batch << " x " << time << " x " << dim << ", cut " << cut);
      const auto run = [&] {
        DeviceBuffer<double> sum = to_device(std::vector<double>(expected.size(), 0.0));
        for (std::int64_t t = 0; t < time; t += cut) {
          segment_sum(cuda(), {.x = sequences<const float>(x.view(), batch, time, t, std::min(cut, time - t)),
                               .sum = {sum.data(), batch, dim}});
        }
        return sum;
      };
      DeviceBuffer<double> sum = run();
      const std::vector<double> sums = to_host(sum);
      for (std::size_t i = 0; i < sums.size(); ++i) ASSERT_NEAR(sums[i], expected[i], bound[i]);
      ASSERT_EQ(to_host(run()), sums);
      DeviceMatrix<float> slot(cuda(), batch, dim, {.pad = 5, .offset = 2});
      segment_close(cuda(), {sum.data(), batch, dim}, time, slot.view());
      const std::vector<float> got = slot.download();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(got[i], static_cast<float>(sums[i] / static_cast<double>(time)));
      }
      ASSERT_EQ(to_host(sum), std::vector<double>(expected.size(), 0.0));
    }
  }
};

TEST_F(CudaSegmentTest, IsTheSumHoweverItIsCut) {
  for (const std::int64_t dim : {1, 7, 31, 33, 48, 100}) {
    if (few_cases() && dim != 33) {
      check(3, 257, dim, kPacked, {17, 129});
    } else {
      check(3, 257, dim, kPacked, {1, 16, 17, 128, 129, 257});
    }
  }
  check(2, 300, 64, kAlignedGaps, {40, 300});
  check(2, 300, 64, kUnaligned, {40, 300});
  if (small_sizes()) return;
  check(1, 4097, 1024, kPacked, {1, 256, 4097});
  check(1, 5000, 8, kPacked, {5000});
  check(2, 1000, 4096, kAlignedGaps, {256, 1000});
  check(70000, 17, 3, kPacked, {17});
}

TEST_F(CudaSegmentTest, ContinuesASum) {
  const std::vector<double> before = {1e9, -2.5, 1.0 / 3.0};
  DeviceMatrix<float> x = random_matrix<float>(cuda(), 20, 3, kPacked, 2);
  std::vector<double> expected = before;
  for (std::int64_t t = 0; t < 20; ++t) {
    for (std::int64_t c = 0; c < 3; ++c) expected[static_cast<std::size_t>(c)] += x(t, c);
  }
  DeviceBuffer<double> sum = to_device(before);
  segment_sum(cuda(), {.x = sequences<const float>(x.view(), 1, 20, 0, 20), .sum = {sum.data(), 1, 3}});
  const std::vector<double> got = to_host(sum);
  for (std::size_t c = 0; c < 3; ++c) EXPECT_NEAR(got[c], expected[c], 1e-14 * (std::abs(expected[c]) + 20.0)) << c;
}

}  // namespace
}  // namespace mmrec::kernels::test
