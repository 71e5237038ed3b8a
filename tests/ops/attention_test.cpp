// memory_attention against float64 softmax attention: any head size, few and many tokens and slots, large scores, in
// place, rows of wider matrices; a row's bits do not depend on how many rows there are.
#include "tests/ops/op_test.h"
#if defined(MMREC_TEST_CUDA)
#include "kernels/cuda/attention/algo.h"
#endif

namespace mmrec::kernels::test {
namespace {

struct Case {
  std::int64_t batch, time, heads, d, slots;
  Layout layout = kPacked;
  double deviation = 1.0;
  double tolerance = 1e-5;
  std::int64_t padding = 0;

  std::int64_t dim() const { return heads * d; }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.batch << " x " << c.time << " tokens, " << c.heads << " heads of " << c.d << ", " << c.slots
             << " slots, pad " << c.layout.pad;
}

class MemoryAttentionTest : public OpTest {
 protected:
  static constexpr std::int64_t kSpare = 3;
  template <class A>
  struct Operands {
    Matrix<A> q;
    Matrix<float> slots;  // rings of kSpare slots more than are filled

    Operands(Backend& on, const Case& c)
        : q(random_matrix<A>(on, c.batch * c.time, c.dim(), c.layout, 1, c.deviation)),
          slots(random_matrix<float>(on, c.batch * (c.slots + kSpare), c.dim(), c.layout, 2, c.deviation)) {}
    /// Of tokens [first, first + time) of every sequence.
    MemoryAttention<Space, A> op(const Case& c, Matrix<A>& out, std::int64_t first, std::int64_t time) {
      return {.q = q.sequences(c.batch, first, time),
              .slots = slots.sequences(c.batch, 0, c.slots),
              .heads = c.heads,
              .out = out.sequences(c.batch, first, time),
              .padding = c.padding};
    }
    MemoryAttention<Space, A> op(const Case& c, Matrix<A>& out) { return op(c, out, 0, c.time); }

    std::vector<double> reference(const Case& c) const {
      const std::vector<double> wide_q = widened(q.values()), wide_slots = widened(slots.values());
      std::vector<double> out(wide_q.size());
      parallel_for(c.batch * c.time * c.heads, [&](std::int64_t n) {
        const std::int64_t r = n / c.heads, first = n % c.heads * c.d;
        const std::vector<double> head = attend(
            wide_q.data() + r * c.dim() + first, wide_slots.data() + r / c.time * (c.slots + kSpare) * c.dim() + first,
            c.dim(), c.slots, 0, c.d, 1.0 / std::sqrt(static_cast<double>(c.d - c.padding)));
        std::copy(head.begin(), head.end(), out.begin() + r * c.dim() + first);
      });
      return out;
    }
  };

