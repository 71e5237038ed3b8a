// Staging: more blocks than there are, of any size, arrive whole and in their places; nothing else is written.
#include "kernels/cuda/runtime/cuda.h"

#include <cstring>

#include "tests/kernels/cuda/cuda_testing.h"

namespace mmrec::kernels::test {
namespace {

class CudaStagingTest : public CudaTest {};

TEST_F(CudaStagingTest, BlocksTakeTurnsAndArriveWhole) {
  const std::vector<std::size_t> sizes = {1, 4097, Staging::kBlockBytes, 33, Staging::kBlockBytes - 1, 1000};
  std::size_t total = 0;
  for (const std::size_t size : sizes) total += size;
  std::mt19937_64 rng(test_seed());
  std::vector<std::uint8_t> bytes(total);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(rng());

  DeviceBuffer<std::uint8_t> to = poisoned<std::uint8_t>(total + 64);
  cuda().synchronize();  // copies by way of blocks have a stream of their own
  Staging staging;
  std::size_t at = 0;
  for (const std::size_t size : sizes) {
    std::memcpy(staging.block(), bytes.data() + at, size);  // waits where the block is still on its way
    staging.send(to.data() + at, size);
    at += size;
  }
  staging.finish();
  const std::vector<std::uint8_t> got = to_host(to);
  EXPECT_EQ(std::memcmp(got.data(), bytes.data(), total), 0);
  for (std::size_t i = total; i < got.size(); ++i) ASSERT_EQ(got[i], 0xff) << i - total;
}

TEST_F(CudaStagingTest, MayEndWhileABlockIsOnItsWay) {
  DeviceBuffer<std::uint8_t> to = poisoned<std::uint8_t>(Staging::kBlockBytes);
  cuda().synchronize();
  {
    Staging staging;
    std::memset(staging.block(), 7, Staging::kBlockBytes);
    staging.send(to.data(), Staging::kBlockBytes);
  }
  for (const std::uint8_t byte : to_host(to)) ASSERT_EQ(byte, 7);
}

}  // namespace
}  // namespace mmrec::kernels::test
