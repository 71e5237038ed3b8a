// Runs a program as a shell would and keeps what it printed and how it ended.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mmrec::test {

/// How to start a program. stdout is a pipe, and stderr unless it is a terminal.
struct Command {
  std::vector<std::string> arguments = {};  // [0] is the program
  std::optional<std::string> input = {};    // piped into stdin; none: /dev/null
  bool terminal = false;                    // stdin and stderr are its terminal, stdout stays a pipe
  int terminal_columns = 80;
};

/// A program on a terminal.
Command on_terminal(std::vector<std::string> arguments);

/// How it went.
struct Outcome {
  int code = -1;   // exit code; -1 if a signal ended it
  int signal = 0;  // the signal, or 0
  std::string out;
  std::string err;  // what came on the terminal, where there is one
};

/// A running program. A watchdog ends it after two minutes.
class Process {
 public:
  explicit Process(const Command& command);
  explicit Process(std::vector<std::string> arguments) : Process(Command{.arguments = std::move(arguments)}) {}
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  /// Reads stdout until `bytes` have arrived or it ends; false if it ended before.
  bool read_stdout(std::size_t bytes);
  /// Reads stderr until it holds `text` or ends; false if it ended before.
  bool read_stderr(std::string_view text);
  /// Forgets what has come on stderr so far.
  void clear_stderr() { outcome_.err.clear(); }
  /// Keys on the terminal; "\x03" is Ctrl-C.
  void type(std::string_view keys) const;
  void close_stdout();
  void send(int signal) const;
  bool running() const;
  /// Lets the stdout pipe hold a page at most.
  void shrink_stdout() const;
  /// Bytes that wait in the stdout pipe.
  int unread_stdout() const;
  /// Reads everything and waits for the end. Without `read_out` stdout is left alone.
  Outcome wait(bool read_out = true);

 private:
  bool pump(bool read_out, int milliseconds);

  int pid_ = -1;
  int in_ = -1;
  int out_ = -1;
  int err_ = -1;
  std::string input_;
  Outcome outcome_;
};

Outcome run(const Command& command);
/// Without input, or with `input` piped into it.
Outcome run(std::vector<std::string> arguments, std::optional<std::string> input = {});

}  // namespace mmrec::test
