// One gate-frozen sweep of the recurrence on the tensor cores of sm_90a: the gates' product, the gates, the scan over
// time and the measures of convergence in one kernel. The [T, 2D] matrix of gates never exists.
//
//   s_t = σ(W_g h_{t-1} + b_g),  g_t = σ(zm_t + W_mh h_{t-1})      h of the previous sweep, rounded to A
//   a_t = γ_t + μ (1 − g_t + γ_t),  b_t = z_t ⊙ (s_t + μ g_t),  h_t = a_t ⊙ h_{t-1} + b_t      h of this one, fp32
//
// A block owns 128 times and 64 or 128 channels; its tile of the weights has those rows of both gates, so that s and g
// of an element are sums of one thread (gemm_sm90.cuh). The sums of a warp are 16 whole times; it passes them through
// shared memory, where the ring was, into the layout of the scan: a lane owns pairs of channels at all 16 times. Then
//   1. each lane composes its times' steps h ↦ a h + b into one (A, B) and keeps a and b in registers;
//   2. the warps' (A, B) meet in shared memory; the tile's own, their composition, is published for the later tiles;
//   3. the tile reads the (A, B) of all earlier tiles of its channels and applies them in their order to the carry;
//   4. each lane runs its times: h, h rounded, |h_new − h_old| and |h_new|, whose maxima over channels are atomic
//   maxima of
//      the bits of floats that are not negative, so their order does not matter.
// A published element is two words of 64 bits, each a float and a mark, so no fence stands between data and flag. Tiles
// are numbered time after time, and a tile waits for lower numbers only. The last of the tiles of the same channels to
// have read clears their words: Cuda::flags() is left zero.
//
// Bytes per element of [T, D]: 8 for z, zm, γ in, 4 for h in and 4 out, 2 for the product's operand and 2 for the next
// one's, and D/128 + T/… of operand tiles from L2. One block an SM: all 227 KB are ring. With 64 channels, T = D =
// 1,024 are 128 blocks, one for each SM but four, whose inputs wait in registers (96 a thread) while it multiplies;
// with 128 channels they are brought into L2 meanwhile.
//
// Deterministic: sums, compositions and the walk over earlier tiles have one order, whoever arrives first.
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/gemm_sm90.cuh"
#include "kernels/cuda/gemm_sm90.h"

namespace mmrec::kernels {

namespace {

/// 64 channels; four blocks of a cluster share two tiles of rows and two of weights. For up to one wave of blocks.
struct NarrowSweepTile {
  static constexpr int kConsumers = 2;
  static constexpr int kColumns = 128;
  static constexpr int kParts = 2;
  static constexpr int kStages = 7;
  static constexpr int kClusterRows = 2;
  static constexpr int kClusterColumns = 2;
  static constexpr int kLead = 0;   // both consumers scan together
  static constexpr int kGroup = 1;  // times slowest: earlier tiles have lower numbers
};
/// 128 channels, with less traffic a multiply-add.
struct WideSweepTile : NarrowSweepTile {
  static constexpr int kColumns = 256;
  static constexpr int kStages = 4;
  static constexpr int kClusterColumns = 1;
};

/// A tensor's [batch, time, channel], time 0 being the sweep's first.
template <class T>
struct Rows {
  T* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int32_t time_bytes = 0;  // from one time to the next

  __device__ T* column(int batch, int channel) const { return data + batch * batch_stride + channel; }
  /// `time` rows below `top`: one multiply-add.
  __device__ T* below(T* top, int time) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(top) + std::int64_t{time_bytes} * time);
  }
};
template <class T>
Rows<T> rows_from(const SequenceView<T, Device>& view, std::int64_t first) {
  return {view.at(0, 0, first), view.batch_stride,
          static_cast<std::int32_t>(view.time_stride * static_cast<std::int64_t>(sizeof(T)))};
}

/// Two neighbours of a 16-bit type.
template <class A>
struct alignas(4) Pair {
  A x, y;
};

/// h ↦ a h + b.
struct Step {
  float a = 1.0F;
  float b = 0.0F;

