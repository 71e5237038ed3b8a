// mmrec-ppl against reference log-probs, and its measures against a computation of their own.
#include "tests/apps/programs.h"
#include "tests/support/safetensors_reader.h"

namespace mmrec::test {
namespace {

const std::string kText =
    "Alice was beginning to get very tired of sitting by her sister on the bank,\nand of having nothing to do.\n";

class Upstream : public testing::TestWithParam<const char*> {};

TEST_P(Upstream, LogProbsMatchTheReference) {
  const std::string folder = kUpstream + "/" + GetParam();
  const SafetensorsReader reference(folder + "/reference.safetensors");
  const ReferenceTensor& ids = reference.at("input_ids");
  const ReferenceTensor& expected = reference.at("logprobs");
  const std::string input = id_lines(ids);
  for (const Words& options : {Words{"--prefill", "auto"}, Words{"--prefill", "sweeps"}, Words{"--prefill", "steps"},
                               Words{"--prefill", "sweeps", "--batch", "2"}}) {
    const auto lines = jsonl_of(
        run(words({kPpl, "--device", "cpu", "-m", folder, "--ids", "--format", "jsonl", "--per-token", "-"}, options),
            input));
    ASSERT_EQ(lines.size(), expected.values.size()) << joined(options);
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const auto doc = lines[i]["doc"].get<std::int64_t>();
      const auto pos = lines[i]["pos"].get<std::int64_t>();
      ASSERT_EQ(doc * expected.dim(1) + pos - 1, static_cast<std::int64_t>(i));
      EXPECT_EQ(lines[i]["id"], ids.integers[static_cast<std::size_t>(doc * ids.dim(1) + pos)]);
      EXPECT_NEAR(lines[i]["logprob"].get<double>(), static_cast<double>(expected.values[i]), 2e-5)
          << joined(options) << " entry " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Upstream, testing::Values("mdi", "dpg", "hem", "segments"));

TEST(Ppl, SummaryFollowsItsDefinitions) {
  const TempFolder folder;
  write_file(folder / "a.txt", kText);
  write_file(folder / "b.txt", " A second,  shorter text; caf\xc3\xa9 ");
  const Words files = {folder / "a.txt", folder / "b.txt"};
  const Json json = ppl_json(files);
  const auto lines = jsonl_of(ppl(words({"--per-token"}, files)));

  double nll = 0.0;
  std::vector<double> each;
  for (const Json& line : lines) each.push_back(-line["logprob"].get<double>());
  for (const double x : each) nll += x;
  const double tokens = static_cast<double>(each.size());
  double square = 0.0;
  for (const double x : each) square += (x - nll / tokens) * (x - nll / tokens);
  const double ppl = std::exp(nll / tokens);
  const double bytes = 105 + 32;
  const double words = 22 + 7;  // of re.split: one field more than there are runs of white space

  EXPECT_EQ(json["schema"], "mmrec-ppl/1");
  EXPECT_EQ(json["docs"], 2);
  EXPECT_EQ(json["tokens"], each.size());
  EXPECT_EQ(json["bytes"], bytes);
  EXPECT_EQ(json["words"], words);
  EXPECT_NEAR(json["nll"].get<double>(), nll, 1e-6 * nll);
  EXPECT_NEAR(json["ppl"].get<double>(), ppl, 1e-6 * ppl);
  EXPECT_NEAR(json["ppl_stderr"].get<double>(), ppl * std::sqrt(square / (tokens - 1.0) / tokens), 1e-5 * ppl);
  EXPECT_NEAR(json["bits_per_byte"].get<double>(), nll / bytes / std::log(2.0), 1e-6);
  EXPECT_NEAR(json["word_ppl"].get<double>() / std::exp(nll / words), 1.0, 1e-6);
  EXPECT_NEAR(json["byte_ppl"].get<double>(), std::exp(nll / bytes), 1e-5);
  EXPECT_EQ(json["bos"], "added");
  EXPECT_EQ(json["tokenizer_fingerprint"].get<std::string>().size(), 16U);
}

TEST(Ppl, FormatsAgree) {
  const Json json = ppl_json({"--per-token", "-"}, kText);
  const auto lines = jsonl_of(ppl({"--format", "jsonl", "--per-token", "-"}, kText));
  const Json& document = json["documents"][0];
  ASSERT_EQ(document["logprobs"].size(), lines.size());
  ASSERT_EQ(document["ids"].size(), lines.size() + 1);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(document["logprobs"][i], lines[i]["logprob"]);
    EXPECT_EQ(document["ids"][i + 1], lines[i]["id"]);
  }
  const auto documents = jsonl_of(ppl({"--format", "jsonl", "-"}, kText));
  ASSERT_EQ(documents.size(), 1U);
  EXPECT_EQ(documents[0]["nll"], json["nll"]);
  EXPECT_EQ(documents[0]["name"], "stdin");
  const Outcome text = ppl({"-"}, kText);
  EXPECT_EQ(text.code, 0);
  EXPECT_NE(text.out.find("tokens         " + std::to_string(lines.size()) + "\n"), std::string::npos) << text.out;
}

TEST(Ppl, TextAndItsIdsScoreAlike) {
  const Json text = ppl_json({"--per-token", "-"}, kText);
  const Json ids = ppl_json({"--ids", "-"}, text["documents"][0]["ids"].dump() + "\n");
  EXPECT_EQ(text["nll"], ids["nll"]);
  EXPECT_EQ(text["ppl"], ids["ppl"]);
  EXPECT_EQ(ids["bos"], "given");
  for (const char* key : {"bytes", "words", "bits_per_byte", "word_ppl", "byte_ppl", "tokenizer_fingerprint"}) {
    EXPECT_TRUE(ids[key].is_null()) << key;
  }
}

TEST(Ppl, BatchAndThreadsChangeNothing) {
  std::string input;
  for (int document = 0; document < 7; ++document) {
    std::vector<int> ids;
    for (int i = 0; i < 20 + 13 * document; ++i) ids.push_back((i * 37 + document * 101) % 384);
    input += Json(ids).dump() + "\n";
  }
  const auto alone = jsonl_of(ppl({"--ids", "--per-token", "-"}, input));
  for (const Words& options : {Words{"--batch", "2"}, Words{"--batch", "7"}, Words{"--batch", "100"},
                               Words{"--threads", "1"}, Words{"--threads", "3", "--batch", "3"}}) {
    EXPECT_EQ(jsonl_of(ppl(words({"--ids", "--per-token", "-"}, options), input)), alone) << joined(options);
  }
}

TEST(Ppl, MalformedIdsAreRefusedByLineAndPlace) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[1,2]\n[1,384]\n", "stdin:2: index 1: no token id of this model (found 384, expected 0 to 383)"},
      {"[1,-1]\n", "stdin:1: index 1"},
      {"[1.0]\n", "found \"1.0\", expected an integer (at byte 1)"},
      {"1,2\n", "invalid JSON"},
      {"5\n", "found a number, expected an array"},
      {"[1,3]\n\n[x]\n", "stdin:3"},
      {"[1] x\n", "expected end of input"},
      {"[[1]]\n", "found an array"},
      {"{\"a\":1}\n", "found an object, expected an array"},
      {std::string("[1,2]\0[3]\n", 10), "NUL byte"},
  };
  for (const auto& [input, says] : cases) {
    expect_refused(ppl({"--ids", "-"}, input), 3, {"mmrec-ppl: stdin:", says}, input);
  }
}

