// What every program here shares: exit codes, the errors that lead to them, lines on stderr, and interrupts.
//
// Must stay true: a program prints its result on stdout and nothing else; everything else is one line on stderr, begun
// with the program's name.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace mmrec::apps {

enum ExitCode : int {
  kOk = 0,
  kRuntimeFault = 1,  // anything without a code of its own, an unreadable prompt among it
  kUsage = 2,         // the command line
  kRejected = 3,      // a model, tokenizer, configuration or token-id file is missing or malformed
  kOutOfMemory = 4,
  kOutputFault = 5,    // the result could not be written
  kNumericFault = 6,   // NaN or infinity where a number must be
  kInterrupted = 130,  // SIGINT; SIGTERM gives 143, SIGHUP 129
  kStdoutClosed = 141  // nobody reads stdout any more; quiet
};

/// Exit 2: the command line is wrong.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Exit 3: an input file of a known format is missing or malformed.
class RejectedFile : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Whether an error of the system is want of memory.
bool means_no_memory(const std::error_code& code);

/// What `work` returns. What it throws of `Caught` becomes an `Error` with the same message.
template <class Error, class Caught = std::runtime_error, class Work>
auto rethrown_as(Work&& work) {
  try {
    return work();
  } catch (const Caught& error) {
    throw Error(error.what());
  }
}

/// Runs `body`, turns what it throws into one line on stderr, and returns the exit code. Before that: ignores SIGPIPE,
/// keeps descriptors 0 to 2 from being reused, and makes an interrupt end the program (see below). `saves_memory` is
/// the option that sets how many sequences run at once, if there is one: the line says so where memory ran out.
int run_program(std::string_view program, const std::function<int()>& body, std::string_view saves_memory = {});

/// The name of the program that runs.
const std::string& running_program();

/// One line on stderr: "<program>: <text>". Control characters are escaped, so a hostile file name or header cannot
/// drive the terminal.
void log_line(std::string_view text);
/// The same with "warning: " before the text.
void warn(std::string_view text);

/// `text` in one line fit for a message: bytes of control characters and bytes that are no UTF-8 as \xNN, long text
/// cut.
std::string printable(std::string_view text);

// Interrupts: SIGINT (Ctrl-C), SIGTERM and SIGHUP. SIGXFSZ is ignored, so that a write reports the fault.
//
// Outside a GracefulScope an interrupt ends the program at once with 128 + the signal's number. This is right while a
// model loads or a prompt is read: nothing has been produced. Inside, the first interrupt only sets a flag: the token
// in work is finished, text is flushed and timings are printed. The second one ends the program at once.

/// 128 + the signal that asked for the end; 0 if none did.
int interrupt_exit_code();

/// As if none had: the first interrupt of a GracefulScope has been answered.
void forget_interrupt();

class GracefulScope {
 public:
  GracefulScope();
  ~GracefulScope();
  GracefulScope(const GracefulScope&) = delete;
  GracefulScope& operator=(const GracefulScope&) = delete;
};

/// Temporary files, and a folder that holds no others, that the handler removes where it ends the program while this
/// lives: eight at most.
class RemovedAtInterrupt {
 public:
  explicit RemovedAtInterrupt(std::vector<std::string> paths);
  ~RemovedAtInterrupt();
  RemovedAtInterrupt(const RemovedAtInterrupt&) = delete;
  RemovedAtInterrupt& operator=(const RemovedAtInterrupt&) = delete;

 private:
  std::vector<std::string> paths_;
};
/// Removes them all, for an end that runs no destructors. Takes no memory; a signal handler may call it.
void clean_up_at_once();

}  // namespace mmrec::apps
