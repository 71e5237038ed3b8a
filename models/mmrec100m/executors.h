// Executors of MMRec100M, by backend; see models/mmrec/executors.h.
#pragma once

#include <cstdint>
#include <memory>

#include "mmrec/precision.h"
#include "models/mmrec100m/config.h"
#include "models/mmrec100m/weights.h"
#include "models/runtime/executor.h"

namespace mmrec::models {

/// The experts share a call's threads, half of them each; on one thread they run one after the other.
std::shared_ptr<Executor> make_cpu_executor(const Config100m& config, std::shared_ptr<const HostWeights100m> weights);

class CudaWeights100m;

/// As upload_weights of models/mmrec/executors.h, and what follows.
std::shared_ptr<const CudaWeights100m> upload_weights(const HostWeights100m& weights, Precision precision, int gpu = 0);
std::uint64_t device_bytes(const CudaWeights100m& weights);
Precision precision_of(const CudaWeights100m& weights);

/// The experts have a stream each.
std::shared_ptr<Executor> make_cuda_executor(const Config100m& config, std::shared_ptr<const CudaWeights100m> weights);

}  // namespace mmrec::models
