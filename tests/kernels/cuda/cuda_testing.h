// What the tests of CUDA ops share: a fixture that skips where no device is usable, host-device transfers, random
// operands, fp64 comparison by the largest error of any entry.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cuda/runtime/cuda.h"
#include "tests/support/host_threads.h"

namespace mmrec::kernels::test {

using mmrec::test::first_failure;
using mmrec::test::host_processors;
using mmrec::test::parallel_for;
using mmrec::test::parallel_map;
using mmrec::test::parallel_max;

/// True where the kernels run on the host's emulation of a device (tests/support/cuda_emulation): the same code,
/// thousands of times slower.
#if defined(MMREC_CUDA_EMULATION)
inline constexpr bool kEmulated = true;
#else
inline constexpr bool kEmulated = false;
#endif

/// True where MMREC_TEST_SMALL is set, as under compute-sanitizer (scripts/gpu), which makes a launch a hundred times
/// dearer: of many cases that are much alike only some are tried.
inline bool few_cases() {
  static const bool few = std::getenv("MMREC_TEST_SMALL") != nullptr;
  return few;
}
/// True where large sizes are left out: there, and on an emulated device.
inline bool small_sizes() { return kEmulated || few_cases(); }

class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = cuda_unusable_reason();
    if (!reason.empty()) GTEST_SKIP() << "no usable CUDA device: " << reason;
    cuda_ = std::make_unique<Cuda>();
  }
  /// False where SetUp skipped, or threw because too little memory is free. TearDown runs all the same.
  bool has_device() const { return cuda_ != nullptr; }
  Cuda& cuda() { return *cuda_; }

  template <class T>
  DeviceBuffer<T> to_device(const std::vector<T>& host) {
    DeviceBuffer<T> buffer(host.size());
    cuda().upload(host.data(), buffer.data(), host.size());
    return buffer;
  }
  template <class T>
  std::vector<T> to_host(const DeviceBuffer<T>& buffer) {
    std::vector<T> host(buffer.size());
    cuda().download(buffer.data(), host.data(), host.size());
    return host;
  }
  /// A buffer of NaN (all bits set): what an op leaves unwritten shows.
  template <class T>
  DeviceBuffer<T> poisoned(std::size_t count) {
    std::vector<std::uint8_t> ones(count * sizeof(T), 0xff);
    DeviceBuffer<T> buffer(count);
    cuda().upload(reinterpret_cast<const std::uint8_t*>(ones.data()), reinterpret_cast<std::uint8_t*>(buffer.data()),
                  ones.size());
    return buffer;
  }

 private:
  std::unique_ptr<Cuda> cuda_;
};

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
  /// After Box and Muller: within 5.8 standard deviations.
  double normal(double mean = 0.0, double deviation = 1.0) {
    const std::uint64_t b = bits();
    const float radius = std::sqrt(-2.0F * std::log(static_cast<float>((b >> 40) + 1) * 0x1p-24F));
    const float angle = static_cast<float>(b & 0xffffff) * (0x1p-24F * 6.2831853F);
    return mean + deviation * static_cast<double>(radius * std::cos(angle));
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

/// All values as float64.
template <class T>
std::vector<double> widened(const std::vector<T>& values) {
  std::vector<double> wide(values.size());
  parallel_for(static_cast<std::int64_t>(values.size()), [&](std::int64_t i) {
    wide[static_cast<std::size_t>(i)] = static_cast<double>(to_float(values[static_cast<std::size_t>(i)]));
  });
  return wide;
}

}  // namespace mmrec::kernels::test
