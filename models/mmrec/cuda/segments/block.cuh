// A block of finish_segments (finish_segments.cu): the weights that it keeps, the products with them, and the stages of
// a tile of rows.
#pragma once

#include <cmath>

#include "kernels/cuda/recurrence/equations.cuh"
#include "models/mmrec/cuda/segments/attention.cuh"

namespace mmrec::kernels::segments {

template <class A, bool kKnown>
class Block : private BlockAttention<A, kKnown> {
  using Base = BlockAttention<A, kKnown>;
  using Base::attend_kept, Base::attend_made, Base::await_vectors, Base::blank, Base::close, Base::dim, Base::fetch,
      Base::ffn, Base::ffn_share, Base::for_each_hidden, Base::give, Base::hidden_place, Base::hold_made, Base::leave,
      Base::load_slots, Base::meet, Base::mixed_place, Base::next, Base::owns_row, Base::place_of, Base::publish_sums,
      Base::rounded, Base::share, Base::share_attended, Base::store_made, Base::widened, Base::kLanePairs, Base::p_,
      Base::op_, Base::rank_, Base::index_, Base::sequence_, Base::owns_head_, Base::row_, Base::channel_,
      Base::fetched_, Base::count_;
  using typename Base::Piece, typename Base::Task;

 public:
  __device__ explicit Block(const Params<A>& p) : Base(p) {}

  __device__ void run() {
    keep_weights(op_.memory_out, share(), 0);
    keep_weights(op_.ffn_in, ffn_share(), p_.plan.ffn_in);
    keep_weights(op_.ffn_out, share(), p_.plan.ffn_out);
    keep(op_.norm, dim(), p_.plan.norm);
    keep(op_.ffn_in_bias == nullptr ? nullptr : op_.ffn_in_bias + rank_ * ffn_share(), ffn_share(), p_.plan.bias);
    if (owns_head_) load_slots();
    load4(op_.memory_out_bias, memory_bias_);
    load4(op_.ffn_out_bias, ffn_bias_);
    Task task = next(-1, p_.tiles);
    fetch(task);
    for (int place = 0; place < kPlaces; ++place) blank(place);
    if (owns_head_) attend_kept(task);
    meet();
    while (task.piece.number < p_.pieces) task = finish_tile(task);
    if (index_ == 0) close();
    leave();
  }

 private:
  /// D, at most.
  static constexpr int kDim = kKnown ? kKnownSizes.dim : kMostDim;

  // --- Weights -------------------------------------------------------------------------------------------------------

  __device__ void keep_weights(const WeightView<Device>& weight, int rows, int offset) {
    const auto pieces = static_cast<int>(weight.cols) * 2 / 16;  // of a row
    const auto* from = static_cast<const uint4*>(weight.data) + std::int64_t{rank_} * rows * pieces;
#pragma unroll 8
    for (int i = thread(); i < rows * pieces; i += kThreads) {
      *at<uint4>(offset + place(i / pieces, pieces * 16, i % pieces * 16)) = __ldg(from + i);
    }
  }

  /// `count` floats, or zeros.
  __device__ void keep(const float* from, int count, int offset) {
    for (int i = thread(); i < count / kGroup; i += kThreads) {
      *(at<float4>(offset) + i) =
          from == nullptr ? make_float4(0, 0, 0, 0) : __ldg(reinterpret_cast<const float4*>(from) + i);
    }
  }
  /// A bias of this thread's channels; null is zeros.
  __device__ void load4(const float* from, float (&to)[kGroup]) const {
    const float4 v = from != nullptr && owns_row() ? __ldg(reinterpret_cast<const float4*>(from + channel_))
                                                   : make_float4(0, 0, 0, 0);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }

  // --- Products ------------------------------------------------------------------------------------------------------

