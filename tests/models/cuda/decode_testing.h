// A random model of any shape and its decode step in float64, after the equations of models/mmrec/block.h: operands
// of products are rounded to A where the device rounds them, everything else is exact.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "models/mmrec/fused_ops.h"
#include "tests/kernels/cuda/cuda_testing.h"

namespace mmrec::kernels::test {

using Vector = std::vector<double>;

template <class A>
double rounded(double x) {
  return static_cast<double>(to_float(from_float<A>(static_cast<float>(x))));
}

/// A matrix [out, in] with its bias.
template <class A>
struct Dense {
  std::vector<A> weight;
  std::vector<float> bias;
  std::size_t in = 0;

  Dense() = default;
  Dense(std::int64_t rows, std::int64_t cols, std::uint64_t& stream)
      : weight(random_normal<A>(static_cast<std::size_t>(rows * cols), 0.0, 1.0 / std::sqrt(static_cast<double>(cols)),
                                stream)),
        bias(random_normal<float>(static_cast<std::size_t>(rows), 0.0, 0.3, stream + 1)),
        in(static_cast<std::size_t>(cols)) {
    stream += 2;
  }
  double operator()(std::size_t row, const double* x) const {
    double sum = static_cast<double>(bias[row]);
    for (std::size_t k = 0; k < in; ++k) sum += static_cast<double>(to_float(weight[row * in + k])) * x[k];
    return sum;
  }
  Vector operator()(const double* x) const {
    Vector y(bias.size());
    parallel_for(static_cast<std::int64_t>(y.size()),
                 [&](std::int64_t i) { y[static_cast<std::size_t>(i)] = (*this)(static_cast<std::size_t>(i), x); });
    return y;
  }
};

template <class A>
struct Layer {
  Dense<A> qvzk, gate, gate_z, gamma_in, gamma_up, context_in, context_up, memory_q, memory_out, ffn_in, ffn_out;
  std::vector<float> norm1, norm2;
};

/// State and inputs of a step, in host memory; B sequences.
struct DecodeState {
  std::vector<float> h, memory;
  std::vector<double> segment_sum;
};

template <class A>
class DecodeModel {
 public:
  explicit DecodeModel(const DecodeShape& s) : shape(s) {
    std::uint64_t stream = 1;
    const auto norm = [&] { return random_uniform<float>(size(s.dim), 0.5, 1.5, stream++); };
    for (std::int64_t l = 0; l < s.layers; ++l) {
      const auto dense = [&](std::int64_t rows, std::int64_t cols) { return Dense<A>(rows, cols, stream); };
      Layer<A> w;
      w.qvzk = dense((s.dpg ? 3 : 4) * s.dim, s.dim);
      w.gate = dense(2 * s.dim, s.dim);
      std::fill(w.gate.bias.begin() + s.dim, w.gate.bias.end(), 0.0F);  // the second half has none
      w.gate_z = dense(s.dim, s.dim);
      w.gamma_in = dense(s.gate_hidden, s.dim);
      w.gamma_up = dense(s.dim, s.gate_hidden);
      if (!s.dpg) w.context_in = dense(s.gate_hidden, s.dim);
      if (!s.dpg) w.context_up = dense(s.dim, s.gate_hidden);
      w.memory_q = dense(s.dim, s.dim);
      w.memory_out = dense(s.dim, s.dim);
      w.ffn_in = dense(s.ffn, s.dim);
      w.ffn_out = dense(s.dim, s.ffn);
      w.norm1 = norm();
      w.norm2 = norm();
      layers.push_back(std::move(w));
    }
    norm_weight = norm();
    embedding = random_normal<A>(size(s.vocab * s.dim), 0.0, 1.0, stream++);
    head = Dense<A>(s.vocab, s.dim, stream);
    std::fill(head.bias.begin(), head.bias.end(), 0.0F);
  }

  DecodeState random_state(std::uint64_t stream) const {
    const DecodeShape& s = shape;
    return {random_normal<float>(size(s.layers * s.batch * s.dim), 0.0, 0.7, stream),
            random_normal<float>(size(s.layers * s.batch * s.memory_slots * s.dim), 0.0, 0.7, stream + 1),
            std::vector<double>(size(s.layers * s.batch * s.dim), 0.5)};
  }

