// MMRec100M on a GPU.
#include <cstddef>
#include <optional>

#include "models/mmrec/cuda/chunk_plan.h"
#include "models/mmrec/cuda/ops.h"
#include "models/mmrec100m/net.h"
#include "models/runtime/cuda/executor.h"

namespace mmrec::models {

/// A stream each, the first one the main one. A thread drives the second where sweeps make the host wait.
template <>
class Sides<kernels::Cuda> {
 public:
  explicit Sides(kernels::Cuda& main) : main_(main) {}

  kernels::Cuda& of(std::size_t side) {
    if (side == 0) return main_;
    if (!second_) second_.emplace(main_.device());
    return *second_;
  }
  template <class Run>
  void run(bool waits, const Run& run) {
    kernels::Cuda& second = of(1);
    second.follow(main_);
    if (waits) {
      companion_.run([&] { run(std::size_t{0}); },
                     [&] {
                       second.make_current();
                       run(std::size_t{1});
                     });
    } else {
      run(std::size_t{0});
      run(std::size_t{1});
    }
    main_.follow(second);
  }

 private:
  kernels::Cuda& main_;
  std::optional<kernels::Cuda> second_;
  Companion companion_;
};

static ChunkPlan chunk_plan(const Config100m& config, const kernels::Cuda& cuda) {
  return chunk_plan(config.stack(), cuda);
}

template class CudaModel<Mmrec100m>;

}  // namespace mmrec::models
