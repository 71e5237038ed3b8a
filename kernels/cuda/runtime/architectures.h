// Which devices a build's code runs on.
#pragma once

#include <string_view>

namespace mmrec::kernels {

/// Whether code for these architectures, as CMake names them ("80-real 90"), runs on a device: machine code within a
/// generation, from its own revision on, and PTX on every newer device.
bool has_code_for(std::string_view architectures, int compute_capability);

}  // namespace mmrec::kernels
