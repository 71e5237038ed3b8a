#include "models/files/replace_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "models/files/interrupted.h"

namespace mmrec::models {

std::filesystem::path followed(std::filesystem::path path) {
  constexpr int kMostLinks = 40;  // as the kernel follows
  std::error_code none;
  for (int links = 0; links < kMostLinks && std::filesystem::is_symlink(path, none); ++links) {
    path = path.parent_path() / std::filesystem::read_symlink(path, none);
  }
  return path;
}

Replacement::Replacement(const std::filesystem::path& path, Mode mode) : path_(path) {
  struct stat there {};
  const bool replaces = ::stat(path.c_str(), &there) == 0;
  if (!replaces && errno != ENOENT) fail("cannot write", errno);
  if (replaces && S_ISDIR(there.st_mode)) fail("cannot write", EISDIR);
  if (replaces && !S_ISREG(there.st_mode)) {
    throw std::runtime_error(
        fmt::format("{}: found something else, expected a regular file to replace or none", path.string()));
  }
  if (replaces && ::access(path.c_str(), W_OK) != 0) fail("cannot write", errno);
  target_ = followed(path);
  if (!target_.has_filename()) fail("cannot write", ENOENT);
  folder_ = target_.has_parent_path() ? target_.parent_path() : ".";
  std::uint64_t random = 0;
  (void)!::getrandom(&random, sizeof random, 0);  // a name that is taken is refused below
  temporary_ = folder_ / fmt::format(".mmrec-{:016x}", random);
  if (temporary_.size() >= PATH_MAX) fail("cannot create a file beside it", ENAMETOOLONG);

  const auto open = [&](const std::string& name, int flags) {
    const ::mode_t bits = mode == Mode::kPrivate ? 0600 : 0666;
    return uninterrupted([&] { return ::open(name.c_str(), flags | O_WRONLY | O_CLOEXEC, bits); });
  };
  fd_ = open(folder_, O_TMPFILE);
  if (fd_ < 0) fd_ = open(temporary_, O_CREAT | O_EXCL), has_name_ = fd_ >= 0;
  if (fd_ < 0) fail("cannot create a file beside it", errno);
  if (replaces && mode == Mode::kUsual) (void)::fchmod(fd_, there.st_mode & 07777);
}

Replacement::~Replacement() {
  if (fd_ >= 0) ::close(fd_);
  if (has_name_) ::unlink(temporary_.c_str());
}

void Replacement::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n =
        uninterrupted([&] { return ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (n < 0) fail("cannot write", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
}

void Replacement::commit() {
  if (uninterrupted([&] { return ::fsync(fd_); }) != 0) fail("cannot write to the disk", errno);
  if (!has_name_) {  // a link cannot replace a file: it gets a name beside the target first
    const std::string self = fmt::format("/proc/self/fd/{}", fd_);
    has_name_ = ::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, temporary_.c_str(), AT_SYMLINK_FOLLOW) == 0;
    if (!has_name_) fail("cannot create a file beside it", errno);
  }
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail("cannot write", errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot replace", errno);
  has_name_ = false;
  const int folder = uninterrupted([&] { return ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (folder < 0 && errno == EACCES) return;  // one that may be written but not read is left to the system
  if (folder < 0) fail("cannot open its folder", errno);
  const bool is_written = uninterrupted([&] { return ::fsync(folder); }) == 0 || errno == EINVAL ||
                          errno == EROFS;  // some file systems cannot
  const int error = errno;
  ::close(folder);
  if (!is_written) fail("cannot write its folder to the disk", error);
}

void Replacement::fail(const char* what, int error) const {
  throw std::system_error(error, std::generic_category(), fmt::format("{}: {}", path_.string(), what));
}

void replace_file(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  Replacement replacement(path, Replacement::Mode::kPrivate);
  replacement.write(0, bytes);
  replacement.commit();
}

}  // namespace mmrec::models
