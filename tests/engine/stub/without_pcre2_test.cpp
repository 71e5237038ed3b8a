// What a build without PCRE2 says of a rank file's pattern.
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "engine/tokenizer/split_pattern.h"

namespace mmrec::engine {
namespace {

TEST(WithoutPcre2, APatternIsRefusedWithTheReason) {
  try {
    const SplitPattern pattern("\\w+", "tokenizer_config.json");
    FAIL() << "accepted";
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()).find("tokenizer_config.json: found a \"pattern\""), 0U) << error.what();
    EXPECT_NE(std::string(error.what()).find("PCRE2"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace mmrec::engine
