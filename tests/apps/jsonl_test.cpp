// mmrec-generate --jsonl: prompts with options of their own, on a tiny model of random weights.
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

Outcome jsonl(const Words& more, std::string input) {
  return generate(words({"--jsonl", "-"}, more), std::move(input));
}

TEST(Jsonl, EachLineIsWhatItsOptionsGiveAlone) {
  const std::vector<std::pair<std::string, Words>> lines = {
      {R"({"prompt":"Alice was","n":12,"seed":3,"id":"first"})", {"-p", "Alice was", "-n", "12", "-s", "3"}},
      {R"({"prompt":"The river","max_tokens":9,"temperature":0,"seed":0,"id":2})",
       {"-p", "The river", "-n", "9", "--temp", "0", "-s", "0"}},
      {R"({"prompt":"x","top_k":3,"top_p":0.5,"min_p":0.01,"repetition_penalty":1.5,"seed":18446744073709551615})",
       {"-p", "x", "-n", "7", "--top-k", "3", "--top-p", "0.5", "--min-p", "0.01", "--repetition-penalty", "1.5", "-s",
        "18446744073709551615"}},
      {R"({"prompt":"x","stop":["e","a"],"n":40,"seed":1,"id":null})",
       {"-p", "x", "--stop", "e", "--stop", "a", "-n", "40", "-s", "1"}},
      {R"({"prompt":"x","stop":"e","n":40,"seed":1,"id":{"of":[1]}})",
       {"-p", "x", "--stop", "e", "-n", "40", "-s", "1"}},
      {R"({"prompt":"","n":3,"seed":5,"logprobs":2})", {"-p", "", "-n", "3", "-s", "5", "--logprobs", "2"}},
  };
  std::string input;
  for (const auto& [line, options] : lines) input += line + "\r\n\n";
  const auto records = jsonl_of(jsonl({"--json", "-n", "7"}, input));
  ASSERT_EQ(records.size(), lines.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const Json alone = json_of(generate(words({"--json"}, lines[i].second)));
    expect_same(records[i], alone,
                {"text", "tokens", "logprobs", "finish_reason", "prompt_tokens", "seed", "top_logprobs"},
                lines[i].first);
    EXPECT_EQ(records[i]["line"], 2 * i + 1);
    const Json given = Json::parse(lines[i].first);
    EXPECT_EQ(records[i].contains("id"), given.contains("id"));
    EXPECT_EQ(records[i].value("id", Json()), given.value("id", Json()));
  }
}

TEST(Jsonl, AnIdComesBackAsItIsWritten) {
  const Words ids = {"100000000000000000001",
                     "100000000000000000002",
                     "-0",
                     "1.50",
                     "1e3",
                     "0.1000000000000000055",
                     "null",
                     R"("\u00e9 \"}, \\")",
                     R"({ "id" : [1, {"id": "x"}], "b":-0.0 })",
                     "[]",
                     "18446744073709551616"};
  std::string input;
  for (const std::string& id : ids) input += R"({"prompt":"x", "id" : )" + id + "}\n";
  input += "{\"\\u0069d\":-0 ,\"prompt\":\"x\"}\n{\"id\":-0,\"prompt\":5}\n{\"id\":1e400,\"prompt\":\"x\"}\n";
  const Outcome outcome = jsonl({"-n", "1"}, input);
  EXPECT_EQ(outcome.code, 3);
  Words begins;
  for (const std::string& id : ids) begins.push_back("{\"id\":" + id + ",\"line\":");
  begins.insert(begins.end(), {R"({"id":-0,"line":12,"seed":)", R"({"id":-0,"line":13,"error":"prompt:)",
                               R"({"line":14,"error":"id: invalid JSON: number overflow)"});
  const Words lines = lines_of(outcome.out);
  ASSERT_EQ(lines.size(), begins.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    EXPECT_TRUE(lines[i].starts_with(begins[i])) << lines[i];
    EXPECT_TRUE(i >= ids.size() || Json::parse(lines[i])["finish_reason"] == "length") << lines[i];
  }
}

