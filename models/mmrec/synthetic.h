// Model folders with random weights, for benchmarks and tests, and the safetensors writer they need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/tensor.h"
#include "models/mmrec/config.h"

namespace mmrec::models {

/// A tensor about to be written.
struct TensorDeclaration {
  std::string name;
  kernels::DType dtype = kernels::DType::kF32;
  std::vector<std::int64_t> shape;

  /// Requires: the product fits in 64 bits.
  std::uint64_t elements() const;
  std::uint64_t bytes() const { return elements() * kernels::size_of(dtype); }
};

/// Writes one safetensors file without holding it: all tensors are declared at first, then their bytes follow in that
/// order, in pieces of any size. Throws std::system_error with errno; a file that was not closed is incomplete.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::span<const TensorDeclaration> tensors);

  void write(std::span<const std::byte> bytes);
  /// Throws std::logic_error unless exactly the declared bytes were written.
  void close();

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  [[noreturn]] void fail() const;

  std::filesystem::path path_;
  std::unique_ptr<std::FILE, Close> file_;
  std::uint64_t bytes_left_ = 0;
};

/// Writes config.json and the weights of a model into `folder`, which is created if need be; no tokenizer. The weights
/// are drawn like PyTorch's defaults (uniform within ±1/√in), so that gates are alive and activations stay finite. They
/// depend on seed, tensor name and dtype alone: not on the sharding. A shard takes tensors up to `max_shard_bytes` (0:
/// all in model.safetensors) and at least one. `untied_head` adds an lm_head.weight of its own. Holds one block of a
/// tensor in memory. Throws std::system_error with errno.
void write_synthetic_model(const std::filesystem::path& folder, const Config& config,
                           kernels::DType dtype = kernels::DType::kF32, std::uint64_t seed = 0,
                           std::uint64_t max_shard_bytes = 0, bool untied_head = false);

}  // namespace mmrec::models