  __device__ float operator()(float h) const { return __fmaf_rn(a, h, b); }
};
/// `second` after `first`.
__device__ inline Step compose(Step first, Step second) { return {first.a * second.a, second(first.b)}; }

constexpr std::uint64_t kPublished = std::uint64_t{1} << 32;

template <class A, class Tile>
class SweepEpilogue {
 public:
  struct Parameters {
    Rows<const A> z, zm;
    Rows<const float> gamma;
    Rows<float> h;  // row t is the state before time t
    Rows<const A> h_rounded;
    Rows<A> h_rounded_next;
    const float* bias;  // or null
    float* change;
    float* magnitude;
    float mix;
    int times;
    int channels;
    int time_tiles;
    int channel_tiles;
    std::uint32_t* readers;  // [batch][channel tile]
    ulonglong2* published;   // [batch][time tile][channel]
  };
  static constexpr int kSharedBytes = 0;

  __device__ SweepEpilogue(const Parameters& parameters, std::byte*, std::byte* ring)
      : p_(parameters),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        sums_(reinterpret_cast<float*>(ring) + warp_ * kWarpTimes * kPitch),
        warp_steps_(reinterpret_cast<Step*>(ring + kSumsBytes)),
        tile_steps_(warp_steps_ + kWarps * kChannels),
        cleans_(reinterpret_cast<std::uint32_t*>(tile_steps_ + kWarps * kChannels)) {}

  __device__ void begin(const GemmPlace& place) {
    if constexpr (kLoadsEarly) {
      load_inputs(place);
    } else {
      prefetch(place);
    }
  }

  template <int kSize>
  __device__ void finish(const GemmPlace& place, const float (&sum)[kSize]) {
    static_assert(kSize == kChannels);
    if (place.row >= p_.times || place.column >= p_.channels) return;  // the whole block
    meet();                                                            // nobody reads the ring any more
    store_sums(sum);
    __syncwarp();
    // One band after another, so that a band's steps fit in registers.
#pragma unroll 1
    for (int band = 0; band < kBands; ++band) {
      GemmPlace at = place;
      at.column += kBand * band;
      scan(place, at, band);
    }
    if (p_.time_tiles == 1) return;
    if (threadIdx.x == 0) *cleans_ = readers_before_ + 1 == static_cast<std::uint32_t>(p_.time_tiles) ? 1U : 0U;
    meet();
    if (*cleans_ != 0) clean(place);
  }

 private:
  static constexpr int kChannels = Tile::kColumns / 2;
  static constexpr int kBand = 64;  // channels of a warp's row: two neighbours each lane
  static constexpr int kBands = kChannels / kBand;
  static constexpr int kWarps = 4 * Tile::kConsumers;
  static constexpr int kWarpTimes = 16;
  static constexpr int kPitch = 2 * kChannels + 8;  // floats: rows begin 8 banks apart, so stores of 8 rows fill all 32
  static constexpr int kSumsBytes = kWarps * kWarpTimes * kPitch * 4;
  // 64 sums leave room for a band's inputs beside them; next to 128 only L2 can hold them.
  static constexpr bool kLoadsEarly = kBands == 1;
  static constexpr int kMeeting = Tile::kConsumers;  // named barrier
  static_assert(kSumsBytes + 2 * kWarps * kChannels * 8 + 4 <= GemmLayout<Tile>::kRingBytes);

  struct Input {
    Pair<A> z, zm;
    float2 gamma;
  };

  __device__ static void meet() { ptx::named_barrier_sync(kMeeting, kWarps * 32); }
  template <class Vector, class T>
  __device__ static const Vector& vector(const T* from) {
    return *reinterpret_cast<const Vector*>(from);
  }

  // `at` is the place of a band. What lies beyond the sweep is read at its border and never used.
  __device__ int channel(const GemmPlace& at) const { return at.column + 2 * lane_; }
  __device__ int clamped_channel(const GemmPlace& at) const { return min(channel(at), p_.channels - 2); }
  __device__ int time_of(const GemmPlace& at, int i) const { return at.row + warp_ * kWarpTimes + i; }
  __device__ int clamped_time(const GemmPlace& at, int i) const { return min(time_of(at, i), p_.times - 1); }
  template <class T>
  __device__ T* column(const Rows<T>& rows, const GemmPlace& at) const {
    return rows.column(at.batch, clamped_channel(at));
  }

