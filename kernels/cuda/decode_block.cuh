// The multiplying warps of one block of a decode step: the stages of decode_step.cu, from inputs to epilogues.
//
// Every stage goes the same way. Ask memory for what the epilogue needs; wait until all blocks have announced the
// input; read it from the exchange into the operand buffer; multiply, each warp its share of k; announce; add up the
// warps' sums and write the outputs. Three barriers of these warps separate the uses of the operand buffer and of the
// sums.
#pragma once

#include <cmath>

#include "kernels/cuda/decode_stream.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/exchange.cuh"

namespace mmrec::kernels {

inline constexpr int kConsumers = 32 * kTileWarps;

/// The outputs of a stage, `rows` for every sequence, divided among the threads. What load(row, sequence) reads is
/// asked for at once for a thread's first output, and there is rarely a second.
template <class Load>
class Outputs {
 public:
  __device__ Outputs(int rows, int batch, Load load) : rows_(rows), count_(rows * batch), load_(load) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= count_) return;
    row_ = i % rows;
    sequence_ = i / rows;
    loaded_ = load(row_, sequence_);
  }
  /// f(row, sequence, loaded)
  template <class F>
  __device__ void each(F f) const {
    const int first = static_cast<int>(threadIdx.x);
    if (first < count_) f(row_, sequence_, loaded_);
    for (int i = first + kConsumers; i < count_; i += kConsumers) {
      f(i % rows_, i / rows_, load_(i % rows_, i / rows_));
    }
  }

 private:
  int rows_, count_, row_ = 0, sequence_ = 0;
  Load load_;
  decltype(load_(0, 0)) loaded_ = {};
};

template <class A>
class DecodeBlock {
 public:
  __device__ DecodeBlock(const DecodeParams<A>& p, std::byte* shared, const DecodeLayer<Device, A>* layers, Ring ring)
      : p_(p),
        layers_(layers),
        ring_(ring),
        share_(p.op.shape),
        batch_(static_cast<int>(p.op.shape.batch)),
        dim_(static_cast<int>(p.op.shape.dim)),
        operand_(shared + p.plan.operand),
        sums_(reinterpret_cast<float*>(shared + p.plan.sums)),
        norm_sums_(reinterpret_cast<float*>(shared + p.plan.norm_sums)),
        local_(reinterpret_cast<float*>(shared + p.plan.local)),
        header_(static_cast<std::uint32_t*>(p.op.exchange)),
        turn_(__ldcg(header_)),
        set_(static_cast<std::byte*>(p.op.exchange) + p.plan.header_bytes + turn_ * p.plan.set_bytes) {}

  __device__ void run() {
    clear_other_set();
    embed();
    float4 state[kHeldState];
    ask_state(0, state);
    put_state(0, state);
    const auto layers = static_cast<int>(p_.op.shape.layers);
    for (int layer = 0; layer < layers; ++layer) {
      gate(layer);
      project(layer);
      hide(layer);
      advance(layer);
      if (p_.op.slots > 1) attend(layer);
      widen_ffn(layer);
      narrow_ffn(layer);
    }
    predict(layers - 1);
    finish();
  }

 private:
  static constexpr int kAhead = 4;      // vectors of 16 bytes that a lane asks for at once
  static constexpr int kHeldState = 4;  // vectors of a thread of h that wait in registers
  static constexpr int kVector = 4;     // floats

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  __device__ static int lane() { return thread() % 32; }
  __device__ static void barrier() { ptx::named_barrier_sync(1, kConsumers); }
  __device__ static float value_or_zero(const float* values, int i) {
    return values == nullptr ? 0.0F : __ldg(values + i);
  }

  // --- Exchange ------------------------------------------------------------------------------------------------------

  template <class T>
  __device__ T* vectors(int layer, std::int64_t offset) const {
    return reinterpret_cast<T*>(set_ + layer * p_.plan.layer_bytes + offset);
  }
  __device__ std::uint32_t* announcements(int layer, Point point) const {
    return header_ + DecodePlan::kFirstHint + layer * static_cast<int>(Point::kCount) + static_cast<int>(point);
  }
  __device__ void announce(int layer, Point point) const {
    if (thread() == 0) ptx::add_relaxed(announcements(layer, point), 1);
  }
  __device__ void await_announcements(int layer, Point point) const {
    if (thread() == 0) {
      while (ptx::load_relaxed(announcements(layer, point)) != gridDim.x) ptx::spin_pause();
    }
    barrier();
  }

