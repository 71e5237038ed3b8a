// A small pool for short parallel regions: workers spin briefly between regions, then sleep. And threads for items of
// uneven work that may throw, which live as long as the call.
#pragma once

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

namespace mmrec::kernels {

/// How often this process was forked off another one. A fork keeps only the thread that called it.
std::uint32_t forks();

/// While it lives, the calling thread blocks signals, and so does every thread that it starts, from its first
/// instruction on. So a signal of the process goes to a thread of the host, and a handler never runs on a thread of the
/// library. Not blocked: what a thread's own instructions raise, and unless `profilers`, SIGPROF, by which they sample
/// every thread.
class SignalsBlocked {
 public:
  explicit SignalsBlocked(bool profilers = false);
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

/// A fixed set of threads that run one region at a time. The calling thread takes part as thread 0.
///
/// In a process that was forked off while no region ran, the first region starts the threads again, and throws
/// std::system_error if it cannot.
class ThreadPool {
 public:
  /// `threads` counts the caller; 1 starts no thread. Has fewer threads where the system cannot start as many. Throws
  /// std::bad_alloc.
  explicit ThreadPool(int threads);
  ~ThreadPool();

  int threads() const;
  /// Processors that this process may run on, at least 1.
  static int available_processors();

  /// Calls body(thread) once on every thread and returns when all have returned. Not reentrant. body must not throw.
  template <class Body>
  void run(Body&& body) {
    run_any(std::ref(body), /*sharing=*/false);
  }

  /// Calls body(thread) on the calling thread and on every other thread that comes before the caller's own call has
  /// returned; waits for those. For bodies that take work from a common counter until none is left: a thread that the
  /// system does not run, on a busy machine, then delays nobody. No barrier() inside.
  template <class Body>
  void run_sharing(Body&& body) {
    run_any(std::ref(body), /*sharing=*/true);
  }

  /// Calls body(item, thread) for every item in [0, count). Threads claim the items in rising order.
  template <class Body>
  void share_items(std::int64_t count, const Body& body) {
    std::atomic<std::int64_t> next{0};
    run_sharing([&](int thread) {
      for (std::int64_t item = 0; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(item, thread);
    });
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
    share_items(ranges, [&](std::int64_t range, int thread) {
      const std::int64_t limit = grains * (range + 1) / ranges * grain;
      body(grains * range / ranges * grain, limit < count ? limit : count, thread);
    });
  }

  /// Waits until every thread of the current region has arrived. Only inside run(); every thread must call it.
  void barrier();

 private:
  void run_any(const std::function<void(int)>& body, bool sharing);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Elements of light work that are worth waking another thread for.
inline constexpr std::int64_t kElementsPerThread = 8192;
/// Grain of a parallel_for over rows of `cols` elements.
constexpr std::int64_t rows_per_thread(std::int64_t cols) {
  return cols >= kElementsPerThread ? 1 : kElementsPerThread / (cols < 1 ? 1 : cols);
}

/// The most threads that a ThreadPool of this process wanted and the system could not start.
int missing_threads();

/// Runs work(i) for i in [0, count), claimed in rising order, on up to `threads` threads including the caller's.
/// If some throw, the exception of the least i is rethrown: items below a failed one have been claimed already and are
/// finished.
template <class Work>
void parallel_items(std::size_t count, int threads, const Work& work) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::vector<std::exception_ptr> failures(count);
  const auto run = [&] {
    for (std::size_t i = 0; !failed && (i = next++) < count;) {
      try {
        work(i);
      } catch (...) {
        failures[i] = std::current_exception();
        failed = true;
      }
    }
  };
  {
    std::vector<std::jthread> others;
    const int wanted = static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(threads), count));
    try {
      const SignalsBlocked in_threads;
      for (int i = 1; i < wanted; ++i) others.emplace_back(run);
    } catch (const std::system_error&) {  // no more threads to be had: those there are do the work
    }
    run();
  }
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace mmrec::kernels
