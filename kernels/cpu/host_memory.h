// How much host memory is available. It is checked before large blocks are allocated, because the system promises more
// than it has and kills the process that touches it.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>

namespace mmrec::kernels {

/// Host memory does not suffice; what() names needed and available bytes.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message) : message_(std::make_shared<std::string>(std::move(message))) {}
  const char* what() const noexcept override { return message_->c_str(); }

 private:
  std::shared_ptr<std::string> message_;  // shared: copying an exception must not throw
};

/// Bytes that this process can have: the least that the machine, its control group (version 2) and its limit of address
/// space leave. 2^64 - 1 where there is no limit.
std::uint64_t available_memory();

/// Throws OutOfMemory, "`what` (needed N bytes, available M)", if `bytes` is more than that.
void check_available(std::uint64_t bytes, std::string_view what);

}  // namespace mmrec::kernels
