// Element-wise kernels over runs of contiguous fp32 values, and the reductions of rmsnorm and segment_sum.
namespace mmrec::kernels {
namespace {

/// Sum of x^2 in kLanes fp64 chains, added in order of their lanes.
double sum_squares(const float* x, std::int64_t count) {
  DVec sum = dset1(0.0);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const DVec v = widen(load_partial(x + i, lanes_left(count - i)));
    sum = fma(v, v, sum);
  }
  double lanes[kLanes];
  dstore(lanes, sum);
  double total = 0.0;
  for (const double lane : lanes) total += lane;
  return total;
}

/// y = weight * (scale * x); y may be x.
void scale_by(const float* x, const float* weight, float scale, float* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = lanes_left(count - i);
    store_partial(y + i, load_partial(weight + i, lanes) * (set1(scale) * load_partial(x + i, lanes)), lanes);
  }
}

void decay_gate_run(const float* a, const float* c, float* gamma, std::int64_t count) {
  constexpr float kLeast = 1e-6F;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = lanes_left(count - i);
    Vec g = sigmoid(load_partial(a + i, lanes));
    if (c != nullptr) g = g * sigmoid(load_partial(c + i, lanes));
    g = min(set1(1.0F - kLeast), max(set1(kLeast), g));  // g last, so that NaN passes
    store_partial(gamma + i, g, lanes);
  }
}

void block_residual_run(const float* x, const float* h, const float* v, const float* bias, float* y,
                        std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = lanes_left(count - i);
    Vec sum = fma(set1(0.1F), load_partial(v + i, lanes), load_partial(x + i, lanes) + load_partial(h + i, lanes));
    if (bias != nullptr) sum = sum + load_partial(bias + i, lanes);
    store_partial(y + i, sum, lanes);
  }
}

/// sum[c] += x[0][c], then x[1][c], and so on.
void add_rows(const float* x, std::int64_t stride, std::int64_t rows, double* sum, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    DVec total = dload(sum + i);
    for (std::int64_t r = 0; r < rows; ++r) total = total + widen(load(x + r * stride + i));
    dstore(sum + i, total);
  }
  for (; i < count; ++i) {
    for (std::int64_t r = 0; r < rows; ++r) sum[i] += static_cast<double>(x[r * stride + i]);
  }
}

constexpr PointwiseKernels kPointwiseKernels = {sum_squares, scale_by, decay_gate_run, block_residual_run, add_rows};

}  // namespace
}  // namespace mmrec::kernels
