// finish_segments against a float64 rendering of its equations that rounds what enters a product, and its promises: a
// sequence's bits do not depend on the batch, and the words that it borrows are zero afterwards.

#include "models/mmrec/cuda/ops.h"
#include "tests/models/cuda/decode_testing.h"
#include "tests/ops/op_test.h"

namespace mmrec::kernels::test {
namespace {

struct Shape {
  std::int64_t batch = 1, time = 1, position = 0, segment = 1, slots = 1, dim = 64, ffn = 128, heads = 2;
  std::int64_t head_padding = 0;
  bool biases = true;
};

/// Everything the op reads, on the host.
template <class A>
struct Inputs {
  Shape shape;
  std::vector<float> x, h, memory, norm, memory_out_bias, ffn_in_bias, ffn_out_bias;
  std::vector<double> sum;
  std::vector<A> v, q, memory_out, ffn_in, ffn_out;
};

template <class A>
Inputs<A> random_inputs(const Shape& s, std::uint64_t stream) {
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const double d = std::sqrt(static_cast<double>(s.dim));
  const double f = std::sqrt(static_cast<double>(s.ffn));
  Inputs<A> in = {.shape = s,
                  .x = random_normal<float>(size(s.batch * s.time * s.dim), 0.3, 1.0, stream),
                  .h = random_normal<float>(size(s.batch * s.time * s.dim), 0.0, 1.0, stream + 11),
                  .memory = random_normal<float>(size(s.batch * s.slots * s.dim), 0.0, 1.5, stream + 1),
                  .norm = random_normal<float>(size(s.dim), 1.0, 0.2, stream + 2),
                  .memory_out_bias = random_normal<float>(size(s.dim), 0.0, 0.5, stream + 3),
                  .ffn_in_bias = random_normal<float>(size(s.ffn), 0.0, 0.5, stream + 4),
                  .ffn_out_bias = random_normal<float>(size(s.dim), 0.0, 0.5, stream + 5),
                  .sum = {},
                  .v = random_normal<A>(size(s.batch * s.time * s.dim), 0.0, 3.0, stream + 12),
                  .q = random_normal<A>(size(s.batch * s.time * s.dim), 0.0, 1.0, stream + 6),
                  .memory_out = random_normal<A>(size(s.dim * s.dim), 0.0, 1.0 / d, stream + 7),
                  .ffn_in = random_normal<A>(size(s.ffn * s.dim), 0.0, 1.0 / d, stream + 8),
                  .ffn_out = random_normal<A>(size(s.dim * s.ffn), 0.0, 1.0 / f, stream + 9)};
  for (auto* bias : {&in.memory_out_bias, &in.ffn_in_bias, &in.ffn_out_bias}) {
    if (!s.biases) std::fill(bias->begin(), bias->end(), 0.0F);
  }
  const bool begins = s.position % s.segment == 0;
  for (const float v : random_normal<float>(size(s.batch * s.dim), 0.0, 3.0, stream + 10)) {
    in.sum.push_back(begins ? 0.0 : v);
  }
  const std::int64_t filled = std::min(s.slots, s.position / s.segment);
  for (std::int64_t b = 0; b < s.batch; ++b) {  // what is not filled has no say
    std::fill(in.memory.begin() + (b * s.slots + filled) * s.dim, in.memory.begin() + (b + 1) * s.slots * s.dim,
              nan_of<float>());
    // Nor do queries where fewer than two slots are filled.
    const std::int64_t first = s.slots < 2 ? s.time : std::clamp<std::int64_t>(2 * s.segment - s.position, 0, s.time);
    std::fill_n(in.q.begin() + b * s.time * s.dim, first * s.dim, nan_of<A>());
  }
  return in;
}

struct Outputs {
  std::vector<double> x, memory, sum;
};

template <class A>
Outputs reference(const Inputs<A>& in) {
  const Shape& s = in.shape;
  Outputs out{{in.x.begin(), in.x.end()}, {in.memory.begin(), in.memory.end()}, in.sum};
  for (std::int64_t b = 0; b < s.batch; ++b) {
    double* memory = out.memory.data() + b * s.slots * s.dim;
    const auto token = [&](std::int64_t t) {
      double* x = out.x.data() + (b * s.time + t) * s.dim;
      const std::int64_t filled = std::min(s.slots, (s.position + t) / s.segment);
      const std::int64_t row = (b * s.time + t) * s.dim;
      const Vector q = widened(std::vector<A>(in.q.begin() + row, in.q.begin() + row + s.dim));
      const Vector slots(memory, memory + filled * s.dim);
      const Vector context =
          affine(in.memory_out, in.memory_out_bias, attended<A>(q, slots, s.heads, s.head_padding).data());
      for (std::int64_t c = 0; c < s.dim; ++c) {
        const auto at = static_cast<std::size_t>(row + c);
        x[c] += static_cast<double>(in.h[at]) + 0.1 * static_cast<double>(to_float(in.v[at]));
        x[c] += context[static_cast<std::size_t>(c)];
      }
      const Vector u = rmsnorm<A>(Vector(x, x + s.dim), in.norm);
      const Vector change = affine(in.ffn_out, in.ffn_out_bias, hidden(in.ffn_in, in.ffn_in_bias, u).data());
      for (std::int64_t c = 0; c < s.dim; ++c) x[c] += change[static_cast<std::size_t>(c)];
    };
    // Tokens of one segment look at the same slots and not at each other.
    for (std::int64_t first = 0, end = 0; first < s.time; first = end) {
      end = std::min(s.time, first + s.segment - (s.position + first) % s.segment);
      parallel_for(end - first, [&](std::int64_t t) { token(first + t); });
      for (std::int64_t c = 0; c < s.dim; ++c) {
        double& sum = out.sum[static_cast<std::size_t>(b * s.dim + c)];
        for (std::int64_t t = first; t < end; ++t) sum += out.x[static_cast<std::size_t>((b * s.time + t) * s.dim + c)];
        if ((s.position + end) % s.segment != 0) continue;
        memory[((s.position + end) / s.segment - 1) % s.slots * s.dim + c] = sum / static_cast<double>(s.segment);
        sum = 0.0;
      }
    }
  }
  return out;
}

template <class A>
class FinishSegmentsTest : public OpTest {
 protected:
  struct Result {
    std::vector<float> x, memory;
    std::vector<double> sum;
  };

