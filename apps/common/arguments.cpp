#include "apps/common/arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <system_error>

// The library's own splitting at commas is never wanted, and its regular expressions recurse once per character.
#define CXXOPTS_VECTOR_DELIMITER '\0'
#define CXXOPTS_NO_REGEX
#include <cxxopts.hpp>

#include "apps/common/output.h"
#include "mmrec/version.h"

namespace mmrec::apps {
namespace {

constexpr std::size_t kColumns = 80;
constexpr std::size_t kIndent = 22;

std::string entry(const Option& option, bool all) {
  std::string line = option.short_name != 0 ? fmt::format("  -{}, --{}", option.short_name, option.name)
                                            : fmt::format("      --{}", option.name);
  if (!option.value.text.empty()) line += fmt::format(" {}", option.value.text);
  line.resize(std::max(line.size() + 2, kIndent), ' ');
  std::string help(option.help);
  if (all) {
    for (const std::string_view name : split(option.aliases)) {
      help += fmt::format("{}--{}", help == option.help ? "; also " : ", ", name);
    }
  }
  std::string text;
  std::string_view between;
  for (const std::string_view word : split(help)) {
    if (!between.empty() && line.size() + 1 + word.size() > kColumns) {
      text += line + "\n";
      line = std::string(kIndent, ' ');
      between = "";
    }
    line.append(between).append(word);
    between = " ";
  }
  return text + line + "\n";
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
std::string nearest_option(std::span<const Option> options, int argc, const char* const* argv) {
  constexpr std::size_t kLongest = 40;
  std::vector<std::string_view> names;
  for (const Option& option : options) names.push_back(option.name);
  for (const Option& option : options) {
    for (const std::string_view name : split(option.aliases)) names.push_back(name);
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

template <class Number>
std::optional<Number> parse(std::string_view text) {
  Number value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc{} && stop == end ? std::optional(value) : std::nullopt;
}

/// The page of --help: `head`, then the common options, or of --help-all: all of them. At most 80 columns.
std::string help_page(const Program& program, bool all) {
  std::string page(program.head);
  for (const Option& option : program.options) {
    if (!option.help.empty() && (all || option.is_common)) page += entry(option, all);
  }
  if (all) page += program.foot;
  return page;
}

/// Answers --help, --help-all and --version; false if none was given.
bool answer(const Program& program, const Arguments& arguments) {
  const bool all = arguments.has("help-all");
  if (!all && !arguments.has("help") && !arguments.has("version")) return false;
  Output out;
  out.write(all || arguments.has("help")
                ? help_page(program, all)
                : fmt::format("{} {} ({})\n", running_program(), version(), fmt::join(backends(), ", ")));
  out.commit();
  return true;
}

}  // namespace

const Program& program(std::string_view name) { return **std::ranges::find(programs(), name, &Program::name); }

int run_command(const Program& program, int argc, const char* const* argv, Body body, Body subcommand) {
  const auto command = [&] {
    const Program* const sub = program.subcommand;
    const bool is_sub = sub != nullptr && argc > 1 && sub->name.substr(program.name.size() + 1) == argv[1];
    const Program& chosen = is_sub ? *sub : program;
    const Arguments arguments(chosen, is_sub ? argc - 1 : argc, is_sub ? argv + 1 : argv);
    if (answer(chosen, arguments)) return static_cast<int>(kOk);
    return is_sub ? subcommand(arguments) : body(arguments);
  };
  const auto saves = std::ranges::find_if(
      program.options, [](const Option& option) { return option.name == "batch" || option.name == "slots"; });
  return run_program(program.name, std::ref(command),  // a reference: nothing is allocated before run_program()
                     saves == program.options.end() ? "" : saves->name);
}

void refuse_value(std::string_view option, std::string_view found, std::string_view expected) {
  throw UsageError(
      fmt::format("--{}: not a valid value (found '{}', expected {})", option, printable(found), expected));
}

std::optional<std::int64_t> parse_integer(std::string_view text) { return parse<std::int64_t>(text); }
std::optional<double> parse_real(std::string_view text) { return parse<double>(text); }

double shortest(float x) { return parse_real(fmt::format("{}", x)).value_or(static_cast<double>(x)); }

std::vector<std::string_view> split(std::string_view text, std::string_view separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; !text.empty() && begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + separator.size();
  }
  return parts;
}

Arguments::Arguments(const Program& program, int argc, const char* const* argv) {
  const std::span<const Option> options = program.options;
  cxxopts::Options parser(running_program());
  for (const Option& option : options) {
    std::string names(option.name);  // the first is the key below
    for (const std::string_view name : split(option.aliases)) names.append(",").append(name);
    if (option.short_name != 0) names.append({',', option.short_name});
    const auto value = cxxopts::value<std::string>();
    if (option.value.text.empty()) value->implicit_value("true");
    parser.add_options()(names, "", value);
  }
  try {
    const cxxopts::ParseResult result = parser.parse(argc, argv);
    for (const auto& argument : result.arguments()) {
      given_.emplace_back(argument.key(), argument.value());
    }
    positionals_ = result.unmatched();
  } catch (const cxxopts::exceptions::no_such_option& error) {
    const std::string near = nearest_option(options, argc, argv);
    throw UsageError(fmt::format("unknown option ({}{})", error.what(),
                                 near.empty() ? std::string() : fmt::format("; did you mean --{}", near)));
  } catch (const cxxopts::exceptions::exception& error) {
    throw UsageError(error.what());
  }
  for (const Option& option : options) {
    const auto values = list(option.name);
    if (values.size() > 1 && !option.repeatable) {
      throw UsageError(fmt::format("--{}: given {} times, expected once", option.name, values.size()));
    }
    if (option.value.text.empty() && !values.empty() && values.front() != "true") {
      throw UsageError(fmt::format("--{}: takes no value (found '{}')", option.name, printable(values.front())));
    }
  }
  if (program.operands.empty() && !positionals_.empty()) {
    throw UsageError(fmt::format("unexpected argument '{}'", printable(positionals_.front())));
  }
}

bool Arguments::has(std::string_view name) const { return text(name).has_value(); }

std::optional<std::string> Arguments::text(std::string_view name) const {
  const std::vector<std::string> values = list(name);
  return values.empty() ? std::nullopt : std::optional(values.front());
}

std::vector<std::string> Arguments::list(std::string_view name) const {
  std::vector<std::string> values;
  for (const auto& [its_name, value] : given_) {
    if (its_name == name) values.push_back(value);
  }
  return values;
}

std::int64_t Arguments::integer(std::string_view name, std::int64_t fallback, std::int64_t min,
                                std::int64_t max) const {
  const auto found = text(name);
  if (!found) return fallback;
  const auto value = parse_integer(*found);
  if (!value || *value < min || *value > max) {
    refuse_value(name, *found, fmt::format("a whole number from {} to {}", min, max));
  }
  return *value;
}

std::optional<std::uint64_t> Arguments::unsigned64(std::string_view name) const {
  const auto found = text(name);
  if (!found) return std::nullopt;
  const auto value = parse<std::uint64_t>(*found);
  if (!value) {
    refuse_value(name, *found, fmt::format("a whole number from 0 to {}", std::numeric_limits<std::uint64_t>::max()));
  }
  return value;
}

std::optional<std::string> Arguments::file(std::string_view name) const {
  auto found = text(name);
  if (found && found->empty()) refuse_value(name, *found, "the name of a file");
  return found;
}

std::optional<float> Arguments::real(std::string_view name, float min, float max, bool above_min) const {
  const auto found = text(name);
  if (!found) return std::nullopt;
  const auto value = parse_real(*found);
  const bool inside =
      value && std::isfinite(*value) && *value <= max && (above_min ? static_cast<float>(*value) > min : *value >= min);
  if (!inside) {
    refuse_value(name, *found, fmt::format("a number {} {} and at most {}", above_min ? "above" : "from", min, max));
  }
  return static_cast<float>(*value);
}

std::vector<std::int64_t> Arguments::integers(std::string_view name, std::vector<std::int64_t> fallback,
                                              std::int64_t min, std::int64_t max) const {
  const auto found = text(name);
  if (!found) return fallback;
  std::vector<std::int64_t> values;
  const std::vector<std::string_view> parts = split(*found, ",");
  for (const std::string_view part : parts) {
    const auto value = parse_integer(part);
    if (value && *value >= min && *value <= max) values.push_back(*value);
  }
  if (values.empty() || values.size() < parts.size()) {
    refuse_value(name, *found, fmt::format("whole numbers from {} to {}, separated by commas", min, max));
  }
  return values;
}

std::size_t Arguments::choice(std::string_view name, std::span<const std::string_view> choices) const {
  const auto found = text(name);
  if (!found) return 0;
  const auto match = std::find(choices.begin(), choices.end(), *found);
  if (match == choices.end()) refuse_value(name, *found, fmt::format("{}", fmt::join(choices, " or ")));
  return static_cast<std::size_t>(match - choices.begin());
}

void Arguments::refuse_together(std::string_view one, std::initializer_list<std::string_view> others,
                                std::string_view why) const {
  for (const std::string_view other : others) {
    if (has(one) && has(other)) throw UsageError(fmt::format("--{}: not with --{}{}", one, other, why));
  }
}

void Arguments::refuse_unless(bool may_be, std::initializer_list<std::string_view> options,
                              std::string_view why) const {
  for (const std::string_view option : options) {
    if (!may_be && has(option)) throw UsageError(fmt::format("--{}: {}", option, why));
  }
}

}  // namespace mmrec::apps
