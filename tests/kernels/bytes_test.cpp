// Whether numbers are finite, and hashes of bytes: the same by every instruction set.
#include "kernels/cpu/bytes.h"

#include "kernels/cpu/simd.h"
#include "tests/support/prelude.h"

namespace mmrec::kernels {
namespace {

TEST(Bytes, HashIsXxh3InEveryTable) {
  EXPECT_EQ(hash_bytes({}), 0x2D06800538D394C2U);
  std::mt19937 random(3);
  std::vector<unsigned char> bytes(20000);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  for (std::size_t count = 1; count + 3 < bytes.size(); count += count < 600 ? 1 : 977) {
    const std::uint64_t expected = kScalarKernels.bytes.hash(bytes.data() + 3, count);
    for (const SimdKernels* table : supported_simd_kernels()) {
      ASSERT_EQ(table->bytes.hash(bytes.data() + 3, count), expected) << table->name << ", " << count << " bytes";
    }
  }
}

TEST(Bytes, OneNumberThatIsNotFiniteIsSeenAnywhereInEveryTable) {
  constexpr std::size_t kCount = 2500;
  struct Case {
    DType dtype;
    std::uint32_t largest, infinity, nan;
  };
  for (const auto& [dtype, largest, infinity, nan] :
       {Case{DType::kF32, 0xff7fffffU, 0xff800000U, 0x7f800001U}, Case{DType::kF16, 0xfbffU, 0x7c00U, 0xfc01U},
        Case{DType::kBF16, 0xff7fU, 0x7f80U, 0xff81U}}) {
    const std::size_t size = size_of(dtype);
    std::vector<unsigned char> bytes(kCount * size + 1);
    unsigned char* const numbers = bytes.data() + 1;  // not aligned
    const auto set = [&](std::size_t i, std::uint32_t bits) { std::memcpy(numbers + i * size, &bits, size); };
    for (std::size_t i = 0; i < kCount; ++i) set(i, largest);
    for (const SimdKernels* table : supported_simd_kernels()) {
      const auto finite = table->bytes.all_finite[dtype];
      EXPECT_TRUE(finite(numbers, kCount)) << table->name;
      for (std::size_t i = 0; i < kCount; ++i) {
        set(i, i % 2 == 0 ? infinity : nan);
        ASSERT_FALSE(finite(numbers, kCount)) << table->name << ", number " << i;
        ASSERT_TRUE(finite(numbers, static_cast<std::int64_t>(i))) << table->name << ", number " << i;
        set(i, largest);
      }
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels
