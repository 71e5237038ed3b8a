// Prompts and documents: files and stdin, as text or as lines of token ids. Inside a GracefulScope (signals.h) an
// interrupt ends an input where it stands, however long a pipe has nothing to say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mmrec::apps {

/// Largest text or line accepted. A text this long is some 500 million tokens.
inline constexpr std::size_t kMaxInputBytes = std::size_t{1} << 31;

/// A file that is open for reading, or stdin for "-".
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
  const std::string& path() const { return path_; }
  int descriptor() const { return fd_; }

 private:
  std::string path_;
  int fd_;
};

/// Bytes of `path`, without opening it; none where it is a pipe or a device. Throws where it cannot be read.
std::optional<std::uint64_t> input_size(const std::string& path);

/// The whole of `path`, or of stdin for "-".
std::string read_input(const std::string& path);

/// Whether a line holds nothing but white space.
bool is_blank(std::string_view line);

/// The lines of a file one by one, in memory for the longest.
class LineReader {
 public:
  explicit LineReader(std::string path, bool announces = true) : file_(std::move(path), announces) {}

  /// Without the line's end, until the next call; none at the end of the file, and after an interrupt.
  std::optional<std::string_view> next();
  /// Whether next() has to wait for a pipe to say more.
  bool would_wait() const { return buffer_.find('\n', begin_) == std::string::npos && !file_.has_bytes(); }
  std::int64_t lines() const { return lines_; }   ///< so far
  std::uint64_t bytes() const { return bytes_; }  ///< of these

 private:
  std::string_view take(std::size_t size, std::size_t ending);

  InputFile file_;
  std::string buffer_;
  std::size_t begin_ = 0;  // of the next line
  std::int64_t lines_ = 0;
  std::uint64_t bytes_ = 0;
};

/// "stdin" for "-", the path otherwise.
std::string input_name(const std::string& path);

/// How many maximal runs of bytes in `text` are no UTF-8.
std::int64_t count_invalid_utf8(std::string_view text);

/// A line of token ids: a JSON array of whole numbers in [0, vocab_size); `where` stands for it. Throws RejectedFile
/// naming that and the index, found and expected.
std::vector<int> parse_ids(std::string_view line, const std::string& where, std::int64_t vocab_size);

}  // namespace mmrec::apps
