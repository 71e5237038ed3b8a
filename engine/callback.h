// Callbacks of users' that an executor asks: what they throw must not pass through it.
#pragma once

#include <exception>

namespace mmrec::engine {

/// Answers false where a callback throws, and throws that when the executor has returned.
class CallbackFault {
 public:
  template <class Ask>
  bool guard(Ask&& ask) noexcept {
    try {
      return ask();
    } catch (...) {
      fault_ = std::current_exception();
      return false;
    }
  }
  void rethrow() const {
    if (fault_) std::rethrow_exception(fault_);
  }

 private:
  std::exception_ptr fault_;
};

}  // namespace mmrec::engine
