// The command line of a program, from one table: what is parsed, the pages of help, the manual page and the
// completions.
//
// Must stay true: every number is parsed whole and without regard to the locale.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/common/cli.h"

namespace mmrec::apps {

/// The kind of file that an option's value names.
enum class Names : std::uint8_t {
  kNothing,
  kInput,   // a file to read, or a model folder
  kOutput,  // a file to write
  kFolder,  // a folder to read from and write to
};

/// What stands for an option's value; without `text` the option is on or off.
struct Value {
  std::string_view text = {};
  std::string_view choices = {};  // the words that the value may be, separated by spaces, if these are few
  Names names = Names::kNothing;
};
inline constexpr Value kNoValue = {};
inline constexpr Value kInputFile = {"FILE", {}, Names::kInput};
inline constexpr Value kOutputFile = {"FILE", {}, Names::kOutput};
inline constexpr Value kModelFolder = {"DIR", {}, Names::kInput};

/// An option and its help. An option that is not repeatable is refused if it is given twice.
struct Option {
  std::string_view name;
  char short_name = 0;  // 0: none
  Value value = {};
  std::string_view help = {};     // empty: the line of another option names it
  bool is_common = false;         // on the page of --help
  std::string_view aliases = {};  // its names in other programs, separated by spaces
  bool repeatable = false;
};

// What every program that runs a model has; run_options() of model_folder.h reads it.
inline constexpr Option kPrecisionOption = {
    "precision", 0, {"P", "auto fp32 bf16 fp16 fp32-fma"}, "auto, fp32, bf16, fp16 or fp32-fma"};
inline constexpr Option kBatchInvariantOption = {"batch-invariant", 0, kNoValue,
                                                 "on a GPU: no text depends on other sequences; slower"};
inline constexpr Option kThreadsOption = {"threads", 't', {"N"}, "threads of the CPU (0: all)"};
inline constexpr Option kExpertOption = {
    "expert", 0, {"E", "both text code"}, "of mmrec100m: both, text or code (as config.json says)"};
inline constexpr Option kPrefillOption = {"prefill", 0, {"M", "auto sweeps steps"}, "auto, sweeps or steps"};
inline constexpr Option kSweepTolOption = {"sweep-tol", 0, {"X"}, "tolerance of sweeps (auto)"};
inline constexpr Option kBankOption = {
    "bank",
    0,
    {"B", "true false"},
    "of mmrec-jax: true or false, whether it writes a memory bank (as config.json says)"};
inline constexpr Option kQuietOption = {"quiet", 'q', kNoValue, "no progress and no timings"};
inline constexpr Option kVerboseOption = {"verbose", 'v', kNoValue, "say what was loaded, where it runs and why"};
inline constexpr Option kSandboxOption = {"sandbox", 0, kNoValue,
                                          "no network, no other programs, no files but those of this command"};
inline constexpr Option kHelpOption = {"help", 'h', kNoValue, "the common options; --help-all: all of them; --version",
                                       true};
inline constexpr Option kHelpAllOption = {"help-all"};
inline constexpr Option kVersionOption = {"version"};

/// A program, or one of its subcommands. apps/NAME defines `const Program& NAME_program()` outside of its main.cpp; the
/// build finds the folder (apps/CMakeLists.txt).
struct Program {
  std::string_view name;      // of a subcommand: "PROGRAM WORD"
  std::string_view does;      // one line, for a list of programs
  std::string_view operands;  // behind the options; empty: it takes none
  std::string_view head;      // its page of help up to the options: examples, a blank line, what it does
  std::span<const Option> options;
  std::string_view foot = {};  // of the page of --help-all
  const Program* subcommand = nullptr;
};

/// All programs that users run. The build makes the list.
std::span<const Program* const> programs();
/// The one of that name, with "mmrec-" before the folder's. Takes no memory.
const Program& program(std::string_view name);

/// The parts of `text` between separators; none of an empty text.
std::vector<std::string_view> split(std::string_view text, std::string_view separator = " ");

/// A parsed command line; values are kept as the strings they came as.
class Arguments {
 public:
  /// An option is known by its name, whichever of its names was given. Throws UsageError for an unknown, repeated or
  /// valueless option, and for an operand of a program that takes none.
  Arguments(const Program& program, int argc, const char* const* argv);

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
  /// One of `choices`; the first if the option was not given. Returns its index.
  std::size_t choice(std::string_view name, std::span<const std::string_view> choices) const;

  /// Throws UsageError if option `one` was given with one of the others; `why` ends the message.
  void refuse_together(std::string_view one, std::initializer_list<std::string_view> others,
                       std::string_view why = {}) const;
  /// The same if one of `options` was given, unless `may_be`.
  void refuse_unless(bool may_be, std::initializer_list<std::string_view> options, std::string_view why) const;

 private:
  std::vector<std::pair<std::string, std::string>> given_;  // names and values
  std::vector<std::string> positionals_;
};

/// The whole of `text` as a number, or nothing: no leading space or '+', no trailing characters, no locale.
std::optional<std::int64_t> parse_integer(std::string_view text);
std::optional<double> parse_real(std::string_view text);

/// The double nearest to the shortest decimal that gives `x` back: 0.8F becomes 0.8, not 0.800000011920929.
double shortest(float x);

/// Throws UsageError: the value of an option is not a valid one.
[[noreturn]] void refuse_value(std::string_view option, std::string_view found, std::string_view expected);

/// Calls `body` with the command line of `program`, as run_program() does. Answers --help, --help-all and --version
/// ("<program> <version> (<backends>)") on stdout instead, and calls a subcommand if its word comes first.
using Body = int (*)(const Arguments& arguments);
int run_command(const Program& program, int argc, const char* const* argv, Body body, Body subcommand = nullptr);

}  // namespace mmrec::apps
