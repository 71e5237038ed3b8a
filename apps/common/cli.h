// What every program here shares: exit codes, the errors that lead to them, the command line, strict numbers.
//
// Must stay true: a program prints its result on stdout and nothing else; everything else is one line on stderr, begun
// with the program's name. Every number on a command line is parsed whole and without regard to the locale.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
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

/// One option. `short_name` 0: none. A flag without a value is on or off; an option that is not repeatable is refused
/// when it is given twice. `alias`: other long names for it, as other programs have, separated by spaces.
struct Flag {
  std::string_view name;
  char short_name = 0;
  bool takes_value = true;
  bool repeatable = false;
  std::string_view alias = {};
};

/// The words of `names`, which spaces separate.
std::vector<std::string_view> split_names(std::string_view names);

/// A parsed command line; values are kept as the strings they came as.
class Arguments {
 public:
  /// An option is known by its name, whichever of its names was given. Throws UsageError for an unknown, repeated or
  /// valueless option, and for a positional argument unless `positionals`.
  Arguments(std::span<const Flag> flags, bool positionals, int argc, const char* const* argv);

  bool has(std::string_view name) const;
  /// The value of an option that is given once; none if it was not given.
  std::optional<std::string> text(std::string_view name) const;
  /// The same of a file or folder, whose name is not empty.
  std::optional<std::string> file(std::string_view name) const;
  std::vector<std::string> list(std::string_view name) const;
  const std::vector<std::string>& positionals() const { return positionals_; }

  /// Throws UsageError naming option, found and expected unless the value is a whole number in [min, max].
  std::int64_t integer(std::string_view name, std::int64_t fallback, std::int64_t min, std::int64_t max) const;
  /// Any 64-bit unsigned number; none if the option was not given.
  std::optional<std::uint64_t> unsigned64(std::string_view name) const;
  /// Finite, in [min, max], or in (min, max] if `above_min`.
  std::optional<float> real(std::string_view name, float min, float max, bool above_min = false) const;
  /// Comma-separated whole numbers in [min, max], at least one.
  std::vector<std::int64_t> integers(std::string_view name, std::vector<std::int64_t> fallback, std::int64_t min,
                                     std::int64_t max) const;
  /// One of `choices`; the first where the option was not given. Returns its index.
  std::size_t choice(std::string_view name, std::span<const std::string_view> choices) const;

 private:
  struct Given {
    std::string name;
    std::string value;
  };
  std::vector<Given> given_;
  std::vector<std::string> positionals_;
};

/// The whole of `text` as a number, or nothing: no leading space or '+', no trailing characters, no locale.
std::optional<std::int64_t> parse_integer(std::string_view text);
std::optional<double> parse_real(std::string_view text);

/// The double nearest to the shortest decimal that gives `x` back: 0.8F becomes 0.8, not 0.800000011920929.
double shortest(float x);

/// Writes `help` for --help, "<program> <version> (<backends>)" for --version, to stdout; false where neither was
/// given.
bool print_help_or_version(const Arguments& arguments, std::string_view help, std::string_view program);
/// The same of a program that has a second page, for --help-all.
bool print_help_or_version(const Arguments& arguments, std::string_view help, std::string_view all,
                           std::string_view program);

/// `text` in one line fit for a message: bytes of control characters and bytes that are no UTF-8 as \xNN, long text
/// cut.
std::string printable(std::string_view text);

}  // namespace mmrec::apps
