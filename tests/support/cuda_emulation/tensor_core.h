// Products of the tensor cores, after the figures of the PTX ISA's chapters on warp-level and on asynchronous
// warpgroup-level matrix instructions.
//
// Sums are formed in fp64 and rounded once; hardware adds in an order of its own with fewer bits, so results agree
// within rounding only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "execution.h"
#include "kernels/tensor.h"

namespace mmrec::cuda_emulation {

// Where lane l keeps two adjacent elements of each operand of m16n8k16 in register r, the first in the lower half:
// A [16, 16]: row l / 4 + 8 (r % 2), columns 2 (l % 4) + 8 (r / 2) and one more;
// B [16, 8]: column l / 4, rows 2 (l % 4) + 8 r and one more.
constexpr int a_row(int lane, int r) { return lane / 4 + 8 * (r % 2); }
constexpr int a_col(int lane, int r) { return 2 * (lane % 4) + 8 * (r / 2); }
constexpr int b_col(int lane) { return lane / 4; }
constexpr int b_row(int lane, int r) { return 2 * (lane % 4) + 8 * r; }

/// mma.sync.m16n8k16: d += a b. T is BFloat16 or Float16.
template <class T>
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]);
/// mma.sync.m16n8k32 of signed 8-bit integers: d += a b. Registers hold the same bytes of a row or column.
void mma_m16n8k32(int (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]);

// Where lane l keeps its values of C [16, N]: value i is row l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i
// % 2.
constexpr int c_row(int lane, int i) { return lane / 4 + 8 * (i / 2 % 2); }
constexpr int c_col(int lane, int i) { return 8 * (i / 4) + 2 * (lane % 4) + i % 2; }

/// wgmma.mma_async.m64nNk16, of Float8 m64nNk32, with B in shared memory, and A too or in registers, as m16n8k16 has
/// it: of the warpgroup's 64 rows each warp computes 16. The product is formed at once; when the thread waits for its
/// group the operands are read again, and reported if they have changed meanwhile.
struct WarpgroupProduct {
  int columns = 0;  // N
  std::uint64_t a = 0;
  const std::uint32_t* a_registers = nullptr;  // 4 of them; null: A is in shared memory
  std::uint64_t b = 0;
  bool add = true;
  float* sum = nullptr;  // N / 2 values
};
template <class T>
void wgmma(WarpgroupProduct product);

}  // namespace mmrec::cuda_emulation