  __device__ void clear_other_set() const {
    auto* other = reinterpret_cast<uint4*>(static_cast<std::byte*>(p_.op.exchange) + p_.plan.header_bytes +
                                           (1 - turn_) * p_.plan.set_bytes);
    constexpr std::uint32_t kOnes = 0xffffffffU;
    for (std::int64_t i = std::int64_t{blockIdx.x} * kConsumers + thread(); i < p_.plan.set_bytes / kPieceBytes;
         i += std::int64_t{gridDim.x} * kConsumers) {
      other[i] = make_uint4(kOnes, kOnes, kOnes, kOnes);
    }
  }

  /// The last block to come here leaves the exchange as the next step wants it: the other set's turn, no announcements.
  __device__ void finish() const {
    barrier();
    if (warp() != 0) return;
    std::uint32_t before = 0;
    if (lane() == 0) before = ptx::add_acq_rel(header_ + 1, 1);
    if (__shfl_sync(0xffffffffU, before, 0) != gridDim.x - 1) return;
    const int hints = static_cast<int>(p_.op.shape.layers) * static_cast<int>(Point::kCount);
    for (int i = lane(); i < hints; i += 32) header_[DecodePlan::kFirstHint + i] = 0;
    if (lane() != 0) return;
    header_[0] = 1 - turn_;
    header_[1] = 0;
  }

  // --- Operands ------------------------------------------------------------------------------------------------------

