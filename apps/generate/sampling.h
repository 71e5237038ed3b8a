// Sampler settings: the command line before the folder's generation_config.json before what is built in.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
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

/// What is asked for of a sampler; what is unset stays as it was.
class SamplerChoices {
 public:
  /// Takes read(option, T{}) of each option that programs have, a std::optional<T> of the member's type.
  template <class Read>
  static SamplerChoices of(const Read& read) {
    SamplerChoices choices;
    for (std::size_t i = 0; i < kSamplerOptions.size(); ++i) {
      const SamplerOption& option = kSamplerOptions[i];
      if (!option.in_programs()) continue;
      option.visit(choices.values_, [&]<class T>(T& value) {
        const std::optional<T> found = read(option, T{});
        choices.is_set_[i] = found.has_value();
        value = found.value_or(value);
      });
    }
    return choices;
  }
  /// `defaults` with these over them.
  SamplerOptions over(SamplerOptions defaults) const;

 private:
  SamplerOptions values_;
  std::bitset<kSamplerOptions.size()> is_set_;
};

/// What the command line says of the options of kSamplerOptions. Throws UsageError.
SamplerChoices sampler_choices(const Arguments& arguments);

/// What `object` says under their names. Throws RejectedFile naming key, found and expected.
SamplerChoices sampler_choices(const nlohmann::ordered_json& object);

/// The options but the seed under their names, as numbers.
nlohmann::ordered_json sampling_json(const SamplerOptions& options);

/// The chain as the sampler applies it, without filters that keep everything: "temp 0.8 > top-k 40 > top-p 0.95".
std::string chain_text(const SamplerOptions& options);

/// Below 2^53, so that every JSON reader keeps it.
std::uint64_t random_seed();

}  // namespace mmrec::apps
