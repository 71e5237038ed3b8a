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

/// sums[t * kOutputs + o] = x[t] . rows[o]. With kStream each iteration also prefetches as many bytes as it uses, from
/// `ahead` bytes on: rows interleaved like this are no stream that processors recognise by themselves.
template <int kTokens, int kOutputs, bool kStream, class T>
inline void dot_block(const float* const (&x)[kTokens], const T* const (&rows)[kOutputs], std::int64_t in,
                      std::int64_t ahead, float* sums) {
  constexpr int kSums = (kTokens * kOutputs + 3) / 4 * 4;
  Vec sum[kSums];
  for (int i = 0; i < kSums; ++i) sum[i] = zero();
  std::int64_t k = 0;
  for (; k + kLanes <= in; k += kLanes) {
    if constexpr (kStream) {
      constexpr std::int64_t kLine = 64;
      const char* next = reinterpret_cast<const char*>(rows[0] + k * kOutputs) + ahead;
      constexpr std::int64_t kUsed = kOutputs * kLanes * static_cast<std::int64_t>(sizeof(T));
#pragma GCC unroll 16
      for (std::int64_t i = 0; i < kUsed; i += kLine) __builtin_prefetch(next + i, 0, 3);
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
  if (k < in) {
    const int rest = static_cast<int>(in - k);
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
}

constexpr std::int64_t kL1Bytes = 40 * 1024;
constexpr std::int64_t kAheadBytes = 12 * 1024;  // some 300 ns at the rate of one thread

/// y[t][o] for kTokens rows and `outputs` <= kOutputs weight rows; absent rows repeat the last and are dropped.
template <int kTokens, int kOutputs, bool kStream, class T>
void product_block(const float* x, std::int64_t x_stride, const T* w, std::int64_t in, int outputs, float* y,
                   std::int64_t y_stride) {
  const float* tokens[kTokens];
  for (int t = 0; t < kTokens; ++t) tokens[t] = x + t * x_stride;
  const T* rows[kOutputs];
  for (int o = 0; o < kOutputs; ++o) rows[o] = w + (o < outputs ? o : outputs - 1) * in;
  float sums[(kTokens * kOutputs + 3) / 4 * 4];
  const std::int64_t block = kOutputs * in * static_cast<std::int64_t>(sizeof(T));
  dot_block<kTokens, kOutputs, kStream>(tokens, rows, in, block * ((kAheadBytes + block - 1) / block), sums);
  for (int t = 0; t < kTokens; ++t) {
    if (outputs == kOutputs) {
      __builtin_memcpy(y + t * y_stride, sums + t * kOutputs, kOutputs * sizeof(float));
    } else {
      for (int o = 0; o < outputs; ++o) y[t * y_stride + o] = sums[t * kOutputs + o];
    }
  }
}

/// One block, or the rest of one: min(tokens, kTokens) x min(outputs, kBlockOutputs).
template <bool kStream, int kTokens = kBlockTokens, class T>
inline void product(std::int64_t tokens, const float* x, std::int64_t x_stride, const T* w, std::int64_t in,
                    std::int64_t outputs, float* y, std::int64_t y_stride) {
  if (tokens >= kTokens) {
    const int valid = static_cast<int>(outputs < kBlockOutputs ? outputs : kBlockOutputs);
    product_block<kTokens, kBlockOutputs, kStream>(x, x_stride, w, in, valid, y, y_stride);
  } else if constexpr (kTokens > 1) {
    product<kStream, kTokens - 1>(tokens, x, x_stride, w, in, outputs, y, y_stride);
  }
}

template <class T>
void matvec(const float* x, std::int64_t x_stride, std::int64_t n, const void* weight, std::int64_t in,
            std::int64_t out, float* y, std::int64_t y_stride) {
  const T* w = static_cast<const T*>(weight);
  if (n == 1) {
    for (std::int64_t o = 0; o < out; o += kWideOutputs) {
      const int outputs = static_cast<int>(out - o < kWideOutputs ? out - o : kWideOutputs);
      product_block<1, kWideOutputs, true>(x, x_stride, w + o * in, in, outputs, y + o, y_stride);
    }
    return;
  }
  if (n <= kBlockTokens) {
    for (std::int64_t o = 0; o < out; o += kBlockOutputs) {
      product<true>(n, x, x_stride, w + o * in, in, out - o, y + o, y_stride);
    }
    return;
  }
  // The side that is reused first stays in L1: a block of tokens where it fits, else a block of weight rows.
  if (kBlockTokens * in * static_cast<std::int64_t>(sizeof(float)) <= kL1Bytes) {
    for (std::int64_t t = 0; t < n; t += kBlockTokens) {
      for (std::int64_t o = 0; o < out; o += kBlockOutputs) {
        product<false>(n - t, x + t * x_stride, x_stride, w + o * in, in, out - o, y + t * y_stride + o, y_stride);
      }
    }
  } else {
    for (std::int64_t o = 0; o < out; o += kBlockOutputs) {
      for (std::int64_t t = 0; t < n; t += kBlockTokens) {
        product<false>(n - t, x + t * x_stride, x_stride, w + o * in, in, out - o, y + t * y_stride + o, y_stride);
      }
    }
  }
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

constexpr MatvecKernels kMatvecKernels = {
    {matvec<float>, matvec<Float16>, matvec<BFloat16>},
    {widen_run<float>, widen_run<Float16>, widen_run<BFloat16>},
    {epilogue<identity>, epilogue<gelu>, epilogue<relu>},
};

}  // namespace
}  // namespace mmrec::kernels
