// What tests of kernels share on any backend: sizes, seeded operands in every stored type, and comparison on every
// entry. Float64 references stand in the op's own test.
#pragma once

#include <bit>
#include <cstdio>

#include "kernels/tensor.h"
#include "tests/support/host_threads.h"
#include "tests/support/refusal.h"

extern "C" [[gnu::weak]] void mmrec_cuda_emulation();  // the emulation has it

namespace mmrec::kernels::test {

using mmrec::test::expect_says;
using mmrec::test::first_failure;
using mmrec::test::host_processors;
using mmrec::test::parallel_for;
using mmrec::test::parallel_map;
using mmrec::test::parallel_max;
using mmrec::test::refusal;

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr DType kAllDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

/// True where the kernels run on the host's emulation of a device (tests/support/cuda_emulation): the same code,
/// thousands of times slower. The linker decides, so that tests are compiled once.
inline const bool kEmulated = mmrec_cuda_emulation != nullptr;

/// True where MMREC_TEST_SMALL is set, as under sanitizers; compute-sanitizer (scripts/gpu) makes a launch a hundred
/// times dearer: of many cases that are much alike only some are tried.
inline bool few_cases() {
  static const bool few = std::getenv("MMREC_TEST_SMALL") != nullptr;
  return few;
}
/// True where large sizes are left out: there, and on an emulated device.
inline bool small_sizes() { return kEmulated || few_cases(); }

/// The same in every process unless MMREC_TEST_SEED says otherwise: a number, or "random", which is printed so that a
/// failure can be repeated.
inline std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    const char* given = std::getenv("MMREC_TEST_SEED");
    if (given == nullptr) return std::uint64_t{1};
    if (std::string_view(given) != "random") return std::uint64_t{std::strtoull(given, nullptr, 10)};
    const std::uint64_t drawn = std::random_device{}();
    std::printf("MMREC_TEST_SEED=%llu\n", static_cast<unsigned long long>(drawn));
    return drawn;
  }();
  return seed;
}

/// Random numbers that follow from (seed, index) alone (splitmix64), so that any host thread can draw those of any
/// element.
class Draws {
 public:
  Draws(std::uint64_t seed, std::uint64_t index) : state_(mix(mix(seed) + index)) {}
  std::uint64_t bits() { return mix(state_ += 0x9e3779b97f4a7c15ULL); }
  /// In [low, high).
  double uniform(double low, double high) { return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1p-53; }
  /// The sum of four uniform numbers: within 3.5 standard deviations, and much cheaper than logarithms.
  double normal(double mean = 0.0, double deviation = 1.0) {
    const std::uint64_t a = bits(), b = bits();
    const std::uint64_t sum = (a >> 32) + (a & 0xffffffff) + (b >> 32) + (b & 0xffffffff);
    return mean + deviation * std::sqrt(3.0) * (static_cast<double>(sum) * 0x1p-32 - 2.0);
  }

 private:
  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
  }
  std::uint64_t state_;
};

/// `count` values, each by draw(Draws&) from draws of its own.
template <class T, class Draw>
std::vector<T> random_values(std::size_t count, std::uint64_t stream, const Draw& draw) {
  std::vector<T> values(count);
  parallel_for(static_cast<std::int64_t>(count), [&, seed = test_seed() + stream](std::int64_t i) {
    Draws draws(seed, static_cast<std::uint64_t>(i));
    values[static_cast<std::size_t>(i)] = from_float<T>(static_cast<float>(draw(draws)));
  });
  return values;
}
template <class T>
std::vector<T> random_normal(std::size_t count, double mean = 0.0, double deviation = 1.0, std::uint64_t stream = 0) {
  return random_values<T>(count, stream + 1, [&](Draws& draws) { return draws.normal(mean, deviation); });
}
template <class T>
std::vector<T> random_uniform(std::size_t count, double low, double high, std::uint64_t stream = 0) {
  return random_values<T>(count, ~stream, [&](Draws& draws) { return draws.uniform(low, high); });
}
inline std::vector<float> random_floats(std::int64_t count, unsigned seed, float low = -1.0F, float high = 1.0F) {
  return random_uniform<float>(static_cast<std::size_t>(count), static_cast<double>(low), static_cast<double>(high),
                               seed);
}
/// `count` numbers in [0, end).
inline std::vector<int> random_ids(std::int64_t count, std::int64_t end, std::uint64_t stream) {
  std::mt19937_64 rng(test_seed() + stream);
  std::vector<int> ids(static_cast<std::size_t>(count));
  for (int& id : ids) id = static_cast<int>(rng() % static_cast<std::uint64_t>(end));
  return ids;
}

/// The NaN whose bits are all set: an entry that an op forgets to write is found.
template <class T>
T nan_of() {
  T value;
  std::memset(&value, 0xff, sizeof(T));
  return value;
}
inline std::vector<float> poisoned(std::int64_t count) {
  return std::vector<float>(static_cast<std::size_t>(count), nan_of<float>());
}

/// All values as float64.
template <class T>
std::vector<double> widened(const std::vector<T>& values) {
  std::vector<double> wide(values.size());
  parallel_for(static_cast<std::int64_t>(values.size()), [&](std::int64_t i) {
    wide[static_cast<std::size_t>(i)] = static_cast<double>(to_float(values[static_cast<std::size_t>(i)]));
  });
  return wide;
}

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double gelu(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
inline double gelu_tanh(double x) { return x * sigmoid(2.0 * std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)); }

