// A random model of any shape, composed (models/mmrec/cuda/compose.cpp), and its decode step in float64; and the terms
// of such references. Operands of products are rounded to A where the device rounds them; everything else is
// exact.
#pragma once

#include "kernels/cuda/gemm/compact.h"
#include "models/mmrec/fused_ops.h"
#include "models/mmrec/mmrec.h"
#include "tests/ops/op_test.h"

namespace mmrec::kernels::test {

using Vector = std::vector<double>;

template <class A>
double rounded(double x) {
  return static_cast<double>(to_float(from_float<A>(static_cast<float>(x))));
}
template <class A>
Vector round_all(Vector x) {
  for (double& v : x) v = rounded<A>(v);
  return x;
}

/// W x + bias.
template <class A>
Vector affine(const std::vector<A>& weight, const std::vector<float>& bias, const double* x) {
  const std::size_t cols = weight.size() / bias.size();
  return parallel_map(std::ssize(bias), [&](std::int64_t row) {
    const A* w = weight.data() + static_cast<std::size_t>(row) * cols;
    double sum = static_cast<double>(bias[static_cast<std::size_t>(row)]);
    for (std::size_t k = 0; k < cols; ++k) sum += static_cast<double>(to_float(w[k])) * x[k];
    return sum;
  });
}

/// gelu(W x + bias), or relu; rounded.
template <class A>
Vector hidden(const std::vector<A>& weight, const std::vector<float>& bias, const Vector& x, bool relu = false) {
  Vector y = affine(weight, bias, x.data());
  for (double& v : y) v = rounded<A>(relu ? std::max(v, 0.0) : gelu(v));
  return y;
}

/// rmsnorm(x; weight), rounded behind the scale; or before it, as a whole step by one kernel does in BFloat16.
template <class A>
Vector rmsnorm(const Vector& x, const std::vector<float>& weight, bool rounds_first = false) {
  double sum = 0.0;
  for (const double v : x) sum += v * v;
  const double scale = 1.0 / (std::sqrt(sum / static_cast<double>(x.size())) + 1e-6);
  Vector y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double weighted = static_cast<double>(weight[i]) * x[i];
    y[i] = rounds_first ? rounded<A>(weighted) * scale : rounded<A>(weighted * scale);
  }
  return y;
}

/// softmax(q · slots / √(width - padding)) · slots of every head, rounded; slots [count, D]. A single slot needs no
/// query.
template <class A>
Vector attended(const Vector& q, const Vector& slots, std::int64_t heads, std::int64_t padding) {
  const std::int64_t dim = std::ssize(q), width = dim / heads, count = std::ssize(slots) / dim;
  const Vector query = count > 1 ? q : Vector(q.size());
  Vector all;
  for (std::int64_t first = 0; first < dim; first += width) {
    const Vector head = attend(query.data() + first, slots.data() + first, dim, count, 0, width,
                               1.0 / std::sqrt(static_cast<double>(width - padding)));
    all.insert(all.end(), head.begin(), head.end());
  }
  return round_all<A>(all);
}

/// State and inputs of a step, in host memory; B sequences.
struct DecodeState {
  std::vector<float> h, memory;
  std::vector<double> segment_sum;
};

template <class A>
class DecodeModel {
 public:
  using Layer = models::LayerFields<std::vector<A>, std::vector<float>>;
  /// Of the compact rows of shape.formats: numbers are multiples of them, which A holds exactly.
  using Scales = models::LayerFields<std::vector<float>, NoVector>;

