// The recurrence that is normed at every token, each way, against float64: every type, runs of any lengths with and
// without states, widths that fill no tile, and the limit of the state.
#include "kernels/cuda/recurrence/algo.h"

#include "tests/kernels/bank_case.h"
#include "tests/kernels/cuda/dense_testing.h"

namespace mmrec::kernels::test {
namespace {

// Of a token, given the one before.
template <class A>
constexpr double kBound = std::is_same_v<A, float>     ? 1e-5
                          : std::is_same_v<A, Float16> ? 3e-3
                                                       : 2e-2;

class CudaNormedRecurrenceTest : public CudaTest {
 protected:
  /// A call's operands on the device, and what they should give.
  template <class A>
  struct Problem {
    NormedCase exact;
    DeviceMatrix<A> z, weight;
    DeviceMatrix<float> zm, gamma, bias, norm, state;
    DeviceMatrix<float> h;
    DeviceMatrix<A> h_rounded;
    std::vector<BankRun> runs;
    DeviceBuffer<BankRun> list;

    Problem(Cuda& cuda, const RunShapes& shapes, std::int64_t dim, bool carries, double norm_size)
        : z(random_matrix<A>(cuda, shapes.total(), dim, kAlignedGaps, 1, 1.5)),
          weight(random_matrix<A>(cuda, dim, dim, kPacked, 2, 0.5 / std::sqrt(static_cast<double>(dim)))),
          zm(random_matrix<float>(cuda, shapes.total(), dim, kPacked, 3)),
          gamma(cuda, random_uniform<float>(static_cast<std::size_t>(shapes.total() * dim), 0.05, 0.85, 4),
                shapes.total(), dim),
          bias(random_matrix<float>(cuda, 1, dim, kPacked, 5)),
          norm(cuda, random_uniform<float>(static_cast<std::size_t>(dim), 0.5 * norm_size, 1.5 * norm_size, 6), 1, dim),
          state(random_matrix<float>(cuda, std::ssize(shapes.rows), dim, kPacked, 7)),
          h(cuda, shapes.total(), dim, kAlignedGaps),
          h_rounded(cuda, shapes.total(), dim),
          runs(shapes.list()),
          list(runs.size()) {
      exact = {.shapes = shapes,
               .dim = dim,
               .carries = carries,
               .z = widened(z.values()),
               .zm = widened(zm.values()),
               .gamma = widened(gamma.values()),
               .weight = widened(weight.values()),
               .bias = widened(bias.values()),
               .norm = widened(norm.values()),
               .state = widened(state.values())};
    }

    NormedRecurrence<Device, A> op(Cuda& cuda, std::int64_t layer) {
      if (exact.carries) {
        for (std::size_t r = 0; r < runs.size(); ++r) {
          runs[r].state = state.view().row(static_cast<std::int64_t>(r)) - layer * exact.dim;
        }
      }
      cuda.upload(runs.data(), list.data(), runs.size());
      NormedRecurrence<Device, A> op{.z = z.view(),
                                     .zm = zm.view(),
                                     .gamma = gamma.view(),
                                     .h = h.view(),
                                     .h_rounded = {},
                                     .gate_weight = {weight.view().data, kDTypeOf<A>, exact.dim, exact.dim},
                                     .gate_bias = bias.view().data,
                                     .norm = norm.view().data,
                                     .runs = {list.data(), runs.data(), std::ssize(runs), exact.shapes.longest()},
                                     .carries = exact.carries,
                                     .layer = layer};
      if constexpr (std::is_same_v<A, float>) {
        op.h_rounded = h.view();
      } else {
        op.h_rounded = h_rounded.view();
      }
      return op;
    }
  };

  template <class A>
  void check(NormedAlgo way, const RunShapes& shapes, std::int64_t dim, bool carries, double norm_size = 1.0,
             double bound = kBound<A>) {
    SCOPED_TRACE(testing::Message() << "way " << static_cast<int>(way) << ", " << shapes.rows.size()
                                    << " runs of up to " << shapes.longest() << ", width " << dim
                                    << (carries ? ", states" : ""));
    Problem<A> problem(cuda(), shapes, dim, carries, norm_size);
    normed_recurrence(cuda(), problem.op(cuda(), 3), way);
    std::vector<double> state;
    const std::vector<float> h = problem.h.download();
    const std::vector<double> expected = problem.exact.reference(
        state, [](double x) { return static_cast<double>(to_float(from_float<A>(static_cast<float>(x)))); },
        std::vector<double>(h.begin(), h.end()));
    const std::vector<A> rounded = problem.h_rounded.download();
    const auto d = static_cast<std::size_t>(dim);
    for (const BankRun& run : problem.runs) {
      for (std::size_t i = static_cast<std::size_t>(run.first) * d;
           i < static_cast<std::size_t>(run.first + run.rows) * d; ++i) {
        ASSERT_LE(std::abs(static_cast<double>(h[i]) - expected[i]), bound * (1.0 + std::abs(expected[i])))
            << "row " << i / d << ", channel " << i % d;
        if constexpr (sizeof(A) == 2) {
          ASSERT_EQ(rounded[i].bits, from_float<A>(h[i]).bits) << i;
        }
      }
    }
    std::vector<float> behind = problem.state.download();
    EXPECT_LE(largest_error(behind, state), bound);
    const std::vector<std::uint32_t> flags = [&] {
      std::vector<std::uint32_t> words(1024);
      cuda().download(cuda().flags(), words.data(), words.size());
      return words;
    }();
    EXPECT_EQ(std::count(flags.begin(), flags.end(), 0U), std::ssize(flags));
  }

