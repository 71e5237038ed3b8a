// Any config.json of mmrec-jax is refused, or is one whose invariants hold and that survives a round trip.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "models/mmrec_jax/config.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  namespace jax = mmrec::models::jax;
  jax::Config config;
  try {
    config = jax::parse_config({reinterpret_cast<const char*>(data), size}, "input", [](std::string_view line) {
      require(!line.empty() && line.find('\n') == std::string_view::npos);
    });
  } catch (const std::runtime_error& error) {
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
    return 0;
  }
  for (const std::int64_t n :
       {config.vocab_size, config.model_dim, config.num_layers, config.num_heads, config.long_mem_len}) {
    require(n >= 1 && n <= (std::int64_t{1} << 24));
  }
  require(config.model_dim % 4 == 0 && config.num_heads <= config.model_dim);
  for (const int id : config.ids.eos) require(id >= 0 && id < config.vocab_size);
  require(jax::parse_config(jax::to_json(config), "again") == config);
  return 0;
}
