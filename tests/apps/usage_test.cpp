// The command line: help that fits, numbers that are parsed whole, and a clear word for everything else.
#include "apps/common/arguments.h"
#include "mmrec/version.h"
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

/// The programs that users run.
Words all_programs() {
  Words found;
  for (const apps::Program* program : apps::programs()) {
    found.push_back(MMREC_PROGRAM_FOLDER "/" + std::string(program->name));
  }
  return found;
}

TEST(Help, FitsOneScreenAndBeginsWithExamples) {
  for (const std::string& program : all_programs()) {
    const std::string name = std::filesystem::path(program).filename();
    for (const char* option : {"-h", "--help"}) {
      const Outcome outcome = run({program, option});
      EXPECT_EQ(outcome.code, 0);
      EXPECT_EQ(outcome.err, "");
      EXPECT_EQ(outcome.out.rfind(name, 0), 0U) << "an example comes first";
      const Words lines = lines_of(outcome.out);
      for (const std::string& line : lines) EXPECT_LE(line.size(), 80U) << line;
      EXPECT_LE(lines.size(), 24U) << name;
    }
  }
}

TEST(Help, AllOfItBeginsLikeTheFirstPageAndNamesMore) {
  const std::vector<std::pair<std::string, Words>> programs = {
      {kPpl, {"--field", "--window", "--stride", "--per-doc", "--prefill", "--sweep-tol", "--quiet", "--verbose"}},
      {kGenerate, {"--escape", "--prefill", "--sweep-tol", "--prefix-cache-mb", "--n-predict", "--temperature"}}};
  for (const auto& [program, options] : programs) {
    const std::string first = run({program, "--help"}).out;
    const std::string all = run({program, "--help-all"}).out;
    EXPECT_EQ(all.substr(0, all.find("  -m")), first.substr(0, first.find("  -m")));
    for (const std::string& line : lines_of(all)) EXPECT_LE(line.size(), 80U) << line;
    for (const std::string& option : options) {
      EXPECT_EQ(first.find(option + " "), std::string::npos) << option;
      EXPECT_NE(all.find(option), std::string::npos) << option;
    }
  }
}

TEST(Help, ASubcommandHasThesePagesToo) {
  const std::string page = run({kPpl, "merge", "--help"}).out;
  EXPECT_EQ(page.rfind("mmrec-ppl merge", 0), 0U);
  EXPECT_EQ(run({kPpl, "merge", "--help-all"}).out, page) << "all of its options are common";
}

TEST(Help, VersionIsOneLine) {
  for (const std::string& program : all_programs()) {
    const Outcome outcome = run({program, "--version"});
    EXPECT_EQ(outcome.code, 0);
    const std::string name = std::filesystem::path(program).filename();
    EXPECT_EQ(outcome.out.rfind(name + " " + MMREC_VERSION + " (cpu", 0), 0U) << outcome.out;
    EXPECT_EQ(outcome.out.find('\n'), outcome.out.size() - 1);
  }
}

TEST(Usage, GenerateRefusesBadNumbers) {
  expect_wrong_usage({kGenerate, "-m", kTiny, "-p", "x"},
                     {
                         {{"--temp", "nan"}, "--temp"},
                         {{"--temp", "inf"}, "--temp"},
                         {{"--temp", "-1"}, "--temp"},
                         {{"--temp", "1e30"}, "--temp"},
                         {{"--top-k", "-1"}, "--top-k"},
                         {{"--top-k", "1.5"}, "--top-k"},
                         {{"--top-k", "4294967296"}, "--top-k"},
                         {{"--top-p", "0"}, "above 0"},
                         {{"--top-p", "1.01"}, "--top-p"},
                         {{"--min-p", "-0.1"}, "--min-p"},
                         {{"--min-p", "2"}, "--min-p"},
                         {{"--repetition-penalty", "0"}, "--repetition-penalty"},
                         {{"-n", "-2"}, "--tokens"},
                         {{"-n", "ten"}, "found 'ten'"},
                         {{"-n5x"}, "'5x'"},
                         {{"--seed", "-1"}, "--seed"},
                         {{"--seed", "18446744073709551616"}, "--seed"},
                         {{"--threads", "-1"}, "--threads"},
                         {{"--sweep-tol", "0"}, "--sweep-tol"},
                         {{"--prefill", "fast"}, "auto or sweeps or steps"},
                         {{"--device", "gpu"}, "found 'gpu', expected auto or cpu or cuda or cuda:N or cuda:all"},
                         {{"--device", "cuda:ALL"}, "'cuda:ALL'"},
                         {{"--device", "cuda:all,0"}, "'cuda:all,0'"},
                         {{"--device", "cuda:0,0"}, "'cuda:0,0'"},
                         {{"--device", "cpu:0"}, "'cpu:0'"},
                         {{"--device", "cpu:all"}, "'cpu:all'"},
                         {{"--device", "cuda:all", "--device", "cuda:0"}, "--device: given 2 times"},
                         {{"--precision", "fp8"}, "auto or fp32 or fp16 or bf16"},
                         {{"--device", "cpu", "--precision", "fp16"}, "--precision fp16: not with --device cpu"},
                     });
}

