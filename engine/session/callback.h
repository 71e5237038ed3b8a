// Callbacks of users' that are asked in the midst of work: what they throw must not pass through it.
#pragma once

#include <exception>
#include <utility>

namespace mmrec::engine {

/// Answers false where a callback throws, and throws that, the first if there are several, when the work is done.
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
  /// What is kept here is kept there, unless that has one.
  void move_to(CallbackFault& other) noexcept {
    const std::exception_ptr fault = std::exchange(fault_, nullptr);
    if (!other.fault_) other.fault_ = fault;
  }

 private:
  std::exception_ptr fault_;
};

}  // namespace mmrec::engine
