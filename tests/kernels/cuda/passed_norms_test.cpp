// Products that pass norms on, and the recurrence's token with its products, against float64.
#include "tests/ops/op_test.h"

namespace mmrec::kernels::test {
namespace {

/// Scaled rows on a device, and what they should be.
template <class A>
struct Scaled {
  int part;
  Matrix<A> y;
  Matrix<float> weight, squares;

  /// To be written, where up to few_rows rows are few.
  Scaled(Backend& on, std::int64_t rows, std::int64_t dim, std::int64_t few_rows)
      : part(rows <= few_rows ? kFewScaledPart : kScaledPart),
        y(on, rows, dim, kAlignedGaps),
        weight(random_matrix<float>(on, 1, dim, kPacked, 71)),
        squares(on, rows, scaled_parts(dim, part)) {}
  /// Of x.
  Scaled(Backend& on, std::int64_t rows, std::int64_t dim, std::int64_t few_rows, const Matrix<float>& x)
      : Scaled(on, rows, dim, few_rows) {
    std::vector<A> scaled;
    std::vector<float> sums(static_cast<std::size_t>(rows * scaled_parts(dim, part)));
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < dim; ++c) {
        scaled.push_back(from_float<A>(static_cast<float>(x(r, c) * weight(0, c))));
        float& sum = sums[static_cast<std::size_t>(r * scaled_parts(dim, part) + c / part)];
        sum += static_cast<float>(x(r, c) * x(r, c));
      }
    }
    y = Matrix<A>(on, scaled, rows, dim, kAlignedGaps);
    squares = Matrix<float>(on, sums, rows, scaled_parts(dim, part));
  }
  ScaledRows<Device, A> rows() { return {weight.data(), y.view(), squares.data(), part}; }
  /// Of fp32 rows x.
  void expect_of(const std::vector<float>& x) const {
    const std::vector<A> got = y.download();
    const std::vector<float> got_squares = squares.download();
    const auto channels = static_cast<std::size_t>(part);
    const std::size_t dim = weight.values().size(), parts = dim / channels;
    ASSERT_EQ(got.size(), x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(to_float(got[i]), to_float(from_float<A>(x[i] * weight.values()[i % dim]))) << i;
    }
    const auto stride = static_cast<std::size_t>(scaled_parts(static_cast<std::int64_t>(dim), part));
    for (std::size_t number = 0; number < x.size() / channels; ++number) {
      double sum = 0.0;
      for (std::size_t i = 0; i < channels; ++i) {
        const auto value = static_cast<double>(x[number * channels + i]);
        sum += value * value;
      }
      const float found = got_squares[number / parts * stride + number % parts];
      ASSERT_NEAR(static_cast<double>(found), sum, 2e-6 * sum) << number;
    }
  }
};

template <class A>
class PassedNorms : public OnSm90<OpTest> {
 protected:
  static constexpr DType kType = kDTypeOf<A>;
  static constexpr std::int64_t kDims[] = {64, 192, 576, 1024, 2048};

  /// f(rows, D, the most rows that are few).
  template <class F>
  void for_shapes(std::int64_t most, const F& f) {
    struct Rows {
      std::int64_t count, few;
    };
    std::vector<Rows> numbers = {{1, 8}, {3, 8}, {8, 8}, {9, 16}, {16, 16}};
    if (sizeof(A) == 2) {
      numbers.insert(numbers.end(), {{1, 0}, {3, 0}, {8, 0}, {9, 8}, {32, 8}, {33, 16}, {100, 16}, {128, 8}});
    }
    for (const Rows& rows : numbers) {
      for (const std::int64_t dim : kDims) {
        if (small_sizes() && rows.count * dim > most) continue;
        SCOPED_TRACE(testing::Message() << rows.count << " x " << dim << ", few " << rows.few);
        f(rows.count, dim, rows.few);
      }
    }
  }
};

using Types = testing::Types<float, BFloat16>;
TYPED_TEST_SUITE(PassedNorms, Types);

