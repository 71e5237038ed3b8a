// config.json: defaults, types, bounds, and each bad input.
#include "models/mmrec/config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "models/architecture.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

using test::error_of;
using test::expect_says;
using test::TempFolder;
using test::write_file;

constexpr char kRequired[] = R"("model_type":"mmrec","vocab_size":256,"model_dim":64,"num_layers":2,"num_heads":4)";

/// The required keys and `more` of them.
Config parse(const std::string& more, std::vector<std::string>* warnings = nullptr) {
  const WarningSink sink = [&](std::string_view line) {
    if (warnings != nullptr) warnings->emplace_back(line);
  };
  return Config::parse("{" + std::string(kRequired) + (more.empty() ? "" : ",") + more + "}", "config.json", sink);
}

std::string refusal(const std::string& more) {
  return error_of([&] { parse(more); });
}

/// The required keys with one of them replaced.
std::string refusal_with(const std::string& from, const std::string& to) {
  std::string text = "{" + std::string(kRequired) + "}";
  text.replace(text.find(from), from.size(), to);
  return error_of([&] { Config::parse(text, "config.json"); });
}

TEST(Config, DefaultsAreThoseOfTheDocument) {
  std::vector<std::string> warnings;
  const Config config = parse("", &warnings);
  EXPECT_EQ(config.vocab_size, 256);
  EXPECT_EQ(config.ffn_dim, 256);
  EXPECT_FALSE(config.use_hem);
  EXPECT_FALSE(config.use_dpg);
  EXPECT_EQ(config.dpg_rank, 128);
  EXPECT_EQ(config.mdi_mix, 0.1F);
  EXPECT_EQ(config.memory_segment, 8192);
  EXPECT_EQ(config.memory_slots, 1);
  EXPECT_TRUE(config.carry_state);
  EXPECT_FALSE(config.ids.bos.has_value());
  EXPECT_TRUE(config.ids.eos.empty());
  EXPECT_EQ(config.head_dim(), 16);
  EXPECT_EQ(config.gate_hidden_dim(), 16);
  EXPECT_TRUE(warnings.empty());
}

TEST(Config, ReadsEveryKey) {
  const Config config = parse(R"("ffn_dim":96,"use_hem":true,"use_dpg":true,"dpg_rank":8,"mdi_mix":0.25,
    "memory_segment":24,"memory_slots":3,"carry_state":false,"bos_token_id":1,"eos_token_id":[2,3],"mem_dim":64,
    "use_sparse":false)");
  EXPECT_EQ(config.ffn_dim, 96);
  EXPECT_TRUE(config.use_hem);
  EXPECT_TRUE(config.use_dpg);
  EXPECT_EQ(config.dpg_rank, 8);
  EXPECT_EQ(config.mdi_mix, 0.25F);
  EXPECT_EQ(config.memory_segment, 24);
  EXPECT_EQ(config.memory_slots, 3);
  EXPECT_FALSE(config.carry_state);
  EXPECT_EQ(config.ids.bos, 1);
  EXPECT_EQ(config.ids.eos, (std::vector<int>{2, 3}));
}

TEST(Config, EosMayBeOneIdOrAListAndNullMeansAbsent) {
  EXPECT_EQ(parse(R"("eos_token_id":7)").ids.eos, (std::vector<int>{7}));
  EXPECT_TRUE(parse(R"("eos_token_id":[])").ids.eos.empty());
  EXPECT_TRUE(parse(R"("eos_token_id":null)").ids.eos.empty());
  EXPECT_FALSE(parse(R"("bos_token_id":null)").ids.bos.has_value());
  EXPECT_EQ(parse(R"("ffn_dim":null,"mem_dim":null)").ffn_dim, 256);
}

TEST(Config, KeysWithoutMeaningForInferenceAreSilent) {
  std::vector<std::string> warnings;
  parse(R"("max_seq_len":1024,"pe_dim":7,"num_memories":1,"use_uboo":true,"lambda_P":0.1,"dropout":0.1,
    "architectures":["MMRecModel"],"torch_dtype":"float32","transformers_version":"4.0")",
        &warnings);
  EXPECT_TRUE(warnings.empty());
}

