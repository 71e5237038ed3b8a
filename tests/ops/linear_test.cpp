// linear against fp64 on the operands as stored: any number of rows, which different algorithms take, every type,
// activation, bias and residual, any alignment, several jobs in a call. A row's bits do not depend on how many rows of
// its class there are. Longer than other files, because all algorithms of the one op share its cases.
#include <pthread.h>

#include <csignal>

#include "tests/ops/op_test.h"
#if defined(MMREC_TEST_CUDA)
#include "kernels/cuda/gemm/algo.h"
#endif

namespace mmrec::kernels::test {
namespace {

enum class Residual : std::uint8_t { kNone, kApart, kInPlace };
constexpr Activation kActivations[] = {Activation::kNone, Activation::kGelu, Activation::kRelu, Activation::kGeluTanh};

struct Case {
  std::int64_t rows, out, in;
  Activation activation = Activation::kNone;
  bool bias = false;
  Residual residual = Residual::kNone;
  float residual_scale = 1.0F;
  Layout layout = kPacked;
  std::int64_t y_pad = 0;  // beyond the layout's
  bool parts = false;      // of fp32 weights
  // Of compact rows beside bf16 numbers, the first own_rows of which are multiples of scales.
  WeightFormat compact = {};
  std::int64_t own_rows = 0;
  bool of_steps = false;                    // force_row_kernel
  std::optional<WeightFormat> format = {};  // of its own
};

std::ostream& operator<<(std::ostream& stream, const Case& c) {
  return stream << c.rows << " rows, " << c.out << " x " << c.in << ", activation " << static_cast<int>(c.activation)
                << (c.bias ? ", bias" : "") << ", residual " << static_cast<int>(c.residual) << " by "
                << c.residual_scale << ", pad " << c.layout.pad;
}

double activate(Activation activation, double x) {
  if (activation == Activation::kGelu) return gelu(x);
  if (activation == Activation::kRelu) return std::max(x, 0.0);
  if (activation == Activation::kGeluTanh) return gelu_tanh(x);
  return x;
}

/// A job with its operands and what it should give.
template <class A, class Y>
class Problem {
 public:
  Problem(Backend& on, const Case& c, std::uint64_t stream = 1, WeightFormat format = kDTypeOf<A>)
      : case_(c),
        x_(random_matrix<A>(on, c.rows, c.in, c.layout, 10 * stream)),
        weight_(on, c.out, c.in, format, 10 * stream + 1, 1.0 / std::sqrt(static_cast<double>(c.in))),
        bias_(random_matrix<float>(on, 1, c.out, kPacked, 10 * stream + 2)),
        residual_(random_matrix<Y>(on, c.residual == Residual::kNone ? 0 : c.rows, c.out, c.layout, 10 * stream + 3)),
        y_(on, c.rows, c.out, {c.layout.pad + c.y_pad, c.layout.offset}) {
#if defined(MMREC_TEST_CUDA)
    if (c.parts) weight_.add_parts(on);
    if (is_quantized(c.compact.code)) weight_.add_compact(on, c.compact, c.own_rows);
#endif
  }

  Linear<Space, A, Y> job() {
    Linear<Space, A, Y> job{.x = x_.view(),
                            .weight = weight_.view(),
                            .y = output().view(),
                            .activation = case_.activation,
                            .residual_scale = case_.residual_scale,
                            .force_row_kernel = case_.of_steps};
    if (case_.bias) job.bias = bias_.data();
    if (case_.residual != Residual::kNone) job.residual = residual_.view();
    return job;
  }
  void set_x(Backend& on, std::vector<A> values) {
    x_ = Matrix<A>(on, std::move(values), case_.rows, case_.in);
    expected_.clear();
    compared_.clear();
  }
  const std::vector<A>& x() const { return x_.values(); }
  /// Expects what products of x rounded to fp8 give.
  void round_x() { rounded_x_ = Stored(widened(x_.values()), case_.rows, case_.in, DType::kF8).values; }
  std::vector<Y> result() { return output().download(); }
  /// Makes the output what it was before the job.
  void reset() { output().reset(); }
  /// {what an output should be, the sum of the absolute values of its products, on a GPU and of its bias}
  std::pair<double, double> expected(std::int64_t r, std::int64_t o) const {
    double sum = case_.bias ? bias_(0, o) : 0.0, size = kOnCuda ? std::abs(sum) : 0.0;
    const A* x = x_.values().data() + r * case_.in;
    const double* weight = weight_.row(o);
    for (std::int64_t i = 0; i < case_.in; ++i) {
      const double value = rounded_x_.empty() ? static_cast<double>(to_float(x[i]))
                                              : rounded_x_[static_cast<std::size_t>(r * case_.in + i)];
      const double product = value * weight[i];
      sum += product;
      size += std::abs(product);
    }
    double want = activate(case_.activation, sum);
    if (case_.residual != Residual::kNone) want += static_cast<double>(case_.residual_scale) * residual_(r, o);
    return {want, size};
  }
  /// The sum of an output's products as fp32 multiply-adds give it.
  double plain(std::int64_t r, std::int64_t o) const {
    float sum = 0.0F;
    const A* x = x_.values().data() + r * case_.in;
    for (std::int64_t i = 0; i < case_.in; ++i)
      sum = std::fma(to_float(x[i]), static_cast<float>(weight_.row(o)[i]), sum);
    return static_cast<double>(sum);
  }
  /// On all outputs, or on `samples` of them, within tolerance(want, size). What is expected is computed once, and a
  /// result that is equal to the one before is not compared again.
  template <class Tolerance>
  void expect_within(const Tolerance& tolerance, std::int64_t samples = 0) {
    SCOPED_TRACE(case_);
    const std::vector<Y> got = result();
    if (same_bits(got, compared_)) return;
    compared_ = got;
    const std::int64_t outputs = case_.rows * case_.out;
    // In this order a row of the weights meets all rows of x.
    const auto at = [&](std::int64_t n) {
      if (samples != 0) {
        n = static_cast<std::int64_t>(Draws(test_seed(), static_cast<std::uint64_t>(n)).bits() %
                                      static_cast<std::uint64_t>(outputs));
      }
      return std::pair(n % case_.rows, n / case_.rows);
    };
    const std::int64_t count = samples == 0 ? outputs : samples;
    if (expected_.empty()) {
      expected_ = parallel_map(count, [&](std::int64_t n) { return expected(at(n).first, at(n).second); });
    }
    const std::int64_t wrong = first_failure(count, [&](std::int64_t n) {
      const auto [r, o] = at(n);
      const auto [want, size] = expected_[static_cast<std::size_t>(n)];
      return rounds_to(got[static_cast<std::size_t>(r * case_.out + o)], want, tolerance(want, size));
    });
    if (wrong == count) return;
    const auto [r, o] = at(wrong);
    ADD_FAILURE() << "row " << r << ", output " << o << ": "
                  << to_float(got[static_cast<std::size_t>(r * case_.out + o)]) << " for " << expected(r, o).first;
  }
  void expect_correct(std::int64_t samples = 0) {
    expect_within(
        [&](double want, double size) {
          if (!kOnCuda) return 6e-7 * (1.0 + size);
          // fp32 sums, 1.13 the steepest slope of gelu, and the rounding of what follows. Sums of fp8 have fewer bits.
          const double bits = rounded_x_.empty() || kEmulated ? 1e-6 : 1e-3;
          return 1.13 * bits * size + 2e-7 * (1.0 + std::abs(want));
        },
        samples);
  }

 private:
  Matrix<Y>& output() { return case_.residual == Residual::kInPlace ? residual_ : y_; }

