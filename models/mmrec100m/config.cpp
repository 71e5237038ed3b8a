#include "models/mmrec100m/config.h"

#include <fmt/format.h>

#include <array>

#include "models/files/checked.h"
#include "models/files/file.h"
#include "models/files/json.h"
#include "models/files/text.h"

namespace mmrec::models {
namespace {

/// mem_dim is the trainers' own here, whatever the width: the memory is always empty.
constexpr std::array<std::string_view, 4> kIgnoredKeys = {"max_seq_len", "num_memories", "dropout", "mem_dim"};

void read_expert(JsonReader& json, Expert& to) {
  const std::string found = json.string();
  for (std::size_t i = 0; i < kExpertNames.size(); ++i) {
    if (kExpertNames[i] != found) continue;
    to = static_cast<Expert>(i);
    return;
  }
  json.fail(fmt::format("found {}, expected \"both\", \"text\" or \"code\"", quote(found)));
}

void check(const Config100m& c, const ConfigReader& reader) {
  reader.require(c.vocab_size != 0, "vocab_size");
  reader.require(c.expert_dim != 0, "expert_dim");
  reader.require(c.num_layers != 0, "num_layers");
  if (c.expert_dim % 4 != 0) {
    reader.fail(
        fmt::format("expert_dim: found {}, expected a multiple of 4 (the width of the decay gate is "
                    "expert_dim / 4)",
                    c.expert_dim));
  }
  reader.check_ids(c.vocab_size);
  const auto size = [](std::int64_t n) { return CheckedSize(static_cast<std::uint64_t>(n)); };
  const CheckedSize v = size(c.vocab_size), e = size(c.expert_dim), f = size(c.ffn_dim), layers = size(c.num_layers);
  // Of a block: nine matrices of E by E, the decay gate's four, which make one more, and the FFN; vectors are fewer
  // than another 32 rows.
  const CheckedSize block = e * e * 10 + e * f * 2 + (e + f) * 32;
  const CheckedSize weights = (v * e * 3 + layers * block * 2 + e * e * 4 + e * 8) * 4;
  if (!weights.at_most(kMaxWeightBytes)) reader.fail("these sizes make more than 2^48 bytes of weights");
  if (!(layers * e * 32 + v * 4).at_most(kMaxStateBytes)) {
    reader.fail("num_layers and expert_dim make more than 2^40 bytes of state per sequence");
  }
}

}  // namespace

Config Config100m::stack() const {
  constexpr std::int64_t kNever = std::int64_t{1} << 56;
  constexpr std::int64_t kHeadDim = 64;
  Config config;
  config.vocab_size = vocab_size;
  config.model_dim = expert_dim;
  config.num_layers = num_layers;
  config.num_heads = expert_dim % kHeadDim == 0 ? expert_dim / kHeadDim : 1;  // a shape that all kernels take
  config.ffn_dim = ffn_dim;
  config.mdi_mix = mdi_mix;
  config.memory_segment = kNever;
  config.memory_slots = 0;
  return config;
}

Config100m parse_config_100m(std::string_view text, const std::string& name, const WarningSink& warn) {
  require_json_object(text, name);
  ConfigReader reader(text, name, warn);
  Config100m c;
  reader.read_members("mmrec100m", kIgnoredKeys, [&](std::string_view key) {
    if (key == "vocab_size") return reader.read(key, c.vocab_size), true;
    if (key == "expert_dim") return reader.read(key, c.expert_dim), true;
    if (key == "num_layers") return reader.read(key, c.num_layers), true;
    if (key == "num_heads") return reader.read(key, c.num_heads), true;
    if (key == "ffn_dim") return reader.is_null() ? void() : reader.read(key, c.ffn_dim), true;
    if (key == "mdi_mix") return reader.read(key, c.mdi_mix), true;
    if (key == "expert") return read_expert(reader.json(), c.expert), true;
    if (key != "fusion_method") return false;
    if (const std::string method = reader.json().string(); method != "concatenate") {
      reader.json().fail(fmt::format("found {}, expected \"concatenate\"", quote(method)));
    }
    return true;
  });
  c.ids = reader.ids();
  if (c.ffn_dim == 0) c.ffn_dim = 4 * c.expert_dim;
  check(c, reader);
  return c;
}

std::string to_json(const Config100m& c) {
  return fmt::format(
             "{{\n  \"model_type\": \"mmrec100m\",\n  \"vocab_size\": {},\n  \"expert_dim\": {},\n  \"num_layers\": "
             "{},\n"
             "  \"num_heads\": {},\n  \"ffn_dim\": {},\n  \"mdi_mix\": {},\n  \"expert\": \"{}\"",
             c.vocab_size, c.expert_dim, c.num_layers, c.num_heads, c.ffn_dim, c.mdi_mix,
             kExpertNames[static_cast<std::size_t>(c.expert)]) +
         to_json(c.ids) + "\n}\n";
}

}  // namespace mmrec::models
