// Binding and reading weights in three passes: check every tensor, allocate everything, then read in parallel.
//
// A tensor's bytes go from the page cache straight into their place and are scanned for NaN and infinities while they
// are still in the processor's cache; only parts that must be widened or cut by columns pass through a small buffer.
// Which error is reported does not depend on the number of threads.
#include "models/mmrec/weights.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "models/files/checked.h"
#include "models/files/checksum.h"
#include "models/files/elements.h"
#include "models/files/text.h"
#include "models/mmrec/weight_plan.h"

namespace mmrec::models {
namespace {

using kernels::DType;
using kernels::size_of;
using kernels::Uninitialized;

constexpr std::size_t kItemBytes = std::size_t{8} << 20;     // what one thread claims at a time
constexpr std::size_t kBlockBytes = std::size_t{256} << 10;  // read, then scanned while it is in the cache
constexpr int kMaxThreads = 16;

/// The weights need more memory than the machine has.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message) : message_(std::make_shared<std::string>(std::move(message))) {}
  const char* what() const noexcept override { return message_->c_str(); }

 private:
  std::shared_ptr<std::string> message_;  // shared: copying an exception must not throw
};

/// Rows of one part that one thread reads in one go.
struct Item {
  Part part;  // `row` and `rows` cut to this item
  std::byte* to = nullptr;
  DType dtype = DType::kF32;
};

std::uint64_t physical_memory() {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page_size = ::sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page_size <= 0) return ~std::uint64_t{0};
  return static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(page_size);
}

/// The system would promise the memory and kill the process when it is touched: say no before that.
void check_memory(const Checkpoint& checkpoint, CheckedSize bytes) {
  const std::uint64_t available = physical_memory();
  if (!bytes.at_most(available)) {
    throw OutOfMemory(fmt::format("{}: not enough memory for the weights (they need {} bytes, the machine has {})",
                                  checkpoint.path().string(), bytes.overflowed() ? ~std::uint64_t{0} : bytes.value(),
                                  available));
  }
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

/// Allocates a target and appends the items that fill it.
void allocate(const Target& target, std::vector<Item>& items) {
  const DType dtype = target.dtype();
  const std::size_t bytes = target.bytes().value();
  std::byte* to = nullptr;
  if (target.matrix != nullptr) {
    HostMatrix& matrix = *target.matrix;
    matrix.bytes = kernels::HostBuffer<std::byte>(bytes, Uninitialized{});
    matrix.dtype = dtype;
    matrix.cols = target.parts.front().cols;
    matrix.rows = 0;
    for (const Part& part : target.parts) matrix.rows += part.rows;
    to = matrix.bytes.data();
    advise_huge_pages(to, bytes);
  } else {
    *target.vector = HostVector(bytes / sizeof(float), Uninitialized{});
    to = reinterpret_cast<std::byte*>(target.vector->data());
  }
  for (const Part& part : target.parts) {
    const std::size_t row_bytes = part.row_bytes();
    const auto rows_per_item = static_cast<std::int64_t>(std::max<std::size_t>(1, kItemBytes / row_bytes));
    for (std::int64_t row = 0; row < part.rows; row += rows_per_item) {
      Item item{part, to, dtype};
      item.part.row += row;
      item.part.rows = std::min(rows_per_item, part.rows - row);
      to += item.part.elements() * size_of(dtype);
      items.push_back(item);
    }
  }
}

/// Runs work(i) for i in [0, count) on up to `threads` threads, claimed in rising order. If some throw, the exception
/// of the least i is rethrown: items below a failed one have been claimed already and are finished.
template <class Work>
void parallel_items(std::size_t count, int threads, const Work& work) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::size_t failed_item = count;
  std::exception_ptr failure;
  const auto run = [&] {
    while (!failed.load(std::memory_order_relaxed)) {
      const std::size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      try {
        work(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (i < failed_item) {
          failed_item = i;
          failure = std::current_exception();
        }
        failed = true;
      }
    }
  };
  {
    std::vector<std::jthread> others;
    const int wanted = static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(threads), count));
    try {
      for (int i = 1; i < wanted; ++i) others.emplace_back(run);
    } catch (const std::system_error&) {  // no more threads to be had: those there are do the work
    }
    run();
  }
  if (failure) std::rethrow_exception(failure);
}

