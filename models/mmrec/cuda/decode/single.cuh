// The multiplying warps of a decode step of one sequence: the stages of step.cu, from inputs to epilogues.
//
// There is little to multiply, so a stage takes as long as its chain of dependent instructions. Everything that does
// not need the input comes before the wait for it: the epilogue's reads of memory, addresses, and the first two slots
// of weights, which are in registers when the input comes. Every stage has code of its own, which knows its shape. A
// warp reads only the steps of the input that it multiplies. So warps meet once per stage, before their sums are added
// up. The sums of two consecutive stages lie in different memory.
//
// Of a quantised model compact rows (kernels/cuda/gemm/compact.h) are multiplied as they are: the vector is rounded to
// integers of 16 bits with scales (l2_inputs.cuh), and its upper and lower bytes are columns of their own in a product
// of integers, which is exact.
#pragma once

#include "models/mmrec/cuda/decode/attention.cuh"
#include "models/mmrec/cuda/decode/compact_product.cuh"
#include "models/mmrec/cuda/decode/l2_inputs.cuh"
#include "models/mmrec/cuda/decode/stream.cuh"

namespace mmrec::kernels {

/// How a warp multiplies: its steps of a slot's 8 rows come into registers, often before the vector is there, and are
/// multiplied with it by the tensor core.
template <class A, bool kCompact>
class SingleProduct {
  static_assert(sizeof(A) == 2);

 public:
  static constexpr int kSteps = kSlotRowBytes[0] / kStepBytes / kTileWarps;  // of a warp in a slot at most

  __device__ __forceinline__ SingleProduct(const DecodeContext<A>& context, L2Ring ring)
      : c_(context), ring_(ring), sums_(reinterpret_cast<float*>(context.shared + context.p.plan.sums)) {}

  /// Sums of one stage or pass and of the next have memory of their own.
  __device__ __forceinline__ void turn() { turn_ ^= 1; }
  __device__ __forceinline__ float sum(int row) const { return total(sums(), row, 0, 1); }

