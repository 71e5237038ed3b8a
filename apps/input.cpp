#include "apps/input.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <system_error>

#include "apps/cli.h"

namespace mmrec::apps {
namespace {

class Descriptor {
 public:
  explicit Descriptor(const std::string& path)
      : fd_(path == "-" ? STDIN_FILENO : open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~Descriptor() {
    if (fd_ > STDERR_FILENO) (void)close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void unreadable(const std::string& path, int error) {
  throw std::runtime_error(
      fmt::format("{}: cannot read ({})", input_name(path), std::generic_category().message(error)));
}

// Length of the UTF-8 character at the front of `text`, 0 if there is none. Overlong forms, surrogates and values
// beyond U+10FFFF are none.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const unsigned char second = byte(1);
  const bool excluded = (lead == 0xe0 && second < 0xa0) || (lead == 0xed && second >= 0xa0) ||
                        (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second >= 0x90);
  return excluded ? 0 : length;
}

// Strict reader of one line "[1, 2, 3]".
class IdLineReader {
 public:
  IdLineReader(std::string_view line, std::string where, std::int64_t vocab_size)
      : rest_(line), where_(std::move(where)), vocab_size_(vocab_size) {}

  std::vector<int> read() {
    std::vector<int> ids;
    expect('[');
    if (next() != ']') {
      ids.push_back(number(ids.size()));
      while (next() == ',') {
        rest_.remove_prefix(1);
        ids.push_back(number(ids.size()));
      }
    }
    expect(']');
    if (next() != '\0') refuse("the end of the line");
    return ids;
  }

 private:
  // The next character that is not white space; NUL at the end.
  char next() {
    rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\r"), rest_.size()));
    return rest_.empty() ? '\0' : rest_.front();
  }
  void expect(char c) {
    if (next() != c) refuse(fmt::format("'{}'", c));
    rest_.remove_prefix(1);
  }
  int number(std::size_t index) {
    next();
    const std::size_t length = std::min(rest_.find_first_of(" \t\r,]"), rest_.size());
    const std::string_view token = rest_.substr(0, length);
    std::int64_t value = -1;
    const auto [stop, error] = std::from_chars(token.data(), token.data() + token.size(), value);
    const bool whole = error == std::errc{} && stop == token.data() + token.size();
    const bool leading_zero = token.size() > 1 && token.front() == '0';
    if (!whole || leading_zero || value < 0 || value >= vocab_size_) {
      throw RejectedFile(fmt::format("{}: index {}: no token id of this model (found '{}', expected 0 to {})", where_,
                                     index, printable(token.substr(0, 40)), vocab_size_ - 1));
    }
    rest_.remove_prefix(length);
    return static_cast<int>(value);
  }
  [[noreturn]] void refuse(const std::string& expected) {
    const std::string found = next() == '\0' ? "the end of the line" : fmt::format("'{}'", rest_.substr(0, 20));
    throw RejectedFile(
        fmt::format("{}: not a JSON array of token ids (found {}, expected {})", where_, printable(found), expected));
  }

  std::string_view rest_;
  std::string where_;
  std::int64_t vocab_size_;
};

}  // namespace

std::string input_name(const std::string& path) { return path == "-" ? "stdin" : path; }

std::string read_input(const std::string& path) {
  const Descriptor file(path);
  if (file.get() < 0) unreadable(path, errno);
  struct stat status = {};
  if (fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0 &&
      static_cast<std::uint64_t>(status.st_size) > kMaxInputBytes) {
    unreadable(path, EFBIG);
  }
  std::string text;
  if (S_ISREG(status.st_mode)) text.reserve(static_cast<std::size_t>(status.st_size) + 1);
  constexpr std::size_t kChunk = std::size_t{1} << 16;
  for (;;) {
    const std::size_t filled = text.size();
    text.resize(filled + std::min(kChunk, std::max<std::size_t>(text.capacity() - filled, 1)));
    const ssize_t n = read(file.get(), text.data() + filled, text.size() - filled);
    text.resize(filled + static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
    if (n < 0 && errno != EINTR) unreadable(path, errno);
    if (n == 0) return text;
    if (text.size() > kMaxInputBytes) unreadable(path, EFBIG);
    if (text.size() == text.capacity()) text.reserve(text.size() + std::max(kChunk, text.size() / 2));
  }
}

std::int64_t count_invalid_utf8(std::string_view text) {
  std::int64_t runs = 0;
  bool inside = false;
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0 && !inside) ++runs;
    inside = length == 0;
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return runs;
}

std::vector<IdDocument> parse_id_lines(std::string_view text, const std::string& name, std::int64_t vocab_size) {
  std::vector<IdDocument> documents;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string where = fmt::format("{}:{}", name, documents.size() + 1);
    documents.push_back({where, IdLineReader(text.substr(0, end), where, vocab_size).read()});
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return documents;
}

}  // namespace mmrec::apps
