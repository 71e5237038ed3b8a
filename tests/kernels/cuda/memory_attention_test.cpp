// memory_attention against fp64 softmax attention: any head size, few and many tokens and slots, large scores, in
// place, rows of wider matrices; a row's bits do not depend on how many rows there are.
#include "kernels/cuda/attention/algo.h"
#include "tests/kernels/cuda/dense_testing.h"

namespace mmrec::kernels::test {
namespace {

struct Case {
  std::int64_t batch, time, heads, d, slots;
  Layout layout = kPacked;
  double deviation = 1.0;
  double tolerance = 1e-5;

  std::int64_t dim() const { return heads * d; }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.batch << " x " << c.time << " tokens, " << c.heads << " heads of " << c.d << ", " << c.slots
             << " slots, pad " << c.layout.pad;
}

class CudaMemoryAttentionTest : public CudaTest {
 protected:
  template <class A>
  struct Operands {
    DeviceMatrix<A> q;
    DeviceMatrix<float> slots;  // rings of 3 slots more than are filled
  };
  static constexpr std::int64_t kSpare = 3;

  template <class A>
  Operands<A> operands(const Case& c) {
    return {random_matrix<A>(cuda(), c.batch * c.time, c.dim(), c.layout, 1, c.deviation),
            random_matrix<float>(cuda(), c.batch * (c.slots + kSpare), c.dim(), c.layout, 2, c.deviation)};
  }

  template <class A>
  static MemoryAttention<Device, A> job(const Case& c, Operands<A>& in, MatrixView<A, Device> q,
                                        MatrixView<A, Device> out, std::int64_t time) {
    return {.q = sequences<const A>(q, c.batch, c.time, 0, time),
            .slots = sequences<const float>(in.slots.view(), c.batch, c.slots + kSpare, 0, c.slots),
            .heads = c.heads,
            .out = sequences(out, c.batch, c.time, 0, time)};
  }
  template <class A>
  void run(const Case& c, Operands<A>& in, MatrixView<A, Device> q, MatrixView<A, Device> out, std::int64_t time) {
    memory_attention(cuda(), job(c, in, q, out, time));
  }

  template <class A>
  static std::vector<double> reference(const Case& c, const Operands<A>& in) {
    std::vector<double> out(static_cast<std::size_t>(c.batch * c.time * c.dim()));
    parallel_for(c.batch * c.time * c.heads, [&](std::int64_t n) {
      const std::int64_t r = n / c.heads, first = n % c.heads * c.d;
      const std::int64_t first_slot = r / c.time * (c.slots + kSpare);
      std::vector<double> weights(static_cast<std::size_t>(c.slots));
      double top = -INFINITY;
      for (std::int64_t j = 0; j < c.slots; ++j) {
        double dot = 0.0;
        for (std::int64_t i = first; i < first + c.d; ++i) dot += in.q(r, i) * in.slots(first_slot + j, i);
        weights[static_cast<std::size_t>(j)] = dot / std::sqrt(static_cast<double>(c.d));
        top = std::max(top, weights[static_cast<std::size_t>(j)]);
      }
      double sum = 0.0;
      for (double& w : weights) sum += w = std::exp(w - top);
      double* to = out.data() + r * c.dim();
      for (std::int64_t j = 0; j < c.slots; ++j) {
        const double share = weights[static_cast<std::size_t>(j)] / sum;
        for (std::int64_t i = first; i < first + c.d; ++i) to[i] += share * in.slots(first_slot + j, i);
      }
    });
    return out;
  }