TYPED_TEST(PassedNorms, AProductLeavesScaledRows) {
  using A = TypeParam;
  this->for_shapes(20000, [&](std::int64_t rows, std::int64_t dim, std::int64_t few_rows) {
    const std::int64_t in = small_sizes() ? 520 : 3 * dim + 8;
    const Weights w(this->on(), dim, in, TestFixture::kType, 1, 0.1);
    Matrix<A> x = random_matrix<A>(this->on(), rows, in, kPacked, 2);
    Matrix<float> bias = random_matrix<float>(this->on(), 1, dim, kPacked, 3);
    Matrix<float> y = random_matrix<float>(this->on(), rows, dim, kPacked, 4);
    Linear<Device, A, float> job{.x = x.read(),
                                 .weight = w.view(),
                                 .bias = bias.data(),
                                 .y = y.view(),
                                 .residual = y.read(),
                                 .few_rows = few_rows};
    linear(this->on(), job);
    const std::vector<float> plain = y.download();
    y.reset();
    Scaled<A> scaled(this->on(), rows, dim, few_rows);
    job.scaled = scaled.rows();
    linear(this->on(), job);
    EXPECT_TRUE(same_bits(y.download(), plain));
    scaled.expect_of(plain);
  });
}

TYPED_TEST(PassedNorms, AProductTakesScaledRows) {
  using A = TypeParam;
  this->for_shapes(20000, [&](std::int64_t rows, std::int64_t dim, std::int64_t few_rows) {
    const std::int64_t out = small_sizes() ? 72 : dim + 8;
    Matrix<float> x = random_matrix<float>(this->on(), rows, dim, kPacked, 6, 3.0);
    Scaled<A> scaled(this->on(), rows, dim, few_rows, x);
    const std::vector<A> of_x = scaled.y.download();
    const Weights w(this->on(), out, dim, TestFixture::kType, 7, 0.1);
    Matrix<float> bias = random_matrix<float>(this->on(), 1, out, kPacked, 8);
    std::vector<float> of_all;
    for (const bool all : {true, false}) {
      const std::int64_t count = all ? rows : rows <= few_rows || few_rows == 0 ? 1 : few_rows + 1;
      Matrix<float> y(this->on(), count, out);
      Linear<Device, A, float> job{.x = scaled.y.read().middle_rows(0, count),
                                   .weight = w.view(),
                                   .bias = bias.data(),
                                   .y = y.view(),
                                   .activation = Activation::kRelu,
                                   .x_squares = scaled.squares.data(),
                                   .few_rows = few_rows};
      linear(this->on(), job);
      const std::vector<float> got = y.download();
      if (all) of_all = got;
      EXPECT_TRUE(std::equal(got.begin(), got.end(), of_all.begin()));
      for (std::int64_t r = 0; r < count; ++r) {
        double squares = 0.0;
        for (std::int64_t c = 0; c < dim; ++c) squares += x(r, c) * x(r, c);
        const double factor = 1.0 / (std::sqrt(squares / static_cast<double>(dim)) + 1e-6);
        for (std::int64_t o = 0; o < out; ++o) {
          double sum = 0.0, size = 0.0;
          for (std::int64_t c = 0; c < dim; ++c) {
            const double term = factor * w(o, c) * static_cast<double>(to_float(of_x[std::size_t(r * dim + c)]));
            sum += term, size += std::abs(term);
          }
          const double want = std::max(sum + bias(0, o), 0.0);
          ASSERT_NEAR(static_cast<double>(got[std::size_t(r * out + o)]), want, 3e-6 * (size + std::abs(bias(0, o))));
        }
      }
    }
  });
}

TYPED_TEST(PassedNorms, OtherNumbersOfRowsPassNothing) {
  using A = TypeParam;
  const std::int64_t most = sizeof(A) == 2 ? kFewRows : kTileColumns;
  const Weights w(this->on(), 64, 64, TestFixture::kType, 1);
  const WeightView<Device> weights[] = {w.view()};
  EXPECT_TRUE(passes_norms<A>(this->on(), 1, weights));
  EXPECT_TRUE(passes_norms<A>(this->on(), most, weights));
  EXPECT_FALSE(passes_norms<A>(this->on(), most + 1, weights));
  Matrix<A> x = random_matrix<A>(this->on(), most + 1, 64, kPacked, 2);
  Matrix<float> y(this->on(), most + 1, 64);
  Scaled<A> scaled(this->on(), most + 1, 64, kTileColumns);
  Linear<Device, A, float> job{.x = x.read(), .weight = w.view(), .y = y.view(), .x_squares = scaled.squares.data()};
  EXPECT_THROW(linear(this->on(), job), std::invalid_argument);
  job.x_squares = nullptr, job.scaled = scaled.rows(), job.residual = y.read();
  EXPECT_THROW(linear(this->on(), job), std::invalid_argument);
  // Parts of another number of rows.
  job.x = job.x.middle_rows(0, 1), job.y = job.y.middle_rows(0, 1), job.residual = job.residual.middle_rows(0, 1);
  job.scaled.part = kScaledPart;
  EXPECT_THROW(linear(this->on(), job), std::invalid_argument);
  job.scaled.part = kFewScaledPart;
  linear(this->on(), job);
  job.residual = {};
  EXPECT_THROW(linear(this->on(), job), std::invalid_argument);
}

