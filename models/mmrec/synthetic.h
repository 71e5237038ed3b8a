// Model folders with random weights, for benchmarks and tests.
#pragma once

#include <cstdint>
#include <filesystem>

#include "kernels/tensor.h"
#include "models/mmrec/config.h"

namespace mmrec::models {

/// Writes config.json and model.safetensors into `folder`, which is created if need be; no tokenizer, a tied head. The
/// weights are drawn like PyTorch's defaults (uniform within ±1/√in), so that gates are alive and activations stay
/// finite. They depend on seed, tensor name and dtype alone. Holds one block of a tensor in memory. Throws
/// std::system_error with errno.
void write_synthetic_model(const std::filesystem::path& folder, const Config& config,
                           kernels::DType dtype = kernels::DType::kF32, std::uint64_t seed = 0);

}  // namespace mmrec::models
