// What a GPU computes products in.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace mmrec {

/// What a GPU multiplies in: the type of its weights and of what enters a product with them. Sums and the recurrent
/// state are fp32 always. The CPU computes in fp32, whatever type the weights are stored in.
enum class Precision : std::uint8_t {
  kAuto,    ///< the type of the stored matrices where all agree on a 16-bit one, else fp32
  kF32,     ///< true fp32, no TF32; on some GPUs by tensor cores, from three bf16 parts of each number
  kF16,     ///< IEEE half precision
  kBF16,    ///< bfloat16
  kF32Fma,  ///< fp32 by plain fused multiply-adds: slower, and weights take less memory
};

/// Names of precisions, by value.
inline constexpr std::array<std::string_view, 5> kPrecisionNames = {"auto", "fp32", "fp16", "bf16", "fp32-fma"};
/// The name of a precision.
constexpr std::string_view to_string(Precision precision) {
  return precision <= Precision::kF32Fma ? kPrecisionNames[static_cast<std::size_t>(precision)] : "unknown";
}

}  // namespace mmrec
