// config.json of any architecture: what all have in common, and how an architecture's table of keys is read and
// written.
//
// A `Config` has kModelType, vocab_size, ids, and keys(config, f), which calls f(key, member) for every key in the
// order of to_json(); f(key, member, names) for a choice among names. A member is a size, a bool, a float or an enum.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "models/files/checked.h"
#include "models/files/json.h"
#include "models/files/warning_sink.h"
#include "models/weights/quantization_config.h"

namespace mmrec::models {

/// Which tokens begin and end a text.
struct TextIds {
  std::optional<int> bos;  // absent: the tokenizer's
  std::vector<int> eos;    // empty: the tokenizer's

  bool operator==(const TextIds&) const = default;
};

/// Goes through the members of one config.json. Every fault is std::runtime_error naming file, key, found and expected.
class ConfigReader {
 public:
  /// `text` must outlive this; `name` stands for the file.
  ConfigReader(std::string_view text, std::string name, const WarningSink& warn);

  /// Reads all members into `config`. other(key) reads the value of a key that is not in the table and returns true, or
  /// returns false. Keys in `ignored` and those of other tools are skipped, unknown ones reported. Sizes that are 0
  /// before must be there, but for ffn_dim, and ids lie within the vocabulary. The caller has looked at model_type.
  template <class Config, class Other>
  void read(Config& config, std::span<const std::string_view> ignored, const Other& other) {
    reader_.begin_object();
    for (std::string key; reader_.next_key(key);) {
      bool is_known = false;
      Config::keys(config, [&](std::string_view name, auto& member, const auto&... names) {
        if (name == key) is_known = true, read(key, member, names...);
      });
      if (!is_known && !other(std::string_view(key))) rest(key, ignored);
    }
    Config::keys(config, [&](std::string_view key, const auto& member, const auto&... /*names*/) {
      if constexpr (std::is_same_v<decltype(member), const std::int64_t&>) require(member != 0 || key == kFfn, key);
    });
    config.ids = ids_;
    config.quantization = schemes_;
    check_ids(config.vocab_size);
  }

  JsonReader& json() { return reader_; }
  /// A size, 1 to 2^24; of num_layers to 2^12. The public classes write null for the default of ffn_dim and mem_dim.
  void read(std::string_view key, std::int64_t& to);
  /// Reads `true` for no feature of this name; else fails with the reason.
  void refuse(std::string_view reason);

  /// The decay gate is a quarter as wide as the model.
  void check_quarter(std::string_view key, std::int64_t width) const;
  /// Weights in fp32 of at most 2^48 bytes, and a sequence's state of at most 2^40, which depends on `sizes`.
  void check_totals(CheckedSize weights, CheckedSize state_bytes, std::string_view sizes) const;
  [[noreturn]] void fail(std::string_view message) const;

 private:
  static constexpr std::string_view kFfn = "ffn_dim";

  void read(std::string_view key, bool& to);
  void read(std::string_view key, float& to);  // mdi_mix, 0 to 10
  template <class Enum, std::size_t kCount>
  void read(std::string_view /*key*/, Enum& to, const std::array<std::string_view, kCount>& names) {
    to = static_cast<Enum>(choice(names));
  }
  std::size_t choice(std::span<const std::string_view> names);
  void require(bool present, std::string_view key) const;
  void rest(std::string_view key, std::span<const std::string_view> ignored);
  int token_id();
  void eos_token_id();
  void check_ids(std::int64_t vocab_size) const;

  std::string name_;
  JsonReader reader_;
  const WarningSink& warn_;
  TextIds ids_;
  QuantSchemes schemes_;
};

/// "a", "b" or "c", each quoted.
std::string choice_of(std::span<const std::string_view> names);

/// A value as JSON.
std::string json_of(std::int64_t value);
std::string json_of(bool value);
std::string json_of(float value);
template <class Enum, std::size_t kCount>
std::string json_of(Enum value, const std::array<std::string_view, kCount>& names) {
  return '"' + std::string(names[static_cast<std::size_t>(value)]) + '"';
}
/// ',\n  "bos_token_id": ...' and the like of those that are there.
std::string json_of(const TextIds& ids);

/// config.json for a configuration; parsing it gives it back.
template <class Config>
requires requires { Config::kModelType; }
std::string to_json(const Config& config) {
  std::string json = "{\n  \"model_type\": \"" + std::string(Config::kModelType) + '"';
  Config::keys(config, [&](const char* key, const auto& value, const auto&... names) {
    json += ",\n  \"" + std::string(key) + "\": " + json_of(value, names...);
  });
  return json + json_of(config.ids) + "\n}\n";
}

}  // namespace mmrec::models
