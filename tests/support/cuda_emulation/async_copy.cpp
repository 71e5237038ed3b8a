#include "async_copy.h"

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <string_view>
#include <vector>

namespace mmrec::cuda_emulation {
namespace {

/// An mbarrier as it lies in its 8 bytes. Shared memory that was never initialised (all ones) is told by `zero`.
struct MBarrier {
  std::uint64_t expected : 20;  // arrivals of every phase
  std::uint64_t pending : 20;   // arrivals that the current phase still waits for
  std::uint64_t bytes : 22;     // balance of the bytes announced and come, plus kNoBytes
  std::uint64_t zero : 1;
  std::uint64_t parity : 1;  // of the current phase
};
constexpr unsigned kNoBytes = 1U << 21;
constexpr unsigned kMostBytes = (1U << 20) - 1;

MBarrier load(const std::uint64_t* barrier) {
  MBarrier b;
  std::memcpy(&b, barrier, sizeof b);
  if (b.zero != 0 || b.expected == 0) fail("mbarrier %p is used before it was made", static_cast<const void*>(barrier));
  return b;
}

void store(std::uint64_t* barrier, MBarrier b) {
  if (b.pending == 0 && b.bytes == kNoBytes) {
    b.pending = b.expected;
    b.parity ^= 1U;
  }
  std::memcpy(barrier, &b, sizeof b);
}

void add_bytes(std::uint64_t* barrier, std::int64_t bytes) {
  MBarrier b = load(barrier);
  const std::int64_t balance = static_cast<std::int64_t>(b.bytes) - kNoBytes + bytes;
  if (balance > kMostBytes || -balance > kMostBytes)
    fail("mbarrier: %lld bytes are too many", static_cast<long long>(balance));
  b.bytes = static_cast<std::uint64_t>(balance + kNoBytes) & 0x3fffffU;
  store(barrier, b);
}

std::uint32_t offset_in(const Block& block, const void* data, std::size_t bytes, const char* what) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const auto begin = reinterpret_cast<std::uintptr_t>(block.shared_window) + kDynamicSharedOffset;
  if (address < begin || address + bytes > begin + block.shared_bytes) {
    fail("%s: %p is not in the dynamic shared memory of the block", what, data);
  }
  return static_cast<std::uint32_t>(address - begin + kDynamicSharedOffset);
}

/// The box in the order of its elements, 16 bytes at a time; what is outside of the tensor is zero.
void copy_box(const TensorMapFields& map, const int (&coordinates)[3], std::byte* window, std::uint32_t to) {
  constexpr int kPiece = 16 / TensorMapFields::kElementBytes;
  for (int z = 0; z < map.box[2]; ++z) {
    for (int y = 0; y < map.box[1]; ++y) {
      for (int x = 0; x < map.box[0]; x += kPiece, to += 16) {
        const std::int64_t column = std::int64_t{coordinates[0]} + x;
        const std::int64_t row = std::int64_t{coordinates[1]} + y;
        const std::int64_t depth = std::int64_t{coordinates[2]} + z;
        const std::uint32_t place = to ^ ((to >> 7 & (map.swizzle - 1U)) << 4);
        std::memset(window + place, 0, 16);
        if (row < 0 || row >= map.sizes[1] || depth < 0 || depth >= map.sizes[2]) continue;
        const std::int64_t first = std::max<std::int64_t>(column, 0);
        const std::int64_t last = std::min<std::int64_t>(column + kPiece, map.sizes[0]);
        if (first >= last) continue;
        const std::byte* from = map.data + static_cast<std::uint64_t>(row) * map.stride_bytes[0] +
                                static_cast<std::uint64_t>(depth) * map.stride_bytes[1] +
                                static_cast<std::uint64_t>(first) * map.kElementBytes;
        std::memcpy(window + place + (first - column) * map.kElementBytes, from,
                    static_cast<std::size_t>(last - first) * map.kElementBytes);
      }
    }
  }
}

}  // namespace

std::uint32_t shared_offset(const void* data, std::size_t bytes, const char* what) {
  return offset_in(*this_thread().block, data, bytes, what);
}

void mbarrier_init(std::uint64_t* barrier, unsigned arrivals) {
  if (shared_offset(barrier, 8, "mbarrier_init") % 8 != 0) fail("mbarrier_init: not aligned to 8 bytes");
  if (arrivals == 0 || arrivals > kMostBytes) fail("mbarrier_init: %u arrivals", arrivals);
  const MBarrier b{arrivals & kMostBytes, arrivals & kMostBytes, kNoBytes, 0, 0};
  std::memcpy(barrier, &b, sizeof b);
}

