// The ops of rows that are normed where they are computed, against float64: every result of each, the norm and what
// other blocks do beside it, with and without what is optional.
#include "tests/ops/op_test.h"

namespace mmrec::kernels::test {
namespace {

template <class A>
class FusedNormsTest : public OpTest {
 protected:
  void expect_rounded(const std::vector<A>& got, const Matrix<float>& want) {
    ASSERT_EQ(got.size(), want.values().size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(to_float(got[i]), to_float(from_float<A>(want.values()[i]))) << i;
    }
  }

  static constexpr std::int64_t kRows[] = {1, 9, 64};
  static constexpr std::int64_t kDims[] = {4, 48, 384, 1000, 2048};
};

using Types = testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(FusedNormsTest, Types);

TYPED_TEST(FusedNormsTest, EmbedsAndRoundsTheState) {
  using A = TypeParam;
  constexpr std::int64_t kVocab = 37;
  for (const std::int64_t rows : this->kRows) {
    for (const std::int64_t dim : this->kDims) {
      if (small_sizes() && rows * dim > 30000) continue;
      SCOPED_TRACE(testing::Message() << rows << " x " << dim);
      Matrix<A> table = random_matrix<A>(this->on(), kVocab, dim, kPacked, 1);
      Matrix<float> norm = random_matrix<float>(this->on(), 1, dim, kPacked, 2);
      Matrix<float> h = random_matrix<float>(this->on(), rows, dim, kAlignedGaps, 3);
      Matrix<A> rounded(this->on(), rows, dim, kAlignedGaps);
      Matrix<float> x(this->on(), rows, dim);
      Matrix<A> u(this->on(), rows, dim);
      std::vector<int> tokens;
      for (std::int64_t r = 0; r < rows; ++r) tokens.push_back(static_cast<int>(r * 11 % kVocab));
      const DeviceBuffer<int> device_tokens = upload(this->on(), tokens);
      std::vector<std::int32_t> token_of;  // the other way round
      for (std::int64_t r = rows; r-- > 0;) token_of.push_back(static_cast<std::int32_t>(r));
      const DeviceBuffer<std::int32_t> order = upload(this->on(), token_of);
      const bool is_listed = rows > 1;
      EmbedNorm<Device, A> op{.table = {table.data(), DType{}, kVocab, dim},
                              .tokens = device_tokens.data(),
                              .token_of = is_listed ? order.data() : nullptr,
                              .x = x.view(),
                              .norm = norm.data(),
                              .u = u.view(),
                              .next = {h.view(), rounded.view()}};
      embed_norm(this->on(), op);
      const std::vector<float> got = x.download();
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < dim; ++c) {
          const std::int64_t number = is_listed ? rows - 1 - r : r;
          ASSERT_EQ(static_cast<double>(got[static_cast<std::size_t>(r * dim + c)]),
                    table(tokens[static_cast<std::size_t>(number)], c));
        }
      }
      EXPECT_TRUE(is_normed(u.download(), normed(got, norm.values())));
      this->expect_rounded(rounded.download(), h);
    }
  }
}

TYPED_TEST(FusedNormsTest, AdvancesTheRecurrenceByAToken) {
  using A = TypeParam;
  enum class C { kNone, kShared, kPerRow, kListed };
  std::uint64_t stream = 100;
  for (const std::int64_t rows : this->kRows) {
    for (const std::int64_t dim : this->kDims) {
      if (small_sizes() && rows * dim > 20000) continue;
      for (const C kind : {C::kNone, C::kShared, C::kPerRow, C::kListed}) {
        const bool dpg = kind == C::kShared;
        SCOPED_TRACE(testing::Message() << rows << " x " << dim << (dpg ? ", one network" : ""));
        // z, v are parts of wider rows; h lies in slots.
        Matrix<A> zv = random_matrix<A>(this->on(), rows, 2 * dim, kPacked, stream++);
        Matrix<A> zm = random_matrix<A>(this->on(), rows, dim, kPacked, stream++);
        Matrix<float> gates = random_matrix<float>(this->on(), rows, 2 * dim, kPacked, stream++);
        Matrix<float> bias = random_matrix<float>(this->on(), 1, dim, kPacked, stream++);
        Matrix<float> decay = random_matrix<float>(this->on(), rows, dim, kPacked, stream++, 6.0);
        Matrix<float> other = random_matrix<float>(this->on(), rows, dim, kPacked, stream++, 6.0);
        Matrix<float> h = random_matrix<float>(this->on(), rows, dim, kAlignedGaps, stream++);
        Matrix<float> x = random_matrix<float>(this->on(), rows, dim, kPacked, stream++);
        Matrix<float> c = random_matrix<float>(this->on(), rows, dim, kPacked, stream++);
        Matrix<float> norm = random_matrix<float>(this->on(), 1, dim, kPacked, stream++);
        Matrix<A> h_rounded(this->on(), rows, dim, kAlignedGaps);
        Matrix<A> u(this->on(), rows, dim);
        constexpr float kMix = 0.1F;
        AdvanceNorm<Device, A> op{.z = zv.view().middle_cols(0, dim),
                                  .v = zv.view().middle_cols(dim, dim),
                                  .zm = zm.view(),
                                  .gates = gates.view(),
                                  .gate_bias = bias.data(),
                                  .decay = decay.view(),
                                  .mdi_mix = kMix,
                                  .h = h.view(),
                                  .h_rounded = h_rounded.view(),
                                  .x = x.view(),
                                  .norm = norm.data(),
                                  .u = u.view()};
        if (!dpg) op.context_decay = other.view();
        // Rows that lie anywhere: the state backwards behind its list, and c where it is not the same for all. Every
        // fourth has no state.
        const auto has_state = [&](std::int64_t r) { return kind != C::kListed || r % 4 != 3; };
        std::vector<float*> states;
        std::vector<const float*> contexts;
        for (std::int64_t r = 0; r < rows; ++r) {
          states.push_back(has_state(r) ? h.view().row(r) - dim : nullptr);
          contexts.push_back(kind == C::kListed && r % 2 == 0 ? c.view().row(r) - dim : nullptr);
        }
        const DeviceBuffer<float*> state_list = upload(this->on(), states);
        const DeviceBuffer<const float*> context_list = upload(this->on(), contexts);
        if (kind == C::kPerRow) op.c = c.view();
        if (kind == C::kShared) op.c_bias = c.data();
        if (kind == C::kListed) {
          op.h = {state_list.data(), rows, dim, dim};
          op.c = {context_list.data(), rows, dim, dim};
          op.c_bias = c.data();
        }
        advance_norm(this->on(), op);
        const std::vector<float> got_h = h.download();
        const std::vector<float> got_x = x.download();
        const std::vector<A> got_rounded = h_rounded.download();
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t i = 0; i < dim; ++i) {
            const auto at = static_cast<std::size_t>(r * dim + i);
            const double mix = static_cast<double>(kMix);
            const double gamma =
                std::clamp(sigmoid(decay(r, i)) * (dpg ? 1.0 : sigmoid(other(r, i))), 1e-6, 1.0 - 1e-6);
            const double s = sigmoid(gates(r, i) + bias(0, i));
            const double g = sigmoid(zm(r, i) + gates(r, dim + i));
            const double before = has_state(r) ? h(r, i) : 0.0;
            const double want_h = (gamma + mix * (1.0 - g + gamma)) * before + zv(r, i) * (s + mix * g);
            const double want_x =
                x(r, i) + want_h + 0.1 * zv(r, dim + i) +
                (kind == C::kNone ? 0.0 : c(kind == C::kShared || (kind == C::kListed && r % 2 != 0) ? 0 : r, i));
            ASSERT_NEAR(static_cast<double>(got_x[at]), want_x, 3e-6 * (1.0 + std::abs(want_x)));
            if (!has_state(r)) {
              ASSERT_EQ(static_cast<double>(got_h[at]), h(r, i));
              continue;
            }
            ASSERT_NEAR(static_cast<double>(got_h[at]), want_h, 2e-6 * (1.0 + std::abs(want_h)));
            ASSERT_EQ(to_float(got_rounded[at]), to_float(from_float<A>(got_h[at])));
          }
        }
        EXPECT_TRUE(is_normed(u.download(), normed(got_x, norm.values())));
      }
    }
  }
}

