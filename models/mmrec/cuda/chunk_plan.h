// How MM-Rec's work is cut into chunks on a GPU.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/cuda/runtime/cuda.h"
#include "models/mmrec/config.h"
#include "models/runtime/schedule.h"

namespace mmrec::models {

/// Whether an op over a segment's rows leaves half of the device idle.
inline bool leaves_idle(const Config& config, const kernels::Cuda& cuda) {
  constexpr std::int64_t kTile = 128;
  const auto tiles = [](std::int64_t size) { return (size + kTile - 1) / kTile; };
  return 2 * tiles(config.memory_segment) * tiles(config.ffn_dim) <= cuda.processors();
}

/// Rows enough to fill the device in every product. A window is a tile of a sweep, of 128 times and 128 channels, for
/// every multiprocessor, so that what its sweeps go over again and again stays in L2; two tiles where products take
/// most of a sweep. Cut to a power of 2: whole windows fill a chunk.
inline ChunkPlan chunk_plan(const Config& config, const kernels::Cuda& cuda) {
  constexpr std::int64_t kTokens = 4096;
  const std::int64_t tiles = (config.model_dim <= 1024 ? 1 : 2) * std::int64_t{cuda.processors()};
  const std::int64_t fits = std::int64_t{128} * 128 * tiles / config.model_dim;
  const auto window = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(fits)));
  ChunkPlan plan = {
      .tokens = kTokens,
      .tile = 1,
      .rows = 8192,
      .window = std::clamp<std::int64_t>(window, 256, kTokens),
      .spans_segments = config.carry_state || config.model_dim % 2 == 0,  // packed_sweeps takes no odd D that restarts
      .packs = true};
  if (cuda.batch_invariant()) {
    plan.align = 128;  // times of a tile of sweeps, whose steps are composed
    return plan;
  }
  if (config.num_layers > 1 && plan.spans_segments && leaves_idle(config, cuda)) {
    plan.part = std::max<std::int64_t>(plan.window / 4, 256);  // four fill the device as a window does
    plan.alone = 16 * kTokens;                                 // many parts, for few run at its beginning and its end
  }
  return plan;
}

}  // namespace mmrec::models
