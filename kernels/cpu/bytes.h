// Checks of every byte of loaded weights, by the widest instructions of the processor. Results do not depend on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/tensor.h"

namespace mmrec::kernels {

/// Whether numbers of a type, which need not be aligned, are neither NaN nor infinite.
bool all_finite(std::span<const std::byte> numbers, DType dtype);

/// XXH3, 64 bits, without a seed.
std::uint64_t hash_bytes(std::span<const std::byte> bytes);

}  // namespace mmrec::kernels
