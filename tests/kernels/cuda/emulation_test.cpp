// The host emulation of CUDA tested itself: what kernels may not do is reported or shows. What they may do is tested by
// the tests of the kernels that do it, against float64. Compiled for the emulation only.
#include <cuda_runtime.h>

#include <set>

#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/cuda/runtime/launch.cuh"
#include "kernels/cuda/runtime/tensor_map.h"
#include "tests/ops/op_test.h"
#include "tests/support/cuda_emulation/sanitizer.h"

namespace mmrec::kernels {
namespace {

constexpr unsigned kAll = 0xffffffffU;

class EmulationTest : public test::OpTest {
 protected:
  void TearDown() override {}  // kernels here leave flags behind
  /// Runs `kernel` and returns the `count` words that it has written to its first parameter.
  template <class... Parameters, class... Arguments>
  std::vector<std::uint32_t> run(LaunchConfig config, std::size_t count, void (*kernel)(Parameters...),
                                 Arguments... arguments) {
    DeviceBuffer<std::uint32_t> out = test::unwritten<std::uint32_t>(on(), count);
    launch(on().stream(), config, kernel, out.data(), arguments...);
    return test::download(on(), out);
  }
};
using EmulationDeathTest = EmulationTest;

// --- Barriers --------------------------------------------------------------------------------------------------------

__global__ void without_a_barrier(std::uint32_t* out, bool from_below) {
  std::uint32_t* line = ptx::shared_memory<std::uint32_t>();
  line[threadIdx.x] = threadIdx.x;
  out[blockIdx.x * blockDim.x + threadIdx.x] = line[(threadIdx.x + (from_below ? blockDim.x - 1 : 1)) % blockDim.x];
}

TEST_F(EmulationTest, AMissingBarrierShowsInOneOfTwoBlocks) {
  const LaunchConfig config{.grid = 2, .block = 64, .shared_bytes = 256};
  for (const bool from_below : {false, true}) {
    const auto out = run(config, 128, without_a_barrier, from_below);
    const std::set<std::uint32_t> found = {out[5], out[64 + 5]};
    EXPECT_EQ(found, (std::set<std::uint32_t>{kAll, from_below ? 4U : 6U}));  // shared memory starts as ones
  }
}

TEST_F(EmulationTest, AMissingBarrierOfASingleBlockShowsInFourLaunches) {
  const LaunchConfig config{.grid = 1, .block = 64, .shared_bytes = 256};
  std::set<std::uint32_t> found;
  for (int i = 0; i < 4; ++i) found.insert(run(config, 64, without_a_barrier, true)[5]);
  EXPECT_EQ(found, (std::set<std::uint32_t>{kAll, 4U}));
}

__global__ void some_leave_early(std::uint32_t* out) {
  if (threadIdx.x % 3 == 0) return;
  __syncthreads();
  out[threadIdx.x] =
      static_cast<std::uint32_t>(__popc(__ballot_sync(kAll, 1)) + 100 * __any_sync(kAll, threadIdx.x % 3 == 0));
}

TEST_F(EmulationTest, ExitedThreadsAreNotWaitedFor) {
  const auto out = run({.grid = 1, .block = 48}, 48, some_leave_early);
  EXPECT_EQ(out[0], kAll);
  EXPECT_EQ(out[1], 21U);   // lanes 0, 3, ... 30 of the first warp have left
  EXPECT_EQ(out[47], 11U);  // of the 16 threads of the second warp, 33, 36, 39, 42 and 45 have left
}

__global__ void divergent_barrier(std::uint32_t* out) {
  if (threadIdx.x < 7) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  out[threadIdx.x] = 0;
}
__global__ void divergent_shuffle(std::uint32_t* out) {
  if (threadIdx.x == 3) {
    out[0] = __shfl_sync(kAll, threadIdx.x, 0);
  } else {
    out[1] = __ballot_sync(kAll, 1);
  }
}
__global__ void spins_forever(std::uint32_t* out) {
  while (ptx::load_acquire(out) != 1) ptx::spin_pause();
}

TEST_F(EmulationDeathTest, ThreadsThatCannotGoOnAreReported) {
  EXPECT_DEATH(run({.grid = 1, .block = 32}, 32, divergent_barrier),
               "deadlock.*\n.*7 threads wait at __syncthreads; the first: block \\(0, 0, 0\\) thread \\(0, 0, 0\\)\n"
               ".*25 threads wait at __syncwarp; the first: block \\(0, 0, 0\\) thread \\(7, 0, 0\\)");
  EXPECT_DEATH(run({.grid = 1, .block = 32}, 2, divergent_shuffle), "other lanes of mask ffffffff are at");
  EXPECT_DEATH(run({.grid = dim3(1, 2), .block = 1}, 1, spins_forever), "livelock.*\n.*1 threads wait at spin_pause");
}

// --- Blocks that wait for each other ---------------------------------------------------------------------------------

__global__ void all_meet(std::uint32_t* out) {
  ptx::add_acq_rel(out, 1);
  while (ptx::load_acquire(out) < gridDim.x - 1) ptx::spin_pause();
}

TEST_F(EmulationDeathTest, OnlyBlocksOfACooperativeGridMayAllWaitForEachOther) {
  EXPECT_EQ(run({.grid = 4, .block = 1, .cooperative = true}, 1, all_meet)[0], 3U);  // from all bits set on
  EXPECT_DEATH(run({.grid = 4, .block = 1}, 1, all_meet), "livelock");
  EXPECT_THROW(run({.grid = 1000, .block = 96, .cooperative = true}, 1, all_meet), std::system_error);
}

// --- Memory ----------------------------------------------------------------------------------------------------------

__global__ void write_at(std::uint32_t* out, std::int64_t i) { out[i] = 1; }
[[maybe_unused]] __global__ void write_shared_at(std::uint32_t* out, int i) {
  ptx::shared_memory<std::uint32_t>()[i] = 1;
  *out = 0;
}
__global__ void load_vector_at(std::uint32_t* out, int i) { out[0] = ptx::load_streaming(out + i).x; }

TEST_F(EmulationDeathTest, AccessesOutOfBoundsAreFound) {
#if defined(MMREC_ADDRESS_SANITIZER)
  EXPECT_DEATH(run({.grid = 1, .block = 1}, 25, write_at, 25), "heap-buffer-overflow");
  EXPECT_DEATH(run({.grid = 1, .block = 1, .shared_bytes = 100}, 1, write_shared_at, 25), "heap-buffer-overflow");
  EXPECT_DEATH(run({.grid = 1, .block = 1, .shared_bytes = 100}, 1, write_shared_at, -1), "use-after-poison");
#endif
  EXPECT_DEATH(run({.grid = 1, .block = 1}, 8, load_vector_at, 1), "load_streaming: .* is not aligned to 16 bytes");
}

TEST_F(EmulationTest, LaunchesBeyondTheLimitsFail) {
  EXPECT_THROW(run({.grid = 1, .block = 1025}, 1, write_at, 0), std::system_error);
  EXPECT_THROW(run({.grid = 1, .block = dim3(1, 1, 65)}, 1, write_at, 0), std::system_error);
  EXPECT_THROW(run({.grid = dim3(1, 65536), .block = 1}, 1, write_at, 0), std::system_error);
  EXPECT_THROW(run({.grid = 1, .block = 1, .shared_bytes = (227 << 10) + 1}, 1, write_at, 0), std::system_error);
  EXPECT_EQ(run({.grid = 1, .block = 1, .shared_bytes = 227 << 10}, 1, write_at, 0)[0], 1U);
}

TEST_F(EmulationTest, MemoryIsFinite) {
  EXPECT_THROW(device_allocate(std::size_t{1} << 40), OutOfDeviceMemory);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// --- Graphs ----------------------------------------------------------------------------------------------------------

__global__ void increment(std::uint32_t* at, std::uint32_t by) { *at += by; }

class StreamTest : public EmulationTest {
 protected:
  void begin() { ASSERT_EQ(cudaStreamBeginCapture(on().stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess); }
  void add(cudaStream_t stream, std::uint32_t by) {
    launch(stream, {.grid = 1, .block = 1}, increment, at_.data(), by);
  }
  std::uint32_t value() { return test::download(on(), at_)[0]; }

  DeviceBuffer<std::uint32_t> at_{1};
};

TEST_F(StreamTest, AStreamOfAnotherBackendJoinsWithWhatItHasJoined) {
  Cuda other;
  cudaGraph_t graph = nullptr;
  for (const bool joins : {true, false}) {
    begin();
    other.follow(on());
    add(other.stream(), 1);
    other.fork();
    add(other.side_stream(), 10);
    if (joins) other.join();
    on().follow(other);
    EXPECT_EQ(cudaStreamEndCapture(on().stream(), &graph), joins ? cudaSuccess : cudaErrorStreamCaptureUnjoined);
    if (joins) cudaGraphDestroy(graph);
    cudaGetLastError();
  }
}

TEST_F(StreamTest, WhatMayNotBeCapturedFails) {
  cudaGraph_t graph = nullptr;
  begin();
  EXPECT_THROW(device_allocate(4), std::system_error);
  EXPECT_THROW(on().synchronize(), std::system_error);
  EXPECT_EQ(cudaStreamEndCapture(on().stream(), &graph), cudaErrorStreamCaptureInvalidated);
  begin();
  on().fork();
  add(on().side_stream(), 1);
  EXPECT_EQ(cudaStreamEndCapture(on().stream(), &graph), cudaErrorStreamCaptureUnjoined);
  cudaGetLastError();
  EXPECT_NO_THROW(on().synchronize());
}

// --- Streams: as late as synchronisation allows ----------------------------------------------------------------------

TEST_F(StreamTest, AStreamThatDoesNotWaitForAnotherReadsStaleData) {
  DeviceBuffer<std::uint32_t> copy(1);
  const auto increment_and_copy = [&](bool waits) {
    on().zero(at_.data(), 4);
    on().synchronize();
    add(on().stream(), 1);
    if (waits) on().fork();
    EXPECT_EQ(cudaMemcpyAsync(copy.data(), at_.data(), 4, cudaMemcpyDeviceToDevice, on().side_stream()), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(on().side_stream()), cudaSuccess);
    return test::download(on(), copy)[0];
  };
  EXPECT_EQ(increment_and_copy(false), 0U);
  EXPECT_EQ(increment_and_copy(true), 1U);
}

TEST_F(StreamTest, PinnedMemoryBelongsToTheCopyUntilItIsDone) {
  PinnedBuffer<std::uint32_t> pinned(1);
  std::uint32_t pageable = 1;
  *pinned.data() = 1;
  on().upload(&pageable, at_.data(), 1);
  pageable = 2;  // was staged
  EXPECT_EQ(value(), 1U);
  on().upload(pinned.data(), at_.data(), 1);
  *pinned.data() = 2;  // too early
  EXPECT_EQ(value(), 2U);
  add(on().stream(), 5);
  ASSERT_EQ(cudaMemcpyAsync(pinned.data(), at_.data(), 4, cudaMemcpyDeviceToHost, on().stream()), cudaSuccess);
  EXPECT_EQ(*pinned.data(), 2U);  // has not arrived
  on().synchronize();
  EXPECT_EQ(*pinned.data(), 7U);
}

// --- The copy engine -------------------------------------------------------------------------------------------------

/// Waits with thread 0 for a box of [2, 8, 64] elements and writes it out as it lies in shared memory.
__global__ void load_one_box(std::uint32_t* out, const __grid_constant__ TensorMap map, int x, int y, bool waits) {
  auto* box = reinterpret_cast<std::uint32_t*>(ptx::shared_memory<std::byte>() + 896);  // aligned to 1,024
  auto* barrier = ptx::shared_memory<std::uint64_t>();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_init_fence();
    ptx::load_box(box, &map, barrier, x, y, 0);
    ptx::mbarrier_arrive_expect(barrier, 2048);
  }
  __syncthreads();
  if (waits) ptx::mbarrier_wait(barrier, 0);
  for (unsigned i = threadIdx.x; i < 512; i += blockDim.x) out[i] = box[i];
}

class CopyEngineTest : public EmulationTest {
 protected:
  /// Elements are numbered [depth 2, rows 10, columns 72].
  CopyEngineTest() : host_(2 * 10 * 72) { std::iota(host_.begin(), host_.end(), std::uint16_t{1}); }
  std::vector<std::uint32_t> load_box(int x, int y, bool waits) {
    const DeviceBuffer<std::uint16_t> tensor = test::upload(on(), host_);
    const TensorMap map = make_tensor_map({tensor.data(), 72, 10, 2, 72, 720}, 8, 2);
    return run({.grid = 1, .block = 32, .shared_bytes = 896 + 2048}, 512, load_one_box, map, x, y, waits);
  }
  std::vector<std::uint16_t> host_;
};

TEST_F(CopyEngineTest, BoxesAreSwizzledAndPaddedWithZeros) {
  for (const auto& [x, y] : {std::pair{0, 0}, {16, 4}, {-5, -3}}) {
    const auto out = load_box(x, y, true);
    for (int depth = 0; depth < 2; ++depth) {
      for (int row = 0; row < 8; ++row) {
        for (int column = 0; column < 64; ++column) {
          const int place = depth * 512 + row * 64 + ((column / 8) ^ row) * 8 + column % 8;
          const auto got = out[static_cast<std::size_t>(place / 2)] >> (place % 2 * 16) & 0xffffU;
          const bool inside = y + row >= 0 && y + row < 10 && x + column >= 0 && x + column < 72;
          const int element = 720 * depth + 72 * (y + row) + x + column;
          ASSERT_EQ(got, inside ? host_[static_cast<std::size_t>(element)] : 0U)
              << depth << ' ' << row << ' ' << column;
        }
      }
    }
  }
}

TEST_F(CopyEngineTest, ACopyThatNobodyWaitsForIsReported) {
  EXPECT_DEATH(load_box(0, 0, false), "exited with copies into its shared memory");
}

__global__ void copy_in_bulk(std::uint32_t* out, const std::uint32_t* from, bool waits) {
  auto* barrier = ptx::shared_memory<std::uint64_t>();
  auto* line = ptx::shared_memory<std::uint32_t>() + 32;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::bulk_copy(line, from, 512, barrier, ptx::evict_first());
    ptx::mbarrier_arrive_expect(barrier, 512);
  }
  __syncthreads();
  if (waits) ptx::mbarrier_wait(barrier, 0);
  for (unsigned i = threadIdx.x; i < 128; i += 32) out[i] = line[i];
  __syncthreads();
  ptx::mbarrier_wait(barrier, 0);
}

TEST_F(CopyEngineTest, CopiesArriveWhenTheyAreWaitedFor) {
  std::vector<std::uint32_t> words(128);
  std::iota(words.begin(), words.end(), 7U);
  const DeviceBuffer<std::uint32_t> from = test::upload(on(), words);
  const LaunchConfig config{.grid = 2, .block = 32, .shared_bytes = 128 + 512};
  EXPECT_EQ(run(config, 128, copy_in_bulk, from.data(), true), words);
  EXPECT_EQ(run(config, 128, copy_in_bulk, from.data(), false)[3], kAll);
}

/// Every block sends 24 bytes to the next one of its cluster, which reads them before or after it has waited.
__global__ void pass_on(std::uint32_t* out, bool waits) {
  auto* barrier = ptx::shared_memory<std::uint64_t>();
  auto* line = ptx::shared_memory<std::uint32_t>() + 4;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_sync();
  if (threadIdx.x == 0) {
    const ptx::ClusterPlace next = ptx::place_in_cluster(barrier, (ptx::cluster_rank() + 1) % 4);
    const std::uint32_t first = 100 * blockIdx.x;
    ptx::store_async(next + 16, make_uint4(first, first + 1, first + 2, first + 3), next);
    ptx::store_async(next + 32, make_uint2(first + 4, first + 5), next);
    ptx::mbarrier_arrive_expect(barrier, 24);
  }
  ptx::cluster_sync();
  if (waits) ptx::mbarrier_wait(barrier, 0);
  if (threadIdx.x < 6) out[6 * blockIdx.x + threadIdx.x] = line[threadIdx.x];
  __syncthreads();
  ptx::mbarrier_wait(barrier, 0);
}

TEST_F(CopyEngineTest, StoresIntoOtherBlocksArriveWhenTheyAreWaitedFor) {
  const LaunchConfig config{.grid = 8, .block = 32, .shared_bytes = 48, .cluster = 4};
  const auto out = run(config, 48, pass_on, true);
  for (unsigned i = 0; i < out.size(); ++i) {
    const unsigned block = i / 6;
    EXPECT_EQ(out[i], 100 * (block / 4 * 4 + (block + 3) % 4) + i % 6);
  }
  EXPECT_EQ(run(config, 48, pass_on, false)[20], kAll);
}

__global__ void pairs(std::uint32_t* out, std::uint32_t a, std::uint32_t b) {
  out[0] = ptx::min_pair<BFloat16>(a, b);
  out[1] = ptx::max_pair<BFloat16>(a, b);
}

TEST_F(EmulationTest, ExtremesOfPairs) {
  const LaunchConfig config{.grid = 1, .block = 1};
  using Words = std::vector<std::uint32_t>;
  EXPECT_EQ(run(config, 2, pairs, 0x3f800000U, 0xc0008000U), (Words{0xc0008000U, 0x3f800000U}));  // (1, 0), (-2, -0)
  EXPECT_EQ(run(config, 2, pairs, 0x3f80ffffU, 0x7fc03f80U), (Words{0x7fff7fffU, 0x3f803f80U}));  // (1, NaN), (NaN, 1)
}

// --- Tensor cores ----------------------------------------------------------------------------------------------------

enum class Mistake { kNone, kOverwrites, kDoesNotWait };

/// out [64, 128] = 2 a bᵀ for a [64, 64], b [128, 64], one warpgroup.
template <class T>
__global__ void multiply(float* out, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                         Mistake mistake) {
  std::byte* tile = ptx::shared_memory<std::byte>() + 896;
  auto* barrier = ptx::shared_memory<std::uint64_t>();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_arrive_expect(barrier, (64 + 128) * 128);
    ptx::load_box(tile, &a, barrier, 0, 0, 0);
    ptx::load_box(tile + 64 * 128, &b, barrier, 0, 0, 0);
  }
  __syncthreads();
  ptx::mbarrier_wait(barrier, 0);
  float sum[64];
  const std::uint64_t rows = ptx::wgmma_operand(tile);
  for (std::uint64_t repeat = 0; repeat < 2; ++repeat) {
    ptx::wgmma_fence();
    for (std::uint64_t k = 0; k < 4; ++k) {
      ptx::wgmma<T>(sum, rows + 2 * k, rows + 64 * 8 + 2 * k, repeat != 0 || k != 0);
    }
    ptx::wgmma_commit();
  }
  if (mistake == Mistake::kOverwrites) tile[0] = std::byte{1};
  if (mistake != Mistake::kDoesNotWait) ptx::wgmma_wait_all(sum);
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 64; ++i) {
    const unsigned row = 16 * warp + lane / 4 + 8 * (i / 2 % 2);
    out[128 * row + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = sum[i];
  }
}

template <class T>
void multiply_with(Cuda& on, Mistake mistake) {
  const DeviceBuffer<T> a = test::upload(on, test::random_normal<T>(64 * 64)), b = test::unwritten<T>(on, 128 * 64);
  DeviceBuffer<float> out = test::unwritten<float>(on, 64 * 128);
  launch(on.stream(), {.grid = 1, .block = 128, .shared_bytes = 896 + (64 + 128) * 128}, multiply<T>, out.data(),
         make_tensor_map({a.data(), 64, 64, 1, 64, 0}, 64), make_tensor_map({b.data(), 64, 128, 1, 64, 0}, 128),
         mistake);
}

TEST_F(EmulationDeathTest, ProductsThatAreNotWaitedForAreReported) {
  test::for_activations([&]<class T>(T) {
    if constexpr (sizeof(T) == 2) {
      multiply_with<T>(on(), Mistake::kNone);
      EXPECT_DEATH(multiply_with<T>(on(), Mistake::kOverwrites), "an operand was overwritten");
      EXPECT_DEATH(multiply_with<T>(on(), Mistake::kDoesNotWait), "without having waited for its wgmma products");
    }
  });
}

}  // namespace
}  // namespace mmrec::kernels
