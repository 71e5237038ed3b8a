// Matrix products of the tensor cores: of warps, and of warpgroups (sm_90a), which are 128 threads from a multiple of
// 128 that call all that is named wgmma together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/tensor.h"

namespace mmrec::kernels::ptx {

#define MMREC_MMA(type)                                                               \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
/// d += a b of a warp's tensor core: A [16, 16], B [16, 8] of T (BFloat16 or Float16), two elements a register, D [16,
/// 8] fp32. With g = lane / 4 and t = lane % 4, register r of a holds row g + 8 (r % 2), columns 2t + 8 (r / 2) and one
/// more; register r of b rows 2t + 8 r and one more of column g; d[i] is row g + 8 (i / 2), column 2t + i % 2. All 32
/// lanes call it.
template <class T>
__device__ inline void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
  if constexpr (std::is_same_v<T, BFloat16>) {
    MMREC_MMA("bf16");
  } else {
    MMREC_MMA("f16");
  }
}
#undef MMREC_MMA

/// d += a b of integers of 8 bits, four in a register: A [16, 32], B [32, 8], D [16, 8] of 32 bits. Register r of a
/// holds row g + 8 (r % 2), columns 4t + 16 (r / 2) and three more; register r of b rows 4t + 16 r and three more of
/// column g.
__device__ inline void mma_m16n8k32(int (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// A K-major operand in this block's shared memory: rows of 64 16-bit elements, 128 bytes apart, with the 128-byte
/// swizzle as load_box leaves it; `rows` is 1,024-byte aligned. Adding 2 moves it by 32 bytes, 16 elements along K;
/// adding n/16 moves it by n bytes (n a multiple of 1,024, whole groups of 8 rows).
/// Fields, in units of 16 bytes: bits 0-13 address, 16-29 unused by swizzled layouts (1), 32-45 bytes from one 8 rows
/// to the next (1,024); bits 62-63 swizzle (1: 128 bytes).
__device__ inline std::uint64_t wgmma_operand(const void* rows) {
  return ((shared_address(rows) & 0x3ffffU) >> 4) | (std::uint64_t{1} << 16) | (std::uint64_t{64} << 32) |
         (std::uint64_t{1} << 62);
}

/// Before the first product and after ordinary code has touched the accumulators.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Closes a group of products; wgmma_wait waits until at most kPending groups are left running. Then the whole
/// warpgroup's products of the finished groups have read their operands, and with kPending = 0 `sum` may be read.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int kSize>
__device__ inline void wgmma_wait_all(float (&sum)[kSize]) {
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(sum[i])::"memory");  // no read of sum moves above the wait
}

#define MMREC_TEN(p) \
  "%" #p "0, %" #p "1, %" #p "2, %" #p "3, %" #p "4, %" #p "5, %" #p "6, %" #p "7, %" #p "8, %" #p "9, "
#define MMREC_THIRTY MMREC_TEN() MMREC_TEN(1) MMREC_TEN(2)
#define MMREC_SIXTY MMREC_THIRTY MMREC_TEN(3) MMREC_TEN(4) MMREC_TEN(5)
#define MMREC_120 MMREC_SIXTY MMREC_TEN(6) MMREC_TEN(7) MMREC_TEN(8) MMREC_TEN(9) MMREC_TEN(10) MMREC_TEN(11)
#define MMREC_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define MMREC_16(i) MMREC_4(i), MMREC_4(i + 4), MMREC_4(i + 8), MMREC_4(i + 12)
#define MMREC_64(i) MMREC_16(i), MMREC_16(i + 16), MMREC_16(i + 32), MMREC_16(i + 48)
/// A product of n columns: names of the sums, and of what follows them; then the sums.
#define MMREC_WGMMA_OF(types, order, n, sums, a_name, b_name, add_name, ...)                                        \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " add_name ", 0;\n\twgmma.mma_async.sync.aligned.m64n" n types \
               " {" sums "}, " a_name ", " b_name ", p, 1, 1" order ";\n\t}"                                        \
               : __VA_ARGS__                                                                                        \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define MMREC_WGMMA_OF_REGISTERS(n, sums, a_names, b_name, add_name, ...)                                     \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " add_name ", 0;\n\twgmma.mma_async.sync.aligned.m64n" n \
               "k16.f32.bf16.bf16 {" sums "}, {" a_names "}, " b_name ", p, 1, 1, 0;\n\t}"                    \
               : __VA_ARGS__                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))
