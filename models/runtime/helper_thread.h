// A thread that does one thing at a time beside the thread that owns it.
#pragma once

#include <array>
#include <cstddef>
#include <exception>
#include <optional>

#include "kernels/cpu/thread_pool.h"

namespace mmrec::models {

class HelperThread {
 public:
  /// Runs f(0) on this thread and f(1) on the helper, which starts with the first call. Returns when both are done and
  /// throws what either has thrown. Runs one after the other if the system gives no thread.
  template <class F>
  void run(const F& f) {
    if (!pool_) pool_.emplace(2);
    std::array<std::exception_ptr, 2> faults;
    const auto run_side = [&](std::size_t side) {
      try {
        f(side);
      } catch (...) {
        faults[side] = std::current_exception();
      }
    };
    if (pool_->threads() == 2) {
      pool_->run([&](int side) { run_side(static_cast<std::size_t>(side)); });
    } else {
      run_side(0);
      run_side(1);
    }
    for (const std::exception_ptr& fault : faults) {
      if (fault) std::rethrow_exception(fault);
    }
  }

 private:
  std::optional<kernels::ThreadPool> pool_;
};

}  // namespace mmrec::models
