// Items of uneven work that may throw, shared out to threads that live as long as the call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace mmrec::kernels {

/// Runs work(i) for i in [0, count) on up to `threads` threads, of which the caller's is one, claimed in rising order.
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
