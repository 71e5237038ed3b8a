// Sampler settings: the command line before the folder's generation_config.json before what is built in.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "apps/common/arguments.h"
#include "mmrec/sampler.h"

namespace mmrec::apps {

/// What a generation_config.json says, over the built-in defaults. `do_sample: false` means temperature 0.
struct GenerationDefaults {
  SamplerOptions sampler;
  std::vector<int> eos_token_ids;  // empty: not given
  std::string file;                // where they stand
};

/// Reads folder/generation_config.json, strict JSON of at most 1 MiB, if there is one. Throws RejectedFile naming file,
/// key, found and expected.
GenerationDefaults load_generation_defaults(const std::filesystem::path& folder);

/// The same of the text of one; `file` stands for it.
GenerationDefaults parse_generation_defaults(std::string_view text, const std::string& file);

/// Sets what the command line says of the options of kSamplerOptions. Throws UsageError.
void set_sampler(const Arguments& arguments, SamplerOptions& sampler);

/// Sets what `object` says under their names. Throws RejectedFile naming key, found and expected.
void set_sampler(const nlohmann::ordered_json& object, SamplerOptions& sampler);

/// The options but the seed under their names, as numbers.
nlohmann::ordered_json sampling_json(const SamplerOptions& options);

/// The chain as the sampler applies it, without filters that keep everything: "temp 0.8 > top-k 40 > top-p 0.95".
std::string chain_text(const SamplerOptions& options);

/// Below 2^53, so that every JSON reader keeps it.
std::uint64_t random_seed();

}  // namespace mmrec::apps
