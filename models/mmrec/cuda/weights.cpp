// The copy of a model's weights to a device: sizes first, then one allocation, then everything through two page-locked
// blocks, so that one is filled and rounded while the other is on its way.
#include "models/mmrec/cuda/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/cuda/runtime/staging.h"

namespace mmrec::models {
namespace {

using kernels::DType;

/// `count` elements on the host, to become elements of another type at `offset` of the device's memory.
struct Transfer {
  const void* from = nullptr;
  DType from_type = DType::kF32;
  DType to_type = DType::kF32;
  std::size_t count = 0;
  std::size_t offset = 0;
};

/// Lays tensors out one after another, each where 16-byte accesses and bulk copies want it.
class Layout {
 public:
  std::size_t add(const void* from, DType from_type, DType to_type, std::size_t count) {
    constexpr std::size_t kAlign = 256;
    const std::size_t offset = (bytes_ + kAlign - 1) / kAlign * kAlign;
    transfers_.push_back({from, from_type, to_type, count, offset});
    bytes_ = offset + count * kernels::size_of(to_type);
    return offset;
  }
  std::size_t bytes() const { return bytes_; }
  const std::vector<Transfer>& transfers() const { return transfers_; }

 private:
  std::size_t bytes_ = 0;
  std::vector<Transfer> transfers_;
};

template <class From, class To>
void convert(const void* from, std::size_t first, std::size_t count, void* to) {
  const From* source = static_cast<const From*>(from) + first;
  To* target = static_cast<To*>(to);
  for (std::size_t i = 0; i < count; ++i) {
    const float x = kernels::to_float(source[i]);
    target[i] = kernels::from_float<To>(x);
    if (!std::isfinite(kernels::to_float(target[i])) && std::isfinite(x)) {
      throw std::runtime_error("precision fp16: a weight of " + std::to_string(x) +
                               " does not fit, expected at most 65504; use bf16 or fp32");
    }
  }
}

template <class From>
void convert(const void* from, std::size_t first, std::size_t count, DType to_type, void* to) {
  switch (to_type) {
    case DType::kF32:
      return convert<From, float>(from, first, count, to);
    case DType::kF16:
      return convert<From, kernels::Float16>(from, first, count, to);
    case DType::kBF16:
      return convert<From, kernels::BFloat16>(from, first, count, to);
  }
}

/// Elements [first, first + count) of the transfer, in their new type.
void fill(const Transfer& t, std::size_t first, std::size_t count, void* to) {
  if (t.from_type == t.to_type) {
    const std::size_t size = kernels::size_of(t.from_type);
    std::memcpy(to, static_cast<const std::byte*>(t.from) + first * size, count * size);
    return;
  }
  switch (t.from_type) {
    case DType::kF32:
      return convert<float>(t.from, first, count, t.to_type, to);
    case DType::kF16:
      return convert<kernels::Float16>(t.from, first, count, t.to_type, to);
    case DType::kBF16:
      return convert<kernels::BFloat16>(t.from, first, count, t.to_type, to);
  }
}

void run(const std::vector<Transfer>& transfers, std::byte* to) {
  kernels::Staging staging;
  for (const Transfer& t : transfers) {
    const std::size_t size = kernels::size_of(t.to_type);
    const std::size_t block = kernels::Staging::kBlockBytes / size;
    for (std::size_t first = 0; first < t.count; first += block) {
      const std::size_t count = std::min(block, t.count - first);
      fill(t, first, count, staging.block());
      staging.send(to + t.offset + first * size, count * size);
    }
  }
  staging.finish();
}

}  // namespace

CudaWeights::CudaWeights(const HostWeights& weights, DType type, int gpu) : type_(type), gpu_(gpu) {
  kernels::make_current(gpu);
  Layout layout;
  // Sizes first; pointers are bound once the memory is there.
  std::vector<std::function<void(const std::byte*)>> bindings;
  const auto place = [&](const void* from, DType from_type, DType to_type, std::size_t count, auto& pointer) {
    pointer = nullptr;
    if (count == 0) return;
    const std::size_t offset = layout.add(from, from_type, to_type, count);
    bindings.emplace_back([&pointer, offset](const std::byte* memory) {
      pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(static_cast<const void*>(memory + offset));
    });
  };
  const auto matrix = [&](const HostMatrix& from, kernels::WeightView<kernels::Device>& to) {
    to = {nullptr, type, from.rows, from.cols};
    place(from.bytes.data(), from.dtype, type, static_cast<std::size_t>(from.rows * from.cols), to.data);
  };
  const auto vector = [&](const HostVector& from, const float*& to) {
    place(from.data(), DType::kF32, DType::kF32, from.size(), to);
  };

  matrix(weights.embedding, view_.embedding);
  if (weights.head.rows != 0) matrix(weights.head, view_.head);
  vector(weights.norm, view_.norm);
  view_.layers.resize(weights.layers.size());
  for (std::size_t i = 0; i < weights.layers.size(); ++i) {
    const LayerWeights& from = weights.layers[i];
    LayerView<kernels::Device>& to = view_.layers[i];
    matrix(from.qvzk, to.qvzk);
    matrix(from.gate, to.gate);
    matrix(from.gate_z, to.gate_z);
    matrix(from.gamma_in, to.gamma_in);
    matrix(from.gamma_up, to.gamma_up);
    matrix(from.context_in, to.context_in);
    matrix(from.context_up, to.context_up);
    matrix(from.memory_q, to.memory_q);
    matrix(from.memory_out, to.memory_out);
    matrix(from.ffn_in, to.ffn_in);
    matrix(from.ffn_out, to.ffn_out);
    vector(from.qvzk_bias, to.qvzk_bias);
    vector(from.gate_bias, to.gate_bias);
    vector(from.gate_z_bias, to.gate_z_bias);
    vector(from.gamma_in_bias, to.gamma_in_bias);
    vector(from.gamma_up_bias, to.gamma_up_bias);
    vector(from.context_in_bias, to.context_in_bias);
    vector(from.context_up_bias, to.context_up_bias);
    vector(from.memory_q_bias, to.memory_q_bias);
    vector(from.memory_out_bias, to.memory_out_bias);
    vector(from.ffn_in_bias, to.ffn_in_bias);
    vector(from.ffn_out_bias, to.ffn_out_bias);
    vector(from.norm1, to.norm1);
    vector(from.norm2, to.norm2);
  }
  memory_ = kernels::DeviceBuffer<std::byte>(layout.bytes());
  for (const auto& bind : bindings) bind(memory_.data());
  if (weights.head.rows == 0) view_.head = view_.embedding;
  run(layout.transfers(), memory_.data());
}

}  // namespace mmrec::models
