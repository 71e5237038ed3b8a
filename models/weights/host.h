// Weights in host memory, in their stored type and laid out for the forward pass, and their way there from a
// checkpoint: for any architecture's table of fields.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/tensor.h"
#include "mmrec/precision.h"
#include "models/files/checked.h"
#include "models/files/checkpoint.h"
#include "models/weights/fields.h"
#include "models/weights/stored_matrix.h"

namespace mmrec::models {

/// A matrix that owns its bytes in host memory. Parts stacked into one matrix share its format: the parts' own where
/// they agree and are not cut within a group of quantised numbers, int8 where some are int8 and some int4, fp32
/// otherwise. Where it is int8 for parts of int4, these may keep their formats (WeightOptions).
struct HostMatrix {
  kernels::HostBuffer<std::byte> bytes;
  kernels::WeightFormat format;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<kernels::StackedRows> stack = {};  // if parts keep their formats

  kernels::WeightView<kernels::Host> view() const {
    kernels::WeightView<kernels::Host> view{bytes.data(), format, rows, cols};
    view.stack = stack;
    return view;
  }
};

/// Biases and norm weights, widened to fp32.
using HostVector = kernels::HostBuffer<float>;

inline kernels::WeightView<kernels::Host> view(const HostMatrix& matrix) { return matrix.view(); }
inline const float* view(const HostVector& vector) { return vector.data(); }

/// What is known of a model's weights as a whole.
struct WeightTotals {
  std::uint64_t bytes = 0;        // resident size of all fields
  std::uint64_t parameters = 0;   // elements of the tensors bound (tied head counted once)
  std::uint64_t fingerprint = 0;  // identity of configuration, tensor names, shapes and bytes
  bool rounds_inputs = false;     // products on the CPU take their inputs in bf16, as kernels::Cpu says
};

/// The type of matrices that a precision asks for, fp32 where it asks for none; and the precision of products with
/// them.
constexpr kernels::DType type_of(Precision precision) {
  using enum Precision;
  return precision == kF16 ? kernels::DType::kF16 : precision == kBF16 ? kernels::DType::kBF16 : kernels::DType::kF32;
}
constexpr Precision precision_of(kernels::DType type) {
  using enum kernels::DType;
  return type == kF16 ? Precision::kF16 : type == kBF16 ? Precision::kBF16 : Precision::kF32;
}

/// The type of a matrix that is there and not quantised.
inline std::optional<kernels::DType> plain_type(const HostMatrix& matrix) {
  if (matrix.rows == 0 || kernels::is_quantized(matrix.format.code)) return std::nullopt;
  return matrix.format.code;
}
inline std::optional<kernels::DType> plain_type(const HostVector& /*vector*/) { return std::nullopt; }

/// Bytes of a field whose matrices are of `type`, or as they are stored where none is given.
inline std::uint64_t bytes_of(const HostVector& vector, std::optional<kernels::DType> /*type*/) {
  return vector.size() * sizeof(float);
}
inline std::uint64_t bytes_of(const HostMatrix& matrix, std::optional<kernels::DType> type) {
  return type ? kernels::bytes_of(*type, matrix.rows, matrix.cols) : matrix.bytes.size();
}

/// A matrix's elements as bf16, rounded to nearest even; vectors and quantised numbers stay. Returns the bytes saved.
/// Throws std::bad_alloc.
std::uint64_t round_to_bf16(HostMatrix& matrix);
inline std::uint64_t round_to_bf16(HostVector& /*vector*/) { return 0; }

struct WeightOptions {
  bool allow_nonfinite = false;  // load NaN and infinite weights instead of refusing them
  int threads = 0;               // readers; <= 0: all processors
  bool mixes_formats = false;    // of parts of a field that takes them: for the CPU alone
};

/// Rows [row, row + rows) and columns [col, col + cols) of a tensor with `row_elements` elements per row, and where
/// they go in which type. The elements of a vector are rows of one. Transposed: rows become columns of what they go to,
/// which are `to_stride` elements apart.
struct Slice {
  StoredMatrix from = {};
  std::int64_t row = 0;
  std::int64_t rows = 0;
  std::int64_t col = 0;
  std::int64_t cols = 1;
  std::int64_t row_elements = 1;
  bool transposed = false;
  std::int64_t to_stride = 0;
  std::byte* to = nullptr;
  std::uint64_t* hashes = nullptr;  // one for each piece of rows that is read
  kernels::WeightFormat format = {};

