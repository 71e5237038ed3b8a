// Callbacks of users' that are asked in the midst of work: what they throw must not pass through it.
#pragma once

#include <exception>

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

 private:
  std::exception_ptr fault_;
};

}  // namespace mmrec::engine
