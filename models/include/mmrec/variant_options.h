// What may be chosen of a model beyond its weights, where its architecture leaves a choice.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace mmrec {

/// Which of the two experts of an mmrec100m model run.
enum class Expert : std::uint8_t {
  kBoth,  ///< fused, as the model was trained
  kText,  ///< the code expert's half of the fusion's input is zeros
  kCode,  ///< the text expert's
};

/// Their names, in the order of Expert.
inline constexpr std::array<std::string_view, 3> kExpertNames = {"both", "text", "code"};

/// How the tokens of a sequence are cut into calls of an mmrec-jax model, on which its results depend.
enum class Calls : std::uint8_t {
  kStepwise,  ///< a token each: causal, whatever the caller's own calls
  kPrompt,    ///< the prompt as one call, as far as the memory bank reaches, then a token each
  kWhole,  ///< calls as long as the memory bank: every token but the first of a call is predicted from later ones too
};

/// Their names, in the order of Calls.
inline constexpr std::array<std::string_view, 3> kCallsNames = {"stepwise", "prompt", "whole"};

/// Unset: as config.json says. Each belongs to one architecture (`model_type`); for another it is
/// std::invalid_argument naming both.
struct VariantOptions {
  std::optional<Expert> expert = {};  ///< mmrec100m
  std::optional<Calls> calls = {};    ///< mmrec-jax
  std::optional<bool> bank = {};      ///< mmrec-jax: whether a memory bank is written

  /// Member by member.
  bool operator==(const VariantOptions&) const = default;
};

}  // namespace mmrec
