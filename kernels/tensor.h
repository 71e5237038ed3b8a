// Element types and non-owning views: the vocabulary in which every op is written.
//
// A view is a pointer with a shape; it never owns, allocates or frees. The memory space is part of its type, so that
// handing a device buffer to a host op does not compile. The last dimension is always contiguous; outer strides count
// elements, not bytes.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#if defined(__CUDACC__)
#define MMREC_HOST_DEVICE __host__ __device__
#else
#define MMREC_HOST_DEVICE
#endif

// A function without a copy of its own, so that the vector kernels may call it (kernels/cpu/simd.h).
#if defined(__CUDACC__)
#define MMREC_ALWAYS_INLINE
#else
#define MMREC_ALWAYS_INLINE [[gnu::always_inline]]
#endif

namespace mmrec::kernels {

/// Memory spaces. `Host` is ordinary memory, `Device` memory of the CUDA device that the backend owns.
struct Host {};
struct Device {};

/// Storage types of weights and, the first three, of all other operands. Arithmetic is always fp32 or wider. The last
/// two are of files alone.
enum class DType : std::uint8_t { kF32, kF16, kBF16, kF8, kI8, kI4, kI32, kI64 };

/// Whether this is a type of operands; and whether numbers of it share scales (WeightFormat).
MMREC_ALWAYS_INLINE constexpr bool is_plain(DType dtype) { return dtype <= DType::kBF16; }
MMREC_ALWAYS_INLINE constexpr bool is_quantized(DType dtype) { return dtype >= DType::kF8 && dtype <= DType::kI4; }
/// Bits of one element.
MMREC_ALWAYS_INLINE constexpr int bits_of(DType dtype) {
  constexpr int kBits[] = {32, 16, 16, 8, 8, 4, 32, 64};
  return kBits[static_cast<int>(dtype)];
}
/// Bytes of one element, not of kI4.
constexpr std::size_t size_of(DType dtype) { return static_cast<std::size_t>(bits_of(dtype)) / 8; }

/// X(T) for every storage type: explicit instantiations.
#define MMREC_FOR_EACH_TYPE(X) X(float) MMREC_FOR_EACH_HALF(X)
#define MMREC_FOR_EACH_HALF(X) X(Float16) X(BFloat16)

/// bfloat16: the upper half of an IEEE binary32.
struct BFloat16 {
  std::uint16_t bits;
};

/// IEEE binary16.
struct Float16 {
  std::uint16_t bits;
};

/// E4M3 of the Open Compute Project: 4 bits of exponent, 3 of mantissa, no infinity, at most 448.
struct Float8 {
  std::uint8_t bits;
};

/// The DType of a storage type.
template <class T>
inline constexpr DType kDTypeOf = DType::kF32;
template <>
inline constexpr DType kDTypeOf<Float16> = DType::kF16;
template <>
inline constexpr DType kDTypeOf<BFloat16> = DType::kBF16;

/// Exact widening to fp32; identity for fp32.
MMREC_HOST_DEVICE constexpr float to_float(float x) { return x; }
MMREC_HOST_DEVICE constexpr float to_float(BFloat16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}
MMREC_HOST_DEVICE constexpr float to_float(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | magnitude << 13);
  // The exponent's bias is 15 in place of 127; a subnormal number of the one is one of the other.
  return std::bit_cast<float>(sign | magnitude << 13) * 0x1p112F;
}

constexpr float to_float(Float8 x) {
  const auto sign = static_cast<std::uint32_t>(x.bits & 0x80U) << 24;
  if ((x.bits & 0x7fU) == 0x7fU) return std::bit_cast<float>(sign | 0x7fc00000U);
  // As above, with a bias of 7.
  return std::bit_cast<float>(sign | static_cast<std::uint32_t>(x.bits & 0x7fU) << 20) * 0x1p120F;
}

/// Narrowing with round-to-nearest-even; NaN stays NaN, overflow becomes infinity, of Float8 the largest number.
template <class T>
MMREC_HOST_DEVICE constexpr T from_float(float x);