void mbarrier_arrive(Block& block, std::uint64_t* barrier, unsigned bytes) {
  offset_in(block, barrier, 8, "mbarrier_arrive");
  if (bytes != 0) add_bytes(barrier, bytes);
  MBarrier b = load(barrier);
  if (b.pending == 0) fail("mbarrier %p: more arrivals than it expects", static_cast<const void*>(barrier));
  --b.pending;
  store(barrier, b);
}

void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  Block& block = *this_thread().block;
  shared_offset(barrier, 8, "mbarrier_wait");
  while (load(barrier).parity == parity) {
    std::vector<BulkLoad> loads;
    std::erase_if(block.bulk_loads, [&](const BulkLoad& bulk) {
      if (bulk.barrier != barrier) return false;
      loads.push_back(bulk);
      return true;
    });
    for (const BulkLoad& bulk : loads) {
      bulk.copy();
      add_bytes(barrier, -static_cast<std::int64_t>(bulk.bytes));
    }
    if (loads.empty()) pause("mbarrier_wait");
  }
}

Block& block_of_cluster(unsigned rank) {
  Block& block = *this_thread().block;
  if (rank >= block.cluster_size) fail("block %u of a cluster of %u", rank, block.cluster_size);
  return block.cluster[rank];
}

void* at_block(Block& block, const void* data) { return block.shared_window + shared_offset(data, 1, "at_block"); }

void bulk_copy(void* to, const void* from, unsigned bytes, std::uint64_t* barrier) {
  if ((shared_offset(to, bytes, "bulk_copy") | reinterpret_cast<std::uintptr_t>(from) | bytes) % 16 != 0) {
    fail("bulk_copy: an address or %u bytes are not multiples of 16", bytes);
  }
  shared_offset(barrier, 8, "bulk_copy: barrier");
  this_thread().block->bulk_loads.push_back({barrier, bytes, [=] { std::memcpy(to, from, bytes); }});
}

void store_async(Block& block, void* to, const void* from, unsigned bytes, void* barrier) {
  if (offset_in(block, to, bytes, "store_async") % bytes != 0) fail("store_async: not aligned to %u bytes", bytes);
  if (offset_in(block, barrier, 8, "store_async: barrier") % 8 != 0) fail("store_async: barrier not aligned");
  std::array<std::byte, 16> data;
  std::memcpy(data.data(), from, bytes);
  block.bulk_loads.push_back(
      {static_cast<std::uint64_t*>(barrier), bytes, [=] { std::memcpy(to, data.data(), bytes); }});
}

void load_box(Block& block, void* to, const void* map, std::uint64_t* barrier, const int (&coordinates)[3]) {
  TensorMapFields fields;
  std::memcpy(&fields, map, sizeof fields);
  if (fields.magic != TensorMapFields::kMagic) fail("load_box: not a tensor map");
  const std::size_t bytes = std::size_t{fields.box[0]} * fields.box[1] * fields.box[2] * fields.kElementBytes;
  const std::uint32_t offset = offset_in(block, to, bytes, "load_box");
  if (offset % (128U * fields.swizzle) != 0) fail("load_box: offset %u is not aligned", offset);
  offset_in(block, barrier, 8, "load_box: barrier");
  block.bulk_loads.push_back(
      {barrier, bytes, [=, window = block.shared_window] { copy_box(fields, coordinates, window, offset); }});
}

}  // namespace mmrec::cuda_emulation

// The limits are those of the real one, and the type and the rank those of our maps.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                const cuuint64_t* sizes, const cuuint64_t* stride_bytes, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  mmrec::cuda_emulation::TensorMapFields fields;
  fields.magic = fields.kMagic;
  fields.data = static_cast<const std::byte*>(data);
  fields.swizzle = static_cast<std::uint8_t>(1U << swizzle);
  bool valid = type == CU_TENSOR_MAP_DATA_TYPE_UINT16 && rank == std::size(fields.sizes) && data != nullptr &&
               reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && reinterpret_cast<std::uintptr_t>(map) % 64 == 0;
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
  const cuuint32_t row_bytes = box[0] * fields.kElementBytes;
  if (row_bytes % 16 != 0 || (fields.swizzle != 1 && row_bytes > 16 * fields.swizzle)) return CUDA_ERROR_INVALID_VALUE;
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
