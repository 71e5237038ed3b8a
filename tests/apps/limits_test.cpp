// Inputs that ask for more than they look like, under a limit of the address space: each has a result or a reason, and
// a line that asks for too much ends no run.
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

const std::string kGood = R"({"id":"good","prompt":"Alice","n":2,"seed":1})";

/// A run with 400 MB of address space and one thread.
Outcome run_limited(const Words& options, const std::string& input) {
  return run(limited(400'000, words(generate_on_tiny(options), {"-t", "1"})), input);
}

TEST(Limits, ALineThatAsksForTooMuchHasARecordAndTheRunGoesOn) {
  SKIP_UNDER_SANITIZERS("a sanitizer's shadow memory does not fit under the limit");
  struct Case {
    std::string line;
    std::string error;
    Words options = {};
  };
  const std::vector<Case> cases = {
      {R"({"prompt":"x","num_samples":65536})", "too many tokens (found num_samples 65536 x (max_tokens 256 x"},
      {R"({"prompt":"x","n":1099511627776})", "too many tokens (found num_samples 1 x (max_tokens 1099511627776"},
      {R"({"prompt":"x","n":4191,"logprobs":1000})", "expected at most 4194304, as --max-line-tokens says)"},
      {R"({"prompt":[)" + repeated("1,", 100'000) + R"(1],"num_samples":100,"n":0,"logprobs":true})",
       "50001 of the prompt"},
      {R"({"prompt":"x","num_samples":6,"n":-1,"logprobs":1})", "too many tokens", {"--max-line-tokens", "11"}},
      {R"({"prompt":"x","stop":")" + std::string(20'000, 'x') + "\"}", "stop: too long (found 20000 bytes"},
      {R"({"prompt":"x","stop":["x")" + repeated(R"(,"x")", 80'000) + "]}", "stop: too long (found 20001 bytes"},
      {R"({"prompt":"x","n":1,"num_samples":900,"id":")" + std::string(1'000'000, 'x') + "\"}",
       "id: too long (found 1000002 bytes, expected at most 16384, as --max-line-extra-kb says)"},
      {R"({"prompt":"x","id":")" + std::string(1100, 'x') + "\"}", "id: too long", {"--max-line-extra-kb", "1"}},
      {R"({")" + std::string(1'000'000, 'x') + "\":1}", "key is too long (limit 4096 bytes)"},
      {R"({"prompt":")" + std::string(17'000'000, 'x') + "\"}", "expected at most 16777216)"},
      {std::string(1'100'000, 'x'), "too long (found 1100000 bytes", {"--max-line-mb", "1"}},
  };
  for (const Case& one : cases) {
    const std::string what = one.line.substr(0, 60);
    const Outcome outcome = run_limited(words({"--jsonl", "-"}, one.options), one.line + "\n" + kGood + "\n");
    EXPECT_LT(outcome.out.size(), 2000U) << what;
    const auto records = jsonl_of(outcome, 3);
    ASSERT_EQ(records.size(), 2U) << what << "\n" << outcome.err;
    EXPECT_EQ(records[0]["line"], 1) << what;
    expect_says(records[0].value("error", ""), {one.error});
    expect_says(outcome.out, {"\n{\"id\":\"good\",\"line\":2,\"seed\":1,\"text\":"});
    expect_says(outcome.err, {"1 of 2 lines refused, stdin:1: "});
  }
}

TEST(Limits, ALongLineOfTextHasARecordToo) {
  const Outcome outcome =
      generate({"--lines", "--max-line-mb", "1", "-n", "1"}, "one\n" + std::string(3'000'000, 'x') + "\ntwo");
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  expect_says(outcome.out, {"{\"line\":1,\"text\"", "\n{\"line\":2,\"error\":\"too long (found at least 1",
                            "\n{\"line\":3,\"text\""});
}

TEST(Limits, WhatTheCommandLineAsksForIsNotRefusedAndMinusOneIsAsManyAsTheLimit) {
  const auto records =
      jsonl_of(generate({"--jsonl", "-", "--max-line-tokens", "12", "-n", "20", "--json"},
                        "{\"prompt\":\"Alice\",\"seed\":1}\n{\"prompt\":[5,6],\"seed\":1,\"n\":-1}\n"));
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0]["tokens"].size(), 20U);
  EXPECT_EQ(records[1]["tokens"].size(), 10U) << "and two of the prompt";
}

