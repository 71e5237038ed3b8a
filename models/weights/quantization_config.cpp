#include "models/weights/quantization_config.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "models/files/file.h"
#include "models/files/json.h"

namespace mmrec::models {
namespace {

using Json = nlohmann::ordered_json;

std::string_view format_of(const QuantizationGroup& group) {
  return group.is_float ? "float-quantized" : group.bits == 4 ? "pack-quantized" : "int-quantized";
}

}  // namespace

std::string with_quantization_config(std::string_view config, const std::string& name,
                                     std::span<const QuantizationGroup> groups, std::span<const std::string> ignored) {
  require_json_object(config, name);
  if (parse_json(config, name).contains(kQuantizationKey)) {
    throw std::runtime_error(fmt::format("{}: has {}: the model is quantised already", name, kQuantizationKey));
  }
  Json by_name = Json::object();
  for (const QuantizationGroup& group : groups) {
    by_name[fmt::format("group_{}", by_name.size())] = {
        {"targets", group.modules},
        {"weights",
         {{"num_bits", group.bits},
          {"type", group.is_float ? "float" : "int"},
          {"strategy", group.group == 0 ? "channel" : "group"},
          {"group_size", group.group == 0 ? Json(nullptr) : Json(group.group)},
          {"symmetric", true},
          {"dynamic", false}}},
        {"input_activations", nullptr},
        {"output_activations", nullptr},
        {"format", format_of(group)}};
  }
  const Json added = {{kQuantizationKey,
                       {{"quant_method", "compressed-tensors"},
                        {"format", groups.size() == 1 ? format_of(groups.front()) : "mixed-precision"},
                        {"quantization_status", "compressed"},
                        {"config_groups", std::move(by_name)},
                        {"ignore", ignored},
                        {"kv_cache_scheme", nullptr}}}};
  const std::size_t last = config.find_last_not_of(" \t\r\n", config.rfind('}') - 1);
  return fmt::format("{},{}\n", config.substr(0, last + 1), added.dump(2).substr(1));
}

}  // namespace mmrec::models
