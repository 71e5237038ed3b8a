// The stub of device.cpp for a build without CUDA.
#include <stdexcept>

#include "apps/bench/device.h"

namespace mmrec::apps {

DevicePeaks measure_device(Precision /*precision*/, int /*gpu*/) {
  throw std::runtime_error("this build has no CUDA backend");
}

}  // namespace mmrec::apps
