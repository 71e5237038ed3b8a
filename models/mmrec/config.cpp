// config.json: every key typed, every value bounded, so that no later size computation can overflow.
#include "models/mmrec/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <stdexcept>

#include "models/files/checked.h"
#include "models/files/file.h"
#include "models/files/json.h"
#include "models/files/text.h"

namespace mmrec::models {
namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;
constexpr std::int64_t kMaxLayers = std::int64_t{1} << 12;
constexpr std::size_t kMaxEosIds = 1024;
constexpr float kMaxMdiMix = 10.0F;
constexpr std::uint64_t kMaxWeightBytes = std::uint64_t{1} << 48;
constexpr std::uint64_t kMaxStateBytes = std::uint64_t{1} << 40;
constexpr std::uint64_t kMaxFileBytes = std::uint64_t{1} << 20;

/// Keys of the public constructor without a meaning for inference, and those that common tools add to every
/// config.json.
constexpr std::array<std::string_view, 11> kIgnoredKeys = {
    "max_seq_len", "pe_dim", "num_memories",         "use_uboo",     "lambda_P", "dropout", "architectures",
    "torch_dtype", "dtype",  "transformers_version", "_name_or_path"};

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
  Parser(std::string_view text, const std::string& name, const WarningSink& warn)
      : name_(name), reader_(text, name, 1024), warn_(warn) {}

  Config parse() {
    reader_.begin_object();
    std::string key;
    while (reader_.next_key(key)) member(key);
    finish();
    return config_;
  }

 private:
  void member(std::string_view key) {
    if (key == "model_type") return model_type();
    if (key == "ffn_dim" && is_null()) return;
    bool is_known = false;
    for_each_key(config_, [&](std::string_view name, auto& value) {
      if (name == key) is_known = true, read(key, value);
    });
    if (is_known) return;
    if (key == "bos_token_id") return bos_token_id();
    if (key == "eos_token_id") return eos_token_id();
    if (key == "mem_dim") return is_null() ? void() : read(key, mem_dim_);
    if (key == "use_sparse") return use_sparse();
    if (std::find(kIgnoredKeys.begin(), kIgnoredKeys.end(), key) == kIgnoredKeys.end() && warn_) {
      warn_(fmt::format("{}: unknown key {} is ignored", name_, quote(key)));
    }
    reader_.skip();
  }

  /// Reads past a null: the public class writes None for "the default".
  bool is_null() {
    if (reader_.peek() != JsonReader::Kind::kNull) return false;
    reader_.null();
    return true;
  }

  void model_type() {
    const std::string type = reader_.string();
    if (type != "mmrec") reader_.fail(fmt::format("found {}, expected \"mmrec\"", quote(type)));
    has_model_type_ = true;
  }

  void read(std::string_view key, std::int64_t& to) {
    const std::int64_t limit = key == "num_layers" ? kMaxLayers : kMaxSize;
    to = reader_.integer();
    if (to < 1 || to > limit) reader_.fail(fmt::format("found {}, expected 1 to {}", to, limit));
  }
  void read(std::string_view /*key*/, bool& to) { to = reader_.boolean(); }
  void read(std::string_view /*mdi_mix*/, float& to) {
    to = reader_.real();
    if (!(to >= 0.0F && to <= kMaxMdiMix)) reader_.fail(fmt::format("found {}, expected 0 to {}", to, kMaxMdiMix));
  }

  int token_id() {
    const std::int64_t id = reader_.integer();
    if (id < 0 || id >= kMaxSize) reader_.fail(fmt::format("found {}, expected a token id below vocab_size", id));
    return static_cast<int>(id);
  }

  void bos_token_id() {
    if (!is_null()) config_.bos_token_id = token_id();
  }

  void eos_token_id() {
    if (is_null()) return;
    if (reader_.peek() != JsonReader::Kind::kArray) {
      config_.eos_token_ids.push_back(token_id());
      return;
    }
    reader_.begin_array();
    while (reader_.next_element()) {
      config_.eos_token_ids.push_back(token_id());
      if (config_.eos_token_ids.size() > kMaxEosIds) reader_.fail(fmt::format("more than {} ids", kMaxEosIds));
    }
  }

  void use_sparse() {
    if (reader_.boolean()) {
      reader_.fail("found true, expected false: the sparse variant of the model is not supported");
    }
  }

  void finish() {
    const auto require = [&](bool present, const char* key) {
      if (!present) fail(fmt::format("{} is missing", key));
    };
    require(has_model_type_, "model_type");
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
    check_ids();
    check_totals();
  }

  void check_ids() const {
    const auto check = [&](int id, const char* key) {
      if (id >= config_.vocab_size) {
        fail(fmt::format("{}: found {}, expected a token id below vocab_size {}", key, id, config_.vocab_size));
      }
    };
    if (config_.bos_token_id) check(*config_.bos_token_id, "bos_token_id");
    for (const int id : config_.eos_token_ids) check(id, "eos_token_id");
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

  [[noreturn]] void fail(std::string_view message) const {
    throw std::runtime_error(fmt::format("{}: {}", name_, message));
  }

  std::string name_;
  JsonReader reader_;
  const WarningSink& warn_;
  Config config_;
  std::int64_t mem_dim_ = 0;
  bool has_model_type_ = false;
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
  if (config.bos_token_id) json += fmt::format(",\n  \"bos_token_id\": {}", *config.bos_token_id);
  if (!config.eos_token_ids.empty()) {
    const std::vector<std::int64_t> eos(config.eos_token_ids.begin(), config.eos_token_ids.end());
    json += fmt::format(",\n  \"eos_token_id\": {}", list(eos));
  }
  return json + "\n}\n";
}

}  // namespace mmrec::models
