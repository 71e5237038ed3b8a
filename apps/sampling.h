// Sampler settings: the command line before the folder's generation_config.json before what is built in.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "apps/cli.h"
#include "mmrec/sampler.h"

namespace mmrec::apps {

/// What a generation_config.json says, over the built-in defaults. `do_sample: false` means temperature 0.
struct GenerationDefaults {
  SamplerOptions sampler;
  std::vector<int> eos_token_ids;  // empty: not given
};

/// Reads folder/generation_config.json if there is one. Throws RejectedFile naming file, key, found and expected.
GenerationDefaults load_generation_defaults(const std::filesystem::path& folder);

/// `defaults` with --temp, --top-k, --top-p, --min-p, --repetition-penalty and --seed over them. Without --seed it is
/// `seed`, or random and below 2^53, so that every JSON reader keeps it.
SamplerOptions sampler_options(const Arguments& arguments, SamplerOptions defaults,
                               std::optional<std::uint64_t> seed = std::nullopt);

}  // namespace mmrec::apps
