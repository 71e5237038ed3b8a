// mmrec-generate on a tiny model of random weights: nothing here depends on what the text says.
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

const Words kShort = {"-p", "Alice was", "-n", "24"};

TEST(Generate, StdoutIsTheTextAloneAndStderrOneLine) {
  const Outcome outcome = generate(words(kShort, {"--seed", "5"}));
  const Json json = generate_json(words(kShort, {"--seed", "5"}));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out, json["text"].get<std::string>());
  EXPECT_EQ(outcome.err.rfind("mmrec-generate: load ", 0), 0U) << outcome.err;
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  expect_says(outcome.err, {"prefill ", "decode ", "tok/s", "GB/s", "peak ", "seed 5"});
  EXPECT_EQ(outcome.err.find("sweeps"), std::string::npos) << "there are none on a CPU";
}

TEST(Generate, JsonHoldsWhatItPromises) {
  const Json json = generate_json(words(kShort, {"--seed", "18446744073709551615"}));
  EXPECT_EQ(json["schema"], "mmrec-generate/1");
  EXPECT_EQ(json["seed"].get<std::uint64_t>(), 18446744073709551615U);
  EXPECT_EQ(json["tokens"].size(), json["logprobs"].size());
  EXPECT_GT(json["prompt_tokens"].size(), 1U);
  for (const Json& logprob : json["logprobs"]) EXPECT_LE(logprob.get<double>(), 0.0);
  for (const char* key : {"load_s", "prefill_s", "prefill_tokens_per_s", "decode_tokens_per_s", "decode_gb_per_s",
                          "peak_memory_bytes", "sweeps_per_token"}) {
    EXPECT_TRUE(json["timings"][key].is_number()) << key;
  }
  EXPECT_GT(json["timings"]["peak_memory_bytes"].get<double>(), 1e5);
}

TEST(Generate, OptionsHaveTheNamesOfOtherPrograms) {
  const Json reference = generate_json(words(kShort, {"--seed", "5", "--temp", "0.7", "--threads", "2"}));
  for (const char* tokens : {"-n", "--tokens", "--n-predict", "--predict", "--max-tokens"}) {
    const Json json = generate_json({"-p", "Alice was", tokens, "24", "-s", "5", "--temperature", "0.7", "-t", "2"});
    EXPECT_EQ(json["tokens"], reference["tokens"]) << tokens;
    EXPECT_EQ(json["sampling"], reference["sampling"]);
  }
  EXPECT_EQ(generate_json({"-p", "x", "-n", "1", "--repeat-penalty=1.5"})["sampling"]["repetition_penalty"], 1.5);
}

TEST(Generate, TheModelFolderMayStandAlone) {
  const Json reference = generate_json(words(kShort, {"--seed", "5"}));
  for (const Words& line : {Words{kGenerate, kTiny, "-p", "Alice was"}, Words{kGenerate, "-p", "Alice was", kTiny}}) {
    const Json json = json_of(run(words(line, {"--device", "cpu", "-n", "24", "--seed", "5", "--json"})));
    EXPECT_EQ(json["tokens"], reference["tokens"]);
    EXPECT_EQ(json["model"]["folder"], kTiny);
  }
}

TEST(Generate, QuietSaysNothingAndVerboseSaysWhy) {
  const Outcome plain = generate(words(kShort, {"--seed", "5"}));
  const Outcome quiet = generate(words(kShort, {"--seed", "5", "-q"}));
  EXPECT_EQ(quiet.out, plain.out);
  EXPECT_EQ(quiet.err, "");
  const Outcome verbose = generate(words(kShort, {"--seed", "5", "-v", "-t", "3"}));
  EXPECT_EQ(verbose.out, plain.out);
  expect_says(verbose.err,
              {"model " MMREC_FIXTURES "/tiny: mmrec, ", "tokenizer " MMREC_FIXTURES "/tiny/tokenizer.model: ",
               "device cpu (as --device says), precision fp32 (what the CPU computes in), 3 threads"});
  const Outcome scored = ppl({"-v", "-t", "3", "-"}, "Alice was");
  expect_says(scored.err, {"precision fp32 (what the CPU computes in), 3 threads"});
}

TEST(Generate, EscapesAreResolvedOnlyWhereThatIsAskedFor) {
  const Words options = {"-n", "1", "--json", "--echo"};
  const std::string written = R"(a\n\t\\ \"\'\x41\r\e)";
  EXPECT_EQ(json_of(generate(words({"-p", written}, options)))["prompt"], written);
  EXPECT_EQ(json_of(generate(words({"-e", "-p", written}, options)))["prompt"], "a\n\t\\ \"'A\r\x1b");
  EXPECT_EQ(json_of(generate(words({"-e", "-p", "a\\\nb"}, options)))["prompt"], "ab") << "a line is continued";
}

TEST(Generate, GreedyAndSeededRunsRepeat) {
  for (const Words& options : {Words{"--temp", "0"}, Words{"--seed", "11"}}) {
    const Json first = generate_json(words(kShort, options));
    for (const Words& variant : {Words{}, Words{"--threads", "1"}, Words{"--threads", "2"}, Words{"--threads", "3"}}) {
      const Json again = generate_json(words(words(kShort, options), variant));
      expect_same(again, first, {"text", "tokens", "logprobs"}, joined(variant));
    }
  }
  EXPECT_EQ(generate_json(words(kShort, {"--temp", "0", "--seed", "1"}))["tokens"],
            generate_json(words(kShort, {"--temp", "0", "--seed", "2"}))["tokens"]);
}

