// The one-kernel decode step against float64 (decode_testing.h), and what must hold to the bit. Long, because all its
// tests share a fixture.

#include <initializer_list>

#include "kernels/cuda/runtime/cuda.h"
#include "models/mmrec/cuda/ops.h"
#include "tests/models/cuda/decode_testing.h"

namespace mmrec::kernels {
namespace {

using test::DecodeModel;
using test::DecodeRun;
using test::DecodeState;

// Shapes are {batch, D, layers, heads, F, hidden units of the gate, V, memory slots}.
constexpr DecodeShape kMdi = {1, 64, 2, 2, 96, 32, 257, 4};

DecodeShape with_batch(DecodeShape shape, std::int64_t batch) {
  shape.batch = batch;
  return shape;
}

class DecodeStepTest : public test::OpTest {
 protected:
  void SetUp() override {
    test::OpTest::SetUp();
    if (!IsSkipped() && on().compute_capability() < 90) GTEST_SKIP() << "needs compute capability 9.0";
  }

  static std::vector<int> random_tokens(const DecodeShape& s, unsigned step) {
    return test::random_ids(s.batch, s.vocab, step);
  }

  /// Three steps by the expected algorithm: logits after each, h and the sums after all.
  template <class A>
  void check(const DecodeShape& shape, std::int64_t slots, double bound) {
    check<A>(shape, slots, bound, shape.batch == 1 && sizeof(A) == 2 ? DecodeAlgo::kSingle : DecodeAlgo::kBatch);
  }
  template <class A>
  void check(const DecodeShape& shape, std::int64_t slots, double bound, DecodeAlgo algo) {
    DecodeShape by_any = shape;
    by_any.algo = DecodeAlgo::kAuto;
    ASSERT_TRUE(decode_step_supported(on(), by_any, sizeof(A)));
    EXPECT_EQ(decode_algo<A>(on(), shape), algo);
    const DecodeModel<A> model(shape);
    DecodeState state = model.random_state(1000);
    DecodeRun<A> run(on(), model, state);
    for (unsigned step = 0; step < (test::few_cases() ? 1 : 3); ++step) {
      const std::vector<int> tokens = random_tokens(shape, step);
      std::vector<double> want;
      for (std::int64_t b = 0; b < shape.batch; ++b) {
        const test::Vector logits = model.step(state, b, tokens[static_cast<std::size_t>(b)], slots);
        want.insert(want.end(), logits.begin(), logits.end());
      }
      EXPECT_LT(test::largest_error(run.step(tokens, slots), want), bound) << "logits, step " << step;
    }
    EXPECT_LT(test::largest_error(run.h(), state.h), bound) << "h";
    const std::vector<double> sum = run.segment_sum();
    double worst = 0.0;
    for (std::size_t i = 0; i < sum.size(); ++i) {
      const double error = std::abs(sum[i] - state.segment_sum[i]) / (1.0 + std::abs(sum[i]));
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
    EXPECT_LT(worst, bound) << "segment sums";
  }

  /// One sequence by every algorithm that there is for it, which must be `algos`.
  template <class A>
  void check_algos(DecodeShape shape, std::int64_t slots, std::initializer_list<DecodeAlgo> algos) {
    std::vector<std::vector<float>> logits, h;
    std::vector<std::vector<double>> sums;
    for (const DecodeAlgo algo : {DecodeAlgo::kCluster, DecodeAlgo::kSingle, DecodeAlgo::kBatch}) {
      shape.algo = algo;
      const bool expected = std::find(algos.begin(), algos.end(), algo) != algos.end();
      ASSERT_EQ(decode_algo<A>(on(), shape), expected ? algo : DecodeAlgo::kNone);
      if (!expected) continue;
      const DecodeModel<A> model(shape);
      DecodeRun<A> run(on(), model, model.random_state(1000));
      for (unsigned step = 0; step < 2; ++step) logits.push_back(run.step(random_tokens(shape, step), slots));
      h.push_back(run.h());
      sums.push_back(run.segment_sum());
    }
    for (std::size_t i = 1; i < h.size(); ++i) {
      EXPECT_EQ(logits[2 * i], logits[0]);
      EXPECT_EQ(logits[2 * i + 1], logits[1]);
      EXPECT_EQ(h[i], h[0]);
      EXPECT_EQ(sums[i], sums[0]);
    }
  }

  /// A batch's sequences one by one.
  template <class A>
  void check_batches(const DecodeShape& one, std::int64_t batch, std::int64_t slots) {
    const DecodeShape shape = with_batch(one, batch);
    const DecodeModel<A> model(shape);
    const DecodeModel<A> single(with_batch(one, 1));  // the same weights: they follow from the seed
    const DecodeState state = model.random_state(1000);
    DecodeRun<A> together(on(), model, state);
    std::vector<std::vector<float>> logits;
    for (unsigned step = 0; step < 2; ++step) logits.push_back(together.step(random_tokens(shape, step), slots));
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto part = [&](const auto& all, std::int64_t width) {
        auto mine = std::remove_cvref_t<decltype(all)>();
        for (std::int64_t l = 0; l < shape.layers; ++l) {
          const auto from = all.begin() + (l * batch + b) * width;
          mine.insert(mine.end(), from, from + width);
        }
        return mine;
      };
      const DecodeState own = {part(state.h, shape.dim), part(state.memory, shape.memory_slots * shape.dim),
                               part(state.segment_sum, shape.dim)};
      DecodeRun<A> alone(on(), single, own);
      for (unsigned step = 0; step < 2; ++step) {
        const std::vector<float> got = alone.step({random_tokens(shape, step)[static_cast<std::size_t>(b)]}, slots);
        EXPECT_EQ(0, std::memcmp(got.data(), logits[step].data() + b * shape.vocab, got.size() * sizeof(float)))
            << "sequence " << b << " of " << batch;
      }
      EXPECT_EQ(alone.h(), part(together.h(), shape.dim));
      EXPECT_EQ(alone.segment_sum(), part(together.segment_sum(), shape.dim));
    }
  }

