// Two stacks of a model side by side on a GPU.
#pragma once

#include <cstddef>
#include <optional>

#include "kernels/cuda/runtime/cuda.h"
#include "models/runtime/sides.h"

namespace mmrec::models {

/// A stream each, the first one the main one. A thread drives the second where sweeps make the host wait.
template <>
class Sides<kernels::Cuda> {
 public:
  explicit Sides(kernels::Cuda& main) : main_(main) {}

  kernels::Cuda& of(std::size_t side) {
    if (side == 0) return main_;
    if (!second_) second_.emplace(main_.device()).set_batch_invariant(main_.batch_invariant());
    return *second_;
  }
  template <class Run>
  void run(bool waits, const Run& run) {
    kernels::Cuda& second = of(1);
    second.follow(main_);
    try {
      if (waits) {
        helper_.run([&](std::size_t side) {
          if (side == 1) second.make_current();
          run(side);
        });
      } else {
        run(std::size_t{0});
        run(std::size_t{1});
      }
    } catch (...) {
      // Else what the second side has enqueued writes to a slot that another sequence has by then.
      try {
        second.synchronize();
      } catch (...) {  // the first fault is the one to tell
      }
      throw;
    }
    main_.follow(second);
  }

 private:
  kernels::Cuda& main_;
  std::optional<kernels::Cuda> second_;
  HelperThread helper_;
};

}  // namespace mmrec::models
