// One step of the gated recurrence, shared by the exact loop and by the gate-frozen scan so that both round alike:
// where the scan's gates are those of the exact loop, its states are the same bits. And a step of the recurrence that
// is normed at every token.
namespace mmrec::kernels {
namespace {

/// h_t from h_{t-1} and the gates' pre-activations: s = W_g h_{t-1} + b_g, g = zm + W_mh h_{t-1}.
inline Vec gated_step(Vec s, Vec g, Vec z, Vec gamma, Vec h, Vec mix) {
  s = sigmoid(s);
  g = sigmoid(g);
  const Vec a = fma(mix, (set1(1.0F) - g) + gamma, gamma);
  const Vec b = z * fma(mix, g, s);
  return fma(a, h, b);
}

/// One token of the exact loop for a run of channels.
void recurrence_step(const RecurrenceStep& r) {
  const Vec mix = set1(r.mdi_mix);
  for (std::int64_t i = 0; i < r.channels; i += kLanes) {
    const int lanes = lanes_left(r.channels - i);
    Vec s = load_partial(r.s + i, lanes);
    if (r.bias != nullptr) s = s + load_partial(r.bias + i, lanes);
    const Vec g = load_partial(r.zm + i, lanes) + load_partial(r.g + i, lanes);
    const Vec h = gated_step(s, g, load_partial(r.z + i, lanes), load_partial(r.gamma + i, lanes),
                             load_partial(r.h + i, lanes), mix);
    store_partial(r.h_next + i, h, lanes);
  }
}

/// A gate-frozen sweep over kScanChannels channels or fewer, in order of time. change and magnitude are raised to this
/// run's maxima; a NaN counts as infinity, so that no comparison can lose it.
void recurrence_scan(const RecurrenceScan& r) {
  constexpr int kVecs = static_cast<int>(kScanChannels) / kLanes;
  const Vec mix = set1(r.mdi_mix);
  const Vec infinity = set1(kVecInfinity);
  const int vecs = static_cast<int>((r.channels + kLanes - 1) / kLanes);
  Vec state[kVecs];
  for (int v = 0; v < vecs; ++v)
    state[v] = load_partial(r.h + std::int64_t{v} * kLanes, lanes_left(r.channels - std::int64_t{v} * kLanes));
  for (std::int64_t t = 0; t < r.times; ++t) {
    const float* z = r.z + t * r.z_stride;
    const float* zm = r.zm + t * r.zm_stride;
    const float* gamma = r.gamma + t * r.gamma_stride;
    const float* s = r.s + t * r.gate_stride;
    const float* g = r.g + t * r.gate_stride;
    float* h = r.h + (t + 1) * r.h_stride;
    Vec change = zero();
    Vec magnitude = zero();
    for (int v = 0; v < vecs; ++v) {
      const std::int64_t i = std::int64_t{v} * kLanes;
      const int lanes = lanes_left(r.channels - i);
      const Vec next = gated_step(load_partial(s + i, lanes), load_partial(zm + i, lanes) + load_partial(g + i, lanes),
                                  load_partial(z + i, lanes), load_partial(gamma + i, lanes), state[v], mix);
      const Vec difference = abs(next - load_partial(h + i, lanes));
      change = max(change, select(is_nan(difference), infinity, difference));
      magnitude = max(magnitude, select(is_nan(next), infinity, abs(next)));
      store_partial(h + i, next, lanes);
      state[v] = next;
    }
    const float c = reduce_max(change);
    const float m = reduce_max(magnitude);
    if (c > r.change[t]) r.change[t] = c;
    if (m > r.magnitude[t]) r.magnitude[t] = m;
  }
}

void normed_step(const NormedStep& r) {
  for (std::int64_t i = 0; i < r.channels; i += kLanes) {
    const int lanes = lanes_left(r.channels - i);
    Vec m = load_partial(r.zm + i, lanes);
    if (r.bias != nullptr) m = m + load_partial(r.bias + i, lanes);
    if (r.product != nullptr) m = m + load_partial(r.product + i, lanes);
    m = sigmoid(m);
    Vec p = m * load_partial(r.z + i, lanes);
    if (r.h != nullptr) {
      const Vec keep = (set1(1.0F) - m) + load_partial(r.gamma + i, lanes);
      p = fma(keep, load_partial(r.h + i, lanes), p);
    }
    store_partial(r.p + i, p, lanes);
  }
}

void norm_within(const float* weight, float scale, float limit, float* x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = lanes_left(count - i);
    const Vec y = load_partial(weight + i, lanes) * (set1(scale) * load_partial(x + i, lanes));
    store_partial(x + i, min(set1(limit), max(set1(-limit), y)), lanes);  // y last, so that NaN passes
  }
}

constexpr RecurrenceKernels kRecurrenceKernels = {recurrence_step, recurrence_scan, normed_step, norm_within};

}  // namespace
}  // namespace mmrec::kernels