  /// x has rows between its sequences that nobody may touch.
  Result run(const Inputs<A>& in, bool expect_supported = true) {
    const Shape& s = in.shape;
    const std::int64_t rows_each = s.time + 1;
    std::vector<float> x(static_cast<std::size_t>(s.batch * rows_each * s.dim), nan_of<float>());
    for (std::int64_t b = 0; b < s.batch; ++b) {
      std::copy_n(in.x.begin() + b * s.time * s.dim, s.time * s.dim, x.begin() + b * rows_each * s.dim);
    }
    Matrix<float> device_x(on(), x, s.batch * rows_each, s.dim);
    const DeviceBuffer<float> h = upload(on(), in.h);
    const DeviceBuffer<A> v = upload(on(), in.v);
    const DeviceBuffer<A> q = upload(on(), in.q);
    // A slot has a sequence's memory [M, D], then its sum [D].
    const auto ring_bytes = static_cast<std::size_t>(s.slots * s.dim) * sizeof(float);
    const auto sum_bytes = static_cast<std::size_t>(s.dim) * sizeof(double);
    std::vector<std::byte> slots(static_cast<std::size_t>(s.batch) * (ring_bytes + sum_bytes));
    const auto for_each_slot = [&](auto& memory, auto& sum, auto copy) {
      for (std::size_t b = 0; b < static_cast<std::size_t>(s.batch); ++b) {
        std::byte* slot = slots.data() + b * (ring_bytes + sum_bytes);
        copy(slot, memory.data() + b * ring_bytes / sizeof(float), ring_bytes);
        copy(slot + ring_bytes, sum.data() + b * sum_bytes / sizeof(double), sum_bytes);
      }
    };
    for_each_slot(in.memory, in.sum, [](void* slot, const void* host, std::size_t n) { std::memcpy(slot, host, n); });
    DeviceBuffer<std::byte> state = upload(on(), slots);
    const DeviceBuffer<A> memory_out = upload(on(), in.memory_out);
    const DeviceBuffer<A> ffn_in = upload(on(), in.ffn_in);
    const DeviceBuffer<A> ffn_out = upload(on(), in.ffn_out);
    const DeviceBuffer<float> norm = upload(on(), in.norm);
    const DeviceBuffer<float> biases[3] = {upload(on(), in.memory_out_bias), upload(on(), in.ffn_in_bias),
                                           upload(on(), in.ffn_out_bias)};
    constexpr DType kType = std::is_same_v<A, BFloat16> ? DType::kBF16 : DType::kF16;
    const FinishSegments<Device, A> op = {
        .x = device_x.sequences(s.batch, 0, s.time),
        .h = {h.data(), s.batch, s.time, s.dim},
        .v = {v.data(), s.batch, s.time, s.dim},
        .q = {q.data(), s.batch, s.time, s.dim},
        .position = s.position,
        .segment = s.segment,
        .heads = s.heads,
        .head_padding = s.head_padding,
        .memory = reinterpret_cast<float*>(state.data()),
        .memory_slots = s.slots,
        .sum = reinterpret_cast<double*>(state.data() + ring_bytes),
        .slot_bytes = static_cast<std::int64_t>(ring_bytes + sum_bytes),
        .memory_out = {memory_out.data(), kType, s.dim, s.dim},
        .memory_out_bias = s.biases ? biases[0].data() : nullptr,
        .norm = norm.data(),
        .ffn_in = {ffn_in.data(), kType, s.ffn, s.dim},
        .ffn_in_bias = s.biases ? biases[1].data() : nullptr,
        .ffn_out = {ffn_out.data(), kType, s.dim, s.ffn},
        .ffn_out_bias = s.biases ? biases[2].data() : nullptr,
    };
    const bool supported = finish_segments_supported(on(), op);
    EXPECT_EQ(supported, expect_supported);
    if (!supported) return {};
    finish_segments(on(), op);
    std::vector<std::uint32_t> flags(Cuda::kFlagWords);
    on().download(on().flags(), flags.data(), flags.size());
    EXPECT_EQ(std::count(flags.begin(), flags.end(), 0U), static_cast<std::ptrdiff_t>(flags.size()));
    Result result{{}, std::vector<float>(in.memory.size()), std::vector<double>(in.sum.size())};
    slots = download(on(), state);
    for_each_slot(result.memory, result.sum,
                  [](const void* slot, void* host, std::size_t n) { std::memcpy(host, slot, n); });
    const std::vector<float> all = device_x.download();
    for (std::int64_t b = 0; b < s.batch; ++b) {
      const auto from = all.begin() + b * rows_each * s.dim;
      result.x.insert(result.x.end(), from, from + s.time * s.dim);
      EXPECT_TRUE(std::all_of(from + s.time * s.dim, from + rows_each * s.dim, [](float v) { return std::isnan(v); }));
    }
    return result;
  }