/// What the step does without.
enum class Without { kNothing, kContextDecay, kLayerBefore, kNextLayer, kLists };

TYPED_TEST(PassedNorms, TheRecurrenceAdvancesWithItsProducts) {
  using A = TypeParam;
  for (const Without without :
       {Without::kNothing, Without::kContextDecay, Without::kLayerBefore, Without::kNextLayer, Without::kLists}) {
    this->for_shapes(13000, [&](std::int64_t rows, std::int64_t dim, std::int64_t few_rows) {
      SCOPED_TRACE(static_cast<int>(without));
      const bool listed = without != Without::kLists, two_networks = without != Without::kContextDecay;
      const std::int64_t hidden = dim / 4 + 8;
      const Weights gate(this->on(), 2 * dim, dim, TestFixture::kType, 11, 0.1);
      const Weights up(this->on(), dim, hidden, TestFixture::kType, 12, 0.3),
          other_up(this->on(), dim, hidden, TestFixture::kType, 13, 0.3);
      Matrix<A> networks = random_matrix<A>(this->on(), rows, 2 * hidden, kPacked, 14);
      Matrix<A> rounded = random_matrix<A>(this->on(), rows, dim, kAlignedGaps, 15);
      Matrix<A> zv = random_matrix<A>(this->on(), rows, 3 * dim, kPacked, 16);
      Matrix<float> biases = random_matrix<float>(this->on(), 4, dim, kPacked, 17);
      Matrix<float> h = random_matrix<float>(this->on(), rows, dim, kAlignedGaps, 18);
      Matrix<float> x = random_matrix<float>(this->on(), rows, dim, kPacked, 19);
      Matrix<float> c = random_matrix<float>(this->on(), rows, dim, kPacked, 20);
      Matrix<float> next_h = random_matrix<float>(this->on(), rows, dim, kPacked, 21);
      Matrix<A> h_rounded(this->on(), rows, dim, kAlignedGaps), next_rounded(this->on(), rows, dim);
      std::vector<double> before(static_cast<std::size_t>(rows * dim));
      for (std::size_t i = 0; i < before.size(); ++i) before[i] = 1e6 / static_cast<double>(i + 1);
      Buffer<double> sum = upload(this->on(), before);
      Matrix<float> slots(this->on(), rows, dim);
      Scaled<A> scaled(this->on(), rows, dim, few_rows);
      constexpr float kMix = 0.1F;
      constexpr std::int64_t kSegment = 24;
      // Every fourth row has neither state nor sum; every other one has a c of its own, and ends its segment.
      const auto exists = [&](std::int64_t r) { return !listed || r % 4 != 3; };
      const auto closes = [&](std::int64_t r) { return listed && exists(r) && r % 2 == 0; };
      std::vector<float*> states, closed;
      std::vector<const float*> contexts;
      std::vector<double*> sums;
      for (std::int64_t r = 0; r < rows; ++r) {
        states.push_back(exists(r) ? h.view().row(r) - dim : nullptr);
        contexts.push_back(r % 2 == 0 ? c.view().row(r) - dim : nullptr);
        sums.push_back(exists(r) ? sum.data() + r * dim - 8 : nullptr);
        closed.push_back(closes(r) ? slots.view().row(r) - 4 : nullptr);
      }
      const Buffer<float*> state_list = upload(this->on(), states), closed_list = upload(this->on(), closed);
      const Buffer<const float*> context_list = upload(this->on(), contexts);
      const Buffer<double*> sum_list = upload(this->on(), sums);
      GatedAdvance<Device, A> op{.advance = {.z = zv.read().middle_cols(0, dim),
                                             .v = zv.read().middle_cols(dim, dim),
                                             .zm = zv.read().middle_cols(2 * dim, dim),
                                             .gate_bias = biases.view().row(0),
                                             .mdi_mix = kMix,
                                             .h = h.view(),
                                             .h_rounded = h_rounded.view(),
                                             .x = x.view(),
                                             .c = c.read(),
                                             .norm = scaled.weight.data(),
                                             .u = scaled.y.view()},
                                 .h = rounded.read(),
                                 .gate_weight = gate.view(),
                                 .decay = {networks.read().middle_cols(0, hidden), up.view(), biases.view().row(1)},
                                 .squares = scaled.squares.data(),
                                 .part = scaled.part};
      if (two_networks) {
        op.context_decay = {networks.read().middle_cols(hidden, hidden), other_up.view(), biases.view().row(2)};
      }
      if (listed) {
        op.advance.h = {state_list.data(), rows, dim, dim};
        op.advance.c = {context_list.data(), rows, dim, dim};
        op.advance.c_bias = biases.view().row(3);
      }
      if (without != Without::kLayerBefore) {
        op.segment = kSegment;
        op.sum = MatrixView<double, Device>(sum.data(), rows, dim);
        if (listed) op.sum = {sum_list.data(), rows, dim, 8}, op.closed = {closed_list.data(), rows, dim, 4};
      }
      if (without != Without::kNextLayer) op.next = {next_h.view(), next_rounded.view()};
      gated_advance(this->on(), op);

      const std::vector<float> got_h = h.download(), got_x = x.download(), means = slots.download();
      const std::vector<A> got_rounded = h_rounded.download(), got_next = next_rounded.download();
      const std::vector<double> got_sum = download(this->on(), sum);
      const auto dot = [](const Weights& w, std::int64_t row, const Matrix<A>& of, std::int64_t r, std::int64_t first) {
        double all = 0.0;
        for (std::int64_t k = 0; k < w.cols(); ++k) all += w(row, k) * of(r, first + k);
        return all;
      };
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t i = 0; i < dim; ++i) {
          const auto at = static_cast<std::size_t>(r * dim + i);
          const double mix = static_cast<double>(kMix);
          double gamma = sigmoid(dot(up, i, networks, r, 0) + biases(1, i));
          if (two_networks) gamma *= sigmoid(dot(other_up, i, networks, r, hidden) + biases(2, i));
          gamma = std::clamp(gamma, 1e-6, 1.0 - 1e-6);
          const double s = sigmoid(dot(gate, i, rounded, r, 0) + biases(0, i));
          const double g = sigmoid(zv(r, 2 * dim + i) + dot(gate, dim + i, rounded, r, 0));
          const double want_h =
              (gamma + mix * (1.0 - g + gamma)) * (exists(r) ? h(r, i) : 0.0) + zv(r, i) * (s + mix * g);
          const double context = !listed || r % 2 == 0 ? c(r, i) : biases(3, i);
          const double want_x = x(r, i) + want_h + 0.1 * zv(r, dim + i) + context;
          ASSERT_NEAR(static_cast<double>(got_x[at]), want_x, 6e-6 * (1.0 + std::abs(want_x)));
          ASSERT_NEAR(static_cast<double>(to_float(got_rounded[at])), want_h, 5e-3 * (1e-2 + std::abs(want_h)));
          const bool sums_up = without != Without::kLayerBefore && exists(r);
          const double all = before[at] + (sums_up ? x(r, i) : 0.0);
          ASSERT_EQ(got_sum[at], sums_up && closes(r) ? 0.0 : all);
          if (sums_up && closes(r)) {
            ASSERT_EQ(means[at], static_cast<float>(all / kSegment));
          }
          if (without != Without::kNextLayer) {
            ASSERT_EQ(to_float(got_next[at]), to_float(from_float<A>(static_cast<float>(next_h(r, i)))));
          }
          if (!exists(r)) {
            ASSERT_EQ(static_cast<double>(got_h[at]), h(r, i));
            continue;
          }
          ASSERT_NEAR(static_cast<double>(got_h[at]), want_h, 4e-6 * (1.0 + std::abs(want_h)));
          ASSERT_EQ(to_float(got_rounded[at]), to_float(from_float<A>(got_h[at])));
        }
      }
      scaled.expect_of(got_x);
    });
  }
}