  Case case_;
  Matrix<A> x_;
  std::vector<double> rounded_x_;  // as products of fp8 see it; or empty
  Weights weight_;
  Matrix<float> bias_;
  Matrix<Y> residual_, y_;
  std::vector<std::pair<double, double>> expected_;
  std::vector<Y> compared_;
};

template <class A, class Y>
void run(Backend& on, const std::vector<Linear<Space, A, Y>>& jobs) {
  linear(on, std::span<const Linear<Space, A, Y>>(jobs));
}

/// f(A{}, Y{}, format) for all types of x, y and weights that go together.
template <class F>
void for_products(const F& f) {
  for_weights([&]<class A>(A, WeightFormat format) {
    f(A{}, float{}, format);
    if constexpr (sizeof(A) == 2) f(A{}, A{}, format);
  });
}

class LinearTest : public OpTest {
 protected:
  /// All cases in one call, on every backend. On a CPU each has the bits that it has alone.
  template <class A, class Y>
  void check(const std::vector<Case>& cases, WeightFormat format = kDTypeOf<A>) {
    std::vector<std::unique_ptr<Problem<A, Y>>> problems;
    std::vector<Linear<Space, A, Y>> jobs;
    for (const Case& c : cases) {
      problems.push_back(std::make_unique<Problem<A, Y>>(on(), c, problems.size(), c.format.value_or(format)));
      jobs.push_back(problems.back()->job());
#if defined(MMREC_TEST_CUDA)
      if (c.rows != 0 && c.out != 0) algos_.insert(choose_linear(on(), jobs.back()));
#endif
    }
    on_every([&](Backend& on) {
      for (const auto& problem : problems) problem->reset();
      run(on, jobs);
      for (const auto& problem : problems) problem->expect_correct();
      for (std::size_t i = 0; !kOnCuda && jobs.size() > 1 && i < jobs.size(); ++i) {
        const std::vector<Y> together = problems[i]->result();
        problems[i]->reset();
        run<A, Y>(on, {jobs[i]});
        EXPECT_TRUE(same_bits(problems[i]->result(), together)) << "alone, job " << i;
      }
    });
  }
  void check_all_types(const std::vector<Case>& cases) {
    for_products([&]<class A, class Y>(A, Y, WeightFormat format) { check<A, Y>(cases, format); });
  }

  /// Every group of so many rows alone has the bits of the same rows among all.
  template <class A, class Y>
  void expect_rows_alone(const Case& c, const std::vector<std::int64_t>& sizes, WeightFormat format = kDTypeOf<A>) {
    SCOPED_TRACE(c);
    Problem<A, Y> problem(on(), c, 1, format);
    const Linear<Space, A, Y> job = problem.job();
    Matrix<Y> alone(on(), c.rows, c.out);
    on_every([&](Backend& on) {
      run<A, Y>(on, {job});
      const std::vector<Y> all = problem.result();
      for (const std::int64_t size : sizes) {
        alone.reset();
        for (std::int64_t r = 0; r + size <= c.rows; r += size) {
          Linear<Space, A, Y> part = job;
          part.x = job.x.middle_rows(r, size);
          part.y = alone.view().middle_rows(r, size);
          if (c.residual != Residual::kNone) part.residual = job.residual.middle_rows(r, size);
          run<A, Y>(on, {part});
        }
        std::vector<Y> got = alone.download();
        got.resize(static_cast<std::size_t>(c.rows / size * size * c.out));
        EXPECT_TRUE(same_bits(got, {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(got.size())}))
            << size << " rows at a time";
      }
    });
  }

#if defined(MMREC_TEST_CUDA)
  /// That the cases so far were computed by these algorithms and no others; where those of sm_90 are not to be had, by
  /// the library instead.
  void expect_algos(std::set<LinearAlgo> algos) {
    if (on().compute_capability() != 90 && algos.erase(kFew) + algos.erase(kMany) + algos.erase(kOfParts) != 0) {
      algos.insert(kLibrary);
    }
    EXPECT_EQ(algos_, algos);
  }
  static constexpr LinearAlgo kMatvec = LinearAlgo::kMatvec, kFew = LinearAlgo::kFewRows, kMany = LinearAlgo::kManyRows,
                              kCompact = LinearAlgo::kFewCompact, kOfParts = LinearAlgo::kParts,
                              kLibrary = LinearAlgo::kLibrary;

  /// One case by an algorithm, which is the one that linear chooses or another.
  template <class A, class Y>
  void check_algo(LinearAlgo algo, const Case& c, bool chosen = true) {
    SCOPED_TRACE(c);
    Problem<A, Y> problem(on(), c);
    if (algo == LinearAlgo::kFp8) problem.round_x();
    EXPECT_EQ(choose_linear(on(), problem.job()) == algo, chosen);
    linear(on(), problem.job(), algo);
    problem.expect_correct();
  }
  /// One case with compact rows, as it is and with all that an epilogue does.
  void check_compact(LinearAlgo algo, Case c) {
    check_algo<BFloat16, float>(algo, c);
    c.activation = Activation::kGelu;
    c.bias = true;
    c.residual = Residual::kApart;
    check_algo<BFloat16, BFloat16>(algo, c);
  }

