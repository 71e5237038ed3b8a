// Any generation_config.json is refused by one line, or gives settings that the sampler takes.
#include <cstddef>
#include <cstdint>

#include "apps/common/cli.h"
#include "apps/generate/sampling.h"
#include "mmrec/sampler.h"
#include "tests/fuzz/harness.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using mmrec::fuzz::require;
  mmrec::apps::GenerationDefaults defaults;
  try {
    defaults = mmrec::apps::parse_generation_defaults(mmrec::fuzz::text_of(data, size), "input");
  } catch (const mmrec::apps::RejectedFile& error) {
    mmrec::fuzz::require_line(error.what());
    return 0;
  }
  const mmrec::Sampler takes(defaults.sampler);
  for (const int id : defaults.eos_token_ids) require(id >= 0);
  require(!mmrec::apps::chain_text(defaults.sampler).empty());
  return 0;
}
