// Log-probs from hidden states and the head against float64 products and sums, by every algorithm: awkward rows, widths
// and vocabularies, any place of the target and the maximum, rows without a target. Long, because every
// algorithm meets every case.

#include "tests/ops/op_test.h"
#if defined(MMREC_TEST_CUDA)
#include "kernels/cuda/logprobs/algo.h"
#endif

namespace mmrec::kernels::test {
namespace {

constexpr float kPoison = 12345.5F;  // a value that no op writes

#if !defined(MMREC_TEST_CUDA)
enum class HiddenLogprobsAlgo : std::uint8_t { kAuto };
void hidden_logprobs(Cpu& cpu, const HiddenLogprobs<Host>& op, HiddenLogprobsAlgo /*algo*/) {
  hidden_logprobs(cpu, op);
}
#endif

struct Shape {
  std::int64_t n, dim, vocab, padding = 0;
  double deviation = 3.0;  // of the logits
};

/// Operands on the host. Logits are of a size of 3.
template <class A>
struct Problem {
  Shape shape;
  WeightFormat format;
  std::vector<A> hidden;     // [n, dim]
  std::vector<double> head;  // [vocab, dim], as its format stores it
  std::vector<int> targets;

  explicit Problem(const Shape& s, WeightFormat type = kDTypeOf<A>, std::uint64_t stream = 5000)
      : shape(s),
        format(type),
        hidden(random_normal<A>(static_cast<std::size_t>(s.n * s.dim), 0.0, 1.0, stream)),
        targets(random_ids(s.n, s.vocab, stream + 2)) {
    head = random_weights(s.vocab, s.dim, type, stream + 1, s.deviation / std::sqrt(static_cast<double>(s.dim)));
  }
  /// log p of the targets of these rows.
  std::vector<double> expected(const std::vector<std::int64_t>& rows) const {
    const auto count = std::ssize(rows);
    const std::vector<double> x = widened(hidden);
    std::vector<double> logits(static_cast<std::size_t>(count * shape.vocab));
    parallel_for(shape.vocab, [&](std::int64_t v) {
      const double* word = head.data() + v * shape.dim;
      for (std::int64_t n = 0; n < count; ++n) {
        const double* row = x.data() + rows[static_cast<std::size_t>(n)] * shape.dim;
        double sum = 0.0;
        for (std::int64_t i = 0; i < shape.dim; ++i) sum += row[i] * word[i];
        logits[static_cast<std::size_t>(n * shape.vocab + v)] = sum;
      }
    });
    return parallel_map(count, [&](std::int64_t n) {
      const double* row = logits.data() + n * shape.vocab;
      const double max = *std::max_element(row, row + shape.vocab);
      double sum = 0.0;
      for (std::int64_t v = 0; v < shape.vocab; ++v) sum += std::exp(row[v] - max);
      return row[targets[static_cast<std::size_t>(rows[static_cast<std::size_t>(n)])]] - max - std::log(sum);
    });
  }
};

/// A problem in the backend's memory.
template <class A>
struct OnBackend {
  Matrix<A> hidden;
  Weights head;
  Buffer<int> targets;
  Buffer<float> out;

  OnBackend(Backend& on, const Problem<A>& p)
      : hidden(on, p.hidden, p.shape.n, p.shape.dim, {.pad = p.shape.padding}),
        head(on, p.head, p.shape.vocab, p.shape.dim, p.format),
        targets(upload(on, p.targets)),
        out(upload(on, std::vector<float>(p.targets.size(), kPoison))) {
#if defined(MMREC_TEST_CUDA)
    if (p.format == DType::kF32 && p.shape.vocab % 2 == 0) head.add_parts(on);
#endif
  }
  HiddenLogprobs<Space, A> op() {
    return {.hidden = hidden.read(), .head = head.view(), .targets = targets.data(), .logprobs = out.data()};
  }
};

class HiddenLogprobsTest : public OpTest {
 public:
  using Algo = HiddenLogprobsAlgo;
  /// On a GPU the product alone, which writes bf16 logits, is the limit.
  template <class A>
  static void add_case(Backend& on, OpCases& cases, const Shape& s, DType format, const char* op, Algo algo = {}) {
    const std::string shape = join("(", s.n, ", ", s.vocab, ", D ", s.dim, ")");
    const double flops = product_flops(s.n, s.vocab, s.dim);
    OpCase& added = test::add_case(cases, join(op, " ", name_of(format)), shape, Limit::kProduct, flops, [=, &on] {
      const auto problem = std::make_shared<Problem<A>>(s, format);
      const auto in = std::make_shared<OnBackend<A>>(on, *problem);
      const auto check = [=, &on] {
        const std::int64_t step = 1 + s.n * s.vocab / 400'000 * s.dim / 1000;
        expect_correct(*problem, download(on, in->out), reference(*problem, step), tolerance);
      };
      return PreparedOp{[=, &on] { hidden_logprobs(on, in->op(), algo); }, check};
    });
    added.product = {s.n, s.vocab, s.dim};
  }

