// The parts of the programs that can be tested without running one.
#include "apps/common/arguments.h"
#include "apps/common/input.h"
#include "apps/common/progress.h"
#include "apps/ppl/sinks.h"
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

TEST(Numbers, AreParsedWhole) {
  EXPECT_EQ(apps::parse_integer("-12"), -12);
  EXPECT_EQ(apps::parse_real("1e-5"), 1e-5);
  EXPECT_FALSE(apps::parse_integer("99999999999999999999"));
  for (const char* bad : {"", " 1", "1 ", "+1", "1a", "0x1", "1,5", "1e999"}) {
    EXPECT_FALSE(apps::parse_integer(bad) || apps::parse_real(bad)) << bad;
  }
}

TEST(Numbers, AreWrittenAsTheyWereMeant) {
  EXPECT_EQ(apps::shortest(0.8F), 0.8);
  EXPECT_EQ(apps::shortest(1e-5F), 1e-5);
  for (const float x : {-1.23456789F, 3.4e38F, 1e-45F, 0.0F}) EXPECT_EQ(static_cast<float>(apps::shortest(x)), x);
}

TEST(Numbers, ChoiceIsTheFirstWhereNothingIsGiven) {
  const apps::Option options[] = {{"mode", 0, {"M"}}};
  const apps::Program program = {.name = "program", .does = "", .operands = "", .head = "", .options = options};
  const std::string_view names[] = {"one", "two"};
  const char* none[] = {"program"};
  const char* two[] = {"program", "--mode", "two"};
  EXPECT_EQ(apps::Arguments(program, 1, none).choice("mode", names), 0U);
  EXPECT_EQ(apps::Arguments(program, 3, two).choice("mode", names), 1U);
}

TEST(Numbers, StringsOfJsonAreThoseOfTheLibrary) {
  std::mt19937 rng(2);
  const std::vector<std::string> some = {
      "a", " the", "\n", "\"", "\\", "\t", "\x01", "\x7f", "é", "\xF0\x9F\x9A\x80", "\xff", "\xe2"};
  for (int repeat = 0; repeat < 2000; ++repeat) {
    std::string text;
    // Every other one is valid UTF-8.
    for (auto n = rng() % 9; n > 0; --n) text += some[rng() % (some.size() - (repeat % 2 == 0 ? 2 : 0))];
    std::string appended = "x";
    apps::append_json_string(appended, text);
    ASSERT_EQ(appended, "x" + apps::dump(text));
  }
}

TEST(Utf8, InvalidRunsAreCounted) {
  EXPECT_EQ(apps::count_invalid_utf8("plain, caf\xc3\xa9 \xf0\x9f\x9a\x80"), 0);
  EXPECT_EQ(apps::count_invalid_utf8("\xff\xfe z \x80"), 2);
  for (const char* bad :
       {"\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe0\x80\x80", "\xf0\x80\x80\x80", "\xc3", "\xe2\x82"}) {
    EXPECT_EQ(apps::count_invalid_utf8(bad), 1) << bad;
  }
  // Wherever they are in a long text, of which eight bytes of ASCII are passed over at a time.
  for (std::size_t first = 0; first < 20; ++first) {
    for (std::size_t between = 0; between < 20; ++between) {
      const std::string text = std::string(first, 'a') + "\xff" + std::string(between, 'b') + "\xfe" + "tail";
      EXPECT_EQ(apps::count_invalid_utf8(text), between == 0 ? 1 : 2) << first << ' ' << between;
    }
  }
}

TEST(Progress, LineFitsAnyWidth) {
  constexpr apps::PerplexityEstimate kPpl = {12.345, 0.25};
  for (int width = 0; width < 120; ++width) {
    EXPECT_LE(apps::progress_line(512, 1024, 2.0, kPpl, width).size(), static_cast<std::size_t>(width));
    if (width >= 29) {
      EXPECT_NE(apps::progress_line(512, 1024, 2.0, kPpl, width).find(" ETA 00:02"), std::string::npos) << width;
      EXPECT_NE(apps::progress_line(512, 1024, 2.0, kPpl, width).find(" ppl 1"), std::string::npos) << width;
    }
  }
  const std::string line = apps::progress_line(512, 1024, 2.0, kPpl, 100);
  expect_says(line, {" 50% 256 tok/s ppl 12.35 +/- 0.25 ETA 00:02"});
  EXPECT_EQ(line.find("[####################....................]"), 0U) << line;
  EXPECT_NE(apps::progress_line(0, 10, 0.0, kPpl, 80).find("--:--"), std::string::npos);
  const std::string one_part = apps::progress_facts(512, 1024, 2.0, apps::PerplexityEstimate{12.345, std::nan("")});
  EXPECT_EQ(one_part, " 50% 256 tok/s ppl 12.35 ETA 00:02");
  const std::string without = apps::progress_line(512, 1024, 2.0, std::nullopt, 100);
  expect_says(without, {" 50% 256 tok/s ETA 00:02"});
}

TEST(Messages, ControlCharactersAreSpelledOut) {
  for (const auto& [text, shown] : std::vector<std::pair<std::string, std::string>>{
           {"a\x1b[1m\nb", "a\\x1b[1m b"},
           {"\x7f\xc2\x80\xc2\x9b", "\\x7f\\xc2\\x80\\xc2\\x9b"},  // U+0080 and U+009B, which is ESC [
           {"\x9b\xff", "\\x9b\\xff"},                             // no UTF-8
           {"\xe2\x80\xae", "\\xe2\\x80\\xae"},                    // turns the text around
           {"\xc2\xa0 \xc3\xa9 \xf0\x9f\x9a\x80", "\xc2\xa0 \xc3\xa9 \xf0\x9f\x9a\x80"}}) {  // text
    EXPECT_EQ(apps::printable(text), shown);
  }
  EXPECT_EQ(apps::printable(std::string(1999, 'x') + "\xc3\xa9"), std::string(1999, 'x') + "…")
      << "cut between characters";
}

TEST(Messages, HtmlIsUtf8WhateverTheTextIs) {
  EXPECT_EQ(apps::html_text("<\xff\x1b\xc3\xa9>"), "&lt;\xEF\xBF\xBD\xEF\xBF\xBD\xc3\xa9&gt;");
}

}  // namespace
}  // namespace mmrec::test
