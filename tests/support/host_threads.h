// Host threads for tests: loops shared over all processors, as float64 references need them, and bodies that run side
// by side. What is thrown in a thread is thrown again by the caller when all threads have ended, so that a test fails
// with its message instead of ending the process.
//
// Results do not depend on the number of threads: a loop's calls may write nothing that another of its calls looks at,
// and what they return is combined in the order of their index. They are host code that asserts nothing: gtest's fatal
// failures leave the function that they stand in, and a message belongs to the test's own thread.
#pragma once

#include <exception>
#include <initializer_list>
#include <mutex>
#include "tests/support/prelude.h"

namespace mmrec::test {

inline std::int64_t host_processors() { return std::max<std::int64_t>(std::thread::hardware_concurrency(), 1); }

/// The first exception of several threads.
class FirstException {
 public:
  /// Runs the body; true if it threw.
  template <class F>
  bool caught_in(const F& body) noexcept {
    try {
      body();
      return false;
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (first_ == nullptr) first_ = std::current_exception();
      return true;
    }
  }
  void rethrow() const {
    if (first_ != nullptr) std::rethrow_exception(first_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr first_;
};

/// Every body in a thread of its own, all at once.
inline void run_together(std::initializer_list<std::function<void()>> bodies) {
  FirstException exception;
  {
    std::vector<std::jthread> threads;
    for (const auto& body : bodies) threads.emplace_back([&] { exception.caught_in(body); });
  }
  exception.rethrow();
}

/// f(i) for every i in [0, count), in any order on all processors. The caller begins alone: what takes less time than
/// threads do to start stays in its thread.
template <class F>
void parallel_for(std::int64_t count, const F& f) {
  const std::int64_t chunk = std::max<std::int64_t>(count / (64 * host_processors()), 1);
  std::atomic<std::int64_t> next{0};
  FirstException exception;
  const auto take_chunk = [&] {
    const std::int64_t begin = next.fetch_add(chunk);
    if (begin >= count) return false;
    const std::int64_t end = std::min(begin + chunk, count);
    const bool threw = exception.caught_in([&] {
      for (std::int64_t i = begin; i < end; ++i) f(i);
    });
    if (threw) next = count;
    return true;
  };
  const auto start = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> threads;
    while (take_chunk()) {
      const bool is_short = std::chrono::steady_clock::now() - start < std::chrono::microseconds(500);
      if (is_short || !threads.empty()) continue;
      for (std::int64_t t = 1; t < host_processors(); ++t) {
        threads.emplace_back([&] {
          while (take_chunk()) continue;
        });
      }
    }
  }
  exception.rethrow();
}

/// {f(0), f(1), ...}
template <class F>
auto parallel_map(std::int64_t count, const F& f) {
  static_assert(!std::is_same_v<decltype(f(count)), bool>, "elements of vector<bool> share bytes");
  std::vector<decltype(f(count))> results(static_cast<std::size_t>(count));
  parallel_for(count, [&](std::int64_t i) { results[static_cast<std::size_t>(i)] = f(i); });
  return results;
}

/// The largest f(i), at least 0; infinite where one is NaN.
template <class F>
double parallel_max(std::int64_t count, const F& f) {
  double worst = 0.0;
  std::mutex mutex;  // the largest is the largest in any order
  const std::int64_t part = std::max<std::int64_t>(count / (16 * host_processors()), 1);
  parallel_for((count + part - 1) / part, [&](std::int64_t p) {
    double most = 0.0;
    for (std::int64_t i = p * part; i < std::min((p + 1) * part, count); ++i) {
      const double x = f(i);
      most = std::isnan(x) ? std::numeric_limits<double>::infinity() : std::max(most, x);
    }
    const std::lock_guard lock(mutex);
    worst = std::max(worst, most);
  });
  return worst;
}

/// The first i in [0, count) of which `holds` is false; `count` if there is none.
template <class F>
std::int64_t first_failure(std::int64_t count, const F& holds) {
  std::atomic<std::int64_t> first{count};
  parallel_for(count, [&](std::int64_t i) {
    if (i >= first.load(std::memory_order_relaxed) || holds(i)) return;
    std::int64_t known = first;
    while (i < known && !first.compare_exchange_weak(known, i)) continue;
  });
  return first;
}

}  // namespace mmrec::test
