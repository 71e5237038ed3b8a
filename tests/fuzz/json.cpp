// The strict JSON reader against nlohmann's: what it accepts is JSON with the same numbers, and it refuses JSON only
// for the reasons it documents (duplicate keys, NUL, a byte order mark, deep nesting, long keys).
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "models/files/json.h"

namespace {

using mmrec::models::JsonReader;

/// Sees whether a text that nlohmann accepts breaks one of the reader's own rules.
class Rules : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool broken = false;
  bool overflowed = false;  // a number beyond double, which nlohmann refuses although the grammar does not

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(std::int64_t) override { return true; }
  bool number_unsigned(std::uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_array() override { return close(); }
  bool key(std::string& text) override {
    if (!keys_.back().insert(text).second || text.size() > 4096 || keys_.back().size() > 1000) broken = true;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& error) override {
    constexpr int kNumberOverflow = 406;
    overflowed = error.id == kNumberOverflow;
    return false;
  }

 private:
  bool open() {
    keys_.emplace_back();
    if (keys_.size() > JsonReader::kMaxDepth) broken = true;
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }
  std::vector<std::set<std::string>> keys_;
};

/// Reads a value by its kind into a tree.
nlohmann::json read(JsonReader& reader) {
  std::string key;
  switch (reader.peek()) {
    case JsonReader::Kind::kObject: {
      nlohmann::json value = nlohmann::json::object();
      reader.begin_object();
      while (reader.next_key(key)) {
        const std::string name(key);
        value[name] = read(reader);
      }
      return value;
    }
    case JsonReader::Kind::kArray: {
      nlohmann::json value = nlohmann::json::array();
      reader.begin_array();
      while (reader.next_element()) value.push_back(read(reader));
      return value;
    }
    case JsonReader::Kind::kString:
      return reader.string(std::size_t{1} << 20);
    case JsonReader::Kind::kNumber:
      return reader.integer();
    case JsonReader::Kind::kBool:
      return reader.boolean();
    case JsonReader::Kind::kNull:
      reader.null();
      return nullptr;
  }
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  bool accepted = false;
  try {
    JsonReader reader(text, "input", 1000);
    reader.skip();
    accepted = true;
  } catch (const std::runtime_error&) {
  }
  Rules rules;
  const bool is_json = nlohmann::json::sax_parse(text, &rules);
  if (accepted && !is_json && !rules.overflowed) std::abort();
  const bool has_mark = text.substr(0, 3) == "\xef\xbb\xbf";
  const bool has_nul = text.find('\0') != std::string_view::npos;
  if (!accepted && is_json && !rules.broken && !has_mark && !has_nul) std::abort();
  try {  // the same values, where all the numbers are integers
    JsonReader reader(text, "input", 1000);
    const nlohmann::json tree = read(reader);
    if (tree != nlohmann::json::parse(text)) std::abort();
  } catch (const std::runtime_error&) {
  }
  return 0;
}
