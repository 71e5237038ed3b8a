// What mmrec-ppl takes for a document: files, lines, paragraphs, fields of JSON lines.
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

/// Names, bytes and negative log-likelihoods of the documents of `input`.
std::vector<std::tuple<std::string, int, double>> documents(const Words& more, const std::string& input) {
  std::vector<std::tuple<std::string, int, double>> found;
  for (const Json& line : jsonl_of(ppl(words({"--format", "jsonl"}, more), input))) {
    found.emplace_back(line["name"], line["bytes"], line["nll"]);
  }
  return found;
}

double nll_of(const std::string& text) { return ppl_json({"-"}, text)["nll"]; }

TEST(Corpus, IsSplitByLinesOrBlankLines) {
  const std::string input = "\n one\r\ntwo words\n \t\n\nthree\nfour";
  using Found = std::vector<std::tuple<std::string, int, double>>;
  EXPECT_EQ(documents({"--split-by", "line", "-"}, input), (Found{{"stdin:2", 4, nll_of(" one")},
                                                                  {"stdin:3", 9, nll_of("two words")},
                                                                  {"stdin:6", 5, nll_of("three")},
                                                                  {"stdin:7", 4, nll_of("four")}}));
  EXPECT_EQ(documents({"--split-by", "blank", "-"}, input),
            (Found{{"stdin:2", 14, nll_of(" one\ntwo words")}, {"stdin:6", 10, nll_of("three\nfour")}}));
  EXPECT_EQ(documents({"-"}, input), (Found{{"stdin", static_cast<int>(input.size()), nll_of(input)}}));
  EXPECT_TRUE(documents({"--split-by", "blank", "-"}, "\n\n \n").empty());
}

TEST(Corpus, TakesAFieldOfJsonLines) {
  const std::string input =
      "{\"text\": \"caf\\u00e9 \\\"x\\\"\\n\", \"n\": [1, {\"text\": 2}]}\n\n{\"title\":\"other\",\"text\":\"two\"}";
  using Found = std::vector<std::tuple<std::string, int, double>>;
  const Found expected = {{"stdin:1", 10, nll_of("caf\xc3\xa9 \"x\"\n")}, {"stdin:3", 3, nll_of("two")}};
  EXPECT_EQ(documents({"--split-by", "jsonl", "-"}, input), expected);
  EXPECT_EQ(std::get<2>(documents({"--split-by", "jsonl", "--field", "title", "-"}, "{\"title\":\"two\"}")[0]),
            nll_of("two"));
  const TempFolder folder;
  write_file(folder / "a.jsonl", input);
  write_file(folder / "b.txt", "two");
  const auto mixed = documents({folder / "a.jsonl", folder / "b.txt"}, "");
  ASSERT_EQ(mixed.size(), 3U) << "the name says what it is";
  EXPECT_EQ(std::get<2>(mixed[0]), std::get<2>(expected[0]));
  EXPECT_EQ(std::get<2>(mixed[2]), nll_of("two"));
  EXPECT_EQ(documents({"--split-by", "line", folder / "a.jsonl"}, "").size(), 2U) << "unless told otherwise";
}

