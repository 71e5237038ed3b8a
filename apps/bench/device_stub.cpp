// The stub of device.cpp for a build without CUDA.
#include <stdexcept>

#include "apps/bench/peaks.h"

namespace mmrec::apps {

Peaks measure_device(Precision /*precision*/, int /*gpu*/) {
  throw std::runtime_error("this build has no CUDA backend");
}

}  // namespace mmrec::apps