TEST(Limits, SamplesAreMadeAsTheyAreNeeded) {
  SKIP_UNDER_SANITIZERS("a sanitizer's shadow memory does not fit under the limit");
  const std::string stop(16'000, 'x');
  const Json line = {{"prompt", "Alice"}, {"n", 1}, {"num_samples", 6'000}, {"seed", 3}, {"stop", stop}};
  const std::vector<std::pair<Words, std::string>> commands = {
      {{"--jsonl", "-"}, line.dump()},
      {{"--lines", "-n", "1", "--num-samples", "6000", "-s", "3", "--stop", stop}, "Alice"},
      {{"-p", "Alice", "-n", "1", "--num-samples", "6000", "-s", "3", "--stop", stop}, ""},
  };
  for (const auto& [options, input] : commands) {
    const auto records = jsonl_of(run_limited(options, input));
    ASSERT_EQ(records.size(), 6'000U) << options[0];
    for (std::size_t i = 0; i < records.size(); i += 999) {
      EXPECT_EQ(records[i]["sample"], i);
      EXPECT_EQ(records[i]["seed"], 3 + i);
    }
  }
}

TEST(Limits, ATextWithoutEndIsRefusedByItsPlace) {
  const std::string endless =
      "(echo 1; echo; while :; do printf 'x%.0s" + std::string(R"(\n' 1 2 3 4 5 6 7 8; done) )") + "| ";
  const std::string line = "(echo 1; while :; do printf '[1,22222222222222222222222222222222222'; done) | ";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {endless + "exec \"$0\" \"$@\" --split-by blank", "stdin:3: too long (found at least 1"},
      {endless + "exec \"$0\" \"$@\"", "stdin: too long (found at least 1"},
      {line + "exec \"$0\" \"$@\" --split-by line", "stdin:2: too long (found at least 1"},
      {line + "exec \"$0\" \"$@\" --split-by jsonl --field x",
       "stdin:1: found number, expected a JSON object on a line"},
      {line + "exec \"$0\" \"$@\" --ids", "stdin:1: found a number, expected an array"},
  };
  for (const auto& [command, says] : cases) {
    const Words shell = {"/bin/sh", "-c", command};
    expect_refused(run(words(shell, ppl_on_tiny({"--max-text-mb", "1", "-q", "-"}))), 3,
                   {says, says.find("too long") != std::string::npos ? "expected at most 1048576)" : ""}, command);
  }
}

TEST(Limits, CompressedInputsAreRefusedByTheirFirstBytes) {
  using namespace std::string_literals;
  const std::vector<std::pair<std::string, std::string>> kinds = {
      {"\x1f\x8b\x08\0\0\0\0\0\0\3"s, "gzip (expected text). Try: zcat "},
      {"\x28\xb5\x2f\xfd\x24\x06\x31\0\0a"s, "zstd (expected text). Try: zstdcat "},
      {"\xfd"
       "7zXZ\0\0\4\xe6\xd6"s,
       "xz (expected text). Try: xzcat "},
      {"BZh91AY&SY\x9d"s, "bzip2 (expected text). Try: bzcat "},
      {"\x04\x22\x4d\x18\x64\x40\xa7"s, "lz4 (expected text). Try: lz4cat "},
      {"PK\x03\x04\x14\0"s, "zip (expected text). Try: funzip "},
  };
  const TempFolder folder;
  for (const auto& [bytes, says] : kinds) {
    write_file(folder / "file", bytes);
    const std::string by_name = says + (folder / "file").string() + " | mmrec-";
    const std::string by_pipe = says.substr(0, says.find("Try: ") + 5) + "... | ";
    for (const Words& how : std::vector<Words>{{}, {"--split-by", "line"}, {"--split-by", "blank"}, {"--ids"}}) {
      expect_refused(ppl(words(how, {folder / "file"})), 3, {"file: is compressed with " + by_name}, says);
    }
    expect_refused(ppl({"-"}, bytes), 3, {"stdin: is compressed with " + by_pipe}, says);
    for (const Words& how : std::vector<Words>{{"-f"}, {"--lines", "-f"}, {"--jsonl"}}) {
      expect_refused(generate(words(how, {folder / "file"})), 3, {"is compressed with " + by_name}, says);
      expect_refused(generate(words(how, {"-"}), bytes), 3, {"is compressed with " + by_pipe}, says);
    }
  }
  // A byte at a time, as a slow pipe has them.
  const std::string slow =
      "(printf '\\037'; sleep 0.1; printf '\\213'; sleep 0.1; printf '\\010rest') | exec \"$0\" \"$@\"";
  expect_refused(run(words({"/bin/sh", "-c", slow}, ppl_on_tiny({"-"}))), 3, {"is compressed with gzip"});
  EXPECT_EQ(ppl({"-q", "-"}, "BZh is how such a file begins; PK, too").code, 0);
}

}  // namespace
}  // namespace mmrec::test
