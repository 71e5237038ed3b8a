// Executors of mmrec-jax, by backend: see models/mmrec/executors.h, whose words hold here too.
#pragma once

#include <cstdint>
#include <memory>

#include "mmrec/precision.h"
#include "models/mmrec_jax/config.h"
#include "models/mmrec_jax/weights.h"
#include "models/runtime/executor.h"

namespace mmrec::models::jax {

std::shared_ptr<Executor> make_cpu_executor(const Config& config, std::shared_ptr<const HostWeights> weights);

class CudaWeights;
std::shared_ptr<const CudaWeights> upload_weights(const HostWeights& weights, Precision precision, int gpu = 0);
std::uint64_t device_bytes(const CudaWeights& weights);
Precision precision_of(const CudaWeights& weights);
std::shared_ptr<Executor> make_cuda_executor(const Config& config, std::shared_ptr<const CudaWeights> weights);

}  // namespace mmrec::models::jax