  /// c of every layer and sequence where one slot is filled, [L, B, D].
  std::vector<float> context(const DecodeState& state) const {
    std::vector<float> all;
    for (std::int64_t l = 0; l < shape.layers; ++l) {
      for (std::int64_t b = 0; b < shape.batch; ++b) {
        const Vector slot = rounded_row(&state.memory[size(((l * shape.batch + b) * shape.memory_slots) * shape.dim)]);
        for (const double c : layers[size(l)].memory_out(slot.data())) all.push_back(static_cast<float>(c));
      }
    }
    return all;
  }

  /// Advances sequence b by a token; returns its logits.
  Vector step(DecodeState& state, std::int64_t b, int token, std::int64_t slots) const {
    const std::size_t dim = size(shape.dim);
    Vector x(dim);
    for (std::size_t i = 0; i < dim; ++i) {
      x[i] = static_cast<double>(to_float(embedding[static_cast<std::size_t>(token) * dim + i]));
    }
    for (std::int64_t l = 0; l < shape.layers; ++l) {
      const std::size_t row = size((l * shape.batch + b) * shape.dim);
      block(layers[size(l)], x, &state.h[row], &state.memory[row * size(shape.memory_slots)], slots);
      for (std::size_t i = 0; i < dim; ++i) state.segment_sum[row + i] += x[i];
    }
    return predict(x);
  }
  /// Logits of the last block's output.
  Vector predict(const Vector& x) const { return head(rmsnorm(x, norm_weight).data()); }

  DecodeShape shape;
  std::vector<Layer<A>> layers;
  std::vector<float> norm_weight;
  std::vector<A> embedding;
  Dense<A> head;
  float mix = 0.1F;

 private:
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
  static double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
  static double gelu(double x) { return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0))); }
  static Vector round_all(Vector x) {
    for (double& v : x) v = rounded<A>(v);
    return x;
  }
  Vector rounded_row(const float* row) const { return round_all(Vector(row, row + shape.dim)); }
  /// The kernel rounds to BFloat16 before it scales.
  Vector rmsnorm(const Vector& x, const std::vector<float>& weight) const {
    double sum = 0.0;
    for (const double v : x) sum += v * v;
    const double scale = 1.0 / (std::sqrt(sum / static_cast<double>(x.size())) + 1e-6);
    Vector y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double weighted = static_cast<double>(weight[i]) * x[i];
      y[i] = std::is_same_v<A, BFloat16> ? rounded<A>(weighted) * scale : rounded<A>(weighted * scale);
    }
    return y;
  }
  static Vector hidden(const Dense<A>& layer, const double* x, bool relu) {
    Vector y = layer(x);
    for (double& v : y) v = relu ? std::max(v, 0.0) : gelu(v);
    return round_all(y);
  }

  void block(const Layer<A>& w, Vector& x, float* h, const float* memory, std::int64_t slots) const {
    const std::size_t dim = x.size();
    const Vector qvzk = round_all(w.qvzk(rmsnorm(x, w.norm1).data()));
    const double *q = qvzk.data(), *v = q + dim, *z = v + dim, *k = z + dim;
    const Vector gates = w.gate(rounded_row(h).data());
    const Vector zm = round_all(w.gate_z(z));
    const Vector decay = w.gamma_up(hidden(w.gamma_in, z, shape.dpg).data());
    const Vector other = shape.dpg ? Vector() : w.context_up(hidden(w.context_in, k, false).data());
    const auto mu = static_cast<double>(mix);
    Vector y(dim);
    for (std::size_t i = 0; i < dim; ++i) {
      const double gamma = std::clamp(sigmoid(decay[i]) * (shape.dpg ? 1.0 : sigmoid(other[i])), 1e-6, 1.0 - 1e-6);
      const double s = sigmoid(gates[i]);
      const double g = sigmoid(zm[i] + gates[dim + i]);
      h[i] = static_cast<float>((gamma + mu * (1.0 - g + gamma)) * static_cast<double>(h[i]) + z[i] * (s + mu * g));
      y[i] = x[i] + static_cast<double>(h[i]) + 0.1 * v[i];
    }
    const Vector mixed = attend(w, q, h, memory, slots);
    for (std::size_t i = 0; i < dim; ++i) y[i] += mixed[i];
    const Vector out = w.ffn_out(hidden(w.ffn_in, rmsnorm(y, w.norm2).data(), false).data());
    for (std::size_t i = 0; i < dim; ++i) x[i] = y[i] + out[i];
  }

  Vector attend(const Layer<A>& w, const double* q, const float* h, const float* memory, std::int64_t slots) const {
    if (slots == 0) return {w.memory_out.bias.begin(), w.memory_out.bias.end()};
    const std::size_t dim = size(shape.dim);
    Vector query = w.memory_q(rounded_row(h).data());
    for (std::size_t i = 0; i < dim; ++i) query[i] = rounded<A>(query[i] + 0.5 * q[i]);
    Vector attended(dim);
    const std::size_t width = dim / size(shape.heads);
    for (std::size_t first = 0; first < dim; first += width) {
      Vector weight(size(slots));
      double all = 0.0;
      for (std::size_t j = 0; j < weight.size(); ++j) {
        double score = 0.0;
        for (std::size_t i = first; i < first + width; ++i)
          score += query[i] * static_cast<double>(memory[j * dim + i]);
        all += weight[j] = std::exp(score / std::sqrt(static_cast<double>(width)));
      }
      for (std::size_t i = first; i < first + width; ++i) {
        for (std::size_t j = 0; j < weight.size(); ++j) {
          attended[i] += weight[j] / all * static_cast<double>(memory[j * dim + i]);
        }
      }
    }
    return w.memory_out(round_all(attended).data());
  }
};

