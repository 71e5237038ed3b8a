// System calls that a signal may interrupt before they have done anything: on network and FUSE file systems even open()
// and fsync().
#pragma once

#include <cerrno>

namespace mmrec::models {

/// call() again as long as it returns -1 with EINTR.
template <class Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace mmrec::models