 protected:
  static double tolerance(double want) { return kOnCuda ? 2e-5 + 1e-6 * want : 5e-6 + 3e-7 * want; }
#if defined(MMREC_TEST_CUDA)
  static constexpr Algo kAlgos[] = {Algo::kByTiles, Algo::kAuto};
#else
  static constexpr Algo kAlgos[] = {Algo::kAuto};
#endif

  template <class A>
  static std::vector<float> run(Backend& on, OnBackend<A>& operands, Algo algo = {}) {
    operands.out = upload(on, std::vector<float>(operands.targets.size(), kPoison));
#if defined(MMREC_TEST_CUDA)
    // NaN in the buffers that products leave logits in: nothing may be read of them that no product wrote.
    static const std::vector<std::uint8_t> ones(Cuda::kScratchBytes, 0xff);
    on.upload(ones.data(), static_cast<std::uint8_t*>(on.scratch()), ones.size());
#endif
    hidden_logprobs(on, operands.op(), algo);
    return download(on, operands.out);
  }
  template <class A>
  static std::vector<float> run(Backend& on, const Problem<A>& problem, Algo algo = {}) {
    OnBackend<A> operands(on, problem);
    return run(on, operands, algo);
  }

  /// What every `step`-th row with a target and the last should give; NaN for rows that are not looked at.
  template <class A>
  static std::vector<double> reference(const Problem<A>& problem, std::int64_t step) {
    std::vector<std::int64_t> rows;
    for (std::int64_t r = 0; r < problem.shape.n; ++r) {
      const bool looked_at = r % step == 0 || r == problem.shape.n - 1;
      if (looked_at && problem.targets[static_cast<std::size_t>(r)] >= 0) rows.push_back(r);
    }
    const std::vector<double> expected = problem.expected(rows);
    std::vector<double> want(problem.targets.size(), NAN);
    for (std::size_t i = 0; i < rows.size(); ++i) want[static_cast<std::size_t>(rows[i])] = expected[i];
    return want;
  }
  /// Rows without a target keep their value.
  template <class A, class Tolerance>
  static void expect_correct(const Problem<A>& problem, const std::vector<float>& got, const std::vector<double>& want,
                             const Tolerance& tolerance) {
    for (std::size_t r = 0; r < got.size(); ++r) {
      if (problem.targets[r] < 0) {
        ASSERT_EQ(got[r], kPoison) << "row " << r << " has no target";
      } else if (!std::isnan(want[r])) {
        ASSERT_NEAR(static_cast<double>(got[r]), want[r], tolerance(std::abs(want[r])))
            << r << " of " << problem.shape.n << " x " << problem.shape.dim << " x " << problem.shape.vocab;
      }
    }
  }
};

TEST_F(HiddenLogprobsTest, MatchesFloat64) {
  std::vector<Shape> shapes;
  if (kOnCuda) {
    shapes = {{1, 48, 2},      {3, 8, 257, 8},     {8, 64, 1025},  {9, 64, 1023},  {31, 7, 4097, 3}, {33, 1, 300},
              {150, 64, 4500}, {200, 72, 5000, 8}, {1, 16, 32000}, {1030, 16, 33}, {12, 24, 8200},   {2, 8, 40003}};
    if (!small_sizes()) {
      shapes.insert(
          shapes.end(),
          {{3000, 64, 4500}, {1000, 1024, 32000}, {2100, 256, 4099, 8}, {8, 2048, 128256}, {100, 512, 128256}});
    }
  } else {
    for (const std::int64_t vocab : {1, 2, 95, 96, 97, 257, 1536, 1537, 4001}) {
      for (const std::int64_t n : {1, 7, 130}) shapes.push_back({n, 40, vocab, 3});
    }
    // Several chunks of tokens; narrow; wide; stripes of more than the least length.
    shapes.insert(shapes.end(), {{500, 33, 300, 3}, {3, 1, 300}, {5, 1030, 200}, {30, 64, 5000}, {2, 8, 128256}});
  }
  for (const Shape& s : shapes) {
    for_weights([&]<class A>(A, WeightFormat format) {
      const Problem<A> problem(s, format);
      // Where a row's reference costs much, only some rows are looked at.
      const std::int64_t work = s.n * s.vocab * s.dim / (gpu_sizes() ? 400'000'000 : 8'000'000);
      const std::vector<double> want = reference(problem, std::max<std::int64_t>(work, kOnCuda ? 1 : 3));
      OnBackend<A> operands(on(), problem);
      for (const Algo algo : kAlgos) {
        on_every([&](Backend& on) { return run(on, operands, algo); },
                 [&](const std::vector<float>& got) { expect_correct(problem, got, want, tolerance); });
      }
    });
  }
}

// The target, the largest logit and nearly all of the sum may lie at any place: in every column of a CPU's panel, on
// panel and stripe edges, in any part and tile of a GPU; in few rows and in many.
TEST_F(HiddenLogprobsTest, TheMaximumAndTheTargetMayLieAnywhere) {
  constexpr std::int64_t kDim = 8, kVocab = kOnCuda ? 9000 : 3200;
  std::vector<std::int64_t> peaks{0, 1023, 4096, 8192, 8999};
  if (gpu_sizes()) peaks.insert(peaks.end(), {1, 3, 127, 128, 255, 256, 1024, 2047, 4095, 4097, 5000, 8191, 8998});
  if (!kOnCuda) {
    peaks.clear();
    for (std::int64_t v = 0; v < kVocab; ++v) {
      if (v < 200 || (v % 96 + 2) % 96 < 4 || (v + 3) % 1536 < 6 || v >= kVocab - 3) peaks.push_back(v);
    }
  }
  for_activations([&]<class A>(A) {
    for (const std::int64_t n : {4, kOnCuda ? 40 : 130}) {
      Problem<A> problem({n, kDim, kVocab});
      // The first channel alone counts: logit v of every row is head[v][0].
      for (std::size_t i = 0; i < problem.hidden.size(); ++i) {
        problem.hidden[i] = from_float<A>(i % kDim == 0 ? 1.0F : 0.0F);
      }
      for (const std::int64_t peak : peaks) {
        std::fill(problem.head.begin(), problem.head.end(), -40.0);
        problem.head[static_cast<std::size_t>(peak * kDim)] = 40.0;
        for (std::int64_t r = 0; r < n; ++r) {
          problem.targets[static_cast<std::size_t>(r)] = static_cast<int>(r % 2 == 0 ? peak : (peak + r) % kVocab);
        }
        OnBackend<A> operands(on(), problem);
        const auto check = [&](Backend& on) {
          for (const Algo algo : kAlgos) {
            const auto out = run(on, operands, algo);
            for (std::size_t r = 0; r < out.size(); ++r) {
              ASSERT_EQ(out[r], r % 2 == 0 ? 0.0F : -80.0F) << peak << " " << r;
            }
          }
        };
        n == 4 ? on_every(check) : check(on());
      }
    }
  });
}

TEST_F(HiddenLogprobsTest, RowsWithoutATargetAreLeftAlone) {
  for_activations([&]<class A>(A) {
    for (const std::int64_t n : {5, 77, 300}) {
      if (kOnCuda && n == 300) continue;
      const Problem<A> problem({n, 16, 2100});
      Problem<A> some = problem;
      for (std::size_t r = 0; r < some.targets.size(); r += 3) {
        some.targets[r] = r % 2 == 0 ? -1 - static_cast<int>(r) : std::numeric_limits<int>::min();
      }
      OnBackend<A> of_all(on(), problem), of_some(on(), some);
      on_every([&](Backend& on) {
        for (const Algo algo : kAlgos) {
          const std::vector<float> all = run(on, of_all, algo), out = run(on, of_some, algo);
          for (std::size_t r = 0; r < out.size(); ++r) {
            ASSERT_EQ(out[r], r % 3 == 0 ? kPoison : all[r]) << r << " of " << n;
          }
        }
      });
    }
  });
}

TEST_F(HiddenLogprobsTest, EmptyShapes) {
  for_activations([&]<class A>(A) {
    OnBackend<A> operands(on(), Problem<A>({2, 10, 4}));
    HiddenLogprobs<Space, A> no_rows = operands.op(), no_words = operands.op();
    no_rows.hidden = {nullptr, 0, 10};
    no_rows.targets = nullptr;
    no_rows.logprobs = nullptr;
    hidden_logprobs(on(), no_rows);
    if constexpr (kOnCuda) {
      no_words.head = {nullptr, kDTypeOf<A>, 0, 10};
      no_words.targets = nullptr;
      no_words.logprobs = nullptr;
      hidden_logprobs(on(), no_words);
    }
  });
}

#if !defined(MMREC_TEST_CUDA)

TEST_F(HiddenLogprobsTest, BitsDoNotDependOnOtherRows) {
  for (const DType format : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t n : {1, 5, 127, 700}) {
      const Problem<float> problem({n, 70, 2000, 3}, format);
      OnBackend<float> operands(on(), problem);
      on_every([&](Backend& on) {
        const std::vector<float> expected = run(on, operands);
        const auto part = [&](std::int64_t first, std::int64_t rows, bool force_row_kernel = false) {
          std::vector<float> out(static_cast<std::size_t>(rows), kPoison);
          hidden_logprobs(on, {operands.hidden.read().middle_rows(first, rows), operands.head.view(),
                               problem.targets.data() + first, out.data(), force_row_kernel});
          return out;
        };
        // A row outside whole tiles alone, a whole tile alone; by the row kernel each row is alone.
        const auto whole = n / kRowTile * kRowTile;
        const auto of = [&](std::int64_t first, std::int64_t rows) {
          return std::vector<float>(expected.begin() + first, expected.begin() + first + rows);
        };
        for (const std::int64_t r : {whole, (whole + n) / 2, n - 1}) EXPECT_EQ(part(r, 1), of(r, 1)) << r;
        for (std::int64_t r = 0; r < whole; r += kRowTile) EXPECT_EQ(part(r, kRowTile), of(r, kRowTile)) << r;
        const std::vector<float> by_rows = part(0, n, true);
        for (const std::int64_t r : {std::int64_t{0}, n / 2, n - 1}) {
          EXPECT_EQ(by_rows[static_cast<std::size_t>(r)], part(r, 1)[0]) << r;
        }
      });
    }
  }
}

TEST_F(HiddenLogprobsTest, RefusesTargetsBeforeWriting) {
  for (const int bad : {500, 501, std::numeric_limits<int>::max()}) {
    Problem<float> problem({300, 20, 500});
    problem.targets[250] = bad;
    OnBackend<float> operands(on(), problem);
    expect_says(refusal([&] { hidden_logprobs(on(), operands.op()); }), {"row 250"});
    for (const float x : download(on(), operands.out)) EXPECT_EQ(x, kPoison);
  }
}

#else

TEST_F(HiddenLogprobsTest, ATargetBeyondTheVocabularyGivesNan) {
  for_activations([&]<class A>(A) {
    for (const std::int64_t n : {5, 77}) {
      Problem<A> problem({n, 16, 2100});
      problem.targets[2] = 2100;
      problem.targets[4] = std::numeric_limits<int>::max();
      const auto out = run(on(), problem, Algo::kByTiles);
      for (std::size_t r = 0; r < out.size(); ++r) ASSERT_EQ(std::isnan(out[r]), r == 2 || r == 4) << r;
    }
  });
}

// More rows than the results of one pass have room for.
TEST_F(HiddenLogprobsTest, RowsAreTakenInPasses) {
  if (small_sizes()) GTEST_SKIP() << "large sizes";
  Problem<BFloat16> problem({5000, 8, 1'000'003});
  std::vector<int> targets(problem.targets.size(), -1);
  for (const std::size_t r : {0U, 1023U, 1024U, 3071U, 4095U, 4096U, 4097U, 4999U}) targets[r] = problem.targets[r];
  problem.targets = targets;
  expect_correct(problem, run(on(), problem, Algo::kByTiles), reference(problem, 1), [](double) { return 2e-5; });
}

TEST_F(HiddenLogprobsTest, IsReplayedByAGraph) {
  for_activations([&]<class A>(A) {
    const Problem<A> before({70, 16, 9000});
    Problem<A> after = before;
    after.hidden = random_normal<A>(after.hidden.size(), 0.0, 1.0, 77);
    for (const Algo algo : kAlgos) {
      OnBackend<A> operands(on(), before);
      hidden_logprobs(on(), operands.op(), algo);
      const Graph graph(on(), [&] { hidden_logprobs(on(), operands.op(), algo); });
      on().upload(after.hidden.data(), operands.hidden.data(), after.hidden.size());
      graph.launch(on());
      EXPECT_EQ(download(on(), operands.out), run(on(), after, algo));
    }
  });
}

// ---- on the tensor cores of sm_90a ----

class HiddenLogprobsSm90 : public OnSm90<HiddenLogprobsTest> {
 protected:
  /// Within `bound` of 1 + |want|; some rows are skipped. `checked_rows`: how many are looked at; 0: all.
  template <class A>
  void check(const Shape& shape, std::int64_t checked_rows = 0, double bound = 5e-6) {
    Problem<A> problem(shape);
    for (std::size_t r = 5; r < problem.targets.size(); r += 7) problem.targets[r] = -1;
    problem.targets[0] = static_cast<int>(shape.vocab) - 1;
    OnBackend<A> operands(on(), problem);
    EXPECT_EQ(choose_hidden_logprobs(on(), operands.op()), Algo::kInRegisters);
    const std::int64_t step = checked_rows == 0 ? 1 : std::max<std::int64_t>(shape.n / checked_rows, 1);
    expect_correct(problem, run(on(), problem, Algo::kInRegisters), reference(problem, step),
                   [&](double e) { return bound * (1.0 + e); });
  }
};

TEST_F(HiddenLogprobsSm90, AwkwardSizes) {
  check<BFloat16>({33, 64, 1, 8, 1.0});
  check<BFloat16>({31, 72, 2, 8, 1.0});
  check<BFloat16>({2, 136, 257, 8, 1.0});
  check<Float16>({128, 8, 511, 8, 1.0});
  check<BFloat16>({1, 64, 1000, 8, 1.0});
  check<BFloat16>({129, 64, 300, 8, 1.0});
  check<Float16>({257, 200, 700, 8, 1.0});
  check<BFloat16>({333, 128, 2304, 8, 1.0});  // several tiles a block
  // The logits' own rounding is what the bound allows for: sums of 64 products of up to thousands, in fp32.
  check<BFloat16>({64, 64, 600, 8, 1000.0}, 0, 2e-5);
}

TEST_F(HiddenLogprobsSm90, NanStaysInItsRow) {
  Problem<BFloat16> problem({3, 64, 300, 8, 0.8});
  problem.hidden[64 + 5] = from_float<BFloat16>(NAN);  // row 1
  const auto got = run(on(), problem, Algo::kInRegisters);
  for (std::size_t r = 0; r < 3; ++r) EXPECT_EQ(std::isfinite(got[r]), r != 1) << r;
}

TEST_F(HiddenLogprobsSm90, LargeSizes) {
  if (small_sizes()) GTEST_SKIP() << "large sizes";
  check<BFloat16>({4096, 2048, 32000, 8, 1.0}, 12);
  check<Float16>({1000, 1024, 128256, 8, 1.0}, 6);
  // More partial results than the scratch holds.
  check<BFloat16>({40000, 64, 128256, 8, 1.0}, 40);
}

#endif

const RegisteredCases kCases([](Backend& on, bool small, OpCases& cases) {
  constexpr const char* kOp = "hidden_logprobs";
  using Test = HiddenLogprobsTest;
#if defined(MMREC_TEST_CUDA)
  std::vector<Shape> shapes = {{33, 64, 600}};
  if (!small) shapes = {{4096, 2048, 32000}, {4096, 2048, 128256}, {16384, 2048, 50304}, {512, 1024, 8000}};
  for (const Shape& s : shapes) {
    Test::add_case<BFloat16>(on, cases, s, DType::kBF16, kOp);
    Test::add_case<BFloat16>(on, cases, s, DType::kBF16, "hidden_logprobs by tiles", Test::Algo::kByTiles);
  }
#else
  std::vector<std::pair<Shape, DType>> list = {{{7, 40, 600}, DType::kF32}, {{130, 40, 600}, DType::kBF16}};
  if (!small) {
    list = {{{512, 1024, 32000}, DType::kF32},
            {{512, 1024, 32000}, DType::kBF16},
            {{128, 2048, 32000}, DType::kBF16},
            {{128, 512, 8000}, DType::kF32},
            {{7, 512, 8000}, DType::kF32}};
  }
  for (const auto& [shape, format] : list) Test::add_case<float>(on, cases, shape, format, kOp);
#endif
});

}  // namespace
}  // namespace mmrec::kernels::test
