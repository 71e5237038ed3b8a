// Any config.json is refused as one of mmrec100m, or is one whose invariants hold and that survives a round trip.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "models/mmrec100m/config.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mmrec::models::Config100m config;
  try {
    config = mmrec::models::parse_config_100m(
        {reinterpret_cast<const char*>(data), size}, "input",
        [](std::string_view line) { require(!line.empty() && line.find('\n') == std::string_view::npos); });
  } catch (const std::runtime_error& error) {
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
    return 0;
  }
  for (const std::int64_t n :
       {config.vocab_size, config.expert_dim, config.num_layers, config.num_heads, config.ffn_dim}) {
    require(n >= 1 && n <= (std::int64_t{1} << 26));
  }
  require(config.expert_dim % 4 == 0);
  require(config.mdi_mix >= 0.0F && config.mdi_mix <= 10.0F);
  require(config.stacks() == 1 || config.stacks() == 2);
  require(config.expert_dim % config.stack().num_heads == 0);
  for (const int id : config.ids.eos) require(id >= 0 && id < config.vocab_size);
  require(mmrec::models::parse_config_100m(to_json(config), "again") == config);
  return 0;
}
