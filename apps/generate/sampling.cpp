#include "apps/generate/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "apps/common/json_text.h"
#include "models/files/model_files.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uintmax_t kMaxConfigBytes = std::uintmax_t{1} << 20;
constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max();

// One range for each setting, wherever it comes from.
struct Range {
  float min = 0.0F;
  float max = 0.0F;
  bool above_min = false;

  /// Of the float that it becomes: one may be too small for it.
  bool holds(double x) const {
    return std::isfinite(x) && x <= max && (above_min ? static_cast<float>(x) > min : x >= min);
  }
};
constexpr Range kTemperature = {0.0F, 1000.0F};
constexpr Range kTopP = {0.0F, 1.0F, true};
constexpr Range kMinP = {0.0F, 1.0F};
constexpr Range kRepetitionPenalty = {0.0F, 1000.0F, true};

class ConfigReader {
 public:
  /// `where`, in messages, stands before a key.
  ConfigReader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {}

  std::optional<float> real(const char* key, const Range& range) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number() || !range.holds(value->get<double>())) {
      refuse(key, *value,
             fmt::format("a number {} {} and at most {}", range.above_min ? "above" : "from", range.min, range.max));
    }
    return static_cast<float>(value->get<double>());
  }

  std::optional<int> integer(const char* key, std::int64_t max) const {
    const Json* value = find(key);
    return value != nullptr ? std::optional(checked(key, *value, max)) : std::nullopt;
  }

  std::optional<std::uint64_t> unsigned64(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number_unsigned()) refuse(key, *value, "a whole number from 0 to 18446744073709551615");
    return value->get<std::uint64_t>();
  }

  /// All but the seed.
  SamplerChoices choices() const {
    return {.temperature = real("temperature", kTemperature),
            .top_k = integer("top_k", kMaxInt),
            .top_p = real("top_p", kTopP),
            .min_p = real("min_p", kMinP),
            .repetition_penalty = real("repetition_penalty", kRepetitionPenalty),
            .seed = {}};
  }

  bool boolean(const char* key, bool fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) refuse(key, *value, "true or false");
    return value->get<bool>();
  }

  std::vector<int> ids(const char* key) const {
    std::vector<int> ids;
    const Json* value = find(key);
    if (value == nullptr) return ids;
    if (!value->is_array()) return {checked(key, *value, kMaxInt)};
    for (const Json& id : *value) ids.push_back(checked(key, id, kMaxInt));
    return ids;
  }

 private:
  const Json* find(const char* key) const {
    const auto at = json_.find(key);
    return at == json_.end() || at->is_null() ? nullptr : &*at;
  }

  int checked(const char* key, const Json& value, std::int64_t max) const {
    const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() <= static_cast<std::uint64_t>(max);
    if (!fits) refuse(key, value, fmt::format("a whole number from 0 to {}", max));
    return static_cast<int>(value.get<std::uint64_t>());
  }

  [[noreturn]] void refuse(const char* key, const Json& value, const std::string& expected) const {
    throw RejectedFile(
        fmt::format("{}{}: not a valid value (found {}, expected {})", where_, key, brief(value), expected));
  }

  const Json& json_;
  std::string where_;
};

GenerationDefaults defaults_of(const Json& json, const std::string& file) {
  GenerationDefaults defaults;
  const ConfigReader reader(json, file + ": ");
  SamplerOptions& sampler = defaults.sampler;
  sampler = reader.choices().over(sampler);
  if (!reader.boolean("do_sample", true)) sampler.temperature = 0.0F;
  defaults.eos_token_ids = reader.ids("eos_token_id");
  defaults.file = file;
  return defaults;
}

}  // namespace

GenerationDefaults load_generation_defaults(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / models::kGenerationConfigFile;
  const std::optional<Json> found = read_json_file(path, kMaxConfigBytes);
  return found ? defaults_of(*found, path.string()) : GenerationDefaults();
}

GenerationDefaults parse_generation_defaults(std::string_view text, const std::string& file) {
  return defaults_of(parse_json_file(text, file), file);
}

SamplerChoices sampler_choices(const Json& object) {
  const ConfigReader reader(object, "");
  SamplerChoices choices = reader.choices();
  choices.seed = reader.unsigned64("seed");
  return choices;
}

SamplerOptions SamplerChoices::over(SamplerOptions defaults) const {
  defaults.temperature = temperature.value_or(defaults.temperature);
  defaults.top_k = top_k.value_or(defaults.top_k);
  defaults.top_p = top_p.value_or(defaults.top_p);
  defaults.min_p = min_p.value_or(defaults.min_p);
  defaults.repetition_penalty = repetition_penalty.value_or(defaults.repetition_penalty);
  defaults.seed = seed.value_or(defaults.seed);
  return defaults;
}

SamplerChoices sampler_choices(const Arguments& arguments) {
  const auto real = [&](std::string_view name, const Range& range) {
    return arguments.real(name, range.min, range.max, range.above_min);
  };
  SamplerChoices choices;
  choices.temperature = real("temp", kTemperature);
  if (arguments.has("top-k")) choices.top_k = static_cast<int>(arguments.integer("top-k", 0, 0, kMaxInt));
  choices.top_p = real("top-p", kTopP);
  choices.min_p = real("min-p", kMinP);
  choices.repetition_penalty = real("repetition-penalty", kRepetitionPenalty);
  choices.seed = arguments.unsigned64("seed");
  return choices;
}

std::string chain_text(const SamplerOptions& options) {
  std::string chain;
  if (options.repetition_penalty != 1.0F && options.repetition_window > 0) {
    chain =
        fmt::format("repetition penalty {} of the last {} > ", options.repetition_penalty, options.repetition_window);
  }
  if (options.temperature == 0.0F) return chain + "greedy";
  chain += fmt::format("temp {}", options.temperature);
  if (options.top_k > 0) chain += fmt::format(" > top-k {}", options.top_k);
  if (options.top_p < 1.0F) chain += fmt::format(" > top-p {}", options.top_p);
  if (options.min_p > 0.0F) chain += fmt::format(" > min-p {}", options.min_p);
  return chain;
}

std::uint64_t random_seed() {
  std::random_device device;
  return ((std::uint64_t{device()} << 32) | device()) & ((std::uint64_t{1} << 53) - 1);
}

}  // namespace mmrec::apps