  /// A warp's steps of one slot: lane 4g + t has the t-th piece of row g. In compact rows a step is a group.
  struct Weights {
    uint4 steps[kSteps] = {};
    float scales[kCompact ? kSteps : 1] = {};
    int slot = 0;  // its number
  };
  /// Loads the warp's steps of the ring's next slot, which has `rows` rows of `steps` steps.
  __device__ __forceinline__ void take(Weights& w, const ProductShape& shape, int rows, int steps) {
    // Rows that the tile lacks repeat its last one. Their sums are not used.
    const int row =
        min(c_.lane >> 2, rows - 1) * (kCompact ? shape.slot_pitch : c_.p.plan.slot_row_bytes + kRowPadding);
    const bool is_half = kCompact && shape.format.code == DType::kI4;
    ring_.wait_full();
    const std::byte* slot = ring_.slot() + row;
    const std::byte* const numbers = slot + (c_.lane & 3) * (is_half ? kPieceBytes / 2 : kPieceBytes);
    const std::byte* const scales = slot + steps * (is_half ? kStepBytes / 2 : kStepBytes);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {  // repeats the last step where the warp has fewer
      const int step = min(c_.warp + i * kTileWarps, steps - 1);
      if (is_half) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(numbers + step * (kStepBytes / 2));
        w.steps[i] = make_uint4(pairs.x, pairs.y, 0, 0);
      } else {
        w.steps[i] = *reinterpret_cast<const uint4*>(numbers + step * kStepBytes);
      }
      if (kCompact && (i == 0 || shape.format.group != 0)) {
        w.scales[i] = reinterpret_cast<const float*>(scales)[shape.format.group == 0 ? 0 : step];
      }
    }
    if (is_half) {
#pragma unroll
      for (uint4& step : w.steps) step = widen_halves(step);
    }
    w.slot = ring_.number();
    ring_.advance();
  }
  /// Releases the slots of what take() has loaded, where has(part, tile). (A slot number of -1 for the others would not
  /// do: nvcc 13.0 initialises an array of two parts with 0.)
  template <int kParts, int kTiles, class Has>
  __device__ __forceinline__ void release(const Weights (&held)[kParts][kTiles], Has has) const {
    std::uint32_t loaded = 0;
#pragma unroll
    for (const auto& part : held) {
#pragma unroll
      for (const Weights& w : part) {
#pragma unroll
        for (const uint4& step : w.steps) loaded |= step.x;
        if constexpr (kCompact) {
#pragma unroll
          for (const float scale : w.scales) loaded |= __float_as_uint(scale);
        }
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (has(part, t)) ring_.release(held[part][t].slot, loaded);
      }
    }
  }
  /// sums[t] += the steps of tile t; x: the vectors from there on. The tensor core's 16 rows are a tile's 8
  /// rows' even and odd words, and of a vector's two columns one has its even words and one its odd ones, so that
  /// operands are multiplied as they lie and both chains of a sum (tile_product.cuh) come out of one instruction.
  /// between(i) is called after the i-th step, for independent work.
  template <int kTiles, class Between>
  __device__ __forceinline__ void multiply(TileSums (&sums)[kTiles], const Weights (&w)[kTiles], int tiles, int steps,
                                           const std::byte* x, int pitch, int vectors, Between between) const {
    const int piece = (c_.lane & 3) * kPieceBytes;
    x += ((c_.lane >> 3) & (vectors - 1)) * pitch + piece + ((c_.lane >> 2) & 1) * 4;
    std::uint32_t v[kSteps][2];
    const auto read = [&](int i) {
      const auto* words = reinterpret_cast<const std::uint32_t*>(x + (c_.warp + i * kTileWarps) * kStepBytes);
      v[i][0] = words[0];
      v[i][1] = words[2];
    };
    const auto multiply_step = [&](int i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 row = w[t].steps[i];
        if (t < tiles) ptx::mma_m16n8k16<A>(sums[t].chains[0], {row.x, row.y, row.z, row.w}, {v[i][0], v[i][1]});
      }
    };
    if (c_.warp + (kSteps - 1) * kTileWarps < steps) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) read(i);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        multiply_step(i);
        between(i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (c_.warp + i * kTileWarps < steps) {
          read(i);
          multiply_step(i);
        }
        between(i);
      }
    }
  }
  /// The same of compact rows, with a scale for each group or for all. The tensor core's 16 rows are those of one tile
  /// and of the next. A vector has two columns, of its upper and of its lower bytes.
  template <bool kByGroups, int kTiles, class Between>
  __device__ __forceinline__ void multiply_groups(TileSums (&sums)[kTiles], const Weights (&w)[kTiles], int groups,
                                                  const std::byte* x, const float* x_scales, int pitch, int vectors,
                                                  Between between) const {
    const int column = c_.lane >> 2;
    x += ((column >> 1) & (vectors - 1)) * pitch + (column & 1) * kStepBytes + (c_.lane & 3) * kPieceBytes;
    const int scale_at = (c_.lane & (vectors - 1)) * (pitch / kStepBytes) + 2 * c_.warp;  // of all the warp's groups
    const float x_scale = c_.warp < groups ? x_scales[scale_at] : 0.0F;
    int d[4] = {};
    const auto add = [&](int i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        add_scaled(sums[t].chains[0][0], d[2 * t], d[2 * t + 1], x_scale * w[t].scales[i]);
      }
    };
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int group = c_.warp + i * kTileWarps;
      if (group < groups) {
        if constexpr (kByGroups) d[0] = d[1] = d[2] = d[3] = 0;
        const uint4 low = w[0].steps[i];
        const uint4 high = kTiles == 1 ? make_uint4(0, 0, 0, 0) : w[kTiles - 1].steps[i];
        multiply_group(d, low, high, *reinterpret_cast<const uint4*>(x + 2 * group * kStepBytes));
        if constexpr (kByGroups) add(i);
      }
      between(i);
    }
    if constexpr (!kByGroups) add(0);
  }
  /// Stores the warp's sums of a tile. Rows from `split` on take the products with the second vector.
  template <bool kPair>
  __device__ __forceinline__ void store_tile(const TileSums& tile, int first, int split) const {
    const int row = first + (c_.lane >> 2);
    const bool is_second = kPair && row >= split;
    if ((c_.lane & 3) == static_cast<int>(is_second)) {
      sums()[row * kTileWarps + c_.warp] = tile.chains[0][0] + tile.chains[0][3];
    }
  }

 private:
  __device__ __forceinline__ float* sums() const { return sums_ + turn_ * c_.p.plan.sums_rows * kTileWarps; }

  const DecodeContext<A>& c_;
  L2Ring ring_;
  float* sums_;
  int turn_ = 0;
};

/// kCompact: of compact matrices.
template <class A, bool kCompact = false>
class SingleBlock {
  using Context = DecodeContext<A>;
  using Weights = typename SingleProduct<A, kCompact>::Weights;

 public:
  static constexpr bool kIsCluster = false;
  static constexpr bool kIsCompact = kCompact;
  using Ring = L2Ring;
  using Stream = WarpStream;

  __device__ __forceinline__ SingleBlock(DecodeContext<A>& context, Ring ring, std::uint32_t turn)
      : c_(context), l2_(context, turn), inputs_(context), product_(context, ring) {}

  __device__ __forceinline__ void run() {
    const auto layers = static_cast<int>(c_.p.op.shape.layers);
    inputs_.ask_state(0);
    l2_.clear_other_set();
    l2_.embed();
#pragma unroll 1
    for (int layer = 0; layer < layers; ++layer) {
      run_stage<Stage::kGate>(layer);
      run_stage<Stage::kHide>(layer);
      run_stage<Stage::kProject>(layer);
      run_stage<Stage::kAdvance>(layer);
      if (c_.p.op.slots > 1) {
        run_stage<Stage::kQuery>(layer);
        attend_heads(c_, l2_, layer, reinterpret_cast<float*>(inputs_.operand()));
        run_stage<Stage::kRecall>(layer);
      }
      run_stage<Stage::kWiden>(layer);
      if (layer + 1 < layers) inputs_.ask_state(layer + 1);
      run_stage<Stage::kNarrow>(layer);
    }
    if (c_.predicts()) {
      run_stage<Stage::kPredict>(layers);
    } else {
      l2_.store_output();
    }
  }

