// linear against fp64 on the operands as stored: few rows, more and many, which different kernels or the matrix library
// take, every type, activation, bias and residual, any alignment, several jobs in a call; a row's bits do not depend on
// how many rows of its class there are; a chain of dependent calls reads what the call before it wrote. Longer than
// other files, because all ways of the one op share its cases.
#include <memory>
#include <ostream>
#include <set>
#include <type_traits>

#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/runtime/cuda.h"
#include "tests/kernels/cuda/dense_testing.h"

namespace mmrec::kernels::test {
namespace {

enum class Residual : std::uint8_t { kNone, kApart, kInPlace };

struct Case {
  std::int64_t rows, out, in;
  Activation activation = Activation::kNone;
  bool bias = false;
  Residual residual = Residual::kNone;
  float residual_scale = 1.0F;
  Layout layout = kPacked;
};

std::ostream& operator<<(std::ostream& stream, const Case& c) {
  return stream << c.rows << " rows, " << c.out << " x " << c.in << ", activation " << static_cast<int>(c.activation)
                << (c.bias ? ", bias" : "") << ", residual " << static_cast<int>(c.residual) << " by "
                << c.residual_scale << ", pad " << c.layout.pad;
}

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kGelu:
      return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0)));
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kGeluTanh:
      return x / (1.0 + std::exp(-2.0 * std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kNone:
      break;
  }
  return x;
}

/// A job with its operands and what it should give.
template <class A, class Y>
class Problem {
 public:
  Problem(Cuda& cuda, const Case& c, std::uint64_t stream)
      : case_(c),
        x_(random_matrix<A>(cuda, c.rows, c.in, c.layout, 10 * stream)),
        weight_(
            random_matrix<A>(cuda, c.out, c.in, kPacked, 10 * stream + 1, 1.0 / std::sqrt(static_cast<double>(c.in)))),
        bias_(random_matrix<float>(cuda, 1, c.out, kPacked, 10 * stream + 2)),
        residual_(random_matrix<Y>(cuda, c.rows, c.out, c.layout, 10 * stream + 3)),
        y_(cuda, c.rows, c.out, c.layout) {}

  Linear<Device, A, Y> job() {
    Linear<Device, A, Y> job{.x = x_.view(),
                             .weight = {weight_.view().data, kDTypeOf<A>, case_.out, case_.in},
                             .y = output().view(),
                             .activation = case_.activation,
                             .residual_scale = case_.residual_scale};
    if (case_.bias) job.bias = bias_.view().data;
    if (case_.residual != Residual::kNone) job.residual = residual_.view();
    return job;
  }
  std::vector<Y> result() { return output().download(); }
  void expect_correct() {
    SCOPED_TRACE(case_);
    const std::vector<Y> got = result();
    const std::vector<double> x = widened(x_.values()), weight = widened(weight_.values());
    // {what it should be, by how much it may miss that}
    const auto expected = [&](std::int64_t r, std::int64_t o) {
      double sum = case_.bias ? bias_(0, o) : 0.0;
      double magnitude = std::abs(sum);
      for (std::int64_t i = 0; i < case_.in; ++i) {
        const double product =
            x[static_cast<std::size_t>(r * case_.in + i)] * weight[static_cast<std::size_t>(o * case_.in + i)];
        sum += product;
        magnitude += std::abs(product);
      }
      double want = activate(case_.activation, sum);
      if (case_.residual != Residual::kNone) want += static_cast<double>(case_.residual_scale) * residual_(r, o);
      // fp32 sums, 1.13 the steepest slope of gelu, and the rounding of what follows.
      return std::pair(want, 1.13e-6 * magnitude + 2e-7 * (1.0 + std::abs(want)));
    };
    // In this order a row of the weights meets all rows of x.
    const std::int64_t wrong = first_failure(case_.rows * case_.out, [&](std::int64_t n) {
      const std::int64_t r = n % case_.rows, o = n / case_.rows;
      const auto [want, tolerance] = expected(r, o);
      return rounds_to(got[static_cast<std::size_t>(r * case_.out + o)], want, tolerance);
    });
    if (wrong == case_.rows * case_.out) return;
    const std::int64_t r = wrong % case_.rows, o = wrong / case_.rows;
    ADD_FAILURE() << "row " << r << ", output " << o << ": "
                  << to_float(got[static_cast<std::size_t>(r * case_.out + o)]) << " for " << expected(r, o).first;
  }

