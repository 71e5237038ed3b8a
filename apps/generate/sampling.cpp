#include "apps/generate/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <type_traits>
#include <variant>

#include "apps/common/json_text.h"
#include "models/files/model_files.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uintmax_t kMaxConfigBytes = std::uintmax_t{1} << 20;
constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max();

/// The largest value that programs take, where the library has no bound.
float most(const SamplerOption& option) { return static_cast<float>(std::min(option.max, 1000.0)); }
bool is_seed(const SamplerOption& option) {
  return std::holds_alternative<std::uint64_t SamplerOptions::*>(option.member);
}

class ConfigReader {
 public:
  /// `where`, in messages, stands before a key.
  ConfigReader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {}

  std::optional<float> value(const SamplerOption& option, float) const {
    const Json* value = find(option.name);
    if (value == nullptr) return std::nullopt;
    const double x = value->is_number() ? value->get<double>() : NAN;
    // Of the float that it becomes: one may be too small for it.
    const bool reaches_min =
        option.above_min ? static_cast<double>(static_cast<float>(x)) > option.min : x >= option.min;
    if (!std::isfinite(x) || !reaches_min || x > static_cast<double>(most(option))) {
      refuse(
          option.name, *value,
          fmt::format("a number {} {} and at most {}", option.above_min ? "above" : "from", option.min, most(option)));
    }
    return static_cast<float>(x);
  }
  std::optional<int> value(const SamplerOption& option, int) const {
    const Json* value = find(option.name);
    return value != nullptr ? std::optional(checked(option.name, *value, kMaxInt)) : std::nullopt;
  }
  std::optional<std::uint64_t> value(const SamplerOption& option, std::uint64_t) const {
    const Json* value = find(option.name);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number_unsigned()) refuse(option.name, *value, "a whole number from 0 to 18446744073709551615");
    return value->get<std::uint64_t>();
  }

  SamplerChoices choices(bool with_seed) const {
    return SamplerChoices::of([&]<class T>(const SamplerOption& option, T type) {
      return with_seed || !is_seed(option) ? value(option, type) : std::optional<T>();
    });
  }

  bool boolean(std::string_view key, bool fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) refuse(key, *value, "true or false");
    return value->get<bool>();
  }

  std::vector<int> ids(std::string_view key) const {
    std::vector<int> ids;
    const Json* value = find(key);
    if (value == nullptr) return ids;
    if (!value->is_array()) return {checked(key, *value, kMaxInt)};
    for (const Json& id : *value) ids.push_back(checked(key, id, kMaxInt));
    return ids;
  }

 private:
  const Json* find(std::string_view key) const {
    const auto at = json_.find(key);
    return at == json_.end() || at->is_null() ? nullptr : &*at;
  }

  int checked(std::string_view key, const Json& value, std::int64_t max) const {
    const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() <= static_cast<std::uint64_t>(max);
    if (!fits) refuse(key, value, fmt::format("a whole number from 0 to {}", max));
    return static_cast<int>(value.get<std::uint64_t>());
  }

  [[noreturn]] void refuse(std::string_view key, const Json& value, const std::string& expected) const {
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
  sampler = reader.choices(false).over(sampler);
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

SamplerChoices sampler_choices(const Json& object) { return ConfigReader(object, "").choices(true); }

SamplerOptions SamplerChoices::over(SamplerOptions defaults) const {
  for (std::size_t i = 0; i < kSamplerOptions.size(); ++i) {
    if (is_set_[i]) std::visit([&](auto at) { defaults.*at = values_.*at; }, kSamplerOptions[i].member);
  }
  return defaults;
}

SamplerChoices sampler_choices(const Arguments& arguments) {
  return SamplerChoices::of([&]<class T>(const SamplerOption& option, T) -> std::optional<T> {
    if constexpr (std::is_same_v<T, float>) {
      return arguments.real(option.flag, static_cast<float>(option.min), most(option), option.above_min);
    } else if constexpr (std::is_same_v<T, int>) {
      if (!arguments.has(option.flag)) return std::nullopt;
      return static_cast<int>(arguments.integer(option.flag, 0, static_cast<int>(option.min), kMaxInt));
    } else {
      return arguments.unsigned64(option.flag);
    }
  });
}

Json sampling_json(const SamplerOptions& options) {
  Json json = Json::object();
  for (const SamplerOption& option : kSamplerOptions) {
    if (!option.in_programs() || is_seed(option)) continue;
    option.visit(options, [&]<class T>(const T& value) {
      if constexpr (std::is_same_v<T, float>) {
        json[std::string(option.name)] = shortest(value);
      } else {
        json[std::string(option.name)] = value;
      }
    });
  }
  return json;
}

std::string chain_text(const SamplerOptions& options) {
  std::string chain;
  if (options.repetition_penalty != 1.0F && options.repetition_window > 0) {
    chain =
        fmt::format("repetition penalty {} of the last {} > ", options.repetition_penalty, options.repetition_window);
  }
  if (options.temperature == 0.0F) return chain + "greedy";
  chain += fmt::format("temp {}", options.temperature);
  for (const SamplerOption& option : kSamplerOptions) {
    option.visit(options, [&](auto value) {
      if (option.off && static_cast<double>(value) != *option.off) chain += fmt::format(" > {} {}", option.flag, value);
    });
  }
  return chain;
}

std::uint64_t random_seed() {
  std::random_device device;
  return ((std::uint64_t{device()} << 32) | device()) & ((std::uint64_t{1} << 53) - 1);
}

}  // namespace mmrec::apps