  /// z, zm and gamma of the lane's elements.
  __device__ void load_inputs(const GemmPlace& at) {
    const A* z = column(p_.z, at);
    const A* zm = column(p_.zm, at);
    const float* gamma = column(p_.gamma, at);
#pragma unroll
    for (int i = 0; i < kWarpTimes; ++i) {
      const int time = clamped_time(at, i);
      inputs_[i] = {vector<Pair<A>>(p_.z.below(z, time)), vector<Pair<A>>(p_.zm.below(zm, time)),
                    vector<float2>(p_.gamma.below(gamma, time))};
    }
    bias_ = p_.bias == nullptr ? make_float2(0.0F, 0.0F) : vector<float2>(p_.bias + clamped_channel(at));
  }
  /// The carry and the previous states of the lane's elements.
  __device__ void load_states(GemmPlace at) {
    at.row = ptx::opaque(at.row);  // no offsets kept since load_inputs
    float* h = column(p_.h, at);
    carry_ = vector<float2>(h);
#pragma unroll
    for (int i = 0; i < kWarpTimes; ++i) old_[i] = vector<float2>(p_.h.below(h, clamped_time(at, i) + 1));
  }
  /// The tile's lines of z, zm, gamma and h into L2, 64 elements of A or 32 floats each.
  __device__ void prefetch(const GemmPlace& place) const {
    const int half = min(place.column + lane_ % 2 * 64, p_.channels - 1);
    const int quarter = min(place.column + lane_ % 4 * 32, p_.channels - 1);
#pragma unroll 1
    for (int i = 0; i < kWarpTimes; ++i) {
      const int time = clamped_time(place, i);
      if (lane_ < 2) ptx::prefetch_l2(p_.z.below(p_.z.column(place.batch, half), time));
      if (lane_ >= 2 && lane_ < 4) ptx::prefetch_l2(p_.zm.below(p_.zm.column(place.batch, half), time));
      if (lane_ >= 4 && lane_ < 8) ptx::prefetch_l2(p_.gamma.below(p_.gamma.column(place.batch, quarter), time));
      if (lane_ >= 8 && lane_ < 12) ptx::prefetch_l2(p_.h.below(p_.h.column(place.batch, quarter), time + 1));
    }
  }

  template <int kSize>
  __device__ void store_sums(const float (&sum)[kSize]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* row = sums_ + (lane_ / 4 + 8 * half) * kPitch + lane_ % 4 * 2;
#pragma unroll
      for (int j = 0; j < kSize / 4; ++j) {
        *reinterpret_cast<float2*>(row + 8 * j) = make_float2(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
      }
    }
  }

  /// All that is left to do for a band of the tile.
  __device__ void scan(const GemmPlace& place, const GemmPlace& at, int band) {
    if constexpr (!kLoadsEarly) load_inputs(at);
    Step steps[kWarpTimes][2];
    compute_steps(at, band, steps);
    meet();
    const int tile = at.row / GemmLayout<Tile>::kRows;
    Step before[2];
    compose_warps(at, tile, band, before);
    load_states(at);  // arrives while other tiles publish
    float h[2] = {carry_.x, carry_.y};
    apply_tiles(at, tile, band, h);
    // The loads before this have returned: their values have passed a barrier. So it need not order them.
    if (threadIdx.x == 0 && p_.time_tiles != 1 && band == kBands - 1) readers_before_ = atomicAdd(readers(place), 1U);
    h[0] = before[0](h[0]);
    h[1] = before[1](h[1]);
    run(at, steps, h);
    if (at.row == 0 && warp_ == 0) copy_carry(at);
  }

  /// A time that does not exist leaves h as it is.
  __device__ Step step_of(bool exists, float s, float g, float z, float gamma) const {
    s = sigmoid(s);
    g = sigmoid(g);
    const float a = __fmaf_rn(p_.mix, (1.0F - g) + gamma, gamma);
    const float b = z * __fmaf_rn(p_.mix, g, s);
    return {exists ? a : 1.0F, exists ? b : 0.0F};
  }

