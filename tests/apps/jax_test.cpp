// The programs on a folder of mmrec-jax: scores go token by token and every result names how documents were cut; whole
// calls, which see later tokens, must be asked for twice.
#include "tests/apps/programs.h"
#include "tests/support/safetensors_reader.h"

namespace mmrec::test {
namespace {

const std::string kJax = kUpstream + "/jax";

Outcome on_jax(const Words& more, const std::string& input) {
  return run(words({kPpl, "--device", "cpu", "-m", kJax, "--ids", "-"}, more), input);
}

TEST(Jax, ScoresGoTokenByTokenAndSaySo) {
  const SafetensorsReader reference(kJax + "/reference.safetensors");
  const ReferenceTensor& ids = reference.at("input_ids");
  const ReferenceTensor& logits = reference.at("logits_stepwise");
  const std::int64_t count = logits.dim(1), vocab = logits.dim(2);
  const std::string input = id_lines(ids, count);
  for (const Words& options : {Words{}, Words{"--calls", "stepwise"}}) {
    const auto lines = jsonl_of(on_jax(words({"--per-token"}, options), input));
    ASSERT_EQ(lines.size(), static_cast<std::size_t>(2 * (count - 1)));
    for (const Json& line : lines) {
      ASSERT_EQ(line.value("calls", ""), "stepwise") << line.dump();
      const auto doc = line["doc"].get<std::int64_t>(), pos = line["pos"].get<std::int64_t>();
      const float* row = logits.values.data() + (doc * count + pos - 1) * vocab;
      double sum = 0.0;
      for (std::int64_t v = 0; v < vocab; ++v) sum += std::exp(static_cast<double>(row[v]));
      const int id = ids.integers[static_cast<std::size_t>(doc * ids.dim(1) + pos)];
      EXPECT_NEAR(line["logprob"].get<double>(), static_cast<double>(row[id]) - std::log(sum), 1e-4);
    }
  }
  EXPECT_EQ(json_of(on_jax({"--format", "json"}, input))["calls"], "stepwise");
  expect_says(on_jax({}, input).out, {"calls          stepwise\n"});
  EXPECT_EQ(jsonl_of(on_jax({"--format", "jsonl"}, input)).front()["calls"], "stepwise");
  const Json without = json_of(on_jax({"--bank", "false", "--format", "json"}, input));
  EXPECT_EQ(without["calls"], "one");
  EXPECT_EQ(without["model"]["bank"], false);
}

TEST(Jax, WholeCallsAreScoredWhereAskedForTwice) {
  const SafetensorsReader reference(kJax + "/reference.safetensors");
  const ReferenceTensor& expected = reference.at("logprobs");
  const std::string input = id_lines(reference.at("input_ids"), expected.dim(1) + 1);
  expect_refused(on_jax({"--calls", "whole"}, input), 2, {"--calls whole", "later tokens", "--leaky"});
  expect_refused(on_jax({"--leaky"}, input), 2, {"--leaky"});
  expect_refused(on_jax({"--calls", "prompt"}, input), 2, {"--calls prompt", "stepwise"});
  expect_refused(on_jax({"--calls", "all"}, input), 2, {"--calls", "stepwise"});
  const auto lines = jsonl_of(on_jax({"--calls", "whole", "--leaky", "--per-token"}, input));
  ASSERT_EQ(lines.size(), expected.values.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    ASSERT_EQ(lines[i].value("calls", ""), "whole") << lines[i].dump();
    EXPECT_NEAR(lines[i]["logprob"].get<double>(), static_cast<double>(expected.values[i]), 1e-4) << i;
  }
}

TEST(Jax, ItsOptionsAreRefusedForOtherModels) {
  for (const Words& option : {Words{"--calls", "stepwise"}, Words{"--bank", "false"}}) {
    expect_refused(ppl(words({"--ids", "-"}, option), "[1, 2]\n"), 2, {option[0].substr(2), "mmrec"});
    expect_refused(generate(words({"-p", "x"}, option)), 2, {option[0].substr(2), "mmrec"});
  }
}

// What has been kept of a prompt would be a call of its own, and the rest another.
TEST(Jax, PromptsThatAreCallsHaveNoPrefixCache) {
  const TempFolder temp;
  const std::string folder = (temp / "model").string();
  const auto vocab = Json::parse(read_file(kTiny + "/config.json"))["vocab_size"].get<int>();
  const std::string sizes = "--arch mmrec-jax --synthetic 64,1," + std::to_string(vocab) + " --keep " + folder;
  const std::string work = " --device cpu --lengths 4 --batches 1 --decode 1 --documents 1 --requests 1 --repeat 1";
  ASSERT_EQ(run(words({kBench}, split(sizes + work))).code, 0);
  std::filesystem::copy_file(kTiny + "/tokenizer.model", folder + "/tokenizer.model");
  const Words command = words(
      {kGenerate}, split("-m " + folder + " --device cpu -p Alice -n 1 --prefix-cache " + (temp / "cache").string()));
  expect_refused(run(command), 2, {"--prefix-cache", "call"});
  EXPECT_EQ(run(words(command, {"--calls", "stepwise"})).code, 0);
}

TEST(Jax, BenchMeasuresASyntheticModel) {
  const Json json = json_of(run(words({kBench}, split("--synthetic 64,2,100 --arch mmrec-jax --device cpu --lengths 40 "
                                                      "--batches 1 --decode 4 --documents 2 --requests 2 --slots 2 "
                                                      "--repeat 1 --calls prompt --json"))));
  EXPECT_NE(json.dump().find("\"calls\":\"prompt\""), std::string::npos) << json.dump(2);
}

}  // namespace
}  // namespace mmrec::test
