#include "apps/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <system_error>
#include <utility>

#include "apps/signals.h"

namespace mmrec::apps {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 16;
constexpr int kMostLinks = 40;      // as the kernel follows
constexpr int kMostAttempts = 100;  // names of temporary files

/// A new file with this mode, whatever the umask says, or with that of a plain open(). Not by fchmod() afterwards:
/// --sandbox refuses it, since it could reach files that are only read.
int create(const std::string& path, std::optional<mode_t> mode) {
  const mode_t mask = mode ? umask(0) : 0;
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode.value_or(0666));
  if (mode) umask(mask);  // leaves errno
  return fd;
}

std::string reason(int error) { return std::generic_category().message(error); }

}  // namespace

Output::Output() : fd_(STDOUT_FILENO) {}

Output::Output(std::filesystem::path path) : target_(std::move(path)) {
  std::error_code ignored;
  // A symbolic link stays one, also where what it points to is still to be made.
  for (int links = 0; std::filesystem::is_symlink(target_, ignored); ++links) {
    if (links == kMostLinks) fail(ELOOP);
    target_ = target_.parent_path() / std::filesystem::read_symlink(target_, ignored);
  }
  const auto status = std::filesystem::status(target_, ignored);
  if (std::filesystem::is_directory(status)) fail(EISDIR);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    open_target(O_WRONLY);
    return;
  }
  open_temporary();
}

Output::Output(std::filesystem::path path, std::uint64_t keep) : target_(std::move(path)), keep_(keep) {
  open_target(O_WRONLY | O_CREAT);
}

void Output::open_target(int flags) {
  do {
    fd_ = open(target_.c_str(), flags | O_CLOEXEC, 0666);
  } while (fd_ < 0 && errno == EINTR);
  if (fd_ < 0) fail(errno);
}

void Output::open_temporary() {
  struct stat existing = {};
  const bool replaces = stat(target_.c_str(), &existing) == 0;
  if (replaces && access(target_.c_str(), W_OK) != 0) fail(errno);
  for (int attempt = 0; attempt < kMostAttempts && fd_ < 0; ++attempt) {
    temporary_ = fmt::format("{}.{}-{}", target_.string(), getpid(), attempt);
    fd_ = create(temporary_, replaces ? std::optional<mode_t>(existing.st_mode & 0777) : std::nullopt);
    if (fd_ < 0 && errno != EINTR && errno != EEXIST) break;
  }
  if (fd_ < 0) {
    const int error = errno;
    temporary_.clear();
    fail(error);
  }
  add_interrupt_cleanup(temporary_.c_str());
}

Output::~Output() {
  if (fd_ > STDERR_FILENO) (void)close(fd_);
  if (!temporary_.empty()) {
    (void)unlink(temporary_.c_str());
    drop_interrupt_cleanup(temporary_.c_str());
  }
}

void Output::fail(int error) const {
  if (target_.empty() && error == EPIPE) throw StdoutClosed();
  const std::string name = target_.empty() ? "stdout" : target_.string();
  throw OutputError(fmt::format("{}: cannot write ({})", name, reason(error)));
}

void Output::write(std::string_view text) {
  buffer_ += text;
  if (buffer_.size() >= kBufferBytes) flush();
}

void Output::flush() {
  std::string_view rest = buffer_;
  if (keep_ && !rest.empty()) {
    const auto end = static_cast<off_t>(*keep_);
    if (ftruncate(fd_, end) != 0 || lseek(fd_, end, SEEK_SET) != end) fail(errno);
    keep_.reset();
  }
  while (!rest.empty()) {
    const ssize_t n = ::write(fd_, rest.data(), rest.size());
    if (n >= 0) {
      rest.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      pollfd wait = {fd_, POLLOUT, 0};  // someone made the pipe non-blocking
      (void)poll(&wait, 1, -1);
    } else if (errno != EINTR) {
      const int error = errno;
      buffer_.clear();
      fail(error);
    }
  }
  buffer_.clear();
}

void Output::commit() {
  flush();
  while (!temporary_.empty() && fsync(fd_) != 0) {  // before a name is given to it
    if (errno != EINTR) fail(errno);
  }
  if (close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail(errno);
  if (temporary_.empty()) return;
  if (rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
  drop_interrupt_cleanup(temporary_.c_str());
  temporary_.clear();
  sync_folder();
}

/// The new name survives a loss of power too. A folder that may be written but not read is left to the system.
void Output::sync_folder() const {
  std::filesystem::path folder = target_.parent_path();
  if (folder.empty()) folder = ".";
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  int error = 0;
  while (fsync(fd) != 0) {
    error = errno;
    if (error != EINTR) break;
    error = 0;
  }
  (void)close(fd);
  if (error != 0 && error != EINVAL && error != EROFS) fail(error);  // some file systems cannot
}

bool Output::shares_stderr() const {
  struct stat mine = {};
  struct stat other = {};
  if (fstat(fd_, &mine) != 0 || fstat(STDERR_FILENO, &other) != 0) return false;
  return mine.st_dev == other.st_dev && mine.st_ino == other.st_ino;
}

bool Output::is_terminal() const { return isatty(fd_) == 1; }

}  // namespace mmrec::apps
