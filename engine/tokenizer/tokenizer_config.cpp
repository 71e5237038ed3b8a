// Reading tokenizer_config.json, of which only a few keys are used: the rest is other programs'.
#include "engine/tokenizer/tokenizer_config.h"

#include <fmt/format.h>

#include <charconv>
#include <unordered_map>

#include "engine/require.h"
#include "models/files/file.h"
#include "models/files/json.h"
#include "models/files/text.h"
#include "models/files/utf8.h"

namespace mmrec::engine {
namespace {

using models::JsonReader;
using models::quote;
using Kind = JsonReader::Kind;

/// A string, or an object with the string as its "content".
std::string read_token(JsonReader& in) {
  if (in.skips_null()) return {};
  if (in.peek() == Kind::kString) return in.string();
  std::optional<std::string> content;
  std::string key;
  in.begin_object();
  while (in.next_key(key)) {
    if (key == "content") {
      content = in.string();
    } else {
      in.skip();
    }
  }
  if (!content || content->empty()) in.fail("expected a string, or an object with a \"content\"");
  return *content;
}

/// Collects special tokens from the two ways of naming them.
class SpecialTokens {
 public:
  explicit SpecialTokens(std::map<int, std::string>& tokens) : tokens_(tokens) {}

  /// `in` read what is added, and says where it stands. The same token of the same id is no fault.
  void add(const JsonReader& in, const std::string& text, std::int64_t id) {
    if (text.empty() || text.size() > kMaxTokenBytes) {
      in.fail(fmt::format("found a special token of {} bytes, expected 1..{}", text.size(), kMaxTokenBytes));
    }
    if (id < 0 || id >= static_cast<std::int64_t>(kMaxTokens)) {
      in.fail(fmt::format("found id {} of {}, expected 0..{}", id, quote(text), kMaxTokens - 1));
    }
    const auto [named, is_new] = tokens_.emplace(static_cast<int>(id), text);
    if (named->second != text) {
      in.fail(fmt::format("found id {} for {} and for {}, expected one token", id, quote(named->second), quote(text)));
    }
    const auto [numbered, ignored] = ids_.emplace(text, id);
    if (numbered->second != id) {
      in.fail(fmt::format("found ids {} and {} for {}, expected one id", numbered->second, id, quote(text)));
    }
    if (tokens_.size() > kMaxSpecialTokens) in.fail(fmt::format("found more than {} tokens", kMaxSpecialTokens));
  }

 private:
  std::map<int, std::string>& tokens_;
  std::unordered_map<std::string, std::int64_t> ids_;
};

}  // namespace

TokenizerConfig parse_tokenizer_config(std::string_view text, const std::string& name, bool of_ranks) {
  models::require_json_object(text, name);
  TokenizerConfig config;
  SpecialTokens special(config.special_tokens);
  JsonReader in(text, name);
  std::string key;
  in.begin_object();
  while (in.next_key(key)) {
    if (key == "add_bos_token" && in.peek() == Kind::kBool) {
      config.add_bos = in.boolean();
    } else if (key == "add_bos_token" && in.peek() != Kind::kNull) {
      in.fail("add_bos_token: expected true, false or null");
    } else if (key == "bos_token") {
      config.bos = read_token(in);
    } else if (key == "eos_token") {
      config.eos = read_token(in);
    } else if (of_ranks && key == "pattern") {
      config.pattern = in.string(kMaxPatternBytes);
    } else if (of_ranks && key == "special_tokens") {  // tiktoken's: ids by text
      in.begin_object();
      while (in.next_key(key)) special.add(in, key, in.integer());
    } else if (of_ranks && key == "added_tokens_decoder") {  // Hugging Face's: tokens by id
      in.begin_object();
      while (in.next_key(key)) {
        int id = -1;
        const auto [end, fault] = std::from_chars(key.data(), key.data() + key.size(), id);
        if (fault != std::errc() || end != key.data() + key.size()) {
          in.fail(fmt::format("found key {}, expected an id", quote(key)));
        }
        special.add(in, read_token(in), id);
      }
    } else {
      in.skip();
    }
  }
  return config;
}

void apply(const TokenizerConfig& config, const std::string& config_name, const std::string& name,
           TokenizerModel& model) {
  const auto resolve = [&](const std::optional<std::string>& token, const char* key, int& id) {
    if (!token) return;
    id = token->empty() ? -1 : model.find(*token);
    expect(id >= 0 || token->empty(), "{}: {}: found {}, expected a piece of {}", config_name, key, quote(*token),
           name);
  };
  resolve(config.bos, "bos_token", model.bos_id);
  resolve(config.eos, "eos_token", model.eos_id);
  model.adds_bos = config.add_bos.value_or(model.bos_id >= 0);
  expect(!model.adds_bos || model.bos_id >= 0, "{}: add_bos_token: found true, expected false as there is no BOS",
         config_name);
}

}  // namespace mmrec::engine