  /// kRows operands of `bytes` bytes times the weights of `outputs` outputs. kShares warps divide k; half of them leave
  /// their sums in the work space, the other half add theirs: [kShares / 2][output tile][lane][4].
  template <int kShares>
  __device__ void multiply(int weights, int outputs, int operand, int bytes) const {
    constexpr int kAcross = kWarps / kShares;
    const int share = warp() % kShares;
    const int g = lane() / 4;
    const int swizzle = g % 2 * kStep;
    const int tiles = outputs / kTileOutputs;
    const auto* x = at<const std::byte>(operand) + g * bytes;
    const auto* w = at<const std::byte>(weights) + g * bytes;
    for (int first = warp() / kShares; first - warp() / kShares < tiles; first += kAcross * kTiles) {
      float sums[kTiles][2][4] = {};
#pragma unroll 3
      for (int byte = share * kStep; byte < bytes; byte += kShares * kStep) {
        const int k = (byte + lane() % 4 * 16) ^ swizzle;
        const uint4 low = *reinterpret_cast<const uint4*>(x + k);
        const uint4 high = *reinterpret_cast<const uint4*>(x + 8 * bytes + k);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const int tile = min(first + j * kAcross, tiles - 1);
          const uint4 b = *reinterpret_cast<const uint4*>(w + tile * kTileOutputs * bytes + k);
          ptx::mma_m16n8k16<A>(sums[j][0], {low.x, high.x, low.y, high.y}, {b.x, b.y});
          ptx::mma_m16n8k16<A>(sums[j][1], {low.z, high.z, low.w, high.w}, {b.z, b.w});
        }
      }
      auto* to = at<float4>(p_.plan.work) + share % (kShares / 2) * tiles * 32 + lane();
#pragma unroll
      for (int half = 1; half >= 0; --half) {
        if (half == 0) __syncthreads();
        if (share / (kShares / 2) != half) continue;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const int tile = first + j * kAcross;
          if (tile >= tiles) break;
          float4 sum = make_float4(sums[j][0][0] + sums[j][1][0], sums[j][0][1] + sums[j][1][1],
                                   sums[j][0][2] + sums[j][1][2], sums[j][0][3] + sums[j][1][3]);
          if (half == 0) {
            const float4 other = to[tile * 32];
            sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
          }
          to[tile * 32] = sum;
        }
      }
    }
    __syncthreads();
  }
  /// A product's outputs column..column + 3 of a row.
  template <int kShares>
  __device__ void product(int outputs, int row, int column, float (&to)[kGroup]) const {
#pragma unroll
    for (float& value : to) value = 0.0F;
#pragma unroll
    for (int share = 0; share < kShares / 2; ++share) {
      const auto* from = at<float2>(p_.plan.work) + (share * outputs / kTileOutputs + column / kTileOutputs) * 64;
      const int first = (row % 8 * 4 + column % kTileOutputs / 2) * 2 + row / 8;
      to[0] += from[first].x, to[1] += from[first].y;
      to[2] += from[first + 2].x, to[3] += from[first + 2].y;
    }
  }

  // --- Stages --------------------------------------------------------------------------------------------------------

  /// Returns the team's next tile, for which all that does not depend on other teams is done.
  __device__ Task finish_tile(const Task& task) {
    const Piece& piece = task.piece;
    float y[kGroup];
    residual(y);
    float2 made[kLanePairs] = {};
    if (owns_head_) {
      if (task.fresh) attend_made(piece, made);
      share_attended();
      if (task.fresh) store_made(piece, made);
    }
    // While the others' rows are on their way.
    const Task after = next(piece.number, task.tile + p_.teams);
    fetch(after);
    blank(count_ + kPlaces - 2);
    this->template receive<3>(p_.places.attended, p_.plan.hidden, 2 * dim());
    if (owns_head_ && task.fresh) hold_made(piece);
    multiply<4>(0, share(), p_.plan.hidden, 2 * dim());
    add_product(memory_bias_, y);
    if (owns_row()) give(mixed_place(), y);
    normalise();
    multiply<2>(p_.plan.ffn_in, ffn_share(), p_.plan.normed, 2 * dim());
    share_hidden();
    __syncthreads();
    if (owns_head_) attend_kept(after);
    ptx::fence();
    this->template receive<6>(p_.places.hidden, p_.plan.hidden, 2 * ffn());
    multiply<4>(p_.plan.ffn_out, share(), p_.plan.hidden, 2 * ffn());
    add_product(ffn_bias_, y);
    publish_sums(piece, task.tile, task.rows, y);
    if (row_ < task.rows) {
      float* x = op_.x.at(sequence_, 0, piece.first + task.tile * kRows + row_) + channel_;
      __stcg(reinterpret_cast<float4*>(x), make_float4(y[0], y[1], y[2], y[3]));
    }
    ++count_;
    return after;
  }

  /// y = x + h + 0.1 v.
  __device__ void residual(float (&y)[kGroup]) const {
    const float4 x = fetched_.x;
    const float4 h = fetched_.h;
    const float4 v = widened(fetched_.v);
    y[0] = residual_sum(x.x, h.x, v.x), y[1] = residual_sum(x.y, h.y, v.y);
    y[2] = residual_sum(x.z, h.z, v.z), y[3] = residual_sum(x.w, h.w, v.w);
  }

  __device__ void add_product(const float (&bias)[kGroup], float (&y)[kGroup]) const {
    if (!owns_row()) return;
    float sum[kGroup];
    product<4>(share(), row_, channel_ - rank_ * share(), sum);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) y[i] += sum[i] + bias[i];
  }

  /// rmsnorm of the tile's rows, 16 threads a row.
  __device__ void normalise() const {
    constexpr int kThreadsOfRow = kThreads / kRows;
    constexpr int kVectors = kDim / kGroup / kThreadsOfRow;
    const int row = thread() / kThreadsOfRow;
    const int first = thread() % kThreadsOfRow;
    const int vectors = dim() / kGroup;
    const auto* from = reinterpret_cast<const uint4*>(place_of(count_) + p_.places.mixed) + row * vectors + first;
    uint4 words[kVectors];
    await_vectors(from, kThreadsOfRow, vectors / kThreadsOfRow, words);
    float4 y[kVectors];
    double of_channels[kGroup] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      y[i] = make_float4(__uint_as_float(words[i].x), __uint_as_float(words[i].y), __uint_as_float(words[i].z),
                         __uint_as_float(words[i].w));
      const auto add = [](double& sum, float v) { sum = fma(static_cast<double>(v), static_cast<double>(v), sum); };
      add(of_channels[0], y[i].x), add(of_channels[1], y[i].y);
      add(of_channels[2], y[i].z), add(of_channels[3], y[i].w);
    }
    const double squares = (of_channels[0] + of_channels[1]) + (of_channels[2] + of_channels[3]);
    const float inverse = norm_factor(warp_sum<kThreadsOfRow>(squares) * (1.0 / static_cast<double>(dim())));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = first + i * kThreadsOfRow;
      if (vector >= vectors) break;
      const float4 scale = *(at<float4>(p_.plan.norm) + vector);
      const float u[kGroup] = {y[i].x * inverse * scale.x, y[i].y * inverse * scale.y, y[i].z * inverse * scale.z,
                               y[i].w * inverse * scale.w};
      *at<uint2>(p_.plan.normed + place(row, 2 * dim(), 2 * vector * kGroup)) = rounded(u);
    }
    __syncthreads();
  }

  __device__ void share_hidden() const {
    for_each_hidden([&](int row, int vector) {
      const float4 bias = *(at<float4>(p_.plan.bias) + vector);
      float sum[kGroup];
      product<2>(ffn_share(), row, vector * kGroup, sum);
      const float v[kGroup] = {gelu(sum[0] + bias.x), gelu(sum[1] + bias.y), gelu(sum[2] + bias.z),
                               gelu(sum[3] + bias.w)};
      give(hidden_place(row, vector), rounded(v));
    });
  }

  float memory_bias_[kGroup], ffn_bias_[kGroup];
};

}  // namespace mmrec::kernels::segments
