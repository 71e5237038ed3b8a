// Vector kernels of the token log-probs, written against the `Vec` of the including file.
//
// Each lane keeps its own reference and sum; a reference follows the lane's maximum only when that has grown by more
// than kGrowth, checked once per group of vectors, so that the common case is one subtraction, one exp and one addition
// per logit. Bytes moved: each logit once. Lanes are merged at the end in one fixed order, in fp64.
namespace mmrec::kernels {
namespace {

constexpr int kGroup = 4;        // vectors looked at together, each with a sum of its own
constexpr float kGrowth = 8.0F;  // e^8 times the terms of a lane stays far inside fp32
constexpr float kFiniteMax = 3.40282347e38F;

template <class T>
void max_sum(const void* input, std::int64_t count, float* max_out, double* sum_out) {
  const T* x = static_cast<const T*>(input);
  Vec m = set1(-kFiniteMax);  // finite, so that -inf - m is -inf and not NaN
  Vec sum[kGroup] = {zero(), zero(), zero(), zero()};
  const auto raise = [&](Vec top) {
    const Mask grown = less(m + set1(kGrowth), top);
    if (!any(grown)) return;
    const Vec higher = select(grown, min(set1(kFiniteMax), top), m);
    const Vec scale = exp(m - higher);
    for (Vec& s : sum) s = s * scale;
    m = higher;
  };
  std::int64_t i = 0;
  constexpr std::int64_t kStep = std::int64_t{kGroup} * kLanes;
  for (; i + kStep <= count; i += kStep) {
    Vec v[kGroup];
    for (int g = 0; g < kGroup; ++g) v[g] = load(x + i + g * kLanes);
    __builtin_prefetch(x + i + 16 * kStep);
    raise(max(max(v[0], v[1]), max(v[2], v[3])));
    for (int g = 0; g < kGroup; ++g) sum[g] = sum[g] + exp(v[g] - m);
  }
  for (; i < count; i += kLanes) {
    const std::int64_t rest = count - i;
    Vec v = set1(-kVecInfinity);
    if (rest >= kLanes) {
      v = load(x + i);
    } else {  // lanes beyond the end hold no term
      float lane[kLanes];
      store(lane, v);
      store_partial(lane, load_partial(x + i, static_cast<int>(rest)), static_cast<int>(rest));
      v = load(lane);
    }
    raise(v);
    sum[0] = sum[0] + exp(v - m);
  }
  const float top = reduce_max(m);
  const Vec scale = exp(m - set1(top));
  DVec wide = widen((sum[0] + sum[1]) * scale) + widen((sum[2] + sum[3]) * scale);
  double lane[kLanes];
  dstore(lane, wide);
  double total = 0.0;
  for (const double part : lane) total += part;
  *max_out = top;
  *sum_out = total;
}

template <class T>
void scaled_exp(const void* input, std::int64_t count, float max, float scale, void* output) {
  const T* x = static_cast<const T*>(input);
  T* y = static_cast<T*>(output);
  const Vec m = set1(max);
  const Vec s = set1(scale);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(y + i, s * exp(load(x + i) - m));
  const int rest = static_cast<int>(count - i);
  if (rest != 0) store_partial(y + i, s * exp(load_partial(x + i, rest) - m), rest);
}

constexpr LogprobKernels kLogprobKernels = {
    {max_sum<float>, max_sum<Float16>, max_sum<BFloat16>},
    {scaled_exp<float>, scaled_exp<Float16>, scaled_exp<BFloat16>},
};

}  // namespace
}  // namespace mmrec::kernels
