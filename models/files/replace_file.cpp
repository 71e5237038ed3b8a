#include "models/files/replace_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "models/files/interrupted.h"

namespace mmrec::models {
namespace {

constexpr mode_t kPrivate = 0600;

class Replacement {
 public:
  explicit Replacement(const std::filesystem::path& path) : path_(path), target_(path) {
    std::error_code ignored;
    if (std::filesystem::is_symlink(path, ignored)) {
      const auto real = std::filesystem::weakly_canonical(path, ignored);
      if (!ignored) target_ = real;
    }
    const auto status = std::filesystem::status(target_, ignored);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
      throw std::runtime_error(
          fmt::format("{}: found something else, expected a regular file to replace or none", path.string()));
    }
    folder_ = target_.parent_path();
    if (folder_.empty()) folder_ = ".";
    fd_ = uninterrupted([&] { return ::open(folder_.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, kPrivate); });
    if (fd_ < 0) make_named();
  }
  ~Replacement() {
    if (fd_ >= 0) ::close(fd_);
    if (!name_.empty()) ::unlink(name_.c_str());
  }
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = uninterrupted([&] { return ::write(fd_, bytes.data(), bytes.size()); });
      if (n < 0) fail("cannot write");
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    if (uninterrupted([&] { return ::fsync(fd_); }) != 0) fail("cannot write to the disk");
  }

  void commit() {
    if (name_.empty()) give_name();
    if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail("cannot write");
    if (::rename(name_.c_str(), target_.c_str()) != 0) fail("cannot replace");
    name_.clear();
    const int folder = uninterrupted([&] { return ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
    if (folder < 0 && errno == EACCES) return;  // one that may be written but not read is left to the system
    if (folder < 0) fail("cannot open its folder");
    const bool is_written = uninterrupted([&] { return ::fsync(folder); }) == 0 || errno == EINVAL ||
                            errno == EROFS;  // some file systems cannot
    const int error = errno;
    ::close(folder);
    errno = error;
    if (!is_written) fail("cannot write its folder to the disk");
  }

 private:
  /// Where the file system has no files without a name.
  void make_named() {
    std::string name;
    fd_ = uninterrupted([&] {
      name = target_.string() + ".XXXXXX";
      return ::mkostemp(name.data(), O_CLOEXEC);  // mode 0600
    });
    if (fd_ < 0) fail("cannot create a file beside it");
    name_ = std::move(name);
  }
  /// A link cannot replace a file: it gets a name beside the target first.
  void give_name() {
    const std::string self = fmt::format("/proc/self/fd/{}", fd_);
    for (int attempt = 0; attempt < 100; ++attempt) {
      std::string name = fmt::format("{}.{}-{}", target_.string(), ::getpid(), attempt);
      if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0) {
        name_ = std::move(name);  // takes no memory
        return;
      }
      if (errno != EEXIST) break;
    }
    fail("cannot create a file beside it");
  }
  [[noreturn]] void fail(const char* what) const {
    const int error = errno;
    throw std::system_error(error, std::generic_category(), fmt::format("{}: {}", path_.string(), what));
  }

  std::filesystem::path path_, target_, folder_;
  int fd_ = -1;
  std::string name_;  // of what is not in place yet
};

}  // namespace

void replace_file(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  Replacement replacement(path);
  replacement.write(bytes);
  replacement.commit();
}

}  // namespace mmrec::models
