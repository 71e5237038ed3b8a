// A strict JSON reader for files that nobody vouches for.
//
// nlohmann's parser goes through the whole text first, event by event, while what it would let pass is refused:
// duplicate keys, a byte order mark, NUL, nesting beyond a limit. Values are then pulled one after another from a text
// that is known to be JSON. No tree is kept: a header of 100 MB costs no memory beyond its text, the keys of the
// objects that are open, and its longest string. Integers that are not integers (1.0, 1e3, -0, 2^64) are refused where
// an integer is asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace mmrec::models {

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
  void null();
  /// Moves past one value of any kind.
  void skip();

  /// Throws std::runtime_error "NAME: KEY.KEY: message (at byte B, line L)" for the value read last.
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
