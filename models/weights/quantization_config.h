// "quantization_config" of config.json, as compressed-tensors writes it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mmrec::models {

inline constexpr char kQuantizationKey[] = "quantization_config";

/// Matrices that are quantised in one way.
struct QuantizationGroup {
  int bits = 8;
  bool is_float = false;
  std::int64_t group = 0;            // inputs that share a scale; 0: all of a row
  std::vector<std::string> modules;  // NAME of each NAME.weight
};

/// The text of a config.json with "quantization_config" behind its other members, whose text stays. `ignored` are
/// matrices that are not quantised. Throws std::runtime_error naming `name` if it has that member already, and as
/// JsonReader.
std::string with_quantization_config(std::string_view config, const std::string& name,
                                     std::span<const QuantizationGroup> groups, std::span<const std::string> ignored);

}  // namespace mmrec::models