class Reader {
 public:
  Reader(const Checkpoint& checkpoint, const WeightOptions& options) : checkpoint_(checkpoint), options_(options) {
    const int available = static_cast<int>(std::thread::hardware_concurrency());
    threads_ = std::clamp(options.threads > 0 ? options.threads : available, 1, kMaxThreads);
  }

  void read(const std::vector<Item>& items) const {
    parallel_items(items.size(), threads_, [&](std::size_t i) { read(items[i]); });
  }

  /// True if the tensor of `part` holds exactly `bytes`.
  bool equals(const Part& part, const kernels::HostBuffer<std::byte>& bytes) const {
    if (part.tensor->bytes() != bytes.size()) return false;
    std::atomic<bool> same{true};
    parallel_items((bytes.size() + kItemBytes - 1) / kItemBytes, threads_, [&](std::size_t i) {
      const kernels::HostBuffer<std::byte> block(kBlockBytes, Uninitialized{});
      const std::size_t end = std::min(bytes.size(), (i + 1) * kItemBytes);
      for (std::size_t at = i * kItemBytes; at < end && same.load(std::memory_order_relaxed); at += kBlockBytes) {
        const std::size_t count = std::min(kBlockBytes, end - at);
        checkpoint_.read(*part.tensor, at, {const_cast<std::byte*>(block.data()), count});
        if (std::memcmp(block.data(), bytes.data() + at, count) != 0) same = false;
      }
    });
    return same;
  }

 private:
  void read(const Item& item) const {
    const Part& part = item.part;
    const bool is_whole_rows = part.cols == part.row_elements;
    if (is_whole_rows && item.dtype == part.tensor->dtype) {
      read_direct(item);
    } else {
      read_through_block(item);
    }
  }

  /// Contiguous in the file and in memory, and of one type.
  void read_direct(const Item& item) const {
    const Part& part = item.part;
    const std::size_t element = size_of(item.dtype);
    const std::size_t first = static_cast<std::size_t>(part.row * part.row_elements) * element;
    const std::size_t bytes = part.elements() * element;
    for (std::size_t at = 0; at < bytes; at += kBlockBytes) {
      const std::span<std::byte> block(item.to + at, std::min(kBlockBytes, bytes - at));
      checkpoint_.read(*part.tensor, first + at, block);
      check_finite(*part.tensor, first + at, block);
    }
  }

  void read_through_block(const Item& item) const {
    const Part& part = item.part;
    const std::size_t element = size_of(part.tensor->dtype);
    const std::size_t row_bytes = part.row_bytes();
    const std::size_t row_to_bytes = static_cast<std::size_t>(part.cols) * size_of(item.dtype);
    const auto rows_per_block = static_cast<std::int64_t>(std::max<std::size_t>(1, kBlockBytes / row_bytes));
    const auto max_rows = static_cast<std::size_t>(std::min(rows_per_block, part.rows));
    kernels::HostBuffer<std::byte> block(max_rows * row_bytes, Uninitialized{});
    std::byte* to = item.to;
    for (std::int64_t row = 0; row < part.rows; row += rows_per_block) {
      const auto rows = static_cast<std::size_t>(std::min(rows_per_block, part.rows - row));
      const std::size_t first = static_cast<std::size_t>(part.row + row) * row_bytes;
      const std::span<std::byte> bytes(block.data(), rows * row_bytes);
      checkpoint_.read(*part.tensor, first, bytes);
      check_finite(*part.tensor, first, bytes);
      const std::byte* from = block.data() + static_cast<std::size_t>(part.col) * element;
      for (std::size_t r = 0; r < rows; ++r, to += row_to_bytes) {
        convert(from + r * row_bytes, static_cast<std::size_t>(part.cols), part.tensor->dtype, to, item.dtype);
      }
    }
  }

  void check_finite(const TensorInfo& tensor, std::size_t first_byte, std::span<const std::byte> bytes) const {
    if (options_.allow_nonfinite) return;
    const std::size_t size = size_of(tensor.dtype);
    const std::int64_t i = first_nonfinite(bytes.data(), bytes.size() / size, tensor.dtype);
    if (i < 0) return;
    const float value = element(bytes.data(), static_cast<std::size_t>(i), tensor.dtype);
    throw std::runtime_error(fmt::format("{}: {}: element {} is {} (expected finite weights)",
                                         checkpoint_.path_of(tensor).string(), printable(tensor.name),
                                         first_byte / size + static_cast<std::size_t>(i),
                                         std::isnan(value) ? "NaN" : "infinite"));
  }

  const Checkpoint& checkpoint_;
  const WeightOptions& options_;
  int threads_ = 1;
};

