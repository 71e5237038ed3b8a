// Element types of files: their names, and runs of stored numbers, in another type. Simple loops that a compiler
// vectorises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>

#include "kernels/tensor.h"

namespace mmrec::models {

/// The names of types in safetensors files.
inline constexpr std::pair<std::string_view, kernels::DType> kNamesInFile[] = {
    {"F32", kernels::DType::kF32},    {"F16", kernels::DType::kF16}, {"BF16", kernels::DType::kBF16},
    {"F8_E4M3", kernels::DType::kF8}, {"I8", kernels::DType::kI8},   {"I32", kernels::DType::kI32},
    {"I64", kernels::DType::kI64}};
constexpr std::string_view name_in_file(kernels::DType dtype) {
  for (const auto& [name, is] : kNamesInFile) {
    if (is == dtype) return name;
  }
  return {};
}

/// f(T{}) for the element type T that `dtype`, a plain one, stands for.
template <class F>
void with_element_type(kernels::DType dtype, const F& f) {
  switch (dtype) {
    case kernels::DType::kF32:
      return f(float{});
    case kernels::DType::kF16:
      return f(kernels::Float16{});
    case kernels::DType::kBF16:
      return f(kernels::BFloat16{});
    default:
      return;
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