/// A model and its state on the device, and steps of it.
template <class A>
class DecodeRun {
 public:
  DecodeRun(Cuda& cuda, const DecodeModel<A>& model, const DecodeState& state)
      : cuda_(cuda),
        shape_(model.shape),
        h_{place_in_slot(shape_.layers, shape_.dim, sizeof(float))},
        memory_{place_in_slot(shape_.layers, shape_.memory_slots * shape_.dim, sizeof(float))},
        context_{place_in_slot(shape_.layers, shape_.dim, sizeof(float))},
        logits_{place_in_slot(1, shape_.vocab, sizeof(float))},
        segment_sum_{place_in_slot(shape_.layers, shape_.dim, sizeof(double))},
        state_(slot_bytes_ * static_cast<std::size_t>(shape_.batch)),
        tokens_(static_cast<std::size_t>(model.shape.batch)),
        exchange_(decode_exchange_bytes(cuda, model.shape, sizeof(A))) {
    std::vector<DecodeLayer<Device, A>> layers;
    for (const Layer<A>& w : model.layers) {
      DecodeLayer<Device, A> l;
      const auto dense = [&](const Dense<A>& from, const A*& weight, const float*& bias) {
        if (from.weight.empty()) return;
        weight = keep(from.weight, weights_);
        bias = keep(from.bias, floats_);
      };
      dense(w.qvzk, l.qvzk, l.qvzk_bias);
      dense(w.gate, l.gate, l.gate_bias);
      dense(w.gate_z, l.gate_z, l.gate_z_bias);
      dense(w.gamma_in, l.gamma_in, l.gamma_in_bias);
      dense(w.gamma_up, l.gamma_up, l.gamma_up_bias);
      dense(w.context_in, l.context_in, l.context_in_bias);
      dense(w.context_up, l.context_up, l.context_up_bias);
      dense(w.memory_q, l.memory_q, l.memory_q_bias);
      dense(w.memory_out, l.memory_out, l.memory_out_bias);
      dense(w.ffn_in, l.ffn_in, l.ffn_in_bias);
      dense(w.ffn_out, l.ffn_out, l.ffn_out_bias);
      l.norm1 = keep(w.norm1, floats_);
      l.norm2 = keep(w.norm2, floats_);
      layers.push_back(l);
    }
    layers_ = place(layers);
    put(state.h, h_);
    put(state.memory, memory_);
    put(state.segment_sum, segment_sum_);
    put(model.context(state), context_);
    op_ = {.shape = model.shape,
           .layers = layers_.data(),
           .embedding = keep(model.embedding, weights_),
           .head = keep(model.head.weight, weights_),
           .norm = keep(model.norm_weight, floats_),
           .mdi_mix = model.mix,
           .tokens = tokens_.data(),
           .h = in_slot<float>(h_),
           .memory = in_slot<float>(memory_),
           .slots = 0,
           .context = in_slot<float>(context_),
           .segment_sum = in_slot<double>(segment_sum_),
           .logits = in_slot<float>(logits_),
           .slot_bytes = static_cast<std::int64_t>(slot_bytes_),
           .exchange = exchange_.data()};
    decode_exchange_clear(cuda, model.shape, sizeof(A), exchange_.data());
  }

