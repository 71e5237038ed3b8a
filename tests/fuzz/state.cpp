// A saved state of any bytes is refused, or is one that encodes to the same bytes. The input is also tried with its
// size and checksum made good, so that what lies behind them is reached.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <vector>

#include "engine/session/state_format.h"
#include "models/files/checksum.h"
#include "models/mmrec/state.h"

namespace {

mmrec::models::Config config() {
  mmrec::models::Config config;
  config.num_layers = 1;
  config.model_dim = 3;
  config.memory_slots = 2;
  config.memory_segment = 5;
  config.vocab_size = 4;
  return config;
}
const mmrec::engine::StateShape kShape = {0x1122334455667788, 2, mmrec::models::state_layout(config())};

void restore(std::span<const std::byte> bytes) {
  try {
    const mmrec::models::HostState state = mmrec::engine::decode_state(bytes, kShape);
    const std::vector<std::byte> again = mmrec::engine::encode_state(state, kShape);
    if (again.size() != bytes.size()) std::abort();
    for (std::size_t i = 0; i < again.size(); ++i) {
      if (again[i] != bytes[i]) std::abort();
    }
  } catch (const std::runtime_error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto input = std::as_bytes(std::span(data, size));
  restore(input);
  if (size < 32) return 0;
  std::vector<std::byte> mended(input.begin(), input.end());
  for (std::size_t i = 0; i < 8; ++i) mended[16 + i] = static_cast<std::byte>(std::uint64_t{size} >> (8 * i));
  const std::uint64_t crc = mmrec::models::crc64(std::span<const std::byte>(mended).first(size - 8));
  for (std::size_t i = 0; i < 8; ++i) mended[size - 8 + i] = static_cast<std::byte>(crc >> (8 * i));
  restore(mended);
  return 0;
}