  /// `rows` vectors of `bytes` bytes, `stride` elements apart, as they get written.
  __device__ Operand gather(const A* from, int rows, std::int64_t stride, int bytes) const {
    const int pieces = bytes / kPieceBytes;
    const int chunks = (pieces + 31) / 32;  // a warp's reads
    const int pitch = padded_row(bytes);
    for (int first = warp(); first < rows * chunks; first += kAhead * kTileWarps) {
      const A* source[kAhead];
      std::byte* to[kAhead];
      uint4 value[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int chunk = first + i * kTileWarps;
        const int row = chunk / chunks;
        const int piece = chunk % chunks * 32 + lane();
        to[i] = operand_ + row * pitch + piece * kPieceBytes;
        source[i] =
            row < rows && piece < pieces ? from + row * stride + piece * (kPieceBytes / int{sizeof(A)}) : nullptr;
      }
      await<A>(source, value);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (source[i] != nullptr) *reinterpret_cast<uint4*>(to[i]) = value[i];
      }
    }
    barrier();
    return {operand_, pitch, kStepBytes};
  }
  __device__ Operand gather(const A* from, int rows, std::int64_t width) const {
    return gather(from, rows, width, static_cast<int>(width) * int{sizeof(A)});
  }
  /// The vectors after the first `batch` of a gathered pair of them.
  __device__ Operand second(const Operand& pair) const {
    return {pair.data + batch_ * pair.pitch, pair.pitch, pair.step_bytes};
  }

  /// rmsnorm of every sequence's fp32 vector. It lies in the operand buffer and is normalised in place: 64 bytes of A
  /// are written over the 128 bytes, or for fp32 the 64, that they come from, by the lanes that own them. begin() waits
  /// for the input; fetch(sequence, vector, to) reads 4 floats of it for every vector number that is not negative.
  template <class Begin, class Fetch>
  __device__ Operand normalise(const float* weight, Begin begin, Fetch fetch) const {
    const int chunks = p_.plan.norm_chunks;
    const int total = chunks * batch_;
    const int pitch = padded_row(dim_ * int{sizeof(float)});
    const auto place = [&](int chunk, int& sequence, int& vector) {
      sequence = chunk / chunks;
      vector = chunk % chunks * 32 + lane();
      if (chunk >= total || vector * kVector >= dim_) vector = -1;
    };
    const auto weights = [&](int vector) {
      return vector < 0 ? make_float4(0, 0, 0, 0) : __ldg(reinterpret_cast<const float4*>(weight) + vector);
    };
    float4 held[kAhead];  // weights of the first round
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      int sequence = 0;
      int vector = 0;
      place(warp() + i * kTileWarps, sequence, vector);
      held[i] = weights(vector);
    }
    begin();
    for (int first = warp(); first < total; first += kAhead * kTileWarps) {
      int sequence[kAhead];
      int vector[kAhead];
      uint4 x[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) place(first + i * kTileWarps, sequence[i], vector[i]);
      fetch(sequence, vector, x);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (vector[i] >= 0) *reinterpret_cast<uint4*>(operand_ + sequence[i] * pitch + vector[i] * kPieceBytes) = x[i];
        float sum = vector[i] < 0 ? 0.0F : squares(x[i]);
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, mask);
        const int chunk = first + i * kTileWarps;
        if (lane() == 0 && chunk < total) norm_sums_[chunk] = sum;
      }
    }
    barrier();
    float scale = 0.0F;
    int scaled = -1;  // the sequence that it belongs to
    for (int first = warp(); first < total; first += kAhead * kTileWarps) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        int sequence = 0;
        int vector = 0;
        place(first + i * kTileWarps, sequence, vector);
        if (first + i * kTileWarps >= total) break;
        if (sequence != scaled) scale = norm_scale(sequence);
        scaled = sequence;
        std::byte* row = operand_ + sequence * pitch;
        const uint4 x = *reinterpret_cast<const uint4*>(row + max(vector, 0) * kPieceBytes);
        const float4 w = first == warp() ? held[i] : weights(vector);
        __syncwarp();
        if (vector < 0) continue;
        const A y[kVector] = {
            narrow<A>(w.x * (scale * __uint_as_float(x.x))), narrow<A>(w.y * (scale * __uint_as_float(x.y))),
            narrow<A>(w.z * (scale * __uint_as_float(x.z))), narrow<A>(w.w * (scale * __uint_as_float(x.w)))};
        store_vector(row + vector / 8 * 8 * kPieceBytes + vector % 8 * kVector * int{sizeof(A)}, y);
      }
    }
    barrier();
    return {operand_, pitch, kStepBytes / int{sizeof(A)} * int{sizeof(float)}};
  }
  /// The same of a vector in the exchange.
  __device__ Operand normalise(const float* weight, int layer, Point point, std::int64_t offset) const {
    return normalise(
        weight, [&] { await_announcements(layer, point); },
        [&](const int(&sequence)[kAhead], const int(&vector)[kAhead], uint4(&to)[kAhead]) {
          const float* from[kAhead];
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            from[i] = vector[i] < 0
                          ? nullptr
                          : vectors<float>(layer, offset) + std::int64_t{sequence[i]} * dim_ + vector[i] * kVector;
          }
          await<float>(from, to);
        });
  }

  __device__ static float squares(const uint4& x) {
    const float a = __uint_as_float(x.x);
    const float b = __uint_as_float(x.y);
    const float c = __uint_as_float(x.z);
    const float d = __uint_as_float(x.w);
    return __fmaf_rn(d, d, __fmaf_rn(c, c, __fmaf_rn(b, b, a * a)));
  }
  __device__ float norm_scale(int sequence) const {
    const int chunks = p_.plan.norm_chunks;
    float sum = 0.0F;
#pragma unroll 8
    for (int i = 0; i < chunks; ++i) sum += norm_sums_[sequence * chunks + i];
    return 1.0F / (sqrtf(sum / static_cast<float>(dim_)) + 1e-6F);
  }
  __device__ static void store_vector(std::byte* to, const A (&y)[kVector]) {
    if constexpr (sizeof(A) == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(y[0], y[1], y[2], y[3]);
    } else {
      const auto pair = [](A low, A high) { return low.bits | static_cast<std::uint32_t>(high.bits) << 16; };
      *reinterpret_cast<uint2*>(to) = make_uint2(pair(y[0], y[1]), pair(y[2], y[3]));
    }
  }

  /// h_{t-1} of a layer, asked for a stage before it is put into the operand buffer, rounded.
  __device__ float4 state_vector(int layer, int i) const {
    return __ldcg(reinterpret_cast<const float4*>(p_.op.h + std::int64_t{layer} * batch_ * dim_) + i);
  }
  __device__ void ask_state(int layer, float4 (&held)[kHeldState]) const {
#pragma unroll
    for (int i = 0; i < kHeldState; ++i) {
      const int at = thread() + i * kConsumers;
      if (at < batch_ * dim_ / kVector) held[i] = state_vector(layer, at);
    }
  }
  __device__ void put_state(int layer, const float4 (&held)[kHeldState]) const {
    const int per_row = dim_ / kVector;
    const auto put = [&](int at, const float4& h) {
      const A y[kVector] = {narrow<A>(h.x), narrow<A>(h.y), narrow<A>(h.z), narrow<A>(h.w)};
      store_vector(operand_ + at / per_row * state_operand().pitch + at % per_row * kVector * int{sizeof(A)}, y);
    };
#pragma unroll
    for (int i = 0; i < kHeldState; ++i) {
      const int at = thread() + i * kConsumers;
      if (at < batch_ * per_row) put(at, held[i]);
    }
    for (int at = thread() + kHeldState * kConsumers; at < batch_ * per_row; at += kConsumers) {
      put(at, state_vector(layer, at));
    }
  }
  __device__ Operand state_operand() const { return {operand_, padded_row(dim_ * int{sizeof(A)}), kStepBytes}; }

  // --- Products ------------------------------------------------------------------------------------------------------

  /// The block's rows of a product; their sums begin at row `to`.
  template <Product product>
  __device__ void multiply_rows(int layer, const Operand& x, int to = 0) {
    const Segment s = share_.of(product, layers_[layer], p_.op.shape, p_.plan.panel_bytes);
    multiply<A>(s, 0, 0, s.rows(), x, batch_, ring_, sums_, to, 0);
  }
  __device__ float sum(int row, int sequence) const { return total(sums_, row, sequence, batch_); }
  __device__ float& local(Local what, int channel, int sequence) const {
    return local_[(static_cast<int>(what) * batch_ + sequence) * p_.plan.channels + channel];
  }
  /// Of a channel of this block in a vector [B, D].
  __device__ std::int64_t at(int channel, int sequence) const {
    return std::int64_t{sequence} * dim_ + share_.channels.first + channel;
  }

  // --- Stages --------------------------------------------------------------------------------------------------------

  __device__ const A* embedding_row(int sequence) const {
    return p_.op.embedding + std::int64_t{p_.op.tokens[sequence]} * dim_;
  }
  __device__ void embed() const {
    const Range c = share_.channels;
    for (int i = thread(); i < c.count * batch_; i += kConsumers) {
      local(Local::kResidual, i % c.count, i / c.count) = widen(embedding_row(i / c.count)[c.first + i % c.count]);
    }
  }

  /// W_g h + b_g and W_mh h. h is in the operand buffer.
  __device__ void gate(int layer) {
    const int c = share_.channels.count;
    const float* bias = layers_[layer].gate_bias;
    const Outputs outputs(
        2 * c, batch_, [&](int row, int) { return row < c ? value_or_zero(bias, share_.channels.first + row) : 0.0F; });
    barrier();
    multiply_rows<Product::kGate>(layer, state_operand());
    barrier();
    outputs.each([&](int row, int b, float of_row) {
      const Local to = row < c ? Local::kStateGate : Local::kMdiGate;
      local(to, row < c ? row : row - c, b) = sum(row, b) + of_row;
    });
  }

  /// q, v, z, k from x.
  __device__ void project(int layer) {
    const DecodeLayer<Device, A>& w = layers_[layer];
    const Range c = share_.channels;
    const Outputs outputs((p_.op.shape.dpg ? 3 : 4) * c.count, batch_, [&](int row, int) {
      return value_or_zero(w.qvzk_bias, row / c.count * dim_ + c.first + row % c.count);
    });
    const Operand x = layer > 0 ? normalise(w.norm1, layer - 1, Point::kOutput, p_.plan.output) : normalise_embedding();
    multiply_rows<Product::kQvzk>(layer, x);
    announce(layer, Point::kProjected);
    barrier();
    A* const zk = vectors<A>(layer, p_.plan.projected);
    outputs.each([&](int row, int b, float bias) {
      constexpr int kZ = 2;  // of q, v, z, k
      const int part = row / c.count;
      const int channel = row % c.count;
      const A y = narrow<A>(sum(row, b) + bias);
      if (part >= kZ) publish(zk + std::int64_t{part - kZ} * batch_ * dim_ + at(channel, b), y);
      if (part > kZ) return;
      const Local to = part == 0 ? Local::kQ : part == 1 ? Local::kV : Local::kZ;
      local(to, channel, b) = widen(y);
    });
  }
  __device__ Operand normalise_embedding() const {
    return normalise(
        layers_[0].norm1, [] { barrier(); },
        [&](const int(&sequence)[kAhead], const int(&vector)[kAhead], uint4(&to)[kAhead]) {
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            to[i] = make_uint4(0, 0, 0, 0);
            if (vector[i] < 0) continue;
            const A* from = embedding_row(sequence[i]) + vector[i] * kVector;
            to[i] = make_uint4(__float_as_uint(widen(from[0])), __float_as_uint(widen(from[1])),
                               __float_as_uint(widen(from[2])), __float_as_uint(widen(from[3])));
          }
        });
  }

  /// W_mz z + b_m and the decay networks' hidden units.
  __device__ void hide(int layer) {
    const DecodeLayer<Device, A>& w = layers_[layer];
    const Range c = share_.channels;
    const Range g = share_.hidden;
    const bool dpg = p_.op.shape.dpg;
    const Outputs outputs(c.count + (dpg ? 1 : 2) * g.count, batch_, [&](int row, int) {
      if (row < c.count) return value_or_zero(w.gate_z_bias, c.first + row);
      row -= c.count;
      return row < g.count ? value_or_zero(w.gamma_in_bias, g.first + row)
                           : value_or_zero(w.context_in_bias, g.first + row - g.count);
    });
    await_announcements(layer, Point::kProjected);
    const Operand z = gather(vectors<A>(layer, p_.plan.projected), (dpg ? 1 : 2) * batch_, dim_);
    multiply_rows<Product::kGateZ>(layer, z);
    multiply_rows<Product::kGammaIn>(layer, z, c.count);
    multiply_rows<Product::kContextIn>(layer, second(z), c.count + g.count);
    announce(layer, Point::kHidden);
    barrier();
    A* const hidden = vectors<A>(layer, p_.plan.hidden);
    const std::int64_t width = p_.op.shape.gate_hidden;
    outputs.each([&](int row, int b, float bias) {
      const float x = sum(row, b) + bias;
      if (row < c.count) {
        local(Local::kMdiInput, row, b) = widen(narrow<A>(x));
        return;
      }
      row -= c.count;
      const int network = row < g.count ? 0 : 1;
      const float y = dpg ? (x < 0.0F ? 0.0F : x) : gelu(x);  // NaN stays
      publish(hidden + (network * batch_ + b) * width + (g.first + row - network * g.count), narrow<A>(y));
    });
  }

  /// γ, h and, where that needs no attention, y.
  __device__ void advance(int layer) {
    const DecodeLayer<Device, A>& w = layers_[layer];
    const DecodeStep<Device, A>& op = p_.op;
    const Range c = share_.channels;
    const bool dpg = op.shape.dpg;
    const bool attends = op.slots > 1;
    float* const h = op.h + std::int64_t{layer} * batch_ * dim_;
    struct Loaded {
      float gamma, context, h, c;
    };
    const Outputs outputs(c.count, batch_, [&](int row, int b) {
      Loaded loaded = {};
      loaded.gamma = value_or_zero(w.gamma_up_bias, c.first + row);
      loaded.context = dpg ? 0.0F : value_or_zero(w.context_up_bias, c.first + row);
      loaded.h = __ldcg(h + at(row, b));
      if (op.slots == 0) loaded.c = value_or_zero(w.memory_out_bias, c.first + row);
      if (op.slots == 1) loaded.c = __ldg(op.context + std::int64_t{layer} * batch_ * dim_ + at(row, b));
      return loaded;
    });
    await_announcements(layer, Point::kHidden);
    const Operand hidden = gather(vectors<A>(layer, p_.plan.hidden), (dpg ? 1 : 2) * batch_, op.shape.gate_hidden);
    multiply_rows<Product::kGammaUp>(layer, hidden);
    multiply_rows<Product::kContextUp>(layer, second(hidden), c.count);
    announce(layer, attends ? Point::kState : Point::kMixed);
    barrier();
    A* const state = vectors<A>(layer, p_.plan.state);
    float* const mixed = vectors<float>(layer, p_.plan.mixed);
    outputs.each([&](int row, int b, const Loaded& x) {
      constexpr float kLeast = 1e-6F;
      float gamma = sigmoid(sum(row, b) + x.gamma);
      if (!dpg) gamma *= sigmoid(sum(c.count + row, b) + x.context);
      gamma = gamma < kLeast ? kLeast : gamma > 1.0F - kLeast ? 1.0F - kLeast : gamma;  // NaN stays
      const float s = sigmoid(local(Local::kStateGate, row, b));
      const float g = sigmoid(local(Local::kMdiInput, row, b) + local(Local::kMdiGate, row, b));
      const float decay = __fmaf_rn(op.mdi_mix, (1.0F - g) + gamma, gamma);
      const float next = __fmaf_rn(decay, x.h, local(Local::kZ, row, b) * __fmaf_rn(op.mdi_mix, g, s));
      float& residual = local(Local::kResidual, row, b);
      residual = __fmaf_rn(0.1F, local(Local::kV, row, b), residual + next);
      if (attends) {
        publish(state + at(row, b), narrow<A>(next));
      } else {
        residual += x.c;
        publish(mixed + at(row, b), residual);
      }
      h[at(row, b)] = next;
    });
  }

  /// y where two or more memory slots are filled.
  __device__ void attend(int layer) {
    const DecodeLayer<Device, A>& w = layers_[layer];
    const Range c = share_.channels;
    const Outputs queries(c.count, batch_, [&](int row, int) { return value_or_zero(w.memory_q_bias, c.first + row); });
    await_announcements(layer, Point::kState);
    multiply_rows<Product::kMemoryQ>(layer, gather(vectors<A>(layer, p_.plan.state), batch_, dim_));
    announce(layer, Point::kQuery);
    barrier();
    A* const query = vectors<A>(layer, p_.plan.query);
    queries.each([&](int row, int b, float bias) {
      publish(query + at(row, b), narrow<A>(__fmaf_rn(0.5F, local(Local::kQ, row, b), sum(row, b) + bias)));
    });

    const Outputs outputs(c.count, batch_,
                          [&](int row, int) { return value_or_zero(w.memory_out_bias, c.first + row); });
    await_announcements(layer, Point::kQuery);
    attend_heads(layer);
    announce(layer, Point::kAttended);

    await_announcements(layer, Point::kAttended);
    multiply_rows<Product::kMemoryOut>(layer, gather(vectors<A>(layer, p_.plan.attended), batch_, dim_));
    announce(layer, Point::kMixed);
    barrier();
    float* const mixed = vectors<float>(layer, p_.plan.mixed);
    outputs.each([&](int row, int b, float bias) {
      float& residual = local(Local::kResidual, row, b);
      residual += sum(row, b) + bias;
      publish(mixed + at(row, b), residual);
    });
  }

  /// softmax(q · slots / √d) · slots, a head of a sequence at a time. A warp scores every eighth slot; then a thread
  /// sums up a channel over the slots, in order, which have come into L1 with the scores.
  __device__ void attend_heads(int layer) const {
    const DecodeShape& shape = p_.op.shape;
    const auto heads = static_cast<int>(shape.heads);
    const auto slots = static_cast<int>(p_.op.slots);
    const int width = dim_ / heads;
    const float scale = 1.0F / sqrtf(static_cast<float>(width));
    float* const q = reinterpret_cast<float*>(operand_);
    float* const scores = q + width;
    for (int task = static_cast<int>(blockIdx.x); task < batch_ * heads; task += static_cast<int>(gridDim.x)) {
      const std::int64_t b = task / heads;
      const std::int64_t first = b * dim_ + task % heads * width;
      const float* memory = p_.op.memory + (layer * batch_ + b) * shape.memory_slots * dim_ + task % heads * width;
      for (int i = thread(); i < width; i += kConsumers) {
        q[i] = widen(await_element(vectors<A>(layer, p_.plan.query) + first + i));
      }
      barrier();
      for (int slot = warp(); slot < slots; slot += kAhead * kTileWarps) {
        float score[kAhead] = {};
        for (int i = lane(); i < width; i += 32) {
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            const std::int64_t row = min(slot + j * kTileWarps, slots - 1);
            score[j] = __fmaf_rn(q[i], __ldg(memory + row * dim_ + i), score[j]);
          }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const float sum = scale * warp_sum(score[j]);
          if (lane() == 0 && slot + j * kTileWarps < slots) scores[slot + j * kTileWarps] = sum;
        }
      }
      barrier();
      float largest = -INFINITY;
      for (int slot = lane(); slot < slots; slot += 32) largest = fmaxf(largest, scores[slot]);
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, mask));
      }
      for (int i = thread(); i < width; i += kConsumers) {
        float value = 0.0F;
        float all = 0.0F;
#pragma unroll 8
        for (int slot = 0; slot < slots; ++slot) {
          const float weight = fast_exp(scores[slot] - largest);
          all += weight;
          value = __fmaf_rn(weight, __ldg(memory + std::int64_t{slot} * dim_ + i), value);
        }
        publish(vectors<A>(layer, p_.plan.attended) + first + i, narrow<A>(value / all));
      }
      barrier();  // q and scores have been read
    }
  }
  __device__ static float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffU, x, mask);
    return x;
  }

  /// The ffn's hidden units from y.
  __device__ void widen_ffn(int layer) {
    const DecodeLayer<Device, A>& w = layers_[layer];
    const Range f = share_.ffn;
    const Outputs outputs(f.count, batch_, [&](int row, int) { return value_or_zero(w.ffn_in_bias, f.first + row); });
    multiply_rows<Product::kFfnIn>(layer, normalise(w.norm2, layer, Point::kMixed, p_.plan.mixed));
    announce(layer, Point::kFfn);
    barrier();
    A* const hidden = vectors<A>(layer, p_.plan.ffn);
    outputs.each([&](int row, int b, float bias) {
      publish(hidden + b * p_.op.shape.ffn + (f.first + row), narrow<A>(gelu(sum(row, b) + bias)));
    });
  }

  /// x from the hidden units. The next layer's h goes into the operand buffer when they have been multiplied.
  __device__ void narrow_ffn(int layer) {
    const DecodeLayer<Device, A>& w = layers_[layer];
    const Range c = share_.channels;
    double* const segment_sum = p_.op.segment_sum + std::int64_t{layer} * batch_ * dim_;
    struct Loaded {
      float bias;
      double sum;
    };
    const Outputs outputs(c.count, batch_, [&](int row, int b) {
      return Loaded{value_or_zero(w.ffn_out_bias, c.first + row), __ldcg(segment_sum + at(row, b))};
    });
    const bool more = layer + 1 < p_.op.shape.layers;
    float4 state[kHeldState] = {};
    if (more) ask_state(layer + 1, state);
    const Segment s = share_.of(Product::kFfnOut, w, p_.op.shape, p_.plan.panel_bytes);
    const A* const hidden = vectors<A>(layer, p_.plan.ffn);
    await_announcements(layer, Point::kFfn);
    for (int panel = 0; panel < s.row_bytes; panel += s.panel_bytes) {
      if (panel > 0) barrier();  // the panel before has been multiplied
      const int bytes = min(s.panel_bytes, s.row_bytes - panel);
      const Operand x = gather(hidden + panel / int{sizeof(A)}, batch_, p_.op.shape.ffn, bytes);
      multiply<A>(s, panel, 0, s.rows(), x, batch_, ring_, sums_, 0, c.count);
    }
    announce(layer, Point::kOutput);
    barrier();
    float* const output = vectors<float>(layer, p_.plan.output);
    outputs.each([&](int row, int b, const Loaded& loaded) {
      float& residual = local(Local::kResidual, row, b);
      residual += sum(row, b) + loaded.bias;
      publish(output + at(row, b), residual);
      segment_sum[at(row, b)] = loaded.sum + static_cast<double>(residual);
    });
    if (more) put_state(layer + 1, state);
  }

  /// Logits from the last layer's x.
  __device__ void predict(int layer) {
    const DecodeShape& shape = p_.op.shape;
    const Segment s = segment(p_.op.head, share_.vocab, 1, shape.vocab, shape.dim);
    const Operand x = normalise(p_.op.norm, layer, Point::kOutput, p_.plan.output);
    for (int first = 0; first < s.rows(); first += p_.plan.sums_rows) {
      const int rows = min(p_.plan.sums_rows, s.rows() - first);
      multiply<A>(s, 0, first, first + rows, x, batch_, ring_, sums_, 0, 0);
      barrier();
      for (int i = thread(); i < rows * batch_; i += kConsumers) {
        p_.op.logits[i / rows * shape.vocab + share_.vocab.first + first + i % rows] = sum(i % rows, i / rows);
      }
      barrier();
    }
  }

  const DecodeParams<A>& p_;
  const DecodeLayer<Device, A>* layers_;
  Ring ring_;
  Share share_;
  int batch_, dim_;
  std::byte* operand_;
  float* sums_;
  float* norm_sums_;
  float* local_;
  std::uint32_t* header_;
  std::uint32_t turn_;
  std::byte* set_;
};

}  // namespace mmrec::kernels