 private:
  static constexpr int kHeldSlots = kMostTiles;
  static_assert(kHeldSlots <= kLeastSlots);

  template <Stage kStage>
  __device__ __forceinline__ void run_stage(int layer) {
    constexpr int kTiles = tiles_at_once(stage_info(kStage).first);
    constexpr int kSteps = SingleProduct<A, kCompact>::kSteps;
    constexpr int kParts = kHeldSlots / kTiles;  // of k, at once
    const int vectors = is_pair(kStage) ? c_.networks() : 1;
    // Of k, in bytes of the vector: what is in a step, in a slot.
    constexpr int kStep = kCompact ? kCompactGroup * int{sizeof(A)} : kStepBytes;
    const int slot_bytes = kCompact ? kCompactChunkGroups * kStep : c_.p.plan.slot_row_bytes;
    const int all = c_.template rows<kStage>();
    if (all == 0) return;
    c_.forget_lane();
    // Rows that are multiplied by the first of two vectors; the others are by the second.
    const int split = c_.channels.count;
    const ProductShape& shape = c_.template shape_of<kStage>();
    const int pitch = padded_row(shape.input_bytes);
    const int pass = has_passes(kStage) ? c_.p.plan.sums_rows : all;
    // A block without hidden units has not been in the stage before.
    const bool reads = !stage_info(kStage).keeps_input() || c_.template rows<Stage::kHide>() == 0;
#pragma unroll 1
    for (int first = 0; first < all; first += pass) {
      const int count = min(pass, all - first);
      L2Output out = {};
#pragma unroll 1
      for (int row = 0; row < count; row += kTiles * kSingleRows) {
        const int tiles = min(kTiles, (count - row + kSingleRows - 1) / kSingleRows);
        TileSums sums[kTiles];
#pragma unroll 1
        for (int k = 0; k < shape.input_bytes; k += kParts * slot_bytes) {
          Weights held[kParts][kTiles];
          const auto steps = [&](int part) {
            return static_cast<int>(static_cast<unsigned>(min(slot_bytes, shape.input_bytes - k - part * slot_bytes)) /
                                    kStep);
          };
          const auto has_part = [&](int part) { return part == 0 || k + part * slot_bytes < shape.input_bytes; };
          const auto has = [&](int part, int t) { return has_part(part) && (t == 0 || t < tiles); };
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
              if (has(part, t))
                product_.take(held[part][t], shape, min(kSingleRows, count - row - t * kSingleRows), steps(part));
            }
          }
          const bool begins = first + row + k == 0;
          if (row + k == 0) out = l2_.template output<kStage>(layer, c_.thread(), first, count);
          product_.release(held, has);  // before the wait for the input
          if (begins && reads) inputs_.template read<is_pair(kStage)>(l2_, stage_info(kStage), layer);
          // Squares are summed up over the warp between the steps of the product.
          constexpr bool kSumsSquares = Context::kScalesSums && is_normalised(kStage);
          static_assert(!kSumsSquares || (kParts == 1 && kSteps == 4));
          float squares = inputs_.squares_of_lane();
          if constexpr (kSumsSquares) squares += __shfl_xor_sync(0xffffffffU, squares, 16);
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if (!has_part(part)) break;
            const std::byte* const x = inputs_.operand() + k + part * slot_bytes;
            const auto between = [&](int i) {
              if constexpr (kSumsSquares) squares += __shfl_xor_sync(0xffffffffU, squares, 8 >> i);
            };
            if constexpr (kCompact) {
              const auto multiply = [&]<bool kByGroups>() {
                product_.template multiply_groups<kByGroups>(sums, held[part], steps(part), x, inputs_.scales_at(x),
                                                             pitch, vectors, between);
              };
              if (shape.format.group != 0) {
                multiply.template operator()<true>();
              } else {
                multiply.template operator()<false>();
              }
            } else {
              product_.multiply(sums, held[part], tiles, steps(part), x, pitch, vectors, between);
            }
          }
          if (kSumsSquares && begins && reads && c_.lane == 0) inputs_.norm_sums(0)[c_.warp] = squares;
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if (t < tiles) product_.template store_tile<is_pair(kStage)>(sums[t], row + t * kSingleRows, split);
        }
      }
      barrier();
      const auto finish = [&](const L2Output& of) {
        if (!of.exists) return;
        l2_.template finish<kStage>(layer, of, inputs_.norm_sums(0), [&](int row) { return product_.sum(row); });
      };
      finish(out);
      const int last = l2_.template outputs<kStage>(count);
#pragma unroll 1
      for (int i = c_.thread() + kConsumers; i < last; i += kConsumers) {
        finish(l2_.template output<kStage>(layer, i, first, count));
      }
      product_.turn();
    }
    if (is_normalised(kStage) && kStage != Stage::kHide) inputs_.turn();
  }

  Context& c_;
  ThroughL2<A, true> l2_;
  L2Inputs<A, true, kCompact> inputs_;
  SingleProduct<A, kCompact> product_;
};

}  // namespace mmrec::kernels
