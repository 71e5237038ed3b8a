#include "apps/common/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "mmrec/errors.h"
#include "models/files/interrupted.h"

namespace mmrec::apps {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 16;

std::string reason(int error) { return std::generic_category().message(error); }

/// Whether `fd` is the file of `status`.
bool is_file_of(int fd, const struct stat& status) {
  struct stat own = {};
  return fstat(fd, &own) == 0 && own.st_dev == status.st_dev && own.st_ino == status.st_ino;
}
bool is_writable(int fd) { return (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY; }

}  // namespace

Output::Output(std::filesystem::path path) : target_(std::move(path)) {
  struct stat given = {};
  const bool exists = stat(target_.c_str(), &given) == 0;
  const auto writes_to = [&](int fd) { return exists && is_file_of(fd, given) && is_writable(fd); };
  const bool is_stdout = target_ == "-" || writes_to(STDOUT_FILENO);
  if (is_stdout || writes_to(STDERR_FILENO)) {
    if (is_stdout) target_.clear();
    fd_ = fcntl(is_stdout ? STDOUT_FILENO : STDERR_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (fd_ < 0) fail(errno);
  } else if (exists && !S_ISREG(given.st_mode)) {
    open_target(O_WRONLY);
  } else {
    try {
      replacement_.emplace(target_, models::Replacement::Mode::kUsual);
    } catch (const std::system_error& error) {
      fail(error.code().value());
    }
    fd_ = replacement_->descriptor();
    removed_.emplace(std::vector<std::string>{replacement_->temporary()});
  }
}

Output::Output(std::filesystem::path path, GoesOn) : target_(std::move(path)) { open_target(O_WRONLY | O_CREAT); }

void Output::open_target(int flags) {
  fd_ = models::uninterrupted([&] { return open(target_.c_str(), flags | O_CLOEXEC, 0666); });
  if (fd_ < 0) fail(errno);
}

Output::~Output() {
  if (fd_ > STDERR_FILENO && !replacement_) (void)close(fd_);
}

void Output::fail(int error) const {
  if (target_.empty() && error == EPIPE) throw StdoutClosed();
  const std::string name = target_.empty() ? "stdout" : target_.string();
  throw WriteError(fmt::format("{}: cannot write ({})", name, reason(error)));
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
  const int fd = std::exchange(fd_, -1);
  if (!replacement_) {
    if (close(fd) != 0 && errno != EINTR) fail(errno);
    return;
  }
  try {
    replacement_->commit();
  } catch (const std::system_error& error) {
    fail(error.code().value());
  }
}

bool Output::shares_stderr() const {
  struct stat mine = {};
  return fstat(fd_, &mine) == 0 && is_file_of(STDERR_FILENO, mine);
}

bool Output::is_terminal() const { return isatty(fd_) == 1; }

BackgroundWriter::BackgroundWriter(Output& out) : out_(out) {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {  // no more threads to be had: write() does it
  }
}

BackgroundWriter::~BackgroundWriter() { stop(); }

void BackgroundWriter::write(std::string_view text) {
  if (!text.empty()) line_open_ = text.back() != '\n';
  if (!thread_.joinable()) {
    out_.write(text);
    out_.flush();
    return;
  }
  std::unique_lock lock(mutex_);
  has_room_.wait(lock, [&] { return text_.size() < kMostBytes || fault_ != nullptr; });
  if (fault_ != nullptr) std::rethrow_exception(fault_);
  text_ += text;
  has_text_.notify_one();
}

void BackgroundWriter::finish() {
  stop();
  if (fault_ != nullptr) std::rethrow_exception(std::exchange(fault_, nullptr));
}

void BackgroundWriter::end_line(bool quiet) {
  if (!line_open_ || !(out_.is_terminal() || (out_.shares_stderr() && !quiet))) return;
  out_.write("\n");
  out_.flush();
}

void BackgroundWriter::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  has_text_.notify_one();
  thread_.join();
}

void BackgroundWriter::run() {
  std::unique_lock lock(mutex_);
  std::string text;
  while (true) {
    has_text_.wait(lock, [&] { return !text_.empty() || ends_; });
    if (text_.empty()) return;
    text.clear();
    text.swap(text_);
    lock.unlock();
    has_room_.notify_one();
    std::exception_ptr fault;
    try {
      out_.write(text);
      out_.flush();
    } catch (...) {
      fault = std::current_exception();
    }
    lock.lock();
    if (fault == nullptr) continue;
    fault_ = fault;
    has_room_.notify_one();
    return;
  }
}

}  // namespace mmrec::apps
