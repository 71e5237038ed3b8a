// The words in which an architecture's table says what its weights are: fields, each with the tensors of a checkpoint
// that fill it, and their shapes. A table is a struct of fields and a visitor that goes through the fields of several
// instances side by side: checking, reading, viewing, copying, counting and making up weights all go through it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/files/checkpoint.h"
#include "models/files/warning_sink.h"
#include "models/weights/quantization_config.h"

namespace mmrec::models {

/// What shapes, and which tensors there are, depend on.
struct Sizes {
  std::int64_t v = 0, d = 0, f = 0, g = 0, r = 0;  // vocabulary, width, FFN, decay gate, rank of a low-rank one
  bool fused = false;                              // one tensor for what is projected from u
  bool low_rank = false;                           // the decay gate is

  bool operator==(const Sizes&) const = default;
};

/// A size of a tensor: a sum of multiples of these.
struct Extent {
  std::int64_t v = 0, d = 0, f = 0, g = 0, r = 0;

  std::int64_t of(const Sizes& s) const { return v * s.v + d * s.d + f * s.f + g * s.g + r * s.r; }
};
constexpr Extent operator*(std::int64_t n, const Extent& e) { return {n * e.v, n * e.d, n * e.f, n * e.g, n * e.r}; }

/// Says of a model whether it is one of a set.
using Variants = bool (*)(const Sizes& sizes);

/// What one tensor gives to a field: rows [row, row + rows) and columns [col, col + cols) of NAME.weight [out, in], or
/// as the field's Storage says.
struct TensorPart {
  std::string_view name;                                           // behind the prefix of its block
  Extent out, in;                                                  // `in` is not used for a vector
  Variants used_by = [](const Sizes& /*sizes*/) { return true; };  // else the model may have it, unused
  Extent row = {}, rows = out;  // fewer than `out`: the tensor may have more, which nothing uses
  Extent col = {}, cols = in;
};

/// How a checkpoint names and lays out what a field is made of. Biases are NAME.bias in each.
struct Storage {
  std::string_view suffix = ".weight";
  bool transposed = false;  // [in, out] in the checkpoint, [out, in] in memory
};
inline constexpr Storage kTorch;
inline constexpr Storage kFlaxKernel{".kernel", true};
inline constexpr Storage kFlaxScale{".scale"};
inline constexpr Storage kFlaxTable{""};

/// Describes a field of a model's weights.
struct Field {
  enum class Kind : std::uint8_t {
    kLinear,  // a matrix, of tensors that have biases
    kBias,    // these biases, NAME.bias [out]: of parts that begin at column 0, so that each is taken once
    kTable,   // a matrix without biases
    kNorm,    // a vector NAME.weight [out]
  };
  Kind kind;
  std::span<const TensorPart> parts;  // from top to bottom; the field is empty in a model that uses none of them
  bool of_memory = false;             // of the attention over memory slots: idle while there are none
  Storage storage = kTorch;
  bool optional = false;         // a head: absent, or equal to the embedding, where it is tied
  std::string_view prefix = {};  // of its tensors' names: "blocks.3."
  bool mixes_formats = false;    // nothing but linear() reads it, so its parts may keep formats of their own

  constexpr bool is_matrix() const { return kind == Kind::kLinear || kind == Kind::kTable; }
};

/// How many fields `visit` visits: the size of a struct whose fields are chars, if it reaches every one of them.
template <class Visit>
constexpr std::size_t fields_visited(const Visit& visit) {
  std::size_t count = 0;
  visit([&](const Field& /*field*/) { ++count; });
  return count;
}

namespace table {

inline constexpr Extent kV{.v = 1}, kD{.d = 1}, kF{.f = 1}, kG{.g = 1}, kR{.r = 1}, kNone{};
inline constexpr Variants kSplit = [](const Sizes& s) { return !s.fused; };
inline constexpr Variants kFused = [](const Sizes& s) { return s.fused; };

}  // namespace table

/// One tensor that a checkpoint of a model may hold.
struct TensorSpec {
  enum class Use : std::uint8_t {
    kRequired,
    kOptional,  // used if present (a head that is not tied)
    kUnused,    // in the public state dict, without a part in the model's equations
  };
  std::string name;
  std::vector<std::int64_t> shape;
  Use use = Use::kRequired;
  bool may_have_more_rows = false;  // W_fused: shape[0] is the least; rows beyond are unused
};

/// visit, for the fields of the block whose tensors' names begin with `prefix`, which must outlive it.
template <class Visit>
constexpr auto at_prefix(const Visit& visit, std::string_view prefix) {
  return [&visit, prefix](Field field, auto&... members) {
    field.prefix = prefix;
    visit(field, members...);
  };
}

/// Appends the tensors of a field, each once in a block, and a bias behind its weight. Fields of a block follow each
/// other. Tensors of the decay gate that is not low-rank may be in every model, unused.
void add_specs(const Field& field, const Sizes& sizes, std::vector<TensorSpec>& specs);

/// What check_tensors says beyond shapes.
struct TensorRules {
  /// Of tensors that only training uses: ignored, whatever their shape, and reported as `training_names`.
  std::function<bool(std::string_view name)> is_training_only;
  std::string_view training_names;
  /// The setting that a missing or unexpected name may be owed to, "; config.json has ..."; or "".
  std::function<std::string(std::string_view name)> hint;
};

/// Compares all of a checkpoint's tensors with `specs`. Throws std::runtime_error naming file, tensor, found and
/// expected for one that is missing, unexpected, of another shape, or quantised in no way that `schemes` has; those
/// that only training uses are reported to `warn`.
void check_tensors(const Checkpoint& checkpoint, const std::vector<TensorSpec>& specs, const QuantSchemes& schemes,
                   const TensorRules& rules, const WarningSink& warn);

}  // namespace mmrec::models
