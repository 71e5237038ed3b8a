// Attention to banks, each way, against float64, and writing to them: every type, any number of written rows, runs of
// any lengths.
#include "kernels/cuda/attention/algo.h"

#include "tests/kernels/bank_case.h"
#include "tests/kernels/cuda/dense_testing.h"

namespace mmrec::kernels::test {
namespace {

// Scores of ten carry the rounding of their operands into an exponent.
template <class A>
constexpr double kBound = std::is_same_v<A, float>     ? 1e-5
                          : std::is_same_v<A, Float16> ? 8e-3
                                                       : 6e-2;

class CudaBankTest : public CudaTest {
 protected:
  template <class A>
  void check(BankAlgo way, const RunShapes& shapes, std::int64_t dim, std::int64_t slots, std::int32_t used,
             std::int64_t layer, std::int64_t together = 3) {
    SCOPED_TRACE(testing::Message() << "way " << static_cast<int>(way) << ", width " << dim << ", " << slots
                                    << " slots, " << used << " used, layer " << layer);
    std::vector<BankRun> runs = shapes.list();
    const float scale = 1.0F / std::sqrt(static_cast<float>(dim));
    DeviceMatrix<A> q = random_matrix<A>(cuda(), shapes.total(), dim, kAlignedGaps, 1, 2.0);
    DeviceMatrix<A> out(cuda(), shapes.total(), dim, kAlignedGaps);
    DeviceMatrix<float> bank = random_matrix<float>(cuda(), std::ssize(runs) * slots, dim, kPacked, 2, 2.0);
    for (std::size_t r = 0; r < runs.size(); ++r) {
      runs[r].bank = bank.view().row(static_cast<std::int64_t>(r) * slots);
      runs[r].used = used;
    }
    const DeviceBuffer<BankRun> list = to_device(runs);
    const std::size_t scratch_bytes =
        bank_scratch_bytes(cuda(), together, std::max<std::int64_t>(shapes.longest(), 16), slots, dim, sizeof(A));
    DeviceBuffer<std::byte> scratch = poisoned<std::byte>(scratch_bytes);
    bank_attention(cuda(),
                   BankAttention<Device, A>{.q = q.view(),
                                            .out = out.view(),
                                            .scale = scale,
                                            .runs = {list.data(), runs.data(), std::ssize(runs), shapes.longest()},
                                            .slots = slots,
                                            .layer = layer,
                                            .scratch = scratch.data(),
                                            .scratch_bytes = scratch_bytes},
                   way);
    const std::vector<A> got = out.download();
    const std::vector<double> wide_q = widened(q.values());
    const std::vector<double> wide_bank = widened(bank.values());
    const auto d = static_cast<std::size_t>(dim);
    for (std::size_t r = 0; r < runs.size(); ++r) {
      const std::size_t at = r * static_cast<std::size_t>(slots) * d;
      const std::vector<double> rows(
          wide_bank.begin() + static_cast<std::ptrdiff_t>(at),
          wide_bank.begin() + static_cast<std::ptrdiff_t>(at + static_cast<std::size_t>(slots) * d));
      for (std::int64_t t = runs[r].first; t < runs[r].first + runs[r].rows; ++t) {
        const auto first = static_cast<std::ptrdiff_t>(t * dim);
        const std::vector<double> expected = attend_reference(
            {wide_q.begin() + first, wide_q.begin() + first + static_cast<std::ptrdiff_t>(d)}, rows,
            std::min<std::int64_t>(slots, used + layer * runs[r].rows), slots, static_cast<double>(scale));
        for (std::size_t c = 0; c < d; ++c) {
          ASSERT_NEAR(to_float(got[static_cast<std::size_t>(first) + c]), expected[c], kBound<A> * 2.0)
              << "row " << t << ", channel " << c;
        }
      }
    }
  }

  template <class A>
  void check_all(const RunShapes& shapes, std::int64_t dim, std::int64_t slots) {
    for (const BankAlgo way : {BankAlgo::kSplit, BankAlgo::kProducts, BankAlgo::kAuto}) {
      for (const std::int32_t used : {0, 1, static_cast<std::int32_t>(slots) - 1, static_cast<std::int32_t>(slots)}) {
        check<A>(way, shapes, dim, slots, used, 0);
      }
      check<A>(way, shapes, dim, slots, 2, 1);
    }
  }
};

TEST_F(CudaBankTest, AttentionMatchesFloat64) {
  check_all<float>({{1, 4}, 1}, 7, 9);
  check_all<float>({{17, 1, 0, 3}}, 48, 33);
  check_all<BFloat16>({{1, 20, 2}}, 64, 40);
  check_all<Float16>({{3, 16}}, 40, 17);
  check<BFloat16>(BankAlgo::kAuto, {std::vector<std::int32_t>(9, 16)}, 32, 20, 5, 0);  // more than go together
  check<float>(BankAlgo::kSplit, {{1, 2}}, 1028, 20, 18, 0);  // more channels than threads hold in one group
  check<BFloat16>(BankAlgo::kSplit, {{1}}, 2056, 12, 12, 0);
  check<Float16>(BankAlgo::kSplit, {{2}}, 4104, 5, 5, 0);  // more than they hold at all
  if (small_sizes()) return;
  check_all<float>({{1, 100, 33}}, 1024, 512);
  check_all<BFloat16>({{300, 1, 512}}, 1024, 512);
  check_all<Float16>({std::vector<std::int32_t>(70, 1)}, 768, 512);
}

TEST_F(CudaBankTest, WritingFillsFreeRowsThenTheFirst) {
  const std::int64_t slots = 8;
  const std::int64_t dim = 5;
  for (const std::int32_t used : {0, 6, 8}) {
    for (const std::int64_t layer : {0, 1}) {
      RunShapes shapes{{5, 0, 1, 8}, 2};
      std::vector<BankRun> runs = shapes.list();
      DeviceMatrix<float> h = random_matrix<float>(cuda(), shapes.total(), dim, kAlignedGaps, 3);
      DeviceMatrix<float> bank = random_matrix<float>(cuda(), std::ssize(runs) * slots, dim, kPacked, 4);
      std::vector<float> expected = bank.values();
      for (std::size_t r = 0; r < runs.size(); ++r) {
        runs[r].bank = bank.view().row(static_cast<std::int64_t>(r) * slots);
        runs[r].used = used;
        const std::int64_t n = runs[r].used_before(layer, slots);
        for (std::int64_t i = 0; i < runs[r].rows; ++i) {
          const std::int64_t slot = static_cast<std::int64_t>(r) * slots + (n + i < slots ? n + i : n + i - slots);
          std::copy_n(h.values().begin() + (runs[r].first + i) * dim, dim, expected.begin() + slot * dim);
        }
      }
      const DeviceBuffer<BankRun> list = to_device(runs);
      bank_write(cuda(), {.h = h.view(),
                          .runs = {list.data(), runs.data(), std::ssize(runs), shapes.longest()},
                          .slots = slots,
                          .layer = layer});
      EXPECT_EQ(bank.download(), expected) << used << " used, layer " << layer;
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
