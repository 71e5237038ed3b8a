// Vector kernels of the three scans, written against the `Vec` of the including file.
//
// A kernel walks a rectangle of times x channels, a few whole rows at a time; lanes are channels and the arithmetic of
// a lane follows time alone, so neither tile width nor alignment nor the number of rows at a time changes a bit. States
// are fp64: a million fp32 additions would lose five digits, and decays next to 1 would freeze.
//
// Each piece of rows goes through two or three short loops with intermediate values in the first-level cache:
// element-wise work, the recurrence (its state in registers), element-wise work. One long loop would have the same
// instructions, but its dependent chain of a logarithm, a sum and an exponential is longer than the processor looks
// ahead: three times slower. Bytes moved to and from memory: every operand once.
namespace mmrec::kernels {
namespace {

/// e^x = scale + rest with scale a power of two: e^r - 1 is evaluated on its own and only added to 1 in fp64, so that
/// 1 - e^x keeps its relative accuracy (about 2^-24) where x is near 0. Over a memory of 1 / (1 - a) steps an fp32
/// rounding of `a` itself would be multiplied by that length. Below -87 the decay is 0, above 88 it counts as 88.
struct Decay {
  Vec scale, rest;
};
constexpr float kLeastLogDecay = -87.0F;
constexpr float kMostLogDecay = 88.0F;

inline Decay decay(Vec log_a) {
  constexpr float kRound = 12582912.0F + 127.0F;  // rounds to an integer n and leaves n + 127 in the low bits
  const Vec x = min(set1(kMostLogDecay), max(set1(kLeastLogDecay), log_a));  // log_a last: NaN passes
  const Vec shifted = fma(x, set1(kLog2E), set1(kRound));
  const Vec p = exp_of_rest(x, shifted - set1(kRound));
  const Vec power = as_float(shift_left<23>(as_int(shifted)));
  const Vec scale = select(less(log_a, set1(kLeastLogDecay)), zero(), power);
  return {scale, scale * p};
}

/// clamp(log(g + 1e-8), -50, 0). Next to 1 the argument is taken as 1 + ((g - 1) + 1e-8), where nothing is rounded
/// away; g = 1 gives exactly 0. A gate below -1e-8 has no logarithm: NaN.
inline Vec log_gate(Vec g) {
  const Vec one = set1(1.0F);
  const Vec epsilon = set1(1e-8F);
  const Vec bounded = min(set1(2.0F), g);
  const Vec y = bounded + epsilon;
  const Mask near_one = less(set1(0.75F), bounded);
  Vec e = zero();
  const Vec split = split_exponent(y, e);
  const Vec f = select(near_one, (bounded - one) + epsilon, split);
  const Vec l = log_from_parts(f, select(near_one, zero(), e));
  const Vec clamped = min(zero(), max(set1(-50.0F), l));
  const Vec low = select(equal(y, zero()), set1(-50.0F), set1(__builtin_nanf("")));
  return select(less_equal(y, zero()) | is_nan(y), low, clamped);
}

template <class T>
inline Vec load_some(const T* p, int count) {
  return count == kLanes ? load(p) : load_partial(p, count);
}

template <class T>
inline DVec load_some_wide(const T* p, int count) {
  return widen(load_some(p, count));
}
inline DVec load_some_wide(const float* p, int count) {
  return count == kLanes ? load_wide(p) : widen(load_partial(p, count));
}

template <bool kStreaming, class T>
inline void store_some(T* p, Vec a, int count) {
  if (count != kLanes) {
    store_partial(p, a, count);
  } else if constexpr (kStreaming) {
    stream(p, a);
  } else {
    store(p, a);
  }
}

constexpr std::int64_t kPieceElements = 2048;      // of one piece of rows: 8 KiB of fp32
constexpr std::int64_t kPieceBytesAhead = 16'384;  // fetched ahead: rows are too short for the hardware to run ahead

/// The rows of one piece; vector v of row t has its intermediate values at (t * vectors + v) * kLanes.
struct Piece {
  std::int64_t rows;
  std::int64_t vectors;
  std::int64_t channels;

  int lanes(std::int64_t v) const { return lanes_left(channels - v * kLanes); }
};

/// body(row, vector) over a piece, along memory.
template <class Body>
inline void along_rows(const Piece& piece, const Body& body) {
  for (std::int64_t t = 0; t < piece.rows; ++t) {
    for (std::int64_t v = 0; v < piece.vectors; ++v) body(t, v, piece.lanes(v));
  }
}

/// body(piece, first row) over the rectangle.
template <class Body>
inline void for_each_piece(const ScanRun& r, const Body& body) {
  const std::int64_t vectors = (r.channels + kLanes - 1) / kLanes;
  const std::int64_t most = kPieceElements / (vectors * kLanes);
  for (std::int64_t t = 0; t < r.times; t += most) {
    body(Piece{r.times - t < most ? r.times - t : most, vectors, r.channels}, t);
  }
}

/// Rows of an operand from `t` on, with the distance of the prefetch: some rows further down, or none near the end.
template <class T>
struct Rows {
  const T* data;
  std::int64_t stride;
  std::int64_t ahead;