  /// a and b of the lane's elements, and their composition over time for the other warps.
  __device__ void compute_steps(const GemmPlace& at, int band, Step (&steps)[kWarpTimes][2]) {
    const float* sums = sums_ + kBand * band + 2 * lane_;
    Step all[2];
#pragma unroll
    for (int i = 0; i < kWarpTimes; ++i) {
      const Input in = inputs_[i];
      const float2 s = vector<float2>(sums + i * kPitch);
      const float2 g = vector<float2>(sums + i * kPitch + kChannels);
      const bool exists = time_of(at, i) < p_.times;
      steps[i][0] = step_of(exists, s.x + bias_.x, widen(in.zm.x) + g.x, widen(in.z.x), in.gamma.x);
      steps[i][1] = step_of(exists, s.y + bias_.y, widen(in.zm.y) + g.y, widen(in.z.y), in.gamma.y);
      all[0] = compose(all[0], steps[i][0]);
      all[1] = compose(all[1], steps[i][1]);
    }
    *reinterpret_cast<float4*>(two(warp_steps_, warp_, band)) = make_float4(all[0].a, all[0].b, all[1].a, all[1].b);
  }

  /// The lane's two steps of row `row` of an array [row][channel].
  __device__ Step* two(Step* rows, int row, int band) const {
    return rows + row * kChannels + kBand * band + 2 * lane_;
  }
  __device__ static void read(const Step* from, Step (&steps)[2]) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    steps[0] = {v.x, v.y};
    steps[1] = {v.z, v.w};
  }

  /// The steps of the warps before this one. The last warp also composes the tile's and publishes them.
  __device__ void compose_warps(const GemmPlace& at, int tile, int band, Step (&before)[2]) const {
    Step next[2];
#pragma unroll 4
    for (int w = 0; w < warp_; ++w) {
      read(two(warp_steps_, w, band), next);
      before[0] = compose(before[0], next[0]);
      before[1] = compose(before[1], next[1]);
    }
    if (warp_ != kWarps - 1 || tile + 1 == p_.time_tiles || channel(at) >= p_.channels) return;
    read(two(warp_steps_, warp_, band), next);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Step all = compose(before[i], next[i]);
      ptx::store_relaxed_pair(
          published(at, tile) + channel(at) + i,
          make_ulonglong2(kPublished | __float_as_uint(all.a), kPublished | __float_as_uint(all.b)));
    }
  }

  __device__ ulonglong2* published(const GemmPlace& at, int tile) const {
    return p_.published + (std::int64_t{at.batch} * p_.time_tiles + tile) * p_.channels;
  }

  /// h, the carry, becomes the state before the tile by every earlier tile's steps. A warp fetches one tile of eight.
  __device__ void apply_tiles(const GemmPlace& at, int tile, int band, float (&h)[2]) const {
    for (int first = 0; first < tile; first += kWarps) {
      const int count = min(kWarps, tile - first);
      if (first != 0) meet();  // the last ones are read
      if (warp_ < count && channel(at) < p_.channels) {
        const ulonglong2* from = published(at, first + warp_) + channel(at);
        const Step x = fetch(from);
        const Step y = fetch(from + 1);
        *reinterpret_cast<float4*>(two(tile_steps_, warp_, band)) = make_float4(x.a, x.b, y.a, y.b);
      }
      meet();
#pragma unroll 4
      for (int w = 0; w < count; ++w) {
        Step next[2];
        read(two(tile_steps_, w, band), next);
        h[0] = next[0](h[0]);
        h[1] = next[1](h[1]);
      }
    }
  }

  __device__ static Step fetch(const ulonglong2* from) {
    for (;;) {
      const ulonglong2 words = ptx::load_relaxed_pair(from);
      if ((words.x & words.y & kPublished) != 0) {
        return {__uint_as_float(static_cast<std::uint32_t>(words.x)),
                __uint_as_float(static_cast<std::uint32_t>(words.y))};
      }
      ptx::spin_pause();
    }
  }

  __device__ std::uint32_t* readers(const GemmPlace& place) const {
    return p_.readers + place.batch * p_.channel_tiles + place.column / kChannels;
  }
  /// In the last tile of those that share channels to have read.
  __device__ void clean(const GemmPlace& place) const {
    if (threadIdx.x == 0) *readers(place) = 0;
    const int count = min(kChannels, p_.channels - place.column);
    for (int tile = warp_; tile + 1 < p_.time_tiles; tile += kWarps) {
      for (int c = lane_; c < count; c += 32) published(place, tile)[place.column + c] = make_ulonglong2(0, 0);
    }
  }

  /// The lane's states in order of time from h.
  __device__ void run(GemmPlace at, const Step (&steps)[kWarpTimes][2], float (&h)[2]) {
    at.row = ptx::opaque(at.row);
    float* top = column(p_.h, at);
    A* rounded_top = column(p_.h_rounded_next, at);
    // Bits of |x|, none where there is no channel. As integers they are in the order of the floats, NaN above infinity.
    const std::uint32_t magnitude_bits = channel(at) < p_.channels ? 0x7fffffffU : 0U;
    std::uint32_t maximum = 0;  // lanes 0..15: change of time `lane`; 16..31: magnitude
#pragma unroll
    for (int i = 0; i < kWarpTimes; ++i) {
      const int time = time_of(at, i);
      h[0] = steps[i][0](h[0]);
      h[1] = steps[i][1](h[1]);
      if (magnitude_bits != 0 && time < p_.times) {
        *reinterpret_cast<float2*>(p_.h.below(top, time + 1)) = make_float2(h[0], h[1]);
        *reinterpret_cast<Pair<A>*>(p_.h_rounded_next.below(rounded_top, time + 1)) = {narrow<A>(h[0]),
                                                                                       narrow<A>(h[1])};
      }
      std::uint32_t change = __float_as_uint(h[0] - old_[i].x) & magnitude_bits;
      std::uint32_t magnitude = __float_as_uint(h[0]) & magnitude_bits;
      change = ptx::warp_max(max(change, __float_as_uint(h[1] - old_[i].y) & magnitude_bits));
      magnitude = ptx::warp_max(max(magnitude, __float_as_uint(h[1]) & magnitude_bits));
      if (lane_ == i) maximum = change;
      if (lane_ == i + kWarpTimes) maximum = magnitude;
    }
    const int time = time_of(at, lane_ % kWarpTimes);
    if (time >= p_.times) return;
    float* to = (lane_ < kWarpTimes ? p_.change : p_.magnitude) + time;
    atomicMax(reinterpret_cast<std::uint32_t*>(to), min(maximum, 0x7f800000U));  // NaN counts as infinity
  }

  /// The carry's row of the next h_rounded.
  __device__ void copy_carry(const GemmPlace& at) const {
    if (channel(at) >= p_.channels) return;
    *reinterpret_cast<Pair<A>*>(column(p_.h_rounded_next, at)) = vector<Pair<A>>(column(p_.h_rounded, at));
  }

  const Parameters& p_;
  int warp_;
  int lane_;
  float* sums_;       // of this warp: [time][W_g's, then W_mh's kChannels], kPitch apart
  Step* warp_steps_;  // [warp][channel]
  Step* tile_steps_;  // [warp][channel], of a tile that the warp has fetched
  std::uint32_t* cleans_;
  std::uint32_t readers_before_ = 0;
  float2 bias_;
  float2 carry_;
  Input inputs_[kWarpTimes];
  float2 old_[kWarpTimes];
};

