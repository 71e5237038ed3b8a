// Loading weights in three passes: check and bind every tensor, allocate everything, then read in parallel.
//
// A tensor's bytes go from the page cache straight into their place. They are scanned for NaN and infinities and hashed
// for the fingerprint while they are still in the processor's cache; only parts that must be widened, cut by columns or
// transposed pass through a small buffer. Which error is reported does not depend on the number of threads.
#include "models/weights/host.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "kernels/cpu/bytes.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/thread_pool.h"
#include "models/files/checksum.h"
#include "models/files/elements.h"
#include "models/files/text.h"

namespace mmrec::models {
namespace {

using kernels::bytes_of;
using kernels::DType;
using kernels::size_of;
using kernels::Uninitialized;

constexpr std::size_t kItemBytes = std::size_t{8} << 20;     // what one thread claims at a time
constexpr std::size_t kBlockBytes = std::size_t{256} << 10;  // read, then scanned while it is in the cache
constexpr int kMaxThreads = 16;

/// As many rows as fit in `bytes`, a multiple of `unit`.
std::int64_t rows_within(std::size_t bytes, const Slice& slice, std::int64_t unit) {
  const std::uint64_t fit = bytes / slice.row_bytes() / static_cast<std::uint64_t>(unit);
  return unit * static_cast<std::int64_t>(std::max<std::uint64_t>(1, fit));
}
std::int64_t block_rows(const Slice& slice) { return rows_within(kBlockBytes, slice, slice.piece_rows()); }

std::size_t pieces_of(const Slice& slice) {
  return static_cast<std::size_t>((slice.rows + slice.piece_rows() - 1) / slice.piece_rows());
}

/// Whether the fingerprint takes the rows of a slice. Slices of other columns read the same rows again.
bool is_hashed(const Slice& slice) { return slice.col == 0; }

void check_memory(const Checkpoint& checkpoint, CheckedSize bytes) {
  kernels::check_available(bytes.overflowed() ? ~std::uint64_t{0} : bytes.value(),
                           checkpoint.path().string() + ": not enough memory for the weights");
}

/// Asks for huge pages: a fraction of the page faults while the weights are read, and of the TLB misses whenever a
/// token reads them. Advice only, for the whole pages inside the buffer; a refusal changes nothing.
void advise_huge_pages(std::byte* begin, std::size_t bytes) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  void* first = begin;
  if (std::align(kHugePage, kHugePage, first, bytes) != nullptr) {
    ::madvise(first, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  }
}

/// Allocates a target and appends its slices, cut to what one thread reads in one go.
void allocate(Target& target, std::vector<Slice>& items) {
  std::byte* to = nullptr;
  if (target.matrix != nullptr) {
    HostMatrix& matrix = *target.matrix;
    matrix.format = target.format();
    if (target.is_mixed()) {
      for (const Slice& slice : target.slices) matrix.stack.push_back({slice.own_format(), slice.rows});
    }
    matrix.cols = target.cols();
    matrix.rows = target.rows();
    matrix.bytes = kernels::HostBuffer<std::byte>(target.bytes().value(), Uninitialized{});
    to = matrix.bytes.data();
    advise_huge_pages(to, matrix.bytes.size());
  } else {
    *target.vector = HostVector(target.elements(), Uninitialized{});
    to = reinterpret_cast<std::byte*>(target.vector->data());
  }
  std::size_t pieces = 0;
  for (const Slice& slice : target.slices) pieces += is_hashed(slice) ? pieces_of(slice) : 0;
  target.hashes.resize(pieces);
  std::uint64_t* hashes = target.hashes.data();
  for (Slice slice : target.slices) {
    const std::int64_t begin = slice.row;
    const std::int64_t end = slice.row + slice.rows;
    const kernels::WeightFormat format = target.format_of(slice);
    // Bytes from one row to the next; of a transposed slice from one column to the next.
    const std::size_t apart = slice.transposed ? size_of(format.code) : bytes_of(format, 1, slice.cols);
    const std::size_t bytes = slice.transposed ? slice.elements() * apart : bytes_of(format, slice.rows, slice.cols);
    const std::int64_t most = rows_within(kItemBytes, slice, block_rows(slice));
    slice.to_stride = slice.rows;
    for (slice.format = format; slice.row < end; slice.row += slice.rows) {
      slice.rows = std::min(most, end - slice.row);
      slice.to = to + static_cast<std::size_t>(slice.row - begin) * apart;
      slice.hashes = is_hashed(slice) ? hashes : nullptr;
      if (is_hashed(slice)) hashes += pieces_of(slice);
      items.push_back(slice);
    }
    to += bytes;
  }
}

/// Element (r, c) of `from`, [rows, cols] with rows so many bytes apart, to element (c, r) of `to`, whose rows are
/// `to_stride` elements apart. By squares, which stay in cache.
template <class T>
void transpose(const std::byte* from, std::size_t row_bytes, std::size_t rows, std::size_t cols, std::byte* to,
               std::size_t to_stride) {
  constexpr std::size_t kSquare = 32;
  for (std::size_t r0 = 0; r0 < rows; r0 += kSquare) {
    for (std::size_t c0 = 0; c0 < cols; c0 += kSquare) {
      for (std::size_t c = c0; c < std::min(c0 + kSquare, cols); ++c) {
        for (std::size_t r = r0; r < std::min(r0 + kSquare, rows); ++r) {
          std::memcpy(to + (c * to_stride + r) * sizeof(T), from + r * row_bytes + c * sizeof(T), sizeof(T));
        }
      }
    }
  }
}

class ItemReader {
 public:
  ItemReader(const Checkpoint& checkpoint, const WeightOptions& options) : checkpoint_(checkpoint), options_(options) {
    threads_ =
        std::min(options.threads > 0 ? options.threads : kernels::ThreadPool::available_processors(), kMaxThreads);
  }

