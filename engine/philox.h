// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011): a counter-based
// random number generator. A number is a pure function of key and counter, so a draw depends on nothing drawn before.
#pragma once

#include <array>
#include <cstdint>

namespace mmrec::engine {

using PhiloxCounter = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

/// Ten rounds; agrees with the known-answer vectors published with the paper.
constexpr PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key[0] += 0x9E3779B9U;
    key[1] += 0xBB67AE85U;
  }
  return counter;
}

/// The uniform number in [0, 1) of (seed, sequence, step): the first 53 of the 64 bits that words 1 and 0 make up, as a
/// multiple of 2^-53.
constexpr double philox_uniform(std::uint64_t seed, std::uint64_t sequence, std::uint64_t step) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  const PhiloxCounter words =
      philox4x32({low(step), high(step), low(sequence), high(sequence)}, {low(seed), high(seed)});
  const std::uint64_t bits = (std::uint64_t{words[1]} << 32) | words[0];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace mmrec::engine
