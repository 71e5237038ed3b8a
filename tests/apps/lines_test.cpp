// mmrec-generate --lines: a prompt a line, on a tiny model of random weights.
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

Outcome lines(const Words& more, std::string input) { return generate(words({"--lines"}, more), std::move(input)); }

TEST(Lines, EachIsContinuedAsIfItWereTheOnlyOne) {
  const Words options = {"-n", "24", "--seed", "5", "--json"};
  const auto all = jsonl_of(lines(options, "Alice was\nThe river\r\n\nAlice was"));
  ASSERT_EQ(all.size(), 4U);
  const Json first = json_of(generate(words({"-p", "Alice was"}, options)));
  expect_same(all[0], first, {"text", "tokens", "logprobs", "finish_reason", "prompt_tokens"});
  EXPECT_NE(all[3]["tokens"], all[0]["tokens"]) << "every line draws anew";
  EXPECT_EQ(all[3]["prompt_tokens"], all[0]["prompt_tokens"]);
  EXPECT_EQ(all[2]["prompt_tokens"], Json::array({1})) << "from BOS";
  EXPECT_EQ(all[1]["prompt_tokens"], json_of(generate(words({"-p", "The river"}, options)))["prompt_tokens"]);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(all[i]["line"], i + 1);
  // Others than the first one, by themselves.
  EXPECT_EQ(jsonl_of(lines(options, "x\nThe river"))[1], all[1]);
}

TEST(Lines, ComeInTheirOrderHoweverManyThereAre) {
  std::string input;
  for (int i = 0; i < 700; ++i)
    input += std::string("Alice was beginning").substr(0, static_cast<std::size_t>(i % 20)) + "\n";
  const Words options = {"-n", "6", "--seed", "1", "--stop", "e"};
  const Outcome outcome = lines(options, input);
  const auto all = jsonl_of(outcome);
  ASSERT_EQ(all.size(), 700U);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i]["line"], i + 1);
    EXPECT_EQ(all[i].size(), 3U) << "line, text and finish_reason";
  }
  expect_says(outcome.err, {"700 prompts, "});
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_EQ(jsonl_of(lines(words(options, {"--threads", "1"}), input)), all);
  for (const char* slots : {"1", "7", "300"})
    EXPECT_EQ(jsonl_of(lines(words(options, {"--slots", slots}), input)), all);
  EXPECT_EQ(lines(options, "").out, "");
}

TEST(Lines, EchoAndWarningsNameTheLine) {
  const Outcome outcome = lines({"-n", "1", "--echo"}, "one\nt\xffwo\n");
  const auto all = jsonl_of(outcome);
  EXPECT_EQ(all[0]["prompt"], "one");
  EXPECT_EQ(all[1]["prompt"], "t\xEF\xBF\xBDwo");
  expect_says(outcome.err, {"warning: stdin:2: places that are no UTF-8", ": 1"});
}

TEST(Lines, AResultDoesNotWaitForTheNextPrompt) {
  // It waits for the second line's end.
  const Outcome outcome =
      interrupted_reading(generate_on_tiny({"--lines", "-n", "5", "-s", "1", "-f"}), "Alice\nwas", 10);
  EXPECT_EQ(outcome.code, 130);
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 1) << outcome.out;
  expect_says(outcome.err, {"1 prompts, 5 tokens"});
}

TEST(Lines, AnInterruptEndsThoseThatRun) {
  const TempFolder folder;
  write_file(folder / "prompts.txt", "Alice was\nAlice\n");
  const Words line = generate_on_tiny({"--lines", "-n", "-1", "--temp", "0", "-f", folder / "prompts.txt"});
  // No results on a machine so slow that the model was still loading.
  for (const Json& result : jsonl_of(interrupted(line, 0), 130)) EXPECT_EQ(result["finish_reason"], "cancelled");
}

}  // namespace
}  // namespace mmrec::test
