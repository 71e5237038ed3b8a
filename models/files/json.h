// A strict JSON reader for files that nobody vouches for.
//
// It pulls values one after another and keeps no tree, so a header of 100 MB costs no memory beyond its text. Stricter
// than the standard where leniency has hidden faults elsewhere: duplicate keys, a byte order mark, NUL, invalid UTF-8,
// unpaired surrogates, nesting beyond a limit, and integers that are not integers (1.0, 1e3, -0, 2^64) are refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "models/files/text.h"

namespace mmrec::models {

/// Reads one JSON text front to back. Every member throws std::runtime_error naming the file, the byte and the line if
/// the text does not hold what the caller asks for. Typical use:
///   reader.begin_object();
///   while (reader.next_key(key)) { if (key == "size") size = reader.integer(); else reader.skip(); }
///   reader.finish();
class JsonReader {
 public:
  enum class Kind : std::uint8_t { kObject, kArray, kString, kNumber, kBool, kNull };
  static constexpr std::size_t kMaxDepth = 64;

  /// `text` must outlive the reader; `name` stands for the file in messages. An object may have `max_keys` keys.
  JsonReader(std::string_view text, std::string name, std::size_t max_keys = 100'000);

  /// Kind of the value that comes next.
  Kind peek();

  void begin_object();
  /// Moves to the next member and sets `key`; false at the end of the object. The member's value must then be read or
  /// skipped. `key` stays valid until the object ends.
  bool next_key(std::string_view& key);
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
  /// Reads past one value of any kind, checking it all the same.
  void skip();
  /// Throws unless only white space follows.
  void finish();

  /// Throws std::runtime_error "NAME: KEY.KEY: message (at byte B, line L)" for the value read last.
  [[noreturn]] void fail(std::string_view message) const { fail_at(value_begin_, message); }

 private:
  struct Frame {
    bool is_object = false;
    bool is_empty = true;
    std::vector<std::string_view> keys;            // few keys are searched one by one ...
    std::unordered_set<std::string_view> key_set;  // ... many by hash
    std::deque<std::string> unescaped;             // keys that had escapes
    std::string_view key;                          // of the member being read
  };

  [[noreturn]] void fail_at(std::size_t byte, std::string_view message) const;
  [[noreturn]] void fail_found(std::string_view expected) const;
  void expect(Kind kind, std::string_view expected);
  void skip_space();
  char next_char(std::string_view expected);
  void push(bool is_object);
  bool next_member(char close);
  void add_key(std::string_view key, std::size_t begin);
  void literal(std::string_view word);
  std::string_view number_text(bool& is_integer);
  // Scans a string; the result points into the text if it has no escapes, into `scratch` otherwise. With a null
  // `scratch` it only checks.
  std::string_view scan_string(std::size_t max_bytes, std::string* scratch);
  unsigned scan_escape();
  unsigned scan_hex4();

  std::string_view text_;
  std::string name_;
  std::size_t max_keys_;
  std::size_t at_ = 0;
  std::size_t value_begin_ = 0;
  std::size_t depth_ = 0;
  // frames_[0, depth_) are open; the others are kept for their memory. A deque: frames stay where they are, for keys
  // point into them.
  std::deque<Frame> frames_;
};

}  // namespace mmrec::models
