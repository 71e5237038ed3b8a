// mmrec-bench: that its figures are there and add up, and that it leaves nothing behind.
#include "apps/bench/run.h"
#include "models/mmrec/mmrec.h"
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

Outcome bench(const std::string& options) { return run(words({kBench, "--device", "cpu"}, split(options))); }

void expect_row(const Json& row, const Json& expected) {
  for (const auto& [key, value] : expected.items()) EXPECT_EQ(row[key], value) << row;
}

TEST(Bench, ReportsRatesAndSharesOfASyntheticModel) {
  const Outcome outcome = bench(
      "--synthetic 64,2,300 --lengths 40,300 --batches 2,1 --decode 4 --documents 5 "
      "--requests 5 --slots 2 --repeat 1 --prefill sweeps --json");
  const Json json = json_of(outcome);
  EXPECT_EQ(json["schema"], "mmrec-bench/1");
  EXPECT_GT(json["machine"]["read_gb_per_s"].get<double>(), 0.1);
  EXPECT_GT(json["machine"]["sgemm_gflop_per_s"].get<double>(), 0.1);
  EXPECT_GT(json["load_s"].get<double>(), 0.0);
  EXPECT_GT(json["peak_memory_bytes"].get<double>(), 1e6);
  ASSERT_EQ(json["rows"].size(), 12U);
  const Json& lockstep = json["rows"][10];
  const Json& served = json["rows"][11];
  const Json& drawn = lockstep["tokens"];
  expect_row(json["rows"][8], {{"phase", "score"}, {"batch", 1}, {"tokens", 5 * 64}});
  expect_row(json["rows"][9], {{"phase", "score"}, {"batch", 5}, {"tokens", 64}});
  expect_row(lockstep, {{"phase", "lockstep"}, {"batch", 2}});
  expect_row(served, {{"phase", "serve"}, {"batch", 5}, {"slots", 2}, {"tokens", drawn}});
  EXPECT_NEAR(served["share_of_lockstep"].get<double>(),
              served["tokens_per_s"].get<double>() / lockstep["tokens_per_s"].get<double>(), 1e-9);
  EXPECT_GT(lockstep["prefill_seconds"].get<double>(), 0.0);
  EXPECT_GT(served["share_of_lockstep_with_prefill"].get<double>(), served["share_of_lockstep"].get<double>());
  for (const Json& row : json["rows"]) {
    const double rate = row["batch"].get<double>() * row["tokens"].get<double>() / row["seconds"].get<double>();
    EXPECT_NEAR(row["tokens_per_s"].get<double>() / rate, 1.0, 1e-9);
    if (row["phase"] == "prefill" || row["phase"] == "score") {
      EXPECT_NEAR(row["share_of_sgemm"].get<double>(),
                  row["gflop_per_s"].get<double>() / json["machine"]["sgemm_gflop_per_s"].get<double>(), 1e-9);
      EXPECT_GT(row["sweeps_per_token"].get<double>(), 1.0);
    } else if (row["phase"] != "serve") {
      EXPECT_GT(row["share_of_read_bandwidth"].get<double>(), 0.0);
    }
  }
  EXPECT_FALSE(std::filesystem::exists(json["model"]["folder"].get<std::string>()));
}

TEST(Bench, AFolderWithoutAModelIsExitThree) {
  expect_refused(run({kBench, "--device", "cpu", "-m", "no such"}), 3,
                 {"no such", "Try: a folder that holds config.json"});
}

TEST(Bench, PrintsATable) {
  const Outcome outcome = bench("-m " + kTiny + " --lengths 32 --batches 1 --decode 4 --repeat 1");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  expect_says(outcome.out, {"machine ", "model ", "load ", "peak ", "prefill ", "decode ", "serve ", "in lock-step",
                            "of gemm", "of read"});
}

