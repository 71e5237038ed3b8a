// The copy of a model's weights to a device: sizes first, then one allocation, then everything through two page-locked
// blocks, so that one is filled and rounded while the other is on its way.
#include "models/mmrec/cuda/weights.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "kernels/cuda/runtime/staging.h"
#include "models/files/elements.h"

namespace mmrec::models {
namespace {

using kernels::DType;

/// A field's numbers, in the type in which they lie somewhere.
struct Numbers {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  std::size_t count = 0;
};

Numbers numbers_of(const HostMatrix& matrix) {
  return {matrix.bytes.data(), matrix.format.code, static_cast<std::size_t>(matrix.rows * matrix.cols)};
}
Numbers numbers_of(const HostVector& vector) {
  return {reinterpret_cast<const std::byte*>(vector.data()), DType::kF32, vector.size()};
}

/// Hands out places one after another, each where 16-byte accesses and bulk copies want it.
class Layout {
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

/// Throws if rounding made a finite number infinite.
void check_fits(const std::byte* from, DType from_type, const std::byte* to, DType type, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float x = element(from, i, from_type);
    if (std::isfinite(x) && !std::isfinite(element(to, i, type))) {
      throw std::runtime_error("precision fp16: a weight of " + std::to_string(x) +
                               " does not fit, expected at most 65504; use bf16 or fp32");
    }
  }
}

/// Sends numbers through `staging` to device memory as numbers of `type`, which must hold them.
void send(const Numbers& from, DType type, std::byte* to, kernels::Staging& staging) {
  const std::size_t from_size = kernels::size_of(from.dtype), size = kernels::size_of(type);
  const std::size_t most = kernels::Staging::kBlockBytes / size;
  for (std::size_t first = 0; first < from.count; first += most) {
    const std::size_t count = std::min(most, from.count - first);
    const std::byte* source = from.data + first * from_size;
    std::byte* block = staging.block();
    convert(source, count, from.dtype, block, type);
    if (type != from.dtype && first_nonfinite(block, count, type) >= 0)
      check_fits(source, from.dtype, block, type, count);
    staging.send(to + first * size, count * size);
  }
}

void set_view(const std::byte* data, DType type, const HostMatrix& from, kernels::WeightView<kernels::Device>& to) {
  to = {data, type, from.rows, from.cols};
}
void set_view(const std::byte* data, DType /*type*/, const HostVector& /*from*/, const float*& to) {
  to = reinterpret_cast<const float*>(data);
}

}  // namespace

CudaWeights::CudaWeights(const HostWeights& weights, Precision precision, int gpu)
    : type_(precision == Precision::kAuto ? common_dtype(weights) : type_of(precision)), gpu_(gpu) {
  kernels::make_current(gpu);
  const auto type_in = [this](const Field& field) { return field.is_matrix() ? type_ : DType::kF32; };
  Layout sizes;
  const auto count = [&](const Field& field, const auto& from) {
    sizes.add(numbers_of(from).count * kernels::size_of(type_in(field)));
  };
  visit_model(count, weights);
  memory_ = kernels::DeviceBuffer<std::byte>(sizes.bytes());
  view_.layers.resize(weights.layers.size());
  Layout layout;
  kernels::Staging staging;
  const auto fill = [&](const Field& field, const auto& from, auto& to) {
    const Numbers numbers = numbers_of(from);
    const DType type = type_in(field);
    std::byte* data = memory_.data() + layout.add(numbers.count * kernels::size_of(type));
    send(numbers, type, data, staging);
    set_view(numbers.count == 0 ? nullptr : data, type, from, to);
  };
  visit_model(fill, weights, view_);
  staging.finish();
  if (weights.head.rows == 0) view_.head = view_.embedding;
}

}  // namespace mmrec::models
