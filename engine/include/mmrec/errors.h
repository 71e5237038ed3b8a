// Errors beyond the standard ones. The library throws std::invalid_argument for a caller's mistake, std::system_error
// with errno for the operating system's, std::runtime_error for a malformed file, std::bad_alloc for memory, and this.
#pragma once

#include <stdexcept>

namespace mmrec {

/// A NaN or an infinity where a finite number must be; the message names the step.
class NumericError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace mmrec