TEST(Ppl, IdsNeedNoTokenizer) {
  EXPECT_EQ(run({kPpl, "--device", "cpu", "-m", kUpstream + "/mdi", "--ids", "-"}, "[1, 2, 3]\r\n[ 4 ,5 ]").code, 0);
}

// More documents than are read ahead, with one to score here and there.
std::string many_lines(int count) {
  std::string lines;
  for (int i = 0; i < count; ++i) lines += i % 1000 == 999 ? "[1,2," + std::to_string(i % 384) + "]\n" : "[5]\n";
  return lines;
}

TEST(Ppl, ACorpusIsScoredInItsOrderWhateverIsReadAhead) {
  const TempFolder folder;
  constexpr int kLines = 40'000;
  write_file(folder / "one.jsonl", many_lines(kLines));
  write_file(folder / "two.jsonl", "[7,8]\n[9]");
  const auto lines = jsonl_of(ppl({"--ids", "--format", "jsonl", folder / "one.jsonl", folder / "two.jsonl"}));
  ASSERT_EQ(lines.size(), kLines + 2U);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string name = folder / (i < kLines ? "one.jsonl" : "two.jsonl");
    ASSERT_EQ(lines[i]["name"], name + ":" + std::to_string(1 + i % kLines));
    ASSERT_EQ(lines[i]["doc"], i);
    ASSERT_EQ(lines[i]["tokens"], i < kLines ? (i % 1000 == 999 ? 2 : 0) : kLines + 1 - i);
  }
}

