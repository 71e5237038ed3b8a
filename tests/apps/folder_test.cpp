// Model folders that must be refused, each by its exit code and a line that names the fault; and what passes with a
// word.
#include "tests/apps/programs.h"
#include "tests/support/rank_file_builder.h"

namespace mmrec::test {
namespace {

// A copy of the tiny folder, for a test to damage.
class Folder : public testing::Test {
 protected:
  Folder() { std::filesystem::copy(kTiny, copy_.path(), std::filesystem::copy_options::recursive); }

  Json config() const { return Json::parse(read_file(copy_ / "config.json")); }
  void write_config(const Json& json) const { write_file(copy_ / "config.json", json.dump()); }
  Outcome generate(const Words& more = {"-n", "3"}) const {
    return run(words({kGenerate, "--device", "cpu", "-m", copy_.path(), "-p", "x"}, more));
  }
  Outcome ppl() const { return run({kPpl, "--device", "cpu", "-m", copy_.path(), "-"}, "some text"); }

  void expect_rejected(std::initializer_list<std::string_view> says) const {
    expect_refused(generate(), 3, says);
    expect_refused(ppl(), 3, says);
  }

  TempFolder copy_;
};

TEST_F(Folder, TheCopyRuns) { EXPECT_EQ(generate().code, 0); }

TEST_F(Folder, FilesThatAreDamagedOrMissing) {
  const std::string weights = read_file(copy_ / "model.safetensors");
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
  struct Damage {
    std::string file, bytes;
    std::string_view says = {};
  };
  for (const auto& [file, bytes, says] : std::vector<Damage>{{"tokenizer.model", "not a tokenizer"},
                                                             {"model.safetensors", weights.substr(0, 50'000)},
                                                             {"model.safetensors", ""},
                                                             {"model.safetensors", pointer, "LFS"}}) {
    const std::string good = read_file(copy_ / file);
    write_file(copy_ / file, bytes);
    expect_rejected({file, says});
    write_file(copy_ / file, good);
  }
  for (const char* file : {"tokenizer.model", "model.safetensors", "config.json"}) {
    std::filesystem::remove(copy_ / file);
    expect_rejected({file});
  }
  std::filesystem::remove_all(copy_.path());
  expect_rejected({"config.json", "Try: a folder that holds config.json"});
}

TEST_F(Folder, ConfigurationsOutOfRange) {
  for (const auto& [key, value] : std::vector<std::pair<std::string, Json>>{
           {"num_heads", 3}, {"vocab_size", -1}, {"model_dim", 0}, {"num_layers", "two"}, {"model_type", "other"}}) {
    Json json = config();
    json[key] = value;
    write_config(json);
    expect_rejected({"config.json", key});
    write_file(copy_ / "config.json", read_file(kTiny + "/config.json"));
  }
  write_file(copy_ / "config.json", "{");
  expect_rejected({"config.json"});
}

TEST_F(Folder, AnUnknownKeyIsReported) {
  Json json = config();
  json["colour"] = "red";
  write_config(json);
  const Outcome outcome = generate();
  EXPECT_EQ(outcome.code, 0);
  expect_says(outcome.err, {"mmrec-generate: warning: ", "colour"});
}

TEST_F(Folder, ARankFileInPlaceOfSentencepiece) {
  if (!MMREC_READS_RANK_FILES) GTEST_SKIP() << "built without PCRE2";
  std::filesystem::remove(copy_ / "tokenizer.model");
  write_file(copy_ / "tokenizer.tiktoken", rank_file(bytes_and({"he", "the"})));
  expect_rejected({"tokenizer_config.json", "\"pattern\""});
  write_file(copy_ / "tokenizer_config.json", R"({"pattern": "\\w+|\\W", "special_tokens": {"<|endoftext|>": 300}})");
  const Outcome outcome = generate();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  expect_says(outcome.err, {"tokenizer.tiktoken: 301 pieces for 384 embeddings"});
  EXPECT_EQ(ppl().code, 0);
  write_file(copy_ / "tokenizer_config.json", R"({"pattern": ".", "special_tokens": {"<|endoftext|>": 384}})");
  expect_rejected({"tokenizer.tiktoken", "found 385", "384"});
  write_file(copy_ / "tokenizer.model", "x");
  expect_rejected({"tokenizer.model and tokenizer.tiktoken"});
}

TEST_F(Folder, ATextThatCannotBeCutIsNamedAfterTheScoresOfThoseBeforeIt) {
  if (!MMREC_READS_RANK_FILES) GTEST_SKIP() << "built without PCRE2";
  std::filesystem::remove(copy_ / "tokenizer.model");
  write_file(copy_ / "tokenizer.tiktoken", rank_file(bytes_and({})));
  write_file(copy_ / "tokenizer_config.json", R"({"pattern": "(?:x+x+)+y|."})");
  const Words arguments = {kPpl, "-m", copy_.path(), "--split-by", "line", "--format", "csv", "--threads", "2", "-"};
  const std::string good = "one\ntwo\n";
  const Outcome outcome = run(arguments, good + std::string(60, 'x') + "\nthree\n");
  EXPECT_EQ(outcome.code, 1);
  expect_says(outcome.err, {"mmrec-ppl: stdin:3: the tokenizer's pattern cannot cut the text at byte 0"});
  EXPECT_EQ(outcome.out, run(arguments, good).out);
}

TEST_F(Folder, ANumericFaultIsExitSix) {
  const auto fill = [&](std::initializer_list<const char*> names, std::uint16_t number) {
    EditableCheckpoint checkpoint(kTiny + "/model.safetensors");
    for (const char* name : names) {
      std::string& bytes = checkpoint.at(name).bytes;
      for (std::size_t i = 0; i + 2 <= bytes.size(); i += 2) std::memcpy(bytes.data() + i, &number, 2);
    }
    checkpoint.write(copy_ / "model.safetensors");
  };
  fill({"norm.weight", "embedding.weight"}, 0x7f7f);  // finite, but logits overflow: shows at the first token
  expect_refused(generate(), 6, {"mmrec-generate: "});
  expect_refused(ppl(), 6, {"stdin", "token 1"});
  fill({"norm.weight"}, 0x4d00);  // 1.3e8: log-probs that fp32 holds, and no perplexity that a double does
  expect_refused(ppl(), 6, {"perplexity", "not finite"});
}

// Rows beyond the tokenizer are masked, and the user is told; a tokenizer beyond the rows cannot work.
TEST_F(Folder, TokenizerAndEmbeddingOfDifferentSizes) {
  const auto with_rows = [&](std::int64_t rows) {
    EditableCheckpoint checkpoint(kTiny + "/model.safetensors");
    EditableTensor& embedding = checkpoint.at("embedding.weight");
    embedding.bytes.resize(static_cast<std::size_t>(rows * embedding.shape[1] * 2), '\x3f');
    embedding.shape[0] = rows;
    checkpoint.write(copy_ / "model.safetensors");
    Json json = config();
    json["vocab_size"] = rows;
    write_config(json);
  };
  with_rows(500);
  std::size_t drawn = 0;  // several runs: each may meet the end of sequence early
  for (const char* seed : {"1", "2", "3", "4"}) {
    const Outcome outcome =
        generate({"-n", "200", "--temp", "5", "--top-k", "0", "--min-p", "0", "--seed", seed, "--json"});
    expect_says(outcome.err, {"384 pieces for 500 embeddings"});
    const std::vector<int> tokens = json_of(outcome)["tokens"];
    for (const int id : tokens) EXPECT_LT(id, 384);
    drawn += tokens.size();
  }
  EXPECT_GT(drawn, 40U);
  with_rows(300);
  expect_rejected({"tokenizer.model", "found 384", "300"});
}

TEST_F(Folder, GenerationConfigFaults) {
  for (const auto& [text, says] : std::vector<std::pair<std::string, std::string>>{
           {"{", "invalid JSON"},
           {"[]", "expected a JSON object"},
           {std::string(500'000, '['), "expected a JSON object"},
           {R"({"top_k": )" + std::string(200'000, '[') + std::string(200'000, ']') + "}", "nested too deeply"},
           {R"({"temperature": -1})", "temperature"},
           {R"({"temperature": "hot"})", "temperature"},
           {R"({"top_k": 1.5})", "top_k"},
           {R"({"top_k": 18446744073709551616})", "top_k"},
           {R"({"top_p": 0})", "top_p"},
           {R"({"do_sample": 1})", "do_sample"},
           {R"({"eos_token_id": [-1]})", "eos_token_id"},
           {R"({"eos_token_id": 1000000})", "eos_token_id"},
           {R"({"top_p": 1e-50})", "top_p"},
           {"", "empty"},
           {"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"},
           {std::string(1'100'000, ' ') + "{}", "too large"}}) {
    write_file(copy_ / "generation_config.json", text);
    expect_refused(generate(), 3, {"generation_config.json", says}, text.substr(0, 60));
  }
}

TEST_F(Folder, DoSampleFalseIsGreedy) {
  write_file(copy_ / "generation_config.json", R"({"do_sample": false, "temperature": 0.7, "top_p": null})");
  EXPECT_EQ(json_of(generate({"-n", "1", "--json"}))["sampling"]["temperature"], 0.0);
}

TEST_F(Folder, EndOfSequenceEndsTheText) {
  const Words greedy = {"-n", "50", "--temp", "0", "--json"};
  const Json whole = json_of(generate(greedy));
  const std::vector<int> tokens = whole["tokens"];
  ASSERT_GT(tokens.size(), 4U);
  Json json = config();
  json["eos_token_id"] = {2, tokens[3]};
  write_config(json);
  const Json cut = json_of(generate(greedy));
  EXPECT_EQ(cut["finish_reason"], "eos");
  const auto end = std::find(tokens.begin(), tokens.end(), tokens[3]);
  EXPECT_EQ(cut["tokens"].get<std::vector<int>>(), std::vector<int>(tokens.begin(), end));
}

/// tiny with a memory of so many slots.
void write_with_slots(const TempFolder& folder, std::int64_t slots) {
  copy_files(kTiny, folder.path(), {"model.safetensors", "tokenizer.model"});
  Json json = Json::parse(read_file(kTiny + "/config.json"));
  json["memory_slots"] = slots;
  write_file(folder / "config.json", json.dump());
}

TEST(Memory, SlotsThatNoSegmentHasFilledCostNothing) {
  SKIP_UNDER_SANITIZERS("a sanitizer counts what is asked for");
  const TempFolder few, many;
  write_with_slots(few, 64);
  write_with_slots(many, 1 << 21);  // half a gigabyte
  Words outputs;
  std::vector<long> peaks;
  for (const TempFolder* folder : {&few, &many}) {
    const std::string state = *folder / "state";
    const Json json = json_of(run({kGenerate, "--device", "cpu", "-m", folder->path(), "-p", "one two", "-n", "4",
                                   "--seed", "1", "--json", "--state-out", state}));
    outputs.push_back(json["tokens"].dump());
    peaks.push_back(json["timings"]["peak_memory_bytes"].get<long>());
    EXPECT_LT(std::filesystem::file_size(state), 1 << 16);
  }
  EXPECT_EQ(outputs[0], outputs[1]);
  EXPECT_LT(peaks[1], 2 * peaks[0]);
}

TEST(Memory, AStateThatDoesNotFitIsRefused) {
  SKIP_UNDER_SANITIZERS("a sanitizer's shadow memory does not fit under the limit");
  const TempFolder folder;
  write_with_slots(folder, 1 << 24);  // four gigabytes
  for (const Words& program : {Words{kGenerate, "-p", "one two", "-n", "4"}, Words{kPpl, "-"}}) {
    const Words line = words(program, {"--device", "cpu", "-m", folder.path(), "--threads", "2"});
    const Outcome outcome = run(limited(2'000'000, line), "one two");
    expect_refused(outcome, 4, {"not enough memory for the state", "needed 4294", "available"});
  }
}

}  // namespace
}  // namespace mmrec::test
