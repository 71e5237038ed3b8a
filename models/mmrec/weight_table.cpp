// The public state dict, as the table of fields implies it, and a checkpoint compared with it.
#include "models/mmrec/weight_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "models/files/elements.h"
#include "models/files/text.h"

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

/// True for tensors that only training uses: ignored, whatever their shape.
bool is_training_only(std::string_view name) {
  return name.starts_with("blocks.") && name.find(".mdi.W_planning_") != std::string_view::npos;
}

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

[[noreturn]] void fail(const std::filesystem::path& path, std::string_view name, std::string_view message) {
  throw std::runtime_error(fmt::format("{}: {}: {}", path.string(), printable(name), message));
}

bool has_shape_of(const TensorInfo& tensor, const TensorSpec& spec) {
  std::vector<std::int64_t> shape = tensor.shape;
  const bool more_rows = spec.may_have_more_rows && shape.size() == spec.shape.size() && shape[0] > spec.shape[0];
  if (more_rows) shape[0] = spec.shape[0];
  return shape == spec.shape;
}

}  // namespace

std::vector<TensorSpec> tensor_specs(const Config& config) { return Specs(config).all(); }

void check_tensors(const Checkpoint& checkpoint, const Config& config, const WarningSink& warn) {
  std::vector<const TensorInfo*> known;
  for (const TensorSpec& spec : tensor_specs(config)) {
    const TensorInfo* tensor = checkpoint.find(spec.name);
    if (tensor == nullptr && spec.use != TensorSpec::Use::kRequired) continue;
    if (tensor == nullptr) {
      fail(checkpoint.path(), spec.name,
           fmt::format("tensor is missing (expected shape {}){}", list(spec.shape), hint(config, spec.name)));
    }
    if (!has_shape_of(*tensor, spec)) {
      fail(checkpoint.path_of(*tensor), tensor->name,
           fmt::format("found shape {}, expected {}{}", list(tensor->shape), list(spec.shape),
                       spec.may_have_more_rows ? " or more rows" : ""));
    }
    known.push_back(tensor);
  }
  std::sort(known.begin(), known.end());
  std::size_t training_only = 0;
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (std::binary_search(known.begin(), known.end(), &tensor)) continue;
    if (!is_training_only(tensor.name)) {
      fail(checkpoint.path_of(tensor), tensor.name,
           fmt::format("unexpected tensor (found {} {}, expected none of this name by config.json){}",
                       name_in_file(tensor.dtype), list(tensor.shape), hint(config, tensor.name)));
    }
    ++training_only;
  }
  if (training_only != 0 && warn) {
    warn(fmt::format("{}: {} tensors that only training uses are ignored (mdi.W_planning_*)",
                     checkpoint.path().string(), training_only));
  }
}

}  // namespace mmrec::models
