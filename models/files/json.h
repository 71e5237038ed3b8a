// A strict JSON reader for untrusted files and lines.
//
// nlohmann's parser goes through the whole text once, event by event. Rules refuse what that parser would accept:
// duplicate keys, a byte order mark, NUL, nesting beyond a limit. The same pass may build a tree (parse_json). Without
// one, JsonReader pulls values from a text that is known to be JSON: a header of 100 MB costs no memory beyond its
// text, the keys of the open objects, and its longest string. JsonReader refuses 1.0, 1e3, -0 and 2^64 as integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace mmrec::models {

/// The value of a strict JSON text, with members in their order. Throws std::runtime_error as JsonReader does; an empty
/// `name` leaves the file out of messages.
nlohmann::ordered_json parse_json(std::string_view text, const std::string& name);

/// `text`, which is UTF-8, as JSON writes it.
std::string json_string(const std::string& text);

/// Reads one JSON text front to back. Every member throws std::runtime_error naming the file, the path of keys, the
/// byte and the line if the text does not hold what the caller asks for. Typical use:
///   reader.begin_object();
///   while (reader.next_key(key)) { if (key == "size") size = reader.integer(); else reader.skip(); }
class JsonReader {
 public:
  enum class Kind : std::uint8_t { kObject, kArray, kString, kNumber, kBool, kNull };
  static constexpr std::size_t kMaxDepth = 64;

  /// Throws unless all of `text` is strict JSON with at most `max_keys` keys in an object. `text` must outlive the
  /// reader; `name` stands for the file in messages.
  JsonReader(std::string_view text, std::string name, std::size_t max_keys = 100'000);

  /// Kind of the value that comes next.
  Kind peek();

  void begin_object();
  /// Moves to the next member and sets `key`; false at the end of the object. The member's value must then be read or
  /// skipped.
  bool next_key(std::string& key);
  void begin_array();
  /// Moves to the next element; false at the end of the array. The element must then be read or skipped.
  bool next_element();

  /// A string of at most `max_bytes` bytes after its escapes are resolved.
  std::string string(std::size_t max_bytes = 4096);
  /// A number without fraction or exponent that fits in 64 bits.
  std::int64_t integer();
  /// A number that fits in fp32, rounded once.
  float real();
  bool boolean();
  /// Whether null comes next; if so, moves past it.
  bool skips_null();
  /// Moves past one value of any kind, and returns its text.
  std::string_view skip();

  /// Throws std::runtime_error "NAME: KEY: KEY: message (at byte B, line L)" for the value read last. A text of one
  /// line has no line number.
  [[noreturn]] void fail(std::string_view message) const;

 private:
  void expect(Kind kind, std::string_view expected);
  char next_char();
  std::string_view token();
  std::string unescaped(std::string_view token) const;
  template <class Number>
  Number number(std::string_view expected, std::string_view type);

  std::string_view text_;
  std::string name_;
  std::size_t max_keys_;
  std::size_t at_ = 0;
  std::size_t value_begin_ = 0;
};

}  // namespace mmrec::models
