// The equations of mmrec/kernels.h in fp64, one step after another, and checks of a context against them, be it of the
// CPU or of a GPU.
#pragma once

#include <deque>

#include "kernels/tensor.h"
#include "mmrec/kernels.h"
#include "models/files/elements.h"
#include "tests/support/prelude.h"

namespace mmrec::test {

inline std::vector<float> random_values(std::size_t count, double low, double high, unsigned seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<double> draw(low, high);
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(draw(rng));
  return values;
}

constexpr kernels::DType dtype_of(ElementType type) {
  using enum kernels::DType;
  return type == ElementType::kF32 ? kF32 : type == ElementType::kF16 ? kF16 : kBF16;
}
constexpr std::size_t size_of(ElementType type) { return type == ElementType::kF32 ? 4 : 2; }

/// Values as bytes of an element type, and back.
inline std::vector<std::uint8_t> encode(ElementType type, const std::vector<float>& values) {
  std::vector<std::uint8_t> bytes(values.size() * size_of(type));
  models::convert(reinterpret_cast<const std::byte*>(values.data()), values.size(), kernels::DType::kF32,
                  reinterpret_cast<std::byte*>(bytes.data()), dtype_of(type));
  return bytes;
}
inline std::vector<float> decode(ElementType type, const std::vector<std::uint8_t>& bytes) {
  std::vector<float> values(bytes.size() / size_of(type));
  models::convert(reinterpret_cast<const std::byte*>(bytes.data()), values.size(), dtype_of(type),
                  reinterpret_cast<std::byte*>(values.data()), kernels::DType::kF32);
  return values;
}

/// Half a unit in the last place of a result, relative, and what sums are allowed besides.
inline double tolerance(ElementType type) {
  return type == ElementType::kF32 ? 2e-5 : type == ElementType::kF16 ? 0x1p-11 + 2e-5 : 0x1p-8 + 2e-5;
}

inline void expect_close(const std::vector<float>& got, const std::vector<double>& want, double bound,
                         const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = std::abs(static_cast<double>(got[i]) - want[i]);
    ASSERT_LE(difference, bound * (1.0 + std::abs(want[i]))) << what << ", element " << i;  // false for NaN
  }
}

struct KernelCase {
  ElementType type;
  SequenceShape shape;
  bool heads_inside;       // [batch, time, heads, dim] instead of [batch, heads, time, dim]
  bool backwards = false;  // the first step lies last

  std::size_t elements() const { return static_cast<std::size_t>(shape.batch * shape.heads * shape.time * shape.dim); }
  std::size_t channels() const { return static_cast<std::size_t>(shape.batch * shape.heads * shape.dim); }
  SequenceStrides strides() const {
    if (!heads_inside && !backwards) return {};
    const std::int64_t time = heads_inside ? shape.heads * shape.dim : shape.dim;
    return {.batch = shape.time * shape.heads * shape.dim,
            .head = heads_inside ? shape.dim : shape.time * shape.dim,
            .time = backwards ? -time : time};
  }
  /// The address of the first step of what lies at `data`.
  template <class T>
  T* begin(T* data, std::size_t element_size) const {
    const std::int64_t last = backwards ? (shape.time - 1) * -strides().time : 0;
    auto* const bytes = static_cast<std::uint8_t*>(static_cast<void*>(data));
    return static_cast<T*>(static_cast<void*>(bytes + last * static_cast<std::int64_t>(element_size)));
  }
  /// Index of (channel over [batch, heads, dim], time).
  std::size_t at(std::size_t channel, std::int64_t t) const {
    const auto c = static_cast<std::int64_t>(channel);
    const std::int64_t d = c % shape.dim;
    const std::int64_t h = c / shape.dim % shape.heads;
    const std::int64_t b = c / shape.dim / shape.heads;
    if (backwards) t = shape.time - 1 - t;
    const std::int64_t row =
        heads_inside ? (b * shape.time + t) * shape.heads + h : (b * shape.heads + h) * shape.time + t;
    return static_cast<std::size_t>(row * shape.dim + d);
  }
};

/// Memory that a context reaches. What put() gives lives as long as the arena.
class Arena {
 public:
  using Bytes = std::vector<std::uint8_t>;
  virtual ~Arena() = default;
  virtual void* put(const Bytes& bytes) = 0;
  /// Waits for the context's work first.
  virtual Bytes get(const void* data, std::size_t size) = 0;