template <>
MMREC_HOST_DEVICE constexpr float from_float<float>(float x) {
  return x;
}
template <>
MMREC_HOST_DEVICE constexpr BFloat16 from_float<BFloat16>(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
template <>
MMREC_HOST_DEVICE constexpr Float16 from_float<Float16>(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  const std::uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (a >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // rounds to 65536 or more
  if (a < 0x33000001u) return {sign};                                         // at most half the least subnormal
  const std::uint32_t exponent = a >> 23;
  if (exponent >= 113) {  // normal result
    const std::uint32_t r = a - (112u << 23);
    return {static_cast<std::uint16_t>(sign | ((r + 0xfffu + ((r >> 13) & 1u)) >> 13))};
  }
  const std::uint32_t m = (a & 0x7fffffu) | 0x800000u;  // subnormal result: shift the full mantissa
  const std::uint32_t shift = 126u - exponent;
  const std::uint32_t half = 1u << (shift - 1);
  return {static_cast<std::uint16_t>(sign | ((m + (half - 1u) + ((m >> shift) & 1u)) >> shift))};
}

template <>
constexpr Float8 from_float<Float8>(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint8_t>((u >> 24) & 0x80U);
  const std::uint32_t a = u & 0x7fffffffU;
  if (a > 0x7f800000U) return {static_cast<std::uint8_t>(sign | 0x7fU)};
  if (a >= 0x43e00000U) return {static_cast<std::uint8_t>(sign | 0x7eU)};  // 448
  if (a < 0x3c800000U) {  // below 2^-6: adding 2^14 leaves the rounded multiple of 2^-9 in the low bits
    const float shifted = std::bit_cast<float>(a) + 0x1p14F;
    return {static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x46800000U))};
  }
  const std::uint32_t r = a - (120U << 23);
  return {static_cast<std::uint8_t>(sign | ((r + 0x7ffffU + ((r >> 20) & 1U)) >> 20))};
}

/// `p` moved by `bytes`: the same member of another slot.
template <class T>
MMREC_HOST_DEVICE inline T* bytes_further(T* p, std::int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(p) + bytes);
}

/// [rows, cols], row r at data + r * stride.
template <class T, class Space>
struct MatrixView {
  T* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t stride = 0;

  constexpr MatrixView() = default;
  constexpr MatrixView(T* p, std::int64_t r, std::int64_t c) : data(p), rows(r), cols(c), stride(c) {}
  constexpr MatrixView(T* p, std::int64_t r, std::int64_t c, std::int64_t s) : data(p), rows(r), cols(c), stride(s) {}
  /// A view of T converts to a view of const T, as T* to const T*.
  template <std::same_as<const T> C>
  constexpr operator MatrixView<C, Space>() const {  // NOLINT(google-explicit-constructor)
    return {data, rows, cols, stride};
  }

  constexpr T* row(std::int64_t r) const { return data + r * stride; }
  constexpr MatrixView middle_rows(std::int64_t first, std::int64_t count) const {
    return {data + first * stride, count, cols, stride};
  }
  constexpr MatrixView middle_cols(std::int64_t first, std::int64_t count) const {
    return {data + first, rows, count, stride};
  }
};

/// Rows [rows, cols] that lie evenly spaced, as a matrix's, or anywhere: then row r is `offset` elements behind
/// list[r], a list in memory of Space, or null where that is null.
template <class T, class Space>
struct RowsView {
  T* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t stride = 0;
  T* const* list = nullptr;
  std::int64_t offset = 0;

  constexpr RowsView() = default;
  template <class U>
  constexpr RowsView(const MatrixView<U, Space>& matrix)  // NOLINT(google-explicit-constructor)
      : data(matrix.data), rows(matrix.rows), cols(matrix.cols), stride(matrix.stride) {}
  constexpr RowsView(T* const* at, std::int64_t r, std::int64_t c, std::int64_t further)
      : rows(r), cols(c), list(at), offset(further) {}
  template <std::same_as<const T> C>
  constexpr operator RowsView<C, Space>() const {  // NOLINT(google-explicit-constructor)
    RowsView<C, Space> view(MatrixView<C, Space>(data, rows, cols, stride));
    view.list = list;
    view.offset = offset;
    return view;
  }

