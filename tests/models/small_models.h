// Small synthetic models of any architecture, and comparisons of what executors of them have come to.
#pragma once

#include "models/architecture.h"
#include "models/mmrec/mmrec.h"
#include "tests/models/lockstep.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {

inline constexpr int kSmallVocab = 50;

inline Config small_config(std::int64_t dim = 64) {
  Config config;
  config.vocab_size = kSmallVocab;
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

inline std::unique_ptr<LoadedModel> load_small_model(std::string_view architecture, const Config& config,
                                                     kernels::DType dtype, const VariantOptions& variant = {}) {
  const test::TempFolder folder;
  write_small_model(folder.path(), architecture, config, dtype);
  return load_model(folder.path(), variant, {});
}

inline std::vector<float> logits_of(Executor& executor, Slot slot) {
  std::vector<float> logits(static_cast<std::size_t>(kSmallVocab));
  executor.logits(slot, 1, logits);
  return logits;
}

/// Each part within `bound` of its largest value, `least` at the least.
inline void expect_near(const HostState& got, const HostState& want, double bound, double least = 0.0) {
  ASSERT_EQ(got.parts.size(), want.parts.size());
  for (std::size_t i = 0; i < got.parts.size(); ++i) {
    const auto share = [&]<class Values>(const Values& values) {
      return largest_share(values, std::get<Values>(want.parts[i].values), least);
    };
    EXPECT_LE(std::visit(share, got.parts[i].values), bound) << got.parts[i].name;
  }
}

}  // namespace mmrec::models
