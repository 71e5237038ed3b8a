// Names and shapes of the public state dict.
#include "models/mmrec/tensor_specs.h"

#include <utility>

namespace mmrec::models {
namespace {

using Use = TensorSpec::Use;

class Specs {
 public:
  explicit Specs(const Config& config) : config_(config) {}

  std::vector<TensorSpec> all() {
    const std::int64_t v = config_.vocab_size, d = config_.model_dim;
    add("embedding.weight", {v, d});
    for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
      prefix_ = "blocks." + std::to_string(layer) + ".";
      block();
    }
    prefix_.clear();
    add("norm.weight", {d});
    add("lm_head.weight", {v, d}, Use::kOptional);
    return std::move(specs_);
  }

 private:
  void block() {
    const std::int64_t d = config_.model_dim, f = config_.ffn_dim, g = config_.gate_hidden_dim(), r = config_.dpg_rank;
    add("norm1.weight", {d});
    if (config_.use_hem) {
      linear("W_fused", 4 * d, d);
      for (std::size_t i = specs_.size() - 2; i < specs_.size(); ++i) specs_[i].may_have_more_rows = true;
    } else {
      linear("W_q", d, d);
      linear("W_k", d, d, config_.use_dpg ? Use::kUnused : Use::kRequired);
      linear("W_v", d, d);
      linear("W_z", d, d);
    }
    const Use mdi_gamma = config_.use_dpg ? Use::kUnused : Use::kRequired;
    linear("mdi.W_gamma.0", g, d, mdi_gamma);
    linear("mdi.W_gamma.2", d, g, mdi_gamma);
    linear("mdi.W_context.0", g, d, mdi_gamma);
    linear("mdi.W_context.2", d, g, mdi_gamma);
    if (config_.use_dpg) {
      linear("W_gamma_down", r, d);
      linear("W_gamma_up", d, r);
    }
    linear("W_g", d, d);
    linear("mdi.W_g", d, 2 * d);
    linear("multi_mem_attention.W_q", d, d);
    linear("multi_mem_attention.W_o", d, d);
    add("norm2.weight", {d});
    linear("ffn.0", f, d);
    linear("ffn.3", d, f);
  }

  void linear(const std::string& name, std::int64_t out, std::int64_t in, Use use = Use::kRequired) {
    add(name + ".weight", {out, in}, use);
    add(name + ".bias", {out}, use);
  }

  void add(const std::string& name, std::vector<std::int64_t> shape, Use use = Use::kRequired) {
    specs_.push_back({prefix_ + name, std::move(shape), use, false});
  }

  const Config& config_;
  std::string prefix_;
  std::vector<TensorSpec> specs_;
};

}  // namespace

std::vector<TensorSpec> tensor_specs(const Config& config) { return Specs(config).all(); }

bool is_training_only(std::string_view name) {
  return name.starts_with("blocks.") && name.find(".mdi.W_planning_") != std::string_view::npos;
}

}  // namespace mmrec::models
