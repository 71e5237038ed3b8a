// The exact recurrence on the device against float64, token by token: each h is recomputed from the one that the kernel
// itself left, as its products saw it, so that the bound is that of one token whatever the element type.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "tests/kernels/cuda/cuda_testing.h"

namespace mmrec::kernels {
namespace {

struct Size {
  std::int64_t batch, time, dim;
};

template <class A>
constexpr DType kType = DType::kF32;
template <>
constexpr DType kType<BFloat16> = DType::kBF16;
template <>
constexpr DType kType<Float16> = DType::kF16;

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

/// Operands with z as a part of wider rows, as in the model.
template <class A>
struct Case {
  Size size;
  std::vector<A> wide;  // [B, T, 3D], z in the middle
  std::vector<A> zm;    // [B, T, D]
  std::vector<float> gamma, carry, bias;
  std::vector<A> weight;  // [2D, D]
  float mix = 0.1F;

  explicit Case(const Size& s, std::uint64_t stream = 0)
      : size(s),
        wide(test::random_uniform<A>(count(s.batch * s.time * 3 * s.dim), -2.0, 2.0, stream)),
        zm(test::random_uniform<A>(count(s.batch * s.time * s.dim), -2.0, 2.0, stream + 1)),
        gamma(test::random_uniform<float>(count(s.batch * s.time * s.dim), 0.05, 0.85, stream + 2)),
        carry(test::random_normal<float>(count(s.batch * s.dim), 0.0, 1.0, stream + 3)),
        bias(test::random_normal<float>(count(s.dim), 0.0, 1.0, stream + 4)),
        weight(test::random_normal<A>(count(2 * s.dim * s.dim), 0.0, 1.0 / std::sqrt(static_cast<double>(s.dim)),
                                      stream + 5)) {}
  static std::size_t count(std::int64_t n) { return static_cast<std::size_t>(n); }
};

/// h and what the products saw of it, [B, T + 1, D].
template <class A>
struct Result {
  std::vector<float> h;
  std::vector<A> rounded;
};

class GatedRecurrenceTest : public test::CudaTest {
 protected:
  /// In calls of `cut` tokens.
  template <class A>
  Result<A> run(const Case<A>& c, std::int64_t cut) {
    const auto [batch, time, dim] = c.size;
    const auto wide = to_device(c.wide);
    const auto zm = to_device(c.zm);
    const auto gamma = to_device(c.gamma);
    const auto bias = to_device(c.bias);
    const auto weight = to_device(c.weight);
    auto h = poisoned<float>(static_cast<std::size_t>(batch * (time + 1) * dim));
    auto rounded = poisoned<A>(h.size());
    for (std::int64_t b = 0; b < batch; ++b) {
      const float* row = c.carry.data() + b * dim;
      std::vector<A> row_rounded;
      for (std::int64_t i = 0; i < dim; ++i) row_rounded.push_back(from_float<A>(row[i]));
      cuda().upload(row, h.data() + b * (time + 1) * dim, static_cast<std::size_t>(dim));
      cuda().upload(row_rounded.data(), rounded.data() + b * (time + 1) * dim, static_cast<std::size_t>(dim));
    }
    for (std::int64_t t = 0; t < time; t += cut) {
      const std::int64_t n = std::min(cut, time - t);
      const auto part = [&]<class T>(T* data, std::int64_t rows, std::int64_t width, std::int64_t count) {
        SequenceView<T, Device> view(data + t * width, batch, count, dim);
        view.batch_stride = rows * width;
        view.time_stride = width;
        return view;
      };
      GatedRecurrence<Device, A> op;
      op.in.z = part(wide.data() + dim, time, 3 * dim, n);
      op.in.zm = part(zm.data(), time, dim, n);
      op.in.gamma = part(gamma.data(), time, dim, n);
      op.in.h = part(h.data(), time + 1, dim, n + 1);
      if constexpr (std::is_same_v<A, float>) {
        op.in.h_rounded = op.in.h;
      } else {
        op.in.h_rounded = part(rounded.data(), time + 1, dim, n + 1);
      }
      op.in.mdi_mix = c.mix;
      op.gate_weight = {weight.data(), kType<A>, 2 * dim, dim};
      op.gate_bias = c.bias.empty() ? nullptr : bias.data();
      gated_recurrence(cuda(), op);
    }
    Result<A> result{to_host(h), to_host(rounded)};
    if constexpr (std::is_same_v<A, float>) result.rounded = result.h;
    return result;
  }