 private:
  std::set<LinearAlgo> algos_;
#endif
};

// ---- any backend ----------------------------------------------------------------------------------------------------

TEST_F(LinearTest, EveryEpilogueInEveryLayout) {
  struct Shape {
    std::int64_t rows, out, in;
  };
  // Few rows, more, and many: tiles that are whole and tiles that are not.
  std::vector<Shape> shapes = {{1, 48, 64}, {5, 48, 64}, {33, 48, 64}, {70, 136, 200}, {300, 408, 136}};
  if (!kOnCuda) shapes = {{1, 48, 64}, {3, 37, 21}, {140, 50, 96}};
  int number = 0;
  for (const Shape& shape : shapes) {
    for (const Layout layout : kLayouts) {
      for (const Activation activation : kActivations) {
        for (const bool bias : {false, true}) {
          for (const Residual residual : {Residual::kNone, Residual::kApart, Residual::kInPlace}) {
            for (const float scale : {1.0F, 0.5F}) {
              if (residual == Residual::kNone && scale != 1.0F) continue;
              if (few_cases() && ++number % 7 != 0) continue;
              // Of large shapes some.
              if (shape.rows > 33 && scale == 1.0F && residual == Residual::kApart) continue;
              if (shape.rows > 33 && (small_sizes() || !kOnCuda) &&
                  ((activation == Activation::kGelu) != bias || layout.pad == 24))
                continue;
              const std::vector<Case> cases = {
                  {shape.rows, shape.out, shape.in, activation, bias, residual, scale, layout}};
#if defined(MMREC_TEST_CUDA)
              if (shape.rows > 33 && small_sizes()) {
                check<BFloat16, BFloat16>(cases);
                check<Float16, float>(cases);
                continue;
              }
#endif
              check_all_types(cases);
            }
          }
        }
      }
    }
  }
#if defined(MMREC_TEST_CUDA)
  expect_algos({kMatvec, kFew, kMany, kLibrary});
#endif
}

TEST_F(LinearTest, SeveralJobsInOneCall) {
  std::vector<Case> cases;
  for (std::int64_t i = 0; i < 11; ++i) {  // more than one launch takes
    cases.push_back({1 + i % 8, 5 + 13 * i, 32 + 8 * i, static_cast<Activation>(i % 3), i % 2 == 0});
  }
  check_all_types(cases);
  cases.push_back({40, 24, 56, Activation::kGelu, true});
  cases.push_back({9, 100, 32, Activation::kNone, true, Residual::kInPlace});
  cases.push_back({20, 33, 40, Activation::kRelu});
  check_all_types(cases);
  for (std::int64_t i = 0; i < (kOnCuda ? 6 : 2); ++i) {
    cases.push_back({129 + 100 * i, 24 + 136 * i, 32 + 64 * i, static_cast<Activation>(i % 3), i % 2 == 1});
  }
  check_all_types(cases);
  if (!kOnCuda) {
    for (std::size_t i = 0; i < cases.size(); ++i) cases[i].format = kHostFormats[i % std::size(kHostFormats)];
    check<float, float>(cases);
  }
#if defined(MMREC_TEST_CUDA)
  expect_algos({kMatvec, kFew, kMany, kLibrary});
#endif
}

TEST_F(LinearTest, EmptyJobsAreLeftOut) {
  check_all_types({{0, 8, 8}, {3, 16, 24}, {2, 0, 8}});
  run<float, float>(on(), {});
}

TEST_F(LinearTest, BitsOfFewRowsDoNotDependOnTheirNumber) {
  for (const std::int64_t in : {1, 7, 31, 40, 257, 1000, 1024, 2304}) {
    if (kOnCuda && (in < 40 || in == 1000)) continue;
    for_products([&]<class A, class Y>(A, Y, WeightFormat format) {
      const Case c{8, 29, in, Activation::kGelu, true, Residual::kApart, 0.5F};
      if (!std::is_same_v<Y, Float16>) expect_rows_alone<A, Y>(c, {1, 2, 3, 4, 5}, format);
    });
  }
}

TEST_F(LinearTest, BitsDoNotDependOnAlignment) {
  for_products([&]<class A, class Y>(A, Y, WeightFormat format) {
    for (const std::int64_t in : {64, 1024}) {
      Problem<A, Y> aligned(on(), {3, 20, in, Activation::kNone, true, Residual::kNone, 1.0F, kPacked}, 1, format);
      Problem<A, Y> shifted(on(), {3, 20, in, Activation::kNone, true, Residual::kNone, 1.0F, kUnaligned}, 1, format);
      on_every([&](Backend& on) {
        for (Problem<A, Y>* problem : {&aligned, &shifted}) run<A, Y>(on, {problem->job()});
        EXPECT_TRUE(same_bits(aligned.result(), shifted.result())) << in;
      });
    }
  });
}

// Row 1 of x has a NaN and an infinity: no other row may see them, whatever lanes or tile its products share.
TEST_F(LinearTest, NonFiniteRowsStayAlone) {
  for_weights([&]<class A>(A, WeightFormat format) {
    for (const std::int64_t rows : {3, 128}) {
      if (kOnCuda && rows != 3) continue;
      Problem<A, float> problem(on(), {rows, 20, 64}, 1, format);
      std::vector<A> x = problem.x();
      x[64 + 5] = from_float<A>(NAN);
      x[64 + 50] = from_float<A>(INFINITY);
      problem.set_x(on(), x);
      on_every([&](Backend& on) {
        problem.reset();
        run<A, float>(on, {problem.job()});
        const std::vector<float> got = problem.result();
        for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isfinite(got[i]), i / 20 != 1) << i;
      });
    }
  });
}

// A CPU's whole tiles, and a GPU's products of parts of fp32.
TEST_F(LinearTest, NumbersOfAnyMagnitudeAreAsWideAsFp32) {
  for (const WeightFormat format : kHostFormats) {
    if (kOnCuda && format.code != DType::kF32) continue;
    for (const float scale : {1e37F, 1.0F, 1e-20F, 1e-30F}) {
      const Case c{.rows = kOnCuda ? 130 : kRowTile, .out = 40, .in = 96, .parts = true};
      Problem<float, float> problem(on(), c, 1, format);
      std::vector<float> x = random_floats(c.rows * c.in, 11);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] *= i % 3 == 0 ? scale : scale * 1e-4F;
      problem.set_x(on(), x);
      on_every([&](Backend& on) {
        problem.reset();
        run<float, float>(on, {problem.job()});
        // Parts of x below the least normal number of fp32 may be taken for 0.
        problem.expect_within([](double, double size) { return 1e-6 * size + 1e-36; });
      });
    }
  }
}

#if !defined(MMREC_TEST_CUDA)
// ---- a CPU: whole tiles of kRowTile rows by the library, all other rows by the row kernel ----

TEST_F(LinearTest, MatchesFloat64WithBiasActivationAndResidual) {
  int number = 0;
  for (Case c :
       {Case{1, 1, 1},  {2, 3, 7},     {3, 7, 31},     {1, 31, 48},    {7, 48, 384},  {127, 31, 48}, {128, 48, 31},
        {129, 25, 384}, {300, 31, 48}, {1, 384, 384},  {300, 64, 384}, {5, 31, 1000}, {26, 7, 4096}, {1, 48, 4096},
        {130, 1, 7},    {49, 1, 1000}, {128, 600, 48}, {14, 29, 16},   {14, 12, 3},   {14, 2, 1},    {3, 9, 4200}}) {
    if (few_cases() && c.rows * c.out * c.in > 500'000) continue;
    for (const Activation activation : kActivations) {
      c.activation = activation;
      c.bias = ++number % 2 == 0;
      c.residual = number % 5 < 3 ? Residual::kApart : Residual::kNone;
      c.residual_scale = 0.5F;
      check_all_types({c});
    }
  }
}

/// While it lives, signals interrupt the thread that made it. Their handler writes over the stack below its frame.
class Interruptions {
 public:
  Interruptions() {
    here_ = address_of_a_frame();
    count_ = elsewhere_ = 0;
    struct sigaction action = {};
    action.sa_handler = [](int) {
      constexpr std::uintptr_t kMiB = std::uintptr_t{1} << 20;
      ++count_;
      if (here_ - address_of_a_frame() < kMiB) {
        write_below();
      } else {
        ++elsewhere_;
      }
    };
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &before_[i]);
    interrupts_ = std::jthread([thread = pthread_self()](const std::stop_token& stop) {
      for (std::size_t i = 0; !stop.stop_requested(); ++i) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        pthread_kill(thread, kSignals[i % kSignals.size()]);
      }
    });
  }
  ~Interruptions() {
    interrupts_ = {};  // joined before the handler goes
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  Interruptions(const Interruptions&) = delete;
  Interruptions& operator=(const Interruptions&) = delete;
  int count() const { return count_; }
  /// Of these, that came where the stack pointer was not in the stack.
  int elsewhere() const { return elsewhere_; }

 private:
  [[gnu::noinline]] static void write_below() {
    std::array<volatile std::byte, std::size_t{32} << 10> below;
    for (auto& byte : below) byte = std::byte{0xA5};
  }
  static std::uintptr_t address_of_a_frame() { return reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0)); }

  static constexpr std::array kSignals = {SIGUSR1, SIGPROF};
  static inline std::atomic<int> count_, elsewhere_;
  static inline std::uintptr_t here_;
  std::array<struct sigaction, kSignals.size()> before_ = {};
  std::jthread interrupts_;
};

// A handler of the host writes below the stack pointer, which the matrix library sets to its own buffers.
TEST_F(LinearTest, SignalsDuringProductsFindTheStack) {
  for (const WeightFormat format : kHostFormats) {
    for (const std::int64_t in : {384, 4096}) {
      const auto result = [&] {
        Cpu cpu(1);
        Problem<float, float> problem(cpu, {kRowTile, 168, in}, 1, format);
        for (int i = 0; i < 4; ++i) run<float, float>(cpu, {problem.job()});
        return problem.result();
      };
      const std::vector<float> expected = result();
      const Interruptions interruptions;
      while (interruptions.count() < 100) ASSERT_TRUE(same_bits(result(), expected));
      ASSERT_EQ(interruptions.elsewhere(), 0) << name_of(format) << ", " << in << " inputs";
    }
  }
}

