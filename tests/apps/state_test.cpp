// States of mmrec-generate: a text that is interrupted, saved and gone on with is the uninterrupted one.
#include "apps/generate/prompt.h"
#include "tests/apps/programs.h"
#include "tests/engine/sessions.h"

namespace mmrec::test {
namespace {

class State : public testing::Test {
 protected:
  std::string file(std::string_view name) const { return (folder_ / name).string(); }
  TempFolder folder_;
};

const Words kWarm = {"--temp", "1.2", "--top-k", "0", "--repetition-penalty", "1.3", "--seed", "9"};

TEST_F(State, GoingOnIsTheUninterruptedText) {
  const Json whole = generate_json(words({"-p", "Alice was", "-n", "30"}, kWarm));
  const Json first = generate_json(words({"-p", "Alice was", "-n", "11", "--state-out", file("a")}, kWarm));
  // The state knows how its text was drawn; each part may be told otherwise.
  const Json second = generate_json({"--state-in", file("a"), "-n", "8", "--state-out", file("b")});
  const Json third = generate_json({"--state-in", file("b"), "-n", "11"});
  std::vector<int> tokens;
  for (const Json& part : {first, second, third}) {
    for (const Json& token : part["tokens"]) tokens.push_back(token.get<int>());
  }
  EXPECT_EQ(Json(tokens), whole["tokens"]);
  EXPECT_EQ(first["text"].get<std::string>() + second["text"].get<std::string>() + third["text"].get<std::string>(),
            whole["text"].get<std::string>());
  EXPECT_EQ(third["seed"], 9);
  EXPECT_EQ(second["state"]["began_at"], first["state"]["position"]);
  EXPECT_EQ(second["prompt_tokens"].size(), 0U);
  EXPECT_NE(generate_json({"--state-in", file("b"), "-n", "11", "--seed", "10"})["tokens"], third["tokens"]);
}

TEST_F(State, APromptGoesOnToo) {
  const Json whole = generate_json({"-p", "Alice was", "-n", "0", "--state-out", file("a"), "--seed", "1"});
  EXPECT_EQ(whole["state"]["position"], whole["prompt_tokens"].size());
  const Json json = generate_json({"--state-in", file("a"), "-p", "beginning", "-n", "5"});
  EXPECT_EQ(json["state"]["began_at"], whole["state"]["position"]);
  EXPECT_EQ(json["timings"]["prefill_tokens"], json["prompt_tokens"].size());
  // Every line is a continuation of the same beginning, whatever the others are.
  const Words as_lines = {"--state-in", file("a"), "--lines", "-n", "5", "--json"};
  const Outcome lines = generate(as_lines, "beginning\n\nbeginning\n");
  const std::vector<Json> results = jsonl_of(lines);
  ASSERT_EQ(results.size(), 3U);
  EXPECT_EQ(results[0]["tokens"], json["tokens"]);
  EXPECT_EQ(results[0]["prompt_tokens"], results[2]["prompt_tokens"]);
  EXPECT_EQ(results[1]["prompt_tokens"].size(), 0U);
}

TEST_F(State, StdinIsLeftAloneUnlessAskedFor) {
  generate_json({"-p", "Alice", "-n", "1", "--state-out", file("a")});
  const Json alone = generate_json({"--state-in", file("a"), "-n", "3"}, "was");
  EXPECT_EQ(alone["prompt_tokens"].size(), 0U);
  const Json asked = generate_json({"--state-in", file("a"), "-f", "-", "-n", "3"}, "was");
  EXPECT_GT(asked["prompt_tokens"].size(), 0U);
}

TEST_F(State, AnInterruptedTextIsSaved) {
  const Words endless = generate_on_tiny({"-p", "Alice was", "-n", "-1", "--temp", "0", "--state-out", file("a")});
  EXPECT_EQ(interrupted(endless, 200).code, 130);
  const Json json = generate_json({"--state-in", file("a"), "-n", "4"});
  const std::int64_t began = json["state"]["began_at"].get<std::int64_t>();
  const Json whole = generate_json({"-p", "Alice was", "--temp", "0", "-n", std::to_string(began + 4)});
  const auto drawn = static_cast<std::size_t>(began) - whole["prompt_tokens"].size();
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(json["tokens"][i], whole["tokens"][drawn + i]) << i;
}

TEST_F(State, ASavedStopIsSaidToGoBeyondTheText) {
  const Words greedy = {"-p", "Alice was", "-n", "40", "--temp", "0"};
  const std::string text = generate_json(greedy)["text"];
  const Outcome outcome = generate(words(greedy, {"--stop", ascii_of(text, 3), "--state-out", file("a")}));
  EXPECT_EQ(outcome.code, 0);
  expect_says(outcome.err, {"before the stop string"});
}

TEST_F(State, WhatIsNoStateIsRefusedByName) {
  generate_json({"-p", "Alice", "-n", "1", "--state-out", file("a")});
  std::string bytes = read_file(file("a"));
  EXPECT_EQ(mode_of(file("a")), 0600U);
  bytes[bytes.size() / 2] ^= 1;
  write_file(file("damaged"), bytes);
  write_file(file("short"), bytes.substr(0, bytes.size() / 2));
  write_file(file("text"), std::string(1000, 'x'));
  const auto refused = [&](const Words& more, int code, std::initializer_list<std::string_view> says) {
    expect_refused(generate(words(more, {"-n", "1"})), code, says);
  };
  refused({"--state-in", file("damaged")}, 3, {"damaged", "checksum"});
  refused({"--state-in", file("short")}, 3, {"short", "as its header says"});
  refused({"--state-in", file("text")}, 3, {"text", "not a state file"});
  refused({"--state-in", file("none")}, 3, {"none", "No such file"});
  refused({"--state-in", folder_.path().string()}, 3, {"a folder"});
  refused({"-p", "x", "--state-out", file("no/such")}, 5, {"no/such", "No such file"});
  refused({"-p", "x", "--state-out", folder_.path().string()}, 5, {"Is a directory"});
  const Outcome other = run({kGenerate, "--device", "cpu", "--state-in", file("a"), "-n", "1"});
  expect_refused(other, 3, {file("a"), "another"});
  EXPECT_EQ(files_in(folder_.path()), 4) << "nothing is left behind";
}

class Cache : public State {
 protected:
  Json cached(const Words& more) const {
    return generate_json(words({"--prefix-cache", file("cache"), "-n", "6", "--temp", "0"}, more));
  }
  std::ptrdiff_t states() const { return files_in(folder_ / "cache"); }
  static std::string many(int count, const std::string& end) {
    std::string text = "Alice was beginning to get very tired";
    for (int i = 0; i < count; ++i) text += " of sitting by her sister " + std::to_string(i * 7919);
    return text + end;
  }
};

TEST_F(Cache, ThePromptIsConsumedOnce) {
  const Json first = cached({"-p", "Alice was"});
  EXPECT_EQ(first["timings"]["cached_tokens"], 0);
  const Json second = cached({"-p", "Alice was"});
  EXPECT_EQ(second["timings"]["cached_tokens"], first["prompt_tokens"].size());
  EXPECT_EQ(second["timings"]["prefill_tokens"], 0);
  EXPECT_EQ(second["tokens"], first["tokens"]);
  EXPECT_EQ(states(), 1);
  const Outcome said = generate({"-p", "Alice was", "-n", "1", "--prefix-cache", file("cache")});
  expect_says(said.err, {"tokens from the prefix cache"});
  EXPECT_EQ(mode_of(file("cache")), 0700U);
}

TEST_F(Cache, WhatPromptsHaveInCommonIsFoundAtHalfOfItOrMore) {
  cached({"-p", many(100, " one")});
  const Json with = cached({"-p", many(100, " another")});
  const auto all = static_cast<std::int64_t>(with["prompt_tokens"].size());
  ASSERT_GT(all, 600);
  EXPECT_GE(with["timings"]["cached_tokens"].get<std::int64_t>(), all / 2 - 5);
  EXPECT_EQ(with["tokens"], generate_json({"-p", many(100, " another"), "-n", "6", "--temp", "0"})["tokens"]);
  EXPECT_EQ(cached({"-p", "was Alice"})["timings"]["cached_tokens"], 0) << "other tokens";
}

TEST_F(Cache, IsUsedOnlyByRunsThatComputeAlike) {
  const std::string prompt = many(40, "");
  const std::vector<Words> ways = {{"--prefill", "sweeps", "--sweep-tol", "1"},
                                   {"--prefill", "sweeps"},
                                   {"--prefill", "steps"},
                                   {"--precision", "bf16"},
                                   {}};
  for (const Words& way : ways) {
    const Json first = cached(words(way, {"-p", prompt}));
    EXPECT_EQ(first["timings"]["cached_tokens"], 0) << ::testing::PrintToString(way);
    const Json again = cached(words(way, {"-p", prompt, "--threads", "1"}));
    EXPECT_EQ(again["timings"]["cached_tokens"], first["prompt_tokens"].size()) << ::testing::PrintToString(way);
    EXPECT_EQ(again["tokens"], first["tokens"]) << ::testing::PrintToString(way);
  }
}

// What a file holds decides, not its name: as if the hashes of two prompts were one.
TEST_F(Cache, TwoPromptsOfOneNameDoNotShare) {
  const auto longest = [&] {
    std::pair<int, std::filesystem::path> most;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "cache")) {
      std::istringstream fields(entry.path().filename());
      std::string field;
      for (int i = 0; i < 5; ++i) std::getline(fields, field, '-');
      most = std::max(most, {std::stoi(field), entry.path()});
    }
    return most.second;
  };
  const Json other = cached({"-p", "x" + many(40, "")});
  const std::string state = read_file(longest());
  std::filesystem::remove_all(folder_ / "cache");
  const Json expected = cached({"-p", "y" + many(40, "")});
  ASSERT_EQ(other["prompt_tokens"].size(), expected["prompt_tokens"].size());
  ASSERT_GT(expected["prompt_tokens"].size(), 300U) << "more than a state's recent tokens";
  write_file(longest(), state);
  const Json found = cached({"-p", "y" + many(40, "")});
  EXPECT_LT(found["timings"]["cached_tokens"], expected["prompt_tokens"].size());
  EXPECT_EQ(found["tokens"], expected["tokens"]);
}

