// The version as configured, and the backends that were linked.
#include "mmrec/version.h"

#include <array>

#include "engine/kernels/kernel_backend.h"

namespace mmrec {

std::string_view version() { return MMREC_VERSION; }

std::span<const std::string_view> backends() {
  static constexpr std::array<std::string_view, 2> kAll = {"cpu", "cuda"};
  return std::span(kAll).first(engine::built_with_cuda() ? 2 : 1);
}

}  // namespace mmrec