  template <class A>
  static void check(const Case<A>& c, const Result<A>& got) {
    const auto [batch, time, dim] = c.size;
    for (std::size_t i = 0; i < got.h.size(); ++i) {
      ASSERT_EQ(to_float(got.rounded[i]), to_float(from_float<A>(got.h[i]))) << "h_rounded at " << i;
    }
    double worst = 0.0;
    const auto mix = static_cast<double>(c.mix);
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t t = 0; t < time; ++t) {
        const std::int64_t before = (b * (time + 1) + t) * dim;
        for (std::int64_t i = 0; i < dim; ++i) {
          const auto at = static_cast<std::size_t>((b * time + t) * dim + i);
          double s = c.bias.empty() ? 0.0 : static_cast<double>(c.bias[static_cast<std::size_t>(i)]);
          double g = static_cast<double>(to_float(c.zm[at]));
          for (std::int64_t k = 0; k < dim; ++k) {
            const auto h = static_cast<double>(to_float(got.rounded[static_cast<std::size_t>(before + k)]));
            s += h * static_cast<double>(to_float(c.weight[static_cast<std::size_t>(i * dim + k)]));
            g += h * static_cast<double>(to_float(c.weight[static_cast<std::size_t>((dim + i) * dim + k)]));
          }
          s = sigmoid(s);
          g = sigmoid(g);
          const auto gamma = static_cast<double>(c.gamma[at]);
          const auto z =
              static_cast<double>(to_float(c.wide[static_cast<std::size_t>((b * time + t) * 3 * dim + dim + i)]));
          const double want =
              (gamma + mix * (1.0 - g + gamma)) * static_cast<double>(got.h[static_cast<std::size_t>(before + i)]) +
              z * (s + mix * g);
          const double error = std::abs(static_cast<double>(got.h[static_cast<std::size_t>(before + dim + i)]) - want);
          worst = std::isnan(error) ? INFINITY : std::max(worst, error / (1.0 + std::abs(want)));
        }
      }
    }
    EXPECT_LT(worst, 5e-6) << "batch " << batch << " time " << time << " dim " << dim;
  }

  template <class A>
  void check_sizes() {
    std::vector<Size> sizes = {{1, 1, 1},  {1, 5, 7},   {3, 2, 48},  {1, 31, 64}, {8, 3, 40},
                               {9, 1, 33}, {17, 2, 16}, {2, 4, 100}, {33, 1, 48}, {40, 1, 33}};
    if (!test::small_sizes()) {
      sizes.insert(sizes.end(),
                   {{1, 257, 1024}, {64, 3, 512}, {1, 9, 2048}, {64, 1, 2048}, {2, 3, 4096}, {1, 5, 1500}});
    }
    for (const Size& size : sizes) {
      const Case<A> c(size);
      check(c, run(c, size.time));
    }
  }

  template <class A>
  void check_bits() {
    const Size size = test::small_sizes() ? Size{11, 7, 96} : Size{11, 40, 1024};
    const Case<A> c(size);
    const Result<A> whole = run(c, size.time);
    for (const std::int64_t cut : {1, 3}) {
      const Result<A> cut_up = run(c, cut);
      EXPECT_EQ(cut_up.h, whole.h) << "calls of " << cut;
    }
    for (const std::int64_t b : {0, 5, 10}) {
      Case<A> alone(Size{1, size.time, size.dim});
      const auto row = [&](const auto& all, auto& one) {
        std::copy_n(all.begin() + b * static_cast<std::int64_t>(one.size()), one.size(), one.begin());
      };
      row(c.wide, alone.wide);
      row(c.zm, alone.zm);
      row(c.gamma, alone.gamma);
      row(c.carry, alone.carry);
      alone.bias = c.bias;
      alone.weight = c.weight;
      const Result<A> one = run(alone, size.time);
      const auto from = whole.h.begin() + b * static_cast<std::int64_t>(one.h.size());
      EXPECT_TRUE(std::equal(one.h.begin(), one.h.end(), from)) << "sequence " << b;
    }
  }
};

TEST_F(GatedRecurrenceTest, MatchesFloat64InFp32) { check_sizes<float>(); }
TEST_F(GatedRecurrenceTest, MatchesFloat64InBf16) { check_sizes<BFloat16>(); }
TEST_F(GatedRecurrenceTest, MatchesFloat64InFp16) { check_sizes<Float16>(); }

TEST_F(GatedRecurrenceTest, BitsDependNeitherOnBatchNorOnCutsInFp32) { check_bits<float>(); }
TEST_F(GatedRecurrenceTest, BitsDependNeitherOnBatchNorOnCutsInBf16) { check_bits<BFloat16>(); }

TEST_F(GatedRecurrenceTest, WithoutBiasAndWithoutMix) {
  Case<BFloat16> c({2, 3, 24});
  c.bias.clear();
  c.mix = 0.0F;
  check(c, run(c, c.size.time));
}

// A NaN whose bits are all ones looks like an element that was not written. It must neither stop the recurrence nor
// vanish, and sequences beside it must not notice.
template <class A>
void put_nan(Case<A>& c) {
  const std::int64_t at = (1 * c.size.time + 1) * 3 * c.size.dim + c.size.dim + 5;  // z_5 of sequence 1 at time 1
  std::memset(&c.wide[static_cast<std::size_t>(at)], 0xff, sizeof(A));
}

TEST_F(GatedRecurrenceTest, NanPassesThrough) {
  const auto check_type = [&]<class A>(A) {
    Case<A> c({2, 4, 16});
    const Result<A> clean = run(c, c.size.time);
    put_nan(c);
    const Result<A> got = run(c, c.size.time);
    const std::size_t row = 16;
    const std::size_t second = 5 * row;
    for (std::size_t i = 0; i < second; ++i) ASSERT_EQ(got.h[i], clean.h[i]);
    EXPECT_TRUE(std::isnan(got.h[second + 2 * row + 5]));
    EXPECT_FALSE(std::isnan(got.h[second + 2 * row + 4]));
    for (std::size_t i = 0; i < row; ++i) EXPECT_TRUE(std::isnan(got.h[second + 3 * row + i]));
  };
  check_type(float{});
  check_type(BFloat16{});
}

}  // namespace
}  // namespace mmrec::kernels
