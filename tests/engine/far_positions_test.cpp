#include "tests/engine/far_positions.h"

namespace mmrec {
namespace {

TEST(FarPositions, GoOnAsNearOnes) {
  LoadOptions on_cpu{.device = Device::kCpu};
  test::expect_far_positions_to_go_on(Model::load(std::filesystem::path(MMREC_FIXTURES) / "tiny", on_cpu), 0.0F);
}

}  // namespace
}  // namespace mmrec
