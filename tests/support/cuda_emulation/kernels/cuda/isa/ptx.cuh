// Shadows kernels/cuda/isa/ptx.cuh: the functions of that folder with the same meaning in C++.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "async_copy.h"
#include "execution.h"
#include "kernels/cuda/runtime/tensor_map.h"
#include "kernels/tensor.h"
#include "tensor_core.h"

namespace mmrec::kernels::ptx {

namespace emulation = mmrec::cuda_emulation;

template <class T>
inline T* shared_memory() {
  return reinterpret_cast<T*>(emulation::this_thread().block->shared_window + emulation::kDynamicSharedOffset);
}

namespace detail {

inline void check_aligned(const void* address, std::uintptr_t bytes, const char* what) {
  if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0) {
    emulation::fail("%s: %p is not aligned to %ju bytes", what, address, static_cast<std::uintmax_t>(bytes));
  }
}
template <class T>
T load(const void* from, const char* what) {
  check_aligned(from, sizeof(T), what);
  T v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class T>
void store(void* to, T v, const char* what) {
  check_aligned(to, sizeof(T), what);
  std::memcpy(to, &v, sizeof v);
}

}  // namespace detail

// --- Loads and stores with cache hints -------------------------------------------------------------------------------

inline uint4 load_streaming(const void* from) { return detail::load<uint4>(from, "load_streaming"); }
inline void store_streaming(void* to, uint4 v) { detail::store(to, v, "store_streaming"); }

// --- Arithmetic ------------------------------------------------------------------------------------------------------

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < FLT_MIN ? 0.0F : y;  // NaN stays
}
inline float log2_approx(float x) { return std::log2(x); }
template <class T>
inline void forget(T&) {}
inline BFloat16 to_bfloat16(float x) { return std::isnan(x) ? BFloat16{0x7fff} : from_float<BFloat16>(x); }
inline Float16 to_float16(float x) { return std::isnan(x) ? Float16{0x7fff} : from_float<Float16>(x); }
inline float from_float16(Float16 x) { return to_float(x); }
template <class T>
inline std::uint32_t to_pair(float low, float high) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return to_bfloat16(low).bits | static_cast<std::uint32_t>(to_bfloat16(high).bits) << 16;
  } else {
    return to_float16(low).bits | static_cast<std::uint32_t>(to_float16(high).bits) << 16;
  }
}
inline std::uint32_t to_float8_quad(const float (&x)[4]) {
  std::uint32_t bits = 0;
  for (unsigned i = 0; i < 4; ++i) bits |= std::uint32_t{from_float<Float8>(x[i]).bits} << 8 * i;
  return bits;
}
namespace detail {
/// choose(x, y) of the lower and of the upper halves, rounded; NaN as the instructions write it.
template <class T, class Choose>
std::uint32_t map_pairs(std::uint32_t a, std::uint32_t b, Choose choose) {
  std::uint32_t pair = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const float x = to_float(T{static_cast<std::uint16_t>(a >> shift)});
    const float y = to_float(T{static_cast<std::uint16_t>(b >> shift)});
    const float chosen = choose(x, y);
    pair |= static_cast<std::uint32_t>(std::isnan(chosen) ? 0x7fff : from_float<T>(chosen).bits) << shift;
  }
  return pair;
}
// -0 is less than +0.
inline float larger(float x, float y) { return x == y ? (std::signbit(x) ? y : x) : std::fmax(x, y); }
inline float smaller(float x, float y) { return x == y ? (std::signbit(x) ? x : y) : std::fmin(x, y); }
inline float smaller_or_nan(float x, float y) { return std::isnan(x) || std::isnan(y) ? NAN : smaller(x, y); }
}  // namespace detail
template <class T>
inline std::uint32_t min_pair(std::uint32_t a, std::uint32_t b) {
  return detail::map_pairs<T>(a, b, detail::smaller_or_nan);
}
template <class T>
inline std::uint32_t max_pair(std::uint32_t a, std::uint32_t b) {
  return detail::map_pairs<T>(a, b, detail::larger);
}
inline std::uint32_t add_pair(std::uint32_t a, std::uint32_t b) {
  return detail::map_pairs<BFloat16>(a, b, [](float x, float y) { return x + y; });
}
inline std::uint32_t mul_pair(std::uint32_t a, std::uint32_t b) {
  return detail::map_pairs<BFloat16>(a, b, [](float x, float y) { return x * y; });
}

