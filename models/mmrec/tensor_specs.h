// The tensors of the public state dict for a configuration: what a checkpoint must hold, may hold, and in which shape.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/mmrec/config.h"

namespace mmrec::models {

/// One tensor a checkpoint of a configuration may hold.
struct TensorSpec {
  enum class Use : std::uint8_t {
    kRequired,
    kOptional,  // used if present (a head that is not tied)
    kUnused,    // in the public state dict, without a part in the model's equations
  };
  std::string name;
  std::vector<std::int64_t> shape;
  Use use = Use::kRequired;
  bool may_have_more_rows = false;  // W_fused: shape[0] is the least; rows beyond are unused
};

/// In the order of the forward pass.
std::vector<TensorSpec> tensor_specs(const Config& config);

/// True for tensors that only training uses (mdi.W_planning_*): ignored, whatever their shape.
bool is_training_only(std::string_view name);

}  // namespace mmrec::models
