// The multiplying warps of one block of a decode step: the stages of decode_step.cu, from inputs to epilogues.
//
// Every stage goes the same way. Ask memory for what the epilogue needs; read the input from the exchange into the
// operand buffer; multiply, each warp its share of k; add up the warps' sums and write the outputs. A warp reads into
// the buffer just the steps that it multiplies, so warps meet once per stage, before the sums are added up, and once
// more where the input is normalised.
//
// What a stage costs beyond its trip through L2 is a chain of dependent instructions, each executed once. So stages run
// through the same instructions where they can, whatever depends on the shape is worked out before, and a single
// sequence has a kernel of its own.
#pragma once

#include <cmath>

#include "kernels/cuda/decode_stream.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/exchange.cuh"

namespace mmrec::kernels {

inline constexpr int kConsumers = 32 * kTileWarps;

template <class A, bool kSingle>
class DecodeBlock {
 public:
  __device__ DecodeBlock(const DecodeParams<A>& p, std::byte* shared, Ring ring)
      : p_(p),
        layers_(reinterpret_cast<const LayerShare*>(shared + p.plan.layers)),
        segments_(reinterpret_cast<const Segment*>(shared + p.plan.segments)),
        stages_(reinterpret_cast<const StageShare*>(shared + p.plan.stage_shares)),
        ring_(ring),
        channels_(p.plan.splits[static_cast<int>(Owned::kChannels)].mine()),
        dim_(static_cast<int>(p.op.shape.dim)),
        warp_(__shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32, 0)),  // known to be one value
        operand_(shared + p.plan.operand),
        sums_(reinterpret_cast<float*>(shared + p.plan.sums)),
        norm_sums_(reinterpret_cast<float*>(shared + p.plan.norm_sums)),
        local_(reinterpret_cast<float*>(shared + p.plan.local)),
        header_(static_cast<std::uint32_t*>(p.op.exchange)),
        turn_(__ldcg(header_)),
        set_(static_cast<std::byte*>(p.op.exchange) + DecodePlan::kHeaderBytes + turn_ * p.plan.set_bytes) {}

  __device__ void run() {
    ask_state(0);
    clear_other_set();
    embed();
    release_sums();
    const auto layers = static_cast<int>(p_.op.shape.layers);
    int layer = 0;
    auto stage = Stage::kGate;
#pragma unroll 1
    while (true) {
      run_stage(layer, stage);
      if (stage == Stage::kPredict) break;
      const bool skips_attention = stage == Stage::kAdvance && p_.op.slots < 2;
      stage = skips_attention ? Stage::kWiden : static_cast<Stage>(static_cast<int>(stage) + 1);
      if (stage == Stage::kPredict && ++layer < layers) stage = Stage::kGate;
    }
    finish();
  }

