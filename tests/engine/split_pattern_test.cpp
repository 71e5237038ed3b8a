#include "engine/tokenizer/split_pattern.h"

#include "tests/support/model_folder.h"

namespace mmrec::test {
namespace {

using engine::SplitPattern;
using engine::with_unicode_white_space;
using List = std::vector<std::string>;

std::vector<std::string> pieces(const std::string& pattern, std::string_view text) {
  std::vector<std::string> out;
  SplitPattern(pattern, "config").split(text, 0, text.size(), [&](std::string_view piece) { out.emplace_back(piece); });
  return out;
}

TEST(SplitPatterns, WhatNoMatchHoldsIsAPiece) {
  EXPECT_EQ(pieces("b+", "aabbab"), (List{"aa", "bb", "a", "b"}));
  EXPECT_EQ(pieces("", "ab"), List{"ab"});
  EXPECT_EQ(pieces("x*", "axxb"), (List{"a", "xx", "b"}));
  EXPECT_EQ(pieces("a", ""), List{});
  EXPECT_EQ(pieces("a\\Kb", "xab"), (List{"xa", "b"}));
}

TEST(SplitPatterns, AreReadAsRustReadsThem) {
  EXPECT_EQ(pieces("\\s+$|.", "a \n"), (List{"a", " \n"}));  // $ ends the text, not a line
  EXPECT_EQ(pieces("a$|.|\n", "a\n"), (List{"a", "\n"}));
  EXPECT_EQ(pieces("\\s+|\\S+", "a\xE1\xA0\x8E z"), (List{"a\xE1\xA0\x8E", " ", "z"}));  // U+180E is no white space
  EXPECT_EQ(pieces("[^\\s]+|\\s", "b\xC2\x85 z"), (List{"b", "\xC2\x85", " ", "z"}));    // U+0085 is
  EXPECT_EQ(pieces("(?i:'S)", "x'\xC5\xBFx"), (List{"x", "'\xC5\xBF", "x"}));            // long s
  EXPECT_EQ(pieces(".+", "a\rb\nc"), (List{"a\rb", "\n", "c"}));
}

TEST(SplitPatterns, WhiteSpaceInAndOutsideOfClasses) {
  const std::string space = with_unicode_white_space("[\\s]");
  EXPECT_EQ(with_unicode_white_space("\\s"), space);
  EXPECT_EQ(with_unicode_white_space("a\\\\s[b\\]]\\d[:]"), "a\\\\s[b\\]]\\d[:]");
  EXPECT_EQ(with_unicode_white_space("[]\\s]\\s"), "[]" + space.substr(1) + space);
  EXPECT_EQ(with_unicode_white_space("[^]\\s]"), "[^]" + space.substr(1));
  EXPECT_EQ(with_unicode_white_space("[[:alpha:]\\s]"), "[[:alpha:]" + space.substr(1));
  EXPECT_EQ(with_unicode_white_space("\\Q\\s[\\E\\s"), "\\Q\\s[\\E" + space);
  EXPECT_EQ(with_unicode_white_space("\\Q\\s"), "\\Q\\s");
  EXPECT_EQ(with_unicode_white_space("x\\"), "x\\");
  EXPECT_EQ(pieces("[\\s-a]+", "b-a -"), (List{"b", "-a -"}));
  EXPECT_EQ(pieces("[\\S]", "a b"), (List{"a", " ", "b"}));
}

TEST(SplitPatterns, AHostileOneEndsInAnError) {
  // With a b in the text, or PCRE2 sees at once that none can match.
  const std::string text = std::string(500, 'a') + "cb";
  for (const char* pattern : {"(a+)+b", "(a|aa)+b", "(a*)*b", "(?:a?){300}a{300}b", "(?:(?:a?)+)+b", "(a(?1)?)+b"}) {
    const std::string message = error_of([&] { (void)pieces(pattern, text); });
    expect_says(message, {"pattern cannot cut the text at byte 0: "});
  }
}

}  // namespace
}  // namespace mmrec::test
