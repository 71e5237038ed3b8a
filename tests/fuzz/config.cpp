// Any config.json is refused, or is one whose invariants hold and that survives a round trip.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "models/mmrec/config.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mmrec::models::Config config;
  try {
    config = mmrec::models::parse_config(
        {reinterpret_cast<const char*>(data), size}, "input",
        [](std::string_view line) { require(!line.empty() && line.find('\n') == std::string_view::npos); });
  } catch (const std::runtime_error& error) {
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
    return 0;
  }
  for (const std::int64_t n : {config.vocab_size, config.model_dim, config.num_layers, config.num_heads, config.ffn_dim,
                               config.dpg_rank, config.memory_segment, config.memory_slots}) {
    require(n >= 1 && n <= (std::int64_t{1} << 26));
  }
  require(config.model_dim % config.num_heads == 0);
  require(config.use_dpg || config.model_dim % 4 == 0);
  require(config.mdi_mix >= 0.0F && config.mdi_mix <= 10.0F);
  for (const int id : config.ids.eos) require(id >= 0 && id < config.vocab_size);
  require(mmrec::models::parse_config(to_json(config), "again") == config);
  return 0;
}
