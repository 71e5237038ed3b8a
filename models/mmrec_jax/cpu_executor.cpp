// mmrec-jax's executor on the CPU.
#include "models/runtime/cpu_executor.h"

#include <utility>

#include "models/mmrec_jax/executors.h"
#include "models/mmrec_jax/net.h"
#include "models/mmrec_jax/state.h"
#include "models/runtime/forward.h"

namespace mmrec::models::jax {
namespace {

constexpr Plan kPlan{.tokens = kCpuPlan.tokens, .tile = kernels::kRowTile, .rows = kCpuPlan.rows};

using CpuModel = BoundModel<Config, HostWeights>;

struct CpuLane {
  using Model = CpuModel;
  CpuLane(const CpuModel& model, int wanted_threads)
      : threads(wanted_threads),
        backend(threads, model.weights->rounds_inputs),
        forward(model.config, view_of(*model.weights), backend, kPlan) {}
  int threads;
  kernels::Cpu backend;
  Forward<Net<kernels::Cpu, float>> forward;
};

}  // namespace

std::shared_ptr<Executor> make_cpu_executor(const Config& config, std::shared_ptr<const HostWeights> weights) {
  return std::make_shared<CpuExecutor<CpuLane>>(CpuModel{config, std::move(weights)});
}

}  // namespace mmrec::models::jax
