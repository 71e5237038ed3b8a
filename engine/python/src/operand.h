// An array of any library, as the kernels' operands are made of it: address, type, shape and strides, by DLPack or by a
// tuple. Nothing is copied.
#pragma once

#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/python/src/binding.h"
#include "mmrec/kernels.h"

namespace mmrec::python {

inline constexpr int kMostDims = 4;

/// What is known of an array: where it lies and how.
struct Operand {
  void* data = nullptr;
  nb::dlpack::dtype type{};
  int device_type = 0;  // as DLPack numbers them: 1 the CPU, 2 CUDA
  int device = 0;
  int dims = 0;
  std::array<std::int64_t, kMostDims> shape{}, strides{};  // in elements
  nb::ndarray<nb::ro> held;                                // keeps what was imported
};

/// Throws std::invalid_argument of "name: what".
[[noreturn]] void refuse(const char* name, const std::string& what);

/// "float32".
std::string type_name(const nb::dlpack::dtype& type);
/// "[2, 3]", of the first `dims` dimensions.
std::string shape_name(const Operand& x, int dims);

enum class Access : std::uint8_t { kRead, kWrite };

/// From a tuple (address, shape, strides, DLPack's type code, bits, device type, device, whether it is read-only), or
/// any array by DLPack. Throws TypeError for what is none, std::invalid_argument for more dimensions than kMostDims and
/// for read-only memory that is to be written.
Operand operand_of(nb::handle value, const char* name, Access access = Access::kRead);
bool is_empty(const Operand& x);
/// Throws TypeError for a type that kernels do not take.
ElementType element_type(const Operand& x, const char* name);
/// Throws std::invalid_argument where `x` is on another device than `first`.
void expect_alike(const Operand& x, const char* name, const Operand& first, const char* first_name);
/// Throws std::invalid_argument unless elements lie in row-major order without gaps.
void expect_contiguous(const Operand& x, const char* name);
/// Throws std::invalid_argument where `out` shares memory with `in`, unless it is `in` exactly and `may_be_in`. Both
/// have the last axis side by side. May refuse what only might share memory: rows of different pitches that interleave.
void expect_apart(const Operand& out, const char* name, const Operand& in, const char* in_name, bool may_be_in);
/// fp32, contiguous, of that shape, on the device of `like`; else throws as those above.
float* floats_of(const Operand& x, const char* name, const Operand& like, const char* like_name,
                 const std::vector<std::int64_t>& shape);

}  // namespace mmrec::python