 private:
  static constexpr int kAhead = 4;                                            // reads of a lane at once
  static constexpr int kRounds = kSingle ? 2 : 4;                             // the same of fp32 vectors
  static constexpr int kVector = 4;                                           // floats of 16 bytes
  static constexpr int kStepVectors = kStepBytes / int{sizeof(A)} / kVector;  // of fp32 that become a step
  static constexpr int kNormStep = kStepVectors * kPieceBytes;
  static constexpr int kStride = 32 * kTileWarps;  // from a lane's vector to its next one

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return thread() % 32; }
  __device__ int batch() const { return kSingle ? 1 : static_cast<int>(p_.op.shape.batch); }
  __device__ static void barrier() { ptx::named_barrier_sync(1, kConsumers); }
  /// Sums have been read; and wait until all warps' have, before new ones are written.
  __device__ static void release_sums() { ptx::named_barrier_arrive(2, 2 * kConsumers); }
  __device__ static void acquire_sums() { ptx::named_barrier_sync(2, 2 * kConsumers); }

  // --- Exchange ------------------------------------------------------------------------------------------------------

  template <class T>
  __device__ T* vectors(int layer, Point point) const {
    return reinterpret_cast<T*>(set_ + layer * p_.plan.layer_bytes + p_.plan.at[static_cast<int>(point)]);
  }

  __device__ void clear_other_set() const {
    auto* other = reinterpret_cast<uint4*>(static_cast<std::byte*>(p_.op.exchange) + DecodePlan::kHeaderBytes +
                                           (1 - turn_) * p_.plan.set_bytes);
    constexpr std::uint32_t kOnes = 0xffffffffU;
#pragma unroll 1
    for (std::int64_t i = std::int64_t{blockIdx.x} * kConsumers + thread(); i < p_.plan.set_bytes / kPieceBytes;
         i += std::int64_t{gridDim.x} * kConsumers) {
      other[i] = make_uint4(kOnes, kOnes, kOnes, kOnes);
    }
  }

  /// The last block to come here leaves the exchange as the next step wants it: the other set's turn.
  __device__ void finish() const {
    acquire_sums();
    if (thread() != 0 || ptx::add_acq_rel(header_ + 1, 1) != gridDim.x - 1) return;
    header_[0] = 1 - turn_;
    header_[1] = 0;
  }

  // --- Operands ------------------------------------------------------------------------------------------------------

  /// `rows` vectors of `bytes` bytes, `stride` elements apart, as they get written. A lane reads a piece of a step.
  __device__ Operand gather(const A* from, int rows, int stride, int bytes) const {
    const int pitch = padded_row(bytes);
    const int piece = lane() % 4 * kPieceBytes;
    const int mine = ((bytes + kStepBytes - 1) / kStepBytes - warp_ + kTileWarps - 1) / kTileWarps;  // steps
    int row = 0;
    int step = lane() / 4;  // of mine
    const auto settle = [&] {
      while (step >= mine && row < rows) {
        step -= mine;
        ++row;
      }
    };
    if (mine > 0) {
      settle();
#pragma unroll 1
      while (row < rows) {
        const A* source[kAhead];
        int to[kAhead];
        uint4 value[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int at = (step * kTileWarps + warp_) * kStepBytes + piece;
          to[i] = row * pitch + at;
          source[i] = row < rows && at < bytes ? from + row * stride + at / int{sizeof(A)} : nullptr;
          step += 32 / 4;
          settle();
        }
        await<A>(source, value);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (source[i] != nullptr) *reinterpret_cast<uint4*>(operand_ + to[i]) = value[i];
        }
      }
    }
    __syncwarp();
    return {pitch, kStepBytes};
  }

  /// A lane's vectors of a fp32 operand: number round * kStride + first_vector().
  __device__ int first_vector() const {
    return warp_ * kStepVectors + lane() / kStepVectors * kTileWarps * kStepVectors + lane() % kStepVectors;
  }
  /// Where a lane is among its vectors of all sequences.
  struct Position {
    int sequence, round;
    __device__ int vector(int first) const { return round * kStride + first; }
  };
  /// h₋₁ of the layer, for narrowed(): the first vectors of a lane.
  __device__ void ask_state(int layer) {
    Position at = {};
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      state_[i] = exists(at) ? state_vector(layer, at) : make_float4(0, 0, 0, 0);
      next(at);
    }
  }
  __device__ float4 state_vector(int layer, const Position& at) const {
    const float* h = p_.op.h + (std::int64_t{layer} * batch() + at.sequence) * dim_;
    return __ldcg(reinterpret_cast<const float4*>(h) + at.vector(first_vector()));
  }
  /// What a fp32 operand comes from.
  enum class Source : std::uint8_t { kState, kEmbedding, kExchange };
  /// Every sequence's fp32 vector, or rmsnorm of it if there is a weight. It lies in the operand buffer and is rounded
  /// in place: a step's 64 bytes of A are written over the 128 bytes, or for fp32 the 64, that they come from, by the
  /// lanes that own them.
  __device__ Operand narrowed(const float* weight, Source kind, int layer, const float* from) const {
    const int pitch = padded_row(dim_ * int{sizeof(float)});
    const int first = first_vector();
    const int vectors = dim_ / kVector;
    float4 held[kRounds];  // weights of the first rounds
#pragma unroll
    for (int i = 0; i < kRounds; ++i) held[i] = norm_weight(weight, first + i * kStride);
    float squares_sum = 0.0F;
    Position at = {};
#pragma unroll 1
    for (bool begins = true; at.sequence < batch(); begins = false) {
      const float* source[kRounds];
      Position of[kRounds];
      uint4 x[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        of[i] = at;
        source[i] = exists(at) ? from + std::int64_t{at.sequence} * dim_ + at.vector(first) * kVector : nullptr;
        next(at);
      }
      if (kind == Source::kExchange) {
        await<float>(source, x);
      } else {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          x[i] = make_uint4(0, 0, 0, 0);
          if (source[i] == nullptr) continue;
          float4 h = state_[i];
          if (kind == Source::kEmbedding) {
            const A* row = embedding_row(of[i].sequence) + of[i].vector(first) * kVector;
            h = make_float4(widen(row[0]), widen(row[1]), widen(row[2]), widen(row[3]));
          } else if (!begins) {
            h = state_vector(layer, of[i]);
          }
          x[i] = make_uint4(__float_as_uint(h.x), __float_as_uint(h.y), __float_as_uint(h.z), __float_as_uint(h.w));
        }
      }
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if (source[i] != nullptr) {
          *reinterpret_cast<uint4*>(operand_ + of[i].sequence * pitch + of[i].vector(first) * kPieceBytes) = x[i];
        }
        squares_sum += squares(x[i]);  // x is 0 where there is no source
        if (!kSingle && (of[i].round + 1) * kStride >= vectors && of[i].sequence < batch()) {
          put_squares(squares_sum, of[i].sequence);
          squares_sum = 0.0F;
        }
      }
    }
    if (weight != nullptr) {
      if (kSingle) put_squares(squares_sum, 0);
      barrier();
    }