TEST(Jsonl, WhatALineLeavesOutIsTheCommandLines) {
  const std::string input = "{\"prompt\":\"Alice was\"}\n{\"prompt\":\"Alice was\"}\n";
  const auto records = jsonl_of(jsonl({"-n", "9", "--temp", "1.5", "--num-samples", "2", "-s", "8", "--json"}, input));
  ASSERT_EQ(records.size(), 4U);
  std::set<std::uint64_t> seeds;
  for (const Json& record : records) {
    const auto seed = record["seed"].get<std::uint64_t>();
    seeds.insert(seed);
    const Json alone =
        json_of(generate({"-p", "Alice was", "-n", "9", "--temp", "1.5", "-s", std::to_string(seed), "--json"}));
    EXPECT_EQ(record["tokens"], alone["tokens"]);
  }
  EXPECT_EQ(seeds.size(), 4U);
  EXPECT_EQ(records[0]["sample"], 0);
  EXPECT_EQ(records[3]["sample"], 1);
  EXPECT_EQ(records[3]["line"], 2);
  EXPECT_EQ(jsonl_of(jsonl({"-n", "9", "--temp", "1.5", "--num-samples", "2", "-s", "8", "--json"}, input)), records);
  // Ids are a prompt too.
  const Json ids = records[0]["prompt_tokens"];
  const Json by_ids = {{"prompt", ids}, {"seed", records[0]["seed"]}, {"logprobs", true}};
  EXPECT_EQ(jsonl_of(jsonl({"-n", "9", "--temp", "1.5"}, by_ids.dump()))[0]["tokens"], records[0]["tokens"]);
}