TEST_F(State, AStateThatWasComputedOtherwiseIsUsedAndSaid) {
  generate_json({"-p", "Alice was", "-n", "2", "--prefill", "steps", "--state-out", file("a")});
  const auto warning = [&](const Words& more) {
    return generate(words(more, {"--state-in", file("a"), "-p", " not", "-n", "1", "-q"})).err;
  };
  EXPECT_EQ(warning({"--prefill", "steps", "--threads", "1"}), "");
  const std::string said = warning({"--prefill", "sweeps", "--sweep-tol", "0.5", "--state-out", file("a")});
  expect_says(said, {"computed with prefill=steps", "this run: prefill=sweeps; sweep-tol=0.5"});
  EXPECT_NE(warning({"--prefill", "steps"}).find("settings that changed on the way"), std::string::npos);
}

TEST_F(Cache, WhatIsDamagedIsRemovedAndPassedOver) {
  const Json first = cached({"-p", "Alice was"});
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "cache")) {
    std::string bytes = read_file(entry.path());
    bytes[bytes.size() / 2] ^= 4;
    write_file(entry.path(), bytes);
  }
  const Outcome outcome =
      generate({"--prefix-cache", file("cache"), "-n", "6", "--temp", "0", "-p", "Alice was", "--json"});
  EXPECT_EQ(outcome.code, 0);
  expect_says(outcome.err, {"not used, and removed"});
  EXPECT_EQ(Json::parse(outcome.out)["tokens"], first["tokens"]);
  EXPECT_GT(cached({"-p", "Alice was"})["timings"]["cached_tokens"], 0) << "it was made anew";
}

