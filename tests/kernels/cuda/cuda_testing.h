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
#include <vector>

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels::test {

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

/// Different in every process, printed so that a failure can be repeated with MMREC_TEST_SEED.
inline std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    const char* given = std::getenv("MMREC_TEST_SEED");
    const std::uint64_t s = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::printf("MMREC_TEST_SEED=%llu\n", static_cast<unsigned long long>(s));
    return s;
  }();
  return seed;
}

template <class T>
std::vector<T> random_normal(std::size_t count, double mean = 0.0, double deviation = 1.0, std::uint64_t stream = 0) {
  std::mt19937_64 engine(test_seed() + 0x9e3779b97f4a7c15ULL * (stream + 1));
  std::normal_distribution<double> draw(mean, deviation);
  std::vector<T> values(count);
  for (T& v : values) v = from_float<T>(static_cast<float>(draw(engine)));
  return values;
}
template <class T>
std::vector<T> random_uniform(std::size_t count, double low, double high, std::uint64_t stream = 0) {
  std::mt19937_64 engine(test_seed() + 0x9e3779b97f4a7c15ULL * (stream + 101));
  std::uniform_real_distribution<double> draw(low, high);
  std::vector<T> values(count);
  for (T& v : values) v = from_float<T>(static_cast<float>(draw(engine)));
  return values;
}

/// max |got − want| / (1 + |want|); NaN anywhere it is not wanted counts as infinite.
template <class T, class Reference>
double largest_error(const std::vector<T>& got, const std::vector<Reference>& want) {
  if (got.size() != want.size()) return INFINITY;
  double worst = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double g = to_float(got[i]);
    const double w = static_cast<double>(want[i]);
    if (g == w || (std::isnan(g) && std::isnan(w))) continue;
    const double error = std::abs(g - w) / (1.0 + std::abs(w));
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  return worst;
}

}  // namespace mmrec::kernels::test
