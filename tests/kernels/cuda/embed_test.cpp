// embed: rows of the table, widened exactly, whatever the stored type, the alignment and the size.
#include "tests/kernels/cuda/dense_testing.h"

namespace mmrec::kernels::test {
namespace {

class CudaEmbedTest : public CudaTest {
 protected:
  template <class T>
  void check(DType dtype) {
    constexpr std::int64_t kVocab = 37;
    for (const std::int64_t dim : {1, 7, 48, 1024, 4099}) {
      DeviceMatrix<T> table = random_matrix<T>(cuda(), kVocab, dim, kPacked, 1);
      for (const std::int64_t n : {1, 3, 130}) {
        if (small_sizes() && n * dim > 50000) continue;
        std::vector<int> tokens;
        for (const float u : random_uniform<float>(static_cast<std::size_t>(n), 0.0, kVocab - 0.001, 2)) {
          tokens.push_back(static_cast<int>(u));
        }
        tokens.back() = kVocab - 1;
        const DeviceBuffer<int> device_tokens = to_device(tokens);
        for (const Layout layout : {kPacked, kAlignedGaps, kUnaligned}) {
          DeviceMatrix<float> x(cuda(), n, dim, layout);
          embed(cuda(), {table.view().data, dtype, kVocab, dim}, device_tokens.data(), x.view());
          std::vector<float> expected;
          for (const int token : tokens) {
            for (std::int64_t c = 0; c < dim; ++c) expected.push_back(static_cast<float>(table(token, c)));
          }
          EXPECT_TRUE(same_bits(x.download(), expected)) << n << " x " << dim << ", offset " << layout.offset;
        }
      }
    }
  }
};

TEST_F(CudaEmbedTest, WidensRowsExactly) {
  check<float>(DType::kF32);
  check<BFloat16>(DType::kBF16);
  check<Float16>(DType::kF16);
}

TEST_F(CudaEmbedTest, NoTokensNoLaunch) {
  DeviceMatrix<float> table = random_matrix<float>(cuda(), 3, 8, kPacked, 3);
  DeviceMatrix<float> x(cuda(), 1, 8);
  embed(cuda(), {table.view().data, DType::kF32, 3, 8}, nullptr, x.view().middle_rows(0, 0));
  EXPECT_TRUE(same_bits(x.download(), x.values()));
}

}  // namespace
}  // namespace mmrec::kernels::test
