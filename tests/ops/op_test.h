// Tests of ops that run on every backend. A file of this folder is compiled for the CPU (label kernels) and, with
// MMREC_TEST_CUDA, for a GPU, emulated and real (labels emulated and gpu). It has one float64 reference, one table of
// cases and one set of operands for all of them. Code for one backend alone stands under `#if` at its end. Cases that
// the benches time (OpCase) use the same operands and references.
#pragma once

#include <deque>

#if defined(MMREC_TEST_CUDA)
#include "kernels/cuda/gemm/compact.h"
#include "kernels/cuda/runtime/cuda.h"
#else
#include "kernels/cpu/bytes.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"
#endif
#include "tests/ops/stored_weights.h"
#include "tests/ops/testing.h"

namespace mmrec::kernels::test {

#if defined(MMREC_TEST_CUDA)
inline constexpr bool kOnCuda = true;
using Backend = Cuda;
#else
inline constexpr bool kOnCuda = false;
using Backend = Cpu;
#endif
using Space = Backend::Space;
template <class T>
using Buffer = Backend::Buffer<T>;

/// True where a real GPU's large sizes are tried.
inline bool gpu_sizes() { return kOnCuda && !small_sizes(); }
/// True where `work`, elements or products, is more than this backend's tests take on: `most` by an emulated device.
inline bool too_large(std::int64_t work, std::int64_t most = 50'000) {
  return !gpu_sizes() && work > (kOnCuda ? most : 200'000);
}

/// f(A{}) for every type of activations: the CPU has fp32 alone.
template <class F>
void for_activations(const F& f) {
  f(float{});
  if constexpr (kOnCuda) {
    f(BFloat16{});
    f(Float16{});
  }
}
/// Of weights on a host.
inline constexpr WeightFormat kHostFormats[] = {DType::kF32, DType::kF16,       DType::kBF16,     DType::kF8,
                                                DType::kI8,  {DType::kI8, 128}, {DType::kI4, 64}, DType::kI4};
/// f(A{}, format) for every format of weights and the activations that they multiply: on a GPU both are of one type.
template <class F>
void for_weights(const F& f) {
  if constexpr (kOnCuda) {
    for_activations([&]<class A>(A) { f(A{}, kDTypeOf<A>); });
  } else {
    for (const WeightFormat format : kHostFormats) f(float{}, format);
  }
}

/// Hash of all bytes that were downloaded since it was 0.
inline std::uint64_t& downloaded() {
  static std::uint64_t hash = 0;
  return hash;
}
template <class T>
std::vector<T> download(Backend& on, const T* from, std::size_t count) {
  std::vector<T> host(count);
  on.download(from, host.data(), count);
  if constexpr (!kOnCuda) {
    downloaded() = 31 * downloaded() + hash_bytes(std::as_bytes(std::span(host)));
  }
  return host;
}
template <class T>
std::vector<T> download(Backend& on, const Buffer<T>& from) {
  return download(on, from.data(), from.size());
}
template <class T>
Buffer<T> upload(Backend& on, const std::vector<T>& host) {
  Buffer<T> buffer(host.size());
  on.upload(host.data(), buffer.data(), host.size());
  return buffer;
}
/// A buffer of NaN (all bits set): an entry that an op leaves unwritten shows.
template <class T>
Buffer<T> unwritten(Backend& on, std::size_t count) {
  return upload(on, std::vector<T>(count, nan_of<T>()));
}

#if defined(MMREC_TEST_CUDA)
/// Skips where no device is usable.
class OpTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = cuda_unusable_reason();
    if (!reason.empty()) GTEST_SKIP() << "no usable CUDA device: " << reason;
    on_ = std::make_unique<Cuda>();
  }
  /// Every op leaves the backend's flags zero. on_ is null where SetUp skipped or threw.
  void TearDown() override {
    if (on_ == nullptr) return;
    const std::vector<std::uint32_t> flags = download(on(), on().flags(), Cuda::kFlagWords);
    EXPECT_TRUE(std::all_of(flags.begin(), flags.end(), [](std::uint32_t f) { return f == 0; }));
  }
  Cuda& on() { return *on_; }
  template <class F>
  void on_every(const F& f) {
    f(on());
  }
  template <class Run, class Expect>
  void on_every(const Run& run, const Expect& expect) {
    expect(run(on()));
  }