template <class T>
inline void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  emulation::mma_m16n8k16<T>(d, a, b);
}
inline void mma_m16n8k32(int (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  emulation::mma_m16n8k32(d, a, b);
}

// --- Order of memory accesses ----------------------------------------------------------------------------------------

inline std::uint32_t load_acquire(const std::uint32_t* from) { return *from; }
inline std::uint32_t add_acq_rel(std::uint32_t* at, std::uint32_t v) { return atomicAdd(at, v); }
inline std::uint32_t load_relaxed(const std::uint32_t* from) { return *from; }
inline std::uint16_t load_relaxed(const std::uint16_t* from) { return *from; }
inline void store_relaxed(std::uint32_t* to, std::uint32_t v) { *to = v; }
inline void store_relaxed(std::uint16_t* to, std::uint16_t v) { *to = v; }
inline void add_release(std::uint32_t* at, std::uint32_t v) { atomicAdd(at, v); }
inline void store_for_host(std::uint32_t* to, std::uint32_t v) { detail::store(to, v, "store_for_host"); }
inline void spin_pause() { emulation::pause("spin_pause"); }
inline void spin_briefly() { emulation::pause("spin_briefly"); }
inline void wait_for_predecessor() {}
inline void allow_successor() {}

// --- sm_90: barriers in shared memory, the copy engine, clusters -----------------------------------------------------

inline std::uint32_t shared_address(const void* p) { return emulation::shared_offset(p, 1, "shared_address"); }
inline void mbarrier_init(std::uint64_t* barrier, unsigned arrivals) { emulation::mbarrier_init(barrier, arrivals); }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect(std::uint64_t* barrier, unsigned bytes) {
  emulation::mbarrier_arrive(*emulation::this_thread().block, barrier, bytes);
}
inline void mbarrier_arrive(std::uint64_t* barrier) { mbarrier_arrive_expect(barrier, 0); }
inline void mbarrier_arrive_after(std::uint64_t* barrier, std::uint32_t /*loaded*/) { mbarrier_arrive(barrier); }
inline void mbarrier_arrive_at(std::uint64_t* barrier, unsigned rank) {
  emulation::Block& block = emulation::block_of_cluster(rank);
  emulation::mbarrier_arrive(block, static_cast<std::uint64_t*>(emulation::at_block(block, barrier)), 0);
}
inline void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity) { emulation::mbarrier_wait(barrier, parity); }
inline unsigned cluster_rank() { return emulation::this_thread().block->cluster_rank; }
inline void cluster_sync() { emulation::meet_cluster("cluster_sync"); }
inline void cluster_sync_memory() { emulation::meet_cluster("cluster_sync_memory"); }
inline void cluster_arrive() {}
inline void cluster_wait() { emulation::meet_cluster("cluster_wait"); }
template <class T>
requires std::is_same_v<T, float4> || std::is_same_v<T, std::uint32_t> || std::is_same_v<T, unsigned long long>
inline T load_from_cluster(const T* at, unsigned rank) {
  return detail::load<T>(emulation::at_block(emulation::block_of_cluster(rank), at), "load_from_cluster");
}

struct ClusterPlace {
  emulation::Block* block;
  std::byte* address;
};
inline ClusterPlace operator+(ClusterPlace place, int bytes) { return {place.block, place.address + bytes}; }
inline ClusterPlace place_in_cluster(const void* at, unsigned rank) {
  emulation::Block& block = emulation::block_of_cluster(rank);
  return {&block, static_cast<std::byte*>(emulation::at_block(block, at))};
}
inline void store_async(ClusterPlace to, uint4 v, ClusterPlace barrier) {
  emulation::store_async(*to.block, to.address, &v, sizeof v, barrier.address);
}
inline void store_async(ClusterPlace to, uint2 v, ClusterPlace barrier) {
  emulation::store_async(*to.block, to.address, &v, sizeof v, barrier.address);
}

