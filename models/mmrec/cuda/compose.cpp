// A device's copy of blocks, composed: z = W_z u + b_z and k = W_k u + b_k are linear in u, so W z + b = (W W_z) u +
// (W b_z + b), and k need not be computed at all. Of each block that saves one matrix [D, D] of some 16, and in every
// path one product that waits for another.
//
// The device makes the products from the numbers that it holds, with fp32 sums, and rounds them once. A product is
// x Wᵀ, so what others are composed with is transposed first, by a product with the identity.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "kernels/cpu/bytes.h"
#include "kernels/cuda/runtime/cuda.h"
#include "models/mmrec/cuda/ops.h"
#include "models/mmrec/mmrec.h"

namespace mmrec::models {
namespace {

using Layer = LayerFields<kernels::WeightView<kernels::Device>, const float*>;
using kernels::Cuda, kernels::Device, kernels::MatrixView, kernels::WeightView;

/// How many numbers of A hold one of fp32.
template <class A>
constexpr int kPartsOfFloat = sizeof(A) == sizeof(float) ? 1 : 3;

template <class A>
class Composer {
 public:
  Composer(int gpu, std::int64_t dim, std::int64_t most)
      : cuda_(gpu),
        dim_(dim),
        identity_(cells(dim)),
        inner_(cells(dim)),
        inner_bias_(cells(kPartsOfFloat<A>)),
        product_(cells(std::max(dim, most))) {
    std::vector<A> identity(cells(dim));
    for (std::int64_t i = 0; i < dim; ++i)
      identity[cells(i) + static_cast<std::size_t>(i)] = kernels::from_float<A>(1.0F);
    cuda_.upload(identity.data(), identity_.data(), identity.size());
    cuda_.synchronize();
  }

  void compose(Layer& layer) {
    if (layer.context_in.rows != 0) {
      set_inner(layer, 3);  // W_k
      compose(layer.context_in, layer.context_in_bias, layer.context_in, layer.context_in_bias);
    }
    set_inner(layer, 2);  // W_z
    compose(layer.gamma_in, layer.gamma_in_bias, layer.gamma_in, layer.gamma_in_bias);
    compose(layer.gate_z, layer.gate_z_bias, layer.qvzk.middle_rows(3 * dim_, dim_), layer.qvzk_bias + 3 * dim_);
    layer.gate_z = {};
    layer.gate_z_bias = nullptr;
  }
  void finish() { cuda_.synchronize(); }

 private:
  using Weight = WeightView<Device>;

  std::size_t cells(std::int64_t rows) const { return static_cast<std::size_t>(rows * dim_); }
  static MatrixView<const A, Device> matrix(const Weight& weight) {
    return {weight.template as<A>(), weight.rows, weight.cols};
  }
  /// product_ = x weightᵀ.
  MatrixView<float, Device> multiply(MatrixView<const A, Device> x, const Weight& weight) {
    const MatrixView<float, Device> product(product_.data(), x.rows, weight.rows);
    const kernels::Linear<Device, A, float> job = {.x = x, .weight = weight, .y = product};
    kernels::linear(cuda_, std::span(&job, 1));
    return product;
  }
  /// The parts of the copy are this file's to complete.
  void keep(const MatrixView<float, Device>& product, A* to) {
    kernels::copy_rows(cuda_, MatrixView<const float, Device>(product),
                       MatrixView<A, Device>(to, product.rows, product.cols));
  }
  std::vector<float> download(const float* from, std::int64_t count) {
    std::vector<float> numbers(static_cast<std::size_t>(count));
    cuda_.download(from, numbers.data(), numbers.size());
    return numbers;
  }

  /// Takes part `part` of qvzk and its bias as the inner matrix, with which others are composed.
  void set_inner(const Layer& layer, std::int64_t part) {
    keep(multiply({identity_.data(), dim_, dim_}, layer.qvzk.middle_rows(part * dim_, dim_)), inner_.data());
    std::vector<float> left = download(layer.qvzk_bias + part * dim_, dim_);
    std::vector<A> parts;
    for (int i = 0; i < kPartsOfFloat<A>; ++i) {
      for (float& x : left) {
        parts.push_back(kernels::from_float<A>(x));
        x -= kernels::to_float(parts.back());
      }
    }
    cuda_.upload(parts.data(), inner_bias_.data(), parts.size());
    cuda_.synchronize();
  }
  /// `outer` and its bias, of z or k, as they are of u.
  void compose(const Weight& outer, const float* bias, const Weight& to, const float* to_bias) {
    const MatrixView<float, Device> moved = multiply({inner_bias_.data(), kPartsOfFloat<A>, dim_}, outer);
    const std::vector<float> parts = download(moved.data, moved.rows * moved.cols);
    std::vector<float> sum = download(bias, outer.rows);
    for (std::size_t i = 0; i < parts.size(); ++i) sum[i % sum.size()] += parts[i];
    cuda_.upload(sum.data(), const_cast<float*>(to_bias), sum.size());
    cuda_.synchronize();
    keep(multiply(matrix(outer), {inner_.data(), kernels::kDTypeOf<A>, dim_, dim_}),
         const_cast<A*>(to.template as<A>()));
    if constexpr (std::is_same_v<A, kernels::Float16>) check_fits(to);
  }
  void check_fits(const Weight& weight) {
    std::vector<std::byte> numbers(
        static_cast<std::size_t>(kernels::bytes_of(weight.format, weight.rows, weight.cols)));
    cuda_.download(static_cast<const std::byte*>(weight.data), numbers.data(), numbers.size());
    if (kernels::all_finite(numbers, kernels::DType::kF16)) return;
    throw std::runtime_error(
        "precision fp16: a product of two of the model's matrices has a number that does not fit, expected at most "
        "65504; use bf16 or fp32");
  }

  Cuda cuda_;
  std::int64_t dim_;
  kernels::DeviceBuffer<A> identity_, inner_, inner_bias_;
  kernels::DeviceBuffer<float> product_;
};

template <class A>
void compose_all(std::vector<Layer>& layers, int gpu) {
  Composer<A> composer(gpu, layers.front().qvzk.cols, layers.front().gamma_in.rows);
  for (Layer& layer : layers) composer.compose(layer);
  composer.finish();
}

}  // namespace

bool blocks_step_compact(const Config& config, std::int64_t vocab, int gpu) {
  kernels::DecodeShape shape = decode_shape(config, 1, vocab);
  shape.formats.ffn_in = kernels::DType::kI8;  // as if they were compact
  return kernels::decode_algo<kernels::BFloat16>(Cuda(gpu), shape) == kernels::DecodeAlgo::kCompact;
}

void compose_blocks(std::vector<Layer>& layers, int gpu) {
  if (layers.empty()) return;
  switch (layers.front().qvzk.format.code) {
    case kernels::DType::kF32:
      return compose_all<float>(layers, gpu);
    case kernels::DType::kBF16:
      return compose_all<kernels::BFloat16>(layers, gpu);
    case kernels::DType::kF16:
      return compose_all<kernels::Float16>(layers, gpu);
    default:
      throw std::invalid_argument("compose_blocks: no such type on a device");
  }
}

}  // namespace mmrec::models
