// The one-kernel decode step against float64, and what must hold to the bit. The reference is a random model of any
// shape, composed (models/mmrec/cuda/compose.cpp), and its decode step. Operands of products are rounded to A where the
// device rounds them; everything else is exact. Long, because its tests share the reference.

#include <initializer_list>

#include "kernels/cuda/gemm/compact.h"
#include "models/mmrec/cuda/ops.h"
#include "models/mmrec/fused_ops.h"
#include "models/mmrec/mmrec.h"
#include "tests/ops/op_test.h"

namespace mmrec::kernels::test {
namespace {

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

/// State and inputs of a step of one sequence, in host memory.
struct DecodeState {
  std::vector<float> h, memory;     // [L, D], [L, M, D]
  std::vector<double> segment_sum;  // [L, D]
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

  /// Of every sequence.
  std::vector<DecodeState> random_states(std::uint64_t stream = 1000) const {
    std::vector<DecodeState> states;
    for (; std::ssize(states) < shape.batch; stream += 2) {
      const std::int64_t cells = shape.layers * shape.dim;
      states.push_back({random_normal<float>(size(cells), 0.0, 0.7, stream),
                        random_normal<float>(size(cells * shape.memory_slots), 0.0, 0.7, stream + 1),
                        Vector(size(cells), 0.5)});
    }
    return states;
  }

  /// c of every layer where one slot is filled, [L, D].
  std::vector<float> context(const DecodeState& state) const {
    std::vector<float> all;
    for (std::int64_t l = 0; l < shape.layers; ++l) {
      const Vector slot = rounded_row(&state.memory[size(l * shape.memory_slots * shape.dim)]);
      const Layer& w = layers[size(l)];
      for (const double c : affine(w.memory_out, w.memory_out_bias, slot.data())) all.push_back(static_cast<float>(c));
    }
    return all;
  }

