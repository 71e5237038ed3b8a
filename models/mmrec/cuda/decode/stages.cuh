// The vocabulary of a decode step: what blocks own, the products and stages of a layer, and the vectors that blocks
// hand on. stage_info is the one table of stages; every algorithm follows it.
#pragma once

#include <cstdint>

#include "kernels/tensor.h"

namespace mmrec::kernels {

template <class Enum>
inline constexpr int kCountOf = static_cast<int>(Enum::kCount);
/// One T for each enumerator.
template <class Enum, class T>
struct Table {
  T of[kCountOf<Enum>] = {};
  MMREC_HOST_DEVICE constexpr T& operator[](Enum i) { return of[static_cast<int>(i)]; }
  MMREC_HOST_DEVICE constexpr const T& operator[](Enum i) const { return of[static_cast<int>(i)]; }
};

/// The rows that blocks divide: channels, units of the hidden layers, rows of the head.
enum class Owned : std::uint8_t { kChannels, kHidden, kFfn, kVocab, kCount };

/// In the order of the stream. A product may take in the matrices that follow it: gate_z takes in γ's first matrix, and
/// of one sequence, whose tile has a column for either network's vector, the second network's too.
enum class Product : std::uint8_t {
  kGate,
  kQvzk,
  kGateZ,
  kGammaIn,
  kContextIn,
  kGammaUp,
  kContextUp,
  kMemoryQ,
  kMemoryOut,
  kFfnIn,
  kFfnOut,
  kHead,
  kCount
};

/// Vectors of a layer that blocks exchange, in the order of time: z and k; hidden units of the decay networks; h; the
/// query; what was attended to; y; hidden units of the ffn; x. y and x are fp32, the others are rounded to A.
enum class Point : std::uint8_t { kProjected, kHidden, kState, kQuery, kAttended, kMixed, kFfn, kOutput, kCount };

/// In the order of time; kPredict comes once, after all layers.
enum class Stage : std::uint8_t {
  kGate,
  kProject,
  kHide,
  kAdvance,
  kQuery,
  kRecall,
  kWiden,
  kNarrow,
  kPredict,
  kCount
};
/// The outputs of a stage are those of one to four matrices or slices, its parts.
struct StageInfo {
  Point input;          // of the layer, of the one before for kOutput; kCount: h before the step
  Point output;         // kCount: none; of `advance` kMixed where there is nothing to attend to
  Product first, end;   // what it multiplies, with what these take in
  Owned owned, others;  // outputs of part 0, and of further parts
  int bias;             // number of part 0's in LayerShare

  /// The input is the residual stream, normalised.
  MMREC_HOST_DEVICE constexpr bool is_normalised() const { return input == Point::kMixed || input == Point::kOutput; }
  /// The input may be two vectors, one for the first part of the outputs.
  MMREC_HOST_DEVICE constexpr bool is_pair() const { return input == Point::kProjected || input == Point::kHidden; }
  /// The outputs are many of one kind, taken in passes.
  MMREC_HOST_DEVICE constexpr bool has_passes() const { return owned != Owned::kChannels; }
};
MMREC_HOST_DEVICE constexpr StageInfo stage_info(Stage stage) {
  using enum Owned;
  constexpr StageInfo kStages[] = {
      {Point::kCount, Point::kCount, Product::kGate, Product::kQvzk, kChannels, kChannels, 0},
      {Point::kOutput, Point::kProjected, Product::kQvzk, Product::kGateZ, kChannels, kChannels, 2},
      {Point::kProjected, Point::kHidden, Product::kGateZ, Product::kGammaUp, kChannels, kHidden, 6},
      {Point::kHidden, Point::kState, Product::kGammaUp, Product::kMemoryQ, kChannels, kChannels,
       9},  // an output takes both products
      {Point::kState, Point::kQuery, Product::kMemoryQ, Product::kMemoryOut, kChannels, kChannels, 11},
      {Point::kAttended, Point::kMixed, Product::kMemoryOut, Product::kFfnIn, kChannels, kChannels, 12},
      {Point::kMixed, Point::kFfn, Product::kFfnIn, Product::kFfnOut, kFfn, kFfn, 13},
      {Point::kFfn, Point::kOutput, Product::kFfnOut, Product::kHead, kChannels, kChannels, 14},
      {Point::kOutput, Point::kCount, Product::kHead, Product::kCount, kVocab, kVocab, 15},  // which has none
  };
  return kStages[static_cast<int>(stage)];
}
inline constexpr int kBiases = 15;

MMREC_HOST_DEVICE constexpr bool is_normalised(Stage stage) { return stage_info(stage).is_normalised(); }
MMREC_HOST_DEVICE constexpr bool is_pair(Stage stage) { return stage_info(stage).is_pair(); }
MMREC_HOST_DEVICE constexpr bool has_passes(Stage stage) { return stage_info(stage).has_passes(); }
/// Parts of `project`.
enum Projection : int { kQ, kV, kZ, kK };

/// The values that a block keeps of its own channels between stages.
enum class Local : std::uint8_t { kResidual, kQ, kV, kZ, kStateGate, kMdiGate, kMdiInput, kCount };

}  // namespace mmrec::kernels
