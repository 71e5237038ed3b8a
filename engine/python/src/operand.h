// An array of any library as an operand of the kernels: address, type, shape and strides, by DLPack or by a tuple.
// Nothing is copied. An array is described by DLPack's table of functions, by its capsules (nanobind), or by hand.
#pragma once

#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <numeric>
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

enum class Access : std::uint8_t { kRead, kWrite };

/// DLPack 1.2's table of functions, laid out as in the specification. By it a library describes its arrays without a
/// capsule of Python's. Only the function that is called has its type.
struct DlExchange {
  std::uint32_t major, minor;
  const DlExchange* older;
  void (*allocate)();
  void (*managed_from_object)();
  void (*managed_to_object)();
  int (*tensor_from_object)(PyObject* object, nb::dlpack::dltensor* tensor);
  void (*current_stream)();
};

/// The table of an array's type; null if it has none. Needs the GIL.
inline const DlExchange* exchange_of(nb::handle value) {
  static auto& known = *new std::map<PyTypeObject*, const DlExchange*>;
  PyTypeObject* const type = Py_TYPE(value.ptr());
  if (const auto found = known.find(type); found != known.end()) return found->second;
  const DlExchange* table = nullptr;
  const nb::object capsule =
      nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", nb::none());
  if (!capsule.is_none()) {
    table = static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table == nullptr) PyErr_Clear();
    while (table != nullptr && table->major != 1) table = table->older;
    if (table != nullptr && table->tensor_from_object == nullptr) table = nullptr;
  }
  Py_INCREF(reinterpret_cast<PyObject*>(type));  // so that no other type gets its address
  known.emplace(type, table);
  return table;
}

/// The bytes of an operand that is not empty: rows of `row` bytes at multiples of `pitch` from `begin`, all before
/// `end`.
struct Bytes {
  std::int64_t begin = 0, end = 0, row = 0, pitch = 0;
};
inline Bytes bytes_of(const Operand& x) {
  const std::int64_t size = x.element_size();
  Bytes bytes;
  bytes.begin = bytes.end = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(x.data));
  bytes.row = size * (x.dims > 0 ? x.sizes().back() : 1);
  for (std::size_t i = 0; i < x.leading().size(); ++i) {
    if (x.shape[i] == 1) continue;
    const std::int64_t stride = x.strides[i] * size;
    (stride < 0 ? bytes.begin : bytes.end) += stride * (x.shape[i] - 1);
    bytes.pitch = std::gcd(bytes.pitch, stride);
  }
  bytes.end += bytes.row;
  return bytes;
}

