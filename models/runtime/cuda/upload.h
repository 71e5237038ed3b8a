// The copy of a model's weights to a device, by its architecture's table of fields: sizes first, then one allocation,
// then everything through two page-locked blocks, so that one is filled and rounded while the other is on its way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/cuda/runtime/cuda.h"
#include "models/weights/model_weights.h"

namespace mmrec::models {

/// A field's numbers, in the type in which they lie somewhere.
struct Numbers {
  const std::byte* data = nullptr;
  kernels::DType dtype = kernels::DType::kF32;
  std::size_t count = 0;
};
inline Numbers numbers_of(const HostMatrix& matrix) {
  return {matrix.bytes.data(), matrix.format.code, static_cast<std::size_t>(matrix.rows * matrix.cols)};
}
inline Numbers numbers_of(const HostVector& vector) {
  return {reinterpret_cast<const std::byte*>(vector.data()), kernels::DType::kF32, vector.size()};
}
inline void set_view(const std::byte* data, kernels::DType type, const HostMatrix& from,
                     kernels::WeightView<kernels::Device>& to) {
  to = {data, type, from.rows, from.cols};
}
inline void set_view(const std::byte* data, kernels::DType /*type*/, const HostVector& /*from*/, const float*& to) {
  to = reinterpret_cast<const float*>(data);
}

/// Sends numbers through `staging` to device memory as numbers of `type`, which must hold them.
void send(const Numbers& from, kernels::DType type, std::byte* to, kernels::Staging& staging);

/// Places one after another, each where 16-byte accesses and bulk copies want it.
class DevicePlaces {
 public:
  std::size_t add(std::size_t bytes) {
    constexpr std::size_t kAlign = 256;
    const std::size_t offset = (end_ + kAlign - 1) / kAlign * kAlign;
    if (bytes != 0) end_ = offset + bytes;
    return offset;
  }
  std::size_t bytes() const { return end_; }

 private:
  std::size_t end_ = 0;
};

/// Weights in a device's memory: all matrices in one type, vectors in fp32, in one allocation. Immutable; shared
/// between executors.
template <class Arch>
class DeviceWeights {
 public:
  using View = ViewOf<Arch, kernels::Device>;

  /// See make_cuda_executor(). A call that fails names itself.
  DeviceWeights(const WeightsOf<Arch>& weights, Precision precision, int gpu)
      : type_(precision == Precision::kAuto ? common_dtype(weights) : type_of(precision)), gpu_(gpu) {
    Arch::match_layers(weights, view_);
    kernels::make_current(gpu);
    const auto type_in = [this](const Field& field) { return field.is_matrix() ? type_ : kernels::DType::kF32; };
    DevicePlaces sizes;
    const auto count = [&](const Field& field, const auto& from) {
      sizes.add(numbers_of(from).count * kernels::size_of(type_in(field)));
    };
    Arch::visit(count, weights);
    memory_ = kernels::DeviceBuffer<std::byte>(sizes.bytes());
    DevicePlaces places;
    kernels::Staging staging;
    const auto fill = [&](const Field& field, const auto& from, auto& to) {
      const Numbers numbers = numbers_of(from);
      const kernels::DType type = type_in(field);
      std::byte* data = memory_.data() + places.add(numbers.count * kernels::size_of(type));
      send(numbers, type, data, staging);
      set_view(numbers.count == 0 ? nullptr : data, type, from, to);
    };
    Arch::visit(fill, weights, view_);
    staging.finish();
    Arch::complete(view_);
  }

  const View& view() const { return view_; }
  kernels::DType type() const { return type_; }
  int gpu() const { return gpu_; }
  std::uint64_t bytes() const { return memory_.size(); }

 private:
  kernels::DType type_;
  int gpu_;
  kernels::DeviceBuffer<std::byte> memory_;
  View view_;
};

}  // namespace mmrec::models