#define MMREC_WGMMA(...)                                        \
  if constexpr (std::is_same_v<T, BFloat16>) {                  \
    MMREC_WGMMA_OF("k16.f32.bf16.bf16", ", 0, 0", __VA_ARGS__); \
  } else if constexpr (std::is_same_v<T, Float16>) {            \
    MMREC_WGMMA_OF("k16.f32.f16.f16", ", 0, 0", __VA_ARGS__);   \
  } else {                                                      \
    MMREC_WGMMA_OF("k32.f32.e4m3.e4m3", "", __VA_ARGS__);       \
  }

/// sum = (add ? sum : 0) + A Bᵀ for A [64, 16] and B [2 kSize, 16] of T (BFloat16 or Float16), or [64, 32] and [2
/// kSize, 32] of Float8; kSize 16, 32, 64 or 128. Asynchronously: operands and sum belong to the product until
/// wgmma_wait. Thread t of the warpgroup, lane l of warp w, holds in sum[4 j + 2 r + c] row 16 w + l / 4 + 8 r, column
/// 8 j + 2 (l % 4) + c. Sums of Float8 keep some 14 bits while they are added to.
template <class T, int kSize>
__device__ inline void wgmma(float (&sum)[kSize], std::uint64_t a, std::uint64_t b, bool add) {
  static_assert(kSize == 16 || kSize == 32 || kSize == 64 || kSize == 128);
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16> || std::is_same_v<T, Float8>);
  if constexpr (kSize == 16) {
    MMREC_WGMMA("32", MMREC_TEN() "%10, %11, %12, %13, %14, %15", "%16", "%17", "%18", MMREC_16(0))
  } else if constexpr (kSize == 32) {
    MMREC_WGMMA("64", MMREC_THIRTY "%30, %31", "%32", "%33", "%34", MMREC_16(0), MMREC_16(16))
  } else if constexpr (kSize == 64) {
    MMREC_WGMMA("128", MMREC_SIXTY "%60, %61, %62, %63", "%64", "%65", "%66", MMREC_64(0))
  } else {
    MMREC_WGMMA("256", MMREC_120 "%120, %121, %122, %123, %124, %125, %126, %127", "%128", "%129", "%130", MMREC_64(0),
                MMREC_64(64))
  }
}

/// The same of BFloat16 with A in registers, which belong to the product too, for kSize 16 or 32. Register r of lane l
/// of warp w holds row 16 w + l / 4 + 8 (r % 2), columns 2 (l % 4) + 8 (r / 2) and one more.
template <int kSize>
__device__ inline void wgmma(float (&sum)[kSize], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
  static_assert(kSize == 16 || kSize == 32);
  if constexpr (kSize == 16) {
    MMREC_WGMMA_OF_REGISTERS("32", MMREC_TEN() "%10, %11, %12, %13, %14, %15", "%16, %17, %18, %19", "%20", "%21",
                             MMREC_16(0));
  } else {
    MMREC_WGMMA_OF_REGISTERS("64", MMREC_THIRTY "%30, %31", "%32, %33, %34, %35", "%36", "%37", MMREC_16(0),
                             MMREC_16(16));
  }
}
#undef MMREC_WGMMA
#undef MMREC_WGMMA_OF_REGISTERS
#undef MMREC_WGMMA_OF
#undef MMREC_64
#undef MMREC_16
#undef MMREC_4
#undef MMREC_120
#undef MMREC_SIXTY
#undef MMREC_THIRTY
#undef MMREC_TEN

/// Changes how many registers each thread of the warpgroup may use: all of its warps call it. The sum over the block's
/// warpgroups must not exceed what the block was launched with.
template <int kCount>
__device__ inline void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace mmrec::kernels::ptx
