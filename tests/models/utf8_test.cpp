#include "models/files/utf8.h"

#include "tests/support/prelude.h"
#include "tests/support/utf8.h"

namespace mmrec::models {
namespace {

TEST(Utf8, AcceptsExactlyTheWellFormedSequences) {
  for (const char* text : {"", "a", "\x7F", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80",
                           "\xEF\xBF\xBF", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF", "h\xC3\xA9 \xF0\x9F\x9A\x80"}) {
    EXPECT_TRUE(is_valid_utf8(text)) << text;
  }
  for (const char* text : {"\x80", "\xC0\x80", "\xC1\xBF", "\xC2", "\xC2\x41", "\xE0\x9F\xBF", "\xED\xA0\x80",
                           "\xE2\x82", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "a\xBF"}) {
    EXPECT_FALSE(is_valid_utf8(text)) << text;
  }
}

TEST(Utf8, AFaultIsFoundAnywhereInALongText) {
  for (std::size_t at = 0; at < 40; ++at) {
    std::string text(40, 'a');
    EXPECT_TRUE(is_valid_utf8(text));
    EXPECT_EQ(ascii_prefix(std::string_view(text).substr(at)), (40 - at) / 8 * 8);
    text[at] = '\x80';
    EXPECT_FALSE(is_valid_utf8(text)) << at;
    EXPECT_EQ(ascii_prefix(text), at / 8 * 8);
  }
}

TEST(Utf8, EveryCodePointRoundTrips) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    const std::string text = test::utf8_of(c);
    const Utf8Unit unit = first_unit(text);
    ASSERT_TRUE(unit.valid && unit.code == c && unit.length == text.size()) << static_cast<std::uint32_t>(c);
    // Every proper prefix is incomplete, not wrong.
    for (std::size_t n = 1; n < text.size(); ++n) {
      const Utf8Unit part = first_unit(std::string_view(text).substr(0, n));
      ASSERT_TRUE(!part.valid && part.incomplete && part.length == n) << static_cast<std::uint32_t>(c);
    }
  }
}

TEST(Utf8, WhiteSpaceIsPythons) {
  for (const char32_t c : {0x09, 0x0D, 0x1C, 0x20, 0x85, 0xA0, 0x2003, 0x3000})
    EXPECT_TRUE(is_python_space(c)) << static_cast<int>(c);
  for (const char32_t c : {0x00, 0x08, 0x0E, 0x1B, 0x21, 0x200B, 0xFEFF})
    EXPECT_FALSE(is_python_space(c)) << static_cast<int>(c);
}

TEST(Utf8, ReplacesEachMaximalIllFormedPartAsPythonDoes) {
  const auto r = [](int n) {
    std::string text;
    for (int i = 0; i < n; ++i) text += kReplacement;
    return text;
  };
  EXPECT_EQ(replace_invalid_utf8("plain"), "plain");
  EXPECT_EQ(first_unit("").length, 0U);
  EXPECT_EQ(replace_invalid_utf8("a\xFF"
                                 "b\xE2\x82z\xF0\x9F\x9A\xC0\x80\xED\xA0\x80\xF4\x90\x80\x80"),
            "a" + r(1) + "b" + r(1) + "z" + r(1) + r(2) + r(3) + r(4));
  EXPECT_EQ(replace_invalid_utf8(std::string_view("\0\xE2", 2)), std::string("\0", 1) + r(1));
}

}  // namespace
}  // namespace mmrec::models