  template <class A>
  void check(const Case& c) {
    SCOPED_TRACE(c);
    Operands<A> in = operands<A>(c);
    DeviceMatrix<A> out(cuda(), c.batch * c.time, c.dim(), c.layout);
    run(c, in, in.q.view(), out.view(), c.time);
    const std::vector<A> got = out.download();
    const std::vector<double> want = reference(c, in);
    const auto wrong =
        static_cast<std::size_t>(first_failure(static_cast<std::int64_t>(got.size()), [&](std::int64_t n) {
          const auto i = static_cast<std::size_t>(n);
          return rounds_to(got[i], want[i], c.tolerance);
        }));
    ASSERT_EQ(wrong, got.size()) << wrong << ": " << to_float(got[wrong]) << " for " << want[wrong];
    run(c, in, in.q.view(), in.q.view(), c.time);
    EXPECT_TRUE(same_bits(in.q.download(), got)) << "in place";
  }
};

TEST_F(CudaMemoryAttentionTest, MatchesFloat64) {
  // Head sizes on either side of every width; slots on either side of batches, chunks, tiles and rounds.
  std::vector<Case> cases = {{1, 1, 1, 1, 1},
                             {2, 3, 4, 7, 2},
                             {1, 5, 8, 48, 2},
                             {3, 4, 2, 64, 31},
                             {2, 2, 3, 33, 32},
                             {1, 3, 1, 100, 33},
                             {2, 65, 2, 48, 7},
                             {1, 2, 2, 4, 257},
                             {1, 1, 1, 16, 1030},
                             {1, 40, 1, 16, 300},
                             {1, 17, 2, 20, 66},
                             {1, 16, 1, 32, 129},
                             {2, 15, 2, 32, 33},
                             {1, 33, 1, 64, 65},
                             {1, 20, 1, 68, 17},
                             {1, 2, 1, 128, 67},
                             {1, 2, 2, 256, 21},
                             {1, 17, 1, 512, 9},
                             {1, 1, 1, 516, 70},
                             {1, 18, 1, 1024, 6},
                             {1, 2, 1, 1028, 37},
                             {1, 1, 1, 2048, 3},
                             {1, 1, 64, 4, 64},
                             {5, 1, 3, 12, 5},
                             {1, 130, 1, 8, 4},
                             {2, 33, 2, 24, 40, kAlignedGaps},
                             {2, 17, 2, 16, 9, kUnaligned},
                             {2, 3, 2, 64, 70, kAlignedGaps}};
  if (!small_sizes()) {
    for (const Case& c : {Case{1, 8192, 16, 64, 64}, Case{1, 300, 16, 128, 1024}, Case{64, 1, 16, 64, 1024},
                          Case{2, 1000, 8, 48, 31}, Case{1, 4, 2, 128, 5000}}) {
      cases.push_back(c);
    }
  }
  for (const Case& c : cases) {
    check<float>(c);
    check<BFloat16>(c);
    check<Float16>(c);
  }
}

TEST_F(CudaMemoryAttentionTest, EveryWayIsTakenByItsShapes) {
  const auto way_of = [&](const Case& c) {
    Operands<float> in = operands<float>(c);
    return choose_attention(job(c, in, in.q.view(), in.q.view(), c.time));
  };
  EXPECT_EQ(way_of({2, 15, 2, 64, 5}), AttentionAlgo::kSplit);
  EXPECT_EQ(way_of({1, 16, 2, 64, 5}), AttentionAlgo::kTile);
  EXPECT_EQ(way_of({1, 16, 1, 1024, 5}), AttentionAlgo::kTile);
  EXPECT_EQ(way_of({1, 16, 1, 1028, 5}), AttentionAlgo::kAny);
  EXPECT_EQ(way_of({1, 16, 2, 33, 5}), AttentionAlgo::kAny);
}

// By tiles and by groups of lanes with the same bits, whatever the number of tokens.
TEST_F(CudaMemoryAttentionTest, EveryWayCanBeForced) {
  for (const std::int64_t time : {3, 20}) {
    const Case c{2, time, 2, 48, 37};
    SCOPED_TRACE(c);
    Operands<float> in = operands<float>(c);
    DeviceMatrix<float> out(cuda(), c.batch * c.time, c.dim(), c.layout);
    const std::vector<double> want = reference(c, in);
    std::vector<float> of_tiles;
    for (const AttentionAlgo way : {AttentionAlgo::kTile, AttentionAlgo::kSplit, AttentionAlgo::kAny}) {
      memory_attention(cuda(), job(c, in, in.q.view(), out.view(), c.time), way);
      const std::vector<float> got = out.download();
      for (std::size_t i = 0; i < got.size(); ++i) ASSERT_TRUE(rounds_to(got[i], want[i], c.tolerance)) << i;
      if (way == AttentionAlgo::kTile) of_tiles = got;
      EXPECT_TRUE(way == AttentionAlgo::kAny || same_bits(got, of_tiles));
    }
  }
}

TEST_F(CudaMemoryAttentionTest, LargeScores) {
  // Scores up to thousands: only differences may be exponentiated. The error is that of the scores.
  for (const std::int64_t time : {1, 20}) {
    for (const std::int64_t slots : {5, 32, 70}) check<float>({1, time, 1, 24, slots, kPacked, 40.0, 0.05});
  }
}

TEST_F(CudaMemoryAttentionTest, OneSlotIsTheAnswer) {
  for (const Layout layout : {kPacked, kAlignedGaps, kUnaligned}) {
    const Case c{3, 5, 4, 24, 1, layout};
    Operands<BFloat16> in = operands<BFloat16>(c);
    DeviceMatrix<BFloat16> out(cuda(), c.batch * c.time, c.dim(), layout);
    run(c, in, in.q.view(), out.view(), c.time);
    const std::vector<BFloat16> got = out.download();
    for (std::int64_t r = 0; r < c.batch * c.time; ++r) {
      for (std::int64_t i = 0; i < c.dim(); ++i) {
        const auto slot = static_cast<float>(in.slots(r / c.time * (1 + kSpare), i));
        ASSERT_EQ(got[static_cast<std::size_t>(r * c.dim() + i)].bits, from_float<BFloat16>(slot).bits);
      }
    }
  }
}

TEST_F(CudaMemoryAttentionTest, BitsDoNotDependOnTheNumberOfRows) {
  for (const Case& c : {Case{2, 40, 2, 16, 300}, Case{2, 40, 2, 64, 70}, Case{1, 40, 1, 200, 21},
                        Case{1, 20, 1, 1000, 9}, Case{1, 20, 1, 20, 2}}) {
    SCOPED_TRACE(c);
    Operands<float> in = operands<float>(c);
    DeviceMatrix<float> all(cuda(), c.batch * c.time, c.dim());
    run(c, in, in.q.view(), all.view(), c.time);
    for (const std::int64_t time : {1, 7, 15, 16, 17}) {
      DeviceMatrix<float> some(cuda(), c.batch * c.time, c.dim());
      for (std::int64_t t = 0; t < c.time; t += time) {
        const MatrixView<float, Device> q = in.q.view();
        const MatrixView<float, Device> out = some.view();
        run(c, in, q.middle_rows(t, q.rows - t), out.middle_rows(t, q.rows - t), std::min(time, c.time - t));
      }
      EXPECT_TRUE(same_bits(some.download(), all.download())) << time << " tokens at a time";
    }
  }
}

TEST_F(CudaMemoryAttentionTest, NanStaysInItsHead) {
  for (const std::int64_t time : {2, 20}) {
    const Case c{1, time, 2, 16, 5};
    Operands<float> in = operands<float>(c);
    std::vector<float> q = in.q.values();
    q[3] = NAN;  // token 0, head 0
    in.q = DeviceMatrix<float>(cuda(), q, time, c.dim());
    DeviceMatrix<float> out(cuda(), time, c.dim());
    run(c, in, in.q.view(), out.view(), time);
    const std::vector<float> got = out.download();
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(got[i]), i < 16) << i;
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
