// The files of a model: JSON, configurations, headers of safetensors and indexes of shards.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "models/files/checkpoint.h"
#include "models/files/json.h"
#include "models/mmrec/config.h"
#include "models/mmrec100m/config.h"
#include "models/mmrec_jax/config.h"
#include "tests/fuzz/harness.h"

namespace {

namespace models = mmrec::models;
using mmrec::fuzz::accepted;
using mmrec::fuzz::require;
using models::JsonReader;

/// What nlohmann says of a text.
struct Verdict {
  bool is_json = false;
  bool overflows = false;     // has a number beyond double, which nlohmann refuses although the grammar does not
  bool breaks_rules = false;  // the reader's own
};
Verdict verdict_of(std::string_view text) {
  Verdict verdict;
  std::vector<std::set<std::string>> keys;  // of the objects that are open; an array has none
  const auto on_event = [&](int, nlohmann::json::parse_event_t event, const nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      keys.emplace_back();
      verdict.breaks_rules |= keys.size() > JsonReader::kMaxDepth;
    } else if (event == Event::object_end || event == Event::array_end) {
      keys.pop_back();
    } else if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      verdict.breaks_rules |= !keys.back().insert(key).second || key.size() > 4096 || keys.back().size() > 1000;
    }
    return true;
  };
  try {
    verdict.is_json = !nlohmann::json::parse(text, on_event).is_discarded();
  } catch (const nlohmann::json::exception& error) {
    constexpr int kNumberOverflow = 406;
    verdict.overflows = error.id == kNumberOverflow;
  }
  return verdict;
}

/// Reads a value by its kind into a tree.
nlohmann::json read(JsonReader& reader) {
  std::string key;
  switch (reader.peek()) {
    case JsonReader::Kind::kObject: {
      nlohmann::json value = nlohmann::json::object();
      reader.begin_object();
      while (reader.next_key(key)) {
        const std::string name(key);
        value[name] = read(reader);
      }
      return value;
    }
    case JsonReader::Kind::kArray: {
      nlohmann::json value = nlohmann::json::array();
      reader.begin_array();
      while (reader.next_element()) value.push_back(read(reader));
      return value;
    }
    case JsonReader::Kind::kString:
      return reader.string(std::size_t{1} << 20);
    case JsonReader::Kind::kNumber:
      return reader.integer();
    case JsonReader::Kind::kBool:
      return reader.boolean();
    case JsonReader::Kind::kNull:
      reader.skips_null();
      return nullptr;
  }
  std::abort();
}

/// Any config.json is refused, or its `sizes` are from 1 to `most`, what `holds` says holds, and it survives a round
/// trip.
template <class Parse, class Sizes, class Holds>
void check_config(std::string_view input, std::int64_t most, const Parse& parse, const Sizes& sizes,
                  const Holds& holds) {
  const auto config = accepted([&] { return parse(input, "input", mmrec::fuzz::require_line); });
  if (!config) return;
  for (const std::int64_t n : sizes(*config)) require(n >= 1 && n <= most);
  for (const int id : config->ids.eos) require(id >= 0 && id < config->vocab_size);
  require(holds(*config));
  require(parse(to_json(*config), "again", {}) == *config);
}

using Sizes = std::vector<std::int64_t>;

}  // namespace

// The strict JSON reader against nlohmann's: what it accepts is JSON with the same numbers, and it refuses JSON only
// for the reasons it documents (duplicate keys, NUL, a byte order mark, deep nesting, long keys).
MMREC_FUZZ(json) {
  const bool is_accepted = mmrec::fuzz::takes([&] { JsonReader(input, "input", 1000).skip(); });
  const Verdict verdict = verdict_of(input);
  require(!is_accepted || verdict.is_json || verdict.overflows);
  const bool has_mark = input.starts_with("\xef\xbb\xbf");
  const bool has_nul = input.find('\0') != std::string_view::npos;
  require(is_accepted || !verdict.is_json || verdict.breaks_rules || has_mark || has_nul);
  const auto tree = accepted([&] {  // the same values, where all the numbers are integers
    JsonReader reader(input, "input", 1000);
    return read(reader);
  });
  require(!tree || *tree == nlohmann::json::parse(input));
}