TEST_F(LinearTest, TilesMayRoundTheirInputs) {
  const std::int64_t in = 96, out = 168, rows = kRowTile + 3;
  for (const WeightFormat format : kHostFormats) {
    const auto result = [&](int threads, bool rounds) {
      Cpu cpu(threads, rounds);
      Problem<float, float> problem(cpu, {rows, out, in}, 1, format);
      run<float, float>(cpu, {problem.job()});
      return problem.result();
    };
    const std::vector<float> y = result(1, true), exact = result(1, false);
    EXPECT_TRUE(same_bits(result(2, true), y));
    Problem<float, float> rounded(on(), {rows, out, in}, 1, format);
    std::vector<float> x = rounded.x();
    for (float& v : x) v = to_float(from_float<BFloat16>(v));
    rounded.set_x(on(), x);
    const bool within = first_failure(kRowTile * out, [&](std::int64_t i) {
                          const auto [want, size] = rounded.expected(i / out, i % out);
                          const double bound = format.group == 0 ? 1e-6 : 0x1p-8;  // weights are rounded too
                          return std::abs(static_cast<double>(y[static_cast<std::size_t>(i)]) - want) <= bound * size;
                        }) == kRowTile * out;
    // Without matrix instructions, and with other weights, nothing is rounded.
    const bool rounds = format.code != DType::kF32 && format.code != DType::kF16;
    EXPECT_TRUE((rounds && within) || same_bits(y, exact)) << name_of(format);
    for (std::size_t i = static_cast<std::size_t>(kRowTile * out); i < y.size(); ++i) EXPECT_EQ(y[i], exact[i]) << i;
  }
}

// Rows in no whole tile have the bits of a row alone; cuts between whole tiles change nothing.
TEST_F(LinearTest, BitsDependOnNoCutsOutsideTiles) {
  const std::int64_t n = 300, out = 283;  // two whole tiles and 44 rows
  for (const WeightFormat format : kHostFormats) {
    for (const std::int64_t in : {31, 384, 2000}) {
      Problem<float, float> problem(on(), {n, out, in, Activation::kGelu, true}, 1, format);
      on_every([&](Backend& on) {
        const auto in_parts_of = [&](std::int64_t count, bool force_row_kernel = false) {
          Linear<Host> job = problem.job();
          job.force_row_kernel = force_row_kernel;
          problem.reset();
          for (std::int64_t first = 0; first < n; first += count) {
            Linear<Host> part = job;
            part.x = job.x.middle_rows(first, std::min(count, n - first));
            part.y = job.y.middle_rows(first, part.x.rows);
            linear(on, {&part, 1});
          }
          return problem.result();
        };
        const std::vector<float> alone = in_parts_of(1), whole = in_parts_of(n);
        for (const std::int64_t count : {2, 3, 5, 7, 13, 127}) {
          ASSERT_TRUE(same_bits(in_parts_of(count), alone)) << count << " rows, in " << in;
        }
        ASSERT_TRUE(same_bits(in_parts_of(n, true), alone)) << "by the row kernel, in " << in;
        for (const std::int64_t count : {kRowTile, 2 * kRowTile}) {
          ASSERT_TRUE(same_bits(in_parts_of(count), whole)) << count << " rows, in " << in;
        }
      });
    }
  }
}

TEST_F(LinearTest, AStackHasTheBitsOfItsParts) {
  const std::int64_t in = 200;
  const std::vector<StackedRows> stack = {{{DType::kI4, 64}, 5}, {DType::kI8, 40}, {{DType::kI4, 128}, 3}};
  std::vector<std::byte> bytes;
  for (const StackedRows& part : stack) {
    const Stored stored(widened(random_floats(part.rows * in, 5)), part.rows, in, part.format);
    bytes.insert(bytes.end(), stored.bytes.begin(), stored.bytes.end());
  }
  WeightView<Host> weight{bytes.data(), DType::kI8, 48, in};
  weight.stack = stack;
  for (const std::int64_t n : {std::int64_t{1}, std::int64_t{3}, kRowTile + 2}) {
    const std::vector<float> x = random_floats(n * in, 1), bias = random_floats(48, 2),
                             residual = random_floats(n * 48, 3);
    on_every([&](Backend& on) {
      const auto run_rows = [&](std::initializer_list<std::pair<std::int64_t, std::int64_t>> cuts) {
        std::vector<float> y = residual;
        const MatrixView<float, Host> to{y.data(), n, 48, 48};
        const MatrixView<const float, Host> from{x.data(), n, in, in}, before{residual.data(), n, 48, 48};
        for (const auto& [first, count] : cuts) {
          const Linear<Host> job{.x = from,
                                 .weight = weight.middle_rows(first, count),
                                 .bias = bias.data() + first,
                                 .y = to.middle_cols(first, count),
                                 .residual = before.middle_cols(first, count)};
          EXPECT_EQ(job.weight.stack.empty(), count <= 40);
          linear(on, {&job, 1});
        }
        return y;
      };
      const std::vector<float> by_parts = run_rows({{0, 5}, {5, 40}, {45, 3}});
      EXPECT_TRUE(same_bits(run_rows({{0, 48}}), by_parts)) << n << " rows";
      EXPECT_TRUE(same_bits(run_rows({{0, 5}, {5, 43}}), by_parts)) << n << " rows, without the first part";
      if (n < kRowTile) {
        EXPECT_TRUE(same_bits(run_rows({{0, 2}, {2, 3}, {5, 30}, {35, 10}, {45, 3}}), by_parts)) << n << " rows, cut";
      }
    });
  }
}

#else
// ---- a GPU: the algorithms ------------------------------------------------------------------------------------------

TEST_F(LinearTest, EveryAlgoIsTakenByItsShapes) {
  const bool sm90 = on().compute_capability() == 90;
  for (const std::int64_t rows : {1, 8, 9, 128, 129}) {
    const Case c{rows, 72, 136, Activation::kGelu, true};
    const LinearAlgo own = rows <= 8 ? kMatvec : !sm90 ? kLibrary : rows <= kFewRows ? kFew : kMany;
    check_algo<BFloat16, BFloat16>(own, c);
    check_algo<Float16, float>(own, c);
    const LinearAlgo any = rows <= 8 ? kMatvec : kLibrary;
    check_algo<float, float>(any, c);
    Case unaligned = c;
    unaligned.layout = kUnaligned;
    check_algo<BFloat16, BFloat16>(any, unaligned);
  }
}

constexpr WeightFormat kCompactFormats[] = {
    DType::kI8, {DType::kI8, 128}, {DType::kI4, 64}, {DType::kI4, 128}, DType::kF8};

// By algorithms that others are faster than.
TEST_F(LinearTest, EveryAlgoCanBeForced) {
  const Case few{8, 72, 136, Activation::kGelu, true, Residual::kApart, 0.5F};
  Case more = few;
  more.rows = 70;
  check_algo<float, float>(kLibrary, few, false);
  check_algo<BFloat16, BFloat16>(kLibrary, few, false);
  if (on().compute_capability() != 90) return;
  check_algo<BFloat16, BFloat16>(kFew, few, false);
  check_algo<BFloat16, float>(kMany, few, false);
  check_algo<BFloat16, BFloat16>(kMany, more, false);
  check_algo<Float16, Float16>(kLibrary, more, false);
  const Linear<Device> nothing{.x = {nullptr, 1, 8}, .weight = {nullptr, DType::kF32, 8, 8}};
  EXPECT_THROW(linear(on(), nothing, kFew), std::invalid_argument);
}

