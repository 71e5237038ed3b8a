// segment_sum and segment_close: the mean of a segment, the same bits however it is cut.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"
#include "test_util.h"

namespace mmrec::kernels::test {
namespace {

TEST(SegmentTest, MeanDoesNotDependOnCutsOrThreads) {
  for (const std::int64_t dim : {1, 7, 48, 100, 384}) {
    const std::int64_t batch = 3;
    const std::int64_t time = 257;
    const std::vector<float> x = random_floats(batch * time * dim, 1, -2.0F, 5.0F);
    std::vector<double> expected(static_cast<std::size_t>(batch * dim), 0.0);  // in order of time: exact equality below
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t t = 0; t < time; ++t) {
        for (std::int64_t c = 0; c < dim; ++c) {
          expected[static_cast<std::size_t>(b * dim + c)] +=
              static_cast<double>(x[static_cast<std::size_t>((b * time + t) * dim + c)]);
        }
      }
    }
    for (const int threads : {1, 2, 5}) {
      Cpu cpu(threads);
      for (const std::int64_t cut : {1, 7, 64, 257}) {
        std::vector<double> sum(static_cast<std::size_t>(batch * dim), 0.0);
        for (std::int64_t t = 0; t < time; t += cut) {
          SequenceView<const float, Host> part(x.data() + t * dim, batch, std::min(cut, time - t), dim);
          part.batch_stride = time * dim;
          segment_sum(cpu, {.x = part, .sum = {sum.data(), batch, dim}});
        }
        ASSERT_EQ(sum, expected) << threads << " threads, cut " << cut << ", dim " << dim;
        std::vector<float> slots = poisoned(batch * (dim + 5));
        segment_close(cpu, {sum.data(), batch, dim}, time, {slots.data(), batch, dim, dim + 5});
        for (std::int64_t b = 0; b < batch; ++b) {
          for (std::int64_t c = 0; c < dim + 5; ++c) {
            const float slot = slots[static_cast<std::size_t>(b * (dim + 5) + c)];
            if (c < dim) {
              ASSERT_EQ(slot, static_cast<float>(expected[static_cast<std::size_t>(b * dim + c)] / 257.0));
            } else {
              ASSERT_TRUE(std::isnan(slot));
            }
          }
        }
        for (const double left : sum) ASSERT_EQ(left, 0.0);
      }
    }
  }
}

TEST(SegmentTest, EveryInstructionSet) {
  for (const SimdKernels* table : supported_simd_kernels()) {
    const std::vector<float> x = random_floats(9 * 60, 2);
    std::vector<double> sum(53, 0.5);
    std::vector<double> expected = sum;
    table->pointwise.add_rows(x.data(), 60, 9, sum.data(), 53);
    for (std::size_t r = 0; r < 9; ++r) {
      for (std::size_t c = 0; c < 53; ++c) expected[c] += static_cast<double>(x[r * 60 + c]);
    }
    EXPECT_EQ(sum, expected) << table->name;
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
