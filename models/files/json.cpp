// The strict JSON reader. Recursion-free: the nesting lives in frames_, bounded by kMaxDepth.
#include "models/files/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <stdexcept>

#include "models/files/text.h"

namespace mmrec::models {
namespace {

constexpr std::size_t kLinearKeys = 16;
constexpr std::size_t kMaxKeyBytes = 4096;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

void append_utf8(unsigned code, std::string& to) {
  const auto put = [&](unsigned byte) { to.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0 | (code >> 6));
    put(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    put(0xe0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3f));
    put(0x80 | (code & 0x3f));
  } else {
    put(0xf0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3f));
    put(0x80 | ((code >> 6) & 0x3f));
    put(0x80 | (code & 0x3f));
  }
}

}  // namespace

JsonReader::JsonReader(std::string_view text, std::string name, std::size_t max_keys)
    : text_(text), name_(std::move(name)), max_keys_(max_keys) {
  if (text_.starts_with("\xef\xbb\xbf")) fail_at(0, "begins with a byte order mark (expected plain UTF-8)");
  if (const std::size_t nul = text_.find('\0'); nul != std::string_view::npos) fail_at(nul, "NUL byte in JSON text");
}

void JsonReader::fail_at(std::size_t byte, std::string_view message) const {
  std::string where = name_ + ": ";
  for (std::size_t i = 0; i < depth_; ++i) {
    if (!frames_[i].key.empty()) where += printable(frames_[i].key) + ": ";
  }
  const std::size_t end = std::min(byte, text_.size());
  const auto line = 1 + std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(end), '\n');
  throw std::runtime_error(fmt::format("{}{} (at byte {}, line {})", where, message, byte, line));
}

void JsonReader::expect(Kind kind, std::string_view expected) {
  constexpr std::string_view kNames[] = {"an object", "an array", "a string", "a number", "a boolean", "null"};
  const Kind found = peek();
  if (found != kind) fail(fmt::format("found {}, expected {}", kNames[static_cast<std::size_t>(found)], expected));
}

void JsonReader::fail_found(std::string_view expected) const {
  if (at_ >= text_.size()) fail_at(at_, fmt::format("invalid JSON: found the end of the text, expected {}", expected));
  fail_at(at_, fmt::format("invalid JSON: found {}, expected {}", quote(text_.substr(at_, 1)), expected));
}

void JsonReader::skip_space() {
  while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t')) {
    ++at_;
  }
}

char JsonReader::next_char(std::string_view expected) {
  skip_space();
  if (at_ >= text_.size()) fail_found(expected);
  return text_[at_];
}

JsonReader::Kind JsonReader::peek() {
  const char c = next_char("a value");
  value_begin_ = at_;
  switch (c) {
    case '{':
      return Kind::kObject;
    case '[':
      return Kind::kArray;
    case '"':
      return Kind::kString;
    case 't':
    case 'f':
      return Kind::kBool;
    case 'n':
      return Kind::kNull;
    default:
      if (c != '-' && !is_digit(c)) fail_found("a value");
      return Kind::kNumber;
  }
}

void JsonReader::push(bool is_object) {
  if (depth_ == kMaxDepth) fail_at(at_, fmt::format("nested too deeply (limit {})", kMaxDepth));
  ++at_;
  if (depth_ == frames_.size()) frames_.emplace_back();
  Frame& frame = frames_[depth_++];
  frame.is_object = is_object;
  frame.is_empty = true;
  frame.keys.clear();
  if (!frame.key_set.empty()) frame.key_set = {};  // clear() would pay for the largest object that was ever here
  frame.unescaped.clear();
  frame.key = {};
}

void JsonReader::begin_object() {
  expect(Kind::kObject, "an object");
  push(true);
}

void JsonReader::begin_array() {
  expect(Kind::kArray, "an array");
  push(false);
}

bool JsonReader::next_member(char close) {
  Frame& frame = frames_[depth_ - 1];
  const char c = next_char(close == '}' ? "a key or '}'" : "a value or ']'");
  if (c == close) {
    ++at_;
    --depth_;
    return false;
  }
  if (!frame.is_empty) {
    if (c != ',') fail_found(close == '}' ? "',' or '}'" : "',' or ']'");
    ++at_;
    skip_space();
  }
  frame.is_empty = false;
  return true;
}

bool JsonReader::next_key(std::string_view& key) {
  if (!next_member('}')) return false;
  if (at_ >= text_.size() || text_[at_] != '"') fail_found("a key in double quotes");
  const std::size_t begin = at_;
  Frame& frame = frames_[depth_ - 1];
  frame.key = {};
  std::string scratch;
  key = scan_string(kMaxKeyBytes, &scratch);
  if (key.data() == scratch.data()) key = frame.unescaped.emplace_back(std::move(scratch));
  add_key(key, begin);
  frame.key = key;
  if (next_char("':'") != ':') fail_found("':'");
  ++at_;
  skip_space();
  value_begin_ = at_;
  return true;
}

void JsonReader::add_key(std::string_view key, std::size_t begin) {
  Frame& frame = frames_[depth_ - 1];
  bool is_new = true;
  if (frame.key_set.empty()) {
    is_new = std::find(frame.keys.begin(), frame.keys.end(), key) == frame.keys.end();
    frame.keys.push_back(key);
    if (frame.keys.size() > kLinearKeys) frame.key_set.insert(frame.keys.begin(), frame.keys.end());
  } else {
    is_new = frame.key_set.insert(key).second;
    if (frame.key_set.size() > max_keys_) fail_at(begin, fmt::format("object with more than {} keys", max_keys_));
  }
  if (!is_new) fail_at(begin, fmt::format("duplicate key {}", quote(key)));
}

bool JsonReader::next_element() { return next_member(']'); }