 private:
  DeviceMatrix<Y>& output() { return case_.residual == Residual::kInPlace ? residual_ : y_; }

  Case case_;
  DeviceMatrix<A> x_, weight_;
  DeviceMatrix<float> bias_;
  DeviceMatrix<Y> residual_, y_;
};

class CudaLinearTest : public CudaTest {
 protected:
  /// All cases in one call.
  template <class A, class Y>
  void check(const std::vector<Case>& cases) {
    std::vector<std::unique_ptr<Problem<A, Y>>> problems;
    std::vector<Linear<Device, A, Y>> jobs;
    for (const Case& c : cases) {
      problems.push_back(std::make_unique<Problem<A, Y>>(cuda(), c, problems.size()));
      jobs.push_back(problems.back()->job());
      if (c.rows != 0 && c.out != 0) ways_.insert(choose_linear(cuda(), jobs.back()));
    }
    linear(cuda(), std::span<const Linear<Device, A, Y>>(jobs));
    for (const auto& problem : problems) problem->expect_correct();
  }
  void check_all_types(const std::vector<Case>& cases) {
    check<float, float>(cases);
    check<BFloat16, BFloat16>(cases);
    check<BFloat16, float>(cases);
    check<Float16, Float16>(cases);
    check<Float16, float>(cases);
  }

  /// That the cases so far have gone these ways and no others; where sm_90's are not to be had, by the library instead.
  void expect_ways(std::set<LinearAlgo> ways) {
    if (cuda().compute_capability() != 90 && ways.erase(kFew) + ways.erase(kMany) != 0) ways.insert(kLibrary);
    EXPECT_EQ(ways_, ways);
  }
  static constexpr LinearAlgo kMatvec = LinearAlgo::kMatvec, kFew = LinearAlgo::kFewRows, kMany = LinearAlgo::kManyRows,
                              kLibrary = LinearAlgo::kLibrary;

  /// One case, and that linear goes this way.
  template <class A, class Y>
  void check_way(LinearAlgo way, const Case& c) {
    SCOPED_TRACE(c);
    Problem<A, Y> problem(cuda(), c, 1);
    EXPECT_EQ(choose_linear(cuda(), problem.job()), way);
    linear(cuda(), problem.job(), way);
    problem.expect_correct();
  }
  /// A way by which linear does not go.
  template <class A, class Y>
  void check_forced(LinearAlgo way, const Case& c) {
    SCOPED_TRACE(c);
    Problem<A, Y> problem(cuda(), c, 1);
    EXPECT_NE(choose_linear(cuda(), problem.job()), way);
    linear(cuda(), problem.job(), way);
    problem.expect_correct();
  }

  /// Every group of `size` rows alone has the bits of the same rows among all.
  template <class A, class Y>
  void expect_rows_alone(const Case& c, std::int64_t size) {
    SCOPED_TRACE(c);
    Problem<A, Y> problem(cuda(), c, 1);
    const Linear<Device, A, Y> job = problem.job();
    linear(cuda(), std::span(&job, 1));
    const std::vector<Y> all = problem.result();
    DeviceMatrix<Y> alone(cuda(), c.rows, c.out);
    for (std::int64_t r = 0; r + size <= c.rows; r += size) {
      Linear<Device, A, Y> part = job;
      part.x = job.x.middle_rows(r, size);
      part.y = alone.view().middle_rows(r, size);
      if (c.residual != Residual::kNone) part.residual = job.residual.middle_rows(r, size);
      linear(cuda(), std::span<const Linear<Device, A, Y>>(&part, 1));
    }
    std::vector<Y> got = alone.download();
    got.resize(static_cast<std::size_t>(c.rows / size * size * c.out));
    EXPECT_TRUE(same_bits(got, {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(got.size())}))
        << size << " rows at a time";
  }

