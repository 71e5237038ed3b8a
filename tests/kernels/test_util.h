// Shared by the kernel tests: seeded inputs, weights in every stored type, poisoned outputs, and comparisons on every
// entry. References are written in each test, in float64.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/tensor.h"

namespace mmrec::kernels::test {

inline std::vector<float> random_floats(std::int64_t count, unsigned seed, float low = -1.0F, float high = 1.0F) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& v : values) v = uniform(engine);
  return values;
}

/// NaN everywhere: an entry that an op forgets to write is found.
inline std::vector<float> poisoned(std::int64_t count) {
  return std::vector<float>(static_cast<std::size_t>(count), std::numeric_limits<float>::quiet_NaN());
}

/// A weight matrix in its stored type, and its exact values.
struct Weights {
  std::vector<std::byte> bytes;
  std::vector<double> values;  // [rows, cols]
  DType dtype = DType::kF32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;

  WeightView<Host> view() const { return {bytes.data(), dtype, rows, cols}; }
  double at(std::int64_t r, std::int64_t c) const { return values[static_cast<std::size_t>(r * cols + c)]; }
};

template <class T>
void store_as(const std::vector<float>& from, Weights& to) {
  to.bytes.resize(from.size() * sizeof(T));
  T* data = reinterpret_cast<T*>(to.bytes.data());
  for (std::size_t i = 0; i < from.size(); ++i) {
    data[i] = from_float<T>(from[i]);
    to.values.push_back(static_cast<double>(to_float(data[i])));
  }
}

inline Weights random_weights(std::int64_t rows, std::int64_t cols, DType dtype, unsigned seed, float scale = 1.0F) {
  Weights w;
  w.dtype = dtype;
  w.rows = rows;
  w.cols = cols;
  const std::vector<float> from = random_floats(rows * cols, seed, -scale, scale);
  if (dtype == DType::kF32) store_as<float>(from, w);
  if (dtype == DType::kF16) store_as<Float16>(from, w);
  if (dtype == DType::kBF16) store_as<BFloat16>(from, w);
  return w;
}

inline const char* name_of(DType dtype) {
  return dtype == DType::kF32 ? "fp32" : dtype == DType::kF16 ? "fp16" : "bf16";
}
inline constexpr DType kAllDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double gelu(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
inline double gelu_tanh(double x) { return x * sigmoid(2.0 * std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)); }

/// The largest |actual - expected|; NaN and infinity count as infinite unless both agree.
inline double max_error(std::span<const float> actual, std::span<const double> expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double worst = 0.0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(static_cast<double>(actual[i]) - expected[i]);
    if (!(error <= std::numeric_limits<double>::max())) return std::numeric_limits<double>::infinity();
    worst = std::max(worst, error);
  }
  return worst;
}

/// True if both hold the same bits; a NaN is never equal, so poison is found.
inline testing::AssertionResult same_bits(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return testing::AssertionFailure() << "sizes " << a.size() << " and " << b.size();
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) || std::bit_cast<std::uint32_t>(a[i]) != std::bit_cast<std::uint32_t>(b[i])) {
      return testing::AssertionFailure() << "entry " << i << ": " << a[i] << " and " << b[i];
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace mmrec::kernels::test