TEST(Jsonl, ABadLineHasARecordAndTheRunGoesOn) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"not json", "invalid JSON: syntax error"},
      {"[\"x\"]", "found array, expected a JSON object"},
      {"{\"prompt\":\"x\"", "unexpected end of input"},
      {"{\"prompt\":\"\xff\"}", "prompt: invalid JSON"},
      {"{}", "no prompt"},
      {R"({"prompt":null})", "no prompt"},
      {R"({"prompt":5})", "prompt: not a valid value (found 5, expected a string, or an array of token ids"},
      {R"({"prompt":[]})", "prompt: not a valid value"},
      {R"({"prompt":[-1]})", "prompt: not a valid value"},
      {R"({"prompt":[1,99999999999999999999]})", "prompt: not a valid value"},
      {R"({"prompt":[1.5]})", "prompt: not a valid value"},
      {R"({"prompt":"x","sed":1})", "unknown key 'sed' (expected prompt, id, n, "},
      {R"({"prompt":"x","n":-2})", "n: not a valid value (found -2"},
      {R"({"prompt":"x","n":18446744073709551615})", "n: not a valid value"},
      {R"({"prompt":"x","n":1.0})", "n: not a valid value"},
      {R"({"prompt":"x","n":1,"max_tokens":1})", "n: not with max_tokens"},
      {R"({"prompt":"x","temperature":-1})", "temperature: not a valid value (found -1"},
      {R"({"prompt":"x","temperature":"hot"})", "temperature: not a valid value"},
      {R"({"prompt":"x","top_p":0})", "top_p: not a valid value"},
      {R"({"prompt":"x","top_k":-1})", "top_k: not a valid value"},
      {R"({"prompt":"x","seed":-1})", "seed: not a valid value"},
      {R"({"prompt":"x","seed":18446744073709551616})", "seed: not a valid value"},
      {R"({"prompt":"x","stop":""})", "stop: not a valid value"},
      {R"({"prompt":"x","stop":[1]})", "stop: not a valid value"},
      {R"({"prompt":"x","logprobs":-1})", "logprobs: not a valid value"},
      {R"({"prompt":"x","logprobs":100000})", "logprobs: not a valid value"},
      {R"({"prompt":"x","num_samples":0})", "num_samples: not a valid value"},
      {R"({"prompt":"x","temperature":1e999})", ""},
      {R"({"prompt":"x","n":1,"n":2})", "duplicate key \"n\""},
      {"\xEF\xBB\xBF{\"prompt\":\"x\"}", "begins with a byte order mark"},
      {std::string(200'000, '['), "nested too deeply (limit 64)"},
      {R"({"prompt":"x","id":)" + std::string(100'000, '[') + std::string(100'000, ']') + "}", "nested too deeply"},
  };
  std::string input;
  for (const auto& [line, says] : bad) input += line + "\n" + R"({"id":"good","prompt":"Alice","n":2,"seed":1})" + "\n";
  const Outcome outcome = jsonl({}, input);
  const auto records = jsonl_of(outcome, 3);
  ASSERT_EQ(records.size(), 2 * bad.size());
  for (std::size_t i = 0; i < bad.size(); ++i) {
    EXPECT_EQ(records[2 * i]["line"], 2 * i + 1);
    EXPECT_NE(records[2 * i].value("error", "").find(bad[i].second), std::string::npos) << records[2 * i];
    EXPECT_FALSE(records[2 * i].contains("text"));
    EXPECT_EQ(records[2 * i + 1]["text"], records[1]["text"]) << "the good one behind it";
  }
  expect_says(outcome.err, {"32 of 64 lines refused, stdin:1: invalid JSON"});
  const Outcome named = jsonl({}, R"({"id":[7],"prompt":"x","top_k":"all"})");
  EXPECT_EQ(jsonl_of(named, 3)[0]["id"], Json::array({7})) << "an error says whose it is";
}

TEST(Jsonl, RecordsComeInOrderOrAsTheyAreReady) {
  std::string input;
  for (int i = 0; i < 500; ++i) {
    input += Json({{"id", i}, {"prompt", "Alice"}, {"n", i % 17}, {"seed", i}}).dump() + "\n";
  }
  const auto ordered = jsonl_of(jsonl({}, input));
  ASSERT_EQ(ordered.size(), 500U);
  for (std::size_t i = 0; i < 500; ++i) EXPECT_EQ(ordered[i]["id"], i);
  const auto ready = jsonl_of(jsonl({"--as-completed"}, input));
  ASSERT_EQ(ready.size(), 500U);
  std::map<int, Json> by_id;
  bool is_ordered = true;
  for (std::size_t i = 0; i < 500; ++i) {
    is_ordered = is_ordered && ready[i]["id"] == i;
    by_id[ready[i]["id"].get<int>()] = ready[i];
  }
  EXPECT_FALSE(is_ordered);
  for (std::size_t i = 0; i < 500; ++i) EXPECT_EQ(by_id[static_cast<int>(i)], ordered[i]);
}

double peak_megabytes(const Outcome& outcome) {
  const std::size_t at = outcome.err.find("| peak ");
  return at == std::string::npos ? -1.0 : std::stod(outcome.err.substr(at + 7));
}

TEST(Jsonl, MemoryDoesNotGrowWithTheNumberOfLines) {
  SKIP_UNDER_SANITIZERS("a sanitizer keeps memory that was freed");
  const std::string line =
      Json({{"prompt", "Alice was beginning to get very tired"}, {"n", 1}, {"seed", 1}, {"logprobs", 20}}).dump() +
      "\n";
  const double small = peak_megabytes(jsonl({}, repeated(line, 300 * line.size())));
  const Outcome outcome = jsonl({}, repeated(line, 6000 * line.size()));
  EXPECT_GT(small, 0.0);
  EXPECT_LT(peak_megabytes(outcome), small + 6.0) << outcome.out.size() << " bytes came out";
}

TEST(Jsonl, AnInterruptLeavesWholeRecords) {
  const TempFolder folder;
  const std::string endless = "{\"prompt\":\"Alice was\",\"n\":-1,\"temperature\":0}\n";
  write_file(folder / "in.jsonl", "{\"prompt\":\"Alice was\",\"n\":1}\n" + repeated(endless, 100 * endless.size()));
  const Outcome outcome = interrupted(generate_on_tiny({"--jsonl", folder / "in.jsonl"}), 10);
  const auto records = jsonl_of(outcome, 130);
  ASSERT_GT(records.size(), 1U);
  EXPECT_EQ(records[0]["finish_reason"], "length");
  for (std::size_t i = 1; i < records.size(); ++i) EXPECT_EQ(records[i]["finish_reason"], "cancelled");
}

TEST(Jsonl, GoesOnFromAState) {
  const TempFolder folder;
  EXPECT_EQ(generate({"-p", "Alice was", "-n", "5", "-s", "1", "--state-out", folder / "state"}).code, 0);
  const Words from = {"--state-in", folder / "state", "-n", "6", "--json"};
  const auto records =
      jsonl_of(generate(words(from, {"--jsonl", "-"}), "{\"seed\":4}\n{\"seed\":4,\"prompt\":\" river\"}\n"));
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0]["tokens"], json_of(generate(words(from, {"-s", "4"})))["tokens"]);
  EXPECT_EQ(records[1]["tokens"], json_of(generate(words(from, {"-s", "4", "-p", " river"})))["tokens"]);
}

}  // namespace
}  // namespace mmrec::test
