// mmrec-jax on a device against the public code, in fp32 within the CPU's bounds, in 16 bits within bounds of their
// own.
#include "tests/models/jax_parity.h"
#include "models/runtime/cuda_device.h"

namespace mmrec::models {
namespace {

template <Precision kPrecision>
std::shared_ptr<Executor> make(const mmrec_jax::Config& config, std::shared_ptr<const mmrec_jax::HostWeights> weights) {
  return make_cuda_executor(config, *weights, kPrecision).executor;
}
std::string unusable() { return cuda_unusable_reason(); }

INSTANTIATE_TEST_SUITE_P(
    Cuda, JaxParity,
    testing::Values(JaxParityCase{"fp32", make<Precision::kF32>, unusable},
                    JaxParityCase{"bf16", make<Precision::kBF16>, unusable, true, 0.06F, 0.06F, 0.06F},
                    JaxParityCase{"fp16", make<Precision::kF16>, unusable, true, 0.01F, 0.01F, 0.01F}),
    jax_parity_name);

}  // namespace
}  // namespace mmrec::models
