// Stored numbers as bytes: whether they are finite, and their hash. Loops that a compiler vectorises.
#define XXH_INLINE_ALL  // everything is internal then, as simd.h asks
#include <xxhash.h>

namespace mmrec::kernels {
namespace {

template <class Bits, Bits kExponent>
bool all_finite(const void* from, std::int64_t count) {
  constexpr std::int64_t kStride = 1024;
  const auto* const bytes = static_cast<const unsigned char*>(from);
  for (std::int64_t begin = 0; begin < count; begin += kStride) {
    const std::int64_t end = count - begin < kStride ? count : begin + kStride;
    Bits any = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      Bits bits;
      __builtin_memcpy(&bits, bytes + i * static_cast<std::int64_t>(sizeof bits), sizeof bits);
      any = static_cast<Bits>(any | ((bits & kExponent) == kExponent));
    }
    if (any != 0) return false;
  }
  return true;
}

std::uint64_t hash_bytes(const void* bytes, std::size_t count) { return XXH3_64bits(bytes, count); }

// In the order of DType: fp32, fp16, bf16.
constexpr ByteKernels kByteKernels = {
    {all_finite<std::uint32_t, 0x7f800000U>, all_finite<std::uint16_t, 0x7c00U>, all_finite<std::uint16_t, 0x7f80U>},
    hash_bytes};

}  // namespace
}  // namespace mmrec::kernels
