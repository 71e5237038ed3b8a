#include "apps/common/cli.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <limits>
#include <new>
#include <system_error>
#include <vector>

// The library's own splitting at commas is never wanted, and its regular expressions recurse once per character.
#define CXXOPTS_VECTOR_DELIMITER '\0'
#define CXXOPTS_NO_REGEX
#include <cxxopts.hpp>

#include <fmt/format.h>

#include "apps/common/output.h"
#include "apps/common/signals.h"
#include "mmrec/errors.h"
#include "mmrec/version.h"
#include "models/files/utf8.h"

namespace mmrec::apps {
namespace {

std::string program_name = "mmrec";

// A descriptor that arrives closed would be handed to the first file opened, and results would be written into it. The
// stand-ins have the wrong direction on purpose: using them fails with EBADF.
void occupy_standard_descriptors() {
  if (fcntl(STDIN_FILENO, F_GETFD) < 0 && errno == EBADF) (void)open("/dev/null", O_WRONLY);
  if (fcntl(STDOUT_FILENO, F_GETFD) < 0 && errno == EBADF) (void)open("/dev/null", O_RDONLY);
  if (fcntl(STDERR_FILENO, F_GETFD) < 0 && errno == EBADF) (void)open("/dev/null", O_WRONLY);
}

bool means_no_memory(const std::error_code& code) {
  // EAGAIN is what starting a thread gives where its stack has no room.
  return code == std::errc::not_enough_memory || code == std::errc::resource_unavailable_try_again;
}

std::string join(std::span<const std::string_view> words, std::string_view separator) {
  return fmt::format("{}", fmt::join(words, separator));
}

/// How many characters have to be inserted, removed, replaced or swapped with their neighbour to make one of the other.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> of(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        of[i][j] = i + j;
        continue;
      }
      of[i][j] = std::min({of[i - 1][j] + 1, of[i][j - 1] + 1, of[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0U : 1U)});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) of[i][j] = std::min(of[i][j], of[i - 2][j - 2] + 1);
    }
  }
  return of[a.size()][b.size()];
}

/// The option that the first unknown one of a command line was meant to be; empty where none is near.
std::string nearest_option(std::span<const Flag> flags, int argc, const char* const* argv) {
  constexpr std::size_t kLongest = 40;
  std::vector<std::string_view> names;
  for (const Flag& flag : flags) names.push_back(flag.name);
  for (const Flag& flag : flags) {
    for (const std::string_view name : split_names(flag.alias)) names.push_back(name);
  }
  for (int i = 1; i < argc; ++i) {
    std::string_view word = argv[i];
    if (word == "--") break;
    if (!word.starts_with("--")) continue;
    word.remove_prefix(2);
    word = word.substr(0, word.find('='));
    if (word.size() > kLongest || std::find(names.begin(), names.end(), word) != names.end()) continue;
    const auto nearer = [&](std::string_view a, std::string_view b) { return distance(word, a) < distance(word, b); };
    const auto nearest = std::min_element(names.begin(), names.end(), nearer);
    const std::size_t most = std::max<std::size_t>(1, word.size() / 3);
    if (nearest != names.end() && distance(word, *nearest) <= most) return std::string(*nearest);
    if (word.size() >= 3) {
      const auto begins = [&](std::string_view name) { return name.starts_with(word); };
      const auto longer = std::find_if(names.begin(), names.end(), begins);
      if (longer != names.end()) return std::string(*longer);
    }
    return {};
  }
  return {};
}

[[noreturn]] void refuse(std::string_view option, std::string_view found, std::string_view expected) {
  throw UsageError(
      fmt::format("--{}: not a valid value (found '{}', expected {})", option, printable(found), expected));
}

// Memory for when there is no more: messages take some, and so do the destructors of nlohmann's JSON values, which end
// the process where they get none (end_for_want_of_memory). A small request that fails first is served from it too.
std::atomic<void*> kept_back = nullptr;

void release_kept_back() {
  void* const memory = kept_back.exchange(nullptr);
  if (memory == nullptr) throw std::bad_alloc();
  std::free(memory);  // NOLINT(cppcoreguidelines-no-malloc): operator new is who asks
}

void keep_memory_back() {
  constexpr std::size_t kBytes = std::size_t{512} << 10;
  kept_back = std::malloc(kBytes);  // NOLINT(cppcoreguidelines-no-malloc)
  std::set_new_handler(release_kept_back);
}

/// Nowhere to report a failure of this one to.
void write_to_stderr(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDERR_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(n));
  }
}

/// Drives a terminal, or changes the order or the lines of the text around it.
bool is_control(char32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2066 && code <= 0x2069);
}

