// Products of one whole row tile with a panel of a weight matrix, through
// OpenBLAS.
//
// What must stay true: every call of the library has the shape [kRowTile, in] x
// [panel, in]^T with a panel height that follows from `in` alone (the last
// panel of a matrix is as much lower as the matrix demands), on one thread of
// the library. So a row's bits depend on its place in the tile and on the
// weights, not on how work is shared.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/backend.h"

namespace mmrec::kernels {

/// fp32 weights of one panel, widened from their stored type, at most.
inline constexpr std::int64_t kPanelFloats = std::int64_t{256} * 1024;
inline constexpr std::int64_t kMostPanelRows = 128;
inline constexpr std::int64_t kLeastPanelRows = 16;

/// Weight rows of a panel: as many as fit kPanelFloats, a multiple of
/// kLeastPanelRows. Wider inputs than kPanelFloats / kLeastPanelRows have no
/// panel (0): such products stay with the matrix-vector kernel.
constexpr std::int64_t panel_rows(std::int64_t in) {
  return std::min(kPanelFloats / std::max<std::int64_t>(in, 1) / kLeastPanelRows * kLeastPanelRows, kMostPanelRows);
}

/// y[t][o] = x[t] . panel[o] for t < kRowTile. `widened` holds kPanelFloats
/// floats; fp32 weights are used in place.
void row_tile_product(const float* x, std::int64_t x_stride, const WeightView<Host>& panel, float* widened, float* y,
                      std::int64_t y_stride);

}  // namespace mmrec::kernels
