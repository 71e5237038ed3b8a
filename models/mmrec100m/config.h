// Hyper-parameters of an MMRec100M model, read from config.json and validated once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "mmrec/variant_options.h"
#include "models/config_reader.h"
#include "models/mmrec/config.h"

namespace mmrec::models {

/// Two stacks of MM-Rec blocks, the experts, over one embedding, and what joins them. Invariants after parsing: sizes
/// as in Config, expert_dim a multiple of 4.
struct Config100m {
  std::int64_t vocab_size = 0;  // V
  std::int64_t expert_dim = 0;  // E
  std::int64_t num_layers = 0;  // of each expert
  std::int64_t num_heads = 1;   // without effect: there is no memory to attend to
  std::int64_t ffn_dim = 0;     // F, default 4 E
  float mdi_mix = 0.1F;
  Expert expert = Expert::kBoth;
  TextIds ids;

  using Arch = struct Mmrec100m;

  /// How many experts run.
  std::size_t stacks() const { return expert == Expert::kBoth ? 2 : 1; }
  /// The first expert that runs: 0 text, 1 code.
  std::size_t first() const { return expert == Expert::kCode ? 1 : 0; }
  /// What MM-Rec's code takes an expert for: a model of its own whose only segment never ends and which has no memory.
  Config stack() const;

  bool operator==(const Config100m&) const = default;
};

/// From config.json's text; `name` stands for the file. Throws std::runtime_error naming file, key, found and expected.
Config100m parse_config_100m(std::string_view text, const std::string& name, const WarningSink& warn = {});

/// config.json for this configuration; parsing it gives it back.
std::string to_json(const Config100m& config);

}  // namespace mmrec::models
