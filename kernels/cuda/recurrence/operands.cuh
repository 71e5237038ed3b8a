// What a gate-frozen sweep by tiles reads and writes (tile.cuh), and the words of Cuda::flags() by which its
// tiles know of each other.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/recurrence/algo.h"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {

/// A tensor's [batch, time, channel], time 0 being the sweep's first.
template <class T>
struct GatedRows {
  T* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int32_t time_bytes = 0;  // from one time to the next

  __device__ T* column(int batch, int channel) const { return data + batch * batch_stride + channel; }
  /// `time` rows below `top`: one multiply-add.
  __device__ T* below(T* top, int time) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(top) + std::int64_t{time_bytes} * time);
  }
};
template <class T>
GatedRows<T> gated_rows(const SequenceView<T, Device>& view, std::int64_t first) {
  return {view.at(0, 0, first), view.batch_stride,
          static_cast<std::int32_t>(view.time_stride * static_cast<std::int64_t>(sizeof(T)))};
}

/// Operands of a sweep of `times` times.
template <class A>
struct GatedTileOperands {
  GatedRows<const A> z, zm;
  GatedRows<const float> gamma;
  GatedRows<float> h;    // row t is the state before time t
  GatedRows<A> rounded;  // receives h rounded; the same memory as h where A is float
  const float* bias;     // or null
  float* change;         // [times], raised
  float* magnitude;
  float mix;
  int times;
  int channels;
  int time_tiles;
  int channel_tiles;
  int tiles_of_a_time;      // channel tiles of all sequences
  std::uint32_t* checked;   // times' tiles that have been looked at
  std::uint32_t* moving;    // times left from the first that moves
  std::uint32_t* finished;  // [time tile] tiles
  std::uint32_t* readers;   // [batch][channel tile]
  ulonglong2* published;    // [batch][time tile but the last][channel]
  GatedCheck check;         // its runs.of_row and runs.base are those of these times
  int after;                // times of the check after these
  bool reports;             // else a later launch does
};

/// Words of Cuda::flags() that a sweep by such tiles takes: the two of the check, a count of finished tiles per tile of
/// time, one of readers per batch and tile of channels, then what tiles publish.
struct GatedFlags {
  std::int64_t batch, time_tiles, channel_tiles, channels;

  std::int64_t counters() const { return ceil_div(2 + time_tiles + batch * channel_tiles, 4) * 4; }
  std::int64_t words() const { return counters() + 4 * batch * (time_tiles - 1) * channels; }
  bool fit() const { return words() <= static_cast<std::int64_t>(Cuda::kFlagWords); }
};

/// Operands of times [first, first + count) of a GatedScan or GatedSweep, which rounds states into `rounded`.
template <class Op, class A>
GatedTileOperands<A> gated_tile_operands(Cuda& cuda, const Op& op, const SequenceView<A, Device>& rounded,
                                         const float* bias, const GatedCheck& check, std::int64_t first,
                                         std::int64_t count, const GatedFlags& flags) {
  const GateInputs<Device, A>& in = op.in;
  const auto after = static_cast<int>(in.z.time - first - count);
  GatedCheck here = check;
  if (here.runs.of_row != nullptr) here.runs.of_row += first, here.runs.base += static_cast<int>(first);
  return {.z = gated_rows(in.z, first),
          .zm = gated_rows(in.zm, first),
          .gamma = gated_rows(in.gamma, first),
          .h = gated_rows(in.h, first),
          .rounded = gated_rows(rounded, first),
          .bias = bias,
          .change = op.change + first,
          .magnitude = op.magnitude + first,
          .mix = in.mdi_mix,
          .times = static_cast<int>(count),
          .channels = static_cast<int>(in.z.dim),
          .time_tiles = static_cast<int>(flags.time_tiles),
          .channel_tiles = static_cast<int>(flags.channel_tiles),
          .tiles_of_a_time = static_cast<int>(flags.batch * flags.channel_tiles),
          .checked = cuda.flags(),
          .moving = cuda.flags() + 1,
          .finished = cuda.flags() + 2,
          .readers = cuda.flags() + 2 + flags.time_tiles,
          .published = reinterpret_cast<ulonglong2*>(cuda.flags() + flags.counters()),
          .check = here,
          .after = after,
          .reports = after == 0};
}

}  // namespace mmrec::kernels