TEST_F(Cache, TheOldestGoWhereThereIsNoRoomAndNothingElseDoes) {
  cached({"-p", "Alice was"});
  const auto first = *std::filesystem::directory_iterator(folder_ / "cache");
  // Of another model, and older.
  std::string name = first.path().filename();
  name[3] = name[3] == '0' ? '1' : '0';
  write_file(folder_ / "cache" / name, std::string(2 << 20, 'x'));
  std::filesystem::last_write_time(folder_ / "cache" / name, first.last_write_time() - std::chrono::hours(1));
  const std::string left = ".mmrec-0123456789abcdef";  // by a writer that was killed
  write_file(folder_ / "cache" / left, std::string(2 << 20, 'x'));
  std::filesystem::last_write_time(folder_ / "cache" / left, first.last_write_time() - std::chrono::hours(3));
  const std::vector<std::string> others = {"mine.state", "a-b-c-d-5-e.prefix", "notes.prefix", name + ".my_notes",
                                           ".mmrec-notes"};
  for (const std::string& other : others) {
    write_file(folder_ / "cache" / other, std::string(2 << 20, 'x'));
    std::filesystem::last_write_time(folder_ / "cache" / other, first.last_write_time() - std::chrono::hours(2));
  }
  cached({"-p", "was Alice", "--prefix-cache-mb", "1"});
  EXPECT_FALSE(std::filesystem::exists(folder_ / "cache" / name));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "cache" / left));
  EXPECT_TRUE(std::filesystem::exists(first.path()));
  for (const std::string& other : others) EXPECT_TRUE(std::filesystem::exists(folder_ / "cache" / other)) << other;
  EXPECT_EQ(states(), 7);
}