  void read(const std::vector<Slice>& items) const {
    kernels::parallel_items(items.size(), threads_, [&](std::size_t i) { read(items[i]); });
  }

  /// True if a plain tensor holds exactly `bytes`.
  bool equals(const Slice& slice, const kernels::HostBuffer<std::byte>& bytes) const {
    if (slice.is_quantized() || slice.tensor().bytes() != bytes.size()) return false;
    std::atomic<bool> same{true};
    kernels::parallel_items((bytes.size() + kBlockBytes - 1) / kBlockBytes, threads_, [&](std::size_t i) {
      if (!same) return;
      const std::size_t at = i * kBlockBytes;
      const std::size_t count = std::min(kBlockBytes, bytes.size() - at);
      kernels::HostBuffer<std::byte> block(count, Uninitialized{});
      checkpoint_.read(slice.tensor(), at, {block.data(), count});
      if (std::memcmp(block.data(), bytes.data() + at, count) != 0) same = false;
    });
    return same;
  }

 private:
  /// Some rows at a time: straight into their place where they are whole and of one type, through a block otherwise.
  void read(const Slice& slice) const {
    if (slice.is_quantized()) return read_quantized(slice);
    const TensorInfo& tensor = slice.tensor();
    const DType to_type = slice.format.code;
    const bool in_place = slice.cols == slice.row_elements && to_type == tensor.dtype && !slice.transposed;
    const std::size_t row_bytes = slice.row_bytes();
    const std::size_t row_to_bytes = static_cast<std::size_t>(slice.cols) * size_of(to_type);
    const auto most = static_cast<std::size_t>(std::min(block_rows(slice), slice.rows));
    const std::size_t piece_bytes = static_cast<std::size_t>(slice.piece_rows()) * row_bytes;
    kernels::HostBuffer<std::byte> block(in_place ? 0 : most * row_bytes, Uninitialized{});
    std::vector<std::byte> widened(slice.transposed ? most * row_to_bytes : 0);
    std::byte* to = slice.to;
    std::uint64_t* hashes = slice.hashes;
    for (std::size_t row = 0; row < static_cast<std::size_t>(slice.rows); row += most) {
      const std::size_t rows = std::min(most, static_cast<std::size_t>(slice.rows) - row);
      const std::size_t first = (static_cast<std::size_t>(slice.row) + row) * row_bytes;
      const std::span<std::byte> bytes(in_place ? to : block.data(), rows * row_bytes);
      checkpoint_.read(tensor, first, bytes);
      for (std::size_t at = 0; at < bytes.size(); at += piece_bytes) {
        const auto piece = bytes.subspan(at, std::min(piece_bytes, bytes.size() - at));
        check_finite(tensor, first + at, piece);
        if (hashes != nullptr) *hashes++ = kernels::hash_bytes(piece);
      }
      const std::byte* from = block.data() + static_cast<std::size_t>(slice.col) * size_of(tensor.dtype);
      std::byte* const in_order = slice.transposed ? widened.data() : to;
      for (std::size_t r = 0; !in_place && r < rows; ++r) {
        convert(from + r * row_bytes, static_cast<std::size_t>(slice.cols), tensor.dtype, in_order + r * row_to_bytes,
                to_type);
      }
      if (slice.transposed) {
        with_element_type(to_type, [&](auto zero) {
          transpose<decltype(zero)>(in_order, row_to_bytes, rows, static_cast<std::size_t>(slice.cols), to,
                                    static_cast<std::size_t>(slice.to_stride));
        });
        to += rows * size_of(to_type);
      } else {
        to += rows * row_to_bytes;
      }
    }
  }

