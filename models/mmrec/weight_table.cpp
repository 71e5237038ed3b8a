// The public state dict, as the table of fields implies it.
#include "models/mmrec/weight_table.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

namespace mmrec::models {
namespace {

using Kind = Field::Kind;
using Use = TensorSpec::Use;

constexpr std::size_t fields_visited() {
  std::size_t count = 0;
  visit_layer([&](const Field& /*field*/) { ++count; });
  return count;
}
static_assert(fields_visited() == sizeof(LayerFields<char, char>), "visit_layer reaches every field");

class Specs {
 public:
  explicit Specs(const Config& config) : config_(config) { with_mdi_.use_dpg = false; }

  std::vector<TensorSpec> all() {
    add({Kind::kTable, table::kEmbedding});
    for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
      prefix_ = "blocks." + std::to_string(layer) + ".";
      first_ = std::ssize(specs_);
      // Norms first: every variant has them, so that a missing one means fewer blocks and nothing else.
      for (const bool norms : {true, false}) {
        visit_layer([&](const Field& field) {
          if ((field.kind == Kind::kNorm) == norms) add(field);
        });
      }
    }
    prefix_.clear();
    add({Kind::kNorm, table::kNorm});
    add({Kind::kTable, table::kHead});
    specs_.back().use = Use::kOptional;
    return std::move(specs_);
  }

 private:
  void add(const Field& field) {
    if (field.kind == Kind::kBias) return;  // declared with their weights
    for (const TensorPart& part : field.parts) {
      const bool used = part.used_by(config_);
      if (!used && !part.used_by(with_mdi_)) continue;
      const std::string name = prefix_ + std::string(part.name);
      const auto same = [&](const TensorSpec& other) { return other.name == name + ".weight"; };
      if (std::any_of(specs_.begin() + first_, specs_.end(), same)) continue;
      const std::int64_t out = part.out.of(config_);
      const Use use = used ? Use::kRequired : Use::kUnused;
      const bool may_have_more_rows = part.rows.of(config_) < out;
      std::vector<std::int64_t> shape = {out};
      if (field.is_matrix()) shape.push_back(part.in.of(config_));
      specs_.push_back({name + ".weight", std::move(shape), use, may_have_more_rows});
      if (field.kind == Kind::kLinear) specs_.push_back({name + ".bias", {out}, use, may_have_more_rows});
    }
  }

  const Config& config_;
  Config with_mdi_ = config_;
  std::string prefix_;
  std::ptrdiff_t first_ = 0;  // of this prefix
  std::vector<TensorSpec> specs_;
};

}  // namespace

std::vector<TensorSpec> tensor_specs(const Config& config) { return Specs(config).all(); }

bool is_training_only(std::string_view name) {
  return name.starts_with("blocks.") && name.find(".mdi.W_planning_") != std::string_view::npos;
}

}  // namespace mmrec::models