TEST(Bench, ComparesWithTheCpu) {
  const std::string options = "--compare cpu -m " + kTiny +
                              " --lengths 16 --batches 1 --decode-batches 1,2 --decode 2 " +
                              "--repeat 1 --documents 0 --requests 0";
  const Json json = json_of(bench(options + " --json"));
  ASSERT_EQ(json["rows"].size(), 5U);  // a prefill; decode and generate for each batch
  EXPECT_EQ(json["compare"]["rows"].size(), 5U);
  ASSERT_EQ(json["speedups"].size(), 5U);
  for (std::size_t i = 0; i < 5; ++i) {
    const Json& row = json["rows"][i];
    const Json& speedup = json["speedups"][i];
    expect_same(speedup, row, {"phase", "batch"});
    const double factor = json["compare"]["rows"][i]["seconds"].get<double>() / row["seconds"].get<double>();
    EXPECT_NEAR(speedup["factor"].get<double>() / factor, 1.0, 1e-9);
    const double tokens = row["tokens"].get<double>();  // of one sequence, or steps
    EXPECT_NEAR(row["us_per_token_and_layer"].get<double>() / (row["seconds"].get<double>() * 1e6 / tokens / 2), 1.0,
                1e-9);
  }
  expect_says(bench(options).out, {"cpu against cpu:", "times as fast"});
}

TEST(Bench, KeepsASyntheticModelWhereItIsTold) {
  const TempFolder folder;
  const std::string kept = folder.path() / "kept";
  const auto kept_bench = [&](const std::string& sizes) {
    return bench("--synthetic " + sizes + " --keep " + kept + " --lengths 4 --batches 1 --decode 1 --repeat 1 --json");
  };
  EXPECT_EQ(json_of(kept_bench("64,1,300"))["model"]["folder"], kept);
  const auto written = std::filesystem::last_write_time(kept + "/model.safetensors");
  EXPECT_EQ(json_of(kept_bench("64,1,300"))["model"]["folder"], kept);
  EXPECT_EQ(std::filesystem::last_write_time(kept + "/model.safetensors"), written);
  expect_refused(kept_bench("64,2,300"), 3, {kept, "holds another model"});
}

constexpr const char* kShortBench = " --lengths 8 --batches 1 --documents 0 --requests 0 --repeat 1 --decode ";

// The made-up tokenizer has no end of sequence, so that each of the five prompts draws six tokens.
TEST(Bench, RunsAFileOfPromptsThroughTheProgram) {
  const TempFolder folder;
  const Json json = json_of(run(split("/usr/bin/env TMPDIR=" + folder.path().string() + " " + kBench +
                                      " --device cpu --synthetic 64,2,300 --offline 5 --json" + kShortBench + "6")));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  ASSERT_EQ(json["rows"].size(), 6U);  // prefill, decode, generate, lockstep of one and of four, offline
  const Json& offline = json["rows"][5];
  expect_row(offline, {{"phase", "offline"}, {"batch", 5}, {"tokens", 6}, {"drawn_tokens", 30}});
  const double seconds = offline["seconds"].get<double>();
  const double load = offline["load_seconds"].get<double>();
  EXPECT_GT(load, 0.0);
  EXPECT_NEAR(offline["tokens_per_s"].get<double>() * seconds, 30.0, 1e-9);
  const double rate = 30.0 / (seconds > load ? seconds - load : seconds);
  EXPECT_NEAR(offline["tokens_per_s_without_load"].get<double>() / rate, 1.0, 1e-9);
  double best = 0.0;
  double best_with_prefill = 0.0;
  for (const std::size_t i : {3U, 4U}) {
    const Json& lockstep = json["rows"][i];
    expect_row(lockstep, {{"phase", "lockstep"}, {"batch", i == 3 ? 1 : 4}, {"tokens", 6}});
    const double tokens = 6.0 * lockstep["batch"].get<double>();
    const double stepping = lockstep["seconds"].get<double>();
    best = std::max(best, tokens / stepping);
    best_with_prefill = std::max(best_with_prefill, tokens / (stepping + lockstep["prefill_seconds"].get<double>()));
  }
  EXPECT_NEAR(offline["share_of_lockstep"].get<double>() / (rate / best), 1.0, 1e-9);
  EXPECT_NEAR(offline["share_of_lockstep_with_prefill"].get<double>() / (rate / best_with_prefill), 1.0, 1e-9);
}

TEST(Bench, GivesAKeptModelATokenizerOnce) {
  const TempFolder folder;
  const std::string options =
      "--synthetic 64,1,300 --offline 1 --keep " + (folder / "kept").string() + kShortBench + "1";
  const std::filesystem::path tokenizer = folder / "kept/tokenizer.model";
  expect_says(bench(options).out, {"offline, 1 prompts through mmrec-generate: 1 tokens in "});
  const auto written = std::filesystem::last_write_time(tokenizer);
  EXPECT_EQ(bench(options).code, 0);
  EXPECT_EQ(std::filesystem::last_write_time(tokenizer), written);
  EXPECT_EQ(files_in(folder / "kept"), 3);
}

