// The matrix library that multiplies whole row tiles.
#pragma once

#include <string>

namespace mmrec::kernels {

/// Its version, the instructions it uses, and the kind of processor, by which it may choose blocks: what the bits of
/// its products follow from.
std::string matrix_library();

}  // namespace mmrec::kernels
