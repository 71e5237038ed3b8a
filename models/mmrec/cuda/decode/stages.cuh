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

/// In the order of the stream. A product may take in the matrix that follows it: gamma_in takes in context_in, and of
/// one sequence, whose tile has a column for either network's vector, gamma_up takes in context_up.
enum class Product : std::uint8_t {
  kGate,
  kGammaIn,
  kContextIn,
  kQvzk,
  kGammaUp,
  kContextUp,
  kMemoryQ,
  kMemoryOut,
  kFfnIn,
  kFfnOut,
  kHead,
  kCount
};

/// Vectors of a layer that blocks exchange, in the order of time: hidden units of the decay networks; h; the query;
/// what was attended to; y; hidden units of the ffn; x. y and x are fp32, the others are rounded to A.
enum class Point : std::uint8_t { kHidden, kState, kQuery, kAttended, kMixed, kFfn, kOutput, kCount };

/// In the order of time; kPredict comes once, after all layers.
enum class Stage : std::uint8_t {
  kGate,
  kHide,
  kProject,  // while hidden units are on their way
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
  MMREC_HOST_DEVICE constexpr bool is_pair() const { return input == Point::kHidden; }
  /// The input is that of the stage before, which has left it in its place.
  MMREC_HOST_DEVICE constexpr bool keeps_input() const { return first == Product::kQvzk; }
  /// The outputs are many of one kind, taken in passes.
  MMREC_HOST_DEVICE constexpr bool has_passes() const { return owned == Owned::kFfn || owned == Owned::kVocab; }
};
MMREC_HOST_DEVICE constexpr StageInfo stage_info(Stage stage) {
  using enum Owned;
  constexpr StageInfo kStages[] = {
      {Point::kCount, Point::kCount, Product::kGate, Product::kGammaIn, kChannels, kChannels, 0},
      {Point::kOutput, Point::kHidden, Product::kGammaIn, Product::kQvzk, kHidden, kHidden, 2},
      {Point::kOutput, Point::kCount, Product::kQvzk, Product::kGammaUp, kChannels, kChannels, 4},
      {Point::kHidden, Point::kState, Product::kGammaUp, Product::kMemoryQ, kChannels, kChannels,
       8},  // an output takes both products
      {Point::kState, Point::kQuery, Product::kMemoryQ, Product::kMemoryOut, kChannels, kChannels, 10},
      {Point::kAttended, Point::kMixed, Product::kMemoryOut, Product::kFfnIn, kChannels, kChannels, 11},
      {Point::kMixed, Point::kFfn, Product::kFfnIn, Product::kFfnOut, kFfn, kFfn, 12},
      {Point::kFfn, Point::kOutput, Product::kFfnOut, Product::kHead, kChannels, kChannels, 13},
      {Point::kOutput, Point::kCount, Product::kHead, Product::kCount, kVocab, kVocab, 14},  // which has none
  };
  return kStages[static_cast<int>(stage)];
}
inline constexpr int kBiases = 14;

MMREC_HOST_DEVICE constexpr bool is_normalised(Stage stage) { return stage_info(stage).is_normalised(); }
MMREC_HOST_DEVICE constexpr bool is_pair(Stage stage) { return stage_info(stage).is_pair(); }
MMREC_HOST_DEVICE constexpr bool has_passes(Stage stage) { return stage_info(stage).has_passes(); }

/// The values that a block keeps of its own channels between stages. The first are the parts of `project`, the last of
/// which is W_mz z + b_m.
enum class Local : std::uint8_t { kQ, kV, kZ, kMdiInput, kResidual, kStateGate, kMdiGate, kH, kCount };

}  // namespace mmrec::kernels
