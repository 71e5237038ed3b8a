#include "apps/common/background_writer.h"

#include <system_error>
#include <utility>

namespace mmrec::apps {

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
  if (is_idle_) has_text_.notify_one();
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
    is_idle_ = true;
    has_text_.wait(lock, [&] { return !text_.empty() || ends_; });
    is_idle_ = false;
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