  /// Advances a sequence by a token; returns its logits.
  Vector step(DecodeState& state, int token, std::int64_t slots) const {
    const std::size_t dim = size(shape.dim);
    Vector x(dim);
    for (std::size_t i = 0; i < dim; ++i) x[i] = as_double(embedding[static_cast<std::size_t>(token) * dim + i]);
    for (std::size_t l = 0; l < layers.size(); ++l) {
      block(layers[l], x, &state.h[l * dim], &state.memory[l * dim * size(shape.memory_slots)], slots);
      for (std::size_t i = 0; i < dim; ++i) state.segment_sum[l * dim + i] += x[i];
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
  DecodeRun(Cuda& cuda, const DecodeModel<A>& model, const std::vector<DecodeState>& states)
      : cuda_(cuda),
        shape_(model.shape),
        state_(slot_bytes_ * states.size()),
        tokens_(states.size()),
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
    for (std::size_t b = 0; b < states.size(); ++b) {
      put(states[b].h, b, h_);
      put(states[b].memory, b, memory_);
      put(states[b].segment_sum, b, segment_sum_);
      put(model.context(states[b]), b, context_);
    }
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
    for (std::size_t b = 0; b < tokens.size(); ++b) {
      put(std::vector<float>(static_cast<std::size_t>(shape_.vocab), NAN), b, logits_);
    }
  }
  std::vector<float> logits() {
    std::vector<float> all;
    for (std::int64_t b = 0; b < shape_.batch; ++b) {
      const std::vector<float> row = fetch<float>(b, logits_, shape_.vocab);
      all.insert(all.end(), row.begin(), row.end());
    }
    return all;
  }
  std::vector<float> h(std::int64_t b = 0) { return fetch<float>(b, h_, shape_.layers * shape_.dim); }
  Vector segment_sum(std::int64_t b = 0) { return fetch<double>(b, segment_sum_, shape_.layers * shape_.dim); }
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

  /// Room for so many numbers in every slot.
  std::size_t place(std::int64_t count, std::size_t size = sizeof(float)) {
    constexpr std::size_t kAlign = 16;
    const std::size_t at = slot_bytes_;
    slot_bytes_ += (static_cast<std::size_t>(count) * size + kAlign - 1) / kAlign * kAlign;
    return at;
  }
  template <class T>
  T* in_slot(std::size_t place, std::size_t b = 0) {
    return reinterpret_cast<T*>(state_.data() + b * slot_bytes_ + place);
  }
  template <class T>
  void put(const std::vector<T>& host, std::size_t b, std::size_t place) {
    cuda_.upload(host.data(), in_slot<T>(place, b), host.size());
  }
  template <class T>
  std::vector<T> fetch(std::int64_t b, std::size_t place, std::int64_t count) {
    return download(cuda_, in_slot<T>(place, static_cast<std::size_t>(b)), static_cast<std::size_t>(count));
  }

  Cuda& cuda_;
  DecodeShape shape_;
  std::size_t slot_bytes_ = 0;
  const std::size_t h_ = place(shape_.layers * shape_.dim), context_ = place(shape_.layers * shape_.dim),
                    memory_ = place(shape_.layers * shape_.memory_slots * shape_.dim), logits_ = place(shape_.vocab),
                    segment_sum_ = place(shape_.layers * shape_.dim, sizeof(double));
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

// Shapes are {batch, D, layers, heads, F, hidden units of the gate, V, memory slots}.
constexpr DecodeShape kMdi = {1, 64, 2, 2, 96, 32, 257, 4};

DecodeShape with_batch(DecodeShape shape, std::int64_t batch) {
  shape.batch = batch;
  return shape;
}

class DecodeStepTest : public OpTest {
 protected:
  void SetUp() override {
    OpTest::SetUp();
    if (!IsSkipped() && on().compute_capability() < 90) GTEST_SKIP() << "needs compute capability 9.0";
  }

  static std::vector<int> random_tokens(const DecodeShape& s, unsigned step) {
    return random_ids(s.batch, s.vocab, step);
  }

  /// Three steps by the expected algorithm: logits after each, h and the sums after all.
  template <class A>
  void check(const DecodeShape& shape, std::int64_t slots, double bound) {
    check<A>(shape, slots, bound, shape.batch == 1 && sizeof(A) == 2 ? DecodeAlgo::kSingle : DecodeAlgo::kBatch);
  }
  template <class A>
  void check(const DecodeShape& shape, std::int64_t slots, double bound, DecodeAlgo algo) {
    DecodeShape by_any = shape;
    by_any.algo = DecodeAlgo::kAuto;
    ASSERT_TRUE(decode_step_supported(on(), by_any, sizeof(A)));
    EXPECT_EQ(decode_algo<A>(on(), shape), algo);
    const DecodeModel<A> model(shape);
    std::vector<DecodeState> states = model.random_states();
    DecodeRun<A> run(on(), model, states);
    for (unsigned step = 0; step < (few_cases() ? 1 : 3); ++step) {
      const std::vector<int> tokens = random_tokens(shape, step);
      Vector want;
      for (std::size_t b = 0; b < states.size(); ++b) {
        const Vector logits = model.step(states[b], tokens[b], slots);
        want.insert(want.end(), logits.begin(), logits.end());
      }
      EXPECT_LT(largest_error(run.step(tokens, slots), want), bound) << "logits, step " << step;
    }
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      const DecodeState& state = states[static_cast<std::size_t>(b)];
      EXPECT_LT(largest_error(run.h(b), state.h), bound) << "h of sequence " << b;
      const Vector sum = run.segment_sum(b);
      EXPECT_LT(largest_error(std::vector<float>(sum.begin(), sum.end()), state.segment_sum), bound) << "segment sums";
    }
  }

  /// One sequence by every algorithm that there is for it, which must be `algos`.
  template <class A>
  void check_algos(DecodeShape shape, std::int64_t slots, std::initializer_list<DecodeAlgo> algos) {
    std::optional<std::tuple<std::vector<float>, std::vector<float>, std::vector<float>, Vector>> first;
    for (const DecodeAlgo algo : {DecodeAlgo::kCluster, DecodeAlgo::kSingle, DecodeAlgo::kBatch}) {
      shape.algo = algo;
      const bool expected = std::find(algos.begin(), algos.end(), algo) != algos.end();
      ASSERT_EQ(decode_algo<A>(on(), shape), expected ? algo : DecodeAlgo::kNone);
      if (!expected) continue;
      const DecodeModel<A> model(shape);
      DecodeRun<A> run(on(), model, model.random_states());
      const std::vector<float> logits = run.step(random_tokens(shape, 0), slots);
      const std::tuple got(logits, run.step(random_tokens(shape, 1), slots), run.h(), run.segment_sum());
      if (!first) first = got;
      EXPECT_TRUE(got == *first);
    }
  }

  /// A batch's sequences one by one.
  template <class A>
  void check_batches(const DecodeShape& one, std::int64_t batch, std::int64_t slots) {
    const DecodeShape shape = with_batch(one, batch);
    const DecodeModel<A> model(shape);
    const DecodeModel<A> single(with_batch(one, 1));  // the same weights: they follow from the seed
    const std::vector<DecodeState> states = model.random_states();
    DecodeRun<A> together(on(), model, states);
    std::vector<std::vector<float>> logits;
    for (unsigned step = 0; step < 2; ++step) logits.push_back(together.step(random_tokens(shape, step), slots));
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto at = static_cast<std::size_t>(b);
      DecodeRun<A> alone(on(), single, {states[at]});
      for (unsigned step = 0; step < 2; ++step) {
        const auto row = logits[step].begin() + b * shape.vocab;
        EXPECT_TRUE(same_bits(alone.step({random_tokens(shape, step)[at]}, slots), {row, row + shape.vocab}))
            << "sequence " << b << " of " << batch;
      }
      EXPECT_EQ(alone.h(), together.h(b));
      EXPECT_EQ(alone.segment_sum(), together.segment_sum(b));
    }
  }