inline std::uint64_t evict_first() { return 0; }
inline void bulk_copy(void* to, const void* from, unsigned bytes, std::uint64_t* barrier, std::uint64_t) {
  emulation::bulk_copy(to, from, bytes, barrier);
}
inline void prefetch_tensor_map(const TensorMap*) {}
inline void load_box(void* to, const TensorMap* map, std::uint64_t* barrier, int x, int y, int z) {
  emulation::load_box(*emulation::this_thread().block, to, map, barrier, {x, y, z});
}
inline void load_box(void* to, const TensorMap* map, std::uint64_t* barrier, int x, int y, int z, std::uint64_t) {
  load_box(to, map, barrier, x, y, z);
}
inline void load_box_multicast(void* to, const TensorMap* map, std::uint64_t* barrier, int x, int y, int z,
                               std::uint16_t ranks) {
  for (unsigned rank = 0; rank < 16; ++rank) {
    if ((ranks >> rank & 1) == 0) continue;
    emulation::Block& block = emulation::block_of_cluster(rank);
    emulation::load_box(block, emulation::at_block(block, to), map,
                        static_cast<std::uint64_t*>(emulation::at_block(block, barrier)), {x, y, z});
  }
}

inline void named_barrier_sync(int id, int threads) {
  emulation::meet_block(static_cast<unsigned>(id), "named_barrier_sync", static_cast<unsigned>(threads));
}
inline void named_barrier_arrive(int id, int threads) {
  emulation::arrive_at_block(static_cast<unsigned>(id), static_cast<unsigned>(threads));
}
inline void named_barrier_arrive_after(int id, int threads, std::uint32_t /*loaded*/) {
  named_barrier_arrive(id, threads);
}

inline ulonglong2 load_relaxed_pair(const ulonglong2* from) {
  return detail::load<ulonglong2>(from, "load_relaxed_pair");
}
inline void store_relaxed_pair(ulonglong2* to, ulonglong2 v) { detail::store(to, v, "store_relaxed_pair"); }
inline void load_relaxed_if(bool wanted, const uint4* from, uint4& v) {
  if (wanted) v = detail::load<uint4>(from, "load_relaxed_if");
}
inline uint4 load_relaxed_quad(const uint4* from) { return detail::load<uint4>(from, "load_relaxed_quad"); }
inline void store_relaxed_quad(uint4* to, uint4 v) { detail::store(to, v, "store_relaxed_quad"); }
inline int opaque(int x) { return x; }
inline void prefetch_l2(const void*) {}
inline std::uint32_t warp_max(std::uint32_t x) {
  for (int m = 16; m > 0; m /= 2) x = max(x, __shfl_xor_sync(0xffffffffU, x, m));
  return x;
}
inline std::uint32_t warp_min(std::uint32_t x) {
  for (int m = 16; m > 0; m /= 2) x = min(x, __shfl_xor_sync(0xffffffffU, x, m));
  return x;
}
inline std::uint32_t warp_sum(std::uint32_t x) {
  for (int m = 16; m > 0; m /= 2) x += __shfl_xor_sync(0xffffffffU, x, m);
  return x;
}

// --- sm_90a: products of warpgroups ----------------------------------------------------------------------------------

inline std::uint64_t wgmma_operand(const void* rows) {
  return shared_address(rows) >> 4 | std::uint64_t{1} << 16 | std::uint64_t{64} << 32 | std::uint64_t{1} << 62;
}
inline void wgmma_fence() { emulation::this_thread().products_fenced = true; }
inline void wgmma_commit() { emulation::this_thread().products.commit(); }
/// A warpgroup's products are one: no thread goes on while those of another still read their operands.
template <int kPending>
inline void wgmma_wait() {
  emulation::this_thread().products.wait(kPending);
  emulation::meet_warpgroup("wgmma_wait");
}
template <int kSize>
inline void wgmma_wait_all(float (&)[kSize]) {
  wgmma_wait<0>();
}
template <class T, int kSize>
inline void wgmma(float (&sum)[kSize], std::uint64_t a, std::uint64_t b, bool add) {
  static_assert(kSize == 16 || kSize == 32 || kSize == 64 || kSize == 128);
  emulation::wgmma<T>({2 * kSize, a, nullptr, b, add, sum});
}
template <int kSize>
inline void wgmma(float (&sum)[kSize], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
  static_assert(kSize == 16 || kSize == 32);
  emulation::wgmma<BFloat16>({2 * kSize, 0, a, b, add, sum});
}
template <int kCount>
inline void raise_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
}
template <int kCount>
inline void lower_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
}

}  // namespace mmrec::kernels::ptx
