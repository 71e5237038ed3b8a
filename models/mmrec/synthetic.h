// Model folders with random weights, for benchmarks and tests.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "kernels/tensor.h"
#include "models/mmrec/config.h"
#include "models/weights/fields.h"

namespace mmrec::models {

/// All tensors that a made-up model has; its head is tied.
std::vector<TensorSpec> synthetic_tensors(const Config& config);

/// Writes them; see models/weights/synthetic.h.
void write_synthetic_model(const std::filesystem::path& folder, const Config& config,
                           kernels::DType dtype = kernels::DType::kF32, std::uint64_t seed = 0);

}  // namespace mmrec::models
