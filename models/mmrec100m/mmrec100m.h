// MMRec100M as an architecture (models/runtime/model.h): the table of its weights, which is MM-Rec's for the blocks of
// an expert, where the state of a sequence lies in its slot, and what else tells it from others.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "models/mmrec/mmrec.h"
#include "models/mmrec100m/config.h"

namespace mmrec::models::mmrec100m {

inline constexpr std::array<std::string_view, 2> kExpertPrefixes = {"text_expert.", "code_expert."};

template <class Matrix, class Vector>
struct ExpertFields {
  Vector norm{};                                    // [E]
  std::vector<LayerFields<Matrix, Vector>> layers;  // none of an expert that does not run
};

template <class Matrix, class Vector>
struct Fields {
  Matrix embedding{};    // [V, E]
  Matrix fusion{};       // [2E, 2E], on the experts' outputs side by side, text first
  Vector fusion_bias{};  // [2E]
  Vector norm{};         // [2E]
  Matrix head{};         // [V, 2E]
  std::array<ExpertFields<Matrix, Vector>, 2> experts;
};

namespace table {

using namespace models::table;
inline constexpr TensorPart kFusion[] = {{"fusion.fusion_proj", 2 * kD, 2 * kD}};
inline constexpr TensorPart kFinalNorm[] = {{"final_norm", 2 * kD, kNone}};
inline constexpr TensorPart kWideHead[] = {{"lm_head", kV, 2 * kD}};

}  // namespace table

/// Offsets and size in bytes.
struct SlotLayout {
  std::array<models::SlotLayout, 2> stacks;  // of the experts that run, in their order
  std::size_t logits = 0;                    // [V] fp32
  std::size_t bytes = 0;

  explicit SlotLayout(const Config& config) : SlotLayout(config, config.stack(), SlotPlaces()) {}

 private:
  SlotLayout(const Config& config, const models::Config& stack, SlotPlaces places)
      : stacks{models::SlotLayout(stack, places), models::SlotLayout(stack, places)},
        logits(places.place(static_cast<std::size_t>(config.vocab_size) * sizeof(float))),
        bytes(places.bytes()) {
    for (models::SlotLayout& of_stack : stacks) of_stack.bytes = bytes;
  }
};

/// What is saved of it: sums and contexts of segments are nothing here.
inline StateLayout state_layout(const Config& config) {
  using enum StatePart::Type;
  const SlotLayout slot(config);
  const std::int64_t dim = config.expert_dim - config.padding;
  StateLayout layout{.numbers = {{"num_layers", config.num_layers},
                                 {"expert_dim", dim},
                                 {"experts", static_cast<std::int64_t>(config.stacks())},
                                 {"vocab_size", config.vocab_size}},
                     .parts = {},
                     .slot_bytes = slot.bytes};
  constexpr std::array<std::string_view, 2> kNames = {"text.h", "code.h"};
  for (std::size_t i = 0; i < config.stacks(); ++i) {
    layout.parts.push_back({.name = kNames[config.first() + i],
                            .type = kF32,
                            .rows = config.num_layers,
                            .cols = dim,
                            .offset = slot.stacks[i].h,
                            .spread = {dim, config.padding}});
  }
  layout.parts.push_back({"logits", kF32, 1, config.vocab_size, slot.logits, false});
  return layout;
}

template <class Backend, class A>
class Net;

struct Mmrec100m : BlocksOnDevice {
  using Config = mmrec100m::Config;
  template <class Matrix, class Vector>
  using Fields = mmrec100m::Fields<Matrix, Vector>;
  template <class Backend, class A>
  using Net = mmrec100m::Net<Backend, A>;

  /// Nothing of an expert without layers.
  template <class Visit, class Model, class... Models>
  static void visit(const Visit& visit, Model& first, Models&... others) {
    using enum Field::Kind;
    visit(Field{kTable, table::kEmbedding}, first.embedding, others.embedding...);
    visit(Field{kLinear, table::kFusion}, first.fusion, others.fusion...);
    visit(Field{kBias, table::kFusion}, first.fusion_bias, others.fusion_bias...);
    visit(Field{kNorm, table::kFinalNorm}, first.norm, others.norm...);
    visit(Field{kTable, table::kWideHead}, first.head, others.head...);
    for (std::size_t e = 0; e < first.experts.size(); ++e) {
      if (first.experts[e].layers.empty()) continue;
      visit(Field{.kind = kNorm, .parts = table::kNorm, .prefix = kExpertPrefixes[e]}, first.experts[e].norm,
            others.experts[e].norm...);
      visit_blocks(visit, kExpertPrefixes[e], first.experts[e], others.experts[e]...);
    }
  }
  static Sizes sizes(const Config& config, const Checkpoint* /*checkpoint*/) { return sizes_of(config.stack()); }
  static TensorRules rules(const Config& config);
  static bool is_read(const Field& field) { return !(field.of_memory && field.is_matrix()); }  // nothing is attended to
  /// Of the experts that run.
  template <class Weights>
  static void make_layers(const Config& config, Weights& weights) {
    for (std::size_t i = 0; i < config.stacks(); ++i) {
      weights.experts[config.first() + i].layers.resize(static_cast<std::size_t>(config.num_layers));
    }
  }
  template <class From, class To>
  static void match_layers(const From& from, To& to) {
    for (std::size_t e = 0; e < to.experts.size(); ++e) to.experts[e].layers.resize(from.experts[e].layers.size());
  }
  template <class View>
  static void complete_on_device(View& view, int gpu) {
    for (auto& expert : view.experts) compose_blocks(expert.layers, gpu);
  }
  static bool steps_compact(const Config& config, int gpu) {
    return config.stacks() == 1 && blocks_step_compact(config.stack(), 0, gpu);
  }
  template <class Weights>
  static bool is_tied(const Weights& /*weights*/) {
    return false;
  }
  /// Heads that attend to nothing change nothing.
  static Config identity(Config config) {
    config.num_heads = 1;
    return config;
  }
  /// A checkpoint has both experts, whichever runs.
  static Config whole(Config config) {
    config.expert = Expert::kBoth;
    return config;
  }

  static void describe(const Config& config, ModelInfo& info);
  static void correct_bytes(const Config& config, std::optional<kernels::DType> type, ModelInfo& info);
  static ProductCounts products(const Config& config);
  static Config synthetic(const SyntheticSizes& sizes);
};

using HostWeights = WeightsOf<Mmrec100m>;
template <class Space>
using ModelView = ViewOf<Mmrec100m, Space>;

}  // namespace mmrec::models::mmrec100m