TEST(Usage, GenerateRefusesWhatItDoesNotKnow) {
  expect_wrong_usage({kGenerate}, {
                                      {{"-p", "x", "--colour"}, "colour"},
                                      {{"-p", "x", "stray"}, "unexpected argument 'stray'"},
                                      {{"-p", "x", "--", "--temp"}, "unexpected argument"},
                                      {{"-p"}, "argument"},
                                      {{"-p", "x", "-p", "y"}, "--prompt: given 2 times"},
                                      {{"-p", "x", "--seed", "1", "--seed", "1"}, "--seed: given 2 times"},
                                      {{"-p", "x", "-f", "y"}, "-p and -f"},
                                      {{"-p", "x", "--stop", ""}, "--stop"},
                                      {{"-p", "x", "--stop", "\xff"}, "--stop"},
                                      {{"-p", "x", "--json=no"}, "--json"},
                                      {{"-p", "x", "-m", ""}, "--model"},
                                      {{kTiny, "-m", kTiny, "-p", "x"}, "--model: not with a model folder beside it"},
                                      {{kTiny, kTiny, "-p", "x"}, "unexpected argument"},
                                      {{"Once upon a time"}, "a prompt goes after -p"},
                                      {{"-p", "x", "-q", "-v"}, "--quiet: not with --verbose"},
                                      {{"-p", "x", "-n", "1", "--n-predict", "2"}, "--tokens: given 2 times"},
                                      {{"-e", "-p", "a\\q"}, "--prompt: unknown escape (found '\\q'"},
                                      {{"-e", "-p", "a\\"}, "--prompt: unknown escape"},
                                      {{"-e", "-p", "x", "--stop", "\\x4"}, "--stop: unknown escape"},
                                  });
}

TEST(Usage, PplRefuses) {
  expect_wrong_usage(ppl_on_tiny({}), {
                                          {{}, "no documents"},
                                          {{"-", "-"}, "more than once"},
                                          {{"--format", "xml", "-"}, "text or json or jsonl or csv"},
                                          {{"--per-token", "--format", "text", "-"}, "--per-token"},
                                          {{"--batch", "0", "-"}, "--batch"},
                                          {{"--sweep-tol", "nan", "-"}, "--sweep-tol"},
                                          {{"--prefill", "", "-"}, "--prefill"},
                                          {{"-o", "a", "-o", "b", "-"}, "--output: given 2 times"},
                                          {{"--temp", "1", "-"}, "temp"},
                                          {{"-o", "", "-"}, "--output: not a valid value"},
                                          {{kTiny, "-"}, "--model: not with a model folder"},
                                      });
}

TEST(Usage, OptionsOfPplThatDoNotGoTogetherAreRefused) {
  expect_wrong_usage(
      ppl_on_tiny({"-"}),
      {
          {{"--ids", "--split-by", "line"}, "--ids: not with --split-by"},
          {{"--ids", "--field", "x"}, "--ids: not with --field"},
          {{"--field", "x"}, "--field: only with --split-by jsonl or a FILE.jsonl"},
          {{"--field", "x", "--split-by", "line", "a.jsonl"}, "--field: only with"},
          {{"--pairs", "--ids"}, "--pairs: not with --ids"},
          {{"--split-by", "word"}, "file or line or blank or jsonl"},
          {{"--mode", "rolling"}, "--mode rolling: needs --window N"},
          {{"--window", "5"}, "--window: not with --mode full"},
          {{"--mode", "llama", "--window", "3"}, "from 4"},
          {{"--mode", "llama", "--window", "8", "--stride", "2"}, "--stride: only with --mode strided"},
          {{"--mode", "strided", "--window", "8", "--stride", "9"}, "from 1 to 8"},
          {{"--per-doc", "--per-token"}, "--per-token: not with --per-doc"},
          {{"--per-doc", "--format", "text"}, "--per-doc: not with --format text"},
          {{"--save-logprobs", "x", "--mode", "rolling", "--window", "4"}, "--save-logprobs: not with --mode"},
          {{"--resume"}, "--resume: only with -o FILE"},
          {{"--resume", "-o", "x", "--format", "csv"}, "--resume: only with -o FILE"},
          {{"--resume", "-o", "x", "--per-token"}, "--resume: only with -o FILE"},
      });
}

