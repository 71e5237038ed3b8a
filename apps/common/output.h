// Where results go: stdout, or a file that appears whole or not at all.
//
// Must stay true: every write, flush and close is checked; a file named by -o is written beside its target and renamed
// over it only when complete, and removed on every other way out, unless it is one to go on with.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "apps/common/cli.h"
#include "models/files/replace_file.h"

namespace mmrec::apps {

/// Exit 141, without a word: whoever read stdout has gone.
class StdoutClosed : public std::runtime_error {
 public:
  StdoutClosed() : std::runtime_error("stdout is closed") {}
};

/// A checked, buffered sink of bytes. Not copyable, not movable: the interrupt handler knows its temporary file.
class Output {
 public:
  /// A temporary file beside `path`, renamed to it by commit(). A pipe or a device is opened and written to
  /// directly; "-" and another name of stdout are stdout. Throws WriteError.
  explicit Output(std::filesystem::path path = "-");
  /// Goes on with the file at `path`, and makes it if needed. The text stays, however the program ends. Throws
  /// WriteError.
  struct GoesOn {};
  Output(std::filesystem::path path, GoesOn);
  /// Of such a file: the first write cuts off what stands behind the first `bytes`, and goes on there.
  void keep(std::uint64_t bytes) { keep_ = bytes; }
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  /// Throws WriteError or StdoutClosed, as does everything below.
  void write(std::string_view text);
  void flush();
  /// Flushes, closes and, for a file, puts it in its place. Nothing may be written afterwards.
  void commit();

  bool is_terminal() const;
  /// Whether what is written goes where stderr goes: a terminal, a pipe, a file.
  bool shares_stderr() const;

 private:
  [[noreturn]] void fail(int error) const;
  void open_target(int flags);

  int fd_ = -1;                                     // of replacement_, if there is one
  std::filesystem::path target_;                    // for messages; empty for stdout
  std::optional<RemovedAtInterrupt> removed_;       // what replacement_ has written
  std::optional<models::Replacement> replacement_;  // none where the target is written to directly
  std::string buffer_;
  std::optional<std::uint64_t> keep_;  // until the first write
};

/// Text that goes out while the next is made: a thread writes what has come since it last wrote, so a slow reader or a
/// slow system call delays nobody. Pieces that come faster than they are taken are written together.
///
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
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace mmrec::apps
