// Hyper-parameters of an MM-Rec model, read from config.json and validated once.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "models/config_reader.h"

namespace mmrec::models {

/// The constructor arguments of the public class that matter for inference, and this engine's own keys.
/// Invariants after parse(): every size positive and at most 2^24 (num_layers at most 2^12), num_heads divides
/// model_dim, model_dim % 4 == 0 unless use_dpg, mdi_mix in [0, 10], ids within the vocabulary. The weights in fp32
/// have at most 2^48 bytes and the state of one sequence at most 2^40, so their sizes fit in 64 bits with room for any
/// batch up to 2^20.
struct Config {
  static constexpr std::string_view kModelType = "mmrec";
  using Arch = struct Mmrec;

  std::int64_t vocab_size = 0;         // V
  std::int64_t model_dim = 0;          // D
  std::int64_t num_layers = 0;         // L
  std::int64_t num_heads = 0;          // H
  std::int64_t ffn_dim = 0;            // F, default 4 D
  bool use_hem = false;                // one fused projection tensor
  bool use_dpg = false;                // low-rank decay gate
  std::int64_t dpg_rank = 128;         // R
  float mdi_mix = 0.1F;                // μ
  std::int64_t memory_segment = 8192;  // C
  std::int64_t memory_slots = 1;       // M
  bool carry_state = true;             // h crosses segment boundaries
  TextIds ids;
  QuantSchemes quantization;
  /// Of a copy of the weights that is padded (models/runtime/cuda/padding.h): so many channels of every head are zeros.
  /// model_dim counts them.
  std::int64_t head_padding = 0;

  template <class Self, class F>
  static void keys(Self& config, const F& f) {
    f("vocab_size", config.vocab_size);
    f("model_dim", config.model_dim);
    f("num_layers", config.num_layers);
    f("num_heads", config.num_heads);
    f("ffn_dim", config.ffn_dim);
    f("use_hem", config.use_hem);
    f("use_dpg", config.use_dpg);
    f("dpg_rank", config.dpg_rank);
    f("mdi_mix", config.mdi_mix);
    f("memory_segment", config.memory_segment);
    f("memory_slots", config.memory_slots);
    f("carry_state", config.carry_state);
  }
  /// From config.json's text; `name` stands for the file. Throws as ConfigReader; unknown keys are reported to `warn`.
  static Config parse(std::string_view text, const std::string& name, const WarningSink& warn = {});

  std::int64_t head_dim() const { return model_dim / num_heads - head_padding; }
  std::int64_t gate_hidden_dim() const { return model_dim / 4; }  // G

  bool operator==(const Config&) const = default;
};

}  // namespace mmrec::models
