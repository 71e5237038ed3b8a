// GPUs as a model's loader sees them, and numbers on their way there.
#include "models/runtime/cuda/upload.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/bytes.h"
#include "kernels/cpu/simd.h"
#include "kernels/cuda/gemm/compact.h"
#include "models/files/elements.h"
#include "models/runtime/cuda_device.h"

namespace mmrec::models {
namespace {

using kernels::DType;

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

}  // namespace

int cuda_device_count() { return kernels::cuda_device_count(); }
std::string cuda_unusable_reason(int gpu) { return kernels::cuda_unusable_reason(gpu); }

CudaDeviceInfo cuda_device_info(int gpu) {
  const kernels::DeviceMemory memory = kernels::device_memory(gpu);
  return {kernels::device_name(gpu), memory.total, memory.free};
}

void send(const Numbers& from, std::span<const PaddedRows> parts, float scale, DType type, std::byte* to,
          kernels::Staging& staging) {
  const bool quantized = kernels::is_quantized(from.format.code);
  const DType from_type = quantized ? DType::kF32 : from.format.code;
  const std::size_t from_size = kernels::size_of(from_type), size = kernels::size_of(type);
  const auto* source = static_cast<const std::byte*>(from.data);
  std::vector<float> row;  // of quantised numbers, the one that `source` points into
  std::int64_t next_row = 0;
  std::size_t left_of_row = 0;
  std::byte* block = nullptr;
  std::size_t filled = 0;  // of the block, in bytes
  const auto flush = [&] {
    if (filled != 0) staging.send(to, filled);
    to += std::exchange(filled, 0);
  };
  // write(where, count) for `count` numbers, as many at a time as fit.
  const auto append = [&](std::int64_t count, const auto& write) {
    for (auto left = static_cast<std::size_t>(count); left != 0;) {
      if (filled == 0) block = staging.block();
      const std::size_t some = std::min(left, (kernels::Staging::kBlockBytes - filled) / size);
      write(block + filled, some);
      left -= some;
      filled += some * size;
      if (filled == kernels::Staging::kBlockBytes) flush();
    }
  };
  const auto zeros = [&](std::byte* at, std::size_t count) { std::memset(at, 0, count * size); };
  const auto plain_numbers = [&](std::byte* at, std::size_t count) {
    convert(source, count, from_type, at, type);
    if (type != from_type && !kernels::all_finite({at, count * size}, type))
      check_fits(source, from_type, at, type, count);
    if (scale != 1.0F) std::for_each_n(reinterpret_cast<float*>(at), count, [&](float& x) { x *= scale; });
    source += count * from_size;
  };
  const auto numbers = [&](std::byte* at, std::size_t count) {
    if (!quantized) return plain_numbers(at, count);
    for (std::size_t some = 0; count != 0; count -= some, left_of_row -= some, at += some * size) {
      if (left_of_row == 0) {
        left_of_row = static_cast<std::size_t>(from.cols);
        row.resize(left_of_row);
        kernels::simd().matvec.widen[from.format.code](from.middle_rows(next_row++, 1), row.data());
        source = reinterpret_cast<const std::byte*>(row.data());
      }
      some = std::min(count, left_of_row);
      plain_numbers(at, some);
    }
  };
  for (const auto& [rows, cols] : parts) {
    for (std::int64_t r = 0; r < rows.count * rows.from; ++r) {
      for (std::int64_t c = 0; c < cols.count; ++c) {
        append(cols.from, numbers);
        append(cols.to - cols.from, zeros);
      }
      if ((r + 1) % rows.from == 0) append((rows.to - rows.from) * cols.size(), zeros);
    }
  }
  flush();
}

CompactField compact_field(const Numbers& from, const kernels::WeightView<kernels::Device>& on_device,
                           std::int64_t own_rows) {
  CompactField field{kernels::compact_format(from.format, on_device.cols), std::min(own_rows, on_device.rows)};
  if (!kernels::is_quantized(field.format.code)) return {};
  // Composed rows are no multiples of the scales: they get 8 bits of their own, as integers.
  if (field.own_rows == 0) field.format = DType::kI8;
  if (field.own_rows < on_device.rows && kernels::bits_of(field.format.code) != 8) return {};
  field.bytes = static_cast<std::size_t>(on_device.rows * kernels::compact_row_bytes(field.format, on_device.cols));
  return field;
}

kernels::CompactView make_compact(kernels::Cuda& cuda, const Numbers& from,
                                  const kernels::WeightView<kernels::Device>& on_device, const CompactField& field,
                                  std::byte* to) {
  const std::int64_t numbers = kernels::number_bytes(from.format, from.cols);
  const auto of_row = static_cast<std::size_t>(kernels::scales_of(from.format, from.cols));
  std::vector<float> scales(static_cast<std::size_t>(on_device.rows) * of_row);
  for (std::int64_t row = 0; row < field.own_rows; ++row) {
    const auto* const at = static_cast<const std::byte*>(from.middle_rows(row, 1).data) + numbers;
    std::memcpy(scales.data() + static_cast<std::size_t>(row) * of_row, at, of_row * sizeof(float));
  }
  kernels::DeviceBuffer<float> on_gpu(scales.size());
  cuda.upload(scales.data(), on_gpu.data(), scales.size());
  const kernels::CompactView compact = kernels::compact_view(to, field.format, field.own_rows, on_device.cols);
  kernels::compact_rows(cuda, {on_device, on_gpu.data(), from.format.group, compact, to});
  cuda.synchronize();
  return compact;
}

}  // namespace mmrec::models
