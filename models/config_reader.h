// What the config.json of every architecture has in common: sizes and numbers within bounds, token ids, keys that other
// tools add, and how a fault is named.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/files/json.h"
#include "models/files/warning_sink.h"

namespace mmrec::models {

inline constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;
inline constexpr std::int64_t kMaxLayers = std::int64_t{1} << 12;
inline constexpr std::uint64_t kMaxWeightBytes = std::uint64_t{1} << 48;
inline constexpr std::uint64_t kMaxStateBytes = std::uint64_t{1} << 40;
inline constexpr float kMaxMdiMix = 10.0F;

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

  /// member(key) reads the value of a key and returns true, or returns false for one that it does not know: those in
  /// `ignored`, those of other tools and the token ids are looked after, others reported. model_type must be `type`.
  template <class Member>
  void read_members(std::string_view type, std::span<const std::string_view> ignored, const Member& member) {
    bool has_type = false;
    reader_.begin_object();
    for (std::string key; reader_.next_key(key);) {
      if (key == "model_type") {
        model_type(type);
        has_type = true;
      } else if (!member(std::string_view(key))) {
        other(key, ignored);
      }
    }
    require(has_type, "model_type");
  }

  JsonReader& json() { return reader_; }
  /// Reads past a null: the public classes write None for "the default".
  bool is_null();
  /// A size, 1 to 2^24; of num_layers to 2^12.
  void read(std::string_view key, std::int64_t& to);
  void read(std::string_view key, bool& to);
  /// mdi_mix, 0 to 10.
  void read(std::string_view key, float& to);

  const TextIds& ids() const { return ids_; }
  /// Throws for an id that is not below vocab_size.
  void check_ids(std::int64_t vocab_size) const;
  void require(bool present, std::string_view key) const;
  [[noreturn]] void fail(std::string_view message) const;

 private:
  void model_type(std::string_view type);
  void other(std::string_view key, std::span<const std::string_view> ignored);
  int token_id();
  void eos_token_id();

  std::string name_;
  JsonReader reader_;
  const WarningSink& warn_;
  TextIds ids_;
};

/// ',\n  "bos_token_id": ...' and the like of those that are there.
std::string to_json(const TextIds& ids);

}  // namespace mmrec::models
