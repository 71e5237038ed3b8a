// The programs on a folder of mmrec100m, made by the converter from the public code's checkpoint, from end to end.
#include "tests/apps/programs.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/tokenizer_builder.h"

namespace mmrec::test {
namespace {

const std::string kFixture = kUpstream + "/mmrec100m";

class Mmrec100m : public testing::Test {
 protected:
  void SetUp() override {
    const Outcome converted = run(
        {"/usr/bin/env", "python3", MMREC_WEIGHTS "/convert.py", "-o", folder_.path(), kFixture + "/checkpoint.pt"});
    ASSERT_EQ(converted.code, 0) << converted.err;
  }
  Outcome ppl(const Words& more, const std::string& input) const {
    return run(with_device({kPpl, "-m", folder_.path(), "--ids", "--format", "json", "-"}, more), input);
  }

  TempFolder folder_;
};

TEST_F(Mmrec100m, ScoresAsThePublicCodeDoes) {
  const SafetensorsReader reference(kFixture + "/reference.safetensors");
  const std::string input = id_lines(reference.at("input_ids"));
  const std::vector<float>& logprobs = reference.at("logprobs").values;
  const double expected = -std::accumulate(logprobs.begin(), logprobs.end(), 0.0);
  for (const char* prefill : {"steps", "sweeps"}) {
    const Json result = json_of(ppl({"--prefill", prefill, "--sweep-tol", "1e-6"}, input));
    EXPECT_NEAR(result["nll"].get<double>(), expected, 2e-5 * static_cast<double>(logprobs.size()));
    EXPECT_EQ(result["model"]["expert"], "both");
  }
}

TEST_F(Mmrec100m, AnExpertMayBeChosen) {
  const std::string input = "[1, 17, 42, 5, 99]\n";
  const Json both = json_of(ppl({}, input));
  const Json text = json_of(ppl({"--expert", "text"}, input));
  EXPECT_EQ(text["model"]["expert"], "text");
  EXPECT_NE(text["nll"], both["nll"]);
  EXPECT_NE(text["model"]["fingerprint"], both["model"]["fingerprint"]);
  expect_refused(ppl({"--expert", "third"}, input), 2, {"--expert", "'third'", "both or text or code"});
  expect_refused(run(ppl_on_tiny({"--ids", "--expert", "text", "-"}), input), 2, {"expert", "mmrec"});
}

TEST_F(Mmrec100m, Generates) {
  TokenizerBuilder tokenizer;
  tokenizer.words({"\u2581once", "\u2581upon", "\u2581a", "\u2581time"});
  write_file(folder_ / "tokenizer.model", tokenizer.build());
  const Words line = {kGenerate, "--device", "cpu",    "-m", folder_.path(), "-p", "once upon",
                      "-n",      "12",       "--seed", "3",  "--json"};
  const Json first = json_of(run(line));
  EXPECT_EQ(first["model"]["expert"], "both");
  EXPECT_EQ(json_of(run(line))["text"], first["text"]);
}

}  // namespace
}  // namespace mmrec::test
