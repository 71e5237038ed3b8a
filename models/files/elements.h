// Element types of files and runs of stored numbers: finite or not, and in another type. Simple loops that a compiler
// vectorises.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "kernels/tensor.h"

namespace mmrec::models {

/// Index of the first NaN or infinity among `count` numbers of one type, or -1. Bits: the largest exponent means one.
template <class Bits, Bits kExponent>
std::int64_t first_nonfinite(const std::byte* from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Bits bits = 0;
    std::memcpy(&bits, from + i * sizeof(Bits), sizeof bits);
    if ((bits & kExponent) == kExponent) return static_cast<std::int64_t>(i);
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

/// The name of a type in safetensors files.
constexpr std::string_view name_in_file(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kF32:
      return "F32";
    case kernels::DType::kF16:
      return "F16";
    case kernels::DType::kBF16:
      return "BF16";
  }
  return {};
}

/// f(T{}) for the element type T that `dtype` stands for.
template <class F>
void with_element_type(kernels::DType dtype, const F& f) {
  switch (dtype) {
    case kernels::DType::kF32:
      return f(float{});
    case kernels::DType::kF16:
      return f(kernels::Float16{});
    case kernels::DType::kBF16:
      return f(kernels::BFloat16{});
  }
}

/// Copies numbers of one type, or rounds them to another. Neither need be aligned.
inline void convert(const std::byte* from, std::size_t count, kernels::DType from_dtype, std::byte* to,
                    kernels::DType to_dtype) {
  if (from_dtype == to_dtype) return static_cast<void>(std::memcpy(to, from, count * kernels::size_of(from_dtype)));
  with_element_type(from_dtype, [&](auto x) {
    with_element_type(to_dtype, [&](auto y) {
      for (std::size_t i = 0; i < count; ++i) {
        std::memcpy(&x, from + i * sizeof(x), sizeof(x));
        y = kernels::from_float<decltype(y)>(kernels::to_float(x));
        std::memcpy(to + i * sizeof(y), &y, sizeof(y));
      }
    });
  });
}

/// Number `i`, widened.
inline float element(const std::byte* from, std::size_t i, kernels::DType dtype) {
  float x = 0.0F;
  convert(from + i * kernels::size_of(dtype), 1, dtype, reinterpret_cast<std::byte*>(&x), kernels::DType::kF32);
  return x;
}

}  // namespace mmrec::models
