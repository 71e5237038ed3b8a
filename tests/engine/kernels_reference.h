// The equations of mmrec/kernels.h in fp64, one step after another, and checks of a context against them, be it of the
// CPU or of a GPU.
#pragma once

#include <deque>

#include "mmrec/kernels.h"
#include "tests/ops/testing.h"

namespace mmrec::test {

using kernels::BFloat16;
using kernels::Float16;
using kernels::test::largest_error;
using kernels::test::random_uniform;
using kernels::test::widened;

template <class T>
inline constexpr ElementType kElementType = std::is_same_v<T, float>     ? ElementType::kF32
                                            : std::is_same_v<T, Float16> ? ElementType::kF16
                                                                         : ElementType::kBF16;
/// Half a unit in the last place of a result, relative, and what sums are allowed besides.
template <class T>
inline constexpr double kKernelBound = (sizeof(T) == 4 ? 0.0 : kernels::test::kHalfUnit<T>)+2e-5;

struct KernelCase {
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
  T* begin(T* data) const {
    return data + (backwards ? (shape.time - 1) * -strides().time : 0);
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

  template <class T>
  T* put_all(const std::vector<T>& values) {
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(values.data());
    return static_cast<T*>(put({bytes, bytes + values.size() * sizeof(T)}));
  }
  template <class T>
  T* unwritten(std::size_t count) {
    return put_all(std::vector<T>(count, kernels::test::nan_of<T>()));
  }
  template <class T>
  std::vector<T> get_all(const T* data, std::size_t count) {
    const Bytes bytes = get(data, count * sizeof(T));
    std::vector<T> values(count);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
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
template <class T>
void check_scans(KernelContext& context, Arena& arena, const KernelCase& c) {
  const std::size_t n = c.elements();
  const auto input = [&](double low, double high, std::uint64_t stream) {
    const std::vector<T> values = random_uniform<T>(n, low, high, stream);
    return std::pair{arena.put_all(values), widened(values)};
  };
  const std::vector<float> carry = random_uniform<float>(c.channels(), -1.0, 0.0, 4);
  const float* const carry_in = arena.put_all(carry);
  float* const carry_out = arena.unwritten<float>(c.channels());
  T* const out = arena.unwritten<T>(n);
  std::vector<double> want(n), last(c.channels());
  const auto compare = [&](const char* what) {
    EXPECT_LE(largest_error(arena.get_all(out, n), want), kKernelBound<T>) << what;
    EXPECT_LE(largest_error(arena.get_all(carry_out, c.channels()), last), 2e-5) << what;
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
  float* const log_y = arena.unwritten<float>(n);
  exp_product_scan(context, {.shape = c.shape,
                             .type = kElementType<T>,
                             .gamma = c.begin(gamma),
                             .gamma_strides = c.strides(),
                             .y = c.begin(out),
                             .y_strides = c.strides(),
                             .log_y = c.begin(log_y),
                             .log_y_strides = c.strides(),
                             .carry_in = carry_in,
                             .carry_out = carry_out});
  std::vector<double> logs(n);
  walk([&, &values = gamma_values](std::size_t i, double state) {
    logs[i] = state + std::clamp(std::log(values[i] + 1e-8), -50.0, 0.0);
    want[i] = std::exp(logs[i]);
    return logs[i];
  });
  compare("exp_product_scan");
  EXPECT_LE(largest_error(arena.get_all(log_y, n), logs), 2e-5) << "log_y of exp_product_scan";

  const auto [x, x_values] = input(-3.0, 3.0, 2);
  logsumexp_scan(context, {.shape = c.shape,
                           .type = kElementType<T>,
                           .x = c.begin(x),
                           .x_strides = c.strides(),
                           .y = c.begin(out),
                           .y_strides = c.strides(),
                           .carry_in = carry_in,
                           .carry_out = carry_out});
  walk([&, &values = x_values](std::size_t i, double state) {
    return want[i] = std::max(state, values[i]) + std::log1p(std::exp(-std::abs(state - values[i])));
  });
  compare("logsumexp_scan");

  const auto [log_a, log_a_values] = input(-0.5, 0.05, 3);
  const auto [b, b_values] = input(-1.0, 1.0, 5);
  decay_scan(context, {.shape = c.shape,
                       .type = kElementType<T>,
                       .log_a = c.begin(log_a),
                       .log_a_strides = c.strides(),
                       .b = c.begin(b),
                       .b_strides = c.strides(),
                       .h = c.begin(out),
                       .h_strides = c.strides(),
                       .carry_in = carry_in,
                       .carry_out = carry_out});
  walk([&, &a = log_a_values, &add = b_values](std::size_t i, double state) {
    return want[i] = std::exp(a[i]) * state + add[i];
  });
  compare("decay_scan");
}

/// Log-probs of [rows, vocab] logits whose rows lie `stride` apart, and their derivative, against their equations.
template <class T, class Index>
void check_logprobs(KernelContext& context, Arena& arena, std::int64_t rows, std::int64_t vocab, std::int64_t stride) {
  constexpr IndexType kIndex = sizeof(Index) == 4 ? IndexType::kInt32 : IndexType::kInt64;
  const auto n = static_cast<std::size_t>(rows), v = static_cast<std::size_t>(vocab);
  const std::vector<T> logits = random_uniform<T>(static_cast<std::size_t>(rows * stride), -8.0, 8.0, 6);
  const std::vector<float> grad = random_uniform<float>(n, -2.0, 2.0, 7);
  std::vector<Index> targets(n);
  for (std::size_t r = 0; r < n; ++r) targets[r] = static_cast<Index>((r * 7919 + 3) % v);
  const T* const logits_there = arena.put_all(logits);
  const Index* const targets_there = arena.put_all(targets);
  float* const out = arena.unwritten<float>(n);
  token_logprobs(context, {.rows = rows,
                           .vocab = vocab,
                           .type = kElementType<T>,
                           .logits = logits_there,
                           .row_stride = stride,
                           .target_type = kIndex,
                           .targets = targets_there,
                           .logprobs = out});
  T* const d_logits = arena.unwritten<T>(n * v);
  token_logprobs_backward(context, {.rows = rows,
                                    .vocab = vocab,
                                    .type = kElementType<T>,
                                    .logits = logits_there,
                                    .row_stride = stride,
                                    .target_type = kIndex,
                                    .targets = targets_there,
                                    .grad = arena.put_all(grad),
                                    .d_logits = d_logits});
  const std::vector<double> wide = widened(logits);
  std::vector<double> want, d_want;
  for (std::size_t r = 0; r < n; ++r) {
    const double* const row = wide.data() + static_cast<std::int64_t>(r) * stride;
    double sum = 0.0;
    for (std::size_t i = 0; i < v; ++i) sum += std::exp(row[i]);
    want.push_back(row[targets[r]] - std::log(sum));
    for (std::size_t i = 0; i < v; ++i) {
      const double delta = static_cast<Index>(i) == targets[r] ? 1.0 : 0.0;
      d_want.push_back(static_cast<double>(grad[r]) * (delta - std::exp(row[i]) / sum));
    }
  }
  EXPECT_LE(largest_error(arena.get_all(out, n), want), 1e-5) << "token_logprobs";
  EXPECT_LE(largest_error(arena.get_all(d_logits, n * v), d_want), kKernelBound<T>) << "token_logprobs_backward";
}

/// Every case of both. `arena()` makes memory that lives for one of them.
template <class MakeArena>
void check_kernels(KernelContext& context, const MakeArena& arena) {
  const SequenceShape shapes[] = {{1, 1, 1, 1}, {2, 1, 300, 7}, {1, 3, 33, 48}};
  const auto check_type = [&]<class T>(T) {
    SCOPED_TRACE(sizeof(T));
    for (int i = 0; i < 12; ++i) {
      auto memory = arena();
      check_scans<T>(context, memory, {shapes[i / 4], i % 2 == 1, i / 2 % 2 == 1});
    }
    for (const std::int64_t vocab : {1, 2, 257, 5000}) {
      auto memory = arena();
      check_logprobs<T, std::int32_t>(context, memory, 5, vocab, vocab + vocab % 2 * 3);
      check_logprobs<T, std::int64_t>(context, memory, 5, vocab, vocab + vocab % 2 * 3);
    }
  };
  check_type(float{});
  check_type(Float16{});
  check_type(BFloat16{});
}

}  // namespace mmrec::test
