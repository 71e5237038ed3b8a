// A block of finish_segments (finish_segments.cu): the weights that it keeps, the products with them, and the stages of
// a tile of rows.
#pragma once

#include <cmath>

#include "kernels/cuda/recurrence/equations.cuh"
#include "models/mmrec/cuda/segments/attention.cuh"

namespace mmrec::kernels::segments {

template <class A, bool kKnown>
class Block {
  using Context = BlockTasks<A, kKnown>;
  using Piece = typename Context::Piece;
  using Task = typename Context::Task;
  using Attention = BlockAttention<A, kKnown>;

 public:
  __device__ explicit Block(Context& context) : c_(context), exchange_(context), attention_(context) {}

  __device__ void run() {
    keep_weights(c_.op.memory_out, c_.share(), 0);
    keep_weights(c_.op.ffn_in, c_.ffn_share(), c_.p.plan.ffn_in);
    keep_weights(c_.op.ffn_out, c_.share(), c_.p.plan.ffn_out);
    keep(c_.op.norm, c_.dim(), c_.p.plan.norm);
    keep(c_.op.ffn_in_bias == nullptr ? nullptr : c_.op.ffn_in_bias + c_.rank * c_.ffn_share(), c_.ffn_share(),
         c_.p.plan.bias);
    if (c_.owns_head) attention_.load_slots();
    load4(c_.op.memory_out_bias, memory_bias_);
    load4(c_.op.ffn_out_bias, ffn_bias_);
    Task task = c_.next(-1, c_.p.tiles);
    c_.fetch(task);
    for (int place = 0; place < kPlaces; ++place) exchange_.blank(place);
    if (c_.owns_head) attention_.attend_kept(task);
    exchange_.meet();
    while (task.piece.number < c_.p.pieces) task = finish_tile(task);
    if (c_.index == 0) exchange_.close();
    exchange_.leave();
  }

 private:
  /// D, at most.
  static constexpr int kDim = kKnown ? kKnownSizes.dim : kMostDim;

  // --- Weights -------------------------------------------------------------------------------------------------------

  __device__ void keep_weights(const WeightView<Device>& weight, int rows, int offset) {
    const auto pieces = static_cast<int>(weight.cols) * 2 / 16;  // of a row
    const auto* from = static_cast<const uint4*>(weight.data) + std::int64_t{c_.rank} * rows * pieces;
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
    const float4 v = from != nullptr && c_.owns_row() ? __ldg(reinterpret_cast<const float4*>(from + c_.own_channel))
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
      auto* to = at<float4>(c_.p.plan.work) + share % (kShares / 2) * tiles * 32 + lane();
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
      const auto* from = at<float2>(c_.p.plan.work) + (share * outputs / kTileOutputs + column / kTileOutputs) * 64;
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
    float2 made[Attention::kLanePairs] = {};
    if (c_.owns_head) {
      if (task.fresh) attention_.attend_made(piece, made);
      attention_.share_attended();
      if (task.fresh) attention_.store_made(piece, made);
    }
    // While the others' rows are on their way.
    const Task after = c_.next(piece.number, task.tile + c_.p.teams);
    c_.fetch(after);
    exchange_.blank(c_.count + kPlaces - 2);
    exchange_.template receive<3>(c_.p.places.attended, c_.p.plan.hidden, 2 * c_.dim());
    if (c_.owns_head && task.fresh) attention_.hold_made(piece);
    multiply<4>(0, c_.share(), c_.p.plan.hidden, 2 * c_.dim());
    add_product(memory_bias_, y);
    if (c_.owns_row()) exchange_.give(exchange_.mixed_place(), y);
    normalise();
    multiply<2>(c_.p.plan.ffn_in, c_.ffn_share(), c_.p.plan.normed, 2 * c_.dim());
    share_hidden();
    __syncthreads();
    if (c_.owns_head) attention_.attend_kept(after);
    ptx::fence();
    exchange_.template receive<6>(c_.p.places.hidden, c_.p.plan.hidden, 2 * c_.ffn());
    multiply<4>(c_.p.plan.ffn_out, c_.share(), c_.p.plan.hidden, 2 * c_.ffn());
    add_product(ffn_bias_, y);
    exchange_.publish_sums(piece, task.tile, task.rows, y);
    if (c_.own_row < task.rows) {
      float* x = c_.op.x.at(c_.sequence, 0, piece.first + task.tile * kRows + c_.own_row) + c_.own_channel;
      __stcg(reinterpret_cast<float4*>(x), make_float4(y[0], y[1], y[2], y[3]));
    }
    ++c_.count;
    return after;
  }

  /// y = x + h + 0.1 v.
  __device__ void residual(float (&y)[kGroup]) const {
    const float4 x = c_.fetched.x;
    const float4 h = c_.fetched.h;
    const float4 v = c_.widened(c_.fetched.v);
    y[0] = residual_sum(x.x, h.x, v.x), y[1] = residual_sum(x.y, h.y, v.y);
    y[2] = residual_sum(x.z, h.z, v.z), y[3] = residual_sum(x.w, h.w, v.w);
  }

  __device__ void add_product(const float (&bias)[kGroup], float (&y)[kGroup]) const {
    if (!c_.owns_row()) return;
    float sum[kGroup];
    product<4>(c_.share(), c_.own_row, c_.own_channel - c_.rank * c_.share(), sum);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) y[i] += sum[i] + bias[i];
  }

  /// rmsnorm of the tile's rows, 16 threads a row.
  __device__ void normalise() const {
    constexpr int kThreadsOfRow = kThreads / kRows;
    constexpr int kVectors = kDim / kGroup / kThreadsOfRow;
    const int row = thread() / kThreadsOfRow;
    const int first = thread() % kThreadsOfRow;
    const int vectors = c_.dim() / kGroup;
    const auto* from =
        reinterpret_cast<const uint4*>(exchange_.place_of(c_.count) + c_.p.places.mixed) + row * vectors + first;
    uint4 words[kVectors];
    exchange_.await_vectors(from, kThreadsOfRow, vectors / kThreadsOfRow, words);
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
    const float inverse = norm_factor(warp_sum<kThreadsOfRow>(squares) * (1.0 / static_cast<double>(c_.dim())));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = first + i * kThreadsOfRow;
      if (vector >= vectors) break;
      const float4 scale = *(at<float4>(c_.p.plan.norm) + vector);
      const float u[kGroup] = {y[i].x * inverse * scale.x, y[i].y * inverse * scale.y, y[i].z * inverse * scale.z,
                               y[i].w * inverse * scale.w};
      *at<uint2>(c_.p.plan.normed + place(row, 2 * c_.dim(), 2 * vector * kGroup)) = c_.rounded(u);
    }
    __syncthreads();
  }

  __device__ void share_hidden() const {
    c_.for_each_hidden([&](int row, int vector) {
      const float4 bias = *(at<float4>(c_.p.plan.bias) + vector);
      float sum[kGroup];
      product<2>(c_.ffn_share(), row, vector * kGroup, sum);
      const float v[kGroup] = {gelu(sum[0] + bias.x), gelu(sum[1] + bias.y), gelu(sum[2] + bias.z),
                               gelu(sum[3] + bias.w)};
      exchange_.give(exchange_.hidden_place(row, vector), c_.rounded(v));
    });
  }

  Context& c_;
  BlockExchange<A, kKnown> exchange_;
  Attention attention_;
  float memory_bias_[kGroup], ffn_bias_[kGroup];
};

}  // namespace mmrec::kernels::segments
