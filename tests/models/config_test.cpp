// config.json of every architecture: defaults, types, bounds, and each bad input.

#include "models/mmrec100m/config.h"
#include "models/architecture.h"
#include "models/mmrec_jax/config.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

using test::error_of;
using test::expect_says;
using test::TempFolder;
using test::write_file;
using Strings = std::vector<std::string>;

/// The keys that an architecture requires.
template <class C>
constexpr std::string_view kRequired =
    R"("model_type":"mmrec","vocab_size":256,"model_dim":64,"num_layers":2,"num_heads":4)";
template <>
constexpr std::string_view kRequired<mmrec100m::Config> =
    R"("model_type":"mmrec100m","vocab_size":112,"expert_dim":32,"num_layers":2)";
template <>
constexpr std::string_view kRequired<mmrec_jax::Config> =
    R"("model_type":"mmrec-jax","vocab_size":160,"model_dim":32,"num_layers":3,"num_heads":2)";

/// The required keys and `more` of them.
template <class C = Config>
C parse(const std::string& more, Strings* warnings = nullptr) {
  const WarningSink sink = [&](std::string_view line) {
    if (warnings != nullptr) warnings->emplace_back(line);
  };
  return C::parse("{" + std::string(kRequired<C>) + (more.empty() ? "" : ",") + more + "}", "config.json", sink);
}
template <class C = Config>
std::string refusal(const std::string& more) {
  return error_of([&] { parse<C>(more); });
}
/// The required keys with a part of their text replaced.
template <class C = Config>
std::string refusal_with(std::string_view from, const std::string& to) {
  std::string text = "{" + std::string(kRequired<C>) + "}";
  text.replace(text.find(from), from.size(), to);
  return error_of([&] { C::parse(text, "config.json"); });
}

/// What is refused, and what the refusal says: further keys, or a replaced part.
struct More {
  const char* keys;
  std::initializer_list<std::string_view> says;
};
struct Replaced {
  const char* from;
  const char* to;
  std::initializer_list<std::string_view> says;
};
template <class C = Config>
void expect_refused(std::initializer_list<More> cases) {
  for (const More& c : cases) expect_says(refusal<C>(c.keys), c.says);
}
template <class C = Config>
void expect_refused_with(std::initializer_list<Replaced> cases) {
  for (const Replaced& c : cases) expect_says(refusal_with<C>(c.from, c.to), c.says);
}
template <class C>
void expect_round_trip(const C& config) {
  EXPECT_EQ(C::parse(to_json(config), "again"), config);
}

TEST(Config, DefaultsAreThoseOfTheDocument) {
  Strings warnings;
  const Config config = parse("", &warnings);
  Config want;
  want.vocab_size = 256, want.model_dim = 64, want.num_layers = 2, want.num_heads = 4, want.ffn_dim = 256;
  want.use_hem = want.use_dpg = false, want.dpg_rank = 128, want.mdi_mix = 0.1F;
  want.memory_segment = 8192, want.memory_slots = 1, want.carry_state = true, want.ids = {};
  EXPECT_EQ(config, want);
  EXPECT_EQ(config.head_dim(), 16);
  EXPECT_EQ(config.gate_hidden_dim(), 16);
  EXPECT_TRUE(warnings.empty());
}

TEST(Config, ReadsEveryKey) {
  Config want = parse("");
  want.ffn_dim = 96, want.use_hem = want.use_dpg = true, want.dpg_rank = 8, want.mdi_mix = 0.25F;
  want.memory_segment = 24, want.memory_slots = 3, want.carry_state = false;
  want.ids = {.bos = 1, .eos = {2, 3}};
  EXPECT_EQ(parse(R"("ffn_dim":96,"use_hem":true,"use_dpg":true,"dpg_rank":8,"mdi_mix":0.25,
    "memory_segment":24,"memory_slots":3,"carry_state":false,"bos_token_id":1,"eos_token_id":[2,3],"mem_dim":64,
    "use_sparse":false)"),
            want);
}

