#include "engine/generate/stop_matcher.h"

#include "tests/support/prelude.h"

namespace mmrec::engine {
namespace {

/// Text that comes out for `text` fed in chunks of `size` bytes; `stopped` tells whether a stop string was found.
std::string run(const std::vector<std::string>& stops, const std::string& text, std::size_t size, bool& stopped) {
  StopMatcher matcher(stops);
  std::string out;
  for (std::size_t at = 0; at < text.size() && !matcher.stopped(); at += size)
    out += matcher.push(text.substr(at, size));
  stopped = matcher.stopped();
  return out + matcher.finish();
}

TEST(StopMatcher, TextEndsBeforeTheStopStringThatIsCompleteFirst) {
  struct Case {
    std::vector<std::string> stops;
    std::string text, expected;
    bool stopped;
  };
  const Case cases[] = {
      {{}, "anything", "anything", false},
      {{"END"}, "", "", false},
      {{"END"}, "no such thing", "no such thing", false},
      {{"END"}, "the END is near", "the ", true},
      {{"END"}, "EEND", "E", true},
      {{"END"}, "ENEND", "EN", true},
      {{"END"}, "a EN", "a EN", false},
      {{"END"}, "END", "", true},
      {{"aab"}, "aaaaab", "aaa", true},
      {{"abab", "xyz"}, "abaxyzabab", "aba", true},
      {{"abcd", "bc"}, "abcd", "a", true},  // "bc" is complete first
      {{"b", "ab"}, "xab", "x", true},      // at one place: the longest
      {{"\n\n", "\nUser:"}, "hi\nUser: x", "hi", true},
      {{"\xC3\xA9"}, "caf\xC3\xA9!", "caf", true},
      {{"\xC3\xA9"}, "caf\xC3\xA8!", "caf\xC3\xA8!", false},
  };
  for (const Case& c : cases) {
    for (std::size_t size = 1; size <= c.text.size() + 1; ++size) {
      bool stopped = false;
      EXPECT_EQ(run(c.stops, c.text, size, stopped), c.expected) << c.text << " by " << size;
      EXPECT_EQ(stopped, c.stopped) << c.text << " by " << size;
    }
  }
}

TEST(StopMatcher, HoldsBackOnlyWhatMayBecomeAStopString) {
  StopMatcher matcher({"</end>", "<x>"});
  EXPECT_EQ(matcher.push("a <"), "a ");
  EXPECT_EQ(matcher.push("/en"), "");
  EXPECT_EQ(matcher.push("x<"), "</enx");
  EXPECT_EQ(matcher.push(""), "");
  EXPECT_EQ(matcher.finish(), "<");
}

TEST(StopMatcher, AgreesWithASearchOfTheWholeText) {
  std::mt19937 rng(5);
  const auto word = [&](std::size_t longest) {
    std::string text;
    for (std::size_t n = 1 + rng() % longest; n > 0; --n) text += static_cast<char>('a' + rng() % 2);
    return text;
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops;
    for (std::size_t n = rng() % 4; n > 0; --n) stops.push_back(word(6));
    const std::string text = word(40);
    std::size_t best_end = std::string::npos;
    std::size_t best_begin = text.size();
    for (const std::string& stop : stops) {
      const std::size_t at = text.find(stop);
      if (at == std::string::npos) continue;
      if (at + stop.size() < best_end || (at + stop.size() == best_end && at < best_begin)) {
        best_end = at + stop.size();
        best_begin = at;
      }
    }
    bool stopped = false;
    ASSERT_EQ(run(stops, text, 1 + rng() % 7, stopped), text.substr(0, best_begin));
    ASSERT_EQ(stopped, best_end != std::string::npos);
  }
}

TEST(StopMatcher, RefusesEmptyAndInvalidStopStrings) {
  EXPECT_THROW(StopMatcher({"ok", ""}), std::invalid_argument);
  EXPECT_THROW(StopMatcher({"\xC3"}), std::invalid_argument);
}

}  // namespace
}  // namespace mmrec::engine