TEST(Config, UnknownKeysWarn) {
  std::vector<std::string> warnings;
  parse(R"("num_experts":{"a":[1]},"tie word":true)", &warnings);
  ASSERT_EQ(warnings.size(), 2U);
  expect_says(warnings[0], {"config.json", "num_experts", "ignored"});
  EXPECT_NO_THROW(Config::parse("{" + std::string(kRequired) + ",\"x\":1}", "config.json"));  // nobody listens
}

TEST(Config, ToJsonRoundTrips) {
  for (const char* more :
       {"", R"("use_dpg":true,"dpg_rank":5,"mdi_mix":0)", R"("mdi_mix":1.1754944e-38,"bos_token_id":0)",
        R"("use_hem":true,"eos_token_id":[1,2,255],"carry_state":false,"memory_slots":9)",
        R"("mdi_mix":0.30000001192092896,"memory_segment":1,"ffn_dim":1)"}) {
    const Config config = parse(more);
    EXPECT_EQ(Config::parse(to_json(config), "again"), config) << more;
  }
}

TEST(Config, TheFixturesLoadWithoutWarnings) {
  for (const char* name : {"mdi", "dpg", "hem", "segments"}) {
    std::string warnings;
    const Config config = test::config_of<Config>(std::filesystem::path(MMREC_FIXTURES) / "upstream" / name,
                                                  [&](std::string_view line) { warnings += line; });
    EXPECT_EQ(config.num_layers, 2) << name;
    EXPECT_EQ(warnings, "") << name;
  }
}

TEST(Config, FilesThatCannotBeReadAreRefused) {
  const TempFolder folder;
  const auto load = [&] { load_model(folder.path(), {}, {}); };
  expect_says(error_of<std::system_error>(load), {"config.json", "No such file"});
  write_file(folder / "config.json", "");
  expect_says(error_of(load), {"config.json", "empty"});
  std::filesystem::resize_file(folder / "config.json", std::uintmax_t{1} << 40);
  expect_says(error_of(load), {"too large", "1099511627776"});
  std::filesystem::remove(folder / "config.json");
  std::filesystem::create_directory(folder / "config.json");
  expect_says(error_of(load), {"found a folder"});
}

TEST(Config, NotAnObject) {
  for (const char* text : {"[]", "1", "\"x\"", "null", " ", "x"}) {
    expect_says(error_of([&] { Config::parse(text, "config.json"); }), {"config.json", "expected a JSON object"});
  }
  expect_says(error_of([&] { Config::parse("<html></html>", "config.json"); }), {"web page"});
  expect_says(error_of([&] { Config::parse("version https://git-lfs.github.com/spec/v1\n", "config.json"); }), {"LFS"});
}

TEST(Config, MissingKeys) {
  const std::vector<std::string> members = {R"("model_type":"mmrec",)", R"("vocab_size":256,)", R"("model_dim":64,)",
                                            R"("num_layers":2,)", R"(,"num_heads":4)"};
  const std::vector<std::string> keys = {"model_type", "vocab_size", "model_dim", "num_layers", "num_heads"};
  for (std::size_t i = 0; i < keys.size(); ++i) {
    expect_says(refusal_with(members[i], ""), {"config.json", keys[i], "missing"});
  }
}

TEST(Config, OtherModelTypes) {
  expect_says(refusal_with("\"mmrec\"", "\"llama\""), {"model_type", "\"llama\"", "\"mmrec\""});
  expect_says(refusal_with("\"mmrec\"", "3"), {"model_type", "found a number, expected a string"});
}

TEST(Config, WrongTypes) {
  for (const char* bad : {"\"256\"", "256.0", "2.56e2", "null", "[256]", "{}", "true"}) {
    expect_says(refusal_with(":256", ":" + std::string(bad)), {"vocab_size", "expected an integer"});
  }
  expect_says(refusal(R"("use_hem":1)"), {"use_hem", "expected true or false"});
  expect_says(refusal(R"("use_dpg":"yes")"), {"use_dpg"});
  expect_says(refusal(R"("carry_state":null)"), {"carry_state"});
  expect_says(refusal(R"("mdi_mix":"0.1")"), {"mdi_mix", "expected a number"});
  expect_says(refusal(R"("eos_token_id":"</s>")"), {"eos_token_id", "expected an integer"});
  expect_says(refusal(R"("eos_token_id":[[1]])"), {"eos_token_id"});
  expect_says(refusal(R"("use_sparse":0)"), {"use_sparse"});
}

