// Two stacks of a model side by side on one device, and the share of each. Specialised for a backend.
//
// Sides is made from the main backend and has
//   of(side)        the backend of a stack: side 0 or 1; the main one may be one of them
//   run(waits, f)   f(0) and f(1) side by side, each with of(side) alone, between earlier and later work of the main
//                   backend. waits: whether f makes the host wait; else it only enqueues, on a device, and may be
//                   recorded. Throws what they throw.
#pragma once

#include <array>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/thread_pool.h"

namespace mmrec::models {

template <class Backend>
class Sides;

/// A thread that does one thing at a time beside the thread that owns it.
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

/// Half of the threads each: stacks are independent, so they need not meet for every op. Threads of the main backend
/// wait meanwhile, and these while it works.
template <>
class Sides<kernels::Cpu> {
 public:
  explicit Sides(kernels::Cpu& main) : main_(main) {
    if (main.threads() < 2) return;
    halves_[0] = std::make_unique<kernels::Cpu>((main.threads() + 1) / 2, main.rounds_inputs());
    halves_[1] = std::make_unique<kernels::Cpu>(main.threads() / 2, main.rounds_inputs());
  }

  kernels::Cpu& of(std::size_t side) {
    const auto& half = halves_[side];
    return half == nullptr ? main_ : *half;
  }
  template <class Run>
  void run(bool /*waits*/, const Run& run) {
    if (halves_[0] == nullptr) {
      run(std::size_t{0});
      run(std::size_t{1});
    } else {
      for (const auto& half : halves_) half->observer = main_.observer;
      helper_.run(run);
    }
  }

 private:
  kernels::Cpu& main_;
  std::array<std::unique_ptr<kernels::Cpu>, 2> halves_;
  HelperThread helper_;
};

}  // namespace mmrec::models
