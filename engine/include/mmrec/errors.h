// Errors beyond the standard ones. The library throws std::invalid_argument for a caller's mistake, std::system_error
// with errno for the operating system's and a category of its own for CUDA's, std::runtime_error for a malformed file,
// std::bad_alloc for memory (where it is a GPU's, what() names needed and free bytes), and these.
//
// A code equal to std::errc::no_such_device: the GPU is lost to this process, after an illegal access or an error of
// its memory. Every later call on it throws such a code and names that first error; a new process may find it well.
#pragma once

#include <stdexcept>

#include "mmrec/export.h"

namespace mmrec {

/// A NaN or an infinity where a finite number must be; the message names the step.
class MMREC_EXPORT NumericError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The device that was asked for cannot be used; the message names the reason.
class MMREC_EXPORT DeviceUnavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A file of a result cannot be written; the message names it and the reason.
class MMREC_EXPORT WriteError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace mmrec