/// What std::terminate does. What finds no memory and must not throw, as a destructor of a JSON value or of
/// sentencepiece's, ends the program here then, as it would have ended one call later.
[[noreturn]] void end_for_want_of_memory() {
  // Where what throws was inlined into what must not, GCC cleans up and comes here with an exception that is on its way
  // still, and that nobody can ask for: it is taken for this one if memory has run out before.
  bool is_memory = std::uncaught_exceptions() > 0 && kept_back == nullptr;
  try {
    if (const std::exception_ptr error = std::current_exception()) {
      is_memory = false;
      std::rethrow_exception(error);
    }
  } catch (const std::bad_alloc&) {
    is_memory = true;
  } catch (...) {  // a fault of the program's own
  }
  if (!is_memory) std::abort();
  clean_up_at_once();
  write_to_stderr(program_name);
  write_to_stderr(": out of memory\n");
  ::_exit(kOutOfMemory);
}

/// What the body returns, or the exit code of what it throws, which is said.
int run_and_report(std::string_view program, const std::function<int()>& body) {
  const auto fail = [](ExitCode code, std::string_view text) {
    log_line(text);
    return static_cast<int>(code);
  };
  try {
    return body();
  } catch (const StdoutClosed&) {
    return kStdoutClosed;
  } catch (const UsageError& error) {
    return fail(kUsage, fmt::format("{}. Try: {} -h", error.what(), program));
  } catch (const RejectedFile& error) {
    return fail(kRejected, error.what());
  } catch (const OutputError& error) {
    return fail(kOutputFault, error.what());
  } catch (const NumericError& error) {
    return fail(kNumericFault, error.what());
  } catch (const std::bad_alloc& error) {
    const std::string_view what = error.what();
    return fail(kOutOfMemory,
                what.starts_with("std::")  // the host's: it has no more to say
                    ? "out of memory. Try: a smaller --batch, or a machine with more memory"
                    : what.find("GPU") == std::string_view::npos
                          ? fmt::format("{}. Try: a smaller --batch, or a machine with more memory", what)
                          : fmt::format("{}. Try: a smaller --batch, --precision bf16 or --device cpu", what));
  } catch (const std::system_error& error) {
    return fail(means_no_memory(error.code()) ? kOutOfMemory : kRuntimeFault, error.what());
  } catch (const std::exception& error) {
    return fail(kRuntimeFault, error.what());
  }
}

}  // namespace

std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 2000;
  std::string line;
  for (std::string_view rest = text; !rest.empty();) {
    const models::Utf8Unit unit = models::first_unit(rest);
    const std::string_view bytes = rest.substr(0, unit.length);
    if (text.size() - rest.size() + bytes.size() > kLongest) return line + "…";
    if (bytes == "\n") {
      line += ' ';
    } else if (unit.valid && !is_control(unit.code)) {
      line += bytes;
    } else {
      for (const char byte : bytes) line += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    }
    rest.remove_prefix(unit.length);
  }
  return line;
}

const std::string& running_program() { return program_name; }

void log_line(std::string_view text) { write_to_stderr(fmt::format("{}: {}\n", program_name, printable(text))); }

void warn(std::string_view text) { log_line(fmt::format("warning: {}", text)); }

int run_program(std::string_view program, const std::function<int()>& body) {
  program_name = program;
  try {
    std::set_terminate(end_for_want_of_memory);
    keep_memory_back();
    occupy_standard_descriptors();
    std::signal(SIGPIPE, SIG_IGN);
    handle_interrupts(program);
    return run_and_report(program, body);
  } catch (const std::bad_alloc&) {  // not even for the message
    write_to_stderr(program_name);
    write_to_stderr(": out of memory\n");
    return kOutOfMemory;
  }
}

bool print_help_or_version(const Arguments& arguments, std::string_view help, std::string_view all,
                           std::string_view program) {
  if (!arguments.has("help-all")) return print_help_or_version(arguments, help, program);
  Output out;
  out.write(all);
  out.commit();
  return true;
}

bool print_help_or_version(const Arguments& arguments, std::string_view help, std::string_view program) {
  if (!arguments.has("help") && !arguments.has("version")) return false;
  Output out;
  out.write(arguments.has("help")
                ? std::string(help)
                : fmt::format("{} {} ({})\n", program, mmrec::version(), fmt::join(mmrec::backends(), ", ")));
  out.commit();
  return true;
}

std::optional<std::int64_t> parse_integer(std::string_view text) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return value;
}

std::optional<double> parse_real(std::string_view text) {
  double value = 0.0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return value;
}

double shortest(float x) { return parse_real(fmt::format("{}", x)).value_or(static_cast<double>(x)); }

