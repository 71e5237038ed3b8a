// Products of token rows with quantised weights by integer dot products.
//
// x is rounded once to integers of 24 bits, the largest of up to kDigitCols inputs to kMostDigits, and cut into signed
// digits. Sums of digits by weights are exact, so bits depend on row t and weight row o alone, as those of matvec.inl.
// An instruction set's file says how it multiplies them, by a type for each format: what matvec_digits() uses of it.
namespace mmrec::kernels {
namespace {

/// Rounds a row of x and gives store_ints(i, integers) elements i to i + kLanes, with zeros up to a multiple of
/// kQuantBlock. Returns what the integers must be multiplied by, NaN if an element is not finite.
template <class StoreInts>
double round_row(const float* x, std::int64_t count, const StoreInts& store_ints) {
  Vec most = zero(), wrong = zero();
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Vec a = load_partial(x + i, lanes_left(count - i));
    most = max(most, abs(a));
    wrong = fma(a, zero(), wrong);
  }
  const float largest = reduce_max(most);
  const float scale = largest > 1e-30F ? kMostDigits / largest : kMostDigits / 1e-30F;
  for (std::int64_t i = 0; i < count || i % kQuantBlock != 0; i += kLanes) {
    const Vec a = i < count ? load_partial(x + i, lanes_left(count - i)) : zero();
    store_ints(i, to_nearest(a * set1(scale)));
  }
  return (1.0 + static_cast<double>(reduce_add(wrong))) / static_cast<double>(scale);
}

/// Outputs from o on of kTokens tokens, of inputs begin..end; added to y unless they are the first. Outputs beyond the
/// last repeat it and are dropped.
template <class Digits, bool kGrouped, int kTokens, int kOutputs>
MMREC_DIGITS void multiply_digits(const Digits* x, const WeightView<Host>& w, std::int64_t o, std::int64_t begin,
                                  std::int64_t end, float* y, std::int64_t y_stride) {
  const std::int64_t bytes = row_bytes(w.format, w.cols), block = kOutputs * bytes;
  const std::int64_t outputs = w.rows - o < kOutputs ? w.rows - o : kOutputs;
  typename Digits::Row rows[kOutputs];
  for (int i = 0; i < kOutputs; ++i) rows[i] = Digits::Weights::row(w, bytes, o + (i < outputs ? i : outputs - 1));
  constexpr int kSums = chains(kTokens, kOutputs);
  Vec total[kSums];
#pragma GCC unroll 32
  for (int i = kTokens * kOutputs; i < kSums; ++i) total[i] = zero();
  const std::int64_t ahead = (kAheadBytes + block - 1) / block * block;
  Digits::template dot<kGrouped, kTokens, kOutputs>(x, rows, begin, end, ahead, inputs_of_scale(w.format, w.cols),
                                                    total);
  float sums[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; i += 4) reduce_add4(total[i], total[i + 1], total[i + 2], total[i + 3], sums + i);
  for (int t = 0; t < kTokens; ++t) {
    float of_token[kOutputs];
    for (int i = 0; i < kOutputs; ++i) {
      const double scale = kGrouped ? 1.0 : static_cast<double>(rows[i].scales[0]);
      of_token[i] = static_cast<float>(static_cast<double>(sums[t * kOutputs + i]) * x[t].scale * scale);
    }
    float* const to = y + t * y_stride + o;
    if (outputs == kOutputs && begin == 0) {
      __builtin_memcpy(to, of_token, sizeof of_token);
    } else {
      for (int i = 0; i < outputs; ++i) to[i] = begin == 0 ? of_token[i] : to[i] + of_token[i];
    }
  }
}

/// For weights of Digits::Weights, whose scales are of groups or, unless kGrouped, of rows.
template <class Digits, bool kGrouped>
MMREC_DIGITS void multiply_rows(const float* const* x, std::int64_t n, const WeightView<Host>& w, float* y,
                                std::int64_t y_stride) {
  constexpr std::int64_t kTogether = 4;  // tokens that meet a block of weights while it is in L1; on the stack
  Digits digits[kTogether];
  for (std::int64_t begin = 0; begin < w.cols; begin += kDigitCols) {
    const std::int64_t end = w.cols - begin < kDigitCols ? w.cols : begin + kDigitCols;
    for (std::int64_t first = 0; first < n; first += kTogether) {
      const std::int64_t count = n - first < kTogether ? n - first : kTogether;
      for (std::int64_t t = 0; t < count; ++t) digits[t].take(x[first + t] + begin, end - begin);
      float* const to = y + first * y_stride;
      for (std::int64_t o = 0; count == 1 && o < w.rows; o += Digits::kWideOutputs) {
        multiply_digits<Digits, kGrouped, 1, Digits::kWideOutputs>(digits, w, o, begin, end, to, y_stride);
      }
      for (std::int64_t o = 0; count != 1 && o < w.rows; o += Digits::kBlockOutputs) {
        constexpr int kOutputs = Digits::kBlockOutputs;
        std::int64_t t = 0;
        for (; t + Digits::kBlockTokens <= count; t += Digits::kBlockTokens) {
          multiply_digits<Digits, kGrouped, Digits::kBlockTokens, kOutputs>(digits + t, w, o, begin, end,
                                                                            to + t * y_stride, y_stride);
        }
        for (; t < count; ++t) {
          multiply_digits<Digits, kGrouped, 1, kOutputs>(digits + t, w, o, begin, end, to + t * y_stride, y_stride);
        }
      }
    }
  }
}

template <class Digits>
MMREC_DIGITS void matvec_digits(const float* const* x, std::int64_t n, const WeightView<Host>& w, float* y,
                                std::int64_t y_stride) {
  if (w.cols == 0) return matvec<typename Digits::Weights>(x, n, w, y, y_stride);
  const auto multiply = w.format.group == 0 ? multiply_rows<Digits, false> : multiply_rows<Digits, true>;
  multiply(x, n, w, y, y_stride);
}

/// total[t * kOutputs + o] of int8 rows, inputs begin..end: without scales where a row has one, else times those of
/// `group` inputs.
template <class Digits, bool kGrouped, int kTokens, int kOutputs>
[[gnu::always_inline]] MMREC_DIGITS inline void dot_int8(const Digits* x, const typename Digits::Row (&rows)[kOutputs],
                                                         std::int64_t begin, std::int64_t end, std::int64_t ahead,
                                                         std::int64_t group, Vec* total) {
  constexpr int kCount = Digits::kCount, kSums = kTokens * kOutputs;
  Ints sum[kCount * kSums];  // [t][digit][o]; not of a type that may alias, which would not stay in registers
  const auto begin_sums = [&](std::int64_t of) __attribute__((always_inline)) {
#pragma GCC unroll 32
    for (int i = 0; i < kCount * kSums; ++i) sum[i] = x[i / kOutputs / kCount].first(i / kOutputs % kCount, of);
  };
  const auto whole = [&](int i) __attribute__((always_inline)) {
    return Digits::whole(sum + i / kOutputs * kCount * kOutputs + i % kOutputs, kOutputs);
  };
  const std::int64_t bytes_ahead = kOutputs * (kQuantBlock + scale_bytes(group));
  Vec scaled[kSums] = {};
  std::int64_t scale = begin / group, next_scale = (scale + 1) * group;
  if (!kGrouped) begin_sums(0);
  for (std::int64_t k = 0; k < end - begin; k += kQuantBlock) {
    if (kGrouped) begin_sums(1 + k / kQuantBlock);
    fetch_weights<kOutputs*(kQuantBlock + kMostScaleBytes)>(rows[0].numbers + (begin + k) / kQuantBlock * bytes_ahead +
                                                            ahead);
#pragma GCC unroll 16
    for (std::int64_t i = k; i < k + kQuantBlock; i += Digits::kStep) {
      Ints w[kOutputs];
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) w[o] = Digits::load_weights(rows[o].numbers + begin + i);
#pragma GCC unroll 16
      for (int d = 0; d < kTokens * kCount; ++d) {
        const Ints a = Digits::load(x[d / kCount].digit[d % kCount] + i);
#pragma GCC unroll 16
        for (int o = 0; o < kOutputs; ++o) sum[d * kOutputs + o] = Digits::add_dot(sum[d * kOutputs + o], w[o], a);
      }
    }
    if constexpr (kGrouped) {
      if (begin + k == next_scale) ++scale, next_scale += group;
#pragma GCC unroll 32
      for (int i = 0; i < kSums; ++i) scaled[i] = fma(whole(i), set1(rows[i % kOutputs].scales[scale]), scaled[i]);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) total[i] = kGrouped ? scaled[i] : whole(i);
}

}  // namespace
}  // namespace mmrec::kernels