inline bool is_same(const Operand& a, const Operand& b) {
  if (a.data != b.data || a.type != b.type || !std::ranges::equal(a.sizes(), b.sizes())) return false;
  for (std::size_t i = 0; i < a.sizes().size(); ++i) {
    if (a.shape[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

/// "float32".
inline std::string type_name(const nb::dlpack::dtype& type) {
  const char* const codes[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  return (type.code < 7 ? codes[type.code] : "type ") + std::to_string(type.bits);
}

/// From a tuple (address, shape, strides, DLPack's type code, bits, device type, device, whether it is read-only), or
/// any array by DLPack. Throws TypeError for anything else, and std::invalid_argument for more dimensions than
/// kMostDims and for read-only memory that is to be written.
inline Operand operand_of(nb::handle value, const char* name, Access access = Access::kRead) {
  Operand operand;
  nb::dlpack::dltensor tensor;
  std::array<std::int64_t, kMostDims> shape{}, strides{};  // of a tuple
  bool is_read_only = false;
  const auto expect_dims = [name](std::size_t dims) {
    if (dims > kMostDims) refuse(name, "found {} dimensions, expected at most 4", dims);
    return static_cast<std::int32_t>(dims);
  };
  if (nb::isinstance<nb::tuple>(value)) {
    const auto t = nb::borrow<nb::tuple>(value);
    const auto sizes = nb::borrow<nb::sequence>(t[1]), steps = nb::borrow<nb::sequence>(t[2]);
    // NOLINTNEXTLINE(performance-no-int-to-ptr): that is how addresses come from Python
    tensor.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(t[0]));
    tensor.ndim = expect_dims(nb::len(sizes));
    for (std::size_t i = 0; i < static_cast<std::size_t>(tensor.ndim); ++i) {
      shape[i] = nb::cast<std::int64_t>(sizes[i]);
      strides[i] = nb::cast<std::int64_t>(steps[i]);
    }
    tensor.shape = shape.data();
    tensor.strides = strides.data();
    tensor.dtype = {nb::cast<std::uint8_t>(t[3]), nb::cast<std::uint8_t>(t[4]), 1};
    tensor.device = {nb::cast<int>(t[5]), nb::cast<int>(t[6])};
    is_read_only = nb::cast<bool>(t[7]);
  } else if (const DlExchange* const table = exchange_of(value); table != nullptr) {
    if (table->tensor_from_object(value.ptr(), &tensor) != 0) {
      nb::python_error cause;
      nb::raise_from(cause, PyExc_TypeError,
                     "%s: expected a dense array in memory, found one that DLPack cannot describe", name);
    }
  } else {
    nb::ndarray<> writable;
    auto& array = operand.held;
    if (access == Access::kWrite && nb::try_cast(value, writable)) {
      array = nb::ndarray<nb::ro>(writable);
    } else if (nb::try_cast(value, array)) {
      is_read_only = true;
    } else {
      refuse_type(name, "expected an array that speaks DLPack, found {}",
                  nb::str(value.type().attr("__name__")).c_str());
    }
    tensor.data = const_cast<void*>(static_cast<const void*>(array.data()));
    tensor.device = {array.device_type(), array.device_id()};
    tensor.ndim = expect_dims(array.ndim());
    tensor.dtype = array.dtype();
    tensor.shape = const_cast<std::int64_t*>(array.shape_ptr());
    tensor.strides = const_cast<std::int64_t*>(array.stride_ptr());
  }
  if (is_read_only && access == Access::kWrite) refuse(name, "is read-only, expected an array that may be written to");
  operand.dims = expect_dims(static_cast<std::size_t>(tensor.ndim));
  operand.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  operand.type = tensor.dtype;
  operand.device_type = tensor.device.device_type;
  operand.device = tensor.device.device_id;
  std::copy_n(tensor.shape, tensor.ndim, operand.shape.begin());
  std::copy_n(tensor.strides, tensor.ndim, operand.strides.begin());
  return operand;
}

/// Throws TypeError for a type that kernels do not take.
inline ElementType element_type(const Operand& x, const char* name) {
  using Code = nb::dlpack::dtype_code;
  if (x.type.lanes == 1) {
    if (x.type.code == static_cast<std::uint8_t>(Code::Float) && x.type.bits == 32) return ElementType::kF32;
    if (x.type.code == static_cast<std::uint8_t>(Code::Float) && x.type.bits == 16) return ElementType::kF16;
    if (x.type.code == static_cast<std::uint8_t>(Code::Bfloat) && x.type.bits == 16) return ElementType::kBF16;
  }
  refuse_type(name, "found {}, expected float32, float16 or bfloat16", type_name(x.type));
}

/// Throws std::invalid_argument if `x` is on another device than `first`.
inline void expect_alike(const Operand& x, const char* name, const Operand& first, const char* first_name) {
  if (x.device_type != first.device_type || x.device != first.device) {
    refuse(name, "is on another device than {}", first_name);
  }
}

/// Throws std::invalid_argument for another shape; `whose` begins the expectation, such as "that of x, ".
inline void expect_shape(const Operand& x, const char* name, std::span<const std::int64_t> shape,
                         const std::string& whose = "") {
  if (std::ranges::equal(x.sizes(), shape)) return;
  refuse(name, "found shape [{}], expected {}[{}]", fmt::join(x.sizes(), ", "), whose, fmt::join(shape, ", "));
}

/// Throws std::invalid_argument unless elements lie in row-major order without gaps.
inline void expect_contiguous(const Operand& x, const char* name) {
  if (x.is_empty()) return;
  std::int64_t stride = 1;
  for (auto i = static_cast<std::size_t>(x.dims); i-- > 0;) {
    if (x.shape[i] > 1 && x.strides[i] != stride) refuse(name, "expected contiguous memory");
    stride *= x.shape[i];
  }
}

/// Throws std::invalid_argument if `out` shares memory with `in`, unless it is `in` exactly and `may_be_in`. In both
/// the last axis is contiguous. May refuse rows of different pitches that interleave without sharing memory.
inline void expect_apart(const Operand& out, const char* name, const Operand& in, const char* in_name, bool may_be_in) {
  if (out.is_empty() || in.is_empty() || (may_be_in && is_same(out, in))) return;
  const Bytes a = bytes_of(out), b = bytes_of(in);
  if (a.end <= b.begin || b.end <= a.begin) return;
  if (const std::int64_t pitch = std::gcd(a.pitch, b.pitch); pitch > 0) {
    // Rows begin at multiples of the pitch: two that interleave leave room for one another within it.
    const std::int64_t apart = ((b.begin - a.begin) % pitch + pitch) % pitch;
    if (a.row <= apart && apart + b.row <= pitch) return;
  }
  refuse(name, "shares memory with {}, expected memory of its own{}", in_name,
         may_be_in ? fmt::format(" or exactly that of {}", in_name) : "");
}

/// The memory of fp32 numbers, contiguous, of that shape, on the device of `like`; else throws like the functions
/// above.
inline float* floats_of(const Operand& x, const char* name, const Operand& like, const char* like_name,
                        std::span<const std::int64_t> shape) {
  expect_alike(x, name, like, like_name);
  if (x.type != nb::dtype<float>()) refuse_type(name, "found {}, expected float32", type_name(x.type));
  expect_shape(x, name, shape);
  expect_contiguous(x, name);
  return static_cast<float*>(x.data);
}

}  // namespace mmrec::python
