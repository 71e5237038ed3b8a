// Products of a few token rows with a weight matrix [out, in] in its stored format, and what follows a product.
//
// One dot product runs over `in` in kLanes chains, element k on chain k mod kLanes, the tail padded with zeros; the
// chains are then added by reduce_add's tree. That order is the same for every block shape below, so the bits of
// y[t][o] depend on row t and weight row o alone: not on how many rows or outputs a call has, nor on where it is cut.
//
// A block of kTokens x kOutputs sums stays in registers: each widened weight vector is used kTokens times, each
// activation vector kOutputs times. With one token the kernel streams the weights once, kWideOutputs rows at a time.
namespace mmrec::kernels {
namespace {

constexpr std::int64_t kL1Bytes = std::int64_t{40} * 1024;     // of a block of tokens that is used again and again
constexpr std::int64_t kAheadBytes = std::int64_t{12} * 1024;  // some 300 ns at the rate of one thread
constexpr std::int64_t kSegment = 1024;                        // of `in`, where a block of whole rows would not fit L1
constexpr std::int64_t kLine = 64;                             // bytes of a cache line
constexpr std::int64_t kTile = 24;  // tokens and outputs whose chains wait between two segments
static_assert(kTile % kBlockTokens == 0 && kTile % kBlockOutputs == 0 && kSegment % kLanes == 0);

enum class Pass : std::uint8_t {
  kWhole,   // all of `in` in one go; rows of weights come from L2
  kStream,  // the same, and the weights are used only once: fetch ahead
  kFirst,   // a segment of `in`: the chains start at zero, continue and end
  kMiddle,
  kLast,
};

constexpr bool ends(Pass pass) { return pass != Pass::kFirst && pass != Pass::kMiddle; }
constexpr int chains(int tokens, int outputs) { return (tokens * outputs + 3) / 4 * 4; }

/// Asks for weights that are used once, into L2: a processor waits for few lines of L1 at a time.
template <std::int64_t kBytes>
[[gnu::always_inline]] inline void fetch_weights(const void* from) {
#pragma GCC unroll 16
  for (std::int64_t i = 0; i < kBytes; i += kLine) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}
/// Bytes that the scales of kQuantBlock inputs take: what is fetched ahead keeps up with rows only if it counts them.
constexpr std::int64_t kMostScaleBytes = sizeof(float);
constexpr std::int64_t scale_bytes(std::int64_t group) { return kMostScaleBytes * kQuantBlock / group; }

/// Adds elements begin..end of the kTokens x kOutputs products x[t] . rows[o] to the chains `sum`.
template <Pass kPass, class F, int kTokens, int kOutputs, int kSums>
requires(!kIsQuantized<F>)
    [[gnu::always_inline]] inline void add_products(const float* const (&x)[kTokens],
                                                    const typename F::Row (&rows)[kOutputs], std::int64_t begin,
                                                    std::int64_t end, std::int64_t ahead, std::int64_t /*group*/,
                                                    Vec (&sum)[kSums]) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(*rows[0]));
  std::int64_t k = begin;
  for (; k + kLanes <= end; k += kLanes) {
    if constexpr (kPass == Pass::kStream) {
      // A processor does not recognise rows that are read side by side as streams, so each iteration fetches as many
      // bytes as it uses, `ahead` of the first row.
      constexpr std::int64_t kUsed = kBytes * kOutputs * kLanes;
      fetch_weights<kUsed>(reinterpret_cast<const char*>(rows[0] + k * kOutputs) + ahead);
    }
    if constexpr (kPass != Pass::kStream && kBytes == sizeof(float)) {  // halves come from L2 fast enough without
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) __builtin_prefetch(reinterpret_cast<const char*>(rows[o] + k) + ahead);
    }
    Vec w[kOutputs];
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) w[o] = load(rows[o] + k);
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const Vec a = load(x[t] + k);
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) sum[t * kOutputs + o] = fma(w[o], a, sum[t * kOutputs + o]);
    }
  }
  if constexpr (ends(kPass)) {
    if (k == end) return;
    const int rest = static_cast<int>(end - k);
    Vec w[kOutputs];
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) w[o] = load_partial(rows[o] + k, rest);
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const Vec a = load_partial(x[t] + k, rest);
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) sum[t * kOutputs + o] = fma(w[o], a, sum[t * kOutputs + o]);
    }
  }
}

