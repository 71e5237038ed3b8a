// Callbacks of users that are called during work. An exception of a callback must not pass through the work.
#pragma once

#include <exception>
#include <utility>

namespace mmrec::engine {

/// Answers false if a callback throws, and keeps the first exception until the work is done.
class CallbackFault {
 public:
  template <class Ask>
  bool guard(Ask&& ask) noexcept {
    try {
      return ask();
    } catch (...) {
      keep();
      return false;
    }
  }
  /// The exception that is being handled.
  void keep() noexcept {
    if (!fault_) fault_ = std::current_exception();
  }
  void rethrow() const {
    if (fault_) std::rethrow_exception(fault_);
  }
  /// Moves the exception to `other`, unless `other` has one.
  void move_to(CallbackFault& other) noexcept {
    const std::exception_ptr fault = std::exchange(fault_, nullptr);
    if (!other.fault_) other.fault_ = fault;
  }

 private:
  std::exception_ptr fault_;
};

}  // namespace mmrec::engine
