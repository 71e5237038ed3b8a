// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011): a counter-based
// random number generator. A number is a pure function of key and counter, so a draw depends on nothing drawn before.
// Host and device code share this header.
#pragma once

#include <cstdint>

#include "kernels/tensor.h"

namespace mmrec::kernels {

struct PhiloxCounter {
  std::uint32_t words[4];

  friend constexpr bool operator==(const PhiloxCounter&, const PhiloxCounter&) = default;
};
struct PhiloxKey {
  std::uint32_t words[2];
};

/// Ten rounds; agrees with the known-answer vectors published with the paper.
MMREC_HOST_DEVICE constexpr PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) {
  std::uint32_t(&c)[4] = counter.words;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * c[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * c[2];
    counter = {{static_cast<std::uint32_t>(product1 >> 32) ^ c[1] ^ key.words[0], static_cast<std::uint32_t>(product1),
                static_cast<std::uint32_t>(product0 >> 32) ^ c[3] ^ key.words[1],
                static_cast<std::uint32_t>(product0)}};
    key.words[0] += 0x9E3779B9U;
    key.words[1] += 0xBB67AE85U;
  }
  return counter;
}

/// The uniform number in [0, 1) of (seed, sequence, step): the first 53 of the 64 bits that words 1 and 0 make up, as a
/// multiple of 2^-53.
MMREC_HOST_DEVICE constexpr double philox_uniform(std::uint64_t seed, std::uint64_t sequence, std::uint64_t step) {
  const PhiloxCounter drawn =
      philox4x32({{static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32),
                   static_cast<std::uint32_t>(sequence), static_cast<std::uint32_t>(sequence >> 32)}},
                 {{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)}});
  const std::uint64_t bits = (std::uint64_t{drawn.words[1]} << 32) | drawn.words[0];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace mmrec::kernels