/// The same of quantised weights; `group` inputs share a scale.
template <Pass kPass, class F, int kTokens, int kOutputs, int kSums>
requires(kIsQuantized<F>)
    [[gnu::always_inline]] inline void add_products(const float* const (&x)[kTokens],
                                                    const typename F::Row (&rows)[kOutputs], std::int64_t begin,
                                                    std::int64_t end, std::int64_t ahead, std::int64_t group,
                                                    Vec (&sum)[kSums]) {
  constexpr int kBytes = kBlockBytes<typename F::Numbers>;
  constexpr std::int64_t kVecs = kQuantBlock / kLanes;
  constexpr int kTogether = kLanes == 16 ? kOutputs : 1;  // rows whose blocks have registers
  const std::int64_t bytes_ahead = kOutputs * (kBytes + scale_bytes(group));
  std::int64_t scale = begin / group;
  std::int64_t next_scale = (scale + 1) * group;
  for (std::int64_t k = begin; k < end; k += kQuantBlock) {
    if (k == next_scale) ++scale, next_scale += group;
    const std::int64_t at = k / kQuantBlock * kBytes;
    if constexpr (kPass == Pass::kStream) {
      fetch_weights<kOutputs*(kBytes + kMostScaleBytes)>(rows[0].numbers + k / kQuantBlock * bytes_ahead + ahead);
    }
#pragma GCC unroll 16
    for (int first = 0; first < kOutputs; first += kTogether) {
      Block<typename F::Numbers> block[kTogether];
#pragma GCC unroll 16
      for (int o = 0; o < kTogether; ++o) block[o].read(rows[first + o].numbers + at, rows[first + o].scales[scale]);
      const auto add = [&](std::int64_t v, const auto& load_x) __attribute__((always_inline)) {
        Vec w[kTogether];
#pragma GCC unroll 16
        for (int o = 0; o < kTogether; ++o) w[o] = block[o].vec(v);
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t) {
          const Vec a = load_x(x[t] + k + v * kLanes);
          Vec* const to = sum + t * kOutputs + first;
#pragma GCC unroll 16
          for (int o = 0; o < kTogether; ++o) to[o] = fma(w[o], a, to[o]);
        }
      };
      if (end - k >= kQuantBlock) {
#pragma GCC unroll 16
        for (std::int64_t v = 0; v < kVecs; ++v) add(v, [](const float* p) { return load(p); });
      } else {
        for (std::int64_t v = 0; v * kLanes < end - k; ++v) {
          add(v, [&](const float* p) { return load_partial(p, lanes_left(end - k - v * kLanes)); });
        }
      }
    }
  }
}

/// Elements begin..end of the products x[t] . rows[o]. `waiting` holds the chains between segments; the pass that ends
/// them writes sums[t * kOutputs + o].
template <Pass kPass, class F, int kTokens, int kOutputs>
inline void dot_block(const float* const (&x)[kTokens], const typename F::Row (&rows)[kOutputs], std::int64_t begin,
                      std::int64_t end, std::int64_t ahead, std::int64_t group, Vec* waiting, float* sums) {
  constexpr int kSums = chains(kTokens, kOutputs);
  constexpr bool kContinues = kPass == Pass::kMiddle || kPass == Pass::kLast;
  Vec sum[kSums];
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) sum[i] = kContinues && i < kTokens * kOutputs ? waiting[i] : zero();
  add_products<kPass, F>(x, rows, begin, end, ahead, group, sum);
  if constexpr (ends(kPass)) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i += 4) reduce_add4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3], sums + i);
  } else {
#pragma GCC unroll 32
    for (int i = 0; i < kTokens * kOutputs; ++i) waiting[i] = sum[i];
  }
}