TEST_F(LinearTest, FewRowsOfAnySize) {
  for (const std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8}) {
    for (const std::int64_t out : {1, 7, 48, 257}) {
      for (const std::int64_t in : {1, 7, 48, 257, 1032}) {
        if (small_sizes() && (rows + out + in) % 3 != 0) continue;
        check_all_types({{rows, out, in, Activation::kGelu, true, Residual::kApart, 0.5F}});
      }
    }
  }
  expect_algos({kMatvec});
}

TEST_F(LinearTest, ManyRowsOfAnySize) {
  for (const std::int64_t rows : {9, 31, 128, 300}) {
    for (const std::int64_t out : {1, 7, 48, 257}) {
      for (const std::int64_t in : {1, 7, 48, 257}) {
        if (small_sizes() && rows > 31 && (out != 48 || in != 257)) continue;
        check_all_types({{rows, out, in, Activation::kGelu, true, Residual::kApart, 0.5F}});
        check_all_types({{rows, out, in, Activation::kNone, true, Residual::kInPlace}});
      }
    }
  }
  small_sizes() ? expect_algos({kFew, kLibrary}) : expect_algos({kFew, kMany, kLibrary});
}

TEST_F(LinearTest, ManyWholeTiles) {
  // Enough of them for the widest tiles, on a device of any size.
  const std::int64_t rows = kEmulated ? 512 : 2048;
  const std::int64_t out = kEmulated ? 256 : 1536;
  check<BFloat16, BFloat16>({{rows, out, 400, Activation::kGelu, true}});
  check<BFloat16, BFloat16>({{rows, out, 400, Activation::kNone, true, Residual::kApart, 0.5F}});
  check<Float16, Float16>({{rows - 9, out - 6, 400, Activation::kRelu, true}});
  check<Float16, float>({{rows, out, 400, Activation::kGelu, true, Residual::kInPlace}});
  check<BFloat16, float>({{rows - 9, out - 6, 400, Activation::kNone, false, Residual::kApart, 0.5F}});
  expect_algos({kMany});
}

TEST_F(LinearTest, SharesOfEveryLength) {
  // `in` on either side of what a warp keeps in flight, and longer.
  for (const std::int64_t in : {8, 32, 264, 512, 520, 1024, 1056, 2048, 2056, 4096, 4104}) {
    check_all_types({{2, 9, in, Activation::kNone, true}});
    for (const std::int64_t rows : {1, 4, 8}) check<float, float>({{rows, 9, in}});
  }
  expect_algos({kMatvec});
}

// Rows so few and sums so long that several blocks share a tile's.
TEST_F(LinearTest, SumsInSlices) {
  for (const std::int64_t rows : {9, 33, 70}) {
    for (const std::int64_t in : {520, 1096}) {
      if (few_cases() && rows != 33) continue;
      check<BFloat16, BFloat16>({{rows, 200, in, Activation::kGelu, true}});
      check<BFloat16, float>({{rows, 136, in, Activation::kNone, true, Residual::kInPlace}});
      check<Float16, Float16>({{rows, 72, in, Activation::kRelu, false, Residual::kApart, 0.5F}});
    }
  }
  expect_algos({kFew});
}

// A quantised matrix in the place of its bf16 numbers: chunks and groups of any number, and rows of other numbers than
// the first ones'.
TEST_F(LinearTest, FewRowsOfCompactNumbers) {
  if (on().compute_capability() != 90) GTEST_SKIP() << "compute capability 9.0";
  for (const WeightFormat format : kCompactFormats) {
    const bool is_half = format.code == DType::kI4;
    for (Case c : {Case{9, 200, 64}, {33, 136, 2112}, {64, 192, 576}, {20, 72, 640}, {50, 4104, 256}}) {
      if (small_sizes() && c.out > 200) continue;
      c.compact = format;
      c.own_rows = c.out > 136 && !is_half ? 128 : c.out;
      check_compact(kCompact, c);
    }
  }
}

// Rows of x rounded to fp8 by a quantised matrix, in whole tiles and others, and by as many rows at a time as fit.
TEST_F(LinearTest, ManyRowsOfFp8) {
  if (on().compute_capability() != 90) GTEST_SKIP() << "compute capability 9.0";
  for (Case c : {Case{129, 200, 128}, {300, 72, 2304}, {700, 264, 640}, {2048, 1536, 4096}, {9000, 40, 8192}}) {
    if (small_sizes() && c.rows > 700) continue;
    c.compact = DType::kF8;
    c.own_rows = c.out;
    check_compact(LinearAlgo::kFp8, c);
  }
  Case c{400, 72, 640, Activation::kNone, true};
  c.compact = DType::kF8;
  c.own_rows = c.out;
  expect_rows_alone<BFloat16, float>(c, {129, 200});

  Problem<BFloat16, float> problem(on(), c);
  std::vector<BFloat16> x = problem.x();
  for (const auto& [row, number] : {std::pair(1, NAN), {2, INFINITY}}) x[row * 640 + 70] = from_float<BFloat16>(number);
  std::fill_n(x.begin() + 3 * 640, 640, BFloat16{0});
  problem.set_x(on(), x);
  linear(on(), problem.job(), LinearAlgo::kFp8);
  const std::vector<float> got = problem.result();
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isfinite(got[i]), i / 72 != 1 && i / 72 != 2) << i;
}

TEST_F(LinearTest, BitsOfCompactNumbersDoNotDependOnOtherRows) {
  if (on().compute_capability() != 90) GTEST_SKIP() << "compute capability 9.0";
  for (const WeightFormat format : kCompactFormats) {
    Case c{64, 72, 640, Activation::kNone, true};
    c.compact = format;
    c.own_rows = c.out;
    expect_rows_alone<BFloat16, float>(c, {9, 20, 40});
  }
}

TEST_F(LinearTest, LargeShapes) {
  if (small_sizes()) GTEST_SKIP() << "large sizes";
  for (const std::int64_t rows : {1, 8, 64, 1024}) {
    check<BFloat16, BFloat16>({{rows, 4096, 1024, Activation::kGelu, true}});
    check<BFloat16, float>({{rows, 1024, 4096, Activation::kNone, true, Residual::kInPlace}});
    check<float, float>({{rows, 2048, 512, Activation::kGelu, true, Residual::kApart}});
  }
  check<BFloat16, float>({{2, 128256, 256}});
  expect_algos({kMatvec, kFew, kMany, kLibrary});
  // Products of the library that take more scratch than there is: in chunks of rows.
  Problem<BFloat16, BFloat16> chunks(on(), {1500, 16384, 32, Activation::kGelu, true});
  linear(on(), chunks.job(), kLibrary);
  chunks.expect_correct();
}

TEST_F(LinearTest, BitsOfManyRowsDoNotDependOnTheirNumber) {
  // Of up to 128 rows, and of more.
  const auto check_groups = [&](std::int64_t rows, std::int64_t size) {
    const Case c{rows, 256, 1024, Activation::kGelu, true};
    expect_rows_alone<float, float>(c, {size});
    expect_rows_alone<BFloat16, BFloat16>(c, {size});
    expect_rows_alone<BFloat16, float>({rows, 256, 1024, Activation::kNone, true, Residual::kApart}, {size});
  };
  check_groups(70, 31);
  if (small_sizes()) return;
  check_groups(128, 9);
  check_groups(128, 127);
  check_groups(300, 129);
  check_groups(1300, 640);
}