TEST(Generate, SeedsDifferAndARandomOneRepeatsTheRun) {
  const Words hot = words(kShort, {"--temp", "1.5", "--top-k", "0"});
  const Json one = generate_json(hot);
  EXPECT_NE(one["seed"], generate_json(hot)["seed"]);
  EXPECT_NE(generate_json(words(hot, {"--seed", "1"}))["tokens"], generate_json(words(hot, {"--seed", "2"}))["tokens"]);
  const std::string seed = std::to_string(one["seed"].get<std::uint64_t>());
  EXPECT_EQ(generate_json(words(hot, {"--seed", seed}))["tokens"], one["tokens"]);
}

TEST(Generate, PromptsFromEverySourceAreOne) {
  const TempFolder folder;
  write_file(folder / "prompt.txt", "Alice was");
  const Json reference = generate_json(words(kShort, {"--seed", "3"}));
  const Words options = {"-n", "24", "--seed", "3", "--json"};
  EXPECT_EQ(json_of(generate(words({"-f", folder / "prompt.txt"}, options)))["tokens"], reference["tokens"]);
  EXPECT_EQ(json_of(generate(options, "Alice was"))["tokens"], reference["tokens"]);
  EXPECT_EQ(json_of(generate(words({"-f", "-"}, options), "Alice was"))["tokens"], reference["tokens"]);
}

TEST(Generate, AMissingPromptFileIsARuntimeFault) {
  for (const Words& how : {Words{"-f"}, Words{"--jsonl"}, Words{"--lines", "-f"}}) {
    for (const std::string file : {"/nonexistent/prompt", "/"}) {
      expect_refused(generate(words(how, {file})), 1, {file + ": cannot read"});
    }
  }
}

TEST(Generate, AnEmptyPromptStartsFromBos) {
  const Json json = generate_json({"-p", "", "-n", "3", "--seed", "1"});
  EXPECT_EQ(json["prompt_tokens"], Json::array({1}));
  EXPECT_EQ(generate_json({"-n", "3", "--seed", "1"}, "")["tokens"], json["tokens"]);
}

TEST(Generate, EchoPutsThePromptFirst) {
  const Outcome plain = generate(words(kShort, {"--seed", "9"}));
  EXPECT_EQ(generate(words(kShort, {"--seed", "9", "--echo"})).out, "Alice was" + plain.out);
}

TEST(Generate, StopStringsEndTheTextBeforeThem) {
  const Json whole = generate_json(words(kShort, {"--seed", "4"}));
  const auto text = whole["text"].get<std::string>();
  const std::string stop = ascii_of(text, text.size() / 2);
  const Json cut = generate_json(words(kShort, {"--seed", "4", "--stop", "never, ever", "--stop", stop}));
  EXPECT_EQ(cut["text"].get<std::string>(), text.substr(0, text.find(stop)));
  EXPECT_EQ(cut["finish_reason"], "stop");
  EXPECT_EQ(generate(words(kShort, {"--seed", "4", "--stop", stop})).out, cut["text"].get<std::string>());
}

TEST(Generate, AStopStringMayHoldACommaOrALineEnd) {
  const Json whole = generate_json(words(kShort, {"--seed", "4"}));
  // Cut at its comma this would stop at the first character; whole it never occurs.
  const Json same = generate_json(words(kShort, {"--seed", "4", "--stop", ascii_of(whole["text"]) + ",\n\x01"}));
  EXPECT_EQ(same["tokens"], whole["tokens"]);
}

TEST(Generate, SettingsComeFromTheCommandLineThenTheFolderThenTheProgram) {
  const Json defaults = generate_json({"-p", "x", "-n", "1"})["sampling"];
  EXPECT_FLOAT_EQ(defaults["temperature"].get<float>(), 0.9F);  // generation_config.json
  EXPECT_EQ(defaults["top_k"], 50);
  EXPECT_FLOAT_EQ(defaults["top_p"].get<float>(), 0.95F);  // built in
  EXPECT_FLOAT_EQ(defaults["min_p"].get<float>(), 0.05F);
  EXPECT_FLOAT_EQ(defaults["repetition_penalty"].get<float>(), 1.25F);
  const Json given = generate_json({"-p", "x", "-n", "1", "--temp", "0.5", "--top-k", "7"})["sampling"];
  EXPECT_FLOAT_EQ(given["temperature"].get<float>(), 0.5F);
  EXPECT_EQ(given["top_k"], 7);
}

TEST(Generate, InvalidUtf8InAPromptIsReportedAndReadAsReplacement) {
  const Outcome outcome = generate({"-n", "2", "--temp", "0", "--json"}, "a\xff\xff b\xc3");
  EXPECT_EQ(json_of(outcome)["tokens"].size(), 2U);
  expect_says(outcome.err, {"warning: stdin: places that are no UTF-8", ": 2"});
}

TEST(Generate, TheBundledModelIsFoundWithoutBeingNamed) {
  const Json json = json_of(run({kGenerate, "--device", "cpu", "-p", "The house", "-n", "4", "--temp", "0", "--json"}));
  EXPECT_EQ(std::filesystem::weakly_canonical(json["model"]["folder"].get<std::string>()),
            std::filesystem::weakly_canonical(MMREC_WEIGHTS "/mmrec-12m"));
}

}  // namespace
}  // namespace mmrec::test
