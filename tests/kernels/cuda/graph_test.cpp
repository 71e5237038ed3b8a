// Graph: what a replay does, what recording refuses, and that a failed recording leaves the stream usable.
#include "kernels/cuda/runtime/cuda.h"

#include <stdexcept>
#include <utility>

#include "tests/kernels/cuda/dense_testing.h"

namespace mmrec::kernels::test {
namespace {

class CudaGraphTest : public CudaTest {};

TEST_F(CudaGraphTest, RecordsWithoutRunningAndReadsItsInputsAnewAtEachLaunch) {
  DeviceMatrix<float> from = random_matrix<float>(cuda(), 3, 50, kPacked, 1);
  DeviceMatrix<float> middle(cuda(), 3, 50);
  DeviceMatrix<float> to(cuda(), 3, 50);
  const auto ops = [&] {
    copy_rows<float>(cuda(), from.view(), middle.view());
    copy_rows<float>(cuda(), middle.view(), to.view());
  };
  ops();  // a first launch may load code
  fill_zero(cuda(), to.view());
  const Graph graph(cuda(), ops);
  EXPECT_TRUE(same_bits(to.download(), std::vector<float>(150, 0.0F)));
  for (const std::uint64_t stream : {2, 3}) {
    const std::vector<float> values = random_normal<float>(150, 0.0, 1.0, stream);
    cuda().upload(values.data(), from.view().data, values.size());
    graph.launch(cuda());
    EXPECT_TRUE(same_bits(to.download(), values));
  }
}

TEST_F(CudaGraphTest, RecordsBothStreams) {
  DeviceMatrix<float> to(cuda(), 2, 8);
  fill_zero(cuda(), to.view());
  const Graph graph(cuda(), [&] {
    cuda().fork();
    fill_zero(cuda(), to.view());
    cuda().join();
  });
  const std::vector<float> ones(16, 1.0F);
  cuda().upload(ones.data(), to.view().data, ones.size());
  graph.launch(cuda());
  EXPECT_TRUE(same_bits(to.download(), std::vector<float>(16, 0.0F)));
}

TEST_F(CudaGraphTest, MovesAndOutlivesNothingButItsBuffers) {
  DeviceMatrix<float> to(cuda(), 1, 8);
  fill_zero(cuda(), to.view());
  Graph first(cuda(), [&] { fill_zero(cuda(), to.view()); });
  Graph second = std::move(first);
  Graph third;
  third = std::move(second);
  const std::vector<float> ones(8, 1.0F);
  cuda().upload(ones.data(), to.view().data, ones.size());
  third.launch(cuda());
  EXPECT_TRUE(same_bits(to.download(), std::vector<float>(8, 0.0F)));
}

TEST_F(CudaGraphTest, AnExceptionWhileRecordingPassesAndTheStreamGoesOn) {
  DeviceMatrix<float> to(cuda(), 1, 8);
  fill_zero(cuda(), to.view());
  const auto throwing = [&] {
    fill_zero(cuda(), to.view());
    throw std::runtime_error("stop");
  };
  EXPECT_THROW(Graph(cuda(), throwing), std::runtime_error);
  const std::vector<float> ones(8, 1.0F);
  cuda().upload(ones.data(), to.view().data, ones.size());
  fill_zero(cuda(), to.view());
  EXPECT_TRUE(same_bits(to.download(), std::vector<float>(8, 0.0F)));
}

}  // namespace
}  // namespace mmrec::kernels::test
