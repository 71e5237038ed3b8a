// Descriptions of matrices for the tensor memory accelerator (sm_90), made on the host and handed to a kernel by value.
#pragma once

#include <cstdint>

namespace mmrec::kernels {

/// What the copy engine knows of a tensor; a `const __grid_constant__` parameter of a kernel.
struct alignas(64) TensorMap {
  std::uint64_t words[16];
};

/// A stack of `depth` matrices [rows, columns] of 16-bit elements in device memory, strides in elements.
struct MatrixStack {
  const void* data = nullptr;
  std::int64_t columns = 0, rows = 0, depth = 1;
  std::int64_t row_stride = 0, depth_stride = 0;
};

/// True where the copy engine can read the stack: sizes 1 to 2^31 - 1, address and strides multiples of 16 bytes (of
/// the strides of dimensions longer than 1), strides below 2^40 bytes.
bool has_tensor_map(const MatrixStack& stack);

/// Columns of most boxes: 64 elements, one row of 128 bytes in shared memory.
inline constexpr int kBoxColumns = 64;

/// A map of the stack (has_tensor_map holds) for copies of boxes of [box_depth, box_rows, box_columns] elements with
/// the swizzle of ptx::load_box; box_rows and box_depth at most 256, box_columns 64, 32, 16 or 8. Coordinates of a box
/// are (column, row, depth) in elements. What a box has outside of the stack arrives as zeros. `wide`: L2 fetches 256
/// bytes around what a box needs, else 128. Throws std::system_error.
TensorMap make_tensor_map(const MatrixStack& stack, int box_rows, int box_depth = 1, bool wide = true,
                          int box_columns = kBoxColumns);

}  // namespace mmrec::kernels
