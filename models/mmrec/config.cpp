// config.json: every key typed, every value bounded, so that no later size computation can overflow.
#include "models/mmrec/config.h"

#include <fmt/format.h>

#include <array>

#include "models/files/checked.h"
#include "models/files/file.h"
#include "models/files/json.h"
#include "models/files/text.h"

namespace mmrec::models {
namespace {

constexpr std::uint64_t kMaxFileBytes = std::uint64_t{1} << 20;

/// Keys of the public constructor without a meaning for inference.
constexpr std::array<std::string_view, 6> kIgnoredKeys = {"max_seq_len", "pe_dim",   "num_memories",
                                                          "use_uboo",    "lambda_P", "dropout"};

/// f(key, member) for every key that has a value always, in the order of to_json.
template <class AnyConfig, class F>
void for_each_key(AnyConfig& config, const F& f) {
  f("vocab_size", config.vocab_size);
  f("model_dim", config.model_dim);
  f("num_layers", config.num_layers);
  f("num_heads", config.num_heads);
  f("ffn_dim", config.ffn_dim);
  f("use_hem", config.use_hem);
  f("use_dpg", config.use_dpg);
  f("dpg_rank", config.dpg_rank);
  f("mdi_mix", config.mdi_mix);
  f("memory_segment", config.memory_segment);
  f("memory_slots", config.memory_slots);
  f("carry_state", config.carry_state);
}

/// Reads the members of one config.json; what spans several members is checked by finish().
class Parser {
 public:
  Parser(std::string_view text, const std::string& name, const WarningSink& warn) : reader_(text, name, warn) {}

  Config parse() {
    reader_.read_members("mmrec", kIgnoredKeys, [this](std::string_view key) { return member(key); });
    config_.ids = reader_.ids();
    finish();
    return config_;
  }

 private:
  bool member(std::string_view key) {
    if (key == "ffn_dim" && reader_.is_null()) return true;
    bool is_known = false;
    for_each_key(config_, [&](std::string_view name, auto& value) {
      if (name == key) is_known = true, reader_.read(key, value);
    });
    if (is_known) return true;
    if (key == "mem_dim") {
      if (!reader_.is_null()) reader_.read(key, mem_dim_);
      return true;
    }
    if (key != "use_sparse") return false;
    if (reader_.json().boolean()) {
      reader_.json().fail("found true, expected false: the sparse variant of the model is not supported");
    }
    return true;
  }

  void finish() {
    const auto require = [&](bool present, const char* key) { reader_.require(present, key); };
    require(config_.vocab_size != 0, "vocab_size");
    require(config_.model_dim != 0, "model_dim");
    require(config_.num_layers != 0, "num_layers");
    require(config_.num_heads != 0, "num_heads");
    if (config_.model_dim % config_.num_heads != 0) {
      fail(
          fmt::format("num_heads: found {}, expected a divisor of model_dim {}", config_.num_heads, config_.model_dim));
    }
    if (!config_.use_dpg && config_.model_dim % 4 != 0) {
      fail(fmt::format("model_dim: found {}, expected a multiple of 4 (the width of the decay gate is model_dim / 4)",
                       config_.model_dim));
    }
    if (mem_dim_ != 0 && mem_dim_ != config_.model_dim) {
      fail(
          fmt::format("mem_dim: found {}, expected model_dim {}: the model's equations add memory values to its hidden "
                      "state, so a memory of another width is not supported",
                      mem_dim_, config_.model_dim));
    }
    if (config_.ffn_dim == 0) config_.ffn_dim = 4 * config_.model_dim;
    reader_.check_ids(config_.vocab_size);
    check_totals();
  }

  void check_totals() const {
    const auto size = [](std::int64_t n) { return CheckedSize(static_cast<std::uint64_t>(n)); };
    const CheckedSize v = size(config_.vocab_size), d = size(config_.model_dim), f = size(config_.ffn_dim);
    const CheckedSize r = size(config_.use_dpg ? config_.dpg_rank : config_.gate_hidden_dim());
    // Matrices of a block: 4 projections, 3 of the gates, 2 of the memory, up to 4 of the decay gate, 2 of the FFN;
    // vectors are fewer than another 32 rows.
    const CheckedSize block = d * d * 9 + d * r * 4 + d * f * 2 + (d + f + r) * 32;
    const CheckedSize weights = (v * d * 2 + size(config_.num_layers) * block + d) * 4;
    if (!weights.at_most(kMaxWeightBytes)) fail("these sizes make more than 2^48 bytes of weights");
    // Of a layer: the hidden state, the memory ring, the running sum in double; and the logits.
    const CheckedSize state = size(config_.num_layers) * d * (size(config_.memory_slots) * 4 + 12) + v * 4;
    if (!state.at_most(kMaxStateBytes)) {
      fail("num_layers, model_dim and memory_slots make more than 2^40 bytes of state per sequence");
    }
  }

  [[noreturn]] void fail(std::string_view message) const { reader_.fail(message); }

  ConfigReader reader_;
  Config config_;
  std::int64_t mem_dim_ = 0;
};

}  // namespace

Config load_config(const std::filesystem::path& path, const WarningSink& warn) {
  return parse_config(read_text(path, kMaxFileBytes), path.string(), warn);
}

Config parse_config(std::string_view text, const std::string& name, const WarningSink& warn) {
  require_json_object(text, name);
  return Parser(text, name, warn).parse();
}

std::string to_json(const Config& config) {
  std::string json = "{\n  \"model_type\": \"mmrec\"";
  for_each_key(config, [&](const char* key, const auto& value) { json += fmt::format(",\n  \"{}\": {}", key, value); });
  json += to_json(config.ids);
  return json + "\n}\n";
}

}  // namespace mmrec::models
