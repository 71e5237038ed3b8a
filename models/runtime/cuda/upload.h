// The copy of a model's weights to a device, by its architecture's table of fields: sizes first, then one allocation,
// then everything through two page-locked blocks, so that one is filled and rounded while the other is on its way.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/ops.h"
#include "models/runtime/cuda/padding.h"
#include "models/weights/model_weights.h"

namespace mmrec::models {

/// A field's numbers, as they are stored. A vector is one row.
using Numbers = kernels::WeightView<kernels::Host>;
inline Numbers numbers_of(const HostMatrix& matrix) { return matrix.view(); }
inline Numbers numbers_of(const HostVector& vector) {
  return {vector.data(), kernels::DType::kF32, 1, std::ssize(vector)};
}
inline void set_view(const std::byte* data, kernels::DType type, std::int64_t rows, std::int64_t cols,
                     kernels::WeightView<kernels::Device>& to) {
  to = {data, type, rows, cols};
}
inline void set_view(const std::byte* data, kernels::DType /*type*/, std::int64_t /*rows*/, std::int64_t /*cols*/,
                     const float*& to) {
  to = reinterpret_cast<const float*>(data);
}

/// Sends numbers through `staging` to device memory as numbers of `type`, which must hold them, padded; those of fp32
/// times `scale`. Quantised numbers are dequantised.
void send(const Numbers& from, std::span<const PaddedRows> parts, float scale, kernels::DType type, std::byte* to,
          kernels::Staging& staging);

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

/// Weights in a device's memory: all matrices in one plain type, vectors in fp32, in one allocation, as Arch completes
/// them. Immutable; shared between executors.
template <class Arch>
class DeviceWeights {
 public:
  using View = ViewOf<Arch, kernels::Device>;

  /// See make_cuda_executor(). A call that fails names itself.
  DeviceWeights(const WeightsOf<Arch>& weights, Precision precision, int gpu, const Padding& padding)
      : type_(precision == Precision::kAuto ? common_dtype(weights) : type_of(precision)), gpu_(gpu) {
    Arch::match_layers(weights, view_);
    kernels::make_current(gpu);
    const auto type_in = [this](const Field& field) { return field.is_matrix() ? type_ : kernels::DType::kF32; };
    // [0] for fields that stay, [1] for those that are there until the others are complete.
    std::array<DevicePlaces, 2> sizes, places;
    const auto count = [&](const Field& field, const auto& from) {
      const Shape shape(field, numbers_of(from), padding);
      sizes[Arch::is_passing(field)].add(shape.count() * kernels::size_of(type_in(field)));
    };
    Arch::visit(count, weights);
    memory_ = kernels::DeviceBuffer<std::byte>(sizes[0].bytes());
    kernels::DeviceBuffer<std::byte> passing(sizes[1].bytes());
    kernels::Staging staging;
    const auto fill = [&](const Field& field, const auto& from, auto& to) {
      const Shape shape(field, numbers_of(from), padding);
      const kernels::DType type = type_in(field);
      std::byte* const memory = Arch::is_passing(field) ? passing.data() : memory_.data();
      std::byte* data = memory + places[Arch::is_passing(field)].add(shape.count() * kernels::size_of(type));
      const float scale = field.kind == Field::Kind::kNorm ? padding.norm_scale() : 1.0F;
      send(numbers_of(from), shape.parts, scale, type, data, staging);
      set_view(shape.count() == 0 ? nullptr : data, type, shape.rows(), shape.cols, to);
    };
    Arch::visit(fill, weights, view_);
    staging.finish();
    Arch::complete(view_);
    Arch::complete_on_device(view_, gpu);
    if (precision != Precision::kF32Fma && type_ == kernels::DType::kF32) add_parts();
  }

  const View& view() const { return view_; }
  kernels::DType type() const { return type_; }
  int gpu() const { return gpu_; }
  std::uint64_t bytes() const { return memory_.size() + parts_.size_bytes(); }

 private:
  /// Of the matrices that products take, for the devices that multiply parts.
  void add_parts() {
    kernels::Cuda cuda(gpu_);
    if (cuda.compute_capability() != 90) return;
    const auto of_each = [&](const auto& take) {
      const auto visit = [&]<class To>(const Field& /*field*/, To& to) {
        if constexpr (std::is_same_v<To, kernels::WeightView<kernels::Device>>) {
          if constexpr (requires { view_.head; }) {  // else the embedding is multiplied too
            if (&to == &view_.embedding) return;
          }
          if (to.rows != 0) take(to);
        }
      };
      Arch::visit(visit, view_);
    };
    DevicePlaces sizes, places;
    const auto add = [](DevicePlaces& at, const kernels::WeightView<kernels::Device>& w) {
      return at.add(static_cast<std::size_t>(kernels::kParts * w.rows * w.cols) * sizeof(kernels::BFloat16));
    };
    of_each([&](auto& w) { add(sizes, w); });
    parts_ = kernels::DeviceBuffer<kernels::BFloat16>(sizes.bytes() / sizeof(kernels::BFloat16));
    of_each([&](auto& w) {
      kernels::BFloat16* const parts = parts_.data() + add(places, w) / sizeof(kernels::BFloat16);
      kernels::split(cuda, {w.template as<float>(), w.rows, w.cols}, parts);
      w.parts = parts, w.part_stride = w.rows * w.cols;
    });
    cuda.synchronize();
  }

  /// A field on the device. A vector's parts lie one after another.
  struct Shape {
    std::vector<PaddedRows> parts;
    std::int64_t elements = 0, cols = 1;

    Shape(const Field& field, const Numbers& from, const Padding& padding) {
      const std::int64_t all = from.rows * from.cols;
      if (all == 0) return;
      parts = padding.from == padding.to ? std::vector<PaddedRows>{{{}, {1, all, all}}} : padded_parts(field, padding);
      cols = padding.from == padding.to ? from.cols : parts.front().cols.size();
      for (const auto& [rows_of, cols_of] : parts) elements += rows_of.size() * cols_of.size();
      elements += Arch::more_rows(field, padding.to) * (field.is_matrix() ? cols : 1);
    }
    std::size_t count() const { return static_cast<std::size_t>(elements); }
    std::int64_t rows() const { return elements / cols; }
  };

  kernels::DType type_;
  int gpu_;
  kernels::DeviceBuffer<std::byte> memory_;
  kernels::DeviceBuffer<kernels::BFloat16> parts_;
  View view_;
};

}  // namespace mmrec::models
