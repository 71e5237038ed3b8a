// How products read rows of weights, by their format: plain numbers one vector at a time, quantised ones
// (kernels/tensor.h, WeightFormat) block by block, whose vectors are numbers times scale, rounded once. So a product
// has the bits of one with the dequantised numbers as fp32 weights. By integer dot products: matvec_digits.inl.
namespace mmrec::kernels {
namespace {

struct Int8 {};
struct Int4 {};

/// A row of plain numbers of type T.
template <class T>
struct Plain {
  using Row = const T*;
  [[gnu::always_inline]] static Row row(const WeightView<Host>& weight, std::int64_t row_bytes, std::int64_t r) {
    return reinterpret_cast<const T*>(static_cast<const char*>(weight.data) + r * row_bytes);
  }
};

/// A row of quantised numbers.
template <class T>
struct Quantized {
  using Numbers = T;
  struct Row {
    const unsigned char* numbers;
    const float* scales;
  };
  [[gnu::always_inline]] static Row row(const WeightView<Host>& weight, std::int64_t row_bytes, std::int64_t r) {
    const auto* const p = static_cast<const unsigned char*>(weight.data) + r * row_bytes;
    return {p, reinterpret_cast<const float*>(p + number_bytes(weight.format, weight.cols))};
  }
};

template <class F>
inline constexpr bool kIsQuantized = requires {
  typename F::Numbers;
};
template <class T>
inline constexpr int kBlockBytes = kQuantBlock;
template <>
inline constexpr int kBlockBytes<Int4> = kQuantBlock / 2;

/// The vectors of a block: vec(v) holds elements v * kLanes and up.
template <class T>
struct Block;

template <>
struct Block<Int8> {
  void read(const unsigned char* numbers, float by) {
    p = numbers;
    scale = set1(by);
  }
  Vec vec(std::int64_t v) const { return to_float_lanes(load_bytes(p + v * kLanes)) * scale; }

  const unsigned char* p;
  Vec scale;
};

template <>
struct Block<Float8> {
  void read(const unsigned char* numbers, float by) {
    p = numbers;
    scale = set1(by);
  }
  Vec vec(std::int64_t v) const { return load_f8(p + v * kLanes) * scale; }

  const unsigned char* p;
  Vec scale;
};

template <>
struct Block<Int4> {
  static constexpr int kParts = 16 / kLanes;  // of the 16 words of a block

  void read(const unsigned char* numbers, float by) {
    for (std::int64_t i = 0; i < kParts; ++i) words[i] = load_words(numbers + i * 2 * kLanes);
#if MMREC_LANES == 16
    values = Vec{Floats { -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7 }} * set1(by);
#else
    values = set1(by);
#endif
  }
  Vec vec(std::int64_t v) const {
    const IVec bits = {(Ints)((UInts)words[v % kParts].v >> (4 * static_cast<int>(v / kParts)))};
#if MMREC_LANES == 16
    return lookup(values, bits);
#else
    return to_float_lanes({(bits.v & 15) - 8}) * values;
#endif
  }

  IVec words[kParts];
  Vec values;  // of the 16 numbers; or the scale
};

}  // namespace
}  // namespace mmrec::kernels
