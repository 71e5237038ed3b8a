#include "models/weights/quantization_config.h"

#include <fmt/format.h>

#include <optional>
#include <stdexcept>

#include "models/files/file.h"
#include "models/files/json.h"
#include "models/files/text.h"

namespace mmrec::models {
namespace {

std::string_view format_of(const QuantScheme& scheme) {
  using enum kernels::DType;
  return scheme.code == kF8 ? "float-quantized" : scheme.code == kI4 ? "pack-quantized" : "int-quantized";
}

/// ["a", "b"]. This text and the one around it come of no nlohmann tree: that allocates as it goes, which ends the
/// process where there is no memory.
std::string json_list(std::span<const std::string> names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + json_string(name);
  return "[" + list + "]";
}

constexpr std::int64_t kMaxGroup = std::int64_t{1} << 24;

std::optional<QuantScheme> read_scheme(JsonReader& reader) {
  if (reader.skips_null()) return std::nullopt;
  std::int64_t bits = 8, group = 0;
  std::string type = "int", strategy;
  reader.begin_object();
  for (std::string key; reader.next_key(key);) {
    if (reader.skips_null()) continue;
    if (key == "num_bits") {
      bits = reader.integer();
    } else if (key == "type") {
      type = reader.string();
    } else if (key == "strategy") {
      strategy = reader.string();
    } else if (key == "group_size") {
      group = reader.integer();
    } else if (key == "symmetric") {
      if (!reader.boolean()) reader.fail("found false, expected true: zero points are not supported");
    } else {
      reader.skip();
    }
  }
  const bool is_float = type == "float";
  if (!(is_float || type == "int") || !(bits == 8 || (bits == 4 && !is_float))) {
    reader.fail(fmt::format("found {} of {} bits, expected int of 4 or 8 bits or float of 8", quote(type), bits));
  }
  using enum kernels::DType;
  const kernels::DType code = is_float ? kF8 : bits == 8 ? kI8 : kI4;
  if (strategy == "tensor") return QuantScheme{code, -1};
  if (strategy == "channel" || (strategy.empty() && group <= 0)) return QuantScheme{code, 0};
  if (strategy != "group" && !strategy.empty()) {
    reader.fail(fmt::format("strategy: found {}, expected \"tensor\", \"channel\" or \"group\"", quote(strategy)));
  }
  if (group <= 0 || group % kernels::kQuantBlock != 0 || group > kMaxGroup) {
    reader.fail(fmt::format("group_size: found {}, expected a multiple of {}", group, kernels::kQuantBlock));
  }
  return QuantScheme{code, group};
}

void read_groups(JsonReader& reader, QuantSchemes& schemes) {
  reader.begin_object();
  for (std::string name; reader.next_key(name);) {
    reader.begin_object();
    for (std::string key; reader.next_key(key);) {
      if (key != "weights") {
        reader.skip();  // targets, which the tensors tell, and activations, which are not quantised here
      } else if (const std::optional<QuantScheme> scheme = read_scheme(reader)) {
        schemes.push_back(*scheme);
      }
    }
  }
}

}  // namespace

QuantSchemes read_quantization(JsonReader& reader) {
  QuantSchemes schemes;
  bool has_method = false;
  reader.begin_object();
  for (std::string key; reader.next_key(key);) {
    if (key == "quant_method") {
      const std::string found = reader.string();
      if (found != "compressed-tensors") {
        reader.fail(fmt::format("found {}, expected \"compressed-tensors\"", quote(found)));
      }
      has_method = true;
    } else if (key == "config_groups") {
      read_groups(reader, schemes);
    } else if (key == "kv_cache_scheme" || key == "sparsity_config") {
      if (reader.skips_null()) continue;
      if (key == "kv_cache_scheme" || reader.skip() != "{}") reader.fail("found a value, expected null");
    } else {
      reader.skip();  // what the tensors tell: the format, what is ignored
    }
  }
  if (!has_method) reader.fail("quant_method is missing");
  if (schemes.empty()) reader.fail("found no weights in config_groups, expected a scheme of them");
  return schemes;
}

std::string with_quantization_config(std::string_view config, const std::string& name,
                                     std::span<const QuantizationGroup> groups, std::span<const std::string> ignored) {
  require_json_object(config, name);
  JsonReader reader(config, name);
  reader.begin_object();
  for (std::string key; reader.next_key(key); reader.skip()) {
    if (key != kQuantizationKey) continue;
    throw std::runtime_error(fmt::format("{}: has {}: the model is quantised already", name, kQuantizationKey));
  }
  std::string by_name;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto& [scheme, modules] = groups[i];
    by_name += fmt::format(
        R"({}
      "group_{}": {{
        "targets": {},
        "weights": {{
          "num_bits": {},
          "type": "{}",
          "strategy": "{}",
          "group_size": {},
          "symmetric": true,
          "dynamic": false
        }},
        "input_activations": null,
        "output_activations": null,
        "format": "{}"
      }})",
        i == 0 ? "" : ",", i, json_list(modules), bits_of(scheme.code),
        scheme.code == kernels::DType::kF8 ? "float" : "int", scheme.group == 0 ? "channel" : "group",
        scheme.group == 0 ? "null" : std::to_string(scheme.group), format_of(scheme));
  }
  const std::size_t last = config.find_last_not_of(" \t\r\n", config.rfind('}') - 1);
  return fmt::format(
      R"({},
  "{}": {{
    "quant_method": "compressed-tensors",
    "format": "{}",
    "quantization_status": "compressed",
    "config_groups": {{{}
    }},
    "ignore": {},
    "kv_cache_scheme": null
  }}
}}
)",
      config.substr(0, last + 1), kQuantizationKey,
      groups.size() == 1 ? format_of(groups.front().scheme) : "mixed-precision", by_name, json_list(ignored));
}

}  // namespace mmrec::models