// Of a Cuda that is batch-invariant. Rows of steps in 16 bits take two algorithms, whose sums have one order; fp32 goes
// by parts, and everything else in groups of 8 rows.
TEST_F(LinearTest, BitsDependOnNoNumberOfRowsIfBatchInvariant) {
  on().set_batch_invariant(true);
  const auto sizes =
      small_sizes() ? std::vector<std::int64_t>{1, 9, 129} : std::vector<std::int64_t>{1, 8, 9, 33, 64, 100, 129};
  const auto check_shape = [&](std::int64_t rows, std::int64_t out, std::int64_t in) {
    Case c{rows, out, in, Activation::kGelu, true}, sum{rows, out, in, Activation::kNone, true, Residual::kApart};
    for (const bool of_steps : {true, false}) {
      c.of_steps = sum.of_steps = of_steps;
      expect_rows_alone<BFloat16, BFloat16>(c, sizes);
      expect_rows_alone<BFloat16, float>(sum, sizes);
      if (small_sizes() && !of_steps) continue;
      expect_rows_alone<Float16, Float16>(c, sizes);
      expect_rows_alone<float, float>(sum, sizes);
      Case parts = c;
      parts.parts = true;
      expect_rows_alone<float, float>(parts, sizes);
    }
  };
  check_shape(140, 72, 136);
  check_shape(140, 20, 61);  // which the copy engine cannot read
  if (!small_sizes()) {
    check_shape(300, 256, 4096);  // k is cut
    check_shape(700, 3072, 1024);
    check_shape(1300, 1000, 512);
  }
  on().set_batch_invariant(false);
}

// Kernels start while those before them drain, jobs of many rows go over two streams, and the vector goes to and fro
// between buffers: reading early, or from a cache, would show. Enqueued at once and replayed as a graph, the chain has
// the bits that it has when every call is waited for.
TEST_F(LinearTest, AChainReadsWhatTheCallBeforeWrote) {
  const std::int64_t dim = kEmulated ? 64 : 1024;
  const int links = small_sizes() ? 3 : 100;
  const Buffer<float> norm = upload(on(), std::vector<float>(static_cast<std::size_t>(dim), 1.0F));
  const Weights up(on(), 2 * dim, dim, DType::kBF16, 1, 1.0 / std::sqrt(dim));
  const Weights down(on(), dim, 2 * dim, DType::kBF16, 2, 1.0 / std::sqrt(dim));
  for (const std::int64_t rows : {1, 8, 20}) {
    Matrix<float> x = random_matrix<float>(on(), rows, dim, kPacked, 3);
    Matrix<BFloat16> u(on(), rows, dim), hidden(on(), rows, 2 * dim);
    const auto link = [&](const auto& pause) {
      rmsnorm(on(), x.read(), norm.data(), u.view());
      pause();
      std::vector<Linear<Device, BFloat16, BFloat16>> halves;
      for (const std::int64_t half : {0, 1}) {
        halves.push_back({.x = u.view(),
                          .weight = up.view().middle_rows(half * dim, dim),
                          .y = hidden.view().middle_cols(half * dim, dim),
                          .activation = half == 0 ? Activation::kGelu : Activation::kNone});
      }
      run(on(), halves);
      pause();
      run<BFloat16, float>(on(), {{.x = hidden.view(), .weight = down.view(), .y = x.view(), .residual = x.view()}});
      pause();
    };
    for (int i = 0; i < links; ++i) link([&] { on().synchronize(); });
    const std::vector<float> waited = x.download();
    for (const float value : waited) ASSERT_TRUE(std::isfinite(value));
    x.reset();
    for (int i = 0; i < links; ++i) link([] {});
    EXPECT_TRUE(same_bits(x.download(), waited)) << rows << " rows, enqueued at once";
    const Graph graph(on(), [&] {
      for (int i = 0; i < links; ++i) link([] {});
    });
    x.reset();
    graph.launch(on());
    EXPECT_TRUE(same_bits(x.download(), waited)) << rows << " rows, as a graph";
  }
}

// ---- fp32 from parts of bf16: what holds for plain fp32 ----

Case of_parts(std::int64_t rows, std::int64_t out, std::int64_t in, Activation activation = Activation::kNone,
              bool bias = false, Residual residual = Residual::kNone, Layout layout = kPacked) {
  return {rows, out, in, activation, bias, residual, residual == Residual::kApart ? 0.5F : 1.0F, layout, 0, true};
}

TEST_F(LinearTest, PartsOfFp32InAnySize) {
  for (const std::int64_t rows : {129, 300}) {
    for (const std::int64_t out : {1, 48, 257}) {
      for (const std::int64_t in : {8, 200}) {
        check<float, float>({of_parts(rows, out, in, Activation::kGelu, true, Residual::kApart)});
        check<float, float>({of_parts(rows, out, in, Activation::kNone, true, Residual::kInPlace, kUnaligned)});
      }
    }
  }
  if (!small_sizes()) {
    check<float, float>({of_parts(4096, 512, 2048, Activation::kNone, true, Residual::kInPlace)});
    check<float, float>({of_parts(2500, 256, 8192)});  // in several turns
  }
  expect_algos({kOfParts});
}

// Jobs with one x and with others, more than a launch takes, beside jobs that have no parts.
TEST_F(LinearTest, PartsOfSeveralJobs) {
  std::vector<Case> cases;
  for (std::int64_t i = 0; i < 6; ++i) cases.push_back(of_parts(129 + 50 * (i / 2), 24 + 8 * i, 64 + 32 * (i % 3)));
  cases.push_back({200, 24, 64});
  cases.push_back(of_parts(200, 24, 60));  // which the copy engine cannot read
  check<float, float>(cases);
  expect_algos({kOfParts, kLibrary});
  Problem<float, float> problem(on(), of_parts(130, 96, 72, Activation::kGelu, true));
  run<float, float>(on(), {problem.job()});
  const std::vector<float> whole = problem.result();
  fill_zero(on(), problem.job().y);
  std::vector<Linear<Device>> jobs;
  for (std::int64_t i = 0; i < 6; ++i) {
    jobs.push_back(problem.job());
    jobs.back().weight = jobs.back().weight.middle_rows(16 * i, 16);
    jobs.back().bias += 16 * i;
    jobs.back().y = jobs.back().y.middle_cols(16 * i, 16);
  }
  run(on(), jobs);
  EXPECT_TRUE(on().compute_capability() != 90 || same_bits(problem.result(), whole)) << "by rows of the weights";
}

TEST_F(LinearTest, BitsOfPartsDoNotDependOnTheNumberOfRows) {
  expect_rows_alone<float, float>(of_parts(390, 72, 136, Activation::kGelu, true, Residual::kApart), {130});
  if (small_sizes()) return;
  expect_rows_alone<float, float>(of_parts(8192, 256, 1024), {2048});
  expect_rows_alone<float, float>(of_parts(4096, 256, 4096), {300});
}