  explicit DecodeModel(const DecodeShape& s) : shape(s) {
    std::uint64_t stream = 1;
    const auto norm = [&] { return random_uniform<float>(size(s.dim), 0.5, 1.5, stream++); };
    const auto dense = [&](std::vector<A>& weight, std::vector<float>& bias, std::int64_t rows, std::int64_t cols) {
      weight = random_normal<A>(size(rows * cols), 0.0, 1.0 / std::sqrt(static_cast<double>(cols)), stream);
      bias = random_normal<float>(size(rows), 0.0, 0.3, stream + 1);
      stream += 2;
    };
    for (std::int64_t l = 0; l < s.layers; ++l) {
      Layer& w = layers.emplace_back();
      dense(w.qvzk, w.qvzk_bias, 4 * s.dim, s.dim);
      dense(w.gate, w.gate_bias, 2 * s.dim, s.dim);
      std::fill(w.gate_bias.begin() + s.dim, w.gate_bias.end(), 0.0F);  // the second half has none
      dense(w.gamma_in, w.gamma_in_bias, s.gate_hidden, s.dim);
      dense(w.gamma_up, w.gamma_up_bias, s.dim, s.gate_hidden);
      if (!s.dpg) dense(w.context_in, w.context_in_bias, s.gate_hidden, s.dim);
      if (!s.dpg) dense(w.context_up, w.context_up_bias, s.dim, s.gate_hidden);
      dense(w.memory_q, w.memory_q_bias, s.dim, s.dim);
      dense(w.memory_out, w.memory_out_bias, s.dim, s.dim);
      dense(w.ffn_in, w.ffn_in_bias, s.ffn, s.dim);
      dense(w.ffn_out, w.ffn_out_bias, s.dim, s.ffn);
      w.norm1 = norm();
      w.norm2 = norm();
    }
    norm_weight = norm();
    embedding = random_normal<A>(size(s.vocab * s.dim), 0.0, 1.0, stream++);
    std::vector<float> none;
    dense(head, none, s.vocab, s.dim);
    for (Layer& w : layers) {
      const auto quantize_field = [&]<class Format>(const models::Field& /*field*/, auto& weight, const Format& format,
                                                    auto& to) {
        if constexpr (std::is_same_v<Format, WeightFormat>) to = quantize(weight, cols_of(weight, w), format);
      };
      models::visit_layer(quantize_field, w, s.formats, scales.emplace_back());
    }
    head_scales = quantize(head, s.dim, s.formats.head);
  }
  /// Inputs of one of a layer's matrices.
  std::int64_t cols_of(const std::vector<A>& weight, const Layer& w) const {
    return &weight == &w.ffn_out                                ? shape.ffn
           : &weight == &w.gamma_up || &weight == &w.context_up ? shape.gate_hidden
                                                                : shape.dim;
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
        const Layer& w = layers[size(l)];
        for (const double c : affine(w.memory_out, w.memory_out_bias, slot.data()))
          all.push_back(static_cast<float>(c));
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
  Vector predict(const Vector& x) const {
    return affine(head, std::vector<float>(size(shape.vocab)), norm(x, norm_weight).data());
  }

  DecodeShape shape;
  std::vector<Layer> layers;
  std::vector<float> norm_weight;
  std::vector<A> embedding;
  std::vector<A> head;
  float mix = 0.1F;
  std::vector<Scales> scales;
  std::vector<float> head_scales;

 private:
  /// Rounds the weights that share a scale to numbers of the format times a power of two, which is returned.
  static std::vector<float> quantize(std::vector<A>& weight, std::int64_t cols, WeightFormat format) {
    std::vector<float> all;
    if (!is_quantized(format.code)) return all;
    const auto inputs = size(inputs_of_scale(format, cols));
    const double largest = format.code == DType::kI8 ? 127.0 : 7.0;
    for (std::size_t first = 0; first < weight.size(); first += inputs) {
      double most = 0.0;
      for (std::size_t i = first; i < first + inputs; ++i) most = std::max(most, std::abs(as_double(weight[i])));
      const double scale = std::exp2(std::ceil(std::log2(most / largest)));
      for (std::size_t i = first; i < first + inputs; ++i) {
        weight[i] = from_float<A>(static_cast<float>(std::nearbyint(as_double(weight[i]) / scale) * scale));
      }
      all.push_back(static_cast<float>(scale));
    }
    return all;
  }
  static double as_double(A x) { return static_cast<double>(to_float(x)); }
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
  Vector rounded_row(const float* row) const { return round_all<A>(Vector(row, row + shape.dim)); }
  static Vector norm(const Vector& x, const std::vector<float>& weight) {
    return rmsnorm<A>(x, weight, std::is_same_v<A, BFloat16>);
  }

  void block(const Layer& w, Vector& x, float* h, const float* memory, std::int64_t slots) const {
    const std::size_t dim = x.size();
    const Vector u = norm(x, w.norm1);
    const Vector projected = round_all<A>(affine(w.qvzk, w.qvzk_bias, u.data()));
    const double *q = projected.data(), *v = q + dim, *z = v + dim, *zm = z + dim;
    const Vector gates = affine(w.gate, w.gate_bias, rounded_row(h).data());
    const Vector decay = affine(w.gamma_up, w.gamma_up_bias, hidden(w.gamma_in, w.gamma_in_bias, u, shape.dpg).data());
    const Vector other =
        shape.dpg ? Vector()
                  : affine(w.context_up, w.context_up_bias, hidden(w.context_in, w.context_in_bias, u).data());
    const auto mu = static_cast<double>(mix);
    Vector y(dim);
    for (std::size_t i = 0; i < dim; ++i) {
      const double gamma = std::clamp(sigmoid(decay[i]) * (shape.dpg ? 1.0 : sigmoid(other[i])), 1e-6, 1.0 - 1e-6);
      const double s = sigmoid(gates[i]);
      const double g = sigmoid(zm[i] + gates[dim + i]);
      h[i] = static_cast<float>((gamma + mu * (1.0 - g + gamma)) * static_cast<double>(h[i]) + z[i] * (s + mu * g));
      y[i] = x[i] + static_cast<double>(h[i]) + 0.1 * v[i];
    }
    Vector query = affine(w.memory_q, w.memory_q_bias, rounded_row(h).data());
    for (std::size_t i = 0; i < dim; ++i) query[i] = rounded<A>(query[i] + 0.5 * q[i]);
    const Vector held(memory, memory + static_cast<std::size_t>(slots) * dim);
    const Vector mixed =
        affine(w.memory_out, w.memory_out_bias, attended<A>(query, held, shape.heads, shape.head_padding).data());
    for (std::size_t i = 0; i < dim; ++i) y[i] += mixed[i];
    const Vector out = affine(w.ffn_out, w.ffn_out_bias, hidden(w.ffn_in, w.ffn_in_bias, norm(y, w.norm2)).data());
    for (std::size_t i = 0; i < dim; ++i) x[i] = y[i] + out[i];
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
    for (const auto& w : model.layers) {
      const auto keep_all = [&]<class T>(const models::Field& /*field*/, const std::vector<T>& from, const T*& to) {
        if (from.empty()) return;
        if constexpr (std::is_same_v<T, A>) {
          to = keep(from, weights_);
        } else {
          to = keep(from, floats_);
        }
      };
      models::visit_layer(keep_all, w, layers.emplace_back());
    }
    layers_ = upload(cuda_, layers);
    std::vector<CompactLayer<Device>> compact;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const auto& w = model.layers[l];
      const auto make = [&]<class From, class Format>(const models::Field& /*field*/, const From& from,
                                                      const Format& format, const auto& scales, const auto& plain,
                                                      auto& to) {
        if constexpr (std::is_same_v<Format, WeightFormat>) {
          if (!from.empty()) to = compact_or_plain(plain, from.size(), model.cols_of(from, w), format, scales);
        }
      };
      models::visit_layer(make, w, model.shape.formats, model.scales[l], layers[l], compact.emplace_back());
    }
    compact_layers_ = upload(cuda_, compact);
    put(state.h, h_);
    put(state.memory, memory_);
    put(state.segment_sum, segment_sum_);
    put(model.context(state), context_);
    op_ = {.shape = model.shape,
           .layers = layers_.data(),
           .embedding = keep(model.embedding, weights_),
           .head = keep(model.head, weights_),
           .norm = keep(model.norm_weight, floats_),
           .compact_layers = compact_layers_.data(),
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
    op_.compact_head =
        compact_or_plain(op_.head, model.head.size(), model.shape.dim, model.shape.formats.head, model.head_scales);
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
  const T* keep(const std::vector<T>& host, std::vector<DeviceBuffer<T>>& in) {
    in.push_back(upload(cuda_, host));
    return in.back().data();
  }

  const std::byte* compact_or_plain(const A* plain, std::size_t count, std::int64_t cols, WeightFormat format,
                                    const std::vector<float>& scales) {
    if (!is_quantized(format.code)) return reinterpret_cast<const std::byte*>(plain);
    const std::int64_t rows = static_cast<std::int64_t>(count) / cols;
    compact_.emplace_back(static_cast<std::size_t>(rows * compact_row_bytes(format, cols)));
    compact_rows(cuda_, {.from = {plain, kDTypeOf<A>, rows, cols},
                         .scales = keep(scales, floats_),
                         .group = format.group,
                         .rows = compact_view(compact_.back().data(), format, rows, cols),
                         .to = compact_.back().data()});
    return compact_.back().data();
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
  std::vector<DeviceBuffer<std::byte>> compact_;
  DeviceBuffer<DecodeLayer<Device, A>> layers_;
  DeviceBuffer<CompactLayer<Device>> compact_layers_;
  DecodeStep<Device, A> op_;
};

}  // namespace mmrec::kernels::test