 private:
  std::unique_ptr<Cuda> on_;
};
/// Of ops that a device of compute capability 9.0 alone has.
template <class Base>
class OnSm90 : public Base {
 protected:
  void SetUp() override {
    Base::SetUp();
    if (this->IsSkipped() || this->on().compute_capability() == 90) return;
    GTEST_SKIP() << "the device is not of compute capability 9.0";
  }
};
#else
class OpTest : public ::testing::Test {
 protected:
  OpTest() {
    for (const int threads : {2, 1, 5}) cpus_.emplace_back(threads);
  }
  /// f(backend) by every instruction set, and by the best one with several numbers of threads. What f downloads has the
  /// same bits for any number of threads. On a GPU f runs once.
  template <class F>
  void on_every(const F& f) {
    const auto tables = supported_simd_kernels();
    std::uint64_t first = 0;
    for (const SimdKernels* table : tables) {
      choose_simd(*table);
      for (Cpu& cpu : cpus_) {
        const int threads = cpu.threads();
        if (threads != 2 && table != tables.front()) continue;
        SCOPED_TRACE(testing::Message() << table->name << ", " << threads << " threads");
        downloaded() = 0;
        f(cpu);
        if (threads == 2) first = downloaded();
        EXPECT_EQ(downloaded(), first) << "other bits than with 2 threads";
      }
    }
    choose_simd(*tables.front());
  }
  /// The same of run(backend), a result, of which expect(result) sees those that differ from the one before.
  template <class Run, class Expect>
  void on_every(const Run& run, const Expect& expect) {
    std::optional<decltype(run(on()))> last;
    on_every([&](Cpu& cpu) {
      auto result = run(cpu);
      if (last && same_bits(result, *last)) return;
      expect(result);
      last = std::move(result);
    });
  }
  /// Has 2 threads.
  Cpu& on() { return cpus_.front(); }

 private:
  std::deque<Cpu> cpus_;
};
#endif

/// How rows lie in memory: `pad` elements between rows, the first row `offset` elements into the buffer.
struct Layout {
  std::int64_t pad = 0;
  std::int64_t offset = 0;
};
inline constexpr Layout kPacked = {};
inline constexpr Layout kAlignedGaps = {.pad = 24, .offset = 8};
inline constexpr Layout kUnaligned = {.pad = 3, .offset = 1};
inline constexpr Layout kLayouts[] = {kPacked, kAlignedGaps, kUnaligned};

/// [rows, cols] of a backend's buffer; what is not in the matrix is NaN.
template <class T>
class Matrix {
 public:
  /// NaN throughout.
  Matrix(Backend& on, std::int64_t rows, std::int64_t cols, Layout layout = kPacked)
      : Matrix(on, std::vector<T>(static_cast<std::size_t>(rows * cols), nan_of<T>()), rows, cols, layout) {}
  Matrix(Backend& on, std::vector<T> values, std::int64_t rows, std::int64_t cols, Layout layout = kPacked)
      : on_(&on),
        rows_(rows),
        cols_(cols),
        layout_(layout),
        values_(std::move(values)),
        buffer_(static_cast<std::size_t>(layout.offset + rows * (cols + layout.pad) + 1)) {
    reset();
  }

  /// Back to what it was made of.
  void reset() {
    if (layout_.pad == 0 && layout_.offset == 0) {
      const T end = nan_of<T>();
      on_->upload(values_.data(), buffer_.data(), values_.size());
      return on_->upload(&end, buffer_.data() + values_.size(), 1);
    }
    std::vector<T> all(buffer_.size(), nan_of<T>());
    for (std::int64_t r = 0; r < rows_; ++r) std::copy_n(values_.data() + r * cols_, cols_, all.data() + at(r));
    on_->upload(all.data(), buffer_.data(), all.size());
  }