// docs/numerics.md has the table that this prints. Plain: one multiply-add after another.
TEST_F(LinearTest, PartsErrAsLittleAsMultiplyAdds) {
  if (on().compute_capability() != 90) GTEST_SKIP() << "products of parts are for compute capability 9.0";
  for (const std::int64_t in : {64, 512, 2048}) {
    const std::int64_t rows = 130, out = kEmulated ? 16 : 512;
    Problem<float, float> problem(on(), of_parts(rows, out, in));
    linear(on(), problem.job(), kOfParts);
    const std::vector<float> got = problem.result();
    double most[2] = {}, squares[2] = {};
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t o = 0; o < out; ++o) {
        const auto [want, size] = problem.expected(r, o);
        const double sums[] = {static_cast<double>(got[static_cast<std::size_t>(r * out + o)]), problem.plain(r, o)};
        for (int i = 0; i < 2; ++i) {
          const double error = std::abs(sums[i] - want) / size;
          most[i] = std::max(most[i], error);
          squares[i] += error * error;
        }
      }
    }
    const auto rms = [&](int i) { return std::sqrt(squares[i] / static_cast<double>(rows * out)); };
    std::printf("%5d inputs: parts %.1e, rms %.1e; plain %.1e, rms %.1e\n", static_cast<int>(in), most[0], rms(0),
                most[1], rms(1));
    // Tensor cores may truncate each sum of 16 products: what that adds grows with their number, and has a sign.
    const double share = 1.5 + static_cast<double>(in) / 512.0;
    EXPECT_LE(most[0], share * most[1]);
    EXPECT_LE(rms(0), share * rms(1));
  }
}

// ---- the product of sm_90a that fused ops are built on, stored as it is ----

class GemmSm90 : public OnSm90<OpTest> {
 protected:
  /// On all outputs, or on `samples` of them. Sums in fp32 on tensor cores that may truncate: a few units in the last
  /// place of the largest partial sum.
  template <class A, class Y>
  void check(std::int64_t rows, std::int64_t columns, std::int64_t depth, std::int64_t samples = 0,
             GemmTile tile = GemmTile::kAuto) {
    Problem<A, Y> problem(on(), {.rows = rows, .out = columns, .in = depth, .layout = {.pad = 8}, .y_pad = 3});
    const Linear<Device, A, Y> job = problem.job();
    EXPECT_TRUE(gemm_sm90_supported(on(), job.x, job.weight));
    linear_many_rows_sm90(on(), std::span(&job, 1), tile);
    problem.expect_within([](double, double size) { return 2e-6 * size; }, samples);
  }
};

TEST_F(GemmSm90, RowsOfOneTileAndOfMore) {
  check<BFloat16, float>(1, 1, 8);
  check<BFloat16, float>(64, 256, 64);
  check<BFloat16, float>(128, 257, 72);
  check<Float16, float>(37, 1500, 200);  // several tiles a block
  check<BFloat16, float>(129, 255, 64);  // of the clusters that share W, the second block has one row
  check<BFloat16, float>(256, 256, 320);
  check<BFloat16, float>(257, 300, 1000);  // the last block has none
  check<Float16, float>(200, 700, 456);
  check<BFloat16, float>(2500, 300, 24);  // groups of tiles
  check<BFloat16, BFloat16>(130, 270, 128);
  check<Float16, Float16>(130, 270, 128);
}

TEST_F(GemmSm90, EveryTile) {
  for (const GemmTile tile : {GemmTile::kWide, GemmTile::kSquare, GemmTile::kSlim}) {
    SCOPED_TRACE(static_cast<int>(tile));
    check<BFloat16, float>(1, 1, 8, 0, tile);
    check<BFloat16, BFloat16>(257, 300, 200, 0, tile);
    check<Float16, float>(130, 520, 456, 0, tile);
  }
}

TEST_F(GemmSm90, TilesFillTheDevice) {
  const auto tile_of = [&](std::int64_t rows, std::int64_t columns) {
    const Linear<Device, BFloat16> job{.x = {nullptr, rows, 1024}, .weight = {nullptr, DType::kBF16, columns, 1024}};
    return choose_tile(on(), std::span(&job, 1));
  };
  EXPECT_EQ(tile_of(256 * on().processors(), 1024), GemmTile::kWide);
  EXPECT_EQ(tile_of(128, 64 * on().processors()), GemmTile::kSlim);
  EXPECT_EQ(tile_of(128, 128 * on().processors()), GemmTile::kSquare);
}

TEST_F(GemmSm90, LargeSizes) {
  if (small_sizes()) GTEST_SKIP() << "large sizes";
  constexpr std::int64_t kSamples = 50'000;
  check<BFloat16, float>(1000, 1024, 4096, kSamples);
  check<BFloat16, float>(4096, 8192, 1024, kSamples);
  check<Float16, float>(4097, 32001, 520, kSamples);
  check<BFloat16, BFloat16>(16384, 2048, 2048, kSamples);
}

TEST_F(GemmSm90, WritesRowsWhereAListSays) {
  for (const Case& c : {Case{70, 136, 200}, Case{300, 520, 264}, Case{131, 50, 64}}) {
    SCOPED_TRACE(c);
    Problem<BFloat16, float> problem(on(), c);
    Linear<Device, BFloat16, float> job = problem.job();
    linear(on(), job, LinearAlgo::kManyRows);
    const std::vector<float> want = problem.result();
    // The other way round, a row of another length apart.
    const std::int64_t apart = (c.out + 3) / 4 * 4 + 8;
    Matrix<float> rows(on(), c.rows, apart);
    std::vector<float*> list;
    for (std::int64_t r = c.rows; r-- > 0;) list.push_back(rows.view().row(r));
    const DeviceBuffer<float*> on_device = upload(on(), list);
    job.y.data = nullptr;
    job.y_rows = on_device.data();
    EXPECT_EQ(linear_takes_rows(on(), job), c.rows > kFewRows);
    linear(on(), job, LinearAlgo::kManyRows);
    const std::vector<float> got = rows.download();
    for (std::int64_t r = 0; r < c.rows; ++r) {
      const auto from = got.begin() + (c.rows - 1 - r) * apart;
      const auto expected = want.begin() + r * c.out;
      ASSERT_TRUE(std::equal(from, from + c.out, expected)) << r;
    }
  }
}

TEST_F(GemmSm90, WhatTheCopyEngineCannotRead) {
  const auto data = unwritten<BFloat16>(on(), 4096);
  const auto supported = [&](std::int64_t depth, std::int64_t stride, std::int64_t offset) {
    return gemm_sm90_supported(on(), MatrixView<const BFloat16, Device>(data.data() + offset, 8, depth, stride),
                               {data.data(), DType::kBF16, 8, depth});
  };
  EXPECT_TRUE(supported(64, 72, 8));
  EXPECT_FALSE(supported(60, 64, 0));  // W's rows are not multiples of 16 bytes
  EXPECT_FALSE(supported(64, 68, 0));
  EXPECT_FALSE(supported(64, 64, 4));
}

#endif

// ---- cases ----------------------------------------------------------------------------------------------------------

template <class A, class Y, class Run>
OpCase& add_product(Backend& on, OpCases& cases, const std::string& op, const Case& c, WeightFormat format,
                    const Run& run) {
  const std::string shape = join(c.rows, " x ", c.out, " x ", c.in);
  return add_case(cases, op, shape, Limit::kProduct, product_flops(c.rows, c.out, c.in), [=, &on] {
    const auto problem = std::make_shared<Problem<A, Y>>(on, c, 1, format);
    const auto check = [=] { problem->expect_correct(c.rows * c.out > 100'000 ? 20'000 : 0); };
    return PreparedOp{[=, &on] { run(on, problem->job()); }, check};
  });
}

#if defined(MMREC_TEST_CUDA)

