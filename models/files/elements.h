// Runs of stored numbers: finite or not, and widened. Simple loops that a compiler vectorises.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/tensor.h"

namespace mmrec::models {

/// Index of the first NaN or infinity among `count` numbers of one type, or -1. Bits: the largest exponent means one.
template <class Bits, Bits kExponent>
std::int64_t first_nonfinite(const std::byte* from, std::size_t count) {
  constexpr std::size_t kStride = 1024;
  for (std::size_t begin = 0; begin < count; begin += kStride) {
    const std::size_t n = std::min(kStride, count - begin);
    Bits bits[kStride];
    std::memcpy(bits, from + begin * sizeof(Bits), n * sizeof(Bits));
    Bits any = 0;
    for (std::size_t i = 0; i < n; ++i) any = static_cast<Bits>(any | ((bits[i] & kExponent) == kExponent));
    if (any == 0) continue;
    for (std::size_t i = 0; i < n; ++i) {
      if ((bits[i] & kExponent) == kExponent) return static_cast<std::int64_t>(begin + i);
    }
  }
  return -1;
}

inline std::int64_t first_nonfinite(const std::byte* from, std::size_t count, kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kF32:
      return first_nonfinite<std::uint32_t, 0x7f800000U>(from, count);
    case kernels::DType::kF16:
      return first_nonfinite<std::uint16_t, 0x7c00U>(from, count);
    case kernels::DType::kBF16:
      return first_nonfinite<std::uint16_t, 0x7f80U>(from, count);
  }
  return -1;
}

template <class T>
void widen(const std::byte* from, std::size_t count, std::byte* to) {
  for (std::size_t i = 0; i < count; ++i) {
    T x{};
    std::memcpy(&x, from + i * sizeof(T), sizeof(T));
    const float y = kernels::to_float(x);
    std::memcpy(to + i * sizeof(float), &y, sizeof(float));
  }
}

/// Copies numbers of one type, or widens them to fp32.
inline void convert(const std::byte* from, std::size_t count, kernels::DType from_dtype, std::byte* to,
                    kernels::DType to_dtype) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, count * kernels::size_of(from_dtype));
  } else if (from_dtype == kernels::DType::kF16) {
    widen<kernels::Float16>(from, count, to);
  } else {
    widen<kernels::BFloat16>(from, count, to);
  }
}

}  // namespace mmrec::models