  /// Without a head: what a run leaves, alone or beside another one with other states.
  struct Ends {
    std::vector<std::vector<float>> x, h;  // of each run
  };
  template <class A>
  Ends end_without_head(const DecodeShape& shape, std::int64_t slots, int runs, DecodeAlgo algo) {
    const DecodeModel<A> model(shape);
    std::vector<std::unique_ptr<DecodeRun<A>>> all;
    std::vector<DeviceBuffer<float>> x;
    for (int i = 0; i < 2; ++i) {
      all.push_back(std::make_unique<DecodeRun<A>>(on(), model, model.random_state(static_cast<unsigned>(1000 + i))));
      x.push_back(on().allocate<float>(static_cast<std::size_t>(shape.batch * shape.dim)));
      DecodeStep<Device, A>& op = all.back()->op();
      op.shape.vocab = 0;
      op.shape.stacks = runs;
      op.shape.algo = algo;
      op.head = nullptr;
      op.logits = nullptr;
      op.x = x.back().data();
      op.slots = slots;
    }
    Ends ends;
    for (unsigned step = 0; step < 2; ++step) {
      for (auto& run : all) run->feed(random_tokens(shape, step));
      if (runs == 2) {
        decode_steps(on(), all[0]->op(), all[1]->op());
      } else {
        for (auto& run : all) decode_step(on(), run->op());
      }
    }
    for (int i = 0; i < 2; ++i) {
      ends.x.push_back(test::download(on(), x[static_cast<std::size_t>(i)]));
      ends.h.push_back(all[static_cast<std::size_t>(i)]->h());
    }
    return ends;
  }
  /// By every algorithm: what a step without a head leaves makes the logits of one with a head, and steps side by side
  /// leave what each leaves alone.
  template <class A>
  void check_without_head(const DecodeShape& shape, std::int64_t slots, std::initializer_list<DecodeAlgo> algos,
                          double bound) {
    const DecodeModel<A> model(shape);
    DecodeRun<A> whole(on(), model, model.random_state(1000));
    std::vector<float> logits;
    for (unsigned step = 0; step < 2; ++step) logits = whole.step(random_tokens(shape, step), slots);
    for (const DecodeAlgo algo : algos) {
      const Ends alone = end_without_head<A>(shape, slots, 1, algo);
      const Ends beside = end_without_head<A>(shape, slots, 2, algo);
      EXPECT_EQ(alone.h[0], whole.h());
      std::vector<double> want;
      for (std::int64_t b = 0; b < shape.batch; ++b) {
        const float* const row = alone.x[0].data() + b * shape.dim;
        const test::Vector predicted = model.predict(test::Vector(row, row + shape.dim));
        want.insert(want.end(), predicted.begin(), predicted.end());
      }
      EXPECT_LT(test::largest_error(logits, want), bound);
      EXPECT_EQ(beside.x, alone.x);
      EXPECT_EQ(beside.h, alone.h);
    }
  }
};

constexpr double kFp32 = 2e-5;
constexpr double kBf16 = 3e-2;
constexpr double kFp16 = 5e-3;

TEST_F(DecodeStepTest, WithoutAHeadStepsRunSideBySide) {
  constexpr DecodeShape kSmall = {1, 128, 2, 2, 256, 32, 64, 1};
  using enum DecodeAlgo;
  check_without_head<BFloat16>(kSmall, 0, {kCluster, kSingle, kBatch}, kBf16);
  if (test::few_cases()) return;
  check_without_head<float>(with_batch(kMdi, 3), 0, {kBatch}, kFp32);
  check_without_head<Float16>(kMdi, 2, {kSingle, kBatch}, kFp16);
}

TEST_F(DecodeStepTest, MatchesFloat64InFp32) {
  if (test::few_cases()) return check<float>(kMdi, 3, kFp32);
  for (const std::int64_t batch : {1, 3, 8}) {
    for (const std::int64_t slots : {0, 1, 3}) check<float>(with_batch(kMdi, batch), slots, kFp32);
  }
}

TEST_F(DecodeStepTest, MatchesFloat64In16Bits) {
  check<Float16>(kMdi, 2, kFp16);
  if (test::few_cases()) return check<BFloat16>(with_batch(kMdi, 5), 1, kBf16);
  check<Float16>(with_batch(kMdi, 2), 2, kFp16);
  for (const std::int64_t batch : {1, 3, 5, 8}) {
    for (const std::int64_t slots : {0, 1, 4}) check<BFloat16>(with_batch(kMdi, batch), slots, kBf16);
  }
}

TEST_F(DecodeStepTest, TheScaleOfPaddedHeadsIsThatOfTheirChannels) {
  DecodeShape shape = kMdi;
  shape.head_padding = 24;
  check<float>(shape, 3, kFp32);
}

TEST_F(DecodeStepTest, DpgMatchesFloat64) {
  DecodeShape shape = kMdi;
  shape.dpg = true;
  shape.gate_hidden = 64;
  check<BFloat16>(shape, 3, kBf16);
  if (test::few_cases()) return;
  shape = with_batch(shape, 2);
  shape.gate_hidden = 40;
  for (const std::int64_t slots : {0, 1, 3}) check<float>(shape, slots, kFp32);
  check<BFloat16>(shape, 0, kBf16);
}

// Vectors that are not whole chunks of a warp, rows of several slots, one head, more slots of memory than lanes.
TEST_F(DecodeStepTest, OddShapesMatchFloat64) {
  check<float>({1, 304, 1, 1, 32, 16, 3, 40}, 37, kFp32);  // a wide head
  if (test::few_cases()) return;
  check<BFloat16>({1, 72, 2, 3, 104, 24, 33, 2}, 2, kBf16, DecodeAlgo::kBatch);  // rows that are not whole steps
  check<float>({2, 36, 1, 1, 20, 4, 2, 40}, 40, kFp32);
  check<BFloat16>({2, 24, 3, 3, 8, 8, 1, 2}, 2, kBf16);
  check<float>({1, 160, 1, 5, 1100, 40, 300, 1}, 0, kFp32, DecodeAlgo::kBatch);
}

TEST_F(DecodeStepTest, LargeShapesMatchFloat64) {
  if (test::small_sizes()) GTEST_SKIP() << "large sizes";
  check<BFloat16>({1, 1024, 2, 16, 4096, 256, 5003, 4}, 3, kBf16);
  // Rows of one part where two are multiplied at once, in more slots than the ring has.
  check<BFloat16>({1, 512, 6, 8, 768, 128, 8192, 32}, 29, kBf16, DecodeAlgo::kSingle);
  check<Float16>({1, 384, 6, 6, 768, 96, 8192, 32}, 29, kBf16, DecodeAlgo::kSingle);
  check<BFloat16>({8, 2048, 1, 16, 8192, 512, 32000, 1}, 0, kBf16);
  check<float>({3, 384, 2, 6, 1536, 96, 4096, 1}, 1, kFp32);
}

constexpr DecodeShape kCompact = {1, 192, 2, 1, 320, 64, 131, 4};  // too wide a head for a cluster

/// All matrices with scales for groups or for rows; but the largest with 4 bits.
DecodeShape compact(DecodeShape shape, bool has_int4, bool by_groups) {
  const auto set_format = [&]<class Format>(const models::Field& field, Format& format) {
    if constexpr (std::is_same_v<Format, WeightFormat>) {
      format = WeightFormat(DType::kI8, by_groups ? kCompactGroup : 0);
      const auto* const parts = field.parts.data();
      const bool is_large = parts == models::table::kGate || parts == models::table::kMemoryQ ||
                            parts == models::table::kMemoryOut || parts == models::table::kFfnIn ||
                            parts == models::table::kFfnOut;
      if (has_int4 && is_large) format = WeightFormat(DType::kI4, kCompactGroup);
    }
  };
  models::visit_layer(set_format, shape.formats);
  shape.formats.head = DType::kI8;
  shape.algo = DecodeAlgo::kCompact;  // also where it is slower
  return shape;
}

TEST_F(DecodeStepTest, BitsOfASequenceDoNotDependOnItsBatch) {
  if (test::few_cases()) GTEST_SKIP() << "many launches";
  check_batches<float>(kMdi, 3, 0);
  check_batches<BFloat16>(kMdi, 8, 3);
  check_batches<Float16>(kMdi, 2, 3);
  // So wide that 8 sequences multiply ffn_out by panels and one does not.
  DecodeShape wide = kMdi;
  wide.layers = 1;
  wide.ffn = 2304;
  check_batches<BFloat16>(wide, 8, 0);
  check_batches<BFloat16>(compact(kCompact, true, false), 8, 3);
  check_batches<BFloat16>(compact(kCompact, false, true), 2, 0);
  wide.ffn = 4352;
  wide.gate_hidden = 64;
  check_batches<BFloat16>(compact(wide, false, false), 8, 0);
  wide.ffn = 1152;
  check_batches<float>(wide, 8, 0);
}

// One sequence of these goes through a cluster of blocks (cluster.cuh), and not in a batch.
TEST_F(DecodeStepTest, SmallModelsMatchFloat64AndTheirBatches) {
  const bool holds_cluster = holds_decode_cluster(on());
  EXPECT_TRUE(holds_cluster || on().compute_capability() > 90);
  const DecodeAlgo algo = holds_cluster ? DecodeAlgo::kCluster : DecodeAlgo::kSingle;
  DecodeShape bundled = {1, 384, 2, 6, 768, 96, 8209, 32};
  if (test::small_sizes()) bundled.vocab = 300;
  check<BFloat16>(bundled, 29, kBf16, algo);
  if (test::few_cases()) return;
  // Blocks with one unit of channels and with two; without any of a hidden layer; steps that some warps lack.
  const DecodeShape shape = {1, 160, 3, 5, 96, 32, 1101, 20};
  for (const std::int64_t slots : {0, 1, 2, 20}) {
    check<BFloat16>(shape, slots, kBf16, algo);
    check_batches<BFloat16>(slots == 0 ? bundled : shape, 2, slots);
  }
  DecodeShape other = shape;
  other.dpg = true;
  other.dim = 256;
  other.heads = 4;
  other.ffn = 736;
  other.gate_hidden = 224;
  other.vocab = 5;
  for (const std::int64_t slots : {1, 17}) check_batches<BFloat16>(other, 2, slots);
  check<BFloat16>(other, 3, kBf16, algo);
}

TEST_F(DecodeStepTest, EveryAlgoGivesTheSameBits) {
  using enum DecodeAlgo;
  const DecodeShape small = {1, 160, 2, 5, 96, 32, 501, 20};
  for (const std::int64_t slots : {0, 17}) {
    if (holds_decode_cluster(on())) {
      check_algos<BFloat16>(small, slots, {kCluster, kSingle, kBatch});
    } else {
      check_algos<BFloat16>(small, slots, {kSingle, kBatch});
    }
    if (test::few_cases()) return;
    check_algos<Float16>(kMdi, std::min<std::int64_t>(slots, 3), {kSingle, kBatch});
    check_algos<float>(kMdi, std::min<std::int64_t>(slots, 3), {kBatch});
  }
  DecodeShape odd = kMdi;  // rows that are not whole steps
  odd.ffn = 104;
  check_algos<BFloat16>(odd, 1, {kBatch});
}

// The numbers of compact rows are exact, so the reference needs no other bound, and plain rows give nearly the same.
TEST_F(DecodeStepTest, CompactRowsMatchFloat64) {
  const auto check_formats = [&](const DecodeShape& shape) {
    for (const std::int64_t slots : {0, 3}) {
      check<BFloat16>(shape, slots, kBf16, DecodeAlgo::kCompact);
      DecodeShape by_plain = shape;
      by_plain.algo = shape.batch == 1 ? DecodeAlgo::kSingle : DecodeAlgo::kBatch;
      const DecodeModel<BFloat16> model(shape), other(by_plain);
      const DecodeState state = model.random_state(1000);
      DecodeRun<BFloat16> a(on(), model, state), b(on(), other, state);
      const std::vector<float> logits = b.step(random_tokens(shape, 0), slots);
      EXPECT_LT(test::largest_error(a.step(random_tokens(shape, 0), slots),
                                    std::vector<double>(logits.begin(), logits.end())),
                2e-2);
    }
  };
  check_formats(compact(kCompact, true, true));
  check_formats(compact(with_batch(kCompact, 3), true, true));
  if (test::few_cases()) return;
  check_formats(compact(kCompact, false, false));
  DecodeShape dpg = {1, 64, 2, 2, 128, 64, 257, 4};
  dpg.dpg = true;
  check_formats(compact(dpg, true, false));
  check_formats(compact(with_batch(dpg, 5), false, false));
  if (test::small_sizes()) return;
  constexpr DecodeShape kLong = {1, 2112, 1, 11, 4352, 576, 300, 4};  // rows of several chunks, the last of them short
  check_formats(compact(kLong, true, false));
  check_formats(compact(kLong, false, true));
  check_batches<BFloat16>(compact(kLong, true, false), 8, 3);
}

TEST_F(DecodeStepTest, ARecordedStepEqualsADirectOne) {
  const DecodeModel<BFloat16> model(with_batch(kMdi, 2));
  const DecodeState state = model.random_state(1000);
  DecodeRun<BFloat16> direct(on(), model, state);
  DecodeRun<BFloat16> recorded(on(), model, state);
  std::vector<float> want;
  const unsigned steps = test::few_cases() ? 2 : 4;
  for (unsigned step = 0; step < steps; ++step) want = direct.step(random_tokens(model.shape, step), 0);
  recorded.step(random_tokens(model.shape, 0), 0);
  const Graph graph(on(), [&] { decode_step(on(), recorded.op()); });
  for (unsigned step = 1; step < steps; ++step) {
    recorded.feed(random_tokens(model.shape, step));
    graph.launch(on());
  }
  EXPECT_EQ(recorded.logits(), want);
  EXPECT_EQ(recorded.h(), direct.h());
}

// A NaN of all ones, the mark of what is unwritten, in weights and state: the step ends, and it shows.
TEST_F(DecodeStepTest, NanEndsTheStepAndShows) {
  const auto check_type = [&]<class A>(A, std::int64_t batch) {
    DecodeModel<A> model(with_batch(kMdi, batch));
    std::memset(&model.embedding[5 * 64 + 7], 0xff, sizeof(A));
    DecodeState state = model.random_state(1000);
    DecodeRun<A> run(on(), model, state);
    std::vector<int> tokens = {5};
    if (batch > 1) tokens.push_back(6);
    const std::vector<float> logits = run.step(tokens, 3);
    for (std::int64_t i = 0; i < batch * model.shape.vocab; ++i) {
      EXPECT_EQ(std::isnan(logits[static_cast<std::size_t>(i)]), i < model.shape.vocab);
    }
  };
  check_type(BFloat16{}, 1);
  if (test::few_cases()) return;
  check_type(BFloat16{}, 2);
  check_type(float{}, 1);
  check_type(float{}, 2);
}

TEST_F(DecodeStepTest, SaysWhatItSupports) {
  EXPECT_TRUE(decode_step_supported(on(), kMdi, 2));
  EXPECT_FALSE(decode_step_supported(on(), with_batch(kMdi, kTileColumns + 1), 2));
  EXPECT_FALSE(decode_step_supported(on(), with_batch(kMdi, 0), 2));
  DecodeShape shape = kMdi;
  shape.gate_hidden = 4;  // 8 bytes in 16 bits
  EXPECT_FALSE(decode_step_supported(on(), shape, 2));
  EXPECT_TRUE(decode_step_supported(on(), shape, 4));
  const DecodeShape large = {8, 4096, 32, 32, 16384, 1024, 128256, 8};
  EXPECT_EQ(decode_step_supported(on(), large, 2), !test::kEmulated);  // its 4 blocks have to own too much
  shape = large;
  shape.dim = 32768;
  EXPECT_FALSE(decode_step_supported(on(), shape, 2));
}

}  // namespace
}  // namespace mmrec::kernels
