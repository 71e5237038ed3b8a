// mmrec-generate --interactive, through pipes and on a terminal, on a tiny model of random weights.
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

const Words kSettings = {"-n", "9", "-s", "7", "--temp", "1.2", "-q"};

const Words kNextSeed = {"-n", "9", "-s", "8", "--temp", "1.2", "-q"};

std::string talk(const std::string& lines, const Words& more = {}) {
  const Outcome outcome = generate(words(words({"--interactive"}, kSettings), more), lines);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  return outcome.out;
}

/// Runs of the program one after another, through state files: what turns are to be.
class Chain {
 public:
  std::string turn(const std::string& text, const Words& settings = kSettings) {
    Words line = generate_on_tiny(settings);
    if (at_ > 0) line = words(line, {"--state-in", state(at_)});
    line = words(line, {"-p", text, "--state-out", state(at_ + 1)});
    const Outcome outcome = run(line);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    ++at_;
    return outcome.out;
  }
  void back() { --at_; }
  std::string state(int at) const { return folder_ / ("state-" + std::to_string(at)); }

 private:
  TempFolder folder_;
  int at_ = 0;
};

TEST(Interactive, TurnsAreRunsThatGoOn) {
  Chain chain;
  std::string expected;
  for (const char* text : {"Alice was", " and the cat", "", "/x"}) expected += chain.turn(text);
  EXPECT_EQ(talk("Alice was\r\n and the cat\n\n//x\n"), expected);
  EXPECT_EQ(talk(" and the cat\n\n//x", {"-p", "Alice was"}), expected) << "a prompt is a first turn";
  EXPECT_EQ(talk(" and the cat\n\n//x\n", {"--state-in", chain.state(1)}),
            expected.substr(Chain().turn("Alice was").size()));
  EXPECT_EQ(talk(""), "");
}

TEST(Interactive, UndoRetryAndReset) {
  Chain chain;
  std::string expected = chain.turn("Alice was");
  expected += chain.turn(" and");
  chain.back();
  expected += chain.turn(" or");  // of another text
  chain.back();
  expected += chain.turn(" or", kNextSeed);  // the same with the next seed
  chain.back();
  chain.back();
  const std::string anew = chain.turn("The river", kNextSeed);
  EXPECT_EQ(talk("Alice was\n and\n/undo\n or\n/retry\n/undo\n/undo\nThe river\n"), expected + anew);
  EXPECT_EQ(talk("Alice was\n and\n/undo\n or\n/retry\n/reset\nThe river\n"), expected + anew);
  const Outcome none = generate({"-i"}, "/undo\n/reset\n/undo\n/retry\n");
  EXPECT_EQ(none.code, 0);
  EXPECT_EQ(none.out, "");
  expect_says(none.err, {"nothing to undo"});
}

TEST(Interactive, SettingsHoldFromTheNextTurnOn) {
  Chain chain;
  std::string expected = chain.turn("Alice was");
  expected += chain.turn(" and", {"--temp", "0", "-n", "4", "-q"});
  expected += chain.turn(" or", {"--temp", "2", "--top-k", "3", "-s", "5", "--stop", "e", "-n", "4", "-q"});
  EXPECT_EQ(
      talk("Alice was\n/set temperature=0\n/set n-predict=4\n and\n/set temp 2\n/set top_k = 3\n/set seed  5\n/set "
           "stop=e\n or\n"),
      expected);
  const Outcome bad = generate(words({"-i"}, kSettings),
                               "/set temp=hot\n/set device=cpu\n/set temp\n/set\n/what\n/save\n/load /nonexistent/x\n"
                               "/save /nonexistent/x\nAlice was\n");
  EXPECT_EQ(bad.code, 0);
  EXPECT_EQ(bad.out, Chain().turn("Alice was")) << "and all goes on";
  expect_says(bad.err, {"--temp: not a valid value (found 'hot'", "Option ‘device’ does not exist", "argument",
                        "temp 1.2 > top-k 50", "unknown command '/what'", "/save: which file?", "/nonexistent/x"});
}

TEST(Interactive, StatesAreSavedAndLoaded) {
  const TempFolder folder;
  const std::string file = folder / "state";
  Chain chain;
  std::string expected = chain.turn("Alice was");
  const std::string first = expected;
  expected += chain.turn(" and");
  chain.back();
  expected += chain.turn(" or");
  EXPECT_EQ(talk("Alice was\n/save " + file + "\n and\n/load " + file + "\n or\n/quit\nignored\n",
                 {"--state-out", folder / "end"}),
            expected);
  EXPECT_EQ(read_file(file), read_file(chain.state(1)));
  EXPECT_EQ(read_file(folder / "end"), read_file(chain.state(2)));
}

class Terminal : public testing::Test {
 protected:
  void SetUp() override { setenv("TERM", "xterm", 1); }
};

TEST_F(Terminal, AnInterruptEndsATurnAndThenTheProgram) {
  const TempFolder folder;
  Process process(
      on_terminal(generate_on_tiny({"--interactive", "--temp", "0", "-n", "-1", "--state-out", folder / "state"})));
  ASSERT_TRUE(process.read_stderr("> "));
  process.type("Alice was\r");
  ASSERT_TRUE(process.read_stdout(200));
  process.clear_stderr();
  process.type("\x03");
  ASSERT_TRUE(process.read_stderr("cancelled"));
  ASSERT_TRUE(process.read_stderr("> ")) << "asked for the next";
  process.clear_stderr();
  process.type("/undo\r");
  ASSERT_TRUE(process.read_stderr("at position 0"));
  ASSERT_TRUE(process.read_stderr("> "));
  EXPECT_TRUE(process.running());
  process.type("\x03");
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.code, 130);
  EXPECT_FALSE(Json(outcome.out).dump().empty()) << "whole characters";
  EXPECT_TRUE(std::filesystem::exists(folder / "state"));
  expect_says(outcome.err, {"saved at position 0"});
}

TEST_F(Terminal, TheEndOfTheInputEndsIt) {
  Process process(on_terminal(generate_on_tiny({"-i", "-n", "3"})));
  ASSERT_TRUE(process.read_stderr("> "));
  for (int i = 0; i < 100 && process.running(); ++i) {  // one that comes before the terminal is raw is lost
    process.type("\x04");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_EQ(process.wait().code, 0);
}

#if MMREC_EDITS_LINES
TEST_F(Terminal, LinesAreEditedAndRemembered) {
  Process process(on_terminal(generate_on_tiny(words({"-i"}, kSettings))));
  ASSERT_TRUE(process.read_stderr("> "));
  Chain chain;
  std::string expected = chain.turn("Alice wäs 🚀");
  process.type(
      "lice wäx\x7fs 🚀\x01"
      "A\r");  // what is wrong is wiped, then to the beginning
  ASSERT_TRUE(process.read_stdout(expected.size()));
  expected += chain.turn("Alice wäs 🚀!");
  process.type("\x1b[A!\r");  // the line before
  ASSERT_TRUE(process.read_stdout(expected.size()));
  process.type("/quit\r");
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, expected);
}
#endif

}  // namespace
}  // namespace mmrec::test
