#include "models/config_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "models/files/file.h"
#include "models/files/text.h"

namespace mmrec::models {
namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;
constexpr std::int64_t kMaxLayers = std::int64_t{1} << 12;
constexpr float kMaxMdiMix = 10.0F;
constexpr std::size_t kMaxEosIds = 1024;

/// The key that says which architecture reads the others, and those that common tools add to every config.json.
constexpr std::array<std::string_view, 6> kOtherKeys = {"model_type", "architectures",        "torch_dtype",
                                                        "dtype",      "transformers_version", "_name_or_path"};

bool contains(std::span<const std::string_view> keys, std::string_view key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

}  // namespace

ConfigReader::ConfigReader(std::string_view text, std::string name, const WarningSink& warn)
    : name_(std::move(name)), reader_((require_json_object(text, name_), text), name_, 1024), warn_(warn) {}

void ConfigReader::read(std::string_view key, std::int64_t& to) {
  if ((key == kFfn || key == "mem_dim") && reader_.skips_null()) return;
  const std::int64_t limit = key == "num_layers" ? kMaxLayers : kMaxSize;
  to = reader_.integer();
  if (to < 1 || to > limit) reader_.fail(fmt::format("found {}, expected 1 to {}", to, limit));
}

void ConfigReader::read(std::string_view /*key*/, bool& to) { to = reader_.boolean(); }

void ConfigReader::read(std::string_view /*key*/, float& to) {
  to = reader_.real();
  if (!(to >= 0.0F && to <= kMaxMdiMix)) reader_.fail(fmt::format("found {}, expected 0 to {}", to, kMaxMdiMix));
}

std::size_t ConfigReader::choice(std::span<const std::string_view> names) {
  const std::string found = reader_.string();
  const auto name = std::find(names.begin(), names.end(), found);
  if (name != names.end()) return static_cast<std::size_t>(name - names.begin());
  reader_.fail(fmt::format("found {}, expected {}", quote(found), choice_of(names)));
}

void ConfigReader::refuse(std::string_view reason) {
  if (reader_.boolean()) reader_.fail(fmt::format("found true, expected false: {}", reason));
}

void ConfigReader::check_ids(std::int64_t vocab_size) const {
  const auto check = [&](int id, const char* key) {
    if (id >= vocab_size) {
      fail(fmt::format("{}: found {}, expected a token id below vocab_size {}", key, id, vocab_size));
    }
  };
  if (ids_.bos) check(*ids_.bos, "bos_token_id");
  for (const int id : ids_.eos) check(id, "eos_token_id");
}

void ConfigReader::check_quarter(std::string_view key, std::int64_t width) const {
  if (width % 4 == 0) return;
  fail(fmt::format("{0}: found {1}, expected a multiple of 4 (the width of the decay gate is {0} / 4)", key, width));
}

void ConfigReader::check_totals(CheckedSize weights, CheckedSize state_bytes, std::string_view sizes) const {
  constexpr std::uint64_t kMaxWeightBytes = std::uint64_t{1} << 48;
  constexpr std::uint64_t kMaxStateBytes = std::uint64_t{1} << 40;
  if (!(weights * 4).at_most(kMaxWeightBytes)) fail("these sizes make more than 2^48 bytes of weights");
  if (!state_bytes.at_most(kMaxStateBytes)) {
    fail(fmt::format("{} make more than 2^40 bytes of state per sequence", sizes));
  }
}

void ConfigReader::require(bool present, std::string_view key) const {
  if (!present) fail(fmt::format("{} is missing", key));
}

void ConfigReader::fail(std::string_view message) const {
  throw std::runtime_error(fmt::format("{}: {}", name_, message));
}

void ConfigReader::rest(std::string_view key, std::span<const std::string_view> ignored) {
  if (key == "bos_token_id") {
    if (!reader_.skips_null()) ids_.bos = token_id();
    return;
  }
  if (key == "eos_token_id") return eos_token_id();
  if (key == kQuantizationKey) {
    if (!reader_.skips_null()) schemes_ = read_quantization(reader_);
    return;
  }
  if (!contains(ignored, key) && !contains(kOtherKeys, key) && warn_) {
    warn_(fmt::format("{}: unknown key {} is ignored", name_, quote(key)));
  }
  reader_.skip();
}

int ConfigReader::token_id() {
  const std::int64_t id = reader_.integer();
  if (id < 0 || id >= kMaxSize) reader_.fail(fmt::format("found {}, expected a token id below vocab_size", id));
  return static_cast<int>(id);
}

void ConfigReader::eos_token_id() {
  if (reader_.skips_null()) return;
  if (reader_.peek() != JsonReader::Kind::kArray) {
    ids_.eos.push_back(token_id());
    return;
  }
  reader_.begin_array();
  while (reader_.next_element()) {
    ids_.eos.push_back(token_id());
    if (ids_.eos.size() > kMaxEosIds) reader_.fail(fmt::format("more than {} ids", kMaxEosIds));
  }
}

std::string choice_of(std::span<const std::string_view> names) {
  std::string all;
  for (const std::string_view& name : names) {
    all += all.empty() ? "" : &name == &names.back() ? " or " : ", ";
    all += quote(name);
  }
  return all;
}

std::string json_of(std::int64_t value) { return std::to_string(value); }
std::string json_of(bool value) { return value ? "true" : "false"; }
std::string json_of(float value) { return fmt::format("{}", value); }
std::string json_of(const TextIds& ids) {
  std::string json;
  if (ids.bos) json += fmt::format(",\n  \"bos_token_id\": {}", *ids.bos);
  if (!ids.eos.empty()) {
    const std::vector<std::int64_t> eos(ids.eos.begin(), ids.eos.end());
    json += fmt::format(",\n  \"eos_token_id\": {}", list(eos));
  }
  return json;
}

}  // namespace mmrec::models
