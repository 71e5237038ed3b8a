#include "kernels/philox.h"

#include <gtest/gtest.h>

#include <set>

namespace mmrec::kernels {
namespace {

// The known-answer vectors that the authors publish with the Random123 library (philox4x32, 10 rounds).
TEST(Philox, KnownAnswers) {
  static_assert(philox4x32({0, 0, 0, 0}, {0, 0}) == PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UniformIsTheHighBitsOfTheFirstTwoWords) {
  const std::uint64_t bits = (std::uint64_t{0xe169c58d} << 32) | 0x6627e8d5;
  EXPECT_EQ(philox_uniform(0, 0, 0), static_cast<double>(bits >> 11) / 9007199254740992.0);
}

TEST(Philox, SeedSequenceAndStepEachMatter) {
  std::set<double> seen;
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32, ~std::uint64_t{0}}) {
    for (const std::uint64_t sequence :
         {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32, ~std::uint64_t{0}}) {
      for (const std::uint64_t step : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32, ~std::uint64_t{0}}) {
        seen.insert(philox_uniform(seed, sequence, step));
      }
    }
  }
  EXPECT_EQ(seen.size(), 64U);
}

}  // namespace
}  // namespace mmrec::kernels
