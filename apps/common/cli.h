// What every program here shares: exit codes, the errors that lead to them, and lines on stderr.
//
// Must stay true: a program prints its result on stdout and nothing else; everything else is one line on stderr, begun
// with the program's name.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

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

/// Runs `body`, turns what it throws into one line on stderr, and returns the exit code. Before that: ignores SIGPIPE,
/// keeps descriptors 0 to 2 from being reused, and makes an interrupt end the program (see signals.h).
int run_program(std::string_view program, const std::function<int()>& body);

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

}  // namespace mmrec::apps
