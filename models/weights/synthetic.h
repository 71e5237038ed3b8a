// Model folders with random weights, for benchmarks and tests, of any architecture.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "kernels/tensor.h"
#include "models/weights/fields.h"

namespace mmrec::models {

struct SyntheticModel {
  std::string config;  // the text of config.json
  std::vector<TensorSpec> tensors;
};

/// Writes config.json and model.safetensors into `folder`, which is created if need be; no tokenizer. The weights are
/// drawn like PyTorch's defaults (uniform within ±1/√in), so that gates are alive and activations stay finite. They
/// depend on seed, tensor name and dtype alone. Holds one block of a tensor in memory. `between_blocks`, if set, is
/// called before each block and may throw. Throws std::system_error with errno, before anything is written if the file
/// system has not the room. Incomplete files are removed.
void write_synthetic_folder(const std::filesystem::path& folder, const SyntheticModel& model, kernels::DType dtype,
                            std::uint64_t seed, const std::function<void()>& between_blocks = {});

}  // namespace mmrec::models
