// Hyper-parameters of an mmrec-jax model, read from config.json and validated once.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "mmrec/variant_options.h"
#include "models/config_reader.h"

namespace mmrec::models::mmrec_jax {

using models::to_json;

/// Invariants after parse(): every size positive and at most 2^24 (num_layers at most 2^12), num_heads at most
/// model_dim, model_dim a multiple of 4, ids within the vocabulary. The weights in fp32 have at most 2^48 bytes and the
/// state of one sequence at most 2^40.
struct Config {
  static constexpr std::string_view kModelType = "mmrec-jax";
  using Arch = struct MmrecJax;

  std::int64_t vocab_size = 0;      // V
  std::int64_t model_dim = 0;       // D
  std::int64_t num_layers = 0;      // L
  std::int64_t num_heads = 0;       // H, which enters only through the scale of attention
  std::int64_t long_mem_len = 512;  // S, rows of the bank
  bool bank = true;                 // whether it is written; else all of a sequence is one call
  Calls calls = Calls::kPrompt;     // without meaning where there is no bank
  TextIds ids;
  QuantSchemes quantization;

  template <class Self, class F>
  static void keys(Self& config, const F& f) {
    f("vocab_size", config.vocab_size);
    f("model_dim", config.model_dim);
    f("num_layers", config.num_layers);
    f("num_heads", config.num_heads);
    f("long_mem_len", config.long_mem_len);
    f("bank", config.bank);
    f("calls", config.calls, kCallsNames);
  }
  /// From config.json's text; `name` stands for the file. Throws as ConfigReader; unknown keys are reported to `warn`.
  static Config parse(std::string_view text, const std::string& name, const WarningSink& warn = {});

  std::int64_t gate_hidden_dim() const { return model_dim / 4; }  // G
  std::int64_t ffn_dim() const { return 4 * model_dim; }          // F

  bool operator==(const Config&) const = default;
};

}  // namespace mmrec::models::mmrec_jax