  void* poisoned(std::size_t size) { return put(Bytes(size, 0xff)); }
  float* put_floats(const std::vector<float>& values) {
    return static_cast<float*>(put(encode(ElementType::kF32, values)));
  }
  std::vector<float> get_floats(const float* data, std::size_t count) {
    return decode(ElementType::kF32, get(data, count * sizeof(float)));
  }
};

class HostArena final : public Arena {
 public:
  void* put(const Bytes& bytes) override { return blocks_.emplace_back(bytes).data(); }
  Bytes get(const void* data, std::size_t size) override {
    const auto* bytes = static_cast<const std::uint8_t*>(data);
    return {bytes, bytes + size};
  }

 private:
  std::deque<Bytes> blocks_;
};

/// All three scans, from carries to carries, against their equations.
inline void check_scans(KernelContext& context, Arena& arena, const KernelCase& c) {
  const std::size_t size = size_of(c.type);
  const std::size_t n = c.elements();
  const auto input = [&](double low, double high, unsigned seed) {
    const Arena::Bytes bytes = encode(c.type, random_values(n, low, high, seed));
    return std::pair{arena.put(bytes), decode(c.type, bytes)};
  };
  const std::vector<float> carry = random_values(c.channels(), -1.0, 0.0, 4);
  const float* const carry_in = arena.put_floats(carry);
  auto* const carry_out = static_cast<float*>(arena.poisoned(c.channels() * sizeof(float)));
  void* const out = arena.poisoned(n * size);
  const double bound = tolerance(c.type);
  std::vector<double> want(n), last(c.channels());
  const auto compare = [&](const char* what) {
    expect_close(decode(c.type, arena.get(out, n * size)), want, bound, what);
    expect_close(arena.get_floats(carry_out, c.channels()), last, 2e-5, what);
  };
  // state = step(index, state) for every sequence in order of time.
  const auto walk = [&](auto step) {
    for (std::size_t channel = 0; channel < c.channels(); ++channel) {
      double state = static_cast<double>(carry[channel]);
      for (std::int64_t t = 0; t < c.shape.time; ++t) state = step(c.at(channel, t), state);
      last[channel] = state;
    }
  };

  const auto [gamma, gamma_values] = input(0.9, 1.0, 1);
  auto* const log_y = static_cast<float*>(arena.poisoned(n * sizeof(float)));
  exp_product_scan(context, {.shape = c.shape,
                             .type = c.type,
                             .gamma = c.begin(gamma, size),
                             .gamma_strides = c.strides(),
                             .y = c.begin(out, size),
                             .y_strides = c.strides(),
                             .log_y = c.begin(log_y, sizeof(float)),
                             .log_y_strides = c.strides(),
                             .carry_in = carry_in,
                             .carry_out = carry_out});
  std::vector<double> logs(n);
  walk([&, &values = gamma_values](std::size_t i, double state) {
    logs[i] = state + std::clamp(std::log(static_cast<double>(values[i]) + 1e-8), -50.0, 0.0);
    want[i] = std::exp(logs[i]);
    return logs[i];
  });
  compare("exp_product_scan");
  expect_close(arena.get_floats(log_y, n), logs, 2e-5, "log_y of exp_product_scan");

  const auto [x, x_values] = input(-3.0, 3.0, 2);
  logsumexp_scan(context, {.shape = c.shape,
                           .type = c.type,
                           .x = c.begin(x, size),
                           .x_strides = c.strides(),
                           .y = c.begin(out, size),
                           .y_strides = c.strides(),
                           .carry_in = carry_in,
                           .carry_out = carry_out});
  walk([&, &values = x_values](std::size_t i, double state) {
    const double value = static_cast<double>(values[i]);
    return want[i] = std::max(state, value) + std::log1p(std::exp(-std::abs(state - value)));
  });
  compare("logsumexp_scan");

  const auto [log_a, log_a_values] = input(-0.5, 0.05, 3);
  const auto [b, b_values] = input(-1.0, 1.0, 5);
  decay_scan(context, {.shape = c.shape,
                       .type = c.type,
                       .log_a = c.begin(log_a, size),
                       .log_a_strides = c.strides(),
                       .b = c.begin(b, size),
                       .b_strides = c.strides(),
                       .h = c.begin(out, size),
                       .h_strides = c.strides(),
                       .carry_in = carry_in,
                       .carry_out = carry_out});
  walk([&, &a = log_a_values, &add = b_values](std::size_t i, double state) {
    return want[i] = std::exp(static_cast<double>(a[i])) * state + static_cast<double>(add[i]);
  });
  compare("decay_scan");
}

