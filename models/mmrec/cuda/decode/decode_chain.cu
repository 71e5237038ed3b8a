// A decode step of many sequences: products that read every weight once for all of them, and between the products as
// few kernels as their dependences allow.
//
//     BeginRow         x = the tokens' embeddings, u = rmsnorm(x; norm1); ĥ = h₋₁ rounded, of all layers
//   layer by layer     q, v, z, k = u W_qvzkᵀ
//                      zm = z W_mzᵀ, and the hidden layers of the decay networks of z and k
//                      their outputs, and S = ĥ W_gateᵀ: what the recurrence's gates see of the state
//     AdvanceRow       γ, h, x += h + 0.1 v + c, u = rmsnorm(x; norm2)
//                      where two memory slots are filled: x += W_o attend(W_q' h + ½ q), u = rmsnorm(x; norm2)
//                      x += W_2 gelu(u W_1ᵀ)
//     RememberRow      sum += x, u = rmsnorm(x; norm1 of the next layer, or the model's norm)
//   logits = u W_headᵀ
//
// Seven launches a layer, each of which overlaps its predecessor's end; a product has weights on their way by then. S
// depends on nothing of this step: it is multiplied beside small products whose latency would leave memory idle.
//
// Bytes: all weights once; activations stay in L2, but for the segment sums, 16 D bytes a sequence and layer. A row's
// bits depend on the row alone, as those of linear and rmsnorm do.
#include "models/mmrec/cuda/decode/decode_chain.h"

#include <span>
#include <type_traits>

#include "models/mmrec/cuda/decode/decode_chain_rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr std::int64_t kLeastBatch = 9;

/// The step's activations, one after another in DecodeStep::exchange. Elements of A have 2 bytes.
struct ChainPlan {
  // Offsets in bytes.
  std::int64_t x, u, h_rounded, gates, qvzk, gate_z, hidden, decay, attended, ffn, end = 0;
  // Elements of a row.
  std::int64_t qvzk_width, networks;

  explicit ChainPlan(const DecodeShape& s) : qvzk_width((s.dpg ? 3 : 4) * s.dim), networks(s.dpg ? 1 : 2) {
    constexpr std::int64_t kHalf = 2;
    constexpr std::int64_t kFloat = 4;
    const auto place = [&](std::int64_t elements, std::int64_t size) {
      constexpr std::int64_t kAlign = 256;
      const std::int64_t offset = end;
      end += ceil_div(s.batch * elements * size, kAlign) * kAlign;
      return offset;
    };
    x = place(s.dim, kFloat);
    u = place(s.dim, kHalf);
    h_rounded = place(s.layers * s.dim, kHalf);
    gates = place(2 * s.dim, kFloat);
    qvzk = place(qvzk_width, kHalf);
    gate_z = place(s.dim, kHalf);
    hidden = place(networks * s.gate_hidden, kHalf);
    decay = place(networks * s.dim, kFloat);
    attended = place(s.dim, kHalf);
    ffn = place(s.ffn, kHalf);
  }
};

template <class A>
class Chain {
 public:
  Chain(Cuda& cuda, const DecodeStep<Device, A>& op) : cuda_(cuda), op_(op), shape_(op.shape), plan_(op.shape) {}

  void run() {
    norm(BeginRow<A>{.table = op_.embedding,
                     .tokens = op_.tokens,
                     .x = x(),
                     .layers = static_cast<unsigned>(shape_.layers),
                     .h = op_.h,
                     .slot_bytes = op_.slot_bytes,
                     .h_rounded = at<A>(plan_.h_rounded)},
         layer(0).norm1);
    for (std::int64_t l = 0; l < shape_.layers; ++l) {
      advance(l);
      if (op_.slots > 1) attend(l);
      feed_forward(l);
      norm(RememberRow{{x()}, op_.segment_sum + l * dim(), op_.slot_bytes},
           l + 1 < shape_.layers ? layer(l + 1).norm1 : op_.norm);
    }
    linear_one<float>(
        {.x = u(), .weight = weight(op_.head, shape_.vocab, dim()), .y = of_slots(op_.logits, shape_.vocab)});
  }