 private:
  std::set<LinearAlgo> ways_;
};

TEST_F(CudaLinearTest, EveryWayIsTakenByItsShapes) {
  const bool sm90 = cuda().compute_capability() == 90;
  for (const std::int64_t rows : {1, 8, 9, 128, 129}) {
    const Case c{rows, 72, 136, Activation::kGelu, true};
    const LinearAlgo own = rows <= 8          ? LinearAlgo::kMatvec
                           : !sm90            ? LinearAlgo::kLibrary
                           : rows <= kFewRows ? LinearAlgo::kFewRows
                                              : LinearAlgo::kManyRows;
    check_way<BFloat16, BFloat16>(own, c);
    check_way<Float16, float>(own, c);
    const LinearAlgo any = rows <= 8 ? LinearAlgo::kMatvec : LinearAlgo::kLibrary;
    check_way<float, float>(any, c);
    Case unaligned = c;
    unaligned.layout = kUnaligned;
    check_way<BFloat16, BFloat16>(any, unaligned);
  }
}

// By ways that others are faster than.
TEST_F(CudaLinearTest, EveryWayCanBeForced) {
  const Case few{8, 72, 136, Activation::kGelu, true, Residual::kApart, 0.5F};
  Case more = few;
  more.rows = 70;
  check_forced<float, float>(LinearAlgo::kLibrary, few);
  check_forced<BFloat16, BFloat16>(LinearAlgo::kLibrary, few);
  if (cuda().compute_capability() != 90) return;
  check_forced<BFloat16, BFloat16>(LinearAlgo::kFewRows, few);
  check_forced<BFloat16, float>(LinearAlgo::kManyRows, few);
  check_forced<BFloat16, BFloat16>(LinearAlgo::kManyRows, more);
  check_forced<Float16, Float16>(LinearAlgo::kLibrary, more);
  const Linear<Device> nothing{.x = {nullptr, 1, 8}, .weight = {nullptr, DType::kF32, 8, 8}};
  EXPECT_THROW(linear(cuda(), nothing, LinearAlgo::kFewRows), std::invalid_argument);
}

TEST_F(CudaLinearTest, FewRowsOfAnySize) {
  for (const std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8}) {
    for (const std::int64_t out : {1, 7, 48, 257}) {
      for (const std::int64_t in : {1, 7, 48, 257, 1032}) {
        if (small_sizes() && (rows + out + in) % 3 != 0) continue;
        check_all_types({{rows, out, in, Activation::kGelu, true, Residual::kApart, 0.5F}});
      }
    }
  }
  expect_ways({kMatvec});
}

TEST_F(CudaLinearTest, ManyRowsOfAnySize) {
  for (const std::int64_t rows : {9, 31, 128, 300}) {
    for (const std::int64_t out : {1, 7, 48, 257}) {
      for (const std::int64_t in : {1, 7, 48, 257}) {
        if (small_sizes() && rows > 31 && (out != 48 || in != 257)) continue;
        check_all_types({{rows, out, in, Activation::kGelu, true, Residual::kApart, 0.5F}});
        check_all_types({{rows, out, in, Activation::kNone, true, Residual::kInPlace}});
      }
    }
  }
  small_sizes() ? expect_ways({kFew, kLibrary}) : expect_ways({kFew, kMany, kLibrary});
}