  MMREC_HOST_DEVICE constexpr T* row(std::int64_t r) const {
    T* const first = list == nullptr ? data : list[r];
    return first == nullptr ? nullptr : first + (list == nullptr ? r * stride : offset);
  }
};

/// A run of sequences [batch, heads, time, dim] with dim contiguous: [B, T, D] is heads = 1, and the layout
/// [B, H, T, d] of the public scan documents differs in its strides alone.
template <class T, class Space>
struct SequenceView {
  T* data = nullptr;
  std::int64_t batch = 0, heads = 1, time = 0, dim = 0;
  std::int64_t batch_stride = 0, head_stride = 0, time_stride = 0;

  constexpr SequenceView() = default;
  /// Contiguous [batch, time, dim].
  constexpr SequenceView(T* p, std::int64_t b, std::int64_t t, std::int64_t d)
      : data(p), batch(b), time(t), dim(d), batch_stride(t * d), time_stride(d) {}
  /// Contiguous [batch, heads, time, dim].
  constexpr SequenceView(T* p, std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t d)
      : data(p), batch(b), heads(h), time(t), dim(d), batch_stride(h * t * d), head_stride(t * d), time_stride(d) {}

  /// A view of T converts to a view of const T, as T* to const T*.
  template <std::same_as<const T> C>
  constexpr operator SequenceView<C, Space>() const {  // NOLINT(google-explicit-constructor)
    SequenceView<C, Space> view(data, batch, heads, time, dim);
    view.batch_stride = batch_stride;
    view.head_stride = head_stride;
    view.time_stride = time_stride;
    return view;
  }

  constexpr T* at(std::int64_t b, std::int64_t h, std::int64_t t) const {
    return data + b * batch_stride + h * head_stride + t * time_stride;
  }
  /// Times [first, first + count) of sequence b.
  constexpr SequenceView slice(std::int64_t b, std::int64_t first, std::int64_t count) const {
    SequenceView view = *this;
    view.data = at(b, 0, first);
    view.batch = 1;
    view.time = count;
    return view;
  }
};

/// How a weight matrix is stored, row by row, independent of the type of the other operand. Plain numbers lie one after
/// another. Quantised ones are multiplied by fp32 scales that lie behind the numbers of their row, one for each `group`
/// of inputs. A row of kI4 is cut into blocks of kQuantBlock: element 16 j + l of a block is in bits 4 j.. of its
/// 16-bit word l, plus 8. A row that ends within a block is filled up with zeros.
struct WeightFormat {
  DType code = DType::kF32;
  std::int64_t group = 0;  // of quantised numbers: a multiple of kQuantBlock, or 0 for all of a row

  constexpr WeightFormat() = default;
  constexpr WeightFormat(DType elements, std::int64_t inputs = 0)  // NOLINT(google-explicit-constructor)
      : code(elements), group(inputs) {}
  constexpr bool operator==(const WeightFormat&) const = default;
};
inline constexpr std::int64_t kQuantBlock = 64;