/// Log-probs of [rows, vocab] logits whose rows lie `stride` apart, and their derivative, against their equations.
inline void check_logprobs(KernelContext& context, Arena& arena, ElementType type, IndexType index, std::int64_t rows,
                           std::int64_t vocab, std::int64_t stride) {
  const auto n = static_cast<std::size_t>(rows);
  const auto v = static_cast<std::size_t>(vocab);
  const auto row = static_cast<std::size_t>(stride);
  const std::size_t size = size_of(type);
  const Arena::Bytes bytes = encode(type, random_values(n * row, -8.0, 8.0, 6));
  const std::vector<float> logits = decode(type, bytes);
  const std::vector<float> grad = random_values(n, -2.0, 2.0, 7);
  std::vector<std::int64_t> targets(n);
  for (std::size_t r = 0; r < n; ++r) targets[r] = static_cast<std::int64_t>((r * 7919 + 3) % v);
  Arena::Bytes raw(n * (index == IndexType::kInt32 ? 4 : 8));
  for (std::size_t r = 0; r < n; ++r) {
    const auto narrow = static_cast<std::int32_t>(targets[r]);
    if (index == IndexType::kInt32) std::memcpy(raw.data() + r * 4, &narrow, 4);
    if (index == IndexType::kInt64) std::memcpy(raw.data() + r * 8, &targets[r], 8);
  }

  const void* const logits_there = arena.put(bytes);
  const void* const targets_there = arena.put(raw);
  auto* const out = static_cast<float*>(arena.poisoned(n * sizeof(float)));
  token_logprobs(context, {.rows = rows,
                           .vocab = vocab,
                           .type = type,
                           .logits = logits_there,
                           .row_stride = stride,
                           .target_type = index,
                           .targets = targets_there,
                           .logprobs = out});
  void* const d_logits = arena.poisoned(n * v * size);
  token_logprobs_backward(context, {.rows = rows,
                                    .vocab = vocab,
                                    .type = type,
                                    .logits = logits_there,
                                    .row_stride = stride,
                                    .target_type = index,
                                    .targets = targets_there,
                                    .grad = arena.put_floats(grad),
                                    .d_logits = d_logits});
  std::vector<double> want(n), d_want(n * v);
  for (std::size_t r = 0; r < n; ++r) {
    double sum = 0.0;
    for (std::size_t i = 0; i < v; ++i) sum += std::exp(static_cast<double>(logits[r * row + i]));
    want[r] = static_cast<double>(logits[r * row + static_cast<std::size_t>(targets[r])]) - std::log(sum);
    for (std::size_t i = 0; i < v; ++i) {
      const double p = std::exp(static_cast<double>(logits[r * row + i])) / sum;
      const double delta = static_cast<std::int64_t>(i) == targets[r] ? 1.0 : 0.0;
      d_want[r * v + i] = static_cast<double>(grad[r]) * (delta - p);
    }
  }
  expect_close(arena.get_floats(out, n), want, 1e-5, "token_logprobs");
  expect_close(decode(type, arena.get(d_logits, n * v * size)), d_want, tolerance(type), "token_logprobs_backward");
}

/// Every case of both. `arena()` makes memory that lives for one of them.
template <class MakeArena>
void check_kernels(KernelContext& context, const MakeArena& arena) {
  const SequenceShape shapes[] = {{1, 1, 1, 1}, {2, 1, 300, 7}, {1, 3, 33, 48}};
  for (const ElementType type : {ElementType::kF32, ElementType::kF16, ElementType::kBF16}) {
    for (int i = 0; i < 12; ++i) {
      auto memory = arena();
      check_scans(context, memory, KernelCase{type, shapes[i / 4], i % 2 == 1, i / 2 % 2 == 1});
    }
    for (const IndexType index : {IndexType::kInt32, IndexType::kInt64}) {
      for (const std::int64_t vocab : {1, 2, 257, 5000}) {
        auto memory = arena();
        check_logprobs(context, memory, type, index, 5, vocab, vocab + vocab % 2 * 3);
      }
    }
  }
}

}  // namespace mmrec::test
