// MMRec100M's executor on the CPU.
#include "models/runtime/cpu_executor.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "models/mmrec100m/companion.h"
#include "models/mmrec100m/executors.h"
#include "models/mmrec100m/net.h"
#include "models/runtime/forward.h"

namespace mmrec::models {

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
      companion_.run([&] { run(std::size_t{0}); }, [&] { run(std::size_t{1}); });
    }
  }

 private:
  kernels::Cpu& main_;
  std::array<std::unique_ptr<kernels::Cpu>, 2> halves_;
  Companion companion_;
};

namespace {

using CpuModel = BoundModel<Config100m, HostWeights100m>;

struct CpuLane {
  using Model = CpuModel;
  CpuLane(const CpuModel& model, int wanted_threads)
      : threads(wanted_threads),
        backend(threads, model.weights->rounds_inputs),
        sides(backend),
        forward(model.config, view_of(*model.weights), backend, sides, kCpuPlan) {}
  int threads;
  kernels::Cpu backend;
  Sides<kernels::Cpu> sides;
  Forward<Net100m<kernels::Cpu, float>> forward;
};

}  // namespace

std::shared_ptr<Executor> make_cpu_executor(const Config100m& config, std::shared_ptr<const HostWeights100m> weights) {
  return std::make_shared<CpuExecutor<CpuLane>>(CpuModel{config, std::move(weights)});
}

}  // namespace mmrec::models
