// A place in the work of one backend for others of the same device to wait for.
#pragma once

#include <memory>

#include "kernels/cuda/runtime/cuda.h"

struct CUevent_st;

namespace mmrec::kernels {

/// Move-only. Made on the current device.
class Mark {
 public:
  Mark();
  /// Behind what is on the backend's stream().
  void set(const Cuda& cuda);
  /// Makes the backend's stream() wait for what was before the place. Requires: set().
  void await(const Cuda& cuda) const;

 private:
  struct Destroy {
    void operator()(CUevent_st* event) const;
  };
  std::unique_ptr<CUevent_st, Destroy> event_;
};

}  // namespace mmrec::kernels
