// The CUDA backend's graphs, staging and code: what a replay does, what recording refuses, and that a failed recording
// leaves the stream usable; blocks of any size arrive whole and in their places.

#include "tests/ops/op_test.h"

namespace mmrec::kernels::test {
namespace {

TEST(CudaArchitectures, CodeRunsWhereCudaSaysSo) {
  for (const char* runs : {"80-real", "80-virtual", "80", "75-virtual 90", "90-real 86-real 80-real", "all"}) {
    EXPECT_TRUE(has_code_for(runs, 80)) << runs;
  }
  for (const char* cannot : {"", "90", "90-real", "86-real 89-real", "75-real"}) {
    EXPECT_FALSE(has_code_for(cannot, 80)) << cannot;
  }
  EXPECT_TRUE(has_code_for("80-real", 86));
  EXPECT_TRUE(has_code_for("90-virtual", 120));
  EXPECT_FALSE(has_code_for("80-real 90-real", 120));
}

// ---- Graph ----

class CudaGraphTest : public OpTest {};

TEST_F(CudaGraphTest, RecordsWithoutRunningAndReadsItsInputsAnewAtEachLaunch) {
  Matrix<float> from = random_matrix<float>(on(), 3, 50, kPacked, 1);
  Matrix<float> middle(on(), 3, 50);
  Matrix<float> to(on(), 3, 50);
  const auto ops = [&] {
    copy_rows(on(), from.read(), middle.view());
    copy_rows(on(), middle.read(), to.view());
  };
  ops();  // a first launch may load code
  fill_zero(on(), to.view());
  const Graph graph(on(), ops);
  EXPECT_TRUE(same_bits(to.download(), std::vector<float>(150, 0.0F)));
  for (const std::uint64_t stream : {2, 3}) {
    const std::vector<float> values = random_normal<float>(150, 0.0, 1.0, stream);
    on().upload(values.data(), from.data(), values.size());
    graph.launch(on());
    EXPECT_TRUE(same_bits(to.download(), values));
  }
}

TEST_F(CudaGraphTest, RecordsBothStreams) {
  Matrix<float> to(on(), std::vector<float>(16, 1.0F), 2, 8);
  fill_zero(on(), to.view());
  const Graph graph(on(), [&] {
    on().fork();
    fill_zero(on(), to.view());
    on().join();
  });
  to.reset();
  graph.launch(on());
  EXPECT_TRUE(same_bits(to.download(), std::vector<float>(16, 0.0F)));
}

TEST_F(CudaGraphTest, MovesAndOutlivesNothingButItsBuffers) {
  Matrix<float> to(on(), std::vector<float>(8, 1.0F), 1, 8);
  fill_zero(on(), to.view());
  Graph first(on(), [&] { fill_zero(on(), to.view()); });
  Graph second = std::move(first);
  Graph third;
  third = std::move(second);
  to.reset();
  third.launch(on());
  EXPECT_TRUE(same_bits(to.download(), std::vector<float>(8, 0.0F)));
}

TEST_F(CudaGraphTest, AnExceptionWhileRecordingPassesAndTheStreamGoesOn) {
  Matrix<float> to(on(), std::vector<float>(8, 1.0F), 1, 8);
  fill_zero(on(), to.view());
  const auto throwing = [&] {
    fill_zero(on(), to.view());
    throw std::runtime_error("stop");
  };
  EXPECT_THROW(Graph(on(), throwing), std::runtime_error);
  to.reset();
  fill_zero(on(), to.view());
  EXPECT_TRUE(same_bits(to.download(), std::vector<float>(8, 0.0F)));
}

// ---- Staging ----

class CudaStagingTest : public OpTest {};

TEST_F(CudaStagingTest, BlocksTakeTurnsAndArriveWhole) {
  const std::vector<std::size_t> sizes = {1, 4097, Staging::kBlockBytes, 33, Staging::kBlockBytes - 1, 1000};
  std::size_t total = 0;
  for (const std::size_t size : sizes) total += size;
  std::mt19937_64 rng(test_seed());
  std::vector<std::uint8_t> bytes(total);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(rng());

  DeviceBuffer<std::uint8_t> to = unwritten<std::uint8_t>(on(), total + 64);
  on().synchronize();  // copies by way of blocks have a stream of their own
  Staging staging;
  std::size_t at = 0;
  for (const std::size_t size : sizes) {
    std::memcpy(staging.block(), bytes.data() + at, size);  // waits where the block is still on its way
    staging.send(to.data() + at, size);
    at += size;
  }
  staging.finish();
  const std::vector<std::uint8_t> got = download(on(), to);
  EXPECT_EQ(std::memcmp(got.data(), bytes.data(), total), 0);
  for (std::size_t i = total; i < got.size(); ++i) ASSERT_EQ(got[i], 0xff) << i - total;
}

TEST_F(CudaStagingTest, MayEndWhileABlockIsOnItsWay) {
  DeviceBuffer<std::uint8_t> to = unwritten<std::uint8_t>(on(), Staging::kBlockBytes);
  on().synchronize();
  {
    Staging staging;
    std::memset(staging.block(), 7, Staging::kBlockBytes);
    staging.send(to.data(), Staging::kBlockBytes);
  }
  for (const std::uint8_t byte : download(on(), to)) ASSERT_EQ(byte, 7);
}

}  // namespace
}  // namespace mmrec::kernels::test
