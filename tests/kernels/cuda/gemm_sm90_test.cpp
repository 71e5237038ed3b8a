// The matrix product that the fused ops of sm_90a are built on, stored as it is, against fp64.
#include "kernels/cuda/gemm/algo.h"

#include <algorithm>
#include <string>

#include "tests/kernels/cuda/cuda_testing.h"

namespace mmrec::kernels {
namespace {

using test::random_normal;

class GemmSm90 : public test::CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped() && cuda().compute_capability() != 90)
      GTEST_SKIP() << "the device is not of compute capability 9.0";
  }

  /// Largest |y − x Wᵀ| / Σ |x w| over all entries, or over `samples` of them; infinite where an entry was not written
  /// or memory between the rows of y was.
  template <class A, class Y>
  double error(std::int64_t rows, std::int64_t columns, std::int64_t depth, std::int64_t samples = 0,
               GemmTile tile = GemmTile::kAuto) {
    const std::int64_t x_stride = (depth + 15) / 8 * 8;
    const std::int64_t y_stride = columns + 3;
    const auto x = random_normal<A>(static_cast<std::size_t>(rows * x_stride), 0.0, 1.0, 1);
    const auto w = random_normal<A>(static_cast<std::size_t>(columns * depth), 0.1, 1.0, 2);
    const auto x_device = to_device(x);
    const auto w_device = to_device(w);
    auto y_device = poisoned<Y>(static_cast<std::size_t>(rows * y_stride));
    const MatrixView<const A, Device> x_view(x_device.data(), rows, depth, x_stride);
    const WeightView<Device> w_view = {w_device.data(), kDTypeOf<A>, columns, depth};
    EXPECT_TRUE(gemm_sm90_supported(cuda(), x_view, w_view));
    const Linear<Device, A, Y> job{
        .x = x_view, .weight = w_view, .y = MatrixView<Y, Device>(y_device.data(), rows, columns, y_stride)};
    linear_many_rows_sm90(cuda(), std::span(&job, 1), tile);
    const auto y = to_host(y_device);

    const auto error_at = [&](std::int64_t r, std::int64_t c) {
      double want = 0.0;
      double scale = 1e-30;
      for (std::int64_t k = 0; k < depth; ++k) {
        const double product = static_cast<double>(to_float(x[static_cast<std::size_t>(r * x_stride + k)])) *
                               static_cast<double>(to_float(w[static_cast<std::size_t>(c * depth + k)]));
        want += product;
        scale += std::abs(product);
      }
      const double got = to_float(y[static_cast<std::size_t>(r * y_stride + c)]);
      // Written not at all, it is NaN.
      const double rounding =
          std::is_same_v<Y, float> ? 0.0 : std::abs(want) / (std::is_same_v<Y, BFloat16> ? 256 : 2048);
      return std::isnan(got) ? INFINITY : std::max(std::abs(got - want) - rounding, 0.0) / scale;
    };
    double worst = test::parallel_max(samples == 0 ? rows * columns : samples, [&](std::int64_t i) {
      const auto entry = static_cast<std::int64_t>(
          samples == 0 ? static_cast<std::uint64_t>(i)
                       : test::Draws(test::test_seed(), static_cast<std::uint64_t>(i)).bits() %
                             static_cast<std::uint64_t>(rows * columns));
      return error_at(entry / columns, entry % columns);
    });
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = columns; c < y_stride; ++c) {
        if (!std::isnan(to_float(y[static_cast<std::size_t>(r * y_stride + c)]))) worst = INFINITY;
      }
    }
    return worst;
  }
};

// Sums in fp32 on tensor cores that may truncate: a few units in the last place of the largest partial sum.
constexpr double kBound = 2e-6;

TEST_F(GemmSm90, OneTileOfRows) {
  EXPECT_LT((error<BFloat16, float>(1, 1, 8)), kBound);
  EXPECT_LT((error<BFloat16, float>(64, 256, 64)), kBound);
  EXPECT_LT((error<BFloat16, float>(128, 257, 72)), kBound);
  EXPECT_LT((error<Float16, float>(37, 1500, 200)), kBound);  // several tiles a block
}