#pragma unroll 1
    for (int sequence = 0; sequence < batch(); ++sequence) {
      const float scale = weight != nullptr ? norm_scale(sequence) : 1.0F;
      std::byte* row = operand_ + sequence * pitch;
#pragma unroll 1
      for (int begin = 0; begin < vectors; begin += kRounds * kStride) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          if (begin + i * kStride >= vectors) break;
          const int vector = begin + i * kStride + first;
          const float4 w = begin == 0 ? held[i] : norm_weight(weight, vector);
          float4 x = make_float4(0, 0, 0, 0);
          if (vector < vectors) x = *reinterpret_cast<const float4*>(row + vector * kPieceBytes);
          __syncwarp();
          const A y[kVector] = {narrow<A>(w.x * (scale * x.x)), narrow<A>(w.y * (scale * x.y)),
                                narrow<A>(w.z * (scale * x.z)), narrow<A>(w.w * (scale * x.w))};
          const int step = vector / kStepVectors;  // its number in the row
          std::byte* to = row + step * kNormStep + (vector - step * kStepVectors) * kVector * int{sizeof(A)};
          if (vector < vectors) store_vector(to, y);
        }
      }
    }
    __syncwarp();
    return {pitch, kNormStep};
  }
  __device__ bool exists(const Position& at) const {
    return at.sequence < batch() && at.vector(first_vector()) * kVector < dim_;
  }
  __device__ void next(Position& at) const {
    if (++at.round * kStride * kVector < dim_) return;
    at.round = 0;
    ++at.sequence;
  }
  __device__ void put_squares(float squares_sum, int sequence) const {
    const float sum = warp_sum(squares_sum);
    if (lane() == 0) norm_sums_[sequence * kTileWarps + warp_] = sum;
  }
  __device__ float4 norm_weight(const float* weight, int vector) const {
    if (weight == nullptr || vector * kVector >= dim_) return make_float4(1, 1, 1, 1);
    return __ldg(reinterpret_cast<const float4*>(weight) + vector);
  }
  __device__ static float squares(const uint4& x) {
    const float a = __uint_as_float(x.x);
    const float b = __uint_as_float(x.y);
    const float c = __uint_as_float(x.z);
    const float d = __uint_as_float(x.w);
    return __fmaf_rn(d, d, __fmaf_rn(c, c, __fmaf_rn(b, b, a * a)));
  }
  __device__ float norm_scale(int sequence) const {
    const auto* of_warps = reinterpret_cast<const float4*>(norm_sums_ + sequence * kTileWarps);
    const float4 a = of_warps[0];
    const float4 b = of_warps[1];
    const float sum = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
    return __fdividef(1.0F, sqrtf(__fdividef(sum, static_cast<float>(dim_))) + 1e-6F);
  }
  __device__ static void store_vector(std::byte* to, const A (&y)[kVector]) {
    if constexpr (sizeof(A) == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(y[0], y[1], y[2], y[3]);
    } else {
      const auto pair = [](A low, A high) { return low.bits | static_cast<std::uint32_t>(high.bits) << 16; };
      *reinterpret_cast<uint2*>(to) = make_uint2(pair(y[0], y[1]), pair(y[2], y[3]));
    }
  }
  __device__ const A* embedding_row(int sequence) const {
    return p_.op.embedding + std::int64_t{p_.op.tokens[sequence]} * dim_;
  }

  // --- Stages --------------------------------------------------------------------------------------------------------

  __device__ float& local(Local what, int channel, int sequence) const {
    return local_[(static_cast<int>(what) * batch() + sequence) * p_.plan.channels + channel];
  }
  __device__ void embed() const {
#pragma unroll 1
    for (int sequence = 0; sequence < batch(); ++sequence) {
#pragma unroll 1
      for (int i = thread(); i < channels_.count; i += kConsumers) {
        local(Local::kResidual, i, sequence) = widen(embedding_row(sequence)[channels_.first + i]);
      }
    }
  }
  /// First of the layer's [B, D] in h, context and segment_sum.
  __device__ std::int64_t first_of(int layer) const { return std::int64_t{layer} * batch() * dim_; }

  /// An output of a stage, and what its epilogue reads from memory.
  struct Output {
    int row, part, sequence;  // the row of the part, or of the pass
    bool exists;
    int at;  // of a channel in a vector [B, D]
    float bias, context_bias, h, c;
    double sum;
  };
  /// The i-th of a pass that begins with row `first` and has `rows` rows, where a stage has passes.
  __device__ Output output(const StageShare& shape, int layer, Stage stage, int i, int first, int rows) const {
    const DecodeStep<Device, A>& op = p_.op;
    Output out = {};
    out.row = i & ((1 << shape.log_width) - 1);
    out.part = (i >> shape.log_width) & ((1 << shape.log_parts) - 1);
    out.sequence = i >> (shape.log_width + shape.log_parts);
    out.at = (kSingle ? 0 : out.sequence * dim_) + channels_.first + out.row;
    const int width = rows > 0 ? rows : out.part == 0 ? shape.width : shape.other_width;
    out.exists = out.sequence < batch() && out.row < width && out.part < shape.parts;
    if (!out.exists || stage == Stage::kPredict) return out;
    const float* const* biases = layers_[layer].bias + shape.bias;
    const auto bias = [&](int part) { return biases[part] == nullptr ? 0.0F : __ldg(biases[part] + first + out.row); };
    out.bias = bias(out.part);
    if (stage == Stage::kAdvance) {
      const std::int64_t here = first_of(layer) + out.at;
      out.context_bias = bias(1);
      out.h = __ldcg(op.h + here);
      constexpr int kRecallBias = 3;  // memory_out's, from this stage's first
      if (op.slots == 0) out.c = bias(kRecallBias);
      if (op.slots == 1) out.c = __ldg(op.context + here);
    }
    if (stage == Stage::kNarrow) out.sum = __ldcg(op.segment_sum + first_of(layer) + out.at);
    return out;
  }

  /// The stage's operand, or `panel` of it.
  __device__ Operand input(int layer, Stage stage, int panel, int panel_bytes) const {
    const DecodeShape& shape = p_.op.shape;
    if (stage == Stage::kGate || stage == Stage::kProject || stage == Stage::kWiden || stage == Stage::kPredict) {
      const LayerShare& share = layers_[layer];
      const float* weight = stage == Stage::kGate ? nullptr : stage == Stage::kWiden ? share.norm2 : share.norm1;
      const float* from = stage == Stage::kWiden ? vectors<float>(layer, Point::kMixed)
                                                 : vectors<float>(max(layer, 1) - 1, Point::kOutput);
      const Source source = stage == Stage::kGate                    ? Source::kState
                            : layer == 0 && stage == Stage::kProject ? Source::kEmbedding
                                                                     : Source::kExchange;
      return narrowed(weight, source, layer, from);
    }
    const bool is_pair = stage == Stage::kHide || stage == Stage::kAdvance;
    const int width = stage == Stage::kAdvance  ? static_cast<int>(shape.gate_hidden)
                      : stage == Stage::kNarrow ? static_cast<int>(shape.ffn)
                                                : dim_;
    const Point point = stage == Stage::kHide      ? Point::kProjected
                        : stage == Stage::kAdvance ? Point::kHidden
                        : stage == Stage::kQuery   ? Point::kState
                        : stage == Stage::kRecall  ? Point::kAttended
                                                   : Point::kFfn;
    const int bytes = min(width * int{sizeof(A)} - panel, panel_bytes);
    return gather(vectors<A>(layer, point) + panel / int{sizeof(A)}, is_pair && !shape.dpg ? 2 * batch() : batch(),
                  width, bytes);
  }

  /// From the sums to what other blocks or this one read.
  __device__ void finish_output(const StageShare& shape, int layer, Stage stage, const Output& out, int first) const {
    const DecodeStep<Device, A>& op = p_.op;
    const int row = out.row;
    const int b = out.sequence;
    const int summed = out.part == 0 ? row : row + shape.width + (out.part - 1) * shape.other_width;
    const float y = sum(summed, b) + out.bias;
    switch (stage) {
      case Stage::kGate:
        local(out.part == 0 ? Local::kStateGate : Local::kMdiGate, row, b) = y;
        return;
      case Stage::kProject: {
        constexpr int kZ = 2;  // of q, v, z, k
        const A rounded = narrow<A>(y);
        A* const zk = vectors<A>(layer, Point::kProjected);
        if (out.part >= kZ) publish(zk + (out.part - kZ) * batch() * dim_ + out.at, rounded);
        if (out.part > kZ) return;
        const Local to = out.part == 0 ? Local::kQ : out.part == 1 ? Local::kV : Local::kZ;
        local(to, row, b) = widen(rounded);
        return;
      }
      case Stage::kAdvance:
        return advance(layer, out, y, sum(shape.width + row, b) + out.context_bias);
      case Stage::kQuery:
        publish(vectors<A>(layer, Point::kQuery) + out.at, narrow<A>(__fmaf_rn(0.5F, local(Local::kQ, row, b), y)));
        return;
      case Stage::kRecall:
      case Stage::kNarrow: {
        const bool ends = stage == Stage::kNarrow;
        float& residual = local(Local::kResidual, row, b);
        const float x = residual + y;
        publish(vectors<float>(layer, ends ? Point::kOutput : Point::kMixed) + out.at, x);
        residual = x;
        if (ends) op.segment_sum[first_of(layer) + out.at] = out.sum + static_cast<double>(x);
        return;
      }
      case Stage::kHide:
      case Stage::kWiden: {
        if (stage == Stage::kHide && out.part == 0) {
          local(Local::kMdiInput, row, b) = widen(narrow<A>(y));
          return;
        }
        const bool widens = stage == Stage::kWiden;
        const float hidden = !widens && op.shape.dpg ? (y < 0.0F ? 0.0F : y) : gelu(y);  // NaN stays
        const int width = static_cast<int>(widens ? op.shape.ffn : op.shape.gate_hidden);
        const int vector = widens ? b : (out.part - 1) * batch() + b;
        const Split& split = p_.plan.splits[static_cast<int>(widens ? Owned::kFfn : Owned::kHidden)];
        publish(vectors<A>(layer, widens ? Point::kFfn : Point::kHidden) + vector * width +
                    (split.mine().first + first + row),
                narrow<A>(hidden));
        return;
      }
      default:
        op.logits[b * op.shape.vocab + p_.plan.splits[static_cast<int>(Owned::kVocab)].mine().first + first + row] = y;
        return;
    }
  }

  /// γ, h and, where that needs no attention, y.
  __device__ void advance(int layer, const Output& out, float gamma_input, float context_input) const {
    constexpr float kLeast = 1e-6F;
    const DecodeStep<Device, A>& op = p_.op;
    const int row = out.row;
    const int b = out.sequence;
    float gamma = sigmoid(gamma_input);
    if (!op.shape.dpg) gamma *= sigmoid(context_input);
    gamma = gamma < kLeast ? kLeast : gamma > 1.0F - kLeast ? 1.0F - kLeast : gamma;  // NaN stays
    const float s = sigmoid(local(Local::kStateGate, row, b));
    const float g = sigmoid(local(Local::kMdiInput, row, b) + local(Local::kMdiGate, row, b));
    const float decay = __fmaf_rn(op.mdi_mix, (1.0F - g) + gamma, gamma);
    const float next = __fmaf_rn(decay, out.h, local(Local::kZ, row, b) * __fmaf_rn(op.mdi_mix, g, s));
    float& residual = local(Local::kResidual, row, b);
    const float x = __fmaf_rn(0.1F, local(Local::kV, row, b), residual + next) + out.c;  // c is 0 if it comes later
    if (op.slots > 1) {
      publish(vectors<A>(layer, Point::kState) + out.at, narrow<A>(next));
    } else {
      publish(vectors<float>(layer, Point::kMixed) + out.at, x);
    }
    residual = x;
    op.h[first_of(layer) + out.at] = next;
  }

  /// softmax(q · slots / √d) · slots, a head of a sequence at a time. A warp scores every eighth slot, some of which it
  /// asks for before the query is there; then a thread sums up a channel over the slots, in order, which have come into
  /// L1 with the scores.
  __device__ void attend_heads(int layer) const {
    constexpr int kHeld = 4;  // times 32 channels
    const DecodeShape& shape = p_.op.shape;
    const auto heads = static_cast<int>(shape.heads);
    const auto slots = static_cast<int>(p_.op.slots);
    const int width = dim_ / heads;
    const float scale = 1.0F / sqrtf(static_cast<float>(width));
    float* const q = reinterpret_cast<float*>(operand_);
    float* const scores = q + width;
#pragma unroll 1
    for (int task = static_cast<int>(blockIdx.x); task < batch() * heads; task += static_cast<int>(gridDim.x)) {
      const int b = task / heads;
      const int head = task % heads * width;
      const std::int64_t first = std::int64_t{b} * dim_ + head;
      const float* memory = p_.op.memory + (std::int64_t{layer} * batch() + b) * shape.memory_slots * dim_ + head;
      const auto read = [&](int slot, int channel) {
        return slot < slots && channel < width ? __ldg(memory + std::int64_t{slot} * dim_ + channel) : 0.0F;
      };
      float held[kAhead][kHeld];
      const auto hold = [&](int slot) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
#pragma unroll
          for (int i = 0; i < kHeld; ++i) held[j][i] = read(slot + j * kTileWarps, lane() + i * 32);
        }
      };
      hold(warp_);
      for (int i = thread(); i < width; i += kConsumers) {
        q[i] = widen(await_element(vectors<A>(layer, Point::kQuery) + first + i));
      }
      barrier();
