// An array of any library as an operand of the kernels: address, type, shape and strides, by DLPack or by a tuple.
// Nothing is copied.
#pragma once

#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "engine/python/src/binding.h"
#include "mmrec/kernels.h"

namespace mmrec::python {

inline constexpr int kMostDims = 4;

/// Where an array lies and how.
struct Operand {
  void* data = nullptr;
  nb::dlpack::dtype type{};
  int device_type = 0;  // as DLPack numbers them: 1 the CPU, 2 CUDA
  int device = 0;
  int dims = 0;
  std::array<std::int64_t, kMostDims> shape{}, strides{};  // in elements
  nb::ndarray<nb::ro> held;                                // keeps imported memory alive

  std::span<const std::int64_t> sizes() const { return {shape.data(), static_cast<std::size_t>(dims)}; }
  /// The sizes of all axes but the last; none without axes.
  std::span<const std::int64_t> leading() const {
    return sizes().first(static_cast<std::size_t>(std::max(dims - 1, 0)));
  }
  bool is_empty() const { return std::ranges::find(sizes(), 0) != sizes().end(); }
  std::int64_t element_size() const { return type.bits / 8; }
};

/// "float32".
std::string type_name(const nb::dlpack::dtype& type);
/// "[2, 3]".
std::string shape_name(std::span<const std::int64_t> shape);

enum class Access : std::uint8_t { kRead, kWrite };

/// From a tuple (address, shape, strides, DLPack's type code, bits, device type, device, whether it is read-only), or
/// any array by DLPack. Throws TypeError for anything else, and std::invalid_argument for more dimensions than
/// kMostDims and for read-only memory that is to be written.
Operand operand_of(nb::handle value, const char* name, Access access = Access::kRead);
/// Throws TypeError for a type that kernels do not take.
ElementType element_type(const Operand& x, const char* name);
/// Throws std::invalid_argument if `x` is on another device than `first`.
void expect_alike(const Operand& x, const char* name, const Operand& first, const char* first_name);
/// Throws std::invalid_argument for another shape; `whose` begins the expectation, such as "that of x, ".
void expect_shape(const Operand& x, const char* name, std::span<const std::int64_t> shape,
                  const std::string& whose = "");
/// Throws std::invalid_argument unless elements lie in row-major order without gaps.
void expect_contiguous(const Operand& x, const char* name);
/// Throws std::invalid_argument if `out` shares memory with `in`, unless it is `in` exactly and `may_be_in`. In both
/// the last axis is contiguous. May refuse rows of different pitches that interleave without sharing memory.
void expect_apart(const Operand& out, const char* name, const Operand& in, const char* in_name, bool may_be_in);
/// The memory of fp32 numbers, contiguous, of that shape, on the device of `like`; else throws like the functions
/// above.
float* floats_of(const Operand& x, const char* name, const Operand& like, const char* like_name,
                 std::span<const std::int64_t> shape);

}  // namespace mmrec::python
