// The strict JSON reader. Recursion-free, as nlohmann's parser of events is.
#include "models/files/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <type_traits>
#include <unordered_set>
#include <vector>

#include "models/files/text.h"

namespace mmrec::models {
namespace {

using nlohmann::json;
using Tree = nlohmann::ordered_json;

constexpr std::size_t kMaxKeyBytes = 4096;
constexpr std::size_t kMaxKeys = 100'000;

/// Receives the events of a text. Refuses JSON that is not strict, knows the path of keys at every byte, and builds a
/// tree if it gets one.
class Rules {
 public:
  Rules(std::string_view text, const std::string& name, std::size_t max_keys, Tree* tree = nullptr)
      : text_(text), name_(name), max_keys_(max_keys), tree_(tree) {}

  /// Throws unless the text is strict JSON.
  void check() {
    if (text_.starts_with("\xef\xbb\xbf")) fail("begins with a byte order mark (expected plain UTF-8)");
    at_ = std::min(text_.find('\0'), text_.size());  // to nlohmann's parser the text would end there
    if (at_ < text_.size()) fail("NUL byte in JSON text");
    parse();
  }
  /// Throws `message` for the end of the text, which is the beginning of a strict one.
  [[noreturn]] void fail_at_end(std::string_view message) {
    is_cut_ = true;
    parse();
    fail(message);
  }

  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(std::int64_t value) { return add(value); }
  bool number_unsigned(std::uint64_t value) { return add(value); }
  bool number_float(double value, const std::string& /*token*/) { return add(value); }
  bool string(std::string& value) { return add(std::move(value)); }
  bool binary(const json::binary_t& /*value*/) { return true; }  // uncovered: JSON has none
  bool start_object(std::size_t /*size*/) { return open(json::value_t::object); }
  bool start_array(std::size_t /*size*/) { return open(json::value_t::array); }
  bool end_object() { return frames_.pop_back(), true; }
  bool end_array() { return end_object(); }
  bool key(std::string& key) {
    Frame& frame = frames_.back();
    frame.key.clear();
    if (key.size() > kMaxKeyBytes) fail(fmt::format("key is too long (limit {} bytes)", kMaxKeyBytes));
    if (!frame.keys.insert(key).second) fail(fmt::format("duplicate key {}", quote(key)));
    if (frame.keys.size() > max_keys_) fail(fmt::format("object with more than {} keys", max_keys_));
    frame.key = std::move(key);
    return true;
  }
  bool parse_error(std::size_t /*position*/, const std::string& token, const json::exception& error) {
    if (is_cut_) return false;
    std::string what = error.what();  // "[CODE] parse error at line L, column C: WHAT; last read: 'TOKEN'; expected X"
    what.erase(0, std::min({what.find("syntax error"), what.find("number overflow"), what.size()}));
    constexpr std::string_view kToken = "; last read: '";
    const std::size_t cut = what.find(kToken);  // the token may be long, and of any bytes
    if (cut != std::string::npos) what.replace(cut, kToken.size() + token.size() + 1, " in " + quote(token));
    what.erase(std::min(what.find(" parsing '"), what.size()));
    if (at_ < text_.size()) --at_;  // the byte that is wrong has been read
    fail("invalid JSON: " + what);
  }

 private:
  struct Frame {
    Tree* container = nullptr;  // in the tree
    std::unordered_set<std::string> keys;
    std::string key;  // of the member being read
  };
  /// Goes through the text and tells how far.
  struct Iterator {
    // NOLINTBEGIN(readability-identifier-naming): the standard's names
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = const char*;
    using reference = char;
    // NOLINTEND(readability-identifier-naming)
    Rules* rules;
    char operator*() const { return rules->text_[rules->at_]; }
    Iterator& operator++() { return ++rules->at_, *this; }
    bool operator==(const Iterator& /*end*/) const { return rules->at_ == rules->text_.size(); }
  };

  bool open(json::value_t kind) {
    if (frames_.size() == JsonReader::kMaxDepth) fail(fmt::format("nested too deeply (limit {})", frames_.size()));
    Tree* const container = tree_ == nullptr ? nullptr : put(kind);
    frames_.emplace_back().container = container;
    return true;
  }
  template <class Value>
  bool add(Value&& value) {
    if (tree_ != nullptr) put(std::forward<Value>(value));
    return true;
  }
  /// Puts a value where it stands in the text. Not by key: the tree would look for it among all the members.
  Tree* put(Tree value) {
    if (frames_.empty()) return &(*tree_ = std::move(value));
    Tree& container = *frames_.back().container;
    if (container.is_array()) return &container.emplace_back(std::move(value));
    return &container.get_ref<Tree::object_t&>().emplace_back(frames_.back().key, std::move(value)).second;
  }