TEST(Config, EosMayBeOneIdOrAListAndNullMeansAbsent) {
  EXPECT_EQ(parse(R"("eos_token_id":7)").ids.eos, (std::vector<int>{7}));
  EXPECT_TRUE(parse(R"("eos_token_id":[])").ids.eos.empty());
  EXPECT_TRUE(parse(R"("eos_token_id":null)").ids.eos.empty());
  EXPECT_FALSE(parse(R"("bos_token_id":null)").ids.bos.has_value());
  EXPECT_EQ(parse(R"("ffn_dim":null,"mem_dim":null)").ffn_dim, 256);
}

TEST(Config, KeysWithoutMeaningForInferenceAreSilentAndUnknownOnesWarn) {
  Strings warnings;
  parse(R"("max_seq_len":1024,"pe_dim":7,"num_memories":1,"use_uboo":true,"lambda_P":0.1,"dropout":0.1,
    "architectures":["MMRecModel"],"torch_dtype":"float32","transformers_version":"4.0")",
        &warnings);
  EXPECT_TRUE(warnings.empty());
  parse(R"("num_experts":{"a":[1]},"tie word":true)", &warnings);
  ASSERT_EQ(warnings.size(), 2U);
  expect_says(warnings[0], {"config.json", "num_experts", "ignored"});
  EXPECT_NO_THROW(Config::parse("{" + std::string(kRequired<Config>) + ",\"x\":1}", "config.json"));  // nobody listens
}

TEST(Config, ToJsonRoundTrips) {
  for (const char* more :
       {"", R"("use_dpg":true,"dpg_rank":5,"mdi_mix":0)", R"("mdi_mix":1.1754944e-38,"bos_token_id":0)",
        R"("use_hem":true,"eos_token_id":[1,2,255],"carry_state":false,"memory_slots":9)",
        R"("mdi_mix":0.30000001192092896,"memory_segment":1,"ffn_dim":1)"}) {
    expect_round_trip(parse(more));
  }
}