/// The matrices that a decoded token of a whole model goes through, one dependent product after another in a graph. Its
/// bits are those of the products one by one.
class MatvecChain {
 public:
  struct Size {
    std::int64_t dim, layers, vocab, rows;
  };
  MatvecChain(Backend& on, const Size& s, DType format) {
    const std::int64_t d = s.dim;
    const auto add = [&](std::int64_t out, std::int64_t in) {
      weights_.emplace_back(on, out, in, format, weights_.size(), 1.0 / std::sqrt(static_cast<double>(in)));
    };
    for (std::int64_t layer = 0; layer < s.layers; ++layer) {
      for (const auto& [out, in] : {std::pair{4 * d, d}, {2 * d, d}, {d, d}, {d, d}, {4 * d, d}, {d, 4 * d}})
        add(out, in);
    }
    add(s.vocab, d);
  }
  template <class A>
  static PreparedOp prepare(Backend& on, const Size& s) {
    const auto chain = std::make_shared<MatvecChain>(on, s, kDTypeOf<A>);
    const std::int64_t widest = std::max(s.vocab, 4 * s.dim);
    const auto x = std::make_shared<std::vector<Matrix<A>>>();
    for (const std::uint64_t stream : {1, 2}) x->push_back(random_matrix<A>(on, s.rows, widest, kPacked, stream));
    const auto run_all = [=, &on](bool waits) {
      for (std::size_t i = 0; i < chain->weights_.size(); ++i) {
        const Weights& w = chain->weights_[i];
        run<A, A>(on, {{.x = {(*x)[i % 2].data(), s.rows, w.cols()},
                        .weight = w.view(),
                        .y = {(*x)[1 - i % 2].data(), s.rows, w.rows()}}});
        if (waits) on.synchronize();
      }
    };
    run_all(true);  // loads the kernels, which a recording cannot
    const auto graph = std::make_shared<Graph>(on, [&] { run_all(false); });
    const auto check = [=, &on] {
      const auto result = [&](const auto& ops) {
        for (Matrix<A>& vector : *x) on.upload(vector.values().data(), vector.data(), vector.values().size());
        ops();
        return (*x)[chain->weights_.size() % 2].download();
      };
      EXPECT_TRUE(same_bits(result([&] { graph->launch(on); }), result([&] { run_all(true); })));
    };
    return {[=, &on] { graph->launch(on); }, check};
  }

 private:
  std::vector<Weights> weights_;
};

template <class A>
void add_chain(Backend& on, OpCases& cases, const MatvecChain::Size& s) {
  const std::string shape = join("D ", s.dim, " x ", s.layers, " + ", s.vocab, ", ", s.rows, " rows");
  const double bytes = bytes_of<A>(16 * s.dim * s.dim * s.layers + s.vocab * s.dim);
  const auto prepare = [=, &on] { return MatvecChain::prepare<A>(on, s); };
  add_case(cases, typed<A>("matvec chain"), shape, Limit::kCopy, bytes, prepare).sets = 1;
}

void linear_cases(Backend& on, bool small, OpCases& cases) {
  using A = BFloat16;
  const auto many_rows = [](Backend& b, const auto& job) { linear(b, job, LinearAlgo::kManyRows); };
  const bool sm90 = on.compute_capability() == 90;

  // The head of hidden_logprobs, as the product alone.
  std::vector<Case> heads = {{33, 600, 64}};
  if (!small) heads = {{4096, 32000, 2048}, {4096, 128256, 2048}, {16384, 50304, 2048}, {512, 8000, 1024}};
  for (const Case& c : heads) {
    if (!sm90) break;
    OpCase& added = add_product<A, A>(on, cases, "gemm_sm90 bf16", c, DType::kBF16, many_rows);
    added.shape = join("(", c.rows, ", ", c.out, ", D ", c.in, ")");
    added.product = {c.rows, c.out, c.in};
  }

  std::vector<MatvecChain::Size> chains = {{64, 2, 300, 1}};
  if (!small)
    chains = {{2048, 16, 32000, 1}, {2048, 16, 32000, 2}, {2048, 16, 32000, 4},
              {2048, 16, 32000, 8}, {1024, 12, 32000, 1}, {2048, 16, 32000, 64}};
  for (const MatvecChain::Size& s : chains) add_chain<A>(on, cases, s);
  if (!small) add_chain<float>(on, cases, {1024, 12, 32000, 1});

  // The products of a prefilled chunk, by the matrix library and, where there is one, by a kernel of our own.
  std::vector<Case> products = {{70, 136, 200}};
  if (!small) {
    products = {{256, 512, 512}};
    for (const std::int64_t dim : {1024, 4096}) {
      products.insert(
          products.end(),
          {{4096, 4 * dim, dim}, {4096, dim, dim}, {4096, dim / 4, dim}, {4096, dim, 4 * dim}, {1024, 2 * dim, dim}});
    }
  }
  for (Case c : products) {
    c.parts = sm90;
    for (const LinearAlgo algo : {LinearAlgo::kLibrary, LinearAlgo::kParts}) {
      if (algo == LinearAlgo::kParts && !sm90) continue;
      const char* const name = algo == LinearAlgo::kParts ? "linear layer fp32 by parts" : "linear layer fp32";
      add_product<float, float>(on, cases, name, c, DType::kF32,
                                [algo](Backend& b, const Linear<Device>& job) { linear(b, job, algo); });
    }
    c.parts = false;
    if (sm90) add_product<A, A>(on, cases, "gemm_sm90 layer bf16", c, DType::kBF16, many_rows);
    c.activation = Activation::kGelu;
    c.bias = true;
    add_product<A, A>(on, cases, "linear bf16 + bias, gelu", c, DType::kBF16,
                      [](Backend& b, const Linear<Device, A, A>& job) { run<A, A>(b, {job}); });
  }

  // A matrix that L2 does not hold times few and more rows, by every algorithm that takes them.
  for (const std::int64_t rows : {8, 64, 128, 256}) {
    const Case c{rows, small ? 48 : 16384, small ? 72 : 4096};
    const LinearAlgo chosen = choose_linear(on, Problem<A, A>(on, {rows, 8, c.in}).job());
    const std::tuple<LinearAlgo, const char*, bool> algos[] = {
        {LinearAlgo::kMatvec, "matvec", rows <= kTileColumns},
        {LinearAlgo::kFewRows, "few_rows", sm90 && rows <= kFewRows},
        {LinearAlgo::kManyRows, "many_rows", sm90},
        {LinearAlgo::kLibrary, "library", true}};
    for (const auto& [algo, name, takes] : algos) {
      if (!takes) continue;
      OpCase& added = add_product<A, A>(on, cases, "linear ways bf16", c, DType::kBF16,
                                        [algo = algo](Backend& b, const auto& job) { linear(b, job, algo); });
      added.shape += join(" by ", name);
      added.limit = Limit::kRead;
      added.work = bytes_of<A>(c.out * c.in);
      added.note = algo == chosen ? "own" : "";
    }
  }
}

#else

void linear_cases(Backend& on, bool small, OpCases& cases) {
  std::vector<Case> shapes = {{9, 31, 48}, {128, 48, 31}};
  if (!small) shapes = {{512, 4096, 1024}, {8, 4096, 1024}};
  for (Case c : shapes) {
    c.activation = Activation::kGelu;
    c.bias = true;
    for (const WeightFormat format : kHostFormats) {
      if (format == DType::kF16) continue;
      add_product<float, float>(on, cases, join("linear ", name_of(format), " + bias, gelu"), c, format,
                                [](Backend& b, const Linear<Space>& job) { run<float, float>(b, {job}); });
      cases.back().product = {c.rows, c.out, c.in};
    }
  }
}

#endif

const RegisteredCases kCases(linear_cases);

}  // namespace
}  // namespace mmrec::kernels::test
