#include "tensor_core.h"

#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include "sanitizer.h"

namespace mmrec::cuda_emulation {
namespace {

constexpr int kDepth = 16;  // K of one instruction

/// Rows of kDepth 16-bit elements, as they lie in shared memory.
using Rows = std::vector<std::uint16_t>;

/// `count` rows from `first` on of a K-major operand. A matrix descriptor has, in units of 16 bytes, the address in
/// bits 0-13 and the distance of groups of 8 rows in bits 32-45; the swizzle is in bits 62-63 (1: 128 bytes). Rows are
/// 128 bytes apart, and bits 4-6 of every address are XORed with its bits 7-9.
Rows read_rows(const Block& block, std::uint64_t descriptor, int first, int count) {
  const auto start = static_cast<std::uint32_t>(descriptor & 0x3fffU) << 4;
  const auto group = static_cast<std::uint32_t>(descriptor >> 32 & 0x3fffU) << 4;
  if (descriptor >> 62 != 1) fail("wgmma: only the 128-byte swizzle is emulated");
  if ((descriptor >> 49 & 7U) != 0 || (start >> 7 & 7U) != 0) fail("wgmma: operand at %u not aligned to 1,024", start);
  if ((start & 127U) > 96) fail("wgmma: 16 elements at %u pass the end of a row", start);
  Rows rows(static_cast<std::size_t>(count * kDepth));
  for (int r = 0; r < count; ++r) {
    const auto row = static_cast<std::uint32_t>(first + r);
    for (std::uint32_t half = 0; half < 2; ++half) {
      const std::uint32_t address = start + row / 8 * group + row % 8 * 128 + half * 16;
      const std::uint32_t place = address ^ ((address >> 7 & 7U) << 4);
      if (place < kDynamicSharedOffset || place + 16 > kDynamicSharedOffset + block.shared_bytes) {
        fail("wgmma: operand at %u is beyond the block's shared memory", place);
      }
      std::memcpy(&rows[static_cast<std::size_t>(r * kDepth) + half * 8], block.shared_window + place, 16);
    }
  }
  return rows;
}

/// Steps through an instruction's k, each of which takes of 16 bits a number, or of two Float8 first the one and then
/// the other.
template <class T>
constexpr int kSteps = std::is_same_v<T, kernels::Float8> ? 2 : 1;
template <class T, std::size_t kSize>
MMREC_NOT_INSTRUMENTED void widen(int step, const std::uint16_t* bits, std::array<double, kSize>& wide) {
  using Bits = decltype(T::bits);
  for (std::size_t i = 0; i < kSize; ++i) {
    wide[i] = static_cast<double>(kernels::to_float(T{static_cast<Bits>(bits[i] >> 8 * step)}));
  }
}

/// Eight columns at a time.
constexpr int kColumns = 8;
using Left = std::array<double, 16 * kDepth>;
using Right = std::array<double, kDepth * kColumns>;  // by k
using Product = std::array<double, 16 * kColumns>;

/// c += a b, in the order of k.
MMREC_NOT_INSTRUMENTED void multiply_add(const Left& a, const Right& b, Product& c) {
  for (std::size_t i = 0; i < 16; ++i) {
    double row[kColumns];
    for (std::size_t j = 0; j < kColumns; ++j) row[j] = c[i * kColumns + j];
    for (std::size_t k = 0; k < kDepth; ++k) {
      for (std::size_t j = 0; j < kColumns; ++j) row[j] += a[i * kDepth + k] * b[k * kColumns + j];
    }
    for (std::size_t j = 0; j < kColumns; ++j) c[i * kColumns + j] = row[j];
  }
}

/// The lanes' values: c = (add ? c : 0) + a b. values(lane) are the four of these columns.
template <class Values>
void multiply(const Left& a, const Right& b, bool add, const Values& values) {
  Product c = {};
  const auto at = [&](int lane, int i) -> double& {
    return c[static_cast<std::size_t>(c_row(lane, i) * kColumns + c_col(lane, i))];
  };
  for (int lane = 0; add && lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) at(lane, i) = static_cast<double>(values(lane)[i]);
  }
  multiply_add(a, b, c);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) values(lane)[i] = static_cast<float>(at(lane, i));
  }
}

/// What one lane brings to a product of its warp.
template <class Number>
struct WarpOperand {
  Number* d;
  const std::uint32_t* a;
  const std::uint32_t* b;
};

/// meet_lanes() of a warp that is whole.
template <class Operand, class Action>
void meet_warp(const char* what, Operand mine, Action action) {
  meet_lanes(0xffffffffU, what, mine, [&](Operand* const* lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      if (lanes[lane] == nullptr) fail("%s: lane %d has exited", what, lane);
    }
    action(lanes);
  });
}

}  // namespace