  const TensorInfo& tensor() const { return *from.numbers; }
  bool is_quantized() const { return from.scales != nullptr; }
  std::uint64_t elements() const { return static_cast<std::uint64_t>(rows * cols); }
  /// Of the tensor, in the file.
  std::uint64_t row_bytes() const {
    return is_quantized() ? static_cast<std::uint64_t>(from.row_bytes())
                          : static_cast<std::uint64_t>(row_elements) * kernels::size_of(tensor().dtype);
  }
  /// The format of the tensor, fp32 where its groups are cut or it is transposed.
  kernels::WeightFormat own_format() const {
    const std::int64_t grain = std::max(from.format.group, kernels::kQuantBlock);
    const bool is_cut = col % grain != 0 || (cols % grain != 0 && col + cols != row_elements);
    return is_quantized() && (transposed || is_cut) ? kernels::WeightFormat() : from.format;
  }
  /// Rows that are checked and hashed together. The fingerprint depends on this number.
  std::int64_t piece_rows() const {
    constexpr std::uint64_t kPieceBytes = 16384;  // fits the first-level cache
    return static_cast<std::int64_t>(std::max<std::uint64_t>(1, kPieceBytes / row_bytes()));
  }
};

/// A field to be filled with slices one below the other.
struct Target {
  HostMatrix* matrix = nullptr;  // exactly one of the two
  HostVector* vector = nullptr;
  std::vector<Slice> slices;
  std::vector<std::uint64_t> hashes = {};  // of all bytes, in the order of the slices, once they were read
  bool mixes_formats = false;

  Target(HostMatrix& to, std::vector<Slice> from) : matrix(&to), slices(std::move(from)) {}
  Target(HostVector& to, std::vector<Slice> from) : vector(&to), slices(std::move(from)) {}

  /// The tensors' own format where they agree; int8 with the smallest groups where these are int8 and int4; fp32
  /// otherwise and for vectors.
  kernels::WeightFormat format() const;
  /// Whether the tensors keep their own, among them int4.
  bool is_mixed() const;
  kernels::WeightFormat format_of(const Slice& slice) const { return is_mixed() ? slice.own_format() : format(); }
  /// Columns and rows of the field.
  std::int64_t cols() const { return slices.front().transposed ? slices.front().rows : slices.front().cols; }
  std::int64_t rows() const { return static_cast<std::int64_t>(elements()) / cols(); }
  std::uint64_t elements() const {
    std::uint64_t sum = 0;
    for (const Slice& slice : slices) sum += slice.elements();
    return sum;
  }
  CheckedSize bytes() const {
    CheckedSize sum = 0;
    for (const Slice& slice : slices) {
      const std::int64_t row_count = static_cast<std::int64_t>(slice.elements()) / cols();
      sum += CheckedSize(row_count) * kernels::bytes_of(format_of(slice), 1, cols());
    }
    return sum;
  }
};

/// What fills a field; nothing where the model has no such field, or the checkpoint none of an optional one. All
/// tensors have been checked.
std::vector<Slice> slices_of(const Field& field, const Checkpoint& checkpoint, const QuantSchemes& schemes,
                             const Sizes& sizes);

/// Fills targets from a checkpoint whose tensors have been checked: all memory first, then bytes, in parallel.
class WeightReader {
 public:
  WeightReader(const Checkpoint& checkpoint, const QuantSchemes& schemes, const WeightOptions& options)
      : checkpoint_(checkpoint), schemes_(schemes), options_(options) {}

  /// A field, if the model has it.
  template <class To>
  void add(const Field& field, const Sizes& sizes, To& to) {
    std::vector<Slice> slices = slices_of(field, checkpoint_, schemes_, sizes);
    if (slices.empty()) return;
    targets_.emplace_back(to, std::move(slices));
    targets_.back().mixes_formats = field.mixes_formats && options_.mixes_formats;
  }
  /// Reads what was added. Throws std::runtime_error naming file and tensor for a number that is not finite,
  /// std::bad_alloc naming needed and present bytes where the machine's memory does not suffice.
  void read();
  /// Reads one more matrix, unless it is just the bytes of `other`.
  void read_unless_equal(const Field& field, const Sizes& sizes, HostMatrix& to, const HostMatrix& other);
  /// Of all that was read. `identity` is the model's configuration as text. Independent of sharding, of tensors that
  /// are not used and of a copy that was not read.
  WeightTotals totals(std::string_view identity) const;

 private:
  void read(std::span<Target> targets);

  const Checkpoint& checkpoint_;
  const QuantSchemes& schemes_;
  const WeightOptions& options_;
  std::vector<Target> targets_;
  CheckedSize bytes_ = 0;
};

}  // namespace mmrec::models
