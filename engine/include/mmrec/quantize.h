// Model folders with smaller numbers: int8, int4 or fp8 weights with scales, stored as compressed-tensors stores them.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "mmrec/export.h"

namespace mmrec {

/// What the numbers of a matrix become: small numbers, multiplied by scales that several of them share.
enum class QuantizedType : std::uint8_t {
  kInt8,  ///< -127..127, a scale per row
  kInt4,  ///< -8..7, a scale per group of inputs
  kFp8,   ///< e4m3, at most 448, a scale per row
};
/// Names of the types, by value.
inline constexpr std::array<std::string_view, 3> kQuantizedTypeNames = {"int8", "int4", "fp8"};
/// The name of a type.
constexpr std::string_view to_string(QuantizedType type) { return kQuantizedTypeNames[static_cast<std::size_t>(type)]; }

/// How a model is quantised.
struct QuantizeOptions {
  QuantizedType type = QuantizedType::kInt8;  ///< matrices that do not bear the others become kInt8
  int group = 64;                             ///< inputs that share a scale of kInt4: a multiple of 64, at most 65536
  /// Glob patterns: a matrix whose name matches one stays as it is. Each matches one at least.
  std::vector<std::string> keep = {};
  int threads = 0;  ///< of the CPU; 0: all that this process may use. >= 0
  /// Token ids of a text [T]. If there are some, the model runs over them, and weights are rounded so that products
  /// with the inputs that matrices had change little. Takes 16 bytes for the square of a matrix' inputs.
  std::vector<int> calibration = {};
  /// Called now and then with the tokens of the calibration that are done and all of them; false cancels.
  std::function<bool(std::int64_t done, std::int64_t total)> on_calibration = {};
  /// Called now and then, in the calling thread, with the bytes of the checkpoint that are done and all of them.
  /// Returning false cancels.
  std::function<bool(std::uint64_t done, std::uint64_t total)> on_progress = {};
};

/// A matrix [rows, cols] that was quantised.
struct QuantizedMatrix {
  std::string name;                           ///< of its module: NAME.weight without ".weight"
  QuantizedType type = QuantizedType::kInt8;  ///< of its numbers
  std::int64_t group = 0;                     ///< inputs that share a scale; 0: all of a row
  std::int64_t rows = 0;                      ///< outputs
  std::int64_t cols = 0;                      ///< inputs
  std::uint64_t bytes = 0;                    ///< of its numbers and scales
  double error = 0.0;                         ///< root mean square of the difference, relative to that of the weights
};

/// The result of quantize_model().
struct QuantizedModel {
  bool complete = false;                  ///< false: cancelled, and nothing was written
  std::vector<QuantizedMatrix> matrices;  ///< in the order of the checkpoint
  std::uint64_t parameters = 0;           ///< numbers in the checkpoint, those that stayed among them
  std::uint64_t bytes_before = 0;         ///< of all tensors
  std::uint64_t bytes_after = 0;          ///< of all tensors
};

/// Quantises each two-dimensional tensor NAME.weight of the model folder `from` and writes the model to `to`: a new
/// folder, or one that is empty. All other tensors and the other files of a model folder are copied. Numbers are
/// rounded to the nearest, or by second order if there is a calibration, with the scale that has the least squared
/// error among some 40. Files do not depend on `threads`. Holds some rows of a tensor for each thread. `to` gets
/// config.json last; where it is cancelled or throws, what it has written is removed. Throws std::runtime_error naming
/// file, field, found and expected for a malformed folder, one that is quantised already, one without such a tensor,
/// and weights that are not finite; std::system_error where a file cannot be read; WriteError; std::bad_alloc; and
/// std::invalid_argument for options out of range and a `to` that holds something.
MMREC_EXPORT QuantizedModel quantize_model(const std::filesystem::path& from, const std::filesystem::path& to,
                                           const QuantizeOptions& options = {});

}  // namespace mmrec
