// MM-Rec's public state dict, as the table of fields implies it.
#include "models/mmrec/weight_table.h"

#include <fmt/format.h>

#include <cstddef>
#include <iterator>

namespace mmrec::models {
namespace {

using Kind = Field::Kind;

static_assert(fields_visited([](const auto& visit) { visit_layer(visit); }) == sizeof(LayerFields<char, char>),
              "visit_layer reaches every field");

/// The setting a missing or unexpected name may be owed to.
std::string hint(const Config& config, std::string_view name) {
  const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
  if (has("W_fused") || has(".W_k.") || has(".W_v.") || has(".W_z.") || (has(".W_q.") && !has("multi_mem"))) {
    return fmt::format("; config.json has use_hem {}", config.use_hem);
  }
  if (has("W_gamma_") || has("mdi.W_gamma") || has("mdi.W_context")) {
    return fmt::format("; config.json has use_dpg {}", config.use_dpg);
  }
  if (has("blocks.")) return fmt::format("; config.json has num_layers {}", config.num_layers);
  return {};
}

}  // namespace

void add_block_specs(const std::string& prefix, const Sizes& sizes, std::int64_t layers,
                     std::vector<TensorSpec>& specs) {
  Sizes with_mdi = sizes;  // the MDI gate's are with DPG too, unused
  with_mdi.low_rank = false;
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    const std::ptrdiff_t first = std::ssize(specs);
    const std::string of_block = prefix + "blocks." + std::to_string(layer) + ".";
    // Norms first: every variant has them, so that a missing one means fewer blocks and nothing else.
    for (const bool norms : {true, false}) {
      const auto add = [&](const Field& field) {
        if ((field.kind == Kind::kNorm) == norms) add_specs(field, sizes, with_mdi, specs, first);
      };
      visit_layer(at_prefix(add, of_block));
    }
  }
}

std::vector<TensorSpec> tensor_specs(const Config& config) {
  const Sizes sizes = sizes_of(config);
  std::vector<TensorSpec> specs;
  const auto add = [&](const Field& field) { add_specs(field, sizes, sizes, specs, std::ssize(specs)); };
  add({Kind::kTable, table::kEmbedding});
  add_block_specs("", sizes, config.num_layers, specs);
  add({Kind::kNorm, table::kNorm});
  add({Kind::kTable, table::kHead});
  specs.back().use = TensorSpec::Use::kOptional;
  return specs;
}

bool is_training_only(std::string_view name) {
  return name.find("blocks.") != std::string_view::npos && name.find(".mdi.W_planning_") != std::string_view::npos;
}

TensorRules tensor_rules(const Config& config) {
  return {.is_training_only = [](auto name) { return name.starts_with("blocks.") && is_training_only(name); },
          .training_names = kTrainingNames,
          .hint = [config](auto name) { return hint(config, name); }};
}

}  // namespace mmrec::models
