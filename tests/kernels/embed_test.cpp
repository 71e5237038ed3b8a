// embed: rows of the table, widened exactly.
#include "kernels/cpu/cpu.h"
#include "test_util.h"

namespace mmrec::kernels::test {
namespace {

TEST(EmbedTest, CopiesTheTokensRowsExactly) {
  for (const int threads : {1, 2, 5}) {
    Cpu cpu(threads);
    for (const DType dtype : kAllDTypes) {
      for (const std::int64_t dim : {1, 7, 31, 48, 384, 1000}) {
        const Weights table = random_weights(37, dim, dtype, 1);
        for (const std::int64_t n : {1, 2, 3, 127, 300}) {
          std::vector<int> tokens;
          for (std::int64_t i = 0; i < n; ++i) tokens.push_back(static_cast<int>((i * 17 + 36) % 37));
          std::vector<float> x = poisoned(n * (dim + 3));
          embed(cpu, table.view(), tokens.data(), {x.data(), n, dim, dim + 3});
          for (std::int64_t r = 0; r < n; ++r) {
            for (std::int64_t c = 0; c < dim + 3; ++c) {
              const float actual = x[static_cast<std::size_t>(r * (dim + 3) + c)];
              if (c < dim) {
                ASSERT_EQ(static_cast<double>(actual), table.at(tokens[static_cast<std::size_t>(r)], c));
              } else {
                ASSERT_TRUE(std::isnan(actual)) << "wrote past the row";
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