 private:
  template <class T>
  using Matrix = MatrixView<T, Device>;
  template <class Y>
  using Job = Linear<Device, A, Y>;

  std::int64_t batch() const { return shape_.batch; }
  std::int64_t dim() const { return shape_.dim; }
  const DecodeLayer<Device, A>& layer(std::int64_t l) const { return op_.layers_on_host[l]; }

  template <class T>
  T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(op_.exchange) + offset);
  }
  /// A row of every sequence's slot.
  template <class T>
  Matrix<T> of_slots(T* first, std::int64_t cols) const {
    return {first, batch(), cols, op_.slot_bytes / std::int64_t{sizeof(T)}};
  }
  Matrix<float> x() const { return {at<float>(plan_.x), batch(), dim()}; }
  Matrix<A> u() const { return {at<A>(plan_.u), batch(), dim()}; }
  Matrix<A> qvzk() const { return {at<A>(plan_.qvzk), batch(), plan_.qvzk_width}; }
  Matrix<A> q() const { return qvzk().middle_cols(0, dim()); }
  Matrix<A> v() const { return qvzk().middle_cols(dim(), dim()); }
  Matrix<A> z() const { return qvzk().middle_cols(2 * dim(), dim()); }
  Matrix<A> k() const { return qvzk().middle_cols(3 * dim(), dim()); }
  Matrix<A> gate_z() const { return {at<A>(plan_.gate_z), batch(), dim()}; }
  Matrix<A> attended() const { return {at<A>(plan_.attended), batch(), dim()}; }
  Matrix<A> ffn() const { return {at<A>(plan_.ffn), batch(), shape_.ffn}; }
  Matrix<A> h_rounded(std::int64_t l) const { return {at<A>(plan_.h_rounded) + l * batch() * dim(), batch(), dim()}; }
  Matrix<float> gates() const { return {at<float>(plan_.gates), batch(), 2 * dim()}; }
  // Of decay network 0, that of z, or 1, that of k.
  Matrix<A> hidden(std::int64_t network) const {
    return {at<A>(plan_.hidden) + network * batch() * shape_.gate_hidden, batch(), shape_.gate_hidden};
  }
  Matrix<float> decay(std::int64_t network) const {
    return {at<float>(plan_.decay) + network * batch() * dim(), batch(), dim()};
  }

  static WeightView<Device> weight(const A* data, std::int64_t out, std::int64_t in) {
    return {data, std::is_same_v<A, Float16> ? DType::kF16 : DType::kBF16, out, in};
  }
  template <class Y>
  void linear_one(const Job<Y>& job) {
    linear(cuda_, std::span(&job, 1));
  }
  template <class Source>
  void norm(const Source& source, const float* scale) {
    norm_rows<kHeldGroups>(cuda_, source, scale, u());
  }

  // From u to the new state, the residual stream behind it, and u of the feed-forward network.
  void advance(std::int64_t l) {
    const DecodeLayer<Device, A>& w = layer(l);
    const std::int64_t g = shape_.gate_hidden;
    linear_one<A>({.x = u(), .weight = weight(w.qvzk, plan_.qvzk_width, dim()), .bias = w.qvzk_bias, .y = qvzk()});
    const Job<A> inner[3] = {{.x = z(), .weight = weight(w.gate_z, dim(), dim()), .bias = w.gate_z_bias, .y = gate_z()},
                             {.x = z(),
                              .weight = weight(w.gamma_in, g, dim()),
                              .bias = w.gamma_in_bias,
                              .y = hidden(0),
                              .activation = shape_.dpg ? Activation::kRelu : Activation::kGelu},
                             {.x = k(),
                              .weight = weight(w.context_in, g, dim()),
                              .bias = w.context_in_bias,
                              .y = hidden(1),
                              .activation = Activation::kGelu}};
    linear(cuda_, std::span<const Job<A>>(inner).first(static_cast<std::size_t>(1 + plan_.networks)));
    const Job<float> outer[3] = {
        {.x = h_rounded(l), .weight = weight(w.gate, 2 * dim(), dim()), .y = gates()},
        {.x = hidden(0), .weight = weight(w.gamma_up, dim(), g), .bias = w.gamma_up_bias, .y = decay(0)},
        {.x = hidden(1), .weight = weight(w.context_up, dim(), g), .bias = w.context_up_bias, .y = decay(1)}};
    const auto jobs = std::span<const Job<float>>(outer).first(static_cast<std::size_t>(1 + plan_.networks));
    linear(cuda_, jobs);

    AdvanceRow<A> row{.z = z(),
                      .v = v(),
                      .zm = gate_z(),
                      .gates = gates(),
                      .gate_bias = w.gate_bias,
                      .decay = decay(0),
                      .context_decay = shape_.dpg ? Matrix<const float>() : decay(1),
                      .mix = op_.mdi_mix,
                      .h = of_slots(op_.h + l * dim(), dim()),
                      .h_rounded = h_rounded(l),
                      .x = x()};
    if (op_.slots == 0) row.c = {w.memory_out_bias, batch(), dim(), 0};
    if (op_.slots == 1) row.c = of_slots(op_.context + l * dim(), dim());
    norm(row, w.norm2);
  }

  // x += W_o attend(W_q' h + ½ q; memory) + b_o, and u again.
  void attend(std::int64_t l) {
    const DecodeLayer<Device, A>& w = layer(l);
    linear_one<A>({.x = h_rounded(l),
                   .weight = weight(w.memory_q, dim(), dim()),
                   .bias = w.memory_q_bias,
                   .y = attended(),
                   .residual = q(),
                   .residual_scale = 0.5F});
    const SequenceView<A, Device> query(attended().data, batch(), 1, dim());
    SequenceView<const float, Device> slots(op_.memory + l * shape_.memory_slots * dim(), batch(), op_.slots, dim());
    slots.batch_stride = op_.slot_bytes / std::int64_t{sizeof(float)};
    memory_attention(cuda_,
                     MemoryAttention<Device, A>{.q = query, .slots = slots, .heads = shape_.heads, .out = query});
    linear_one<float>({.x = attended(),
                       .weight = weight(w.memory_out, dim(), dim()),
                       .bias = w.memory_out_bias,
                       .y = x(),
                       .residual = x()});
    rmsnorm(cuda_, Matrix<const float>(x()), w.norm2, u());
  }

  void feed_forward(std::int64_t l) {
    const DecodeLayer<Device, A>& w = layer(l);
    linear_one<A>({.x = u(),
                   .weight = weight(w.ffn_in, shape_.ffn, dim()),
                   .bias = w.ffn_in_bias,
                   .y = ffn(),
                   .activation = Activation::kGelu});
    linear_one<float>({.x = ffn(),
                       .weight = weight(w.ffn_out, dim(), shape_.ffn),
                       .bias = w.ffn_out_bias,
                       .y = x(),
                       .residual = x()});
  }

  Cuda& cuda_;
  const DecodeStep<Device, A>& op_;
  const DecodeShape& shape_;
  ChainPlan plan_;
};

}  // namespace

bool decode_chain_supported(const Cuda& cuda, const DecodeShape& shape, std::size_t element) {
  constexpr std::int64_t kPiece = 8;  // elements of 16 bytes
  return cuda.compute_capability() == 90 && element == 2 && shape.batch >= kLeastBatch && shape.dim % kPiece == 0 &&
         shape.ffn % kPiece == 0 && shape.gate_hidden % kPiece == 0;
}

std::size_t decode_chain_bytes(const DecodeShape& shape) { return static_cast<std::size_t>(ChainPlan(shape).end); }

template <class A>
void decode_chain(Cuda& cuda, const DecodeStep<Device, A>& op) {
  Chain<A>(cuda, op).run();
}

template void decode_chain(Cuda&, const DecodeStep<Device, BFloat16>&);
template void decode_chain(Cuda&, const DecodeStep<Device, Float16>&);

}  // namespace mmrec::kernels
