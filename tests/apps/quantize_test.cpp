// mmrec-quantize: its table, its files, what it refuses, and an interrupt.
#include "models/mmrec/mmrec.h"
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

const std::string kQuantize = MMREC_PROGRAM_FOLDER "/mmrec-quantize";

/// A model in bf16, with the bundled model's tokenizer.
const std::string& stored_model() {
  static const TempFolder folder;
  static const std::string path = folder.path().string();
  if (files_in(folder.path()) == 0) {
    models::write_synthetic_model(folder.path(),
                                  models::Mmrec::synthetic({.dim = 384, .layers = 3, .vocab = 8192, .ffn = 768}),
                                  kernels::DType::kBF16, 1);
    copy_files(MMREC_WEIGHTS "/mmrec-12m", folder.path(), {"tokenizer.model", "tokenizer_config.json"});
  }
  return path;
}

/// The last word of each line by the first.
std::map<std::string, Words> table_of(const Outcome& outcome) {
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  std::map<std::string, Words> table;
  for (const std::string& line : lines_of(outcome.out)) {
    const Words found = split(line);
    table[found.front()] = Words(found.begin() + 1, found.end());
  }
  return table;
}

TEST(Quantize, PrintsATableAndTheFiguresOfAll) {
  const TempFolder out;
  const Outcome outcome = run({kQuantize, stored_model(), out / "q", "--format", "int4", "--keep", "*.W_v", "-q"});
  const auto table = table_of(outcome);
  EXPECT_EQ(outcome.err, "");
  const Words& ffn = table.at("blocks.2.ffn.3");
  ASSERT_EQ(ffn.size(), 9U);
  EXPECT_EQ(joined(Words(ffn.begin(), ffn.begin() + 6)), "int4 g64 384 x 768 error ");
  EXPECT_NEAR(std::stod(ffn[6]), 0.065, 0.01);  // of evenly distributed weights
  EXPECT_EQ(ffn[7], "4.250");
  const Words& z = table.at("blocks.2.W_z");
  EXPECT_EQ(joined(Words(z.begin(), z.begin() + 5)), "int8 384 x 384 error ");
  EXPECT_LT(std::stod(z[5]), 0.02);
  EXPECT_EQ(z[6], "8.042");
  EXPECT_EQ(table.count("blocks.2.W_v"), 0U);
  EXPECT_EQ(table.at("bytes_before"), Words{"18714240"});
  const double bytes = std::stod(table.at("bytes_after").front());
  EXPECT_NEAR(std::stod(table.at("bits_per_weight").front()), bytes * 8 / (18'714'240 / 2), 1e-3);
  double on_disk = 0;
  for (const auto& entry : std::filesystem::directory_iterator(out / "q")) {
    if (entry.path().extension() == ".safetensors") on_disk += static_cast<double>(entry.file_size());
  }
  EXPECT_NEAR(on_disk, bytes, 30'000);  // headers
  EXPECT_LT(std::stod(table.at("bits_per_quantized_weight").front()), 6.5);
}

TEST(Quantize, FormatsAndGroupsAreThoseAskedFor) {
  const TempFolder out;
  const auto row = [&](const Words& options) {
    const std::string to = out / std::to_string(files_in(out.path()));
    return table_of(run(words({kQuantize, kUpstream + "/mdi", to}, options))).at("blocks.0.ffn.3");
  };
  const Words int4 = row({"--format=int4", "--group", "128"});
  EXPECT_EQ(int4[1], "g128");
  EXPECT_EQ(int4[7], "4.125");
  EXPECT_EQ(row({"--format", "fp8"})[0], "fp8");
  EXPECT_EQ(row({"--format", "int8", "--threads", "3"})[6], "8.062");
}

TEST(Quantize, CalibratesAndTellsThePerplexityThatMmrecPplTells) {
  const TempFolder out;
  std::string text;
  for (int i = 0; i < 40; ++i)
    text += "The history of the city begins in the year " + std::to_string(1300 + 7 * i) + ". ";
  write_file(out / "text", text);
  std::map<std::string, Words> tables[2];
  for (const bool calibrates : {false, true}) {
    const std::string to = out / (calibrates ? "calibrated" : "nearest");
    Words line = {kQuantize, stored_model(), to, "--format", "int4", "--eval", out / "text", "--device", "cpu"};
    if (calibrates) line.insert(line.end(), {"--calibrate", out / "text"});
    auto& table = tables[calibrates] = table_of(run(line));
    for (const auto& [model, figure] : {std::pair{stored_model(), "ppl_before"}, std::pair{to, "ppl_after"}}) {
      const Json ppl = json_of(run({kPpl, "--device", "cpu", "-m", model, "--format", "json", out / "text"}));
      EXPECT_NEAR(std::stod(table.at(figure).front()), ppl["ppl"], 1e-4) << figure;
    }
    const double change = std::stod(table.at("ppl_after").front()) / std::stod(table.at("ppl_before").front()) - 1;
    EXPECT_NEAR(std::stod(table.at("ppl_change").front()), 100 * change, 2e-3);
  }
  EXPECT_NE(tables[1].at("ppl_after"), tables[0].at("ppl_after"));
  expect_refused(run({kQuantize, stored_model(), out / "q", "--format", "int8", "--calibrate", out / "none"}), 1,
                 {"none"});
  EXPECT_FALSE(std::filesystem::exists(out / "q"));
}

TEST(Quantize, RefusesWrongUsageAndFoldersThatItCannotTake) {
  const TempFolder out;
  const std::string to = out / "q";
  expect_wrong_usage({kQuantize},
                     {
                         {{}, "expected two folders"},
                         {{kTiny}, "expected two folders"},
                         {{kTiny, to, "x", "--format", "int8"}, "expected two folders"},
                         {{kTiny, to}, "--format is missing"},
                         {{kTiny, to, "--format", "int3"}, "int8 or int4 or fp8"},
                         {{kTiny, to, "--format", "int8", "--group", "64"}, "--group: only with"},
                         {{kTiny, to, "--format", "int4", "--group", "63"}, "--group"},
                         {{kTiny, to, "--format", "int4", "--group", "96"}, "--group: found 96"},
                         {{kTiny, kTiny, "--format", "int8"}, "a new or an empty folder"},
                         {{kTiny, to, "--format", "int8", "--calibrate", "-", "--eval", "-"}, "-: given more"},
                         {{kTiny, to, "--format", "int8", "--keep", "*.W_z", "--keep", "none"}, "--keep: found"},
                         {{kTiny, to, "--format", "int8", "--keep", "*"}, "patterns of every matrix"},
                     });
  expect_refused(run({kQuantize, kUpstream + "/jax", to, "--format", "int8"}), 3, {"no matrix NAME.weight"});
  expect_refused(run({kQuantize, out / "none", to, "--format", "int8"}), 3, {"config.json"});
  expect_refused(run({kQuantize, kTiny, out / "no/q", "--format", "int8"}), 5, {"no/q: cannot create the folder"});
  write_file(out / "empty", "");
  for (const char* option : {"--calibrate", "--eval"}) {
    expect_refused(run({kQuantize, kTiny, to, "--format", "int8", option, out / "empty"}), 3, {"empty: found no text"});
  }
  std::filesystem::remove(out / "empty");
  EXPECT_FALSE(std::filesystem::exists(to));
  EXPECT_EQ(run({kQuantize, kTiny, to, "--format", "int8"}).code, 0);
  expect_refused(run({kQuantize, to, out / "again", "--format", "int8"}), 3, {"quantised already"});
  EXPECT_EQ(files_in(out.path()), 1);
}

TEST(Quantize, LeavesNothingWhereItsTableCannotBeWritten) {
  const TempFolder out;
  const auto refuse = [&](const std::string& to, const Words& more) {
    const Words line = words({kQuantize, kTiny, to, "--format", "int8", "-q"}, more);
    expect_refused(run(words({"/bin/bash", "-c", "exec \"$@\" >/dev/full", "bash"}, line)), 5, {"stdout: cannot write"},
                   joined(line));
  };
  write_file(out / "text", "two words");
  refuse(out / "new", {});
  refuse(out / "new", {"--eval", out / "text"});
  EXPECT_EQ(files_in(out.path()), 1);
  std::filesystem::create_directory(out / "old");
  refuse(out / "old", {});
  EXPECT_EQ(files_in(out / "old"), 0);
}

TEST(Quantize, SaysWhenTheTextIsTooShortToCalibrate) {
  const TempFolder out;
  write_file(out / "text", "two words");
  const Outcome outcome = run({kQuantize, kTiny, out / "q", "--format", "int8", "--calibrate", out / "text", "-q"});
  EXPECT_EQ(outcome.code, 0);
  expect_says(outcome.err, {"warning: --calibrate: found ", " tokens"});
}

TEST(Quantize, AnInterruptLeavesNothing) {
  const TempFolder in;
  copy_files(kTiny, in.path(), {"config.json", "tokenizer.model"});
  EditableCheckpoint checkpoint(kTiny + "/model.safetensors");
  checkpoint.add_zeros("more.weight", {1 << 13, 1 << 11});
  std::string& bytes = checkpoint.at("more.weight").bytes;
  for (std::size_t i = 3; i < bytes.size(); i += 4) bytes[i] = 0x3f;  // 0.5: zeros take no time
  checkpoint.write(in / "model.safetensors");
  const TempFolder out;
  Process process({kQuantize, in.path(), out / "q", "--format", "fp8", "--threads", "1"});
  wait_for([&] { return std::filesystem::exists(out / "q"); });
  process.send(SIGINT);
  const Outcome outcome = process.wait();
  expect_refused(outcome, 130, {"interrupted: nothing was written"});
  EXPECT_EQ(files_in(out.path()), 0);
}

}  // namespace
}  // namespace mmrec::test
