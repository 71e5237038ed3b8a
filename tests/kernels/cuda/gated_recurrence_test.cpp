// The exact recurrence on the device against float64, token by token: each h is recomputed from the one that the kernel
// itself left.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/kernels/cuda/gated_testing.h"

namespace mmrec::kernels::test {
namespace {

/// h and what the products saw of it, [B, T + 1, D].
template <class A>
struct Result {
  std::vector<float> h;
  std::vector<A> rounded;
};

class GatedRecurrenceTest : public GatedTest {
 protected:
  /// In calls of `cut` tokens.
  template <class A>
  Result<A> run(const GatedCase<A>& c, std::int64_t cut) {
    GatedOnDevice<A> on = on_device(c, c.fresh_state());
    for (std::int64_t t = 0; t < c.size.time; t += cut) {
      const std::int64_t n = std::min(cut, c.size.time - t);
      GateInputs<Device, A> in = on.inputs();
      const auto shorten = [t](auto& view, std::int64_t times) {
        view.data = view.at(0, 0, t);
        view.time = times;
      };
      shorten(in.z, n);
      shorten(in.zm, n);
      shorten(in.gamma, n);
      shorten(in.h, n + 1);
      shorten(in.h_rounded, n + 1);
      gated_recurrence(
          cuda(), GatedRecurrence<Device, A>{.in = in, .gate_weight = on.gate_weight(), .gate_bias = on.gate_bias()});
    }
    return {to_host(on.h), rounded_of(on)};
  }

  template <class A>
  static void check(const GatedCase<A>& c, const Result<A>& got) {
    const auto [batch, time, dim] = c.size;
    EXPECT_EQ(first_not_rounded(got.h, got.rounded), got.h.size()) << "h_rounded";
    EXPECT_LT(one_time_error(c, got.h, got.rounded), 5e-6) << "batch " << batch << " time " << time << " dim " << dim;
  }

  template <class A>
  void check_sizes() {
    std::vector<GatedSize> sizes = {{1, 1, 1},  {1, 5, 7},   {3, 2, 48},  {1, 31, 64}, {8, 3, 40},
                                    {9, 1, 33}, {17, 2, 16}, {2, 4, 100}, {33, 1, 48}, {40, 1, 33}};
    if (!small_sizes()) {
      sizes.insert(sizes.end(),
                   {{1, 257, 1024}, {64, 3, 512}, {1, 9, 2048}, {64, 1, 2048}, {2, 3, 4096}, {1, 5, 1500}});
    }
    for (const GatedSize& size : sizes) {
      const GatedCase<A> c(size);
      check(c, run(c, size.time));
    }
  }

  template <class A>
  void check_bits() {
    const GatedSize size = small_sizes() ? GatedSize{11, 7, 96} : GatedSize{11, 40, 1024};
    const GatedCase<A> c(size);
    const Result<A> whole = run(c, size.time);
    for (const std::int64_t cut : {1, 3}) {
      const Result<A> cut_up = run(c, cut);
      EXPECT_EQ(cut_up.h, whole.h) << "calls of " << cut;
    }
    for (const std::int64_t b : {0, 5, 10}) {
      GatedCase<A> alone(GatedSize{1, size.time, size.dim});
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
  GatedCase<BFloat16> c({2, 3, 24});
  c.bias.clear();
  c.mix = 0.0F;
  check(c, run(c, c.size.time));
}

// A NaN whose bits are all ones looks like an element that was not written. It must neither stop the recurrence nor
// vanish, and sequences beside it must not notice.
template <class A>
void put_nan(GatedCase<A>& c) {
  const std::int64_t at = (1 * c.size.time + 1) * 3 * c.size.dim + c.size.dim + 5;  // z_5 of sequence 1 at time 1
  std::memset(&c.wide[static_cast<std::size_t>(at)], 0xff, sizeof(A));
}

TEST_F(GatedRecurrenceTest, NanPassesThrough) {
  const auto check_type = [&]<class A>(A) {
    GatedCase<A> c({2, 4, 16});
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
}  // namespace mmrec::kernels::test