template <class T>
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  meet_warp("mma_m16n8k16", WarpOperand<float>{d, a, b}, [](WarpOperand<float>* const* lanes) {
    std::array<std::uint16_t, 16 * kDepth> rows;
    std::array<std::uint16_t, kDepth * kColumns> columns;
    for (int lane = 0; lane < 32; ++lane) {
      for (int r = 0; r < 4; ++r) {
        std::memcpy(&rows[static_cast<std::size_t>(a_row(lane, r) * kDepth + a_col(lane, r))], &lanes[lane]->a[r], 4);
      }
      for (int r = 0; r < 2; ++r) {
        const auto first = static_cast<std::size_t>(b_row(lane, r) * kColumns + b_col(lane));
        columns[first] = static_cast<std::uint16_t>(lanes[lane]->b[r]);
        columns[first + kColumns] = static_cast<std::uint16_t>(lanes[lane]->b[r] >> 16);
      }
    }
    Left wide_a;
    Right wide_b;
    widen<T>(0, rows.data(), wide_a);
    widen<T>(0, columns.data(), wide_b);
    multiply(wide_a, wide_b, true, [&](int lane) { return lanes[lane]->d; });
  });
}

void mma_m16n8k32(int (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  meet_warp("mma_m16n8k32", WarpOperand<int>{d, a, b}, [](WarpOperand<int>* const* lanes) {
    constexpr int kBytes = 2 * kDepth;
    std::array<std::int8_t, 16 * kBytes> rows;
    std::array<std::int8_t, 8 * kBytes> columns;
    for (int lane = 0; lane < 32; ++lane) {
      for (int r = 0; r < 4; ++r) {
        std::memcpy(&rows[a_row(lane, r) * kBytes + 2 * a_col(lane, r)], &lanes[lane]->a[r], 4);
      }
      for (int r = 0; r < 2; ++r) {
        std::memcpy(&columns[b_col(lane) * kBytes + 2 * b_row(lane, r)], &lanes[lane]->b[r], 4);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        for (int k = 0; k < kBytes; ++k) {
          lanes[lane]->d[i] += rows[c_row(lane, i) * kBytes + k] * columns[c_col(lane, i) * kBytes + k];
        }
      }
    }
  });
}

template <class T>
void wgmma(WarpgroupProduct product) {
  Thread& self = this_thread();
  if (!self.products_fenced) fail("wgmma: no wgmma_fence before the first product");
  meet_warp("wgmma", product, [&](WarpgroupProduct* const* lanes) {
    const Block& block = *self.block;
    for (int lane = 0; lane < 32; ++lane) {
      const WarpgroupProduct& other = *lanes[lane];
      if (other.a != product.a || (other.a_registers == nullptr) != (product.a_registers == nullptr) ||
          other.b != product.b || other.add != product.add || other.columns != product.columns) {
        fail("wgmma: lanes differ in their operands");
      }
    }
    const int warp = static_cast<int>(&self - block.threads.data()) / 32 % 4;
    const auto read_a = [=, &block](const WarpgroupProduct& mine) {
      if (mine.a_registers == nullptr) return read_rows(block, mine.a, 16 * warp, 16);
      Rows registers(8);
      std::memcpy(registers.data(), mine.a_registers, 16);
      return registers;
    };
    Rows a = product.a_registers == nullptr ? read_a(product) : Rows(16 * kDepth);
    for (int lane = 0; product.a_registers != nullptr && lane < 32; ++lane) {
      for (int r = 0; r < 4; ++r) {
        std::memcpy(&a[static_cast<std::size_t>(a_row(lane, r) * kDepth + a_col(lane, r))],
                    &lanes[lane]->a_registers[r], 4);
      }
    }
    Rows b = read_rows(block, product.b, 0, product.columns);
    std::array<Left, kSteps<T>> wide_a;
    for (int step = 0; step < kSteps<T>; ++step) widen<T>(step, a.data(), wide_a[static_cast<std::size_t>(step)]);
    for (int column = 0; column < product.columns; column += kColumns) {
      std::array<std::uint16_t, kDepth * kColumns> columns;
      for (std::size_t k = 0; k < kDepth; ++k) {
        for (std::size_t j = 0; j < kColumns; ++j) {
          columns[k * kColumns + j] = b[(static_cast<std::size_t>(column) + j) * kDepth + k];
        }
      }
      for (int step = 0; step < kSteps<T>; ++step) {
        Right wide_b;
        widen<T>(step, columns.data(), wide_b);
        multiply(wide_a[static_cast<std::size_t>(step)], wide_b, product.add || step != 0,
                 [&](int lane) { return lanes[lane]->sum + column / 2; });
      }
    }
    if (product.a_registers != nullptr) a = read_a(product);
    self.products.add([=, &block, a = std::move(a), b = std::move(b)] {
      if (read_a(product) != a || read_rows(block, product.b, 0, product.columns) != b) {
        fail("wgmma: an operand was overwritten before the product was waited for");
      }
    });
  });
}

template void mma_m16n8k16<kernels::BFloat16>(float (&)[4], const std::uint32_t (&)[4], const std::uint32_t (&)[2]);
template void mma_m16n8k16<kernels::Float16>(float (&)[4], const std::uint32_t (&)[4], const std::uint32_t (&)[2]);
template void wgmma<kernels::BFloat16>(WarpgroupProduct);
template void wgmma<kernels::Float16>(WarpgroupProduct);
template void wgmma<kernels::Float8>(WarpgroupProduct);

}  // namespace mmrec::cuda_emulation
