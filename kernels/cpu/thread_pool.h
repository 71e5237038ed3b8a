// A small pool for short parallel regions: workers spin briefly between regions, then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace mmrec::kernels {

/// How often this process has been forked off another one: of its threads none came along but the one that called
/// fork().
std::uint32_t forks();

/// A fixed set of threads that run one region at a time. The calling thread takes part as thread 0.
///
/// In a process that was forked off while no region ran, the first region starts the threads anew, and then throws
/// std::system_error if it cannot.
class ThreadPool {
 public:
  /// `threads` counts the caller; 1 starts no thread. Has fewer threads where the system cannot start as many. Throws
  /// std::bad_alloc.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(ThreadPool&&) noexcept;
  ThreadPool& operator=(ThreadPool&&) noexcept;

  int threads() const;
  /// Processors that this process may run on, at least 1.
  static int available_processors();

  /// Calls body(thread) once on every thread and returns when all have returned. Not reentrant. body must not throw.
  template <class Body>
  void run(Body&& body) {
    run_erased([](void* context, int thread) { (*static_cast<std::remove_reference_t<Body>*>(context))(thread); },
               const_cast<void*>(static_cast<const void*>(&body)));
  }

  /// Calls body(thread) on the calling thread and on every other thread that comes before the caller's own call has
  /// returned; waits for those. For bodies that take work from a common counter until none is left: a thread that the
  /// system does not run, on a busy machine, then delays nobody. No barrier() inside.
  template <class Body>
  void run_sharing(Body&& body) {
    share_erased([](void* context, int thread) { (*static_cast<std::remove_reference_t<Body>*>(context))(thread); },
                 const_cast<void*>(static_cast<const void*>(&body)));
  }

  /// Calls body(begin, end, thread) on disjoint contiguous ranges that cover [0, count), cut at multiples of `grain`; a
  /// thread may get several. Small counts run on the calling thread alone. How the range is cut must not change
  /// results.
  template <class Body>
  void parallel_for(std::int64_t count, std::int64_t grain, Body&& body) {
    const std::int64_t grains = (count + grain - 1) / grain;
    if (grains <= 1 || threads() == 1) {
      if (count > 0) body(std::int64_t{0}, count, 0);
      return;
    }
    constexpr std::int64_t kRangesPerThread = 4;  // evens out threads of uneven speed
    const std::int64_t ranges = grains < kRangesPerThread * threads() ? grains : kRangesPerThread * threads();
    std::atomic<std::int64_t> next{0};
    run_sharing([&](int thread) {
      for (;;) {
        const std::int64_t range = next.fetch_add(1, std::memory_order_relaxed);
        if (range >= ranges) return;
        const std::int64_t limit = grains * (range + 1) / ranges * grain;
        body(grains * range / ranges * grain, limit < count ? limit : count, thread);
      }
    });
  }

  /// Waits until every thread of the current region has arrived. Only inside run(); every thread must call it.
  void barrier();

 private:
  using Function = void (*)(void*, int);
  void run_erased(Function function, void* context);
  void share_erased(Function function, void* context);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Elements of light work that are worth waking another thread for.
inline constexpr std::int64_t kElementsPerThread = 8192;
/// Grain of a parallel_for over rows of `cols` elements.
constexpr std::int64_t rows_per_thread(std::int64_t cols) {
  return cols >= kElementsPerThread ? 1 : kElementsPerThread / (cols < 1 ? 1 : cols);
}

}  // namespace mmrec::kernels
