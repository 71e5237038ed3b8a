// What tests of the CUDA backend share: a fixture that skips where no device is usable, and transfers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/runtime/cuda.h"
#include "tests/ops/testing.h"

namespace mmrec::kernels::test {

class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = cuda_unusable_reason();
    if (!reason.empty()) GTEST_SKIP() << "no usable CUDA device: " << reason;
    cuda_ = std::make_unique<Cuda>();
  }
  /// False where SetUp skipped, or threw because too little memory is free. TearDown runs all the same.
  bool has_device() const { return cuda_ != nullptr; }
  Cuda& cuda() { return *cuda_; }

  template <class T>
  DeviceBuffer<T> to_device(const std::vector<T>& host) {
    DeviceBuffer<T> buffer(host.size());
    cuda().upload(host.data(), buffer.data(), host.size());
    return buffer;
  }
  template <class T>
  std::vector<T> to_host(const DeviceBuffer<T>& buffer) {
    std::vector<T> host(buffer.size());
    cuda().download(buffer.data(), host.data(), host.size());
    return host;
  }
  /// A buffer of NaN (all bits set): what an op leaves unwritten shows.
  template <class T>
  DeviceBuffer<T> poisoned(std::size_t count) {
    std::vector<std::uint8_t> ones(count * sizeof(T), 0xff);
    DeviceBuffer<T> buffer(count);
    cuda().upload(reinterpret_cast<const std::uint8_t*>(ones.data()), reinterpret_cast<std::uint8_t*>(buffer.data()),
                  ones.size());
    return buffer;
  }

 private:
  std::unique_ptr<Cuda> cuda_;
};

}  // namespace mmrec::kernels::test