MMREC_FUZZ(config) {
  check_config(
      input, std::int64_t{1} << 26, models::Config::parse,
      [](const models::Config& config) {
        return Sizes{config.vocab_size, config.model_dim, config.num_layers,     config.num_heads,
                     config.ffn_dim,    config.dpg_rank,  config.memory_segment, config.memory_slots};
      },
      [](const models::Config& config) {
        return config.model_dim % config.num_heads == 0 && (config.use_dpg || config.model_dim % 4 == 0) &&
               config.mdi_mix >= 0.0F && config.mdi_mix <= 10.0F;
      });
}

MMREC_FUZZ(config_100m) {
  check_config(
      input, std::int64_t{1} << 26, models::mmrec100m::Config::parse,
      [](const models::mmrec100m::Config& config) {
        return Sizes{config.vocab_size, config.expert_dim, config.num_layers, config.num_heads, config.ffn_dim};
      },
      [](const models::mmrec100m::Config& config) {
        return config.expert_dim % 4 == 0 && config.mdi_mix >= 0.0F && config.mdi_mix <= 10.0F &&
               (config.stacks() == 1 || config.stacks() == 2) && config.expert_dim % config.stack().num_heads == 0;
      });
}

MMREC_FUZZ(jax_config) {
  check_config(
      input, std::int64_t{1} << 24, models::mmrec_jax::Config::parse,
      [](const models::mmrec_jax::Config& config) {
        return Sizes{config.vocab_size, config.model_dim, config.num_layers, config.num_heads, config.long_mem_len};
      },
      [](const models::mmrec_jax::Config& config) {
        return config.model_dim % 4 == 0 && config.num_heads <= config.model_dim;
      });
}

// Any header is refused, or describes tensors that cover the data exactly and agree with what nlohmann's JSON reads.
// The first byte is the number of bytes of data.
MMREC_FUZZ(safetensors_header) {
  if (input.empty()) return;
  const std::uint64_t data_bytes = mmrec::fuzz::take_byte(input);
  const auto tensors = accepted([&] { return models::parse_safetensors_header(input, data_bytes, "input"); });
  if (!tensors) return;
  const auto tree = nlohmann::json::parse(input);
  require(tensors->size() == tree.size() - tree.count("__metadata__"));
  std::uint64_t end = 0;
  for (const auto& tensor : *tensors) {
    require(tensor.begin == end && tensor.end >= tensor.begin);
    end = tensor.end;
    std::uint64_t bytes = 1;
    for (const std::int64_t extent : tensor.shape) {
      require(extent >= 0);
      require(!__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes));
    }
    require(!__builtin_mul_overflow(bytes, mmrec::kernels::size_of(tensor.dtype), &bytes) && bytes == tensor.bytes());
    require(!tensor.name.empty() && tensor.name.size() <= 512 && tensor.shape.size() <= 8);
    const auto& entry = tree.at(tensor.name);
    require(entry.at("shape") == tensor.shape);
    require(entry.at("data_offsets").at(0) == tensor.begin && entry.at("data_offsets").at(1) == tensor.end);
  }
  require(end == data_bytes);
}

// Any index is refused, or names plain files of the folder only, each of them for at least one tensor.
MMREC_FUZZ(shard_index) {
  const auto index = accepted([&] { return models::parse_shard_index(input, "input"); });
  if (!index) return;
  std::vector<bool> used(index->shards.size());
  for (const auto& [tensor, shard] : index->shard_of) {
    require(shard < index->shards.size());
    used[shard] = true;
  }
  const std::filesystem::path folder = "/folder";
  for (std::size_t i = 0; i < index->shards.size(); ++i) {
    const std::string& shard = index->shards[i];
    const auto path = (folder / shard).lexically_normal();
    require(used[i] && path.parent_path() == folder && path.filename() == shard);
    require(shard.find('\0') == std::string::npos);
  }
}