TEST_F(GemmSm90, ClustersThatShareW) {
  EXPECT_LT((error<BFloat16, float>(129, 255, 64)), kBound);  // the second block has one row
  EXPECT_LT((error<BFloat16, float>(256, 256, 320)), kBound);
  EXPECT_LT((error<BFloat16, float>(257, 300, 1000)), kBound);  // the last block has none
  EXPECT_LT((error<Float16, float>(200, 700, 456)), kBound);
}

TEST_F(GemmSm90, EveryTile) {
  for (const GemmTile tile : {GemmTile::kWide, GemmTile::kSquare, GemmTile::kSlim}) {
    SCOPED_TRACE(static_cast<int>(tile));
    EXPECT_LT((error<BFloat16, float>(1, 1, 8, 0, tile)), kBound);
    EXPECT_LT((error<BFloat16, BFloat16>(257, 300, 200, 0, tile)), kBound);
    EXPECT_LT((error<Float16, float>(130, 520, 456, 0, tile)), kBound);
  }
}

TEST_F(GemmSm90, TilesFillTheDevice) {
  const auto tile_of = [&](std::int64_t rows, std::int64_t columns) {
    const Linear<Device, BFloat16> job{.x = {nullptr, rows, 1024}, .weight = {nullptr, DType::kBF16, columns, 1024}};
    return choose_tile(cuda(), std::span(&job, 1));
  };
  EXPECT_EQ(tile_of(256 * cuda().processors(), 1024), GemmTile::kWide);
  EXPECT_EQ(tile_of(128, 64 * cuda().processors()), GemmTile::kSlim);
  EXPECT_EQ(tile_of(128, 128 * cuda().processors()), GemmTile::kSquare);
}

TEST_F(GemmSm90, GroupsOfRowTiles) { EXPECT_LT((error<BFloat16, float>(2500, 300, 24)), kBound); }

TEST_F(GemmSm90, RoundsToTheOperandsType) {
  EXPECT_LT((error<BFloat16, BFloat16>(130, 270, 128)), kBound);
  EXPECT_LT((error<Float16, Float16>(130, 270, 128)), kBound);
}

TEST_F(GemmSm90, LargeSizes) {
  if (test::small_sizes()) GTEST_SKIP() << "large sizes";
  constexpr std::int64_t kSamples = 50'000;
  EXPECT_LT((error<BFloat16, float>(1000, 1024, 4096, kSamples)), kBound);
  EXPECT_LT((error<BFloat16, float>(4096, 8192, 1024, kSamples)), kBound);
  EXPECT_LT((error<Float16, float>(4097, 32001, 520, kSamples)), kBound);
  EXPECT_LT((error<BFloat16, BFloat16>(16384, 2048, 2048, kSamples)), kBound);
}

TEST_F(GemmSm90, SameBitsAgain) {
  constexpr std::int64_t kRows = 300, kColumns = 520, kDepth = 264;
  const auto x = to_device(random_normal<BFloat16>(kRows * kDepth, 0.0, 1.0, 1));
  const auto w = to_device(random_normal<BFloat16>(kColumns * kDepth, 0.0, 1.0, 2));
  std::vector<float> first;
  for (int run = 0; run < 3; ++run) {
    auto y = poisoned<float>(kRows * kColumns);
    linear(cuda(),
           Linear<Device, BFloat16, float>{.x = {x.data(), kRows, kDepth},
                                           .weight = {w.data(), DType::kBF16, kColumns, kDepth},
                                           .y = {y.data(), kRows, kColumns}},
           LinearAlgo::kManyRows);
    if (run == 0) first = to_host(y);
    EXPECT_EQ(to_host(y), first);
  }
}

TEST_F(GemmSm90, WhatTheCopyEngineCannotRead) {
  const auto data = poisoned<BFloat16>(4096);
  const auto supported = [&](std::int64_t depth, std::int64_t stride, std::int64_t offset) {
    return gemm_sm90_supported(cuda(), MatrixView<const BFloat16, Device>(data.data() + offset, 8, depth, stride),
                               {data.data(), DType::kBF16, 8, depth});
  };
  EXPECT_TRUE(supported(64, 72, 8));
  EXPECT_FALSE(supported(60, 64, 0));  // W's rows are not multiples of 16 bytes
  EXPECT_FALSE(supported(64, 68, 0));
  EXPECT_FALSE(supported(64, 64, 4));
}

}  // namespace
}  // namespace mmrec::kernels