  template <class A>
  void check_ways(const std::vector<NormedAlgo>& ways, const RunShapes& shapes, std::int64_t dim,
                  double norm_size = 1.0) {
    for (const NormedAlgo way : ways) {
      for (const bool carries : {false, true}) check<A>(way, shapes, dim, carries, norm_size);
    }
  }
};

TEST_F(CudaNormedRecurrenceTest, GangsTakeAnyWidth) {
  for (const std::int64_t dim : {1, 7, 48, 100, 200}) {
    check_ways<float>({NormedAlgo::kGang}, {{3, 5}, 1}, dim);
    check_ways<BFloat16>({NormedAlgo::kGang}, {{4}}, dim);
    check_ways<Float16>({NormedAlgo::kGang}, {{2, 0, 3}}, dim);
  }
  if (!small_sizes()) {
    check_ways<float>({NormedAlgo::kGang}, {{100, 7}}, 1024);
    check_ways<float>({NormedAlgo::kGang}, {{9}}, 3000);
    check_ways<BFloat16>({NormedAlgo::kGang}, {{9, 9}}, 4096);
  }
}

TEST_F(CudaNormedRecurrenceTest, GangsTakeManyRuns) {
  RunShapes shapes;
  for (std::int32_t i = 0; i < 21; ++i) shapes.rows.push_back(5 - i / 5);
  check_ways<float>({NormedAlgo::kGang}, shapes, 64);
  check_ways<BFloat16>({NormedAlgo::kGang}, shapes, 64);
}

TEST_F(CudaNormedRecurrenceTest, FirstTokensAreNormedRowByRow) {
  for (const std::int64_t dim : {1, 48, 700, 1100}) {
    check<float>(NormedAlgo::kRows, {{1, 0, 1, 1}, 1}, dim, false);
    check<BFloat16>(NormedAlgo::kRows, {{1, 1}}, dim, false);
  }
}

TEST_F(CudaNormedRecurrenceTest, ClustersHoldTheGates) {
  Problem<BFloat16> problem(cuda(), {{2}}, 256, false, 1.0);
  if (!normed_cluster_supported(cuda(), problem.op(cuda(), 0))) GTEST_SKIP() << "no cluster of 16 blocks here";
  EXPECT_EQ(choose_normed(cuda(), problem.op(cuda(), 0)), NormedAlgo::kCluster);
  const NormedAlgo way = NormedAlgo::kCluster;
  check_ways<BFloat16>({way}, {{4}}, 256);
  check_ways<Float16>({way}, {{3, 5, 0, 1}, 1}, 512);
  check<BFloat16>(way, {{1, 1, 4, 2, 3, 3, 1, 1, 2}}, 256, true);
  for (const std::int64_t dim : {768, 1024}) check<BFloat16>(way, {{3, 2}}, dim, true);
  if (kEmulated || small_sizes()) return;
  for (const std::int64_t dim : {256, 512, 768, 1024}) {
    check_ways<BFloat16>({way}, {{200}}, dim);
    check_ways<Float16>({way}, {{65, 64, 50, 50, 9, 7, 3, 1, 300, 299, 20}}, dim);
  }
  check<BFloat16>(way, {std::vector<std::int32_t>(70, 12)}, 1024, false);
}

TEST_F(CudaNormedRecurrenceTest, TheStateStaysWithinItsLimit) {
  for (const double size : {4.0, 30.0}) {
    check<float>(NormedAlgo::kGang, {{4, 2}}, 64, true, size);
    Problem<Float16> problem(cuda(), {{2}}, 256, false, 1.0);
    if (normed_cluster_supported(cuda(), problem.op(cuda(), 0))) {
      check<Float16>(NormedAlgo::kCluster, {{5, 3}}, 256, true, size, 1e-2);  // gates feel each other's roundings more
    }
  }
}

TEST_F(CudaNormedRecurrenceTest, NanStaysInItsRun) {
  Problem<BFloat16> problem(cuda(), {{4, 4}}, 256, false, 1.0);
  const auto op = problem.op(cuda(), 0);
  const float nan = NAN;
  cuda().upload(&nan, problem.zm.view().row(1) + 5, 1);
  for (const NormedAlgo way : {NormedAlgo::kGang, NormedAlgo::kCluster}) {
    if (way == NormedAlgo::kCluster && !normed_cluster_supported(cuda(), op)) continue;
    normed_recurrence(cuda(), op, way);
    const std::vector<float> h = problem.h.download();
    for (std::size_t i = 0; i < h.size(); ++i) EXPECT_EQ(std::isnan(h[i]), i / 256 >= 1 && i / 256 < 4) << i;
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