using AttendsFromTheQueryOn = OnSm90<OpTest>;

TEST_F(AttendsFromTheQueryOn, LikeFloat64) {
  using A = BFloat16;
  struct Case {
    std::int64_t rows, heads, slots, padding;
    bool listed;
    std::int64_t few_rows;
  };
  const Case cases[] = {{1, 2, 2, 0, false, 8},   {3, 6, 32, 0, true, 8},  {8, 8, 33, 7, true, 8},
                        {5, 2, 100, 0, false, 8}, {8, 16, 32, 0, true, 8}, {2, 12, 65, 0, true, 8},
                        {9, 6, 40, 0, true, 8},   {20, 3, 9, 0, false, 8}, {6, 4, 24, 3, true, 0},
                        {13, 5, 30, 0, true, 16}};
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::Message() << c.rows << " rows, " << c.heads << " heads, " << c.slots << " slots");
    constexpr std::int64_t kHead = 64;
    const std::int64_t dim = c.heads * kHead, offset = 2 * dim;
    const Weights of_query(this->on(), dim, dim, DType::kBF16, 31, 0.1),
        of_out(this->on(), dim, dim, DType::kBF16, 32, 0.1);
    Matrix<A> h = random_matrix<A>(this->on(), c.rows, dim, kAlignedGaps, 33);
    Matrix<A> q = random_matrix<A>(this->on(), c.rows, dim, kAlignedGaps, 34);
    Matrix<float> biases = random_matrix<float>(this->on(), 2, dim, kPacked, 35);
    Matrix<float> slots = random_matrix<float>(this->on(), c.rows * c.slots, dim, kPacked, 36);
    Matrix<float> x = random_matrix<float>(this->on(), c.rows, dim, kPacked, 37);
    Scaled<A> scaled(this->on(), c.rows, dim, c.few_rows);
    // Rows have fewer and fewer slots; every fourth has none.
    const auto count_of = [&](std::int64_t r) { return !c.listed ? c.slots : r % 4 == 3 ? 0 : c.slots - r % 3; };
    std::vector<AttendingRun> runs;
    for (std::int64_t r = 0; r < c.rows; ++r) {
      const auto count = static_cast<std::int32_t>(count_of(r));
      runs.push_back({count == 0 ? nullptr : slots.view().row(r * c.slots) - offset, count,
                      static_cast<std::int32_t>(r), count == 0 ? 0 : 1});
    }
    const Buffer<AttendingRun> list = upload(this->on(), runs);
    AttendNorm<Device, A> op{.h = h.read(),
                             .q = q.read(),
                             .query_weight = of_query.view(),
                             .query_bias = biases.view().row(0),
                             .most_slots = c.slots,
                             .heads = c.heads,
                             .padding = c.padding,
                             .out_weight = of_out.view(),
                             .out_bias = biases.view().row(1),
                             .x = x.view(),
                             .scaled = scaled.rows()};
    if (c.listed) {
      op.runs = list.data(), op.offset = offset;
    } else {
      op.slots = {slots.data(), c.rows, c.slots, dim};
    }
    EXPECT_EQ(takes_attend_norm(this->on(), op), c.slots <= 64);  // the kernel takes more, too
    attend_norm(this->on(), op);

    const std::vector<float> got = x.download();
    scaled.expect_of(got);
    const auto rounded = [](double value) {
      return static_cast<double>(to_float(from_float<A>(static_cast<float>(value))));
    };
    const double scale = 1.0 / std::sqrt(static_cast<double>(kHead - c.padding));
    std::vector<double> query(static_cast<std::size_t>(dim)), attended(static_cast<std::size_t>(dim));
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (std::int64_t i = 0; i < dim; ++i) {
        double sum = biases(0, i) + 0.5 * q(r, i);
        for (std::int64_t k = 0; k < dim; ++k) sum += of_query(i, k) * h(r, k);
        query[static_cast<std::size_t>(i)] = rounded(sum);
      }
      for (std::int64_t first = 0; first < dim; first += kHead) {
        std::vector<double> weights;
        double all = 0.0;
        for (std::int64_t s = 0; s < count_of(r); ++s) {
          double score = 0.0;
          for (std::int64_t i = first; i < first + kHead; ++i) {
            score += query[static_cast<std::size_t>(i)] * slots(r * c.slots + s, i);
          }
          weights.push_back(std::exp(score * scale));
          all += weights.back();
        }
        for (std::int64_t i = first; i < first + kHead; ++i) {
          double sum = 0.0;
          for (std::size_t s = 0; s < weights.size(); ++s) {
            sum += weights[s] / all * slots(r * c.slots + static_cast<std::int64_t>(s), i);
          }
          attended[static_cast<std::size_t>(i)] = rounded(sum);
        }
      }
      for (std::int64_t i = 0; i < dim; ++i) {
        double want = x(r, i) + biases(1, i);
        for (std::int64_t k = 0; k < dim; ++k) want += of_out(i, k) * attended[static_cast<std::size_t>(k)];
        // A query or what it attends to may be rounded to a neighbour.
        const double bound = 4e-3 * (1.0 + std::abs(want));
        ASSERT_NEAR(static_cast<double>(got[static_cast<std::size_t>(r * dim + i)]), want, bound) << r << ", " << i;
      }
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
