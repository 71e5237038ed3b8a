// Prompts and documents: files and stdin, as text, as lines of token ids and as JSON. Inside a GracefulScope (cli.h) an
// interrupt ends an input where it stands, however long a pipe has nothing to say. All faults of JSON are a
// RejectedFile; it is read by the strict reader of models/files/json.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/common/cli.h"

namespace mmrec::apps {

/// Largest text or line accepted unless a reader is told otherwise. A text this long is some 500 million tokens.
inline constexpr std::size_t kMaxInputBytes = std::size_t{1} << 31;

/// A text or a line has more bytes than are accepted.
class TooLong : public RejectedFile {
 public:
  /// `where`: FILE or FILE:LINE. `is_whole`: `found` is exact, else the least.
  TooLong(const std::string& where, std::uint64_t found, std::uint64_t most, bool is_whole = false);
  /// The message without the place.
  std::string reason() const { return what() + reason_at_; }

 private:
  std::size_t reason_at_;
};

/// A file that is open for reading, or stdin for "-". Throws RejectedFile for one that is compressed.
class InputFile {
 public:
  /// Throws std::runtime_error naming `path`, as does all that reads.
  /// One that is a terminal is said to be waited for, once, unless it is not to be announced.
  explicit InputFile(std::string path, bool announces = true);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// How many bytes came; 0 at the end.
  std::size_t read(std::span<char> to);
  /// Whether read() returns at once.
  bool has_bytes() const;
  /// What waits in read(), in another thread, returns soon; from then on the file is at its end.
  void stop() { is_stopped_ = true; }
  const std::string& path() const { return path_; }

 private:
  void refuse_compressed(std::string_view more);

  std::string path_;
  int fd_;
  std::string head_;  // the first bytes read
  std::atomic<bool> is_stopped_ = false;
};

/// Bytes of `path`, without opening it; none where it is a pipe or a device. Throws where it cannot be read.
std::optional<std::uint64_t> input_size(const std::string& path);

/// The whole of `path`, or of stdin for "-". Throws TooLong for more than `most` bytes.
std::string read_input(const std::string& path, std::size_t most = kMaxInputBytes);

/// Whether a line holds nothing but white space.
bool is_blank(std::string_view line);

/// The lines of a file one by one, in memory for the longest.
class LineReader {
 public:
  explicit LineReader(std::string path, bool announces = true, std::size_t most = kMaxInputBytes)
      : file_(std::move(path), announces), most_(most) {}

  /// Without the line's end, until the next call; none at the end of the file, and after an interrupt. Throws TooLong
  /// for a line of more than `most` bytes; the next call goes on behind that line.
  std::optional<std::string_view> next();
  /// Whether the file begins with `magic`. Requires: nothing has been taken yet.
  bool begins_with(std::string_view magic);
  /// The next `size` bytes, until the next call; fewer at the end of the file, and after an interrupt.
  std::string_view read(std::size_t size);
  /// Whether next() has to wait for a pipe to say more.
  bool would_wait() const { return buffer_.find('\n', begin_) == std::string::npos && !file_.has_bytes(); }
  void stop() { file_.stop(); }                   ///< as InputFile has it
  std::string name() const;                       ///< of the file
  std::string place() const;                      ///< FILE:LINE of the last line
  std::int64_t lines() const { return lines_; }   ///< so far
  std::uint64_t bytes() const { return bytes_; }  ///< of these

 private:
  std::size_t fill();
  std::string_view take(std::size_t size, std::size_t ending);

  InputFile file_;
  std::size_t most_;
  bool skips_ = false;  // the rest of a line that is too long
  std::string buffer_;
  std::size_t begin_ = 0;  // of the next line
  std::int64_t lines_ = 0;
  std::uint64_t bytes_ = 0;
};

/// "stdin" for "-", the path otherwise.
std::string input_name(const std::string& path);

/// How many maximal runs of bytes in `text` are not UTF-8.
std::int64_t count_invalid_utf8(std::string_view text);
/// The warning about a text with such runs.
std::string invalid_utf8_warning(std::string_view name, std::int64_t runs);

/// The object on a line. `where` stands for the line, or is empty.
nlohmann::ordered_json parse_object(std::string_view line, const std::string& where);

/// The text of the value of `key`, one of the keys of the object that parse_object() has made of `line`.
std::string_view member_text(std::string_view line, std::string_view key);

/// A line of token ids: a JSON array of whole numbers in [0, vocab_size); `where` stands for the line.
std::vector<int> parse_ids(std::string_view line, const std::string& where, std::int64_t vocab_size);

/// An object of options, from a file or a line. A member that is null counts as not given.
class Members {
 public:
  /// `where` stands before a key in messages. `object` must live on.
  explicit Members(const nlohmann::ordered_json& object, std::string where = {})
      : object_(object), where_(std::move(where)) {}

  /// Null if it is not given.
  const nlohmann::ordered_json* find(std::string_view key) const;
  bool has(std::string_view key) const { return find(key) != nullptr; }
  /// A whole number in [min, max], if it is given.
  std::optional<std::int64_t> integer(std::string_view key, std::int64_t min, std::int64_t max) const;
  /// `value`, which belongs to `key`, as such a number.
  std::int64_t integer(std::string_view key, const nlohmann::ordered_json& value, std::int64_t min,
                       std::int64_t max) const;
  /// Throws RejectedFile naming key, found and expected.
  [[noreturn]] void refuse(std::string_view key, const nlohmann::ordered_json& found, std::string_view expected) const;

 private:
  const nlohmann::ordered_json& object_;
  std::string where_;
};

/// `value` as text for a message.
std::string brief(const nlohmann::ordered_json& value);

/// JSON on one line. Bytes that are not UTF-8 become U+FFFD.
std::string dump(const nlohmann::ordered_json& json);
/// Appends `text` as the string that dump() makes of it, in a tenth of the time.
void append_json_string(std::string& to, std::string_view text);

}  // namespace mmrec::apps