  /// Numbers and scales of a block of rows, then one row after another.
  void read_quantized(const Slice& slice) const {
    const StoredMatrix& from = slice.from;
    const std::size_t row_bytes = slice.row_bytes(), scale_size = size_of(from.scales->dtype);
    const auto row_scales = static_cast<std::size_t>(from.row_scales()),
               piece = static_cast<std::size_t>(slice.piece_rows());
    const std::size_t to_bytes = bytes_of(slice.format, 1, slice.cols);
    std::vector<std::byte> numbers(piece * row_bytes), stored(piece * row_scales * scale_size);
    std::vector<float> scales(piece * row_scales);
    std::byte* to = slice.to;
    std::uint64_t* hashes = slice.hashes;
    for (std::size_t done = 0; done < static_cast<std::size_t>(slice.rows); done += piece) {
      const std::size_t rows = std::min(piece, static_cast<std::size_t>(slice.rows) - done);
      const std::size_t first = static_cast<std::size_t>(slice.row) + done;
      const std::span<std::byte> bytes(numbers.data(), rows * row_bytes);
      checkpoint_.read(slice.tensor(), first * row_bytes, bytes);
      const std::size_t count = from.has_common_scale() ? 1 : rows * row_scales;
      const std::size_t first_scale = from.has_common_scale() ? 0 : first * row_scales * scale_size;
      const std::span<std::byte> of_rows(stored.data(), count * scale_size);
      checkpoint_.read(*from.scales, first_scale, of_rows);
      check_finite(*from.scales, first_scale, of_rows);
      if (from.format.code == DType::kF8) check_finite(slice.tensor(), first * row_bytes, bytes);
      if (hashes != nullptr) *hashes++ = kernels::hash_bytes(bytes) + 31 * kernels::hash_bytes(of_rows);
      convert(stored.data(), count, from.scales->dtype, reinterpret_cast<std::byte*>(scales.data()), DType::kF32);
      for (std::size_t r = 0; r < rows; ++r, to += to_bytes) {
        const float* const of_row = scales.data() + (from.has_common_scale() ? 0 : r * row_scales);
        write_row(from, bytes.data() + r * row_bytes, of_row, slice.col, slice.cols, slice.format, to);
      }
    }
  }

  void check_finite(const TensorInfo& tensor, std::size_t offset, std::span<const std::byte> bytes) const {
    if (!options_.allow_nonfinite) checkpoint_.check_finite(tensor, offset, bytes);
  }