/// The whole of small parts; of large ones the first and last 4 KiB and 16 samples between.
void hash_part(const Checkpoint& checkpoint, const Part& part, Crc64& crc) {
  constexpr std::uint64_t kEnds = 4096;
  constexpr std::uint64_t kSamples = 16;
  constexpr std::uint64_t kSampleBytes = 256;
  const std::uint64_t first = static_cast<std::uint64_t>(part.row) * part.row_bytes();
  const std::uint64_t bytes = static_cast<std::uint64_t>(part.rows) * part.row_bytes();
  std::byte block[kEnds];
  const auto hash = [&](std::uint64_t at, std::uint64_t count) {
    checkpoint.read(*part.tensor, first + at, {block, count});
    crc.update(std::span<const std::byte>(block, count));
  };
  crc.update(part.tensor->name);
  crc.update(static_cast<std::uint64_t>(part.tensor->dtype));
  crc.update(static_cast<std::uint64_t>(part.row));
  crc.update(static_cast<std::uint64_t>(part.rows));
  crc.update(static_cast<std::uint64_t>(part.row_elements));
  if (bytes <= 2 * kEnds + kSamples * kSampleBytes) {
    for (std::uint64_t at = 0; at < bytes; at += kEnds) hash(at, std::min(kEnds, bytes - at));
    return;
  }
  hash(0, kEnds);
  const std::uint64_t step = (bytes - 2 * kEnds) / kSamples;
  for (std::uint64_t i = 0; i < kSamples; ++i) hash(kEnds + i * step, kSampleBytes);
  hash(bytes - kEnds, kEnds);
}

/// Independent of sharding, of tensors that are not used and of a copy of a tied head.
std::uint64_t fingerprint(const Checkpoint& checkpoint, const Config& config, const std::vector<Target>& targets) {
  Config identity = config;  // which tokens begin and end a text does not change what the model computes
  identity.bos_token_id.reset();
  identity.eos_token_ids.clear();
  Crc64 crc;
  crc.update(to_json(identity));
  for (const Target& target : targets) {
    for (const Part& part : target.parts) hash_part(checkpoint, part, crc);
  }
  return crc.value();
}

kernels::WeightView<kernels::Host> view(const HostMatrix& matrix) { return matrix.view(); }
const float* view(const HostVector& vector) { return vector.data(); }

}  // namespace

ModelView<kernels::Host> view_of(const HostWeights& weights) {
  ModelView<kernels::Host> model;
  model.layers.resize(weights.layers.size());
  visit_model([](const Field&, const auto& from, auto& to) { to = view(from); }, weights, model);
  if (weights.head.rows == 0) model.head = model.embedding;
  return model;
}

DType common_dtype(const HostWeights& weights) {
  bool all = true;
  visit_model(
      [&](const Field& /*field*/, const auto& w) {
        if constexpr (std::is_same_v<decltype(w), const HostMatrix&>) {
          all = all && (w.rows == 0 || w.dtype == weights.embedding.dtype);
        }
      },
      weights);
  return all ? weights.embedding.dtype : DType::kF32;
}

HostWeights load_weights(const Checkpoint& checkpoint, const Config& config, const WeightOptions& options,
                         const WarningSink& warn) {
  HostWeights weights;
  WeightPlan plan = plan_weights(checkpoint, config, warn, weights);
  std::vector<Target>& targets = plan.targets;
  CheckedSize bytes = 0;
  for (const Target& target : targets) bytes += target.bytes();
  check_memory(checkpoint, bytes);
  std::vector<Item> items;
  for (const Target& target : targets) allocate(target, items);
  const Reader reader(checkpoint, options);
  reader.read(items);

  // Public checkpoints hold the tied head twice: keep it only if it differs.
  if (const Target& head = plan.head; !head.parts.empty()) {
    const bool is_tied =
        head.dtype() == weights.embedding.dtype && reader.equals(head.parts.front(), weights.embedding.bytes);
    if (!is_tied) {
      bytes += head.bytes();
      check_memory(checkpoint, bytes);
      items.clear();
      allocate(head, items);
      reader.read(items);
      targets.push_back(head);
    }
  }
  weights.bytes = bytes.value();
  for (const Target& target : targets) {
    for (const Part& part : target.parts) weights.parameters += part.elements();
  }
  weights.fingerprint = fingerprint(checkpoint, config, targets);
  return weights;
}

}  // namespace mmrec::models
