#include "apps/generate/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <system_error>
#include <type_traits>
#include <variant>

#include "apps/common/input.h"
#include "models/files/file.h"
#include "models/files/json.h"
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

/// What `members` say of an option, else what it was.
float given(const Members& members, const SamplerOption& option, float otherwise) {
  const Json* const value = members.find(option.name);
  if (value == nullptr) return otherwise;
  const double x = value->is_number() ? value->get<double>() : NAN;
  // Of the float that it becomes: one may be too small for it.
  const bool reaches_min = option.above_min ? static_cast<double>(static_cast<float>(x)) > option.min : x >= option.min;
  if (!std::isfinite(x) || !reaches_min || x > static_cast<double>(most(option))) {
    members.refuse(
        option.name, *value,
        fmt::format("a number {} {} and at most {}", option.above_min ? "above" : "from", option.min, most(option)));
  }
  return static_cast<float>(x);
}
int given(const Members& members, const SamplerOption& option, int otherwise) {
  return static_cast<int>(members.integer(option.name, 0, kMaxInt).value_or(otherwise));
}
std::uint64_t given(const Members& members, const SamplerOption& option, std::uint64_t otherwise) {
  const Json* const value = members.find(option.name);
  if (value == nullptr) return otherwise;
  if (!value->is_number_unsigned()) {
    members.refuse(option.name, *value, "a whole number from 0 to 18446744073709551615");
  }
  return value->get<std::uint64_t>();
}

void set_sampler(const Members& members, bool with_seed, SamplerOptions& sampler) {
  for (const SamplerOption& option : kSamplerOptions) {
    if (!option.in_programs() || (is_seed(option) && !with_seed)) continue;
    option.visit(sampler, [&](auto& value) { value = given(members, option, value); });
  }
}

}  // namespace

GenerationDefaults parse_generation_defaults(std::string_view text, const std::string& file) {
  GenerationDefaults defaults;
  const Json json = rethrown_as<RejectedFile>([&] {
    models::require_json_object(text, file);
    return models::parse_json(text, file);
  });
  const Members members(json, file + ": ");
  SamplerOptions& sampler = defaults.sampler;
  set_sampler(members, false, sampler);
  if (const Json* const draws = members.find("do_sample")) {
    if (!draws->is_boolean()) members.refuse("do_sample", *draws, "true or false");
    if (!draws->get<bool>()) sampler.temperature = 0.0F;
  }
  if (const Json* const ids = members.find("eos_token_id")) {
    for (const Json& id : ids->is_array() ? *ids : Json::array({*ids})) {
      defaults.eos_token_ids.push_back(static_cast<int>(members.integer("eos_token_id", id, 0, kMaxInt)));
    }
  }
  defaults.file = file;
  return defaults;
}

GenerationDefaults load_generation_defaults(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / models::kGenerationConfigFile;
  std::error_code error;  // opening the file says it
  if (std::filesystem::status(path, error).type() == std::filesystem::file_type::not_found) return {};
  return parse_generation_defaults(rethrown_as<RejectedFile>([&] { return models::read_text(path, kMaxConfigBytes); }),
                                   path.string());
}

void set_sampler(const Json& object, SamplerOptions& sampler) { set_sampler(Members(object), true, sampler); }

void set_sampler(const Arguments& arguments, SamplerOptions& sampler) {
  for (const SamplerOption& option : kSamplerOptions) {
    if (!option.in_programs()) continue;
    option.visit(sampler, [&]<class T>(T& value) {
      if constexpr (std::is_same_v<T, float>) {
        const auto min = static_cast<float>(option.min);
        value = arguments.real(option.flag, min, most(option), option.above_min).value_or(value);
      } else if constexpr (std::is_same_v<T, int>) {
        value = static_cast<int>(arguments.integer(option.flag, value, static_cast<int>(option.min), kMaxInt));
      } else {
        value = arguments.unsigned64(option.flag).value_or(value);
      }
    });
  }
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