TEST(Config, TheFixturesLoadWithoutWarnings) {
  for (const std::string name : {"mdi", "dpg", "hem", "segments"}) {
    std::string warnings;
    const Config config =
        test::config_of<Config>(test::folder_of("upstream/" + name), [&](std::string_view line) { warnings += line; });
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

TEST(Config, NotOneObject) {
  const auto refused = [](const std::string& text) { return error_of([&] { Config::parse(text, "config.json"); }); };
  for (const char* text : {"[]", "1", "\"x\"", "null", " ", "x"}) {
    expect_says(refused(text), {"config.json", "expected a JSON object"});
  }
  expect_says(refused("<html></html>"), {"web page"});
  expect_says(refused("version https://git-lfs.github.com/spec/v1\n"), {"LFS"});
  expect_says(refused("{" + std::string(kRequired<Config>) + "} x"), {"end of input"});
}

TEST(Config, MissingKeys) {
  expect_refused_with({{R"("vocab_size":256,)", "", {"config.json", "vocab_size", "missing"}},
                       {R"("model_dim":64,)", "", {"config.json", "model_dim", "missing"}},
                       {R"("num_layers":2,)", "", {"config.json", "num_layers", "missing"}},
                       {R"(,"num_heads":4)", "", {"config.json", "num_heads", "missing"}}});
}

TEST(Config, WrongTypes) {
  for (const char* bad : {"\"256\"", "256.0", "2.56e2", "null", "[256]", "{}", "true"}) {
    expect_says(refusal_with(":256", ":" + std::string(bad)), {"vocab_size", "expected an integer"});
  }
  expect_refused({{R"("use_hem":1)", {"use_hem", "expected true or false"}},
                  {R"("use_dpg":"yes")", {"use_dpg"}},
                  {R"("carry_state":null)", {"carry_state"}},
                  {R"("mdi_mix":"0.1")", {"mdi_mix", "expected a number"}},
                  {R"("eos_token_id":"</s>")", {"eos_token_id", "expected an integer"}},
                  {R"("eos_token_id":[[1]])", {"eos_token_id"}},
                  {R"("use_sparse":0)", {"use_sparse"}}});
}

TEST(Config, SizesOutOfRange) {
  for (const std::string bad : {"0", "-1", "16777217", "2147483648", "9223372036854775807", "-9223372036854775808"}) {
    for (const auto& [from, to] : {std::pair{":256", ":" + bad}, std::pair{":64", ":" + bad},
                                   std::pair{":2,", ":" + bad + ","}, std::pair{":4}", ":" + bad + "}"}}) {
      expect_says(refusal_with(from, to), {"expected 1 to", bad});
    }
    for (const std::string key : {"ffn_dim", "dpg_rank", "memory_segment", "memory_slots", "mem_dim"}) {
      expect_says(refusal("\"" + key + "\":" + bad), {key, "expected 1 to 16777216", bad});
    }
  }
  for (const char* bad : {"-0.1", "10.5", "1e39", "1e400", "1e-60"}) {
    expect_says(refusal("\"mdi_mix\":" + std::string(bad)), {"mdi_mix"});
  }
  expect_refused({{R"("mdi_mix":NaN)", {}}, {R"("mdi_mix":Infinity)", {}}});
  expect_refused_with({{":256", ":18446744073709551616", {"vocab_size", "64 bits"}},
                       {":2,", ":4097,", {"num_layers", "expected 1 to 4096"}}});
}

TEST(Config, SizesThatDoNotFitTogether) {
  expect_refused_with(
      {{":64", ":16777216", {"2^48 bytes of weights"}},
       {R"(64,"num_layers":2)", R"(32768,"num_layers":4096)", {"2^48"}},
       {R"(64,"num_layers":2)", R"(1024,"num_layers":64,"memory_slots":16777216)", {"2^40 bytes of state"}},
       {R"(256,"model_dim":64)", R"(16777216,"model_dim":1048576)", {"2^48"}},
       {":4", ":3", {"num_heads", "found 3", "divisor of model_dim 64"}},
       {":4", ":128", {"num_heads", "128"}},
       {R"("model_dim":64,"num_layers":2,"num_heads":4)",
        R"("model_dim":66,"num_layers":2,"num_heads":2)",
        {"model_dim", "66", "multiple of 4"}}});
  EXPECT_NO_THROW(Config::parse(
      R"({"model_type":"mmrec","vocab_size":8,"model_dim":66,"num_layers":1,"num_heads":2,"use_dpg":true})", "c"));
}

TEST(Config, TokenIdsOutOfRange) {
  for (const std::string bad : {"-1", "256", "16777216", "4294967295", "9223372036854775807"}) {
    expect_says(refusal("\"bos_token_id\":" + bad), {"bos_token_id", bad, "vocab_size"});
    expect_says(refusal("\"eos_token_id\":[0," + bad + "]"), {"eos_token_id", bad, "vocab_size"});
  }
  std::string many = "0";
  for (int i = 0; i < 1024; ++i) many += ",0";
  expect_says(refusal("\"eos_token_id\":[" + many + "]"), {"more than 1024 ids"});
}

TEST(Config, VariantsThatAreNotSupportedAndWhatIsNotStrictJson) {
  expect_refused({{R"("mem_dim":32)", {"mem_dim", "found 32", "expected model_dim 64"}},
                  {R"("use_sparse":true)", {"use_sparse", "not supported"}},
                  {R"("num_heads":4)", {"duplicate key", "num_heads"}},
                  {R"("dropout":{"a":1,"a":1})", {"duplicate key"}}});
  expect_says(refusal("\"dropout\":" + std::string(1000, '[')), {"nested too deeply"});
}

TEST(Config100m, DefaultsAreThoseOfTheDocument) {
  Strings warnings;
  const auto config = parse<mmrec100m::Config>(
      R"("max_seq_len":1024,"num_memories":1,"dropout":0.1,"mem_dim":256,"ffn_dim":null)", &warnings);
  EXPECT_EQ(config.ffn_dim, 128);
  EXPECT_EQ(config.num_heads, 1);
  EXPECT_EQ(config.mdi_mix, 0.1F);
  EXPECT_EQ(config.expert, Expert::kBoth);
  parse<mmrec100m::Config>(R"("model_dim":32)", &warnings);
  EXPECT_EQ(warnings, (Strings{"config.json: unknown key \"model_dim\" is ignored"}));
}

TEST(Config100m, SurvivesARoundTrip) {
  const auto config =
      parse<mmrec100m::Config>(R"("num_heads":2,"ffn_dim":64,"mdi_mix":0.25,"expert":"code","bos_token_id":3,
                                           "eos_token_id":[1,2],"fusion_method":"concatenate")");
  EXPECT_EQ(config.expert, Expert::kCode);
  EXPECT_EQ(config.stacks(), 1);
  EXPECT_EQ(config.first(), 1);
  expect_round_trip(config);
}

TEST(Config100m, SaysWhatItRefuses) {
  expect_refused<mmrec100m::Config>(
      {{R"("expert":"third")", {"expert", "\"third\"", R"("both", "text" or "code")"}},
       {R"("expert":1)", {"expert", "string"}},
       {R"("fusion_method":"weighted")", {"fusion_method", "\"weighted\"", "concatenate"}},
       {R"("mdi_mix":11)", {"mdi_mix", "11", "0 to 10"}},
       {R"("bos_token_id":112)", {"bos_token_id", "112", "vocab_size 112"}}});
  for (const std::string_view key : {"vocab_size", "expert_dim", "num_layers"}) {
    expect_says(refusal_with<mmrec100m::Config>(key, "other"), {key, "missing"});
  }
  expect_refused_with<mmrec100m::Config>(
      {{":32", ":30", {"expert_dim", "30", "multiple of 4"}}, {":32", ":16777216", {"2^48 bytes of weights"}}});
}

TEST(JaxConfig, DefaultsAndRoundTrip) {
  const auto config = parse<mmrec_jax::Config>("");
  EXPECT_EQ(config.long_mem_len, 512);
  EXPECT_TRUE(config.bank);
  EXPECT_EQ(config.calls, Calls::kPrompt);
  EXPECT_EQ(config.ffn_dim(), 128);
  EXPECT_EQ(config.gate_hidden_dim(), 8);
  expect_round_trip(config);
  const auto other = parse<mmrec_jax::Config>(
      R"("long_mem_len":40,"bank":false,"calls":"whole","bos_token_id":3,"eos_token_id":[1,2])");
  EXPECT_EQ(other.calls, Calls::kWhole);
  expect_round_trip(other);
}

TEST(JaxConfig, KeysWithoutMeaningAreSilentAndUnknownOnesReported) {
  Strings warnings;
  parse<mmrec_jax::Config>(
      R"("ffn_dim":64,"max_length":512,"use_uboo":true,"use_moe":false,"short_mem_len":40,"lambda_p":0.1)", &warnings);
  EXPECT_EQ(warnings, Strings());
  parse<mmrec_jax::Config>(R"("use_hem":true)", &warnings);
  ASSERT_EQ(warnings.size(), 1U);
  expect_says(warnings[0], {"use_hem", "ignored"});
}

TEST(JaxConfig, EveryRefusalNamesKeyFoundAndExpected) {
  expect_refused<mmrec_jax::Config>(
      {{R"("use_moe":true)", {"use_moe", "found true", "expected false", "mixture of experts"}},
       {R"("calls":"all")", {"calls", "\"all\"", "stepwise", "prompt", "whole"}},
       {R"("calls":1)", {"calls"}},
       {R"("bank":1)", {"bank"}},
       {R"("long_mem_len":0)", {"long_mem_len", "0", "1 to"}},
       {R"("bos_token_id":160)", {"bos_token_id", "160"}}});
  expect_refused_with<mmrec_jax::Config>(
      {{"\"model_dim\":32", "\"model_dim\":30", {"model_dim", "30", "multiple of 4"}},
       {"\"num_heads\":2", "\"num_heads\":33", {"num_heads", "33", "32"}},
       {"\"vocab_size\":160,", "", {"vocab_size", "missing"}},
       {"\"model_dim\":32", "\"model_dim\":16777216", {"2^48"}}});
}

}  // namespace
}  // namespace mmrec::models
