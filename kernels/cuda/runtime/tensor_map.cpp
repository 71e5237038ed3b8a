// Tensor maps by the driver's encoder, looked up through the runtime so that nothing links against the driver.
#include "kernels/cuda/runtime/tensor_map.h"

#include <cuda.h>

#include <cstring>
#include <limits>

#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {
namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr std::int64_t kMostStrideBytes = std::int64_t{1} << 40;

bool size_fits(std::int64_t size) { return size >= 1 && size <= std::numeric_limits<std::int32_t>::max(); }
bool stride_fits(std::int64_t elements) {
  return elements > 0 && elements * kElementBytes % 16 == 0 && elements < kMostStrideBytes / kElementBytes;
}

decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto encode = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found),
               "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess) check_cuda(cudaErrorSymbolNotFound, "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(address);
  }();
  return encode;
}

}  // namespace

bool has_tensor_map(const MatrixStack& s) {
  return size_fits(s.columns) && size_fits(s.rows) && size_fits(s.depth) &&
         reinterpret_cast<std::uintptr_t>(s.data) % 16 == 0 && (s.rows == 1 || stride_fits(s.row_stride)) &&
         (s.depth == 1 || stride_fits(s.depth_stride));
}

TensorMap make_tensor_map(const MatrixStack& s, int box_rows, int box_depth, bool wide, int box_columns) {
  // The stride of a dimension of length 1 is never used, but must be a valid one.
  const std::int64_t row_bytes =
      s.rows == 1 ? (s.columns * kElementBytes + 15) / 16 * 16 : s.row_stride * kElementBytes;
  const std::int64_t depth_bytes = s.depth == 1 ? s.rows * row_bytes : s.depth_stride * kElementBytes;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(s.columns), static_cast<cuuint64_t>(s.rows),
                               static_cast<cuuint64_t>(s.depth)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(depth_bytes)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(box_depth)};
  const CUtensorMapSwizzle swizzle = box_columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : box_columns == 16 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                         : CU_TENSOR_MAP_SWIZZLE_NONE;
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult code = encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(s.data), sizes, strides,
                                  box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                  wide ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_cuda(static_cast<cudaError_t>(code), "cuTensorMapEncodeTiled");  // the two APIs number their errors alike
  TensorMap result;
  static_assert(sizeof result == sizeof map);
  std::memcpy(&result, &map, sizeof result);
  return result;
}

}  // namespace mmrec::kernels
