// Hyper-parameters of an MMRec100M model, read from config.json and validated once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "mmrec/variant_options.h"
#include "models/config_reader.h"
#include "models/mmrec/config.h"

namespace mmrec::models::mmrec100m {

using models::to_json;

/// Two stacks of MM-Rec blocks, the experts, over one embedding, and what joins them. Invariants after parse(): sizes
/// as in models::Config, expert_dim a multiple of 4.
struct Config {
  static constexpr std::string_view kModelType = "mmrec100m";
  using Arch = struct Mmrec100m;

  std::int64_t vocab_size = 0;  // V
  std::int64_t expert_dim = 0;  // E
  std::int64_t num_layers = 0;  // of each expert
  std::int64_t num_heads = 1;   // without effect: there is no memory to attend to
  std::int64_t ffn_dim = 0;     // F, default 4 E
  float mdi_mix = 0.1F;
  Expert expert = Expert::kBoth;
  TextIds ids;
  QuantSchemes quantization;
  std::int64_t padding = 0;  // of a padded copy of the weights: the last so many of expert_dim are zeros

  template <class Self, class F>
  static void keys(Self& config, const F& f) {
    f("vocab_size", config.vocab_size);
    f("expert_dim", config.expert_dim);
    f("num_layers", config.num_layers);
    f("num_heads", config.num_heads);
    f("ffn_dim", config.ffn_dim);
    f("mdi_mix", config.mdi_mix);
    f("expert", config.expert, kExpertNames);
  }
  /// As models::Config::parse.
  static Config parse(std::string_view text, const std::string& name, const WarningSink& warn = {});

  /// How many experts run.
  std::size_t stacks() const { return expert == Expert::kBoth ? 2 : 1; }
  /// The first expert that runs: 0 text, 1 code.
  std::size_t first() const { return expert == Expert::kCode ? 1 : 0; }
  /// An expert as a model of MM-Rec: its only segment never ends, and it has no memory.
  models::Config stack() const;

  bool operator==(const Config&) const = default;
};

}  // namespace mmrec::models::mmrec100m
