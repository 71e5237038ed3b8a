// The exchange among the blocks of a cluster (cluster.cuh): what a block sends of a vector, where it lies in the
// others, and who waits for it.
//
// An exchange is a store from registers into the other blocks' shared memory, which counts its bytes at a barrier there
// (st.async); who waits for that barrier reads the vector where it is, in the tensor core's order. A vector that a
// stage normalises is sent as the stage wants it, multiplied by the norm's weights and rounded, with the sums of
// squares of every four channels; so all add them up in one order.
//
// A vector's place and barrier are used once per layer, and use n + 1 cannot meet use n:
// - A block sends its part of a vector after the barrier that follows its warps' last reading of the vector before.
// - All blocks own channels. So each sends a part of `mixed` and of `output` in every layer, and waits for all parts.
// - Whoever sends a part of any vector P again has thus since P's last use waited for all of `mixed` or of `output`,
//   which every block has sent after it read P. So nobody writes to what is still read, bytes of use n + 1 find their
//   barrier in phase n + 1, and nobody waits for a parity that has passed twice.
// - h of a layer is read by all blocks before they send z, and written by its owners after they got hidden units, which
//   follow from all of z.
// - What is sent to a block it waits for: it may exit without regard to others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "models/mmrec/cuda/decode/cluster_plan.cuh"
#include "models/mmrec/cuda/decode/context.cuh"

namespace mmrec::kernels {

template <class A>
class ClusterExchange {
  static_assert(sizeof(A) == 2 && DecodeContext<A>::kScalesSums);
  static constexpr int kVector = DecodeContext<A>::kVector;

 public:
  /// Barriers, and squares of no channels. By all warps, before a barrier of the cluster.
  __device__ static void init(const DecodePlan& plan, std::byte* shared) {
    auto* points = reinterpret_cast<std::uint64_t*>(shared + plan.points);
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      for (int i = 0; i < kCountOf<Point>; ++i) ptx::mbarrier_init(points + i, 1);
    }
    const int missing = plan.products[Product::kQvzk].row_bytes / int{sizeof(A)} / kVector + thread;
    if (missing >= kSquares) return;
    squares_at(plan, shared, Point::kMixed)[missing] = 0.0F;
    squares_at(plan, shared, Point::kOutput)[missing] = 0.0F;
  }

  __device__ __forceinline__ explicit ClusterExchange(const DecodeContext<A>& context)
      : c_(context),
        there_(ptx::place_in_cluster(context.shared, static_cast<unsigned>(context.lane % kClusterBlocks))) {}

  // --- Places and arrivals -------------------------------------------------------------------------------------------

  __device__ __forceinline__ std::byte* vector(Point point) const { return c_.shared + c_.p.plan.at[point]; }
  __device__ static float* squares_at(const DecodePlan& plan, std::byte* shared, Point point) {
    const int row_bytes = plan.products[Product::kQvzk].row_bytes;
    return reinterpret_cast<float*>(shared + plan.at[point] + row_bytes);
  }
  __device__ __forceinline__ std::uint64_t* arrival(Point point) const {
    return reinterpret_cast<std::uint64_t*>(c_.shared + c_.p.plan.points) + static_cast<int>(point);
  }
  /// Announces the vector's next use. By one thread, after this one has been waited for.
  __device__ __forceinline__ void expect(Point point) const {
    ptx::mbarrier_arrive_expect(arrival(point), static_cast<unsigned>(c_.p.plan.point_bytes[point]));
  }
  __device__ __forceinline__ void await(Point point, int use) const {
    ptx::mbarrier_wait(arrival(point), static_cast<std::uint32_t>(use & 1));
  }
  /// Where channel or unit `first` of a vector lies, as bytes from the begin of shared memory.
  __device__ __forceinline__ int place_of(Point point, int first) const {
    return static_cast<int>(c_.p.plan.at[point]) + first * int{sizeof(A)};
  }
  /// Sends a part of a vector to its place in a block; or in the block that is the lane's.
  template <class V>
  __device__ __forceinline__ void send(Point point, int place, V value) const {
    send(there_, point, place, value);
  }
  template <class V>
  __device__ __forceinline__ void send(ptx::ClusterPlace block, Point point, int place, V value) const {
    ptx::store_async(block + place, value,
                     block + (c_.p.plan.points + static_cast<int>(point) * int{sizeof(std::uint64_t)}));
  }
  /// Lanes 0 to 15 send a piece; lanes 16 to 31 another one, or what belongs to it.
  __device__ __forceinline__ bool sends_first() const { return c_.lane < kClusterBlocks; }

