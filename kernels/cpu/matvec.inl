// Products of a few token rows with a weight matrix [out, in] in its stored type, and what follows a product.
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
constexpr std::int64_t kTile = 24;  // tokens and outputs whose chains wait between two segments
static_assert(kTile % kBlockTokens == 0 && kTile % kBlockOutputs == 0 && kSegment % kLanes == 0);

enum class Pass : std::uint8_t {
  kWhole,   // all of `in` in one go; rows of weights come from L2
  kStream,  // the same, and the weights are used only once: fetch ahead
  kFirst,   // a segment of `in`: the chains start at zero, continue and end
  kMiddle,
  kLast,
};

constexpr int chains(int tokens, int outputs) { return (tokens * outputs + 3) / 4 * 4; }

/// Elements begin..end of the kTokens x kOutputs products x[t] . rows[o]. `waiting` holds the chains between segments;
/// the pass that ends them writes sums[t * kOutputs + o].
template <Pass kPass, int kTokens, int kOutputs, class T>
inline void dot_block(const float* const (&x)[kTokens], const T* const (&rows)[kOutputs], std::int64_t begin,
                      std::int64_t end, std::int64_t ahead, Vec* waiting, float* sums) {
  constexpr int kSums = chains(kTokens, kOutputs);
  constexpr bool kContinues = kPass == Pass::kMiddle || kPass == Pass::kLast;
  constexpr bool kEnds = kPass != Pass::kFirst && kPass != Pass::kMiddle;
  Vec sum[kSums];
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) sum[i] = kContinues && i < kTokens * kOutputs ? waiting[i] : zero();
  std::int64_t k = begin;
  for (; k + kLanes <= end; k += kLanes) {
    if constexpr (kPass == Pass::kStream) {
      // A processor does not recognise rows that are read side by side as streams, so each iteration fetches as many
      // bytes as it uses, `ahead` of the first row.
      constexpr std::int64_t kLine = 64;
      constexpr std::int64_t kUsed = static_cast<std::int64_t>(sizeof(T)) * kOutputs * kLanes;
      const char* next = reinterpret_cast<const char*>(rows[0] + k * kOutputs) + ahead;
#pragma GCC unroll 16
      for (std::int64_t i = 0; i < kUsed; i += kLine) __builtin_prefetch(next + i);
    }
    if constexpr (kPass != Pass::kStream && sizeof(T) == sizeof(float)) {  // halves come from L2 fast enough without
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
  if constexpr (kEnds) {
    if (k < end) {
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
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i += 4) reduce_add4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3], sums + i);
  } else {
#pragma GCC unroll 32
    for (int i = 0; i < kTokens * kOutputs; ++i) waiting[i] = sum[i];
  }
}

/// What one product has in common for all its blocks.
template <class T>
struct Product {
  const float* const* x;
  std::int64_t n;
  const T* w;
  std::int64_t in;
  std::int64_t out;
  float* y;
  std::int64_t y_stride;
};

/// Elements begin..end of kTokens tokens from t and up to kOutputs outputs from o. Outputs beyond the last repeat it
/// and are dropped.
template <Pass kPass, int kTokens, int kOutputs, class T>
void product_block(const Product<T>& p, std::int64_t t, std::int64_t o, std::int64_t begin, std::int64_t end,
                   Vec* waiting) {
  const float* tokens[kTokens];
  for (int i = 0; i < kTokens; ++i) tokens[i] = p.x[t + i];
  const T* rows[kOutputs];
  const std::int64_t outputs = p.out - o < kOutputs ? p.out - o : kOutputs;
  for (int i = 0; i < kOutputs; ++i) rows[i] = p.w + (o + (i < outputs ? i : outputs - 1)) * p.in;
  const std::int64_t block = kOutputs * p.in * static_cast<std::int64_t>(sizeof(T));
  const std::int64_t ahead = kPass == Pass::kStream ? (kAheadBytes + block - 1) / block * block : block;
  float sums[chains(kTokens, kOutputs)];
  dot_block<kPass, kTokens, kOutputs>(tokens, rows, begin, end, ahead, waiting, sums);
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
template <Pass kPass, int kTokens = kBlockTokens, class T>
inline void product(const Product<T>& p, std::int64_t t, std::int64_t o, std::int64_t begin, std::int64_t end,
                    Vec* waiting) {
  if (p.n - t >= kTokens) {
    product_block<kPass, kTokens, kBlockOutputs>(p, t, o, begin, end, waiting);
  } else if constexpr (kTokens > 1) {
    product<kPass, kTokens - 1>(p, t, o, begin, end, waiting);
  }
}

/// All blocks of tokens t0..t1 and outputs o0..o1.
template <Pass kPass, class T>
void product_tile(const Product<T>& p, std::int64_t t0, std::int64_t t1, std::int64_t o0, std::int64_t o1,
                  std::int64_t begin, std::int64_t end, Vec* waiting) {
  for (std::int64_t t = t0; t < t1; t += kBlockTokens) {
    for (std::int64_t o = o0; o < o1; o += kBlockOutputs) {
      product<kPass>(p, t, o, begin, end, waiting);
      if constexpr (kPass > Pass::kStream) waiting += std::int64_t{kBlockTokens} * kBlockOutputs;
    }
  }
}

template <class T>
__attribute__((noinline)) void multiply(const Product<T>& p) {
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

template <class T>
void matvec(const float* const* x, std::int64_t n, const void* weight, std::int64_t in, std::int64_t out, float* y,
            std::int64_t y_stride) {
  multiply(Product<T>{x, n, static_cast<const T*>(weight), in, out, y, y_stride});
}

template <class T>
void widen_run(const void* from, float* to, std::int64_t count) {
  const T* p = static_cast<const T*>(from);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(p + i));
  const int rest = static_cast<int>(count - i);
  if (rest != 0) store_partial(to + i, load_partial(p + i, rest), rest);
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

constexpr MatvecKernels kMatvecKernels = {MMREC_BY_DTYPE(matvec),
                                          MMREC_BY_DTYPE(widen_run),
                                          {epilogue<identity>, epilogue<gelu>, epilogue<relu>, epilogue<gelu_tanh>}};

}  // namespace
}  // namespace mmrec::kernels