TEST_F(CudaLinearTest, EveryEpilogueInEveryLayout) {
  struct Shape {
    std::int64_t rows, out, in;
  };
  int number = 0;
  // Few rows, more, and many: tiles that are whole and tiles that are not.
  for (const Shape shape : {Shape{1, 48, 64}, {5, 48, 64}, {33, 48, 64}, {70, 136, 200}, {300, 408, 136}}) {
    for (const Layout layout : {kPacked, kAlignedGaps, kUnaligned}) {
      for (const Activation activation :
           {Activation::kNone, Activation::kGelu, Activation::kRelu, Activation::kGeluTanh}) {
        for (const bool bias : {false, true}) {
          for (const Residual residual : {Residual::kNone, Residual::kApart, Residual::kInPlace}) {
            for (const float scale : {1.0F, 0.5F}) {
              if (residual == Residual::kNone && scale != 1.0F) continue;
              if (few_cases() && ++number % 7 != 0) continue;
              // Of large shapes some.
              if (shape.rows > 33 && scale == 1.0F && residual == Residual::kApart) continue;
              if (shape.rows > 33 && small_sizes() && ((activation == Activation::kGelu) != bias || layout.pad == 24))
                continue;
              const std::vector<Case> cases = {
                  {shape.rows, shape.out, shape.in, activation, bias, residual, scale, layout}};
              if (shape.rows > 33 && small_sizes()) {
                check<BFloat16, BFloat16>(cases);
                check<Float16, float>(cases);
              } else {
                check_all_types(cases);
              }
            }
          }
        }
      }
    }
  }
  expect_ways({kMatvec, kFew, kMany, kLibrary});
}

TEST_F(CudaLinearTest, ManyWholeTiles) {
  // Enough of them for the widest tiles, on a device of any size.
  const std::int64_t rows = kEmulated ? 512 : 2048;
  const std::int64_t out = kEmulated ? 256 : 1536;
  check<BFloat16, BFloat16>({{rows, out, 400, Activation::kGelu, true}});
  check<BFloat16, BFloat16>({{rows, out, 400, Activation::kNone, true, Residual::kApart, 0.5F}});
  check<Float16, Float16>({{rows - 9, out - 6, 400, Activation::kRelu, true}});
  check<Float16, float>({{rows, out, 400, Activation::kGelu, true, Residual::kInPlace}});
  check<BFloat16, float>({{rows - 9, out - 6, 400, Activation::kNone, false, Residual::kApart, 0.5F}});
  expect_ways({kMany});
}

TEST_F(CudaLinearTest, SharesOfEveryLength) {
  // `in` on either side of what a warp keeps in flight, and longer.
  for (const std::int64_t in : {8, 32, 264, 512, 520, 1024, 1056, 2048, 2056, 4096, 4104}) {
    check_all_types({{2, 9, in, Activation::kNone, true}});
    check<float, float>({{1, 9, in}});
    check<float, float>({{4, 9, in}});
    check<float, float>({{8, 9, in}});
  }
  expect_ways({kMatvec});
}

// Rows so few and sums so long that several blocks share a tile's.
TEST_F(CudaLinearTest, SumsInSlices) {
  for (const std::int64_t rows : {9, 33, 70}) {
    for (const std::int64_t in : {520, 1096}) {
      if (few_cases() && rows != 33) continue;
      check<BFloat16, BFloat16>({{rows, 200, in, Activation::kGelu, true}});
      check<BFloat16, float>({{rows, 136, in, Activation::kNone, true, Residual::kInPlace}});
      check<Float16, Float16>({{rows, 72, in, Activation::kRelu, false, Residual::kApart, 0.5F}});
    }
  }
  expect_ways({kFew});
}

