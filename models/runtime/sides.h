// Two stacks of a model at work side by side on one device: what each has of it. Specialised for a backend.
//
// A backend's Sides is made of its main backend and has
//   of(side)        the backend of a stack: side 0 or 1; the main one may be one of them
//   run(waits, f)   f(0) and f(1) side by side, each with of(side) alone, between earlier and later work of the main
//                   backend. waits: whether f makes the host wait; else it only enqueues, on a device, and may be
//                   recorded. Throws what they throw.
#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "kernels/cpu/cpu.h"
#include "models/runtime/helper_thread.h"

namespace mmrec::models {

template <class Backend>
class Sides;

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
      helper_.run(run);
    }
  }

 private:
  kernels::Cpu& main_;
  std::array<std::unique_ptr<kernels::Cpu>, 2> halves_;
  HelperThread helper_;
};

}  // namespace mmrec::models
