// How threads wait: for the kernel before theirs, for other blocks, for each other at barriers in shared memory (sm_90;
// most of it sm_80) and at numbered ones.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace mmrec::kernels::ptx {

/// Waits until the previous kernel on the stream has finished and its writes are visible (LaunchConfig::
/// overlap_predecessor); and lets the next such kernel start. No effect before sm_90.
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void allow_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Called inside a loop that waits for another block.
__device__ inline void spin_pause() {
#if __CUDA_ARCH__ >= 700
  __nanosleep(20);
#endif
}
/// The same where what is waited for comes within a microsecond: it sleeps no moment of it.
__device__ inline void spin_briefly() {}

/// Where the instructions below find something in shared memory.
__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// A barrier in shared memory, 8 bytes. Its phases are numbered 0, 1, 2, …; a phase completes when `arrivals` have
/// arrived and all bytes announced for it have come, and the next begins at once. Bytes may come before they are
/// announced (the balance is signed), as long as an arrival is still missing. One thread makes it, then
/// mbarrier_init_fence() and a barrier of the block or cluster let others use it.
__device__ inline void mbarrier_init(std::uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Announces bytes for the current phase and arrives once.
__device__ inline void mbarrier_arrive_expect(std::uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

/// Arrives once. What the thread has read and written before is done when the phase completes.
__device__ inline void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// Returns when the newest phase whose number has this parity (0 or 1) has completed: at once if the current phase has
/// the other parity. A new barrier is in phase 0, so parity 1 passes and parity 0 waits.
__device__ inline void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define MMREC_TRY_WAIT "mbarrier.test_wait"
#else
#define MMREC_TRY_WAIT "mbarrier.try_wait"  // may sleep
#endif
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t" MMREC_TRY_WAIT
        ".parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
#undef MMREC_TRY_WAIT
}

/// Barrier `id` (1..15) of `threads` threads of the block, a multiple of 32: sync arrives and waits, arrive does not
/// wait. Both order memory accesses.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace mmrec::kernels::ptx
