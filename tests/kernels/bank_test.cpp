// Attention to a bank and writing to it, against float64: any number of written rows, many runs, layers of a call.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"
#include "tests/kernels/bank_case.h"

namespace mmrec::kernels::test {
namespace {

std::vector<double> wide(std::span<const float> x) { return {x.begin(), x.end()}; }

TEST(BankAttentionTest, MatchesFloat64ForEveryFillOfTheBank) {
  const std::int64_t slots = 37;
  for (const std::int64_t dim : {1, 7, 48, 100}) {
    for (const std::int32_t used : {0, 1, 3, 31, 33, 36, 37}) {
      for (const float size : {0.1F, 3.0F}) {
        RunShapes shapes{{1, 5, 0, 2}, 1};
        std::vector<BankRun> runs = shapes.list();
        const std::vector<float> q = random_floats(shapes.total() * dim, 1, -size, size);
        std::vector<float> bank = random_floats(std::ssize(runs) * slots * dim, 2, -size, size);
        for (std::size_t r = 0; r < runs.size(); ++r) {
          runs[r].bank = bank.data() + static_cast<std::int64_t>(r) * slots * dim;
          runs[r].used = used;
        }
        const BankRuns<Host> list{runs.data(), runs.data(), std::ssize(runs), shapes.longest()};
        const float scale = 0.7F;
        for (const std::int64_t layer : {0, 2}) {
          std::vector<float> first;
          for (const int threads : {1, 3}) {
            Cpu cpu(threads);
            std::vector<float> out = poisoned(shapes.total() * dim);
            bank_attention(cpu, {.q = {q.data(), shapes.total(), dim},
                                 .out = {out.data(), shapes.total(), dim},
                                 .scale = scale,
                                 .runs = list,
                                 .slots = slots,
                                 .layer = layer});
            for (std::size_t r = 0; r < runs.size(); ++r) {
              const std::vector<double> rows = wide({runs[r].bank, static_cast<std::size_t>(slots * dim)});
              for (std::int64_t t = runs[r].first; t < runs[r].first + runs[r].rows; ++t) {
                const auto n = static_cast<std::size_t>(dim);
                const std::span<const float> row(q.data() + t * dim, n);
                const std::vector<double> expected =
                    attend_reference(wide(row), rows, std::min<std::int64_t>(slots, used + layer * runs[r].rows), slots,
                                     static_cast<double>(scale));
                ASSERT_LT(max_error({out.data() + t * dim, n}, expected), 1e-5 * (1.0 + static_cast<double>(size)))
                    << dim << ", " << used << " used, layer " << layer;
              }
            }
            EXPECT_TRUE(std::isnan(out[0]));  // a gap is left alone
            if (first.empty()) first = out;
            for (std::size_t i = 0; i < out.size(); ++i) {
              ASSERT_TRUE(std::isnan(out[i]) || out[i] == first[i]) << threads << " threads";
            }
          }
        }
      }
    }
  }
}

TEST(BankAttentionTest, LargeNegativeScoresLeaveNothing) {
  const std::vector<float> q(8, 100.0F);
  std::vector<float> bank(std::size_t{4} * 8, -100.0F);
  BankRun run{.bank = bank.data(), .rows = 1, .used = 3};
  std::vector<float> out = poisoned(8);
  Cpu cpu(1);
  bank_attention(cpu, {.q = {q.data(), 1, 8}, .out = {out.data(), 1, 8}, .runs = {&run, &run, 1, 1}, .slots = 4});
  for (const float x : out) EXPECT_EQ(x, 0.0F);
}

TEST(BankWriteTest, FillsFreeRowsThenTheFirst) {
  const std::int64_t slots = 8;
  const std::int64_t dim = 5;
  for (const std::int32_t used : {0, 3, 6, 8}) {
    for (const std::int32_t rows : {0, 1, 2, 5, 8}) {
      for (const std::int64_t layer : {0, 1, 3}) {
        RunShapes shapes{{rows, 1}, 2};
        std::vector<BankRun> runs = shapes.list();
        const std::vector<float> h = random_floats(shapes.total() * dim, 3);
        std::vector<float> bank = random_floats(2 * slots * dim, 4);
        std::vector<float> expected = bank;
        for (std::size_t r = 0; r < 2; ++r) {
          runs[r].bank = bank.data() + static_cast<std::int64_t>(r) * slots * dim;
          runs[r].used = used;
          const std::int64_t n = std::min<std::int64_t>(slots, used + layer * runs[r].rows);
          std::vector<std::int64_t> order;  // free rows first, then all from the first on
          for (std::int64_t s = n; s < slots; ++s) order.push_back(s);
          for (std::int64_t s = 0; s < slots; ++s) order.push_back(s);
          for (std::int64_t i = 0; i < runs[r].rows; ++i) {
            std::copy_n(
                h.begin() + (runs[r].first + i) * dim, dim,
                expected.begin() + (static_cast<std::int64_t>(r) * slots + order[static_cast<std::size_t>(i)]) * dim);
          }
        }
        Cpu cpu(2);
        bank_write(cpu, {.h = {h.data(), shapes.total(), dim},
                         .runs = {runs.data(), runs.data(), 2, shapes.longest()},
                         .slots = slots,
                         .layer = layer});
        EXPECT_TRUE(same_bits(bank, expected)) << used << " used, " << rows << " rows, layer " << layer;
      }
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
