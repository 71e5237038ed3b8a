// cuTensorMapEncodeTiled with the limits of the real one.
#include <cuda.h>

#include <cstring>
#include <string_view>

#include "async_copy.h"

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                const cuuint64_t* sizes, const cuuint64_t* stride_bytes, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  mmrec::cuda_emulation::TensorMapFields fields;
  fields.magic = fields.kMagic;
  fields.data = static_cast<const std::byte*>(data);
  fields.rank = static_cast<std::uint8_t>(rank);
  fields.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  fields.swizzle_128 = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  bool valid = rank >= 1 && rank <= 5 && data != nullptr && reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
               reinterpret_cast<std::uintptr_t>(map) % 64 == 0;
  for (cuuint32_t i = 0; valid && i < rank; ++i) {
    valid = sizes[i] >= 1 && sizes[i] <= cuuint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256 && element_strides[i] == 1;
    fields.sizes[i] = static_cast<std::uint32_t>(sizes[i]);
    fields.box[i] = static_cast<std::uint16_t>(box[i]);
  }
  for (cuuint32_t i = 0; valid && i + 1 < rank; ++i) {
    valid = stride_bytes[i] % 16 == 0 && stride_bytes[i] < cuuint64_t{1} << 40;
    fields.stride_bytes[i] = stride_bytes[i];
  }
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  const cuuint32_t row_bytes = box[0] * fields.element_bytes;
  if (row_bytes % 16 != 0 || (fields.swizzle_128 && row_bytes > 128)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &fields, sizeof fields);
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::string_view(name) == "cuTensorMapEncodeTiled";
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