  MatrixView<T, Space> view() { return {buffer_.data() + layout_.offset, rows_, cols_, cols_ + layout_.pad}; }
  MatrixView<const T, Space> read() { return view(); }
  T* data() { return view().data; }
  /// [batch, time, cols] of a matrix whose rows are those of `batch` sequences, from row `first` of each.
  SequenceView<T, Space> sequences(std::int64_t batch, std::int64_t first, std::int64_t time) {
    SequenceView<T, Space> s(view().row(first), batch, time, cols_);
    s.batch_stride = rows_ / batch * view().stride;
    s.time_stride = view().stride;
    return s;
  }
  /// What it was made of.
  const std::vector<T>& values() const { return values_; }
  double operator()(std::int64_t row, std::int64_t col) const {
    return static_cast<double>(to_float(values_[static_cast<std::size_t>(row * cols_ + col)]));
  }
  /// What the backend's memory holds now; a failure if anything around the matrix has changed.
  std::vector<T> download() const {
    std::vector<T> all = test::download(*on_, buffer_);
    std::vector<T> inside;
    for (std::int64_t r = 0; r < rows_; ++r) {
      inside.insert(inside.end(), all.data() + at(r), all.data() + at(r) + cols_);
      std::fill_n(all.data() + at(r), cols_, nan_of<T>());
    }
    EXPECT_TRUE(same_bits(all, std::vector<T>(all.size(), nan_of<T>()))) << "written outside of the matrix";
    return inside;
  }

 private:
  std::int64_t at(std::int64_t row) const { return layout_.offset + row * (cols_ + layout_.pad); }

  Backend* on_;
  std::int64_t rows_, cols_;
  Layout layout_;
  std::vector<T> values_;
  Buffer<T> buffer_;
};

template <class T>
Matrix<T> random_matrix(Backend& on, std::int64_t rows, std::int64_t cols, Layout layout, std::uint64_t stream,
                        double deviation = 1.0) {
  return {on, random_normal<T>(static_cast<std::size_t>(rows * cols), 0.0, deviation, stream), rows, cols, layout};
}
template <class T>
Matrix<T> uniform_matrix(Backend& on, std::int64_t rows, std::int64_t cols, Layout layout, std::uint64_t stream,
                         double low = -1.0, double high = 1.0) {
  return {on, random_uniform<T>(static_cast<std::size_t>(rows * cols), low, high, stream), rows, cols, layout};
}

/// A weight matrix in its stored format, and its exact values.
class Weights {
 public:
  Weights(Backend& on, const std::vector<double>& values, std::int64_t rows, std::int64_t cols, WeightFormat format)
      : format_(format), rows_(rows), cols_(cols) {
    Stored stored(values, rows, cols, format);
    values_ = std::move(stored.values);
    bytes_ = Buffer<std::byte>(stored.bytes.size());
    on.upload(stored.bytes.data(), bytes_.data(), bytes_.size());
  }
  /// Normal, with this deviation.
  Weights(Backend& on, std::int64_t rows, std::int64_t cols, WeightFormat format, std::uint64_t stream,
          double deviation = 1.0)
      : Weights(on, widened(random_normal<float>(static_cast<std::size_t>(rows * cols), 0.0, deviation, stream)), rows,
                cols, format) {}
  WeightView<Space> view() const {
    WeightView<Space> view{bytes_.data(), format_, rows_, cols_};
    if (parts_.size() != 0) view.parts = parts_.data(), view.part_stride = rows_ * cols_;
    view.compact = compact_;
    return view;
  }
#if defined(MMREC_TEST_CUDA)
  /// Adds the parts of fp32 numbers.
  void add_parts(Backend& on) {
    parts_ = Buffer<BFloat16>(static_cast<std::size_t>(kParts * rows_ * cols_));
    split(on, {view().as<float>(), rows_, cols_}, parts_.data());
  }
  /// Quantises the values and adds compact rows of them to bf16 ones. Rows from `own` on are no multiples of scales and
  /// get integers. The values are then those that products with compact rows see.
  void add_compact(Backend& on, WeightFormat format, std::int64_t own) {
    Stored stored(values_, rows_, cols_, format);
    std::vector<float> scales;
    std::vector<BFloat16> plain;
    values_.clear();
    for (std::int64_t r = 0; r < rows_; ++r) {
      const auto count = static_cast<std::size_t>(scales_of(format, cols_));
      const std::byte* const behind = stored.bytes.data() + r * row_bytes(format, cols_) + number_bytes(format, cols_);
      scales.resize(scales.size() + count);
      std::memcpy(scales.data() + scales.size() - count, behind, count * sizeof(float));
      const double* const row = stored.values.data() + r * cols_;
      const float most = static_cast<float>(
          std::abs(*std::max_element(row, row + cols_, [](double a, double b) { return std::abs(a) < std::abs(b); })));
      const float scale = to_float(from_float<BFloat16>(most)) / 127.0F;
      for (std::int64_t c = 0; c < cols_; ++c) {
        plain.push_back(from_float<BFloat16>(static_cast<float>(row[c])));
        const float integer = std::rint(to_float(plain.back()) / scale);
        values_.push_back(r < own ? row[c] : static_cast<double>(integer) * static_cast<double>(scale));
      }
    }
    on.upload(reinterpret_cast<const std::byte*>(plain.data()), bytes_.data(), bytes_.size());
    Buffer<float> on_device(scales.size());
    on.upload(scales.data(), on_device.data(), scales.size());
    const WeightFormat compact = compact_format(format, cols_);
    compact_bytes_ = Buffer<std::byte>(static_cast<std::size_t>(rows_ * compact_row_bytes(compact, cols_)));
    compact_ = compact_view(compact_bytes_.data(), compact, own, cols_);
    compact_rows(on, {view(), on_device.data(), format.group, compact_, compact_bytes_.data()});
    on.synchronize();
  }
#endif
  double operator()(std::int64_t row, std::int64_t col) const {
    return values_[static_cast<std::size_t>(row * cols_ + col)];
  }
  const double* row(std::int64_t r) const { return values_.data() + r * cols_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }

 private:
  Buffer<std::byte> bytes_;
  Buffer<BFloat16> parts_;
  Buffer<std::byte> compact_bytes_;
  CompactView compact_;
  std::vector<double> values_;
  WeightFormat format_;
  std::int64_t rows_, cols_;
};

// ---- cases: an op on a shape. cases_test.cpp checks the small ones, bench.cpp times and checks all ----

/// The best rate that a backend can reach: of bytes copied, of bytes read, or of operations in a matrix product.
enum class Limit : std::uint8_t { kCopy, kRead, kProduct };

/// Operands in the backend's memory. `check` compares the result of one `call` with the reference.
struct PreparedOp {
  std::function<void()> call;
  std::function<void()> check;
  std::string note = {};
  double work = 0.0;  // if not 0, in place of the case's: the operands decide
};
struct OpCase {
  std::string op;  // with the type of its elements, as in "decay_scan fp32"
  std::string shape;
  Limit limit;
  double work;  // bytes, or operations if the limit is a product
  std::function<PreparedOp()> prepare;
  std::array<std::int64_t, 3> product =
      {};        // rows, columns and depth of the product that is the limit; else a large one
  int sets = 0;  // of operands, which calls take in turn; 0: too many for the last cache
  int ops_in_call = 1;
  std::string note = {};  // besides the operands' own
  bool forced = false;    // an algorithm of a scan, which only --scan-ways times
};
using OpCases = std::vector<OpCase>;
inline OpCase& add_case(OpCases& cases, std::string op, std::string shape, Limit limit, double work,
                        std::function<PreparedOp()> prepare) {
  return cases.emplace_back(OpCase{std::move(op), std::move(shape), limit, work, std::move(prepare)});
}

/// Adds cases of an op that `on` has: small ones, which a test checks, or the ones to measure.
using CaseTable = void (*)(Backend& on, bool small, OpCases& cases);
inline std::vector<CaseTable>& case_tables() {
  static std::vector<CaseTable> tables;
  return tables;
}
/// A static one registers a table.
struct RegisteredCases {
  explicit RegisteredCases(CaseTable table) { case_tables().push_back(table); }
};

/// The sizes with text between them: join("T ", 100, ", D ", 64).
template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}
/// "op fp32"
template <class T>
std::string typed(const char* op) {
  return std::string(op) + " " + name_of(kDTypeOf<T>);
}
template <class T>
double bytes_of(std::int64_t count) {
  return static_cast<double>(count) * static_cast<double>(sizeof(T));
}
inline double product_flops(std::int64_t m, std::int64_t n, std::int64_t k) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

}  // namespace mmrec::kernels::test