  // --- Pieces --------------------------------------------------------------------------------------------------------

  /// The lane's value and the next lane's, rounded to A.
  __device__ __forceinline__ static std::uint32_t round_pair(float x) {
    return ptx::to_pair<A>(x, __shfl_down_sync(0xffffffffU, x, 1));
  }
  __device__ __forceinline__ static float rounded(std::uint32_t pair) {
    return widen(A{static_cast<std::uint16_t>(pair)});
  }
  /// The values of lanes first .. first + 7 side by side.
  __device__ __forceinline__ static uint4 piece(std::uint32_t pair, int first) {
    uint4 words;
    words.x = __shfl_sync(0xffffffffU, pair, first);
    words.y = __shfl_sync(0xffffffffU, pair, first + 2);
    words.z = __shfl_sync(0xffffffffU, pair, first + 4);
    words.w = __shfl_sync(0xffffffffU, pair, first + 6);
    return words;
  }

  // --- Vectors to be normalised --------------------------------------------------------------------------------------

  /// Of the warp's unit.
  struct NormWeights {
    float4 low, high;
  };
  __device__ __forceinline__ NormWeights ask_norm(const float* weight) const {
    const int first = (c_.channels.first + c_.warp * kUnit) / kVector;
    return {c_.norm_weight(weight, first), c_.norm_weight(weight, first + 1)};
  }
  __device__ __forceinline__ int normalised_place(Point point) const {
    const int channel = c_.channels.first + c_.warp * kUnit;
    return sends_first() ? place_of(point, channel) : place_of(point, c_.dim) + channel / kVector * int{sizeof(float)};
  }
  /// weights ⊙ the unit's x, lane r's for channel r, and its squares, to all blocks.
  __device__ __forceinline__ void send_normalised(Point point, int place, float x, const NormWeights& w) const {
    float all[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) all[i] = __shfl_sync(0xffffffffU, x, i);
    if (sends_first()) {
      send(point, place,
           make_uint4(ptx::to_pair<A>(w.low.x * all[0], w.low.y * all[1]),
                      ptx::to_pair<A>(w.low.z * all[2], w.low.w * all[3]),
                      ptx::to_pair<A>(w.high.x * all[4], w.high.y * all[5]),
                      ptx::to_pair<A>(w.high.z * all[6], w.high.w * all[7])));
    } else {
      const float low = squares(make_float4(all[0], all[1], all[2], all[3]));
      const float high = squares(make_float4(all[4], all[5], all[6], all[7]));
      send(point, place, make_uint2(__float_as_uint(low), __float_as_uint(high)));
    }
  }
  /// The sum of a vector's squares as single.cuh has it, in which warp w adds up the vectors of its steps: by
  /// every warp for itself, stage by stage between the products, which do not wait for it.
  struct SquareSum {
    float low, high;  // of warps lane / 8 and lane / 8 + 4
    int stages = 0;   // that are done
    __device__ __forceinline__ void add() {
      constexpr int kMasks[] = {4, 2, 1, 8, 16};
      low += __shfl_xor_sync(0xffffffffU, low, kMasks[stages]);
      high += __shfl_xor_sync(0xffffffffU, high, kMasks[stages]);
      ++stages;
    }
    __device__ __forceinline__ bool is_done() const { return stages == 5; }
    __device__ __forceinline__ float value() const { return low + high; }
  };
  __device__ __forceinline__ SquareSum squares_of(Point point) const {
    static_assert(kClusterSteps == 2 && DecodeContext<A>::kStepVectors == 8);
    const float* of_vectors = squares_at(c_.p.plan, c_.shared, point) + c_.lane;
    return {of_vectors[0] + of_vectors[64], of_vectors[32] + of_vectors[96]};
  }

 private:
  const DecodeContext<A>& c_;
  ptx::ClusterPlace there_;  // block lane % 16's shared memory
};

}  // namespace mmrec::kernels
