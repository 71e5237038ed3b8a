// Products of one whole row tile with a panel of a weight matrix, through oneDNN.
//
// What must stay true: every call of the library has the shape [kRowTile, in] x [panel, in]^T on the calling thread
// alone. The panel height follows from `in` alone; the last panel of a matrix is as much lower as the matrix demands.
// So a row's bits depend on its place in the tile and on the weights, not on how work is shared. The library makes code
// for a shape when it first meets it, which can fail for want of memory: prepare() does that before threads begin to
// work, and products in them never throw.
//
// fp32 weights are multiplied as they are, others widened; unless the processor has matrix instructions for bf16 and
// the weights are bf16, or quantised with one scale for each row, whose numbers bf16 holds. There each x is the sum of
// three bf16 numbers, whose products are exact and are summed in fp32, in half the time. Or, where that is asked for, x
// is rounded to one bf16 number, and quantised weights with more scales are too. Where not, and the processor has
// integer dot products, int8 weights with one scale for each row are multiplied by x in digits (matvec_digits.inl).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/ops.h"

namespace mmrec::kernels {

/// fp32 weights of one panel, widened from their stored type, at most.
inline constexpr std::int64_t kPanelFloats = std::int64_t{256} * 1024;
inline constexpr std::int64_t kMostPanelRows = 128;
inline constexpr std::int64_t kLeastPanelRows = 16;

/// Weight rows of a panel: as many as fit kPanelFloats, a multiple of kLeastPanelRows. Wider inputs than kPanelFloats /
/// kLeastPanelRows have no panel (0): such products stay with the matrix-vector kernel.
constexpr std::int64_t panel_rows(std::int64_t in) {
  return std::min(kPanelFloats / std::max<std::int64_t>(in, 1) / kLeastPanelRows * kLeastPanelRows, kMostPanelRows);
}

/// The matrix library: its version, the instructions it uses, and the kind of processor, by which it may choose blocks.
/// The bits of its products follow from these.
std::string matrix_library();

/// The library's code for the shapes met so far, and its scratch for each of a backend's threads.
class RowTileProducts {
 public:
  /// With `rounds_inputs`, matrix instructions for bf16 weights take x rounded to bf16, one part in place of three.
  RowTileProducts(int threads, bool rounds_inputs);
  ~RowTileProducts();

  /// Makes ready products of rows `x_stride` apart with all panels of `panel` rows of `weight`. Before each region of
  /// threads that multiplies, in which operands stay as they are. Throws std::bad_alloc, std::runtime_error where the
  /// library cannot do it.
  void prepare(std::int64_t x_stride, const WeightView<Host>& weight, std::int64_t panel);

  /// y[t][o] = x[t] . panel[o] for t < kRowTile; y [kRowTile, panel.rows]. `widened` holds kPanelFloats floats; fp32
  /// weights are used in place. Prepared; by several threads at once, each with its own number.
  void multiply(int thread, const float* x, std::int64_t x_stride, const WeightView<Host>& panel, float* widened,
                float* y) noexcept;

  /// After the region: throws std::bad_alloc if a product since the last check was not computed.
  void check();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mmrec::kernels
