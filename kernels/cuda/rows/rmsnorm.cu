// y = weight ⊙ x / (‖x‖₂/√D + 1e-6) per row, rounded to A.
//
// The kernel is rmsnorm.cuh's. The block is sized by D so that up to D = 8192 a thread has at most two groups of
// channels. Bytes per channel: 4 read, the size of A written.
#include "kernels/cuda/rows/rmsnorm.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kHeld = 2;

}  // namespace

template <class A>
void rmsnorm(Cuda& cuda, MatrixView<const float, Device> x, const float* weight, MatrixView<A, Device> y) {
  const bool vectors = takes_vectors(x) && takes_vectors(y) && takes_vectors(weight, 0);
  vectors ? norm_rows<kHeld>(cuda, MatrixRows<true>{x}, weight, y)
          : norm_rows<kHeld>(cuda, MatrixRows<false>{x}, weight, y);
}

template void rmsnorm<float>(Cuda&, MatrixView<const float, Device>, const float*, MatrixView<float, Device>);
template void rmsnorm<BFloat16>(Cuda&, MatrixView<const float, Device>, const float*, MatrixView<BFloat16, Device>);
template void rmsnorm<Float16>(Cuda&, MatrixView<const float, Device>, const float*, MatrixView<Float16, Device>);

}  // namespace mmrec::kernels