/// softmax(scale q . slots) . slots of d channels; slot j < used lies at slots + j * stride, `zeros` more are zeros.
inline std::vector<double> attend(const double* q, const double* slots, std::int64_t stride, std::int64_t used,
                                  std::int64_t zeros, std::int64_t d, double scale) {
  std::vector<double> weights;
  double top = zeros > 0 ? 0.0 : -INFINITY;
  for (std::int64_t j = 0; j < used; ++j) {
    double dot = 0.0;
    for (std::int64_t i = 0; i < d; ++i) dot += q[i] * slots[j * stride + i];
    weights.push_back(scale * dot);
    top = std::max(top, weights.back());
  }
  double sum = zeros > 0 ? static_cast<double>(zeros) * std::exp(-top) : 0.0;
  for (double& w : weights) sum += w = std::exp(w - top);
  std::vector<double> out(static_cast<std::size_t>(d), 0.0);
  for (std::int64_t j = 0; j < used; ++j) {
    const double share = weights[static_cast<std::size_t>(j)] / sum;
    for (std::int64_t i = 0; i < d; ++i) out[static_cast<std::size_t>(i)] += share * slots[j * stride + i];
  }
  return out;
}

/// rmsnorm of the rows of x [rows, D] with weights [D]. The epsilon stands inside of the root or beside it.
inline std::vector<double> normed(const std::vector<float>& x, const std::vector<float>& weight,
                                  bool inside_root = false) {
  const std::size_t dim = weight.size();
  std::vector<double> y;
  for (std::size_t row = 0; row < x.size(); row += dim) {
    double squares = 0.0;
    for (std::size_t c = 0; c < dim; ++c) squares += static_cast<double>(x[row + c]) * static_cast<double>(x[row + c]);
    const double mean = squares / static_cast<double>(dim);
    const double norm = inside_root ? std::sqrt(mean + 1e-6) : std::sqrt(mean) + 1e-6;
    for (std::size_t c = 0; c < dim; ++c) {
      y.push_back(static_cast<double>(weight[c]) * static_cast<double>(x[row + c]) / norm);
    }
  }
  return y;
}

/// Half a unit in the last place of T relative to a value: what storing a result may add to its error.
template <class T>
inline constexpr double kHalfUnit = 0x1p-24;
template <>
inline constexpr double kHalfUnit<Float16> = 0x1p-11;
template <>
inline constexpr double kHalfUnit<BFloat16> = 0x1p-8;

/// max |got − want| / (1 + |want|); NaN anywhere it is not wanted counts as infinite.
template <class T, class Reference>
double largest_error(const std::vector<T>& got, const std::vector<Reference>& want) {
  if (got.size() != want.size()) return INFINITY;
  return parallel_max(static_cast<std::int64_t>(got.size()), [&](std::int64_t i) {
    const double g = to_float(got[static_cast<std::size_t>(i)]);
    const auto w = static_cast<double>(want[static_cast<std::size_t>(i)]);
    return g == w || (std::isnan(g) && std::isnan(w)) ? 0.0 : std::abs(g - w) / (1.0 + std::abs(w));
  });
}

/// The same, absolute.
inline double max_error(std::span<const float> got, std::span<const double> want) {
  if (got.size() != want.size()) return INFINITY;
  return parallel_max(static_cast<std::int64_t>(got.size()), [&](std::int64_t i) {
    const auto g = static_cast<double>(got[static_cast<std::size_t>(i)]);
    const double w = want[static_cast<std::size_t>(i)];
    return g == w ? 0.0 : std::abs(g - w);
  });
}

/// True if `got` is some value within `tolerance` of `want`, rounded to T.
template <class T>
bool rounds_to(T got, double want, double tolerance) {
  const double g = static_cast<double>(to_float(got));
  if (std::isnan(want) || std::isnan(g)) return std::isnan(want) && std::isnan(g);
  if constexpr (sizeof(T) == 4) return g == want || std::abs(g - want) <= tolerance;
  return g >= static_cast<double>(to_float(from_float<T>(static_cast<float>(want - tolerance)))) &&
         g <= static_cast<double>(to_float(from_float<T>(static_cast<float>(want + tolerance))));
}
/// Every entry rounds_to what is wanted, within tolerance(i).
template <class T, class Tolerance>
::testing::AssertionResult all_round_to(const std::vector<T>& got, const std::vector<double>& want,
                                        const Tolerance& tolerance) {
  if (got.size() != want.size()) return ::testing::AssertionFailure() << got.size() << " for " << want.size();
  const auto wrong = static_cast<std::size_t>(first_failure(std::ssize(got), [&](std::int64_t n) {
    const auto i = static_cast<std::size_t>(n);
    return rounds_to(got[i], want[i], tolerance(i));
  }));
  if (wrong == got.size()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "entry " << wrong << ": " << to_float(got[wrong]) << " for " << want[wrong];
}

/// `got` is what normed() wants, rounded.
template <class T>
::testing::AssertionResult is_normed(const std::vector<T>& got, const std::vector<double>& want) {
  return all_round_to(got, want, [&](std::size_t i) { return 5e-7 * std::abs(want[i]); });
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace mmrec::kernels::test