TEST(Bench, SaysWhyTheProgramFailed) {
  const TempFolder folder;
  copy_files(kTiny, folder.path(), {"config.json", "model.safetensors"});
  const std::string options = "--offline 2 -m " + folder.path().string() + kShortBench + "1";
  expect_refused(bench(options), 3, {"tokenizer.model"});
  copy_files(kTiny, folder.path(), {"tokenizer.model"});
  write_file(folder / "generation_config.json", "{");
  expect_refused(bench(options), 1, {"/mmrec-generate ended with exit code 3: ", "generation_config.json"});
}

/// Whether a process has `text` in its command line.
bool runs(const std::string& text) {
  for (const auto& process : std::filesystem::directory_iterator("/proc")) {
    std::ifstream file(process.path() / "cmdline");
    std::string line;
    std::getline(file, line);  // nothing, and no exception, if the process has ended meanwhile
    if (line.find(text) != std::string::npos) return true;
  }
  return false;
}

TEST(Bench, AnInterruptEndsTheProgramThatRunsThePrompts) {
  const TempFolder folder;
  const std::string here = folder.path().string();
  Process process(split("/usr/bin/env TMPDIR=" + here + " " + kBench +
                        " --device cpu --synthetic 64,2,300 --offline 9" + kShortBench + "1000000"));
  wait_for([&] { return !process.running() || runs(here + "/mmrec-bench-"); });
  EXPECT_TRUE(process.running());
  process.send(SIGINT);
  EXPECT_EQ(process.wait().code, 130);
  EXPECT_FALSE(runs(here));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

// A model that takes minutes to write: the first interrupt ends it too, and nothing stays, kept or not.
TEST(Bench, AnInterruptEndsTheWritingOfAModel) {
  for (const bool keeps : {false, true}) {
    for (const bool twice : {false, true}) {
      const TempFolder folder;
      Words line = {"/usr/bin/env", "TMPDIR=" + folder.path().string(), kBench, "--synthetic", "2048,64,32000"};
      if (keeps) line.insert(line.end(), {"--keep", folder / "kept"});
      Process process(line);
      wait_for([&] { return !process.running() || !std::filesystem::is_empty(folder.path()); });
      process.send(SIGINT);
      if (twice) process.send(SIGINT);
      EXPECT_EQ(process.wait().code, 130);
      EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << keeps << twice;
    }
  }
}

TEST(Bench, AModelThatTheDiskCannotHoldIsNotBegun) {
  const TempFolder folder;
  const Outcome outcome = run({kBench, "--synthetic", "1048576,1024,32000", "--keep", folder / "kept"});
  expect_refused(outcome, 5, {folder.path().native(), "the model needs ", " bytes, the file system has "});
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Bench, KeepOverwritesNoModel) {
  const TempFolder folder;
  write_file(folder / "model.safetensors", "mine");
  const Outcome outcome = run({kBench, "--synthetic", "64,1,100", "--keep", folder.path()});
  expect_refused(outcome, 3, {"holds a model.safetensors without a config.json"});
  EXPECT_EQ(read_file(folder / "model.safetensors"), "mine");
}

// 18 D² elements a layer (F = 4 D), without the memory's two projections 16 D².
TEST(BenchWork, CountsTheProductsOfAPrefill) {
  models::Config config;
  config.model_dim = 8;
  config.num_layers = 3;
  config.vocab_size = 100;
  config.num_heads = 2;
  config.ffn_dim = 32;
  config.memory_segment = 10;
  config.memory_slots = 2;
  models::ProductCounts counts = models::products_of_blocks(config);
  counts.head = 100 * 8;
  const double square = 64.0;
  const double head = 2.0 * 100.0 * 8.0;
  EXPECT_DOUBLE_EQ(apps::prefill_flops(counts, 1, 10, {}), 2.0 * 3.0 * 10.0 * 16.0 * square + head);
  EXPECT_DOUBLE_EQ(apps::prefill_flops(counts, 2, 25, {}),
                   2.0 * (2.0 * 3.0 * (25.0 * 16.0 + 5.0 * 2.0) * square) + 2.0 * head);
  PrefillStats stats;
  stats.layer_tokens = 30;
  stats.token_sweeps = 100;
  EXPECT_DOUBLE_EQ(apps::prefill_flops(counts, 1, 10, stats), 2.0 * (3.0 * 10.0 * 16.0 + 70.0 * 2.0) * square + head);
}

}  // namespace
}  // namespace mmrec::test