TYPED_TEST(FusedNormsTest, SumsAndRoundsTheNextLayersState) {
  using A = TypeParam;
  for (const std::int64_t rows : this->kRows) {
    for (const std::int64_t dim : this->kDims) {
      if (small_sizes() && rows * dim > 30000) continue;
      for (const bool has_next : {true, false}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << dim << (has_next ? "" : ", the last layer"));
        Matrix<float> x = random_matrix<float>(this->on(), rows, dim, kPacked, 1);
        Matrix<float> norm = random_matrix<float>(this->on(), 1, dim, kPacked, 2);
        Matrix<float> h = random_matrix<float>(this->on(), rows, dim, kAlignedGaps, 3);
        Matrix<A> rounded(this->on(), rows, dim, kAlignedGaps);
        Matrix<A> u(this->on(), rows, dim);
        std::vector<double> before(x.values().size());
        for (std::size_t i = 0; i < before.size(); ++i) before[i] = 1e6 / static_cast<double>(i + 1);
        DeviceBuffer<double> sum = upload(this->on(), before);
        SumNorm<Device, A> op{.x = x.view(),
                              .sum = MatrixView<double, Device>(sum.data(), rows, dim),
                              .norm = norm.data(),
                              .u = u.view(),
                              .next = {}};
        // Listed rows: every third has no sum, every other one closes its segment.
        Matrix<float> slots(this->on(), rows, dim);
        std::vector<double*> sums_of_rows;
        std::vector<float*> closed;
        const auto has_sum = [&](std::int64_t r) { return !has_next || r % 3 != 2; };
        const auto closes = [&](std::int64_t r) { return has_next && has_sum(r) && r % 2 == 0; };
        for (std::int64_t r = 0; r < rows; ++r) {
          sums_of_rows.push_back(has_sum(r) ? sum.data() + r * dim - 5 : nullptr);
          closed.push_back(closes(r) ? slots.view().row(r) - 3 : nullptr);
        }
        const DeviceBuffer<double*> sum_list = upload(this->on(), sums_of_rows);
        const DeviceBuffer<float*> closed_list = upload(this->on(), closed);
        constexpr std::int64_t kSegment = 24;
        if (has_next) {
          op.next = {h.view(), rounded.view()};
          op.sum = {sum_list.data(), rows, dim, 5};
          op.closed = {closed_list.data(), rows, dim, 3};
          op.segment = kSegment;
        }
        sum_norm(this->on(), op);
        const std::vector<double> sums = download(this->on(), sum);
        const std::vector<float> means = slots.download();
        for (std::size_t i = 0; i < sums.size(); ++i) {
          const auto r = static_cast<std::int64_t>(i) / dim;
          const double all = before[i] + (has_sum(r) ? static_cast<double>(x.values()[i]) : 0.0);
          ASSERT_EQ(sums[i], closes(r) ? 0.0 : all) << i;
          if (!closes(r)) continue;
          ASSERT_EQ(means[i], static_cast<float>(all / kSegment)) << i;
        }
        EXPECT_TRUE(is_normed(u.download(), normed(x.values(), norm.values())));
        if (has_next) this->expect_rounded(rounded.download(), h);
      }
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