  void check(const Shape& s) {
    SCOPED_TRACE(testing::Message() << s.batch << " x " << s.time << " from " << s.position << ", segment " << s.segment
                                    << ", slots " << s.slots << ", D " << s.dim << ", F " << s.ffn << ", heads "
                                    << s.heads);
    const Inputs<A> in = random_inputs<A>(s, stream_ += 20);
    const Outputs want = reference(in);
    const Result got = run(in);
    // An operand that rounds the other way moves an output by a unit in A's last place times a weight. Operands reach
    // [4, 8), where fp16's unit is 2^-8 and bf16's 2^-5, and weights of the narrowest model 1/2; two of them may.
    const double bound = std::is_same_v<A, BFloat16> ? 0x1p-5 : 0x1p-8;
    EXPECT_LE(largest_error(got.x, want.x), bound);
    EXPECT_LE(largest_error(got.memory, want.memory), bound);
    ASSERT_EQ(got.sum.size(), want.sum.size());
    const bool ends = (s.position + s.time) % s.segment == 0;
    for (std::size_t i = 0; i < want.sum.size(); ++i) {
      if (ends) {
        ASSERT_EQ(got.sum[i], 0.0);
      } else {
        ASSERT_NEAR(got.sum[i], want.sum[i], bound * 4.0 * std::sqrt(static_cast<double>(s.segment))) << i;
      }
    }
  }