  template <class A>
  void check(const Case& c) {
    SCOPED_TRACE(c);
    Operands<A> in(on(), c);
    const std::vector<double> want = in.reference(c);
    on_every(
        [&](Backend& on) {
          Matrix<A> out(on, c.batch * c.time, c.dim(), c.layout);
          in.q.reset();
          memory_attention(on, in.op(c, out));
          std::vector<A> got = out.download();
          memory_attention(on, in.op(c, in.q));
          EXPECT_TRUE(same_bits(in.q.download(), got)) << "in place";
          return got;
        },
        [&](const std::vector<A>& got) {
          EXPECT_TRUE(all_round_to(got, want, [&](std::size_t) { return c.tolerance; }));
        });
  }
};

TEST_F(MemoryAttentionTest, MatchesFloat64) {
  // Head sizes on either side of every width; slots on either side of batches, chunks, tiles and rounds.
  std::vector<Case> cases = {{1, 1, 1, 1, 1},
                             {2, 3, 4, 7, 1},
                             {2, 3, 4, 7, 2},
                             {1, 5, 8, 48, 2},
                             {3, 4, 2, 64, 31},
                             {2, 2, 3, 33, 32},
                             {1, 3, 1, 100, 33},
                             {2, 65, 2, 48, 7},
                             {1, 2, 2, 4, 257},
                             {1, 2, 2, 5, 257},
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
                             {2, 3, 2, 64, 70, kAlignedGaps},
                             {.batch = 2, .time = 17, .heads = 2, .d = 32, .slots = 9, .padding = 24}};
  if (gpu_sizes()) {
    cases.insert(cases.end(), {{1, 8192, 16, 64, 64},
                               {1, 300, 16, 128, 1024},
                               {64, 1, 16, 64, 1024},
                               {2, 1000, 8, 48, 31},
                               {1, 4, 2, 128, 5000}});
  }
  if (!kOnCuda) {
    for (const std::int64_t slots : {1, 5, 32, 70}) cases.push_back({1, 1, 1, 21, slots, kPacked, 0.6, 1e-6});
    for (Case c : {Case{2, 3, 4, 7, 1}, Case{3, 4, 2, 64, 31}, Case{2, 65, 8, 48, 7}}) {
      c.deviation = 1.7;
      cases.push_back(c);
    }
  }
  for (const Case& c : cases) for_activations([&]<class A>(A) { check<A>(c); });
}

TEST_F(MemoryAttentionTest, LargeScores) {
  // Scores up to thousands: only differences may be exponentiated. The error is that of the scores.
  for (const std::int64_t time : {1, 20}) {
    for (const std::int64_t d : {24, 21}) {
      for (const std::int64_t slots : {1, 5, 32, 70}) check<float>({1, time, 1, d, slots, kPacked, 40.0, 0.05});
    }
  }
}

TEST_F(MemoryAttentionTest, OneSlotIsTheAnswer) {
  on_every([](Backend& on) {
    for (const Layout layout : kLayouts) {
      for_activations([&]<class A>(A) {
        const Case c{3, 5, 4, 24, 1, layout};
        Operands<A> in(on, c);
        Matrix<A> out(on, c.batch * c.time, c.dim(), layout);
        memory_attention(on, in.op(c, out));
        std::vector<A> want;
        for (std::int64_t r = 0; r < c.batch * c.time; ++r) {
          for (std::int64_t i = 0; i < c.dim(); ++i) {
            want.push_back(from_float<A>(static_cast<float>(in.slots(r / c.time * (1 + kSpare), i))));
          }
        }
        EXPECT_TRUE(same_bits(out.download(), want));
      });
    }
  });
}

TEST_F(MemoryAttentionTest, BitsDoNotDependOnTheNumberOfRows) {
  on_every([](Backend& on) {
    for (const Case& c : {Case{2, 40, 2, 16, 300}, Case{2, 40, 2, 64, 70}, Case{1, 40, 1, 200, 21},
                          Case{1, 20, 1, 1000, 9}, Case{1, 20, 1, 20, 2}}) {
      SCOPED_TRACE(c);
      Operands<float> in(on, c);
      Matrix<float> all(on, c.batch * c.time, c.dim());
      memory_attention(on, in.op(c, all));
      for (const std::int64_t time : {1, 7, 15, 16, 17}) {
        Matrix<float> some(on, c.batch * c.time, c.dim());
        for (std::int64_t t = 0; t < c.time; t += time) {
          memory_attention(on, in.op(c, some, t, std::min(time, c.time - t)));
        }
        EXPECT_TRUE(same_bits(some.download(), all.download())) << time << " tokens at a time";
      }
    }
  });
}

TEST_F(MemoryAttentionTest, NanStaysInItsHead) {
  on_every([](Backend& on) {
    for (const std::int64_t time : {2, 20}) {
      const Case c{1, time, 2, 16, 5};
      Operands<float> in(on, c);
      std::vector<float> q = in.q.values();
      q[3] = NAN;  // token 0, head 0
      in.q = Matrix<float>(on, q, time, c.dim());
      Matrix<float> out(on, time, c.dim());
      memory_attention(on, in.op(c, out));
      const std::vector<float> got = out.download();
      for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(got[i]), i < 16) << i;
    }
  });
}

#if defined(MMREC_TEST_CUDA)

TEST_F(MemoryAttentionTest, EveryAlgoIsTakenByItsShapes) {
  const auto algo_of = [&](const Case& c) {
    Operands<float> in(on(), c);
    return choose_attention(in.op(c, in.q));
  };
  EXPECT_EQ(algo_of({2, 15, 2, 64, 5}), AttentionAlgo::kSplit);
  EXPECT_EQ(algo_of({1, 16, 2, 64, 5}), AttentionAlgo::kTile);
  EXPECT_EQ(algo_of({1, 16, 1, 1024, 5}), AttentionAlgo::kTile);
  EXPECT_EQ(algo_of({1, 16, 1, 1028, 5}), AttentionAlgo::kAny);
  EXPECT_EQ(algo_of({1, 16, 2, 33, 5}), AttentionAlgo::kAny);
}

// By tiles and by groups of lanes with the same bits, whatever the number of tokens.
TEST_F(MemoryAttentionTest, EveryAlgoCanBeForced) {
  for (const std::int64_t time : {3, 20}) {
    const Case c{2, time, 2, 48, 37};
    SCOPED_TRACE(c);
    Operands<float> in(on(), c);
    Matrix<float> out(on(), c.batch * c.time, c.dim(), c.layout);
    std::vector<float> of_tiles;
    for (const AttentionAlgo algo : {AttentionAlgo::kTile, AttentionAlgo::kSplit, AttentionAlgo::kAny}) {
      memory_attention(on(), in.op(c, out), algo);
      const std::vector<float> got = out.download();
      ASSERT_TRUE(all_round_to(got, in.reference(c), [&](std::size_t) { return c.tolerance; }));
      if (algo == AttentionAlgo::kTile) of_tiles = got;
      EXPECT_TRUE(algo == AttentionAlgo::kAny || same_bits(got, of_tiles));
    }
  }
}

#endif

}  // namespace
}  // namespace mmrec::kernels::test
