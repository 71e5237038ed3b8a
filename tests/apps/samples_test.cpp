// mmrec-generate --num-samples, --logprobs and the chain that it names, on a tiny model of random weights.
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

const Words kAlice = {"-p", "Alice was beginning", "-n", "20", "--seed", "18446744073709551613"};

std::vector<Json> samples(const Words& more) { return jsonl_of(generate(words(kAlice, more))); }

TEST(Samples, EachIsWhatItsSeedGivesAlone) {
  const auto all = samples({"--num-samples", "7", "--json", "--stop", "e", "--echo"});
  ASSERT_EQ(all.size(), 7U);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i]["sample"], i);
    const auto seed = all[i]["seed"].get<std::uint64_t>();
    EXPECT_EQ(seed, 18446744073709551613U + i) << "which wraps";
    const Json alone = generate_json(
        {"-p", "Alice was beginning", "-n", "20", "--stop", "e", "--echo", "--seed", std::to_string(seed)});
    expect_same(all[i], alone, {"prompt", "prompt_tokens", "text", "tokens", "logprobs", "finish_reason"},
                std::to_string(i));
  }
  EXPECT_EQ(samples({"--num-samples", "3", "--json", "--stop", "e", "--echo"}),
            std::vector<Json>(all.begin(), all.begin() + 3));
  EXPECT_EQ(samples({"--num-samples", "2"})[0].size(), 4U) << "sample, seed, text and finish_reason";
}

TEST(Samples, ManyComeInTheirOrderAndShareOnePrefill) {
  const Words many = {"-p", "Alice was beginning", "-n", "3", "-s", "1", "--num-samples", "300"};
  const Outcome outcome = generate(many);
  const auto all = jsonl_of(outcome);
  ASSERT_EQ(all.size(), 300U);
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i]["sample"], i);
  expect_says(outcome.err, {" | 300 samples\n", "prefill 8 tokens"});
  EXPECT_EQ(generate(words(many, {"--slots", "2"})).out, outcome.out);
}

TEST(Samples, GoOnFromAStateAndOfEveryLine) {
  const TempFolder folder;
  EXPECT_EQ(generate(words(kAlice, {"--state-out", folder / "state"})).code, 0);
  const Words from = {"--state-in", folder / "state", "-n", "9", "--json"};
  const auto branches = jsonl_of(generate(words(from, {"--num-samples", "3", "-s", "4"})));
  ASSERT_EQ(branches.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(branches[i]["tokens"], json_of(generate(words(from, {"-s", std::to_string(4 + i)})))["tokens"]);
  }
  const Words lines = {"--lines", "-n", "9", "--json"};
  const std::string input = "Alice was\nThe river\n";
  const auto all = jsonl_of(generate(words(lines, {"--num-samples", "2", "-s", "4"}), input));
  ASSERT_EQ(all.size(), 4U);
  for (const std::size_t sample : {0U, 1U}) {
    const auto alone = jsonl_of(generate(words(lines, {"-s", std::to_string(4 + sample)}), input));
    for (const std::size_t line : {0U, 1U}) {
      const Json& found = all[2 * line + sample];
      EXPECT_EQ(found["line"], line + 1);
      EXPECT_EQ(found["sample"], sample);
      EXPECT_EQ(found["tokens"], alone[line]["tokens"]);
      EXPECT_EQ(found["prompt_tokens"], alone[line]["prompt_tokens"]);
    }
  }
}

// The reference is what mmrec-ppl says of the sequence that ends in the token.
TEST(Logprobs, OfTheLikeliestTokensAreThoseOfScoring) {
  const Json json = generate_json(
      {"-p", "Alice was", "-n", "6", "--seed", "2", "--temp", "2", "--logprobs", "4", "--repetition-penalty", "1.5"});
  const Json& tops = json["top_logprobs"];
  ASSERT_EQ(tops.size(), 6U);
  std::string input;
  std::vector<int> ids = json["prompt_tokens"];
  for (std::size_t i = 0; i < tops.size(); ++i) {
    ASSERT_EQ(tops[i].size(), 4U);
    for (const Json& top : tops[i]) {
      std::vector<int> line = ids;
      line.push_back(top["token"]);
      input += Json(line).dump() + "\n";
    }
    ids.push_back(json["tokens"][i]);
  }
  const Json scored = ppl_json({"--ids", "--per-token", "-"}, input)["documents"];
  for (std::size_t i = 0; i < tops.size(); ++i) {
    double before = 0.0;
    for (std::size_t k = 0; k < 4; ++k) {
      const Json& top = tops[i][k];
      const auto logprob = top["logprob"].get<double>();
      EXPECT_NEAR(logprob, scored[4 * i + k]["logprobs"].back().get<double>(), 2e-5) << i << " " << k;
      EXPECT_TRUE(k == 0 || logprob <= before) << "likeliest first";
      EXPECT_TRUE(top["piece"].is_string());
      if (top["token"] == json["tokens"][i]) {
        EXPECT_NEAR(logprob, json["logprobs"][i].get<double>(), 1e-5);
      }
      before = logprob;
    }
  }
  // Records say the same.
  const auto lines = jsonl_of(
      generate({"--lines", "-n", "6", "--seed", "2", "--temp", "2", "--logprobs", "4", "--repetition-penalty", "1.5"},
               "Alice was"));
  EXPECT_EQ(lines[0]["top_logprobs"], tops);
  EXPECT_EQ(lines[0]["logprobs"], json["logprobs"]);
}

TEST(Chain, IsNamedInTheOrderOfTheSampler) {
  const std::vector<std::pair<Words, std::string>> chains = {
      {{"--temp", "0.8", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.05", "--repetition-penalty", "1.1"},
       "repetition penalty 1.1 of the last 64 > temp 0.8 > top-k 40 > top-p 0.95 > min-p 0.05"},
      {{"--temp", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--repetition-penalty", "1"}, "temp 1"},
      {{"--temp", "0", "--repetition-penalty", "1"}, "greedy"},
  };
  for (const auto& [options, chain] : chains) {
    const Outcome outcome = generate(words({"-p", "x", "-n", "2", "-s", "7", "--json"}, options));
    EXPECT_EQ(json_of(outcome)["sampling"]["chain"], chain);
    const std::string in_line = chain == "greedy" ? " | greedy | " : " | " + chain + ", seed 7 | ";
    expect_says(outcome.err, {in_line});
  }
}

}  // namespace
}  // namespace mmrec::test