  /// Logits [B, V].
  std::vector<float> step(const std::vector<int>& tokens, std::int64_t slots) {
    feed(tokens);
    op_.slots = slots;
    decode_step(cuda_, op_);
    return logits();
  }
  void feed(const std::vector<int>& tokens) {
    cuda_.upload(tokens.data(), tokens_.data(), tokens.size());
    put(std::vector<float>(static_cast<std::size_t>(shape_.batch * shape_.vocab), NAN), logits_);
  }
  std::vector<float> logits() { return fetch<float>(logits_); }
  std::vector<float> h() { return fetch<float>(h_); }
  std::vector<double> segment_sum() { return fetch<double>(segment_sum_); }
  DecodeStep<Device, A>& op() { return op_; }

 private:
  template <class T>
  DeviceBuffer<T> place(const std::vector<T>& host) {
    DeviceBuffer<T> buffer(host.size());
    cuda_.upload(host.data(), buffer.data(), host.size());
    return buffer;
  }
  template <class T>
  const T* keep(const std::vector<T>& host, std::vector<DeviceBuffer<T>>& in) {
    in.push_back(place(host));
    return in.back().data();
  }

  /// A tensor of a slot: rows [layers], one after another. On the host rows are [layers, B].
  struct InSlot {
    std::size_t offset = 0, layers = 0, row = 0;
  };
  InSlot place_in_slot(std::int64_t layers, std::int64_t row, std::size_t size) {
    constexpr std::size_t kAlign = 16;
    const InSlot at = {slot_bytes_, static_cast<std::size_t>(layers), static_cast<std::size_t>(row)};
    slot_bytes_ += (at.layers * at.row * size + kAlign - 1) / kAlign * kAlign;
    return at;
  }
  template <class T>
  T* in_slot(const InSlot& what, std::size_t sequence = 0, std::size_t layer = 0) {
    return reinterpret_cast<T*>(state_.data() + sequence * slot_bytes_ + what.offset) + layer * what.row;
  }
  /// visit(row on the host, row in its slot) for all rows.
  template <class Host, class Visit>
  void for_each_row(Host* host, const InSlot& what, Visit visit) {
    const auto batch = static_cast<std::size_t>(shape_.batch);
    for (std::size_t row = 0; row < what.layers * batch; ++row) {
      visit(host + row * what.row, in_slot<std::remove_const_t<Host>>(what, row % batch, row / batch));
    }
  }
  template <class T>
  void put(const std::vector<T>& host, const InSlot& what) {
    for_each_row(host.data(), what, [&](const T* from, T* to) { cuda_.upload(from, to, what.row); });
  }
  template <class T>
  std::vector<T> fetch(const InSlot& what) {
    std::vector<T> host(what.layers * static_cast<std::size_t>(shape_.batch) * what.row);
    for_each_row(host.data(), what, [&](T* to, const T* from) { cuda_.download(from, to, what.row); });
    return host;
  }

  Cuda& cuda_;
  DecodeShape shape_;
  std::size_t slot_bytes_ = 0;
  InSlot h_, memory_, context_, logits_, segment_sum_;
  DeviceBuffer<std::byte> state_;
  DeviceBuffer<int> tokens_;
  DeviceBuffer<std::byte> exchange_;
  std::vector<DeviceBuffer<A>> weights_;
  std::vector<DeviceBuffer<float>> floats_;
  DeviceBuffer<DecodeLayer<Device, A>> layers_;
  DecodeStep<Device, A> op_;
};

}  // namespace mmrec::kernels::test