/// What one product has in common for all its blocks.
template <class F>
struct Product {
  const float* const* x;
  std::int64_t n;
  const WeightView<Host>& w;
  std::int64_t in;
  std::int64_t out;
  float* y;
  std::int64_t y_stride;
  std::int64_t row_bytes;
  std::int64_t group;
};

/// Elements begin..end of kTokens tokens from t and up to kOutputs outputs from o. Outputs beyond the last repeat it
/// and are dropped.
template <Pass kPass, int kTokens, int kOutputs, class F>
void product_block(const Product<F>& p, std::int64_t t, std::int64_t o, std::int64_t begin, std::int64_t end,
                   Vec* waiting) {
  const float* tokens[kTokens];
  for (int i = 0; i < kTokens; ++i) tokens[i] = p.x[t + i];
  typename F::Row rows[kOutputs];
  const std::int64_t outputs = p.out - o < kOutputs ? p.out - o : kOutputs;
  for (int i = 0; i < kOutputs; ++i) rows[i] = F::row(p.w, p.row_bytes, o + (i < outputs ? i : outputs - 1));
  const std::int64_t block = kOutputs * p.row_bytes;
  const std::int64_t ahead = kPass == Pass::kStream ? (kAheadBytes + block - 1) / block * block : block;
  float sums[chains(kTokens, kOutputs)];
  dot_block<kPass, F, kTokens, kOutputs>(tokens, rows, begin, end, ahead, p.group, waiting, sums);
  if constexpr (kPass == Pass::kFirst || kPass == Pass::kMiddle) return;
  float* y = p.y + t * p.y_stride + o;
  for (int i = 0; i < kTokens; ++i) {
    if (outputs == kOutputs) {
      __builtin_memcpy(y + i * p.y_stride, sums + i * kOutputs, kOutputs * sizeof(float));
    } else {
      for (int j = 0; j < outputs; ++j) y[i * p.y_stride + j] = sums[i * kOutputs + j];
    }
  }
}

/// One block from token t and output o on, or the rest of one at the last token.
template <Pass kPass, int kTokens = kBlockTokens, class F>
inline void product(const Product<F>& p, std::int64_t t, std::int64_t o, std::int64_t begin, std::int64_t end,
                    Vec* waiting) {
  if (p.n - t >= kTokens) {
    product_block<kPass, kTokens, kBlockOutputs>(p, t, o, begin, end, waiting);
  } else if constexpr (kTokens > 1) {
    product<kPass, kTokens - 1>(p, t, o, begin, end, waiting);
  }
}

/// All blocks of tokens t0..t1 and outputs o0..o1.
template <Pass kPass, class F>
void product_tile(const Product<F>& p, std::int64_t t0, std::int64_t t1, std::int64_t o0, std::int64_t o1,
                  std::int64_t begin, std::int64_t end, Vec* waiting) {
  for (std::int64_t t = t0; t < t1; t += kBlockTokens) {
    for (std::int64_t o = o0; o < o1; o += kBlockOutputs) {
      product<kPass>(p, t, o, begin, end, waiting);
      if constexpr (kPass > Pass::kStream) waiting += std::int64_t{kBlockTokens} * kBlockOutputs;
    }
  }
}

