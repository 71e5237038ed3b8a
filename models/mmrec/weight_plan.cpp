// Checking and binding tensors by name.
#include "models/mmrec/weight_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "models/files/text.h"
#include "models/mmrec/weight_table.h"

namespace mmrec::models {
namespace {

using kernels::DType;

std::string_view name_of(DType dtype) { return dtype == DType::kF32 ? "F32" : dtype == DType::kF16 ? "F16" : "BF16"; }

/// Compares the checkpoint's tensors with those that the configuration asks for.
class Checker {
 public:
  Checker(const Checkpoint& checkpoint, const Config& config, const WarningSink& warn)
      : checkpoint_(checkpoint), config_(config), warn_(warn) {}

  void check() {
    std::vector<const TensorInfo*> known;
    for (const TensorSpec& spec : tensor_specs(config_)) {
      const TensorInfo* tensor = checkpoint_.find(spec.name);
      if (tensor == nullptr && spec.use != TensorSpec::Use::kRequired) continue;
      if (tensor == nullptr) {
        fail(checkpoint_.path(), spec.name,
             fmt::format("tensor is missing (expected shape {}){}", list(spec.shape), hint(spec.name)));
      }
      check_shape(*tensor, spec);
      known.push_back(tensor);
    }
    std::sort(known.begin(), known.end());
    std::size_t training_only = 0;
    for (const TensorInfo& tensor : checkpoint_.tensors()) {
      if (std::binary_search(known.begin(), known.end(), &tensor)) continue;
      if (!is_training_only(tensor.name)) {
        fail(tensor, fmt::format("unexpected tensor (found {} {}, expected none of this name by config.json){}",
                                 name_of(tensor.dtype), list(tensor.shape), hint(tensor.name)));
      }
      ++training_only;
    }
    if (training_only != 0 && warn_) {
      warn_(fmt::format("{}: {} tensors that only training uses are ignored (mdi.W_planning_*)",
                        checkpoint_.path().string(), training_only));
    }
  }

 private:
  void check_shape(const TensorInfo& tensor, const TensorSpec& spec) const {
    std::vector<std::int64_t> shape = tensor.shape;
    const bool more_rows = spec.may_have_more_rows && shape.size() == spec.shape.size() && shape[0] > spec.shape[0];
    if (more_rows) shape[0] = spec.shape[0];
    if (shape == spec.shape) return;
    fail(tensor, fmt::format("found shape {}, expected {}{}", list(tensor.shape), list(spec.shape),
                             spec.may_have_more_rows ? " or more rows" : ""));
  }

  /// The setting a missing or unexpected name may be owed to.
  std::string hint(std::string_view name) const {
    const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
    if (has("W_fused") || has(".W_k.") || has(".W_v.") || has(".W_z.") || (has(".W_q.") && !has("multi_mem"))) {
      return fmt::format("; config.json has use_hem {}", config_.use_hem);
    }
    if (has("W_gamma_") || has("mdi.W_gamma") || has("mdi.W_context")) {
      return fmt::format("; config.json has use_dpg {}", config_.use_dpg);
    }
    if (has("blocks.")) return fmt::format("; config.json has num_layers {}", config_.num_layers);
    return {};
  }

  [[noreturn]] void fail(const TensorInfo& tensor, std::string_view message) const {
    fail(checkpoint_.path_of(tensor), tensor.name, message);
  }
  [[noreturn]] static void fail(const std::filesystem::path& path, std::string_view name, std::string_view message) {
    throw std::runtime_error(fmt::format("{}: {}: {}", path.string(), printable(name), message));
  }

  const Checkpoint& checkpoint_;
  const Config& config_;
  const WarningSink& warn_;
};

/// Says what goes where. Every tensor it asks for has been checked.
class Binder {
 public:
  Binder(const Checkpoint& checkpoint, const Config& config, HostWeights& weights)
      : checkpoint_(checkpoint), config_(config), weights_(weights) {}

  WeightPlan bind() {
    const auto fill = [this](const Field& field, auto& to) {
      Target target = target_of(field, to);
      if (!target.parts.empty()) plan_.targets.push_back(std::move(target));
    };
    weights_.layers.resize(static_cast<std::size_t>(config_.num_layers));
    fill({Field::Kind::kTable, table::kEmbedding}, weights_.embedding);
    for (std::size_t i = 0; i < weights_.layers.size(); ++i) {
      prefix_ = "blocks." + std::to_string(i) + ".";
      visit_layer(fill, weights_.layers[i]);
    }
    prefix_.clear();
    fill({Field::Kind::kNorm, table::kNorm}, weights_.norm);
    plan_.head = target_of({Field::Kind::kTable, table::kHead}, weights_.head);
    return std::move(plan_);
  }

 private:
  Target target_of(const Field& field, HostMatrix& to) const { return {&to, nullptr, parts_of(field)}; }
  Target target_of(const Field& field, HostVector& to) const { return {nullptr, &to, parts_of(field)}; }

  std::vector<Part> parts_of(const Field& field) const {
    std::vector<Part> parts;
    for (const TensorPart& part : field.parts) {
      const bool is_bias = field.kind == Field::Kind::kBias;
      if (!part.used_by(config_) || (is_bias && part.col.of(config_) != 0)) continue;
      const TensorInfo* tensor = checkpoint_.find(prefix_ + std::string(part.name) + (is_bias ? ".bias" : ".weight"));
      if (tensor == nullptr) continue;  // an optional one
      Part& to = parts.emplace_back(Part{tensor, part.row.of(config_), part.rows.of(config_), 0, 1, 1});
      if (!field.is_matrix()) continue;
      to.col = part.col.of(config_);
      to.cols = part.cols.of(config_);
      to.row_elements = part.in.of(config_);
    }
    return parts;
  }

  const Checkpoint& checkpoint_;
  const Config& config_;
  HostWeights& weights_;
  std::string prefix_;
  WeightPlan plan_;
};

}  // namespace

DType Target::dtype() const {
  if (matrix == nullptr) return DType::kF32;
  const DType first = parts.front().tensor->dtype;
  const bool same = std::all_of(parts.begin(), parts.end(), [&](const Part& p) { return p.tensor->dtype == first; });
  return same ? first : DType::kF32;
}

CheckedSize Target::bytes() const {
  CheckedSize elements = 0;
  for (const Part& part : parts) elements += part.elements();
  return elements * kernels::size_of(dtype());
}

WeightPlan plan_weights(const Checkpoint& checkpoint, const Config& config, const WarningSink& warn,
                        HostWeights& weights) {
  Checker(checkpoint, config, warn).check();
  return Binder(checkpoint, config, weights).bind();
}

}  // namespace mmrec::models
