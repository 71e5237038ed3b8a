// "quantization_config" of config.json, as compressed-tensors writes it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/tensor.h"
#include "models/files/json.h"

namespace mmrec::models {

inline constexpr char kQuantizationKey[] = "quantization_config";

/// How some matrices of a checkpoint are quantised.
struct QuantScheme {
  kernels::DType code = kernels::DType::kI8;
  std::int64_t group = 0;  // inputs that share a scale; 0: a row, -1: the whole matrix

  bool operator==(const QuantScheme&) const = default;
};
using QuantSchemes = std::vector<QuantScheme>;

/// Matrices that are quantised in one way, not with a scale of the whole matrix.
struct QuantizationGroup {
  QuantScheme scheme;
  std::vector<std::string> modules;  // NAME of each NAME.weight
};

/// Reads the member's value; at least one scheme. Which matrices a scheme is for is not looked at: their tensors tell.
/// Throws std::runtime_error for a scheme that is not supported, and as JsonReader.
QuantSchemes read_quantization(JsonReader& reader);

/// The text of a config.json with "quantization_config" behind its other members, whose text stays. `ignored` are
/// matrices that are not quantised. Throws std::runtime_error naming `name` if it has that member already, and as
/// JsonReader.
std::string with_quantization_config(std::string_view config, const std::string& name,
                                     std::span<const QuantizationGroup> groups, std::span<const std::string> ignored);

}  // namespace mmrec::models