  /// Without a head: x of a run and h of its sequences, and those of another run with other states, one after another
  /// or side by side.
  using Ends = std::vector<std::vector<float>>;
  template <class A>
  Ends end_without_head(const DecodeShape& shape, std::int64_t slots, int runs, DecodeAlgo algo) {
    const DecodeModel<A> model(shape);
    std::vector<std::unique_ptr<DecodeRun<A>>> all;
    std::vector<DeviceBuffer<float>> x;
    for (int i = 0; i < 2; ++i) {
      all.push_back(
          std::make_unique<DecodeRun<A>>(on(), model, model.random_states(static_cast<unsigned>(1000 + 100 * i))));
      x.push_back(on().allocate<float>(static_cast<std::size_t>(shape.batch * shape.dim)));
      DecodeStep<Device, A>& op = all.back()->op();
      op.shape.vocab = 0;
      op.shape.stacks = runs;
      op.shape.algo = algo;
      op.head = nullptr;
      op.logits = nullptr;
      op.x = x.back().data();
      op.slots = slots;
    }
    Ends ends;
    for (unsigned step = 0; step < 2; ++step) {
      for (auto& run : all) run->feed(random_tokens(shape, step));
      if (runs == 2) {
        decode_steps(on(), all[0]->op(), all[1]->op());
      } else {
        for (auto& run : all) decode_step(on(), run->op());
      }
    }
    for (std::size_t i = 0; i < 2; ++i) {
      ends.push_back(download(on(), x[i]));
      for (std::int64_t b = 0; b < shape.batch; ++b) ends.push_back(all[i]->h(b));
    }
    return ends;
  }
  /// By every algorithm: what a step without a head leaves makes the logits of one with a head, and steps side by side
  /// leave what each leaves alone.
  template <class A>
  void check_without_head(const DecodeShape& shape, std::int64_t slots, std::initializer_list<DecodeAlgo> algos,
                          double bound) {
    const DecodeModel<A> model(shape);
    DecodeRun<A> whole(on(), model, model.random_states());
    std::vector<float> logits;
    for (unsigned step = 0; step < 2; ++step) logits = whole.step(random_tokens(shape, step), slots);
    for (const DecodeAlgo algo : algos) {
      const Ends alone = end_without_head<A>(shape, slots, 1, algo);
      const Ends beside = end_without_head<A>(shape, slots, 2, algo);
      Vector want;
      for (std::int64_t b = 0; b < shape.batch; ++b) {
        EXPECT_EQ(alone[static_cast<std::size_t>(1 + b)], whole.h(b));
        const float* const row = alone[0].data() + b * shape.dim;
        const Vector predicted = model.predict(Vector(row, row + shape.dim));
        want.insert(want.end(), predicted.begin(), predicted.end());
      }
      EXPECT_LT(largest_error(logits, want), bound);
      EXPECT_EQ(beside, alone);
    }
  }
};

constexpr double kFp32 = 2e-5;
constexpr double kBf16 = 3e-2;
constexpr double kFp16 = 5e-3;

TEST_F(DecodeStepTest, WithoutAHeadStepsRunSideBySide) {
  constexpr DecodeShape kSmall = {1, 128, 2, 2, 256, 32, 64, 1};
  using enum DecodeAlgo;
  check_without_head<BFloat16>(kSmall, 0, {kCluster, kSingle, kBatch}, kBf16);
  if (few_cases()) return;
  check_without_head<float>(with_batch(kMdi, 3), 0, {kBatch}, kFp32);
  check_without_head<Float16>(kMdi, 2, {kSingle, kBatch}, kFp16);
}

TEST_F(DecodeStepTest, MatchesFloat64InFp32) {
  if (few_cases()) return check<float>(kMdi, 3, kFp32);
  for (const std::int64_t batch : {1, 3, 8}) {
    for (const std::int64_t slots : {0, 1, 3}) check<float>(with_batch(kMdi, batch), slots, kFp32);
  }
}

TEST_F(DecodeStepTest, MatchesFloat64In16Bits) {
  check<Float16>(kMdi, 2, kFp16);
  if (few_cases()) return check<BFloat16>(with_batch(kMdi, 5), 1, kBf16);
  check<Float16>(with_batch(kMdi, 2), 2, kFp16);
  for (const std::int64_t batch : {1, 3, 5, 8}) {
    for (const std::int64_t slots : {0, 1, 4}) check<BFloat16>(with_batch(kMdi, batch), slots, kBf16);
  }
}

TEST_F(DecodeStepTest, TheScaleOfPaddedHeadsIsThatOfTheirChannels) {
  DecodeShape shape = kMdi;
  shape.head_padding = 24;
  check<float>(shape, 3, kFp32);
}

TEST_F(DecodeStepTest, DpgMatchesFloat64) {
  DecodeShape shape = kMdi;
  shape.dpg = true;
  shape.gate_hidden = 64;
  check<BFloat16>(shape, 3, kBf16);
  if (few_cases()) return;
  shape = with_batch(shape, 2);
  shape.gate_hidden = 40;
  for (const std::int64_t slots : {0, 1, 3}) check<float>(shape, slots, kFp32);
  check<BFloat16>(shape, 0, kBf16);
}

// Vectors that are not whole chunks of a warp, rows of several slots, one head, more slots of memory than lanes.
TEST_F(DecodeStepTest, OddShapesMatchFloat64) {
  check<float>({1, 304, 1, 1, 32, 16, 3, 40}, 37, kFp32);  // a wide head
  if (few_cases()) return;
  check<BFloat16>({1, 72, 2, 3, 104, 24, 33, 2}, 2, kBf16, DecodeAlgo::kBatch);  // rows that are not whole steps
  check<float>({2, 36, 1, 1, 20, 4, 2, 40}, 40, kFp32);
  check<BFloat16>({2, 24, 3, 3, 8, 8, 1, 2}, 2, kBf16);
  check<float>({1, 160, 1, 5, 1100, 40, 300, 1}, 0, kFp32, DecodeAlgo::kBatch);
}

TEST_F(DecodeStepTest, LargeShapesMatchFloat64) {
  if (small_sizes()) GTEST_SKIP() << "large sizes";
  check<BFloat16>({1, 1024, 2, 16, 4096, 256, 5003, 4}, 3, kBf16);
  // Rows of one part where two are multiplied at once, in more slots than the ring has.
  check<BFloat16>({1, 512, 6, 8, 768, 128, 8192, 32}, 29, kBf16, DecodeAlgo::kSingle);
  check<Float16>({1, 384, 6, 6, 768, 96, 8192, 32}, 29, kBf16, DecodeAlgo::kSingle);
  check<BFloat16>({8, 2048, 1, 16, 8192, 512, 32000, 1}, 0, kBf16);
  check<float>({3, 384, 2, 6, 1536, 96, 4096, 1}, 1, kFp32);
}

constexpr DecodeShape kCompact = {1, 192, 2, 1, 320, 64, 131, 4};  // too wide a head for a cluster

/// All matrices with scales for groups or for rows; but the largest with 4 bits.
DecodeShape compact(DecodeShape shape, bool has_int4, bool by_groups) {
  const auto set_format = [&]<class Format>(const models::Field& field, Format& format) {
    if constexpr (std::is_same_v<Format, WeightFormat>) {
      format = WeightFormat(DType::kI8, by_groups ? kCompactGroup : 0);
      const auto* const parts = field.parts.data();
      const bool is_large = parts == models::table::kGate || parts == models::table::kMemoryQ ||
                            parts == models::table::kMemoryOut || parts == models::table::kFfnIn ||
                            parts == models::table::kFfnOut;
      if (has_int4 && is_large) format = WeightFormat(DType::kI4, kCompactGroup);
    }
  };
  models::visit_layer(set_format, shape.formats);
  shape.formats.head = DType::kI8;
  shape.algo = DecodeAlgo::kCompact;  // also where it is slower
  return shape;
}

TEST_F(DecodeStepTest, BitsOfASequenceDoNotDependOnItsBatch) {
  if (few_cases()) GTEST_SKIP() << "many launches";
  check_batches<float>(kMdi, 3, 0);
  check_batches<BFloat16>(kMdi, 8, 3);
  check_batches<Float16>(kMdi, 2, 3);
  // So wide that 8 sequences multiply ffn_out by panels and one does not.
  DecodeShape wide = kMdi;
  wide.layers = 1;
  wide.ffn = 2304;
  check_batches<BFloat16>(wide, 8, 0);
  check_batches<BFloat16>(compact(kCompact, true, false), 8, 3);
  check_batches<BFloat16>(compact(kCompact, false, true), 2, 0);
  wide.ffn = 4352;
  wide.gate_hidden = 64;
  check_batches<BFloat16>(compact(wide, false, false), 8, 0);
  wide.ffn = 1152;
  check_batches<float>(wide, 8, 0);
}

// One sequence of these goes through a cluster of blocks (cluster.cuh), and not in a batch.
TEST_F(DecodeStepTest, SmallModelsMatchFloat64AndTheirBatches) {
  const bool holds_cluster = holds_decode_cluster(on());
  EXPECT_TRUE(holds_cluster || on().compute_capability() > 90);
  const DecodeAlgo algo = holds_cluster ? DecodeAlgo::kCluster : DecodeAlgo::kSingle;
  DecodeShape bundled = {1, 384, 2, 6, 768, 96, 8209, 32};
  if (small_sizes()) bundled.vocab = 300;
  check<BFloat16>(bundled, 29, kBf16, algo);
  if (few_cases()) return;
  // Blocks with one unit of channels and with two; without any of a hidden layer; steps that some warps lack.
  const DecodeShape shape = {1, 160, 3, 5, 96, 32, 1101, 20};
  for (const std::int64_t slots : {0, 1, 2, 20}) {
    check<BFloat16>(shape, slots, kBf16, algo);
    check_batches<BFloat16>(slots == 0 ? bundled : shape, 2, slots);
  }
  DecodeShape other = shape;
  other.dpg = true;
  other.dim = 256;
  other.heads = 4;
  other.ffn = 736;
  other.gate_hidden = 224;
  other.vocab = 5;
  for (const std::int64_t slots : {1, 17}) check_batches<BFloat16>(other, 2, slots);
  check<BFloat16>(other, 3, kBf16, algo);
}

TEST_F(DecodeStepTest, EveryAlgoGivesTheSameBits) {
  using enum DecodeAlgo;
  const DecodeShape small = {1, 160, 2, 5, 96, 32, 501, 20};
  for (const std::int64_t slots : {0, 17}) {
    if (holds_decode_cluster(on())) {
      check_algos<BFloat16>(small, slots, {kCluster, kSingle, kBatch});
    } else {
      check_algos<BFloat16>(small, slots, {kSingle, kBatch});
    }
    if (few_cases()) return;
    check_algos<Float16>(kMdi, std::min<std::int64_t>(slots, 3), {kSingle, kBatch});
    check_algos<float>(kMdi, std::min<std::int64_t>(slots, 3), {kBatch});
  }
  DecodeShape odd = kMdi;  // rows that are not whole steps
  odd.ffn = 104;
  check_algos<BFloat16>(odd, 1, {kBatch});
}

// The numbers of compact rows are exact, so the reference needs no other bound, and plain rows give nearly the same.
TEST_F(DecodeStepTest, CompactRowsMatchFloat64) {
  const auto check_formats = [&](const DecodeShape& shape) {
    for (const std::int64_t slots : {0, 3}) {
      check<BFloat16>(shape, slots, kBf16, DecodeAlgo::kCompact);
      DecodeShape by_plain = shape;
      by_plain.algo = shape.batch == 1 ? DecodeAlgo::kSingle : DecodeAlgo::kBatch;
      const DecodeModel<BFloat16> model(shape), other(by_plain);
      const std::vector<DecodeState> states = model.random_states();
      DecodeRun<BFloat16> a(on(), model, states), b(on(), other, states);
      const std::vector<float> logits = b.step(random_tokens(shape, 0), slots);
      EXPECT_LT(
          largest_error(a.step(random_tokens(shape, 0), slots), std::vector<double>(logits.begin(), logits.end())),
          2e-2);
    }
  };
  check_formats(compact(kCompact, true, true));
  check_formats(compact(with_batch(kCompact, 3), true, true));
  if (few_cases()) return;
  check_formats(compact(kCompact, false, false));
  DecodeShape dpg = {1, 64, 2, 2, 128, 64, 257, 4};
  dpg.dpg = true;
  check_formats(compact(dpg, true, false));
  check_formats(compact(with_batch(dpg, 5), false, false));
  if (small_sizes()) return;
  constexpr DecodeShape kLong = {1, 2112, 1, 11, 4352, 576, 300, 4};  // rows of several chunks, the last of them short
  check_formats(compact(kLong, true, false));
  check_formats(compact(kLong, false, true));
  check_batches<BFloat16>(compact(kLong, true, false), 8, 3);
}

TEST_F(DecodeStepTest, ARecordedStepEqualsADirectOne) {
  const DecodeModel<BFloat16> model(with_batch(kMdi, 2));
  const std::vector<DecodeState> states = model.random_states();
  DecodeRun<BFloat16> direct(on(), model, states);
  DecodeRun<BFloat16> recorded(on(), model, states);
  std::vector<float> want;
  const unsigned steps = few_cases() ? 2 : 4;
  for (unsigned step = 0; step < steps; ++step) want = direct.step(random_tokens(model.shape, step), 0);
  recorded.step(random_tokens(model.shape, 0), 0);
  const Graph graph(on(), [&] { decode_step(on(), recorded.op()); });
  for (unsigned step = 1; step < steps; ++step) {
    recorded.feed(random_tokens(model.shape, step));
    graph.launch(on());
  }
  EXPECT_EQ(recorded.logits(), want);
  EXPECT_EQ(recorded.h(), direct.h());
}

// A NaN of all ones, the mark of what is unwritten, in weights and state: the step ends, and it shows.
TEST_F(DecodeStepTest, NanEndsTheStepAndShows) {
  const auto check_type = [&]<class A>(A, std::int64_t batch) {
    DecodeModel<A> model(with_batch(kMdi, batch));
    std::memset(&model.embedding[5 * 64 + 7], 0xff, sizeof(A));
    const std::vector<DecodeState> states = model.random_states();
    DecodeRun<A> run(on(), model, states);
    std::vector<int> tokens = {5};
    if (batch > 1) tokens.push_back(6);
    const std::vector<float> logits = run.step(tokens, 3);
    for (std::int64_t i = 0; i < batch * model.shape.vocab; ++i) {
      EXPECT_EQ(std::isnan(logits[static_cast<std::size_t>(i)]), i < model.shape.vocab);
    }
  };
  check_type(BFloat16{}, 1);
  if (few_cases()) return;
  check_type(BFloat16{}, 2);
  check_type(float{}, 1);
  check_type(float{}, 2);
}

TEST_F(DecodeStepTest, SaysWhatItSupports) {
  EXPECT_TRUE(decode_step_supported(on(), kMdi, 2));
  EXPECT_FALSE(decode_step_supported(on(), with_batch(kMdi, kTileColumns + 1), 2));
  EXPECT_FALSE(decode_step_supported(on(), with_batch(kMdi, 0), 2));
  DecodeShape shape = kMdi;
  shape.gate_hidden = 4;  // 8 bytes in 16 bits
  EXPECT_FALSE(decode_step_supported(on(), shape, 2));
  EXPECT_TRUE(decode_step_supported(on(), shape, 4));
  const DecodeShape large = {8, 4096, 32, 32, 16384, 1024, 128256, 8};
  EXPECT_EQ(decode_step_supported(on(), large, 2), !kEmulated);  // its 4 blocks have to own too much
  shape = large;
  shape.dim = 32768;
  EXPECT_FALSE(decode_step_supported(on(), shape, 2));
}

}  // namespace
}  // namespace mmrec::kernels::test
