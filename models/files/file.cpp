// Bounded reads of regular files by pread: a file that shrinks is an error, where a mapping would raise SIGBUS.
#include "models/files/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "models/files/interrupted.h"
#include "models/files/model_files.h"

namespace mmrec::models {
namespace {

[[noreturn]] void fail_errno(const std::filesystem::path& path, const char* what) {
  const int error = errno;
  throw std::system_error(error, std::generic_category(), fmt::format("{}: {}", path.string(), what));
}

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  return "a device";
}

}  // namespace

File File::open(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a FIFO that nobody writes to must not hang. It means nothing for regular files.
  File file(path, -1, 0);  // owns the descriptor as soon as there is one
  file.fd_ = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); });
  if (file.fd_ < 0) fail_errno(path, "cannot open");
  struct stat status {};
  if (::fstat(file.fd_, &status) != 0) fail_errno(path, "cannot read its status");
  if (!S_ISREG(status.st_mode)) {
    throw std::runtime_error(
        fmt::format("{}: found {}, expected a regular file", path.string(), kind_of(status.st_mode)));
  }
  file.size_ = static_cast<std::uint64_t>(status.st_size);
  return file;
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(std::exchange(other.size_, 0)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(size_, other.size_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

void File::read(std::uint64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const std::size_t count = std::min<std::size_t>(to.size(), std::size_t{1} << 30);
    const ::ssize_t n = uninterrupted([&] { return ::pread(fd_, to.data(), count, static_cast<::off_t>(offset)); });
    if (n < 0) fail_errno(path_, "cannot read");
    if (n == 0) {
      throw std::runtime_error(
          fmt::format("{}: ends at byte {} (expected {} bytes): it became shorter while being read", path_.string(),
                      offset, size_));
    }
    offset += static_cast<std::uint64_t>(n);
    to = to.subspan(static_cast<std::size_t>(n));
  }
}

std::string read_text(const std::filesystem::path& path, std::uint64_t max_bytes) {
  const File file = File::open(path);
  if (file.size() > max_bytes) {
    throw std::runtime_error(fmt::format("{}: file is too large (found {} bytes, expected at most {})", path.string(),
                                         file.size(), max_bytes));
  }
  if (file.size() == 0) throw std::runtime_error(fmt::format("{}: file is empty", path.string()));
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

std::vector<std::string> names_in(const std::filesystem::path& folder, std::size_t most) {
  const auto close = [](::DIR* opened) { (void)::closedir(opened); };
  std::unique_ptr<::DIR, decltype(close)> opened;
  do {
    opened.reset(::opendir(folder.c_str()));
  } while (opened == nullptr && errno == EINTR);
  if (opened == nullptr && errno == ENOMEM) throw std::bad_alloc();
  std::vector<std::string> names;
  while (opened != nullptr && names.size() < most) {
    const ::dirent* const entry = ::readdir(opened.get());  // another thread has a folder of its own
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  return names;
}

std::string content_hint(std::string_view start) {
  if (start.starts_with("version https://git-lfs")) {
    return "; this looks like a Git LFS pointer: fetch the file itself with `git lfs pull`";
  }
  if (start.starts_with("PK\x03\x04") || start.starts_with("\x80\x02")) {
    return "; this looks like a PyTorch checkpoint: convert it with weights/convert.py";
  }
  const std::size_t first = start.find_first_not_of(" \t\r\n");
  if (first != std::string_view::npos && start[first] == '<') {
    return "; this looks like a web page: download the file itself";
  }
  return {};
}

void require_json_object(std::string_view text, const std::string& name) {
  const std::size_t first = text.find_first_not_of(" \t\r\n\xef\xbb\xbf");  // the reader names a byte order mark
  if (first == std::string_view::npos || text[first] != '{') {
    throw std::runtime_error(
        fmt::format("{}: does not begin with '{{' (expected a JSON object){}", name, content_hint(text)));
  }
}

std::filesystem::path resolve_model_file(const std::filesystem::path& folder, std::string_view name) {
  const std::filesystem::path path = folder / name;
  std::error_code error;
  std::filesystem::path target = std::filesystem::canonical(path, error);
  if (error) throw std::system_error(error, path.string() + ": cannot resolve");
  const std::filesystem::path own = std::filesystem::canonical(folder);
  const std::filesystem::path snapshots = own.parent_path();
  const bool is_cached =
      snapshots.filename() == "snapshots" && target.parent_path() == snapshots.parent_path() / "blobs";
  if (target.parent_path() == own || is_cached) return target;
  throw std::runtime_error(
      fmt::format("{}: a link out of the model folder (expected a file in the folder)", path.string()));
}

}  // namespace mmrec::models
