// The version and the backends of the library that runs.
#include "mmrec/version.h"

#include <gtest/gtest.h>

#include <string>

namespace mmrec {
namespace {

TEST(Version, IsThatOfTheHeaders) {
  EXPECT_EQ(version(), MMREC_VERSION);
  const std::string numbers = std::to_string(MMREC_VERSION_MAJOR) + "." + std::to_string(MMREC_VERSION_MINOR) + "." +
                              std::to_string(MMREC_VERSION_PATCH);
  EXPECT_EQ(version(), numbers);
}

TEST(Version, NamesTheBackends) {
  ASSERT_GE(backends().size(), 1U);
  EXPECT_EQ(backends()[0], "cpu");
  ASSERT_LE(backends().size(), 2U);
  EXPECT_EQ(backends().back(), backends().size() == 2 ? "cuda" : "cpu");
}

}  // namespace
}  // namespace mmrec