TEST(Usage, OptionsOfGenerateThatDoNotGoTogetherAreRefused) {
  expect_wrong_usage(generate_on_tiny({}),
                     {
                         {{"--jsonl", "-", "-p", "x"}, "--jsonl: not with --prompt"},
                         {{"--jsonl", "-", "-f", "-"}, "--jsonl: not with --file"},
                         {{"--jsonl", "-", "--lines"}, "--jsonl: not with --lines"},
                         {{"--jsonl", "-", "--state-out", "x"}, "--state-out: not with --jsonl"},
                         {{"--lines", "--state-out", "x"}, "--state-out: not with --lines"},
                         {{"--lines", "--prefix-cache", "x"}, "--prefix-cache: not with --lines"},
                         {{"--lines", "-p", "x"}, "--lines: not with -p"},
                         {{"-p", "x", "--as-completed"}, "--as-completed: only with --jsonl or --lines"},
                         {{"-p", "x", "--slots", "5"}, "--slots: only with --jsonl, --lines or --num-samples"},
                         {{"--lines", "--slots", "0"}, "--slots"},
                         {{"-p", "x", "--prefix-cache-mb", "5"}, "--prefix-cache-mb: without --prefix-cache DIR"},
                         {{"-p", "x", "--num-samples", "0"}, "--num-samples"},
                         {{"-p", "x", "--num-samples", "2", "--state-out", "x"}, "--state-out: not with --num-samples"},
                         {{"-p", "x", "--logprobs", "3"}, "--logprobs: only in JSON"},
                         {{"-p", "x", "--logprobs", "-1", "--json"}, "--logprobs"},
                         {{"-i", "--json"}, "--interactive: not with --json"},
                         {{"-i", "--lines"}, "--interactive: not with --lines"},
                         {{"-i", "--jsonl", "-"}, "--interactive: not with --jsonl"},
                         {{"-i", "--num-samples", "2"}, "--interactive: not with --num-samples"},
                         {{"-i", "-f", "-"}, "--interactive: not with -f -"},
                         {{"-i", "-o", "x"}, "--interactive: not with --output"},
                     });
}

TEST(Usage, AnUnknownOptionNamesTheNearest) {
  const std::vector<std::pair<Words, std::string>> lines = {
      {{kPpl, "--fromat", "json", "-"}, "did you mean --format)"},
      {{kPpl, "--per-tokens", "-"}, "--per-token)"},
      {{kPpl, "--split=line", "-"}, "did you mean --split-by)"},
      {{kGenerate, "--promt=x"}, "did you mean --prompt)"},
      {{kGenerate, "--tempreature", "1"}, "did you mean --temperature)"},
      {{kBench, "--lenghts", "1"}, "did you mean --lengths)"}};
  for (const auto& [arguments, says] : lines) expect_refused(run(arguments), 2, {says}, joined(arguments));
  EXPECT_EQ(run({kPpl, "--zzz", "-"}).err.find("did you mean"), std::string::npos);
}

TEST(Usage, BenchRefuses) {
  expect_wrong_usage({kBench}, {
                                   {{"--lengths", "1,"}, "--lengths"},
                                   {{"--lengths", ",1"}, "--lengths"},
                                   {{"--lengths", "1;2"}, "--lengths"},
                                   {{"--lengths", "0"}, "--lengths"},
                                   {{"--batches", "a"}, "--batches"},
                                   {{"--synthetic", "64,1"}, "--synthetic"},
                                   {{"--synthetic", "63,1,9"}, "--synthetic"},
                                   {{"--synthetic", "64,1,9,9,9"}, "--synthetic"},
                                   {{"-m", kTiny, "--synthetic", "64,1,9"}, "found both"},
                                   {{"-m", kTiny, "--keep", "x"}, "--keep: only with --synthetic"},
                                   {{"--compare", "cuda"}, "--compare"},
                                   {{"--decode-batches", "0"}, "--decode-batches"},
                                   {{"--device", "cuda:all"}, "--device cuda:all: one device is measured"},
                                   {{"stray"}, "stray"},
                               });
}

TEST(Usage, ATerminalIsNeverReadFrom) {
  const Outcome outcome = run(on_terminal(generate_on_tiny({})));
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.out, "");
  expect_says(outcome.err, {"-p TEXT"});
}

TEST(Usage, ControlCharactersOfAnArgumentDoNotReachTheTerminal) {
  const Outcome outcome = run({kGenerate, "-p", "x", "--temp", "\x1b[2J\n1"});
  expect_refused(outcome, 2, {"\\x1b"});
  EXPECT_EQ(outcome.err.find('\x1b'), std::string::npos);
}

// The library's own parser backtracks once per character; a long value must neither crash it nor be cut.
TEST(Usage, LongValuesArrive) {
  const std::string prompt(100'000, 'a');
  const Json json = generate_json({"--prompt=" + prompt, "-n", "1", "--echo"});
  EXPECT_EQ(json["prompt"], prompt);
}

}  // namespace
}  // namespace mmrec::test