TEST_F(CudaLinearTest, SeveralJobsInOneCall) {
  std::vector<Case> cases;
  for (std::int64_t i = 0; i < 11; ++i) {  // more than one launch takes
    cases.push_back({1 + i % 8, 5 + 13 * i, 32 + 8 * i, static_cast<Activation>(i % 3), i % 2 == 0});
  }
  check_all_types(cases);
  cases.push_back({40, 24, 56, Activation::kGelu, true});
  cases.push_back({9, 100, 32, Activation::kNone, true, Residual::kInPlace});
  cases.push_back({20, 33, 40, Activation::kRelu});
  check_all_types(cases);
  for (std::int64_t i = 0; i < 6; ++i) {
    cases.push_back({129 + 100 * i, 24 + 136 * i, 32 + 64 * i, static_cast<Activation>(i % 3), i % 2 == 1});
  }
  check_all_types(cases);
  expect_ways({kMatvec, kFew, kMany, kLibrary});
}

TEST_F(CudaLinearTest, EmptyJobsAreLeftOut) {
  check_all_types({{0, 8, 8}, {3, 16, 24}, {2, 0, 8}});
  linear(cuda(), std::span<const Linear<Device, float, float>>());
}

TEST_F(CudaLinearTest, LargeShapes) {
  if (small_sizes()) GTEST_SKIP() << "large sizes";
  for (const std::int64_t rows : {1, 8, 64, 1024}) {
    check<BFloat16, BFloat16>({{rows, 4096, 1024, Activation::kGelu, true}});
    check<BFloat16, float>({{rows, 1024, 4096, Activation::kNone, true, Residual::kInPlace}});
    check<float, float>({{rows, 2048, 512, Activation::kGelu, true, Residual::kApart}});
  }
  check<BFloat16, float>({{2, 128256, 256}});
  expect_ways({kMatvec, kFew, kMany, kLibrary});
  // Products of the library that take more scratch than there is: in chunks of rows.
  Problem<BFloat16, BFloat16> chunks(cuda(), {1500, 16384, 32, Activation::kGelu, true}, 1);
  linear(cuda(), chunks.job(), kLibrary);
  chunks.expect_correct();
}

TEST_F(CudaLinearTest, BitsOfFewRowsDoNotDependOnTheirNumber) {
  for (const std::int64_t in : {40, 257, 1024, 2304}) {
    for (const std::int64_t size : {1, 2, 3, 4, 5}) {
      const Case c{8, 29, in, Activation::kGelu, true, Residual::kApart, 0.5F};
      expect_rows_alone<float, float>(c, size);
      expect_rows_alone<BFloat16, BFloat16>(c, size);
      expect_rows_alone<Float16, float>(c, size);
    }
  }
}

TEST_F(CudaLinearTest, BitsOfManyRowsDoNotDependOnTheirNumber) {
  // Of up to 128 rows, and of more.
  const auto check_groups = [&](std::int64_t rows, std::int64_t size) {
    const Case c{rows, 256, 1024, Activation::kGelu, true};
    expect_rows_alone<float, float>(c, size);
    expect_rows_alone<BFloat16, BFloat16>(c, size);
    expect_rows_alone<BFloat16, float>({rows, 256, 1024, Activation::kNone, true, Residual::kApart}, size);
  };
  check_groups(70, 31);
  if (small_sizes()) return;
  check_groups(128, 9);
  check_groups(128, 127);
  check_groups(300, 129);
  check_groups(1300, 640);
}

TEST_F(CudaLinearTest, BitsDoNotDependOnAlignment) {
  for (const std::int64_t in : {64, 1024}) {
    Problem<BFloat16, float> aligned(cuda(), {3, 20, in, Activation::kNone, true, Residual::kNone, 1.0F, kPacked}, 1);
    Problem<BFloat16, float> shifted(cuda(), {3, 20, in, Activation::kNone, true, Residual::kNone, 1.0F, kUnaligned},
                                     1);
    for (Problem<BFloat16, float>* problem : {&aligned, &shifted}) {
      const Linear<Device, BFloat16, float> job = problem->job();
      linear(cuda(), std::span(&job, 1));
    }
    EXPECT_TRUE(same_bits(aligned.result(), shifted.result())) << in;
  }
}

