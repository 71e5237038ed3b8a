// Where output goes wrong: full devices, closed pipes, interrupts, and files that must appear whole or not at all.
#include <sys/stat.h>

#include <regex>

#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

// Greedy and without an end: a run that goes on until something stops it.
const std::string kSentence = "Alice was beginning to get very tired of sitting by her sister.\n";
const Words kEndless = {"-p", "Alice was", "-n", "-1", "--temp", "0"};

TEST(Output, AReaderThatLeavesStopsTheRunQuietly) {
  for (const Words& line : {generate_on_tiny(kEndless), ppl_on_tiny({"--ids", "--per-token", kIds})}) {
    Process process(line);
    if (line[0] == kGenerate) {
      ASSERT_TRUE(process.read_stdout(10));
    }
    process.close_stdout();
    const Outcome outcome = process.wait();
    EXPECT_EQ(outcome.code, 141);
    EXPECT_EQ(outcome.err, "");
  }
}

TEST(Interrupt, FinishesTheTokenAndSaysWhatItCost) {
  for (const auto& [signal, code] : {std::pair{SIGINT, 130}, std::pair{SIGTERM, 143}}) {
    const Outcome outcome = interrupted(generate_on_tiny(kEndless), 10, signal);
    EXPECT_EQ(outcome.code, code);
    expect_says(outcome.err, {"greedy", "cancelled"});
    EXPECT_FALSE(Json(outcome.out).dump().empty());  // throws for what is no UTF-8
  }
}

TEST(Interrupt, ALongPromptShowsProgressAndEndsAfterAChunk) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; text.size() < 1'500'000; ++i) text += "Alice was number " + std::to_string(i) + ". ";
  write_file(folder / "prompt.txt", text);
  Process process(on_terminal(generate_on_tiny({"-f", folder / "prompt.txt", "--prefill", "steps"})));
  ASSERT_TRUE(process.read_stderr("tok/s"));
  process.send(SIGINT);
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.code, 130);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err.find("ppl"), std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.err.find("decode"), std::string::npos) << outcome.err;
  expect_says(outcome.err, {"cancelled"});
}

TEST(Interrupt, JsonIsStillWhole) {
  const Outcome outcome = interrupted(generate_on_tiny(words(kEndless, {"--json"})), 0);
  EXPECT_EQ(outcome.code, 130);
  if (!outcome.out.empty()) {  // a machine so slow that the model was still loading prints nothing
    EXPECT_EQ(Json::parse(outcome.out)["finish_reason"], "cancelled");
  }
}

