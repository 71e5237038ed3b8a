// Softmax attention of one head of one row over memory slots, tile by tile: the (max, sum) monoid of logsumexp.h with
// the weighted values carried along, rescaled by exp(m_old - m_new) where a tile raises the maximum.
namespace mmrec::kernels {
namespace {

/// out[d] = softmax(scale * q . slots^T) . slots, with `zeros` more slots whose scores and values are 0; `values` is
/// scratch [d]. out may be q. count >= 1.
void attend(const float* q, const float* slots, std::int64_t stride, std::int64_t count, std::int64_t zeros,
            std::int64_t d, float scale, float* values, float* out) {
  constexpr std::int64_t kTile = 32;
  static_assert(kTile % kLanes == 0);
  float maximum = -kVecInfinity;
  float sum = 0.0F;
  for (std::int64_t first = 0; first < count; first += kTile) {
    const std::int64_t tile = count - first < kTile ? count - first : kTile;
    const float* rows = slots + first * stride;
    float weight[kTile];
    float top = maximum;
    for (std::int64_t j = 0; j < kTile; ++j) {
      if (j >= tile) {
        weight[j] = -kVecInfinity;
        continue;
      }
      Vec dot = zero();
      for (std::int64_t i = 0; i < d; i += kLanes) {
        const int lanes = lanes_left(d - i);
        dot = fma(load_partial(q + i, lanes), load_partial(rows + j * stride + i, lanes), dot);
      }
      weight[j] = scale * reduce_add(dot);
      if (weight[j] > top) top = weight[j];
    }
    float kept[kLanes];  // exp(maximum - top): what the earlier tiles shrink by
    store(kept, exp(set1(maximum) - set1(top)));
    Vec tile_sum = zero();
    for (std::int64_t j = 0; j < kTile; j += kLanes) {
      const Vec w = exp(load(weight + j) - set1(top));
      store(weight + j, w);
      tile_sum = tile_sum + w;
    }
    const Vec keep = set1(first == 0 ? 0.0F : kept[0]);
    sum = (first == 0 ? 0.0F : kept[0] * sum) + reduce_add(tile_sum);
    maximum = top;
    for (std::int64_t i = 0; i < d; i += kLanes) {
      const int lanes = lanes_left(d - i);
      Vec value = first == 0 ? zero() : keep * load_partial(values + i, lanes);
      for (std::int64_t j = 0; j < tile; ++j) {
        value = fma(set1(weight[j]), load_partial(rows + j * stride + i, lanes), value);
      }
      store_partial(values + i, value, lanes);
    }
  }
  if (zeros > 0) {
    const float top = maximum < 0.0F ? 0.0F : maximum;
    float kept[kLanes];
    float each[kLanes];
    store(kept, exp(set1(maximum) - set1(top)));
    store(each, exp(set1(-top)));
    sum = sum + static_cast<float>(zeros) * each[0] / kept[0];  // in units of exp(maximum), as the values are
  }
  for (std::int64_t i = 0; i < d; i += kLanes) {
    const int lanes = lanes_left(d - i);
    store_partial(out + i, load_partial(values + i, lanes) / set1(sum), lanes);
  }
}

constexpr AttentionKernels kAttentionKernels = {attend};

}  // namespace
}  // namespace mmrec::kernels
