// Text that goes out while the next is made: a thread writes what has come since it last wrote, so a slow reader or a
// slow system call delays nobody, and what comes one by one is written together where it comes faster than it is taken.
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "apps/common/output.h"

namespace mmrec::apps {

/// The output belongs to it until finish(), after which it writes nothing.
class BackgroundWriter {
 public:
  explicit BackgroundWriter(Output& out);
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;
  /// Writes what has been handed over; what fails then is lost.
  ~BackgroundWriter();

  /// Returns at once unless kMostBytes wait. Throws what writing has thrown before.
  void write(std::string_view text);
  /// Returns when everything is written. Throws what writing has thrown.
  void finish();
  /// After finish(): ends the text's last line if a person would see what follows on stderr behind it.
  void end_line(bool quiet);

 private:
  static constexpr std::size_t kMostBytes = std::size_t{1} << 20;

  void run();
  void stop();

  Output& out_;
  bool line_open_ = false;
  std::mutex mutex_;  // guards all that follows but the thread
  std::condition_variable has_text_, has_room_;
  std::string text_;
  std::exception_ptr fault_;
  bool is_idle_ = false;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace mmrec::apps