std::vector<std::string_view> split_names(std::string_view names) {
  std::vector<std::string_view> words;
  while (!names.empty()) {
    const std::size_t end = std::min(names.find(' '), names.size());
    if (end > 0) words.push_back(names.substr(0, end));
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return words;
}

Arguments::Arguments(std::span<const Flag> flags, bool positionals, int argc, const char* const* argv) {
  cxxopts::Options options(program_name);
  auto add = options.add_options();
  for (const Flag& flag : flags) {
    const auto value = cxxopts::value<std::string>();
    if (!flag.takes_value) value->implicit_value("true");
    add(flag.short_name != 0 ? fmt::format("{},{}", flag.short_name, flag.name) : std::string(flag.name), "", value);
    for (const std::string_view name : split_names(flag.alias)) {
      const auto its_value = cxxopts::value<std::string>();
      if (!flag.takes_value) its_value->implicit_value("true");
      add(std::string(name), "", its_value);
    }
  }
  const auto name_of = [&](const std::string& given) {
    for (const Flag& flag : flags) {
      const auto others = split_names(flag.alias);
      if (std::find(others.begin(), others.end(), given) != others.end()) return std::string(flag.name);
    }
    return given;
  };
  try {
    const cxxopts::ParseResult result = options.parse(argc, argv);
    for (const auto& argument : result.arguments()) given_.push_back({name_of(argument.key()), argument.value()});
    positionals_ = result.unmatched();
  } catch (const cxxopts::exceptions::no_such_option& error) {
    const std::string near = nearest_option(flags, argc, argv);
    throw UsageError(fmt::format("unknown option ({}{})", error.what(),
                                 near.empty() ? std::string() : fmt::format("; did you mean --{}", near)));
  } catch (const cxxopts::exceptions::exception& error) {
    throw UsageError(error.what());
  }
  for (const Flag& flag : flags) {
    const auto values = list(flag.name);
    if (values.size() > 1 && !flag.repeatable) {
      throw UsageError(fmt::format("--{}: given {} times, expected once", flag.name, values.size()));
    }
    if (!flag.takes_value && !values.empty() && values.front() != "true") {
      throw UsageError(fmt::format("--{}: takes no value (found '{}')", flag.name, printable(values.front())));
    }
  }
  if (!positionals && !positionals_.empty()) {
    throw UsageError(fmt::format("unexpected argument '{}'", printable(positionals_.front())));
  }
}

bool Arguments::has(std::string_view name) const {
  return std::any_of(given_.begin(), given_.end(), [&](const Given& given) { return given.name == name; });
}

std::optional<std::string> Arguments::text(std::string_view name) const {
  for (const Given& given : given_) {
    if (given.name == name) return given.value;
  }
  return std::nullopt;
}

std::vector<std::string> Arguments::list(std::string_view name) const {
  std::vector<std::string> values;
  for (const Given& given : given_) {
    if (given.name == name) values.push_back(given.value);
  }
  return values;
}

std::int64_t Arguments::integer(std::string_view name, std::int64_t fallback, std::int64_t min,
                                std::int64_t max) const {
  const auto found = text(name);
  if (!found) return fallback;
  const auto value = parse_integer(*found);
  if (!value || *value < min || *value > max) {
    refuse(name, *found, fmt::format("a whole number from {} to {}", min, max));
  }
  return *value;
}

std::optional<std::uint64_t> Arguments::unsigned64(std::string_view name) const {
  const auto found = text(name);
  if (!found) return std::nullopt;
  std::uint64_t value = 0;
  const char* end = found->data() + found->size();
  const auto [stop, error] = std::from_chars(found->data(), end, value);
  if (error != std::errc{} || stop != end) {
    refuse(name, *found, fmt::format("a whole number from 0 to {}", std::numeric_limits<std::uint64_t>::max()));
  }
  return value;
}

std::optional<std::string> Arguments::file(std::string_view name) const {
  auto found = text(name);
  if (found && found->empty()) refuse(name, *found, "the name of a file");
  return found;
}

std::optional<float> Arguments::real(std::string_view name, float min, float max, bool above_min) const {
  const auto found = text(name);
  if (!found) return std::nullopt;
  const auto value = parse_real(*found);
  const bool inside =
      value && std::isfinite(*value) && *value <= max && (above_min ? static_cast<float>(*value) > min : *value >= min);
  if (!inside) {
    refuse(name, *found, fmt::format("a number {} {} and at most {}", above_min ? "above" : "from", min, max));
  }
  return static_cast<float>(*value);
}

std::vector<std::int64_t> Arguments::integers(std::string_view name, std::vector<std::int64_t> fallback,
                                              std::int64_t min, std::int64_t max) const {
  const auto found = text(name);
  if (!found) return fallback;
  std::vector<std::int64_t> values;
  std::string_view rest = *found;
  for (bool more = true; more;) {
    const std::size_t comma = rest.find(',');
    const auto value = parse_integer(rest.substr(0, comma));
    if (!value || *value < min || *value > max) {
      refuse(name, *found, fmt::format("whole numbers from {} to {}, separated by commas", min, max));
    }
    values.push_back(*value);
    more = comma != std::string_view::npos;
    if (more) rest.remove_prefix(comma + 1);
  }
  return values;
}

std::size_t Arguments::choice(std::string_view name, std::span<const std::string_view> choices) const {
  const auto found = text(name);
  if (!found) return 0;
  const auto match = std::find(choices.begin(), choices.end(), *found);
  if (match == choices.end()) refuse(name, *found, join(choices, " or "));
  return static_cast<std::size_t>(match - choices.begin());
}

}  // namespace mmrec::apps