constexpr const char* name_of(WeightFormat format) {
  constexpr const char* kNames[] = {"fp32", "fp16", "bf16", "fp8", "int8", "int4"};
  return kNames[static_cast<std::size_t>(format.code)];
}
/// Inputs that share a scale in rows of quantised numbers.
MMREC_ALWAYS_INLINE constexpr std::int64_t inputs_of_scale(WeightFormat format, std::int64_t cols) {
  return format.group == 0 ? cols : format.group;
}
/// Scales of a row.
MMREC_ALWAYS_INLINE constexpr std::int64_t scales_of(WeightFormat format, std::int64_t cols) {
  return !is_quantized(format.code) ? 0 : format.group == 0 ? 1 : (cols + format.group - 1) / format.group;
}
/// Bytes of a row before its scales.
MMREC_ALWAYS_INLINE constexpr std::int64_t number_bytes(WeightFormat format, std::int64_t cols) {
  const std::int64_t block = is_quantized(format.code) ? kQuantBlock : 1;
  return (cols + block - 1) / block * block * bits_of(format.code) / 8;
}
/// Bytes of a row with its scales.
MMREC_ALWAYS_INLINE constexpr std::int64_t row_bytes(WeightFormat format, std::int64_t cols) {
  return number_bytes(format, cols) + 4 * scales_of(format, cols);
}
/// Bytes of a matrix, or of whole rows of one.
constexpr std::size_t bytes_of(WeightFormat format, std::int64_t rows, std::int64_t cols) {
  return static_cast<std::size_t>(rows * row_bytes(format, cols));
}

/// A number of fp32 is the sum of so many of bf16, each the rest rounded to nearest even, which leave nothing of its 24
/// bits. Part p of an element lies part_stride elements behind part p - 1.
inline constexpr std::int64_t kParts = 3;

/// The rows of a quantised matrix as kernels for a GPU stream them (kernels/cuda/gemm/compact.h). Null: they are not
/// there.
struct CompactView {
  const std::byte* data = nullptr;
  WeightFormat format;
  std::int64_t row_bytes = 0;
  std::int64_t own_rows = 0;  // rows from here on are kI8 with scales of their own, in as many bytes

  constexpr CompactView from_row(std::int64_t row) const {
    return data == nullptr ? *this : CompactView{data + row * row_bytes, format, row_bytes, own_rows - row};
  }
};

/// Rows of a matrix whose format is their own.
struct StackedRows {
  WeightFormat format;
  std::int64_t rows = 0;
};

/// A weight matrix [rows = out features, cols = in features] in its stored format (PyTorch `Linear` layout).
template <class Space>
struct WeightView {
  const void* data = nullptr;
  WeightFormat format;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  /// Numbers of fp32 may be there in bf16 parts too, for products by tensor cores: see kParts. Null: they are not.
  const BFloat16* parts = nullptr;
  std::int64_t part_stride = 0;
  CompactView compact = {};
  /// From top to bottom, if rows differ in format: the CPU's linear() alone takes such a matrix. `format` is then one
  /// that could hold them all.
  std::span<const StackedRows> stack = {};

  /// Of a stack: within one of its parts, or whole parts.
  constexpr WeightView middle_rows(std::int64_t first, std::int64_t count) const {
    if (!stack.empty()) {
      const StackedRows& top = stack.front();
      const auto* const bytes = static_cast<const std::byte*>(data);
      if (first >= top.rows) {
        WeightView below = *this;
        below.data = bytes + bytes_of(top.format, top.rows, cols);
        below.stack = stack.subspan(1);
        return below.middle_rows(first - top.rows, count);
      }
      if (first + count <= top.rows) return {bytes + bytes_of(top.format, first, cols), top.format, count, cols};
      WeightView whole = *this;
      whole.rows = count;
      return whole;
    }
    return {static_cast<const std::byte*>(data) + bytes_of(format, first, cols),
            format,
            count,
            cols,
            parts == nullptr ? nullptr : parts + first * cols,
            part_stride,
            compact.from_row(first)};
  }
  /// The numbers for a product that loads fragments as numbers of type A and knows no other format: today the CUDA
  /// backend's, all of them. Throws std::invalid_argument naming both formats if they are stored otherwise.
  template <class A>
  const A* as() const {
    if (data != nullptr && format != kDTypeOf<A>) {
      throw std::invalid_argument(std::string("weights: found ") + name_of(format) + ", expected " +
                                  name_of(kDTypeOf<A>) + ", the type of what they are multiplied by");
    }
    return static_cast<const A*>(data);
  }
};

}  // namespace mmrec::kernels