/// Words of Cuda::flags() in front of the published steps: a reader count per batch and tile of channels.
std::int64_t reader_words(std::int64_t batch, std::int64_t channel_tiles) {
  return ceil_div(batch * channel_tiles, 4) * 4;
}

template <class A>
MatrixStack state_stack(const GatedSweep<Device, A>& op) {
  const SequenceView<A, Device>& h = op.in.h_rounded;
  return {.data = h.at(0, 0, op.first),
          .columns = h.dim,
          .rows = op.in.z.time - op.first,
          .depth = h.batch,
          .row_stride = h.time_stride,
          .depth_stride = h.batch_stride};
}
MatrixStack gate_stack(const WeightView<Device>& w) {
  const std::int64_t dim = w.cols;
  return {.data = w.data, .columns = dim, .rows = dim, .depth = 2, .row_stride = dim, .depth_stride = dim * dim};
}

template <class Tile, class A>
void launch_sweep(Cuda& cuda, const GatedSweep<Device, A>& op) {
  using Epilogue = SweepEpilogue<A, Tile>;
  const std::int64_t times = op.in.z.time - op.first;
  const std::int64_t channel_tiles = ceil_div(op.in.z.dim, Tile::kColumns / 2);
  const typename Epilogue::Parameters parameters = {
      .z = rows_from(op.in.z, op.first),
      .zm = rows_from(op.in.zm, op.first),
      .gamma = rows_from(op.in.gamma, op.first),
      .h = rows_from(op.in.h, op.first),
      .h_rounded = rows_from<const A>(op.in.h_rounded, op.first),
      .h_rounded_next = rows_from(op.h_rounded_next, op.first),
      .bias = op.gate_bias,
      .change = op.change + op.first,
      .magnitude = op.magnitude + op.first,
      .mix = op.in.mdi_mix,
      .times = static_cast<int>(times),
      .channels = static_cast<int>(op.in.z.dim),
      .time_tiles = static_cast<int>(ceil_div(times, GemmLayout<Tile>::kRows)),
      .channel_tiles = static_cast<int>(channel_tiles),
      .readers = cuda.flags(),
      .published = reinterpret_cast<ulonglong2*>(cuda.flags() + reader_words(op.in.z.batch, channel_tiles))};
  launch_gemm_sm90<Tile, A, Epilogue>(cuda, state_stack(op), gate_stack(op.gate_weight), parameters, false);
}