TEST(Config, SizesOutOfRange) {
  for (const char* bad : {"0", "-1", "16777217", "2147483648", "9223372036854775807", "-9223372036854775808"}) {
    for (const char* member : {":256", ":64", ":2,", ":4}"}) {
      std::string to = ":" + std::string(bad);
      if (!std::isdigit(static_cast<unsigned char>(std::string(member).back()))) to += std::string(member).back();
      expect_says(refusal_with(member, to), {"expected 1 to", bad});
    }
    for (const char* key : {"ffn_dim", "dpg_rank", "memory_segment", "memory_slots", "mem_dim"}) {
      expect_says(refusal("\"" + std::string(key) + "\":" + bad), {key, "expected 1 to 16777216", bad});
    }
  }
  expect_says(refusal_with(":256", ":18446744073709551616"), {"vocab_size", "64 bits"});
  expect_says(refusal_with(":2,", ":4097,"), {"num_layers", "expected 1 to 4096"});
}

TEST(Config, ProductsThatWouldOverflow) {
  expect_says(refusal_with(":64", ":16777216"), {"2^48 bytes of weights"});
  expect_says(refusal_with(R"(64,"num_layers":2)", R"(32768,"num_layers":4096)"), {"2^48"});
  expect_says(refusal_with(R"(64,"num_layers":2)", R"(1024,"num_layers":64,"memory_slots":16777216)"),
              {"2^40 bytes of state"});
  expect_says(refusal_with(R"(256,"model_dim":64)", R"(16777216,"model_dim":1048576)"), {"2^48"});
}

TEST(Config, HeadsMustDivideTheWidth) {
  expect_says(refusal_with(":4", ":3"), {"num_heads", "found 3", "divisor of model_dim 64"});
  expect_says(refusal_with(":4", ":128"), {"num_heads", "128"});
}

TEST(Config, WidthMustBeAMultipleOfFourUnlessDpg) {
  expect_says(
      refusal_with(R"("model_dim":64,"num_layers":2,"num_heads":4)", R"("model_dim":66,"num_layers":2,"num_heads":2)"),
      {"model_dim", "66", "multiple of 4"});
  EXPECT_NO_THROW(Config::parse(
      R"({"model_type":"mmrec","vocab_size":8,"model_dim":66,"num_layers":1,"num_heads":2,"use_dpg":true})", "c"));
}

TEST(Config, MixOutOfRange) {
  for (const char* bad : {"-0.1", "10.5", "1e39", "1e400", "1e-60"}) {
    expect_says(refusal("\"mdi_mix\":" + std::string(bad)), {"mdi_mix"});
  }
  refusal(R"("mdi_mix":NaN)");
  refusal(R"("mdi_mix":Infinity)");
}

TEST(Config, TokenIdsOutOfRange) {
  for (const char* bad : {"-1", "256", "16777216", "4294967295", "9223372036854775807"}) {
    expect_says(refusal("\"bos_token_id\":" + std::string(bad)), {"bos_token_id", bad, "vocab_size"});
    expect_says(refusal("\"eos_token_id\":[0," + std::string(bad) + "]"), {"eos_token_id", bad, "vocab_size"});
  }
  std::string many = "0";
  for (int i = 0; i < 1024; ++i) many += ",0";
  expect_says(refusal("\"eos_token_id\":[" + many + "]"), {"more than 1024 ids"});
}

TEST(Config, VariantsThatAreNotSupported) {
  expect_says(refusal(R"("mem_dim":32)"), {"mem_dim", "found 32", "expected model_dim 64"});
  expect_says(refusal(R"("use_sparse":true)"), {"use_sparse", "not supported"});
}

TEST(Config, DuplicateKeys) { expect_says(refusal(R"("num_heads":4)"), {"duplicate key", "num_heads"}); }

TEST(Config, DuplicateKeysOfIgnoredMembers) { expect_says(refusal(R"("dropout":{"a":1,"a":1})"), {"duplicate key"}); }

TEST(Config, DeepNestingOfIgnoredMembers) {
  expect_says(refusal("\"dropout\":" + std::string(1000, '[')), {"nested too deeply"});
}

TEST(Config, TextAfterTheObject) {
  expect_says(error_of([&] { Config::parse("{" + std::string(kRequired) + "} x", "config.json"); }), {"end of input"});
}

}  // namespace
}  // namespace mmrec::models
