#include "apps/common/option_table.h"

#include <fmt/format.h>

namespace mmrec::apps {
namespace {

constexpr std::size_t kColumns = 80;
constexpr std::size_t kIndent = 22;

std::string entry(const Option& option, bool all) {
  std::string line = option.flag.short_name != 0 ? fmt::format("  -{}, --{}", option.flag.short_name, option.flag.name)
                                                 : fmt::format("      --{}", option.flag.name);
  if (!option.value.empty()) line += fmt::format(" {}", option.value);
  line.resize(std::max(line.size() + 2, kIndent), ' ');
  std::string help(option.help);
  if (all) {
    for (const std::string_view name : split_names(option.flag.alias)) {
      help += fmt::format("{}--{}", help == option.help ? "; also " : ", ", name);
    }
  }
  std::string text;
  bool is_first = true;
  for (std::string_view rest = help; !rest.empty(); is_first = false) {
    const std::size_t end = std::min(rest.find(' '), rest.size());
    if (!is_first && line.size() + 1 + end > kColumns) {
      text += line + "\n";
      line = std::string(kIndent, ' ');
      is_first = true;
    }
    if (!is_first) line += ' ';
    line += rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return text + line + "\n";
}

}  // namespace

std::vector<Flag> flags_of(std::span<const Option> options) {
  std::vector<Flag> flags;
  flags.reserve(options.size());
  for (const Option& option : options) flags.push_back(option.flag);
  return flags;
}

std::string help_page(std::string_view head, std::span<const Option> options, bool all) {
  std::string page(head);
  for (const Option& option : options) {
    if (!option.help.empty() && (all || option.is_common)) page += entry(option, all);
  }
  return page;
}

}  // namespace mmrec::apps
