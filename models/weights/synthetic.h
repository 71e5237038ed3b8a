// Model folders with random weights, for benchmarks and tests, of any architecture.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string_view>

#include "kernels/tensor.h"
#include "models/weights/fields.h"

namespace mmrec::models {

/// Writes config.json, which is `config`, and model.safetensors with these tensors into `folder`, which is created if
/// need be; no tokenizer. The weights are drawn like PyTorch's defaults (uniform within ±1/√in), so that gates are
/// alive and activations stay finite. They depend on seed, tensor name and dtype alone. Holds one block of a tensor in
/// memory; `between_blocks`, if there is one, is called before each and may throw. Throws std::system_error with errno,
/// before anything is written if the file system has not the room. What is not complete is removed.
void write_synthetic_folder(const std::filesystem::path& folder, std::string_view config,
                            std::span<const TensorSpec> tensors, kernels::DType dtype, std::uint64_t seed,
                            const std::function<void()>& between_blocks = {});

}  // namespace mmrec::models
