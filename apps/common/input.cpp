#include "apps/common/input.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "models/files/interrupted.h"
#include "models/files/json.h"
#include "models/files/utf8.h"

namespace mmrec::apps {
namespace {

constexpr std::size_t kChunk = std::size_t{1} << 16;  // bytes that are read at once

[[noreturn]] void unreadable(const std::string& path, int error) {
  throw std::runtime_error(
      fmt::format("{}: cannot read ({})", input_name(path), std::generic_category().message(error)));
}

int open_input(const std::string& path) {
  if (path == "-") return STDIN_FILENO;
  const int fd = models::uninterrupted([&] { return open(path.c_str(), O_RDONLY | O_CLOEXEC); });
  if (fd < 0) unreadable(path, errno);
  return fd;
}

struct Compression {
  std::string_view magic;  // the first bytes; '?' is any byte
  std::string_view name;
  std::string_view reader;  // prints what is in FILE, or in stdin
};
constexpr auto kCompressions = std::to_array<Compression>({
    {"\x1f\x8b\x08", "gzip", "zcat"},
    {"\x28\xb5\x2f\xfd", "zstd", "zstdcat"},
    {{"\xfd"
      "7zXZ\0",
      6},
     "xz",
     "xzcat"},
    {"BZh?1AY&SY", "bzip2", "bzcat"},
    {"\x04\x22\x4d\x18", "lz4", "lz4cat"},
    {"PK\x03\x04", "zip", "funzip"},
});
constexpr std::size_t kLongestMagic = 10;

bool begins_with(std::string_view text, std::string_view magic) {
  return text.size() >= magic.size() &&
         std::equal(magic.begin(), magic.end(), text.begin(), [](char m, char c) { return m == '?' || m == c; });
}

using Json = nlohmann::ordered_json;

}  // namespace

TooLong::TooLong(const std::string& where, std::uint64_t found, std::uint64_t most, bool is_whole)
    : RejectedFile(fmt::format("{}: too long (found {}{} bytes, expected at most {})", where,
                               is_whole ? "" : "at least ", found, most)),
      reason_at_(where.size() + 2) {}

std::string input_name(const std::string& path) { return path == "-" ? "stdin" : path; }

InputFile::InputFile(std::string path, bool announces) : path_(std::move(path)), fd_(open_input(path_)) {
  if (announces && isatty(fd_) == 1) log_line("reading from the terminal (Ctrl-D ends the input)");
}
InputFile::~InputFile() {
  if (fd_ > STDERR_FILENO) (void)close(fd_);
}

std::size_t InputFile::read(std::span<char> to) {
  for (;;) {
    if (interrupt_exit_code() != 0 || is_stopped_) return 0;
    // An interrupt must not have to wait for a pipe.
    pollfd wait = {fd_, POLLIN, 0};
    const int ready = poll(&wait, 1, 200);
    if (ready == 0 || (ready < 0 && errno == EINTR)) continue;
    const ssize_t n = ::read(fd_, to.data(), to.size());
    if (n >= 0) {
      if (head_.size() < kLongestMagic) refuse_compressed({to.data(), static_cast<std::size_t>(n)});
      return static_cast<std::size_t>(n);
    }
    if (errno != EINTR) unreadable(path_, errno);
  }
}

void InputFile::refuse_compressed(std::string_view more) {
  head_ += more.substr(0, kLongestMagic - head_.size());
  for (const Compression& compression : kCompressions) {
    if (!begins_with(head_, compression.magic)) continue;
    const std::string source =
        path_ == "-" ? fmt::format("... | {}", compression.reader) : fmt::format("{} {}", compression.reader, path_);
    throw RejectedFile(fmt::format("{}: is compressed with {} (expected text). Try: {} | {} ... -", input_name(path_),
                                   compression.name, source, running_program()));
  }
}

bool InputFile::has_bytes() const {
  pollfd wait = {fd_, POLLIN, 0};
  return poll(&wait, 1, 0) > 0;
}

std::optional<std::uint64_t> input_size(const std::string& path) {
  struct stat status = {};
  if (path == "-") {
    (void)fstat(STDIN_FILENO, &status);  // what fails has no mode
  } else if (stat(path.c_str(), &status) != 0 || access(path.c_str(), R_OK) != 0) {
    unreadable(path, errno);
  }
  if (S_ISDIR(status.st_mode)) unreadable(path, EISDIR);
  if (!S_ISREG(status.st_mode)) return std::nullopt;
  return static_cast<std::uint64_t>(status.st_size);
}

std::string read_input(const std::string& path, std::size_t most) {
  InputFile file(path);
  std::string text;
  if (const auto size = input_size(path)) {
    if (*size > most) throw TooLong(input_name(path), *size, most, true);
    text.reserve(static_cast<std::size_t>(*size) + kChunk);
  }
  for (;;) {
    const std::size_t filled = text.size();
    text.resize(filled + kChunk);
    const std::size_t n = file.read(std::span(text).subspan(filled));
    text.resize(filled + n);
    if (n == 0) return text;
    if (text.size() > most) throw TooLong(input_name(path), text.size(), most);
  }
}

/// Reads behind what has not been taken. How many bytes came; 0 at the end.
std::size_t LineReader::fill() {
  buffer_.erase(0, std::exchange(begin_, 0));
  const std::size_t kept = buffer_.size();
  buffer_.resize(kept + kChunk);
  const std::size_t n = file_.read(std::span(buffer_).subspan(kept));
  buffer_.resize(kept + n);
  return n;
}

bool LineReader::begins_with(std::string_view magic) {
  while (buffer_.size() < magic.size() && fill() > 0) {
  }
  return buffer_.starts_with(magic);
}

std::string_view LineReader::read(std::size_t size) {
  while (buffer_.size() - begin_ < size && fill() > 0) {
  }
  const std::string_view taken = std::string_view(buffer_).substr(begin_, size);
  begin_ += taken.size();
  return taken;
}

std::optional<std::string_view> LineReader::next() {
  std::size_t scanned = 0;
  for (;;) {
    const std::string_view rest = std::string_view(buffer_).substr(begin_);
    const std::size_t end = rest.find('\n', scanned);
    if (end != std::string_view::npos) {
      const bool is_rest = std::exchange(skips_, false);
      if (!is_rest && end <= most_) return take(end, 1);
      take(end, 1);
      if (!is_rest) throw TooLong(place(), end, most_, true);
      --lines_;  // it was counted when it was refused
      scanned = 0;
      continue;
    }
    scanned = rest.size();
    if (skips_ || scanned > most_) {
      take(scanned, 0);
      if (!std::exchange(skips_, true)) throw TooLong(place(), scanned, most_);
      --lines_;
      scanned = 0;
    }
    if (fill() > 0) continue;
    if (scanned == 0 || interrupt_exit_code() != 0) return std::nullopt;
    return take(scanned, 0);
  }
}

std::string LineReader::name() const { return input_name(file_.path()); }
std::string LineReader::place() const { return fmt::format("{}:{}", name(), lines_); }

std::string_view LineReader::take(std::size_t size, std::size_t ending) {
  const std::string_view line = std::string_view(buffer_).substr(begin_, size);
  begin_ += size + ending;
  bytes_ += size + ending;
  ++lines_;
  return line;
}

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r\v\f") == std::string_view::npos; }

std::string invalid_utf8_warning(std::string_view name, std::int64_t runs) {
  return fmt::format("{}: places that are no UTF-8 and are read as U+FFFD: {}", name, runs);
}

std::int64_t count_invalid_utf8(std::string_view text) {
  std::int64_t runs = 0;
  bool inside = false;
  while (!text.empty()) {
    if (const std::size_t ascii = models::ascii_prefix(text); ascii > 0) {
      text.remove_prefix(ascii);
      inside = false;
      continue;
    }
    const models::Utf8Unit unit = models::first_unit(text);
    if (!unit.valid && !inside) ++runs;
    inside = !unit.valid;
    text.remove_prefix(unit.length);
  }
  return runs;
}

Json parse_object(std::string_view line, const std::string& where) {
  Json object = rethrown_as<RejectedFile>([&] { return models::parse_json(line, where); });
  if (object.is_object()) return object;
  throw RejectedFile(fmt::format("{}{}found {}, expected a JSON object on a line", where, where.empty() ? "" : ": ",
                                 object.type_name()));
}

std::string_view member_text(std::string_view line, std::string_view key) {
  models::JsonReader reader(line, "");
  reader.begin_object();
  for (std::string at; reader.next_key(at);) {
    const std::string_view value = reader.skip();
    if (at == key) return value;
  }
  return {};
}

std::vector<int> parse_ids(std::string_view line, const std::string& where, std::int64_t vocab_size) {
  return rethrown_as<RejectedFile>([&] {
    std::vector<int> ids;
    models::JsonReader reader(line, where);
    reader.begin_array();
    while (reader.next_element()) {
      const std::int64_t id = reader.integer();
      if (id < 0 || id >= vocab_size) {
        reader.fail(fmt::format("index {}: no token id of this model (found {}, expected 0 to {})", ids.size(), id,
                                vocab_size - 1));
      }
      ids.push_back(static_cast<int>(id));
    }
    return ids;
  });
}

const Json* Members::find(std::string_view key) const {
  const auto at = object_.find(key);
  return at == object_.end() || at->is_null() ? nullptr : &*at;
}

std::optional<std::int64_t> Members::integer(std::string_view key, std::int64_t min, std::int64_t max) const {
  const Json* const value = find(key);
  return value != nullptr ? std::optional(integer(key, *value, min, max)) : std::nullopt;
}

std::int64_t Members::integer(std::string_view key, const Json& value, std::int64_t min, std::int64_t max) const {
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<std::uint64_t>() <= static_cast<std::uint64_t>(max)) &&
                    value.get<std::int64_t>() >= min;
  if (!fits) refuse(key, value, fmt::format("a whole number from {} to {}", min, max));
  return value.get<std::int64_t>();
}

void Members::refuse(std::string_view key, const Json& found, std::string_view expected) const {
  throw RejectedFile(
      fmt::format("{}{}: not a valid value (found {}, expected {})", where_, key, brief(found), expected));
}

std::string brief(const Json& value) { return value.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 60); }

std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

void append_json_string(std::string& to, std::string_view text) {
  const std::size_t size = to.size();
  to += '"';
  std::size_t plain = 0;  // from here on characters stay as they are
  for (std::size_t at = 0; at < text.size();) {
    const auto byte = static_cast<unsigned char>(text[at]);
    if (byte >= 0x80) {
      const models::Utf8Unit unit = models::first_unit(text.substr(at));
      if (!unit.valid) {
        to.resize(size);
        to += dump(Json(text));
        return;
      }
      at += unit.length;
    } else if (byte >= 0x20 && byte != '"' && byte != '\\') {
      ++at;
    } else {
      to.append(text, plain, at - plain);
      const std::string escaped = dump(Json(text.substr(at, 1)));
      to.append(escaped, 1, escaped.size() - 2);
      plain = ++at;
    }
  }
  to.append(text, plain);
  to += '"';
}

}  // namespace mmrec::apps
