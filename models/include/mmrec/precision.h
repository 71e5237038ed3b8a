// What a GPU computes products in.
#pragma once

#include <cstdint>
#include <string_view>

namespace mmrec {

/// What a GPU multiplies in: the type of its weights and of what enters a product with them. Sums and the recurrent
/// state are fp32 always. The CPU computes in fp32, whatever type the weights are stored in.
enum class Precision : std::uint8_t {
  kAuto,  ///< the type of the stored matrices where all agree on a 16-bit one, else fp32
  kF32,   ///< true fp32, no TF32
  kF16,   ///< IEEE half precision
  kBF16,  ///< bfloat16
};

/// "auto", "fp32", "fp16", "bf16".
constexpr std::string_view to_string(Precision precision) {
  constexpr std::string_view kNames[] = {"auto", "fp32", "fp16", "bf16"};
  return precision <= Precision::kBF16 ? kNames[static_cast<int>(precision)] : "unknown";
}

}  // namespace mmrec
