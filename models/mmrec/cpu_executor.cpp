// MM-Rec's executor on the CPU.
#include "models/runtime/cpu_executor.h"

#include <utility>

#include "models/mmrec/executors.h"
#include "models/mmrec/net.h"
#include "models/runtime/forward.h"

namespace mmrec::models {
namespace {

using CpuModel = BoundModel<Config, HostWeights>;

struct CpuLane {
  using Model = CpuModel;
  CpuLane(const CpuModel& model, int wanted_threads)
      : threads(wanted_threads),
        backend(threads, model.weights->rounds_inputs),
        forward(model.config, view_of(*model.weights), backend, kCpuPlan) {}
  int threads;
  kernels::Cpu backend;
  Forward<Net<kernels::Cpu, float>> forward;
};

}  // namespace

std::shared_ptr<Executor> make_cpu_executor(const Config& config, std::shared_ptr<const HostWeights> weights) {
  return std::make_shared<CpuExecutor<CpuLane>>(CpuModel{config, std::move(weights)});
}

}  // namespace mmrec::models
