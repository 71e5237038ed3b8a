#include "tests/engine/far_positions.h"

#include <string>

#include "models/runtime/cuda_device.h"

namespace mmrec {
namespace {

TEST(CudaFarPositions, GoOnAsNearOnes) {
  if (const std::string reason = models::cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    LoadOptions on_gpu{.device = Device::kCuda, .precision = precision};
    test::expect_far_positions_to_go_on(Model::load(std::filesystem::path(MMREC_FIXTURES) / "tiny", on_gpu),
                                        precision == Precision::kF32 ? 1e-5F : 0.06F);
  }
}

}  // namespace
}  // namespace mmrec