TEST_F(Cache, WhatCannotBeIsSaid) {
  write_file(file("file"), "x");
  expect_refused(generate({"-p", "x", "--prefix-cache", file("file")}), 5, {"not a folder"});
  expect_refused(generate({"-p", "x", "--prefix-cache", file("no/such")}), 5, {"cannot make the folder"});
}

// A CPU's model that says it were batch-invariant: where prompts are cut, and which states are taken.
TEST_F(State, ThePrefixCacheOfABatchInvariantModelCutsAtEndsOfSegments) {
  const Model model = on_cpu(kTiny);
  const Tokenizer tokenizer = Tokenizer::load(kTiny);
  ModelInfo info = model.info();
  apps::GenerateCommand command;
  command.prefix_cache = file("cache");
  using Points = std::vector<std::int64_t>;
  const auto points = [&](std::int64_t from, std::int64_t size) {
    return apps::PrefixCache(command, info, tokenizer).checkpoints(from, size);
  };
  EXPECT_EQ(points(0, 2000), (Points{256, 512, 1024, 2000}));
  info.batch_invariant = true;
  info.memory_segment = 250;
  EXPECT_EQ(points(0, 2000), (Points{500, 750, 1250, 2000}));
  EXPECT_EQ(points(750, 1250), (Points{1250}));
  info.memory_segment = 0;
  EXPECT_EQ(points(0, 9000), (Points{4096, 8192, 9000}));

  info.memory_segment = 10;
  apps::PrefixCache cache(command, info, tokenizer);
  const std::vector<int> ids = random_tokens(model, 35, 1);
  for (const std::size_t count : {20, 23}) {
    const auto beginning = std::span(ids).first(count);
    cache.store(begun(model, beginning), beginning);
  }
  Session session = model.new_session();
  EXPECT_EQ(cache.restore(session, ids), 20);
  EXPECT_EQ(cache.restore(session, std::span(ids).first(23)), 23) << "a whole prompt";
  EXPECT_EQ(session.position(), 23);
}

}  // namespace
}  // namespace mmrec::test