std::string JsonReader::string(std::size_t max_bytes) {
  expect(Kind::kString, "a string");
  std::string scratch;
  const std::string_view text = scan_string(max_bytes, &scratch);
  return text.data() == scratch.data() ? std::move(scratch) : std::string(text);
}

std::string_view JsonReader::scan_string(std::size_t max_bytes, std::string* scratch) {
  value_begin_ = at_;
  const std::size_t begin = ++at_;  // past the quote
  std::size_t run = begin;          // text_[run, at_) is not in `scratch` yet
  bool has_escapes = false;
  while (true) {
    if (at_ >= text_.size()) fail_found("'\"' at the end of a string");
    const auto c = static_cast<unsigned char>(text_[at_]);
    if ((scratch != nullptr ? scratch->size() : 0) + (at_ - run) > max_bytes) {
      fail(fmt::format("string is too long (limit {} bytes)", max_bytes));
    }
    if (c == '"') break;
    if (c < 0x20) fail_at(at_, "control character in a string");
    if (c == '\\') {
      has_escapes = true;
      const std::string_view before = text_.substr(run, at_ - run);
      const unsigned code = scan_escape();
      if (scratch != nullptr) {
        scratch->append(before);
        append_utf8(code, *scratch);
      }
      run = at_;
    } else if (c < 0x80) {
      ++at_;
    } else {
      const std::size_t length = utf8_length(text_.substr(at_, 4));
      if (length == 0) fail_at(at_, "invalid UTF-8");
      at_ += length;
    }
  }
  const std::string_view rest = text_.substr(run, at_ - run);
  ++at_;
  if (!has_escapes || scratch == nullptr) return rest;
  scratch->append(rest);
  return *scratch;
}

unsigned JsonReader::scan_escape() {
  const std::size_t begin = at_++;
  const char c = at_ < text_.size() ? text_[at_++] : '\0';
  constexpr std::string_view kEscapes = "\"\\/bfnrt";
  constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  if (const std::size_t i = kEscapes.find(c); i != std::string_view::npos) {
    return static_cast<unsigned char>(kMeanings[i]);
  }
  if (c != 'u') fail_at(begin, "invalid escape in a string");
  const unsigned code = scan_hex4();
  if (code < 0xd800 || code > 0xdfff) return code;
  if (code <= 0xdbff && text_.substr(at_, 2) == "\\u") {
    at_ += 2;
    const unsigned low = scan_hex4();
    if (low >= 0xdc00 && low <= 0xdfff) return 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  }
  fail_at(begin, "unpaired surrogate in a string");
}

unsigned JsonReader::scan_hex4() {
  unsigned code = 0;
  const std::string_view digits = text_.substr(at_, 4);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
  if (digits.size() != 4 || error != std::errc() || end != digits.data() + 4)
    fail_at(at_, "invalid \\u escape in a string");
  at_ += 4;
  return code;
}

std::string_view JsonReader::number_text(bool& is_integer) {
  expect(Kind::kNumber, "a number");
  const std::size_t begin = at_;
  const auto digits = [&] {
    if (at_ >= text_.size() || !is_digit(text_[at_])) fail_found("a digit");
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
  };
  const auto next_is = [&](char c) { return at_ < text_.size() && text_[at_] == c; };
  if (next_is('-')) ++at_;
  if (next_is('0')) {
    ++at_;
    if (at_ < text_.size() && is_digit(text_[at_])) fail_at(begin, "number with a leading zero");
  } else {
    digits();
  }
  is_integer = true;
  if (next_is('.')) {
    is_integer = false;
    ++at_;
    digits();
  }
  if (next_is('e') || next_is('E')) {
    is_integer = false;
    ++at_;
    if (next_is('+') || next_is('-')) ++at_;
    digits();
  }
  return text_.substr(begin, at_ - begin);
}

std::int64_t JsonReader::integer() {
  expect(Kind::kNumber, "an integer");
  bool is_integer = false;
  const std::string_view text = number_text(is_integer);
  if (!is_integer || text == "-0") fail(fmt::format("found {}, expected an integer", quote(text)));
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    fail(fmt::format("found {}, expected an integer of 64 bits", quote(text)));
  }
  return value;
}

float JsonReader::real() {
  bool is_integer = false;
  const std::string_view text = number_text(is_integer);
  float value = 0.0F;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    fail(fmt::format("found {}, expected a number that fits in fp32", quote(text)));
  }
  return value;
}

void JsonReader::literal(std::string_view word) {
  if (text_.substr(at_, word.size()) != word) fail_found(word);
  at_ += word.size();
}

bool JsonReader::boolean() {
  expect(Kind::kBool, "true or false");
  const bool value = text_[at_] == 't';
  literal(value ? "true" : "false");
  return value;
}

void JsonReader::null() {
  expect(Kind::kNull, "null");
  literal("null");
}

void JsonReader::skip() {
  const std::size_t outer = depth_;
  std::string_view key;
  bool is_integer = false;
  do {
    switch (peek()) {
      case Kind::kObject:
        push(true);
        break;
      case Kind::kArray:
        push(false);
        break;
      case Kind::kString:
        scan_string(text_.size(), nullptr);
        break;
      case Kind::kNumber:
        number_text(is_integer);
        break;
      case Kind::kBool:
        boolean();
        break;
      case Kind::kNull:
        null();
        break;
    }
    // To the next value inside what skip() opened; close whatever ends here.
    while (depth_ > outer && !(frames_[depth_ - 1].is_object ? next_key(key) : next_element())) {
    }
  } while (depth_ > outer);
}

void JsonReader::finish() {
  skip_space();
  if (at_ < text_.size()) fail_found("the end of the text");
}

}  // namespace mmrec::models