#pragma unroll 1
      for (int slot = warp_; slot < slots; slot += kAhead * kTileWarps) {
        if (slot != warp_) hold(slot);
        float score[kAhead] = {};
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          const float of_query = lane() + i * 32 < width ? q[lane() + i * 32] : 0.0F;
#pragma unroll
          for (int j = 0; j < kAhead; ++j) score[j] = __fmaf_rn(of_query, held[j][i], score[j]);
        }
#pragma unroll 1
        for (int i = lane() + kHeld * 32; i < width; i += 32) {
#pragma unroll
          for (int j = 0; j < kAhead; ++j) score[j] = __fmaf_rn(q[i], read(slot + j * kTileWarps, i), score[j]);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const float sum = scale * warp_sum(score[j]);
          if (lane() == 0 && slot + j * kTileWarps < slots) scores[slot + j * kTileWarps] = sum;
        }
      }
      barrier();
      float largest = -INFINITY;
#pragma unroll 1
      for (int slot = lane(); slot < slots; slot += 32) largest = fmaxf(largest, scores[slot]);
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, mask));
      }
#pragma unroll 1
      for (int i = thread(); i < width; i += kConsumers) {
        float value = 0.0F;
        float all = 0.0F;
#pragma unroll 8
        for (int slot = 0; slot < slots; ++slot) {
          const float weight = fast_exp(scores[slot] - largest);
          all += weight;
          value = __fmaf_rn(weight, __ldg(memory + std::int64_t{slot} * dim_ + i), value);
        }
        publish(vectors<A>(layer, Point::kAttended) + first + i, narrow<A>(value / all));
      }
      barrier();  // q and scores have been read
    }
  }
  __device__ static float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffU, x, mask);
    return x;
  }
  /// In passes over panels of the operand, or over rows as many as the sums have room for.
  __device__ void run_stage(int layer, Stage stage) {
    const StageShare shape = stages_[static_cast<int>(stage)];
    const bool by_rows = stage == Stage::kWiden || stage == Stage::kPredict;
    const int all_rows = by_rows ? shape.width : 0;
    if (stage == Stage::kRecall) attend_heads(layer);
    Operand x = {};
    Output out = {};
    int panel = 0;
    int first = 0;
#pragma unroll 1
    while (true) {
      const int rows = min(p_.plan.sums_rows, all_rows - first);
      const int panel_bytes = segments_[shape.first].panel_bytes;
      const int row_bytes = segments_[shape.first].row_bytes;
      if (panel == 0) out = output(shape, layer, stage, thread(), first, rows);
      if (first == 0) x = input(layer, stage, panel, panel_bytes);
      if (panel == 0) acquire_sums();
      int to = 0;
#pragma unroll 1
      for (int i = shape.first; i < shape.end; ++i) {
        const Segment s = segments_[i];
        const bool is_second = i == static_cast<int>(Product::kContextIn) || i == static_cast<int>(Product::kContextUp);
        const int count = by_rows ? rows : s.rows;
        multiply<A>(s, panel, count, operand_ + (is_second ? batch() * x.pitch : 0), x, batch(), warp_, ring_, sums_,
                    to, channels_.count);
        to += count;
      }
      barrier();
      panel += panel_bytes;
      if (panel < row_bytes) continue;
      panel = 0;
      for (int i = thread();;) {
        if (out.exists) finish_output(shape, layer, stage, out, first);
        i += kConsumers;
        if (i >= batch() << (shape.log_width + shape.log_parts)) break;
        out = output(shape, layer, stage, i, first, rows);
      }
      release_sums();
      first += rows;
      if (first >= all_rows) break;
    }
    if (stage == Stage::kWiden && layer + 1 < p_.op.shape.layers) ask_state(layer + 1);
  }
  __device__ float sum(int row, int sequence) const { return total(sums_, row, sequence, batch()); }

  const DecodeParams<A>& p_;
  const LayerShare* layers_;
  const Segment* segments_;
  const StageShare* stages_;
  Ring ring_;
  Range channels_;
  int dim_, warp_;
  std::byte* operand_;
  float* sums_;
  float* norm_sums_;
  float* local_;
  std::uint32_t* header_;
  std::uint32_t turn_;
  std::byte* set_;
  float4 state_[kRounds];
};

}  // namespace mmrec::kernels