TEST(Ppl, MemoryDoesNotGrowWithTheCorpus) {
  SKIP_UNDER_SANITIZERS("a sanitizer keeps memory that was freed");
  const TempFolder folder;
  const auto peak_of = [&](const Words& how, const std::string& text, int documents) {
    write_file(folder / "corpus", text);
    const Json json = ppl_json(words(how, {"--threads", "1", folder / "corpus"}));
    EXPECT_EQ(json["docs"], documents);
    return json["timings"]["peak_memory_bytes"].get<double>();
  };
  // All at once these would take 200 bytes and more each.
  EXPECT_LT(peak_of({"--ids"}, many_lines(640'000), 640'000), peak_of({"--ids"}, many_lines(40'000), 40'000) + 8e6);
  // Blank but for one line in a thousand, so that reading is what takes the time: 30 MB.
  const auto mostly_blank = [](int lines) {
    std::string text;
    for (int i = 0; i < lines; ++i) text += i % 1000 == 0 ? "a few words\n" : std::string(99, ' ') + "\n";
    return text;
  };
  const Words by_line = {"--split-by", "line"};
  EXPECT_LT(peak_of(by_line, mostly_blank(300'000), 300), peak_of(by_line, mostly_blank(1'000), 1) + 8e6);
}

TEST(Ppl, WhatComesBeforeAMalformedLineIsScored) {
  const std::string good = many_lines(20'000);
  const Outcome outcome = ppl({"--ids", "--format", "jsonl", "-"}, good + "[1,2]\n[384]\n");
  EXPECT_EQ(outcome.code, 3);
  expect_says(outcome.err, {"mmrec-ppl: stdin:20002: index 0"});
  std::string whole = ppl({"--ids", "--format", "jsonl", "-"}, good + "[1,2]\n").out;
  EXPECT_TRUE(outcome.out == whole.erase(whole.rfind(",\"last\":true"), 12));
}

TEST(Ppl, AFileThatIsNotThereIsFoundBeforeAnythingIsScored) {
  const TempFolder folder;
  write_file(folder / "good.txt", kText);
  for (const std::string& bad : Words{folder / "none.txt", folder.path()}) {
    expect_refused(ppl({"--format", "jsonl", folder / "good.txt", bad}), 1, {bad + ": cannot read"});
  }
}

TEST(Ppl, ProgressIsForTerminals) {
  std::string input;
  for (int i = 0; i < 40; ++i) input += "[" + std::string("7,") + "8,9,10]\n";
  const TempFolder folder;
  write_file(folder / "ids.jsonl", input);
  Command command = on_terminal(ppl_on_tiny({"--ids", "--format", "json", folder / "ids.jsonl"}));
  for (const int columns : {80, 20}) {
    command.terminal_columns = columns;
    const Outcome on_terminal = run(command);
    EXPECT_EQ(on_terminal.code, 0);
    expect_says(on_terminal.err, {"\r"});
    EXPECT_NE(on_terminal.err.find("\x1b[K"), std::string::npos) << "the bar wipes itself";
    // No redraw is wider than the terminal, so none scrolls.
    const std::size_t first = on_terminal.err.find('\r');
    const std::size_t end = on_terminal.err.find("\x1b[K");
    ASSERT_LT(first, end);
    EXPECT_LT(end - first - 1, static_cast<std::size_t>(columns));
  }
  command.terminal = false;
  const Outcome piped = run(command);
  EXPECT_EQ(piped.err.find('\r'), std::string::npos);
  EXPECT_EQ(std::count(piped.err.begin(), piped.err.end(), '\n'), 1) << piped.err;
}

}  // namespace
}  // namespace mmrec::test
