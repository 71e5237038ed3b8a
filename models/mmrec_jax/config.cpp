// config.json of mmrec-jax: every key typed, every value bounded, so that no later size computation can overflow.
#include "models/mmrec_jax/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "models/files/checked.h"
#include "models/files/file.h"
#include "models/files/json.h"
#include "models/files/text.h"

namespace mmrec::models::jax {
namespace {

/// Keys of the public configurations that its equations do not use.
constexpr std::array<std::string_view, 8> kIgnoredKeys = {"ffn_dim",  "max_length", "max_seq_len", "short_mem_len",
                                                          "use_uboo", "lambda_p",   "lambda_P",    "dropout"};

/// f(key, member) for every size, in the order of to_json.
template <class AnyConfig, class F>
void for_each_size(AnyConfig& config, const F& f) {
  f("vocab_size", config.vocab_size);
  f("model_dim", config.model_dim);
  f("num_layers", config.num_layers);
  f("num_heads", config.num_heads);
  f("long_mem_len", config.long_mem_len);
}

class Parser {
 public:
  Parser(std::string_view text, const std::string& name, const WarningSink& warn) : reader_(text, name, warn) {}

  Config parse() {
    reader_.read_members("mmrec-jax", kIgnoredKeys, [this](std::string_view key) { return member(key); });
    config_.ids = reader_.ids();
    finish();
    return config_;
  }

 private:
  bool member(std::string_view key) {
    bool is_known = false;
    for_each_size(config_, [&](std::string_view name, auto& value) {
      if (name == key) is_known = true, reader_.read(key, value);
    });
    if (is_known) return true;
    if (key == "bank") {
      reader_.read(key, config_.bank);
      return true;
    }
    if (key == "calls") {
      calls();
      return true;
    }
    if (key != "use_moe") return false;
    if (reader_.json().boolean()) {
      reader_.json().fail(
          "found true, expected false: a mixture of experts whose tokens of a call share slots, those of other "
          "sequences too, is not supported");
    }
    return true;
  }

  void calls() {
    const std::string found = reader_.json().string();
    const auto name = std::find(kCallsNames.begin(), kCallsNames.end(), found);
    if (name != kCallsNames.end()) {
      config_.calls = static_cast<Calls>(name - kCallsNames.begin());
      return;
    }
    reader_.json().fail(fmt::format(R"(found {}, expected "stepwise", "prompt" or "whole")", quote(found)));
  }

  void finish() const {
    reader_.require(config_.vocab_size != 0, "vocab_size");
    reader_.require(config_.model_dim != 0, "model_dim");
    reader_.require(config_.num_layers != 0, "num_layers");
    reader_.require(config_.num_heads != 0, "num_heads");
    if (config_.num_heads > config_.model_dim) {
      reader_.fail(
          fmt::format("num_heads: found {}, expected at most model_dim {}", config_.num_heads, config_.model_dim));
    }
    if (config_.model_dim % 4 != 0) {
      reader_.fail(
          fmt::format("model_dim: found {}, expected a multiple of 4 (the width of the decay gate is model_dim / 4)",
                      config_.model_dim));
    }
    reader_.check_ids(config_.vocab_size);
    const auto size = [](std::int64_t n) { return CheckedSize(static_cast<std::uint64_t>(n)); };
    const CheckedSize v = size(config_.vocab_size), d = size(config_.model_dim);
    // Matrices of a block: 4 projections, 2 of the gate, 1 of the decay, 2 of attention, 8 of the FFN; vectors are
    // fewer than another 32 rows.
    const CheckedSize weights = (v * d + size(config_.num_layers) * (d * d * 17 + d * 32) + d) * 4;
    if (!weights.at_most(kMaxWeightBytes)) reader_.fail("these sizes make more than 2^48 bytes of weights");
    const CheckedSize state = ((size(config_.num_layers) + size(config_.long_mem_len)) * d + v) * 4;
    if (!state.at_most(kMaxStateBytes)) {
      reader_.fail("num_layers, long_mem_len and model_dim make more than 2^40 bytes of state per sequence");
    }
  }

  ConfigReader reader_;
  Config config_;
};

}  // namespace

Config parse_config(std::string_view text, const std::string& name, const WarningSink& warn) {
  require_json_object(text, name);
  return Parser(text, name, warn).parse();
}

std::string to_json(const Config& config) {
  std::string json = "{\n  \"model_type\": \"mmrec-jax\"";
  for_each_size(config,
                [&](const char* key, const auto& value) { json += fmt::format(",\n  \"{}\": {}", key, value); });
  json += fmt::format(",\n  \"bank\": {}", config.bank);
  json += fmt::format(",\n  \"calls\": {}", quote(kCallsNames[static_cast<std::size_t>(config.calls)]));
  json += to_json(config.ids);
  return json + "\n}\n";
}

}  // namespace mmrec::models::jax