  std::uint64_t stream_ = 1000;
};

using Types = testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(FinishSegmentsTest, Types);

TYPED_TEST(FinishSegmentsTest, MatchesFloat64FromTheFirstTokenOn) {
  this->check({.time = 1, .segment = 4, .slots = 3});
  this->check({.time = 40, .segment = 40, .slots = 1});
  this->check({.time = 90, .segment = 40, .slots = 4});
  this->check({.time = 100, .segment = 20, .slots = 1});
}

TYPED_TEST(FinishSegmentsTest, MatchesFloat64FromTheMiddleOfASegmentToTheMiddleOfAnother) {
  this->check({.batch = 3, .time = 75, .position = 37, .segment = 25, .slots = 2});
  this->check({.batch = 2, .time = 130, .position = 170, .segment = 33, .slots = 3, .biases = false});
  this->check({.time = 7, .position = 68, .segment = 17, .slots = 9});
  this->check({.time = 64, .position = 128, .segment = 8, .slots = 5, .dim = 64, .ffn = 192, .heads = 1});
}

TYPED_TEST(FinishSegmentsTest, MatchesFloat64AtOtherWidths) {
  this->check({.time = 50, .position = 39, .segment = 20, .slots = 40, .dim = 128, .ffn = 64, .heads = 4});
  this->check({.time = 36, .position = 20 * 60, .segment = 20, .slots = 45, .dim = 192, .ffn = 320, .heads = 3});
  this->check({.time = 34, .position = 60, .segment = 17, .slots = 8, .dim = 256, .ffn = 384, .heads = 2});
  this->check({.time = 36, .position = 60, .segment = 20, .slots = 5, .heads = 2, .head_padding = 24});
  // Heads so wide that their queries and what is computed of slots just fit.
  this->check({.time = 34, .position = 60, .segment = 17, .slots = 4, .dim = 256, .ffn = 256, .heads = 2});
  this->check({.time = 34, .position = 60, .segment = 17, .slots = 4, .dim = 128, .ffn = 256, .heads = 1});
  if (small_sizes()) return;
  this->check(
      {.time = 1100, .position = 256 * 3 + 100, .segment = 256, .slots = 32, .dim = 384, .ffn = 768, .heads = 6});
  this->check(
      {.batch = 5, .time = 600, .position = 256, .segment = 256, .slots = 3, .dim = 384, .ffn = 768, .heads = 6});
  this->check({.time = 700, .position = 64 * 50, .segment = 600, .slots = 6, .dim = 512, .ffn = 256, .heads = 8});
}

TYPED_TEST(FinishSegmentsTest, ASequencesBitsDoNotDependOnTheBatch) {
  const Shape one = {.time = 70, .position = 21, .segment = 30, .slots = 3};
  Shape many = one;
  many.batch = 5;
  const Inputs<TypeParam> in = random_inputs<TypeParam>(many, 500);
  const auto all = this->run(in);
  for (std::int64_t b = 0; b < many.batch; ++b) {
    const auto part = [b]<class T>(const std::vector<T>& v) {
      const auto size = static_cast<std::ptrdiff_t>(v.size()) / 5;
      return std::vector<T>(v.begin() + b * size, v.begin() + (b + 1) * size);
    };
    Inputs<TypeParam> alone = in;
    alone.shape = one;
    alone.x = part(in.x), alone.h = part(in.h), alone.v = part(in.v), alone.q = part(in.q),
    alone.memory = part(in.memory), alone.sum = part(in.sum);
    const auto got = this->run(alone);
    EXPECT_TRUE(same_bits(got.x, part(all.x)));
    EXPECT_TRUE(same_bits(got.memory, part(all.memory)));
    EXPECT_TRUE(same_bits(got.sum, part(all.sum)));
  }
}

TYPED_TEST(FinishSegmentsTest, SaysWhatItDoesNotTake) {
  for (const Shape& s :
       {Shape{.dim = 96, .heads = 3}, Shape{.ffn = 96}, Shape{.dim = 64, .heads = 4}, Shape{.dim = 192, .heads = 2},
        Shape{.slots = 200}, Shape{.dim = 512, .ffn = 2048, .heads = 8}, Shape{.segment = 1 << 21}}) {
    this->run(random_inputs<TypeParam>(s, 900), /*expect_supported=*/false);
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
