// Small synthetic models of any architecture, and how far two of their results are apart.
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string_view>

#include "models/architecture.h"
#include "models/mmrec/mmrec.h"

namespace mmrec::models {

inline Config small_config(std::int64_t dim = 64) {
  Config config;
  config.vocab_size = 50;
  config.model_dim = dim;
  config.num_layers = 2;
  config.num_heads = 2;
  config.ffn_dim = 2 * dim;
  config.memory_segment = 24;
  config.memory_slots = 3;
  return config;
}

/// The files of a model: MM-Rec's of a configuration, of another architecture one of its sizes.
inline SyntheticModel small_model(std::string_view architecture, const Config& c) {
  if (architecture == Config::kModelType) return synthetic_of(c);
  const std::int64_t ffn = architecture == "mmrec-jax" ? 4 * c.model_dim : c.ffn_dim;
  return synthetic_model(architecture, {.dim = c.model_dim, .layers = c.num_layers, .vocab = c.vocab_size, .ffn = ffn});
}
inline void write_small_model(const std::filesystem::path& folder, std::string_view architecture, const Config& config,
                              kernels::DType dtype) {
  write_synthetic_folder(folder, small_model(architecture, config), dtype, 7);
}

/// The largest difference, as a share of the largest value wanted, `least` at the least; infinite for NaN or another
/// number of values.
template <class Got, class Want>
double largest_share(const Got& got, const Want& want, double least = 0.0) {
  if (got.size() != want.size()) return INFINITY;
  double most = least, difference = 0.0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double d = std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    most = std::max(most, std::abs(static_cast<double>(want[i])));
    difference = std::isnan(d) ? INFINITY : std::max(difference, d);
  }
  return most == 0.0 ? difference : difference / most;
}

}  // namespace mmrec::models