template <class F>
__attribute__((noinline)) void multiply(const Product<F>& p) {
  const std::int64_t n = p.n;
  const std::int64_t in = p.in;
  const std::int64_t out = p.out;
  if (n == 1) {
    for (std::int64_t o = 0; o < out; o += kWideOutputs) {
      product_block<Pass::kStream, 1, kWideOutputs>(p, 0, o, 0, in, nullptr);
    }
  } else if (n <= kBlockTokens) {
    product_tile<Pass::kStream>(p, 0, n, 0, out, 0, in, nullptr);
  } else if (kBlockTokens * in * static_cast<std::int64_t>(sizeof(float)) <= kL1Bytes) {
    product_tile<Pass::kWhole>(p, 0, n, 0, out, 0, in, nullptr);
  } else {
    // Segment after segment, so that the block of tokens stays in L1 while the weights pass by.
    Vec waiting[kTile * kTile];
    for (std::int64_t o = 0; o < out; o += kTile) {
      const std::int64_t o1 = o + kTile < out ? o + kTile : out;
      for (std::int64_t t = 0; t < n; t += kTile) {
        const std::int64_t t1 = t + kTile < n ? t + kTile : n;
        std::int64_t k = kSegment;
        product_tile<Pass::kFirst>(p, t, t1, o, o1, 0, k, waiting);
        for (; k + kSegment < in; k += kSegment) product_tile<Pass::kMiddle>(p, t, t1, o, o1, k, k + kSegment, waiting);
        product_tile<Pass::kLast>(p, t, t1, o, o1, k, in, waiting);
      }
    }
  }
}

template <class F>
void matvec(const float* const* x, std::int64_t n, const WeightView<Host>& w, float* y, std::int64_t y_stride) {
  multiply(
      Product<F>{x, n, w, w.cols, w.rows, y, y_stride, row_bytes(w.format, w.cols), inputs_of_scale(w.format, w.cols)});
}

/// Quantised rows as numbers of type T. Of a row's only scale T gets `of_scale` times the number.
template <class F, class T, class Scale>
void dequantise_rows(const WeightView<Host>& w, T* to, const Scale& of_scale) {
  using Numbers = typename F::Numbers;
  const std::int64_t bytes = row_bytes(w.format, w.cols);
  const std::int64_t group = inputs_of_scale(w.format, w.cols);
  for (std::int64_t r = 0; r < w.rows; ++r, to += w.cols) {
    const typename F::Row row = F::row(w, bytes, r);
    for (std::int64_t k = 0; k < w.cols; k += kQuantBlock) {
      Block<Numbers> block{};
      block.read(row.numbers + k / kQuantBlock * kBlockBytes<Numbers>, of_scale(row.scales[k / group]));
      const std::int64_t end = w.cols - k < kQuantBlock ? w.cols - k : kQuantBlock;
      std::int64_t i = 0;
      for (; i + kLanes <= end; i += kLanes) store(to + k + i, block.vec(i / kLanes));
      if (i < end) store_partial(to + k + i, block.vec(i / kLanes), static_cast<int>(end - i));
    }
  }
}

template <class F>
void widen_rows(const WeightView<Host>& w, float* to) {
  if constexpr (kIsQuantized<F>) {
    dequantise_rows<F>(w, to, [](float scale) { return scale; });
  } else {
    map_by(F::row(w, 0, 0), to, w.rows * w.cols, [](Vec x) { return x; });
  }
}

template <class F>
void narrow_rows(const WeightView<Host>& w, BFloat16* to) {
  if constexpr (kIsQuantized<F>) {
    const bool exact = w.format.group == 0;
    dequantise_rows<F>(w, to, [&](float scale) { return exact ? power_of(scale) : scale; });
  }
}

inline Vec identity(Vec x) { return x; }
inline Vec relu(Vec x) { return max(zero(), x); }  // x last, so that NaN passes

template <Vec (*activation)(Vec)>
void epilogue(const float* product, const float* bias, const float* residual, float scale, float* y,
              std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = lanes_left(count - i);
    Vec v = load_partial(product + i, lanes);
    if (bias != nullptr) v = v + load_partial(bias + i, lanes);
    v = activation(v);
    if (residual != nullptr) v = fma(set1(scale), load_partial(residual + i, lanes), v);
    store_partial(y + i, v, lanes);
  }
}

constexpr MatvecKernels kMatvecKernels = {
    MMREC_BY_WEIGHT(matvec),      false,   MMREC_BY_WEIGHT(widen_rows),
    MMREC_BY_WEIGHT(narrow_rows), nullptr, {epilogue<identity>, epilogue<gelu>, epilogue<relu>, epilogue<gelu_tanh>}};

}  // namespace
}  // namespace mmrec::kernels