  void parse() {
    at_ = 0;
    json::sax_parse(Iterator{this}, Iterator{this}, this);
  }
  [[noreturn]] void fail(std::string_view message) const {
    std::string where = name_.empty() ? "" : name_ + ": ";
    for (const Frame& frame : frames_) {
      if (!frame.key.empty()) where += printable(frame.key) + ": ";
    }
    const auto line = 1 + std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(at_), '\n');
    const bool has_lines = text_.find('\n') != std::string_view::npos;
    throw std::runtime_error(
        fmt::format("{}{} (at byte {}{})", where, message, at_, has_lines ? fmt::format(", line {}", line) : ""));
  }

  std::string_view text_;
  const std::string& name_;
  std::size_t max_keys_;
  std::size_t at_ = 0;  // bytes read
  bool is_cut_ = false;
  Tree* tree_;
  std::vector<Frame> frames_;
};

}  // namespace

Tree parse_json(std::string_view text, const std::string& name) {
  Tree tree;
  Rules(text, name, kMaxKeys, &tree).check();
  return tree;
}

std::string json_string(const std::string& text) { return json(text).dump(); }

JsonReader::JsonReader(std::string_view text, std::string name, std::size_t max_keys)
    : text_(text), name_(std::move(name)), max_keys_(max_keys) {
  Rules(text_, name_, max_keys_).check();
}

void JsonReader::fail(std::string_view message) const {
  Rules(text_.substr(0, value_begin_), name_, max_keys_).fail_at_end(message);
}

void JsonReader::expect(Kind kind, std::string_view expected) {
  constexpr std::string_view kNames[] = {"an object", "an array", "a string", "a number", "a boolean", "null"};
  const Kind found = peek();
  if (found != kind) fail(fmt::format("found {}, expected {}", kNames[static_cast<std::size_t>(found)], expected));
}

/// What comes after white space; NUL, which no text holds, at the end.
char JsonReader::next_char() {
  at_ = std::min(text_.find_first_not_of(" \n\r\t", at_), text_.size());
  return at_ < text_.size() ? text_[at_] : '\0';
}

JsonReader::Kind JsonReader::peek() {
  const char c = next_char();
  value_begin_ = at_;
  const std::size_t kind = std::string_view("{[\"0tn").find(c);
  if (kind != std::string_view::npos) return static_cast<Kind>(kind);
  return c == 'f' ? Kind::kBool : Kind::kNumber;
}

void JsonReader::begin_object() {
  expect(Kind::kObject, "an object");
  ++at_;
}

void JsonReader::begin_array() {
  expect(Kind::kArray, "an array");
  ++at_;
}

bool JsonReader::next_element() {
  const char c = next_char();
  if (c == ']' || c == '}') return value_begin_ = ++at_, false;  // what fail() then speaks of has been closed
  if (c == ',') ++at_;
  return true;
}

bool JsonReader::next_key(std::string& key) {
  if (!next_element()) return false;
  key = unescaped(token());
  next_char();
  ++at_;  // past the colon
  peek();
  return true;
}

/// Moves past the string, number or word that comes next.
std::string_view JsonReader::token() {
  const bool is_string = next_char() == '"';
  const std::size_t begin = at_;
  if (is_string) {
    while (text_[at_ = text_.find_first_of("\"\\", at_ + 1)] == '\\') ++at_;  // it has an end: the text is JSON
    ++at_;
  } else {
    at_ = text_.find_first_of(",]} \n\r\t", begin);
  }
  at_ = std::min(at_, text_.size());
  return text_.substr(begin, at_ - begin);
}

std::string JsonReader::unescaped(std::string_view token) const {
  if (token.find('\\') != std::string_view::npos) return json::parse(token).get<std::string>();
  return std::string(token.substr(1, token.size() - 2));
}

std::string JsonReader::string(std::size_t max_bytes) {
  expect(Kind::kString, "a string");
  std::string text = unescaped(token());
  if (text.size() > max_bytes) fail(fmt::format("string is too long (limit {} bytes)", max_bytes));
  return text;
}

template <class Number>
Number JsonReader::number(std::string_view expected, std::string_view type) {
  expect(Kind::kNumber, expected);
  const std::string_view text = token();
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_out_of_range = error == std::errc::result_out_of_range;
  if (is_out_of_range) fail(fmt::format("found {}, expected {} that fits in {}", quote(text), expected, type));
  const bool is_negative_zero = std::is_integral_v<Number> && text == "-0";
  if (error != std::errc() || end != text.data() + text.size() || is_negative_zero) {
    fail(fmt::format("found {}, expected {}", quote(text), expected));
  }
  return value;
}

std::int64_t JsonReader::integer() { return number<std::int64_t>("an integer", "64 bits"); }

float JsonReader::real() { return number<float>("a number", "fp32"); }

bool JsonReader::boolean() {
  expect(Kind::kBool, "true or false");
  return token() == "true";
}

bool JsonReader::skips_null() {
  if (peek() != Kind::kNull) return false;
  token();
  return true;
}

std::string_view JsonReader::skip() {
  peek();
  std::size_t depth = 0;
  do {
    const char c = next_char();
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (std::string_view("{[]},:").find(c) != std::string_view::npos) {
      ++at_;
    } else {
      token();
    }
  } while (depth > 0);
  return text_.substr(value_begin_, at_ - value_begin_);
}

}  // namespace mmrec::models