TEST(Corpus, MalformedLinesAreRefusedByTheirNumber) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{\"text\":\"a\"}\n{\"text\":3}\n", "stdin:2: field 'text' (found number, expected a string)"},
      {"{\"body\":\"a\"}\n", "stdin:1: no field 'text' (found 'body', expected 'text')"},
      {"{}\n", "stdin:1: no field 'text' (found no field"},
      {"[\"text\"]\n", "stdin:1: found array, expected a JSON object"},
      {"\n{\"text\":\"a\"\n",
       "stdin:2: text: invalid JSON: syntax error while parsing object - unexpected end of input"},
      {"{\"text\":\"a\"} x\n", "stdin:1: invalid JSON: syntax error while parsing value - invalid literal in"},
      {"{\"text\":\"\xff\"}\n", "stdin:1: text: invalid JSON"},
      {"plain text\n", "stdin:1: invalid JSON: syntax error"},
      {std::string(100'000, '[') + "\n", "stdin:1: nested too deeply (limit 64)"},
      // What follows a NUL is not dropped.
      {std::string("{\"text\": \"Alice\"}\0 was\n", 23), "stdin:1: NUL byte in JSON text (at byte 17)"},
  };
  for (const auto& [input, says] : cases) {
    expect_refused(ppl({"--split-by", "jsonl", "-"}, input), 3, {"mmrec-ppl: " + says}, input.substr(0, 40));
  }
}

TEST(Corpus, ALongTextInPartsIsScoredAsIfItWereWhole) {
  // A window that has room for all of a document takes it whole. Parts begin at 1 MiB and pieces at 260,000 tokens, so
  // most of the text is a word that is one token.
  const TempFolder folder;
  std::mt19937 rng(4);
  const std::vector<std::string> pieces = {" river",
                                           "\n",
                                           " \xC3\xBC"
                                           "ber",
                                           "  7",
                                           "\xF0\x9F\x9A\x80",
                                           " mill,",
                                           "\xFF"};
  std::string text;
  while (text.size() < 1'200'000) text += rng() % 4 == 0 ? pieces[rng() % pieces.size()] : "very very";
  write_file(folder / "long", text);
  write_file(folder / "short", "two words");
  const Words files = {folder / "short", folder / "long", folder / "short"};
  const Words output = {"--per-token", "--format", "csv"};
  const Outcome parts = ppl(words(output, files), "");
  const Outcome whole = ppl(words(words({"--mode", "rolling", "--window", "10000000"}, output), files), "");
  EXPECT_EQ(parts.code, 0) << parts.err;
  EXPECT_GT(std::count(parts.out.begin(), parts.out.end(), '\n'), 300'000);
  EXPECT_TRUE(parts.out == whole.out);
  EXPECT_NE(parts.err.find("UTF-8"), std::string::npos) << parts.err;
}

TEST(Corpus, OneRuleForWhatHasNoTokensToScore) {
  // Blank lines are no documents; what has no token to score is counted and left out; neither is an error.
  const std::vector<std::pair<Words, std::string>> inputs = {
      {{"--ids"}, "[1,2,3]\n\n \n[]\n[7]\n"},
      {{"--split-by", "jsonl"}, "{\"text\":\"one\"}\n\n\r\n{\"text\":\"\"}\n{\"text\":\"\"}\n"}};
  for (const auto& [arguments, input] : inputs) {
    for (const Words& mode : {Words{}, Words{"--mode", "rolling", "--window", "2"}}) {
      const Words line = words(words(arguments, mode), {"--format", "json", "-"});
      const Outcome outcome = ppl(line, input);
      const Json json = json_of(outcome);
      EXPECT_EQ(json["docs"], 3);
      EXPECT_EQ(json["empty_docs"], 2);
      expect_same(json, json_of(ppl(line, input.substr(0, input.find('\n')))),
                  {"tokens", "nll", "ppl", "bytes", "words"});
      expect_says(outcome.err, {"stdin:4: 0 scored tokens"});
    }
  }
  const TempFolder folder;
  write_file(folder / "empty.txt", "");
  expect_says(ppl({folder / "empty.txt", "-"}, "one").err, {"empty.txt: 0 scored tokens"});
}

TEST(Corpus, CsvIsQuoted) {
  const TempFolder folder;
  const std::string name = folder / "a \"b\", c.txt";
  write_file(name, "one two");
  const Outcome outcome = ppl({"--format", "csv", name});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out.find("doc,name,hash,tokens,nll,nll_m2,ppl,bytes,words,mode,bos,prefill_mode,sweep_tol,max_"
                             "sweeps,precision,model,tokenizer,version,device\n0,\""),
            0U)
      << outcome.out;
  expect_says(outcome.out, {"/a \"\"b\"\", c.txt\","});
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 2);
  const std::string tokens = ppl({"--format", "csv", "--per-token", name}).out;
  EXPECT_EQ(tokens.find("doc,pos,id,logprob\n0,1,"), 0U) << tokens;
}

}  // namespace
}  // namespace mmrec::test