template <class T>
bool aligned(const SequenceView<T, Device>& view) {
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.time_stride % 8 == 0 &&
         view.batch_stride % 8 == 0 && view.time_stride <= std::numeric_limits<std::int32_t>::max() / 4;
}

}  // namespace

template <class A>
bool gated_sweep_sm90_supported(const Cuda& cuda, const GatedSweep<Device, A>& op) {
  const std::int64_t batch = op.in.z.batch;
  const std::int64_t dim = op.in.z.dim;
  const std::int64_t times = op.in.z.time - op.first;
  if (cuda.compute_capability() != 90 || dim % 8 != 0 || times < 1 || batch < 1) return false;
  const std::int64_t tiles = ceil_div(times, GemmLayout<NarrowSweepTile>::kRows);
  const std::int64_t words =
      reader_words(batch, ceil_div(dim, NarrowSweepTile::kColumns / 2)) + 4 * batch * tiles * dim;
  return words <= static_cast<std::int64_t>(Cuda::kFlagWords) && has_tensor_map(state_stack(op)) &&
         has_tensor_map(gate_stack(op.gate_weight)) && aligned(op.in.z) && aligned(op.in.zm) && aligned(op.in.gamma) &&
         aligned(op.in.h) && aligned(op.h_rounded_next) && reinterpret_cast<std::uintptr_t>(op.gate_bias) % 8 == 0;
}

template <class A>
void gated_sweep_sm90(Cuda& cuda, const GatedSweep<Device, A>& op) {
  // Narrow tiles while they all run at once, in one wave.
  const std::int64_t wide_blocks = op.in.z.batch * ceil_div(op.in.z.time - op.first, GemmLayout<WideSweepTile>::kRows) *
                                   ceil_div(op.in.z.dim, WideSweepTile::kColumns / 2);
  if (2 * wide_blocks <= cuda.processors()) {
    launch_sweep<NarrowSweepTile>(cuda, op);
  } else {
    launch_sweep<WideSweepTile>(cuda, op);
  }
}

template bool gated_sweep_sm90_supported(const Cuda&, const GatedSweep<Device, BFloat16>&);
template bool gated_sweep_sm90_supported(const Cuda&, const GatedSweep<Device, Float16>&);
template void gated_sweep_sm90(Cuda&, const GatedSweep<Device, BFloat16>&);
template void gated_sweep_sm90(Cuda&, const GatedSweep<Device, Float16>&);

}  // namespace mmrec::kernels
