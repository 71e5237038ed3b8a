// Checking and binding tensors by name.
#include "models/mmrec/weight_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "models/files/text.h"
#include "models/mmrec/tensor_specs.h"

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
    const std::int64_t d = config_.model_dim;
    weights_.layers = std::vector<LayerWeights>(static_cast<std::size_t>(config_.num_layers));
    matrix(weights_.embedding, {whole("embedding.weight")});
    for (std::size_t i = 0; i < weights_.layers.size(); ++i) {
      prefix_ = "blocks." + std::to_string(i) + ".";
      layer(weights_.layers[i], d);
    }
    prefix_.clear();
    vector(weights_.norm, {whole("norm.weight")});
    const TensorInfo* head = checkpoint_.find("lm_head.weight");
    if (head != nullptr) plan_.head = {&weights_.head, nullptr, {whole("lm_head.weight")}};
    return std::move(plan_);
  }

 private:
  void layer(LayerWeights& w, std::int64_t d) {
    if (config_.use_hem) {  // rows of W_fused: q, k, v, z
      const auto stack = [&](const std::string& name) {
        std::vector<Part> parts = {rows(name, 0, d), rows(name, 2 * d, 2 * d)};
        if (!config_.use_dpg) parts.push_back(rows(name, d, d));
        return parts;
      };
      matrix(w.qvzk, stack("W_fused.weight"));
      vector(w.qvzk_bias, stack("W_fused.bias"));
    } else {
      const auto stack = [&](const std::string& suffix) {
        std::vector<Part> parts = {whole("W_q" + suffix), whole("W_v" + suffix), whole("W_z" + suffix)};
        if (!config_.use_dpg) parts.push_back(whole("W_k" + suffix));
        return parts;
      };
      matrix(w.qvzk, stack(".weight"));
      vector(w.qvzk_bias, stack(".bias"));
    }
    matrix(w.gate, {whole("W_g.weight"), columns("mdi.W_g.weight", d, d)});
    matrix(w.gate_z, {columns("mdi.W_g.weight", 0, d)});
    vector(w.gate_bias, {whole("W_g.bias")});
    vector(w.gate_z_bias, {whole("mdi.W_g.bias")});
    if (config_.use_dpg) {
      linear(w.gamma_in, w.gamma_in_bias, "W_gamma_down");
      linear(w.gamma_up, w.gamma_up_bias, "W_gamma_up");
    } else {
      linear(w.gamma_in, w.gamma_in_bias, "mdi.W_gamma.0");
      linear(w.gamma_up, w.gamma_up_bias, "mdi.W_gamma.2");
      linear(w.context_in, w.context_in_bias, "mdi.W_context.0");
      linear(w.context_up, w.context_up_bias, "mdi.W_context.2");
    }
    linear(w.memory_q, w.memory_q_bias, "multi_mem_attention.W_q");
    linear(w.memory_out, w.memory_out_bias, "multi_mem_attention.W_o");
    linear(w.ffn_in, w.ffn_in_bias, "ffn.0");
    linear(w.ffn_out, w.ffn_out_bias, "ffn.3");
    vector(w.norm1, {whole("norm1.weight")});
    vector(w.norm2, {whole("norm2.weight")});
  }

  void linear(HostMatrix& weight, HostVector& bias, const std::string& name) {
    matrix(weight, {whole(name + ".weight")});
    vector(bias, {whole(name + ".bias")});
  }
  void matrix(HostMatrix& to, std::vector<Part> parts) { plan_.targets.push_back({&to, nullptr, std::move(parts)}); }
  void vector(HostVector& to, std::vector<Part> parts) { plan_.targets.push_back({nullptr, &to, std::move(parts)}); }

  Part whole(const std::string& name) const {
    const TensorInfo* tensor = checkpoint_.find(prefix_ + name);
    const std::int64_t row = tensor->shape.size() == 2 ? tensor->shape[1] : 1;
    return {tensor, 0, tensor->shape[0], 0, row, row};
  }
  Part rows(const std::string& name, std::int64_t first, std::int64_t count) const {
    Part part = whole(name);
    part.row = first;
    part.rows = count;
    return part;
  }
  Part columns(const std::string& name, std::int64_t first, std::int64_t count) const {
    Part part = whole(name);
    part.col = first;
    part.cols = count;
    return part;
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