  const Checkpoint& checkpoint_;
  const WeightOptions& options_;
  int threads_ = 1;
};

}  // namespace

kernels::WeightFormat Target::format() const {
  const kernels::WeightFormat first = slices.front().own_format();
  if (matrix == nullptr) return {};
  const auto all = [&](const auto& is) {
    return std::all_of(slices.begin(), slices.end(), [&](const Slice& slice) { return is(slice.own_format()); });
  };
  if (all([&](kernels::WeightFormat format) { return format == first; })) return first;
  if (!all([](kernels::WeightFormat format) { return format.code == DType::kI8 || format.code == DType::kI4; }))
    return {};
  std::int64_t group = 0;
  for (const Slice& slice : slices) group = std::gcd(group, slice.own_format().group);
  return {DType::kI8, group};
}

bool Target::is_mixed() const {
  const auto is_int4 = [](const Slice& slice) { return slice.own_format().code == DType::kI4; };
  return mixes_formats && format().code == DType::kI8 && std::any_of(slices.begin(), slices.end(), is_int4);
}

std::vector<Slice> slices_of(const Field& field, const Checkpoint& checkpoint, const QuantSchemes& schemes,
                             const Sizes& sizes) {
  const bool is_bias = field.kind == Field::Kind::kBias;
  std::vector<Slice> slices;
  for (const TensorPart& part : field.parts) {
    if (!part.used_by(sizes) || (is_bias && part.col.of(sizes) != 0)) continue;
    const std::string_view suffix = is_bias ? ".bias" : field.storage.suffix;
    StoredMatrix from =
        find_matrix(checkpoint, std::string(field.prefix) + std::string(part.name) + std::string(suffix), schemes);
    if (from.numbers == nullptr) continue;
    Slice slice{.from = std::move(from), .row = part.row.of(sizes), .rows = part.rows.of(sizes)};
    if (field.is_matrix()) {
      slice.col = part.col.of(sizes);
      slice.cols = part.cols.of(sizes);
      slice.row_elements = part.in.of(sizes);
    }
    if (field.is_matrix() && field.storage.transposed) {
      std::swap(slice.row, slice.col);
      std::swap(slice.rows, slice.cols);
      slice.row_elements = part.out.of(sizes);
      slice.transposed = true;
    }
    slices.push_back(slice);
  }
  return slices;
}

void WeightReader::read() { read(targets_); }

void WeightReader::read(std::span<Target> targets) {
  CheckedSize bytes = 0;
  for (const Target& target : targets) bytes += target.bytes();
  check_memory(checkpoint_, bytes);
  bytes_ += bytes;
  std::vector<Slice> items;
  for (Target& target : targets) allocate(target, items);
  ItemReader(checkpoint_, options_).read(items);
}

void WeightReader::read_unless_equal(const Field& field, const Sizes& sizes, HostMatrix& to, const HostMatrix& other) {
  Target target(to, slices_of(field, checkpoint_, schemes_, sizes));
  if (target.slices.empty()) return;
  const bool may_be = other.format == target.format();
  if (may_be && ItemReader(checkpoint_, options_).equals(target.slices.front(), other.bytes)) return;
  const CheckedSize before = bytes_;
  read({&target, 1});
  // Quantised numbers can be compared only after they are read.
  if (may_be && target.slices.front().is_quantized() &&
      std::memcmp(to.bytes.data(), other.bytes.data(), other.bytes.size()) == 0) {
    to = {};
    bytes_ = before;
    return;
  }
  targets_.push_back(std::move(target));
}

WeightTotals WeightReader::totals(std::string_view identity) const {
  WeightTotals totals{.bytes = bytes_.value()};
  Crc64 crc;
  crc.update(identity);
  for (const Target& target : targets_) {
    totals.parameters += target.elements();
    for (const Slice& slice : target.slices) {
      crc.update(slice.tensor().name);
      crc.update(static_cast<std::uint64_t>(slice.tensor().dtype));
      for (const std::int64_t size : {slice.row, slice.rows, slice.row_elements}) {
        crc.update(static_cast<std::uint64_t>(size));
      }
    }
    for (const std::uint64_t hash : target.hashes) crc.update(hash);
  }
  totals.fingerprint = crc.value();
  return totals;
}

std::uint64_t round_to_bf16(HostMatrix& matrix) {
  if (plain_type(matrix).value_or(DType::kBF16) == DType::kBF16) return 0;
  const auto count = static_cast<std::size_t>(matrix.rows * matrix.cols);
  kernels::HostBuffer<std::byte> bytes(count * sizeof(kernels::BFloat16), Uninitialized{});
  advise_huge_pages(bytes.data(), bytes.size());
  convert(matrix.bytes.data(), count, matrix.format.code, bytes.data(), DType::kBF16);
  const std::uint64_t saved = matrix.bytes.size() - bytes.size();
  matrix.bytes = std::move(bytes);
  matrix.format = DType::kBF16;
  return saved;
}

}  // namespace mmrec::models