TEST_F(CudaLinearTest, NonFiniteRowsStayAlone) {
  // Row 1 of x has a NaN and an infinity: no other row may see them, whatever lanes its products share.
  Problem<BFloat16, float> problem(cuda(), {3, 20, 64}, 1);
  Linear<Device, BFloat16, float> job = problem.job();
  std::vector<BFloat16> x = random_normal<BFloat16>(3 * 64, 0.0, 1.0, 7);
  x[64 + 5] = from_float<BFloat16>(NAN);
  x[64 + 50] = from_float<BFloat16>(INFINITY);
  DeviceMatrix<BFloat16> poisoned_x(cuda(), x, 3, 64);
  job.x = poisoned_x.view();
  linear(cuda(), std::span<const Linear<Device, BFloat16, float>>(&job, 1));
  const std::vector<float> got = problem.result();
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isfinite(got[i]), i / 20 != 1) << i;
}

TEST_F(CudaLinearTest, AChainReadsWhatTheCallBeforeWrote) {
  // Kernels start while those before them drain, jobs of many rows go over two streams, and the vector goes to and fro
  // between buffers: reading early, or from a cache, would show. Enqueued at once and replayed as a graph, the chain
  // has the bits that it has when every call is waited for.
  constexpr std::int64_t kDim = kEmulated ? 64 : 1024;
  const int links = small_sizes() ? 3 : 100;
  const DeviceBuffer<float> norm = to_device(std::vector<float>(kDim, 1.0F));
  DeviceMatrix<BFloat16> up = random_matrix<BFloat16>(cuda(), 2 * kDim, kDim, kPacked, 1, 1.0 / std::sqrt(kDim));
  DeviceMatrix<BFloat16> down = random_matrix<BFloat16>(cuda(), kDim, 2 * kDim, kPacked, 2, 1.0 / std::sqrt(kDim));
  for (const std::int64_t rows : {1, 8, 20}) {
    DeviceMatrix<float> x(cuda(), rows, kDim);
    DeviceMatrix<BFloat16> u(cuda(), rows, kDim);
    DeviceMatrix<BFloat16> hidden(cuda(), rows, 2 * kDim);
    const auto link = [&](const auto& pause) {
      rmsnorm<BFloat16>(cuda(), x.view(), norm.data(), u.view());
      pause();
      std::vector<Linear<Device, BFloat16, BFloat16>> halves;
      for (const std::int64_t half : {0, 1}) {
        halves.push_back({.x = u.view(),
                          .weight = {up.view().row(half * kDim), DType::kBF16, kDim, kDim},
                          .y = hidden.view().middle_cols(half * kDim, kDim),
                          .activation = half == 0 ? Activation::kGelu : Activation::kNone});
      }
      linear(cuda(), std::span<const Linear<Device, BFloat16, BFloat16>>(halves));
      pause();
      const Linear<Device, BFloat16, float> second{.x = hidden.view(),
                                                   .weight = {down.view().data, DType::kBF16, kDim, 2 * kDim},
                                                   .y = x.view(),
                                                   .residual = x.view()};
      linear(cuda(), std::span(&second, 1));
      pause();
    };
    const auto restart = [&] {
      const std::vector<float> values = random_normal<float>(static_cast<std::size_t>(rows * kDim), 0.0, 1.0, 3);
      cuda().upload(values.data(), x.view().data, values.size());
    };
    restart();
    for (int i = 0; i < links; ++i) link([&] { cuda().synchronize(); });
    const std::vector<float> waited = x.download();
    for (const float value : waited) ASSERT_TRUE(std::isfinite(value));
    restart();
    for (int i = 0; i < links; ++i) link([] {});
    EXPECT_TRUE(same_bits(x.download(), waited)) << rows << " rows, enqueued at once";
    const Graph graph(cuda(), [&] {
      for (int i = 0; i < links; ++i) link([] {});
    });
    restart();
    graph.launch(cuda());
    EXPECT_TRUE(same_bits(x.download(), waited)) << rows << " rows, as a graph";
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