TEST(Interrupt, TheSecondOneEndsTheProgramAtOnce) {
  Process process(generate_on_tiny(kEndless));
  process.shrink_stdout();
  ASSERT_TRUE(process.read_stdout(10));
  // Nobody reads on, so the program comes to wait in a write, where the first interrupt cannot end it.
  int before = -1;
  int same = 0;  // in a row: a busy machine may leave the program waiting for a moment
  wait_for([&] {
    const int now = process.unread_stdout();
    same = now > 0 && now == std::exchange(before, now) ? same + 1 : 0;
    return same == 20;
  });
  process.send(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_TRUE(process.running());
  process.send(SIGINT);
  const Outcome outcome = process.wait(false);
  EXPECT_EQ(outcome.code, 130);
  EXPECT_EQ(outcome.err, "mmrec-generate: interrupted\n");
}

TEST(Interrupt, ALongTextShowsHowFarItIsAndEndsAfterAChunk) {
  const TempFolder folder;
  write_file(folder / "book.txt", repeated(kSentence, std::size_t{24} << 20));
  // mmrec-ppl scores it while it is tokenized, mmrec-generate does not.
  for (const auto& [arguments, shown] : {std::pair{ppl_on_tiny({folder / "book.txt"}), "tok/s"},
                                         {generate_on_tiny({"-f", folder / "book.txt"}), "MB/s"}}) {
    Process process(on_terminal(arguments));
    ASSERT_TRUE(process.read_stderr(shown)) << arguments[0];
    process.type("\x03");
    const Outcome outcome = process.wait();
    EXPECT_EQ(outcome.code, 130) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  }
}

TEST(Interrupt, TheFirstEstimateLeavesOutTheTimeBeforeIt) {
  const TempFolder folder;
  write_file(folder / "book.txt", repeated(kSentence, std::size_t{2} << 20));
  Process process(on_terminal(ppl_on_tiny({folder / "book.txt"})));
  ASSERT_TRUE(process.read_stderr("ETA"));
  process.type("\x03");
  const Outcome outcome = process.wait();
  EXPECT_FALSE(std::regex_search(outcome.err, std::regex(R"(ETA \d+:\d\d:\d\d)"))) << "hours: " << outcome.err;
}

TEST(Interrupt, WhileStdinIsReadItEndsTheProgramAtOnce) {
  EXPECT_EQ(interrupted_reading(generate_on_tiny({"-f"}), "", 0).code, 130);
}

TEST(Interrupt, PplDoesNotWaitForItsInput) {
  const Outcome outcome = interrupted_reading(ppl_on_tiny({"--ids"}), "[1,2]\n[3", 0);
  EXPECT_EQ(outcome.code, 130);
  EXPECT_EQ(outcome.out, "");
  expect_says(outcome.err, {"interrupted after"});
}

TEST(Interrupt, PplLeavesNoFileBehind) {
  for (const auto& [signal, code] : {std::pair{SIGINT, 130}, {SIGTERM, 143}, {SIGHUP, 129}}) {
    const TempFolder folder;
    write_file(folder / "result.json", "old");
    const Words line = ppl_on_tiny({"--ids", "-o", folder / "result.json"});
    const Outcome outcome = interrupted_reading(line, "", 0, signal);
    EXPECT_EQ(outcome.code, code);
    expect_says(outcome.err, {"interrupted"});
    EXPECT_EQ(files_in(folder.path()), 1);
    EXPECT_EQ(read_file(folder / "result.json"), "old");
  }
}

TEST(OutputFile, IsTheSameBytesAsStdout) {
  const mode_t mask = umask(0);
  umask(mask);
  for (const Words& line :
       {ppl_on_tiny({"--ids", "--per-token", kIds}), generate_on_tiny({"-p", "Alice was", "-n", "24", "-s", "5"})}) {
    const TempFolder folder;
    const Outcome outcome = run(words(line, {"-o", folder / "result"}));
    EXPECT_EQ(outcome.code, 0);
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(read_file(folder / "result"), run(line).out);
    EXPECT_EQ(run(words(line, {"-o", "-"})).out, run(line).out);
    EXPECT_EQ(files_in(folder.path()), 1);
    EXPECT_EQ(mode_of(folder / "result"), 0666U & ~mask);
    expect_refused(run(words(line, {"-o", "/nonexistent/text"})), 5, {"/nonexistent/text: cannot write"});
  }
}

TEST(OutputFile, AFailedRunLeavesTheOldFile) {
  const TempFolder folder;
  write_file(folder / "result.json", "old");
  const Outcome outcome = ppl({"--ids", "-o", folder / "result.json", "-"}, "[1,2]\n[broken\n");
  EXPECT_EQ(outcome.code, 3);
  EXPECT_EQ(read_file(folder / "result.json"), "old");
  EXPECT_EQ(files_in(folder.path()), 1);
}

TEST(OutputFile, ALimitOfItsSizeIsExitFiveAndLeavesNothing) {
  const TempFolder folder;
  write_file(folder / "ids.jsonl", "[1" + repeated(",7", 4000) + "]\n");
  std::filesystem::create_directory(folder / "out");
  std::string command = "ulimit -f 8; exec";
  for (const std::string& word :
       ppl_on_tiny({"--ids", "--per-token", "-o", folder / "out/result.jsonl", folder / "ids.jsonl"})) {
    command += " '" + word + "'";
  }
  expect_refused(run({"/bin/sh", "-c", command}), 5, {"result.jsonl", "File too large"});
  EXPECT_EQ(files_in(folder / "out"), 0);
}

}  // namespace
}  // namespace mmrec::test