  Rows(const void* p, std::int64_t row_stride, const ScanRun& r, std::int64_t t)
      : data(static_cast<const T*>(p) + t * row_stride), stride(row_stride) {
    const std::int64_t rows = kPieceBytesAhead / (static_cast<std::int64_t>(sizeof(T)) * r.channels) + 1;
    ahead = t + 2 * rows + kPieceElements / r.channels < r.times ? rows * row_stride : 0;
  }
  const T* at(std::int64_t t, std::int64_t v) const { return data + t * stride + v * kLanes; }
  void fetch(std::int64_t t, std::int64_t v) const { __builtin_prefetch(at(t, v) + ahead); }
};

// h = e^log_a h + b.
template <class T, bool kTotal, bool kStreaming>
inline void decay_rows(const ScanRun& r) {
  alignas(64) float scale[kPieceElements];
  alignas(64) float rest[kPieceElements];
  for_each_piece(r, [&](const Piece& piece, std::int64_t first) {
    const Rows<T> log_a(r.in[0], r.in_stride[0], r, first);
    const Rows<T> b(r.in[1], r.in_stride[1], r, first);
    along_rows(piece, [&](std::int64_t t, std::int64_t v, int lanes) {
      log_a.fetch(t, v);
      b.fetch(t, v);
      const Decay a = decay(load_some(log_a.at(t, v), lanes));
      store(scale + (t * piece.vectors + v) * kLanes, a.scale);
      store(rest + (t * piece.vectors + v) * kLanes, a.rest);
    });
    for (std::int64_t v = 0; v < piece.vectors; ++v) {
      const int lanes = piece.lanes(v);
      double* state = r.state + v * kLanes;
      DVec h = dload(state);
      DVec sum = kTotal ? dload(state + r.plane) : h;
      T* out = kTotal ? nullptr : static_cast<T*>(r.out) + first * r.out_stride + v * kLanes;
      for (std::int64_t t = 0; t < piece.rows; ++t) {
        const std::int64_t i = (t * piece.vectors + v) * kLanes;
        h = fma(load_wide(scale + i) + load_wide(rest + i), h, load_some_wide(b.at(t, v), lanes));
        if constexpr (kTotal) {
          // -inf as a number: a total is only ever exponentiated, and then 0.
          const Vec x = load_some(log_a.at(t, v), lanes);
          sum = sum + widen(min(set1(kMostLogDecay), max(set1(-1e4F), x)));
        } else {
          store_some<kStreaming>(out + t * r.out_stride, narrow(h), lanes);
        }
      }
      dstore(state, h);
      if constexpr (kTotal) dstore(state + r.plane, sum);
    }
  });
}

// L = L + log(gate), y = e^L.
template <class T, bool kTotal, bool kStreaming>
inline void exp_product_rows(const ScanRun& r) {
  alignas(64) float high[kPieceElements];  // log(gate), then L in two fp32 parts
  alignas(64) float low[kPieceElements];
  for_each_piece(r, [&](const Piece& piece, std::int64_t first) {
    const Rows<T> gamma(r.in[0], r.in_stride[0], r, first);
    along_rows(piece, [&](std::int64_t t, std::int64_t v, int lanes) {
      gamma.fetch(t, v);
      store(high + (t * piece.vectors + v) * kLanes, log_gate(load_some(gamma.at(t, v), lanes)));
    });
    for (std::int64_t v = 0; v < piece.vectors; ++v) {
      double* state = r.state + v * kLanes;
      DVec sum = dload(state);
      for (std::int64_t t = 0; t < piece.rows; ++t) {
        const std::int64_t i = (t * piece.vectors + v) * kLanes;
        sum = sum + load_wide(high + i);
        if constexpr (!kTotal) {
          const Vec h = narrow(sum);
          // Far below the range of e^L (or at -inf) the low part means nothing.
          store(low + i, select(less(h, set1(-200.0F)), zero(), narrow(sum - widen(h))));
          store(high + i, h);
        }
      }
      dstore(state, sum);
    }
    if constexpr (!kTotal) {
      T* y = static_cast<T*>(r.out) + first * r.out_stride;
      along_rows(piece, [&](std::int64_t t, std::int64_t v, int lanes) {
        const std::int64_t i = (t * piece.vectors + v) * kLanes;
        const Vec e = exp(load(high + i));
        store_some<kStreaming>(y + t * r.out_stride + v * kLanes, fma(e, load(low + i), e), lanes);
      });
      if (r.log_out != nullptr) {
        float* log_y = r.log_out + first * r.log_out_stride;
        along_rows(piece, [&](std::int64_t t, std::int64_t v, int lanes) {
          store_some<false>(log_y + t * r.log_out_stride + v * kLanes, load(high + (t * piece.vectors + v) * kLanes),
                            lanes);
        });
      }
    }
  });
}

// sum = sum + e^(x - m), L = m + log(sum). The reference m follows the maximum only when that has grown by more than
// kSlack, so that a slow climb does not multiply the sum by a million rounded factors, and a piece in which no lane's
// reference moves needs no rescaling at all. A piece in which one does is worked off step by step, with the same bits
// in the lanes that stay.
constexpr float kSlack = 8.0F;
constexpr float kLargest = 3.40282347e38F;  // a reference is finite: -inf - m and inf - m are then no NaN

/// Leaves the sums of a piece (fp32) in `sums` and the references in the state; references that move go to `moved`.
template <class T>
inline void logsumexp_steps(const ScanRun& r, const Piece& piece, const Rows<T>& x, float* sums, float* references) {
  for (std::int64_t v = 0; v < piece.vectors; ++v) {
    double* state = r.state + v * kLanes;
    Vec m = narrow(dload(state));
    DVec sum = dload(state + r.plane);
    for (std::int64_t t = 0; t < piece.rows; ++t) {
      const Vec next = load_some(x.at(t, v), piece.lanes(v));
      const Mask grown = less(m + set1(kSlack), next);
      if (any(grown)) {
        const Vec higher = select(grown, min(set1(kLargest), next), m);
        sum = sum * widen(exp(m - higher));
        m = higher;
      }
      sum = sum + widen(exp(next - m));
      store(sums + (t * piece.vectors + v) * kLanes, narrow(sum));
      store(references + (t * piece.vectors + v) * kLanes, m);
    }
    dstore(state, widen(m));
    dstore(state + r.plane, sum);
  }
}

template <class T, bool kTotal, bool kStreaming>
inline void logsumexp_rows(const ScanRun& r) {
  alignas(64) float sums[kPieceElements];  // terms e^(x - m), then their running sums
  alignas(64) float references[kPieceElements];
  for_each_piece(r, [&](const Piece& piece, std::int64_t first) {
    const Rows<T> x(r.in[0], r.in_stride[0], r, first);
    for (std::int64_t v = 0; v < piece.vectors; ++v)
      store(references + v * kLanes, narrow(dload(r.state + v * kLanes)));
    Mask grown = less(zero(), zero());
    along_rows(piece, [&](std::int64_t t, std::int64_t v, int lanes) {
      x.fetch(t, v);
      const Vec next = load_some(x.at(t, v), lanes);
      const Vec m = load(references + v * kLanes);
      grown = grown | less(m + set1(kSlack), next);
      store(sums + (t * piece.vectors + v) * kLanes, exp(next - m));
    });
    const bool moving = any(grown);
    if (moving) {
      logsumexp_steps(r, piece, x, sums, references);
    } else {
      for (std::int64_t v = 0; v < piece.vectors; ++v) {
        double* state = r.state + r.plane + v * kLanes;
        DVec sum = dload(state);
        for (std::int64_t t = 0; t < piece.rows; ++t) {
          float* term = sums + (t * piece.vectors + v) * kLanes;
          sum = sum + load_wide(term);
          if constexpr (!kTotal) store(term, narrow(sum));
        }
        dstore(state, sum);
      }
    }
    if constexpr (!kTotal) {
      T* y = static_cast<T*>(r.out) + first * r.out_stride;
      const std::int64_t reference_rows = moving ? piece.vectors : 0;
      along_rows(piece, [&](std::int64_t t, std::int64_t v, int lanes) {
        const Vec m = load(references + (t * reference_rows + v) * kLanes);
        const Vec l = m + log(load(sums + (t * piece.vectors + v) * kLanes));
        store_some<kStreaming>(y + t * r.out_stride + v * kLanes, l, lanes);
      });
    }
  });
}

// The table's functions: one switch per call, none inside.
#define MMREC_SCAN_ENTRIES(name)        \
  template <class T>                    \
  void name##_run(const ScanRun& r) {   \
    if (r.streaming) {                  \
      name##_rows<T, false, true>(r);   \
      stream_fence();                   \
    } else {                            \
      name##_rows<T, false, false>(r);  \
    }                                   \
  }                                     \
  template <class T>                    \
  void name##_total(const ScanRun& r) { \
    name##_rows<T, true, false>(r);     \
  }
MMREC_SCAN_ENTRIES(exp_product)
MMREC_SCAN_ENTRIES(logsumexp)
MMREC_SCAN_ENTRIES(decay)
#undef MMREC_SCAN_ENTRIES

constexpr ScanKernels kScanKernels = {MMREC_BY_DTYPE(exp_product_run), MMREC_BY_DTYPE(exp_product_total),
                                      MMREC_BY_DTYPE(logsumexp_run),   MMREC_BY_DTYPE(logsumexp_total),
                                      MMREC_BY_DTYPE(decay_run),       MMREC_BY_DTYPE(decay_total)};

}  // namespace
}  // namespace mmrec::kernels
