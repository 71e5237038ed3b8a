// The copy of a model's weights to a device, by its architecture's table of fields: sizes first, then one allocation,
// then everything through two page-locked blocks, so that one is filled and rounded while the other is on its way.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/ops.h"
#include "models/runtime/cuda/padding.h"
#include "models/runtime/model.h"
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

/// The compact rows of a matrix whose device's copy is `on_device`, in a matrix's own format or a wider one.
struct CompactField {
  kernels::WeightFormat format;
  std::int64_t own_rows = 0;  // those of `from`; the device has composed the others
  std::size_t bytes = 0;
};
/// Plain, and 0 bytes, where there are none.
CompactField compact_field(const Numbers& from, const kernels::WeightView<kernels::Device>& on_device,
                           std::int64_t own_rows);
/// Writes them to `to`; returns when it is done.
kernels::CompactView make_compact(kernels::Cuda& cuda, const Numbers& from,
                                  const kernels::WeightView<kernels::Device>& on_device, const CompactField& field,
                                  std::byte* to);

/// Weights in a device's memory: all matrices in one plain type, vectors in fp32, in one allocation, as Arch completes
/// them; where steps read compact rows and there is room, also those of quantised matrices. Immutable; shared between
/// executors.
template <class Arch>
class DeviceWeights {
 public:
  using View = ViewOf<Arch, kernels::Device>;

  /// See make_cuda_executor(). A call that fails names itself.
  DeviceWeights(const WeightsOf<Arch>& weights, Precision precision, int gpu, const Padding& padding, bool compacts)
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
    Arch::complete_on_device(view_, gpu);
    if (compacts && type_ == kernels::DType::kBF16 && padding.from == padding.to) add_compact(weights, padding.to);
    Arch::complete(view_);
    if (precision != Precision::kF32Fma && type_ == kernels::DType::kF32) add_parts();
  }

  const View& view() const { return view_; }
  kernels::DType type() const { return type_; }
  int gpu() const { return gpu_; }
  std::uint64_t bytes() const { return memory_.size() + parts_.size_bytes() + compact_.size(); }
  /// Whether products of many rows need Cuda::parts().
  bool multiplies_fp8() const { return multiplies_fp8_; }
  /// What a step reads less of than plain rows.
  StepBytes saved() const { return saved_; }

 private:
  /// Whether the device has room for a second copy, beside activations and states.
  bool fits(const DevicePlaces& places) const { return places.bytes() <= kernels::device_memory(gpu_).free / 2; }

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
    if (!fits(sizes)) return;
    parts_ = kernels::DeviceBuffer<kernels::BFloat16>(sizes.bytes() / sizeof(kernels::BFloat16));
    of_each([&](auto& w) {
      kernels::BFloat16* const parts = parts_.data() + add(places, w) / sizeof(kernels::BFloat16);
      kernels::split(cuda, {w.template as<float>(), w.rows, w.cols}, parts);
      w.parts = parts, w.part_stride = w.rows * w.cols;
    });
    cuda.synchronize();
  }

  /// Of all matrices that steps read, or of none.
  void add_compact(const WeightsOf<Arch>& weights, const Sizes& sizes) {
    // visit(host's matrix, view, what it gets, rows that only a memory reads) for these matrices.
    const auto for_each = [&](const auto& visit) {
      const auto visit_matrix = [&]<class From, class To>(const Field& field, const From& from, To& to) {
        if constexpr (std::is_same_v<From, HostMatrix>) {
          const auto rows = Arch::rows_on_device(field, to.rows, sizes);
          const bool is_lookup = field.kind == Field::Kind::kTable && &from == &weights.embedding;
          if (to.rows == 0 || (is_lookup && !Arch::is_tied(weights))) return;
          visit(from.view(), to, compact_field(from.view(), to, rows.own), rows.of_memory);
        }
      };
      Arch::visit(visit_matrix, weights, view_);
    };
    DevicePlaces size, places;
    bool have_all = true;
    const auto count = [&](const auto&, const auto&, const CompactField& field, std::int64_t /*of_memory*/) {
      size.add(field.bytes);
      have_all = have_all && field.bytes != 0;
    };
    for_each(count);
    if (!have_all || !fits(size)) return;
    kernels::Cuda cuda(gpu_);
    bool all_integers = true;
    compact_ = kernels::DeviceBuffer<std::byte>(size.bytes());
    for_each([&](const Numbers& from, auto& view, const CompactField& field, std::int64_t of_memory) {
      std::byte* const to = compact_.data() + places.add(field.bytes);
      view.compact = make_compact(cuda, from, view, field, to);
      all_integers = all_integers && field.format.code != kernels::DType::kF8;
      const std::uint64_t saved = kernels::bytes_of(type_, view.rows, view.cols) - field.bytes;
      const std::uint64_t by_memory =
          saved / static_cast<std::uint64_t>(view.rows) * static_cast<std::uint64_t>(of_memory);
      saved_.always += saved - by_memory;
      saved_.with_memory += by_memory;
    });
    if (!all_integers) saved_ = {};  // such a model's steps of one sequence read plain rows
    multiplies_fp8_ = !all_integers;
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
  kernels::DeviceBuffer<std::byte> memory_, compact_;
  kernels::DeviceBuffer<kernels::BFloat16> parts_;
  View view_;
  StepBytes saved_;
  bool multiplies_fp8_ = false;
};

}  // namespace mmrec::models
