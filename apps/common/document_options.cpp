#include "apps/common/document_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

namespace mmrec::apps {
namespace {

/// What an option is, also where another option's line speaks of it.
std::string_view help_of(const Option& option) {
  if (option.flag.name == "help") return "print the common options";
  if (option.flag.name == "help-all") return "print all options";
  if (option.flag.name == "version") return "print version and backends";
  return option.help;
}

std::string replaced(std::string_view text, std::span<const std::pair<char, std::string_view>> pairs) {
  std::string out;
  for (const char c : text) {
    std::string_view with(&c, 1);
    for (const auto& [what, other] : pairs) {
      if (c == what) with = other;
    }
    out += with;
  }
  return out;
}

bool is_folder(const Option& option) { return option.value == "DIR"; }
bool is_file(const Option& option) { return option.value == "FILE"; }

/// "--name" of each of its names, and "-n".
std::vector<std::string> spellings(const Option& option) {
  std::vector<std::string> all;
  if (option.flag.short_name != 0) all.push_back(fmt::format("-{}", option.flag.short_name));
  all.push_back(fmt::format("--{}", option.flag.name));
  for (const std::string_view name : split_names(option.flag.alias)) all.push_back(fmt::format("--{}", name));
  return all;
}

/// Paragraphs of a page of help: examples, what it does, the options, what stands behind them.
struct HelpParts {
  std::string examples;
  std::string does;
  std::string foot;
};

HelpParts parts_of(std::string_view help) {
  HelpParts parts;
  std::string* into = &parts.examples;
  for (std::string_view rest = help; !rest.empty();) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    const bool is_option = line.starts_with("  ");
    if (is_option) {
      into = &parts.foot;
    } else if (line.empty()) {
      if (into == &parts.examples) into = &parts.does;
    } else {
      *into += fmt::format("{}\n", line);
    }
  }
  return parts;
}

std::string roff(std::string_view text) {
  using Pair = std::pair<char, std::string_view>;
  constexpr auto kPairs = std::to_array<Pair>(
      {{'\\', "\\e"}, {'-', "\\-"}, {'\'', "\\(aq"}, {'^', "\\(ha"}, {'~', "\\(ti"}, {'`', "\\(ga"}});
  const std::string line = replaced(text, kPairs);
  return line.starts_with(".") ? "\\&" + line : line;
}

std::string roff_lines(std::string_view text) {
  std::string out;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    out += roff(rest.substr(0, end)) + "\n";
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return out;
}

std::string roff_options(std::span<const Option> options) {
  std::string out;
  for (const Option& option : options) {
    std::string names;
    for (const std::string& name : spellings(option)) {
      names += fmt::format("{}\\fB{}\\fR", names.empty() ? "" : ", ", roff(name));
    }
    if (!option.value.empty()) names += fmt::format(" \\fI{}\\fR", roff(option.value));
    out += fmt::format(".TP\n{}\n{}\n", names, roff(help_of(option)));
  }
  return out;
}

// As docs/embedding.md has them, of the programs.
constexpr std::string_view kExitStatus = R"(.SH EXIT STATUS
.TP
0
success
.TP
1
a fault at run time, an unusable GPU among them
.TP
2
the command line is wrong
.TP
3
a model, tokenizer, state or token\-id file is missing or malformed
.TP
4
out of memory, of the host or of a GPU
.TP
5
the result could not be written
.TP
6
NaN or infinity where a number must be
.TP
129, 130, 143
interrupted by SIGHUP, by SIGINT, by SIGTERM
.TP
141
nobody reads standard output any more
)";

/// The words of `options` that begin with '-'.
std::string words_of(std::span<const Option> options) {
  std::string words;
  for (const Option& option : options) {
    for (const std::string& name : spellings(option)) words += (words.empty() ? "" : " ") + name;
  }
  return words;
}

std::string bash_function(std::string_view function, std::span<const Option> options, std::string_view first_words) {
  std::string cases;
  for (const Option& option : options) {
    if (!option.flag.takes_value) continue;
    const std::string what = !option.choices.empty() ? fmt::format("-W '{}'", option.choices)
                             : is_folder(option)     ? "-d"
                             : is_file(option)       ? "-f"
                                                     : "";
    cases += fmt::format("    {})\n", fmt::join(spellings(option), " | "));
    if (!what.empty()) cases += fmt::format("      mapfile -t COMPREPLY < <(compgen {} -- \"$cur\")\n", what);
    cases += "      return ;;\n";
  }
  std::string first;
  if (!first_words.empty()) {
    first = fmt::format("  [ \"$COMP_CWORD\" -gt 1 ] || mapfile -t COMPREPLY < <(compgen -W '{}' -- \"$cur\")\n",
                        first_words);
  }
  return fmt::format(R"({0}() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} files
  COMPREPLY=()
  case $prev in
{1}  esac
  if [[ $cur == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W '{2}' -- "$cur")
    return
  fi
{3}  mapfile -t files < <(compgen -f -- "$cur")
  COMPREPLY+=("${{files[@]}}")
}}
)",
                     function, cases, words_of(options), first);
}

std::string function_of(std::string_view program) {
  using Pair = std::pair<char, std::string_view>;
  constexpr auto kPairs = std::to_array<Pair>({{'-', "_"}});
  return "_" + replaced(program, kPairs);
}

std::string zsh_arguments(std::span<const Option> options) {
  using Pair = std::pair<char, std::string_view>;
  constexpr auto kPairs =
      std::to_array<Pair>({{'\'', "'\\''"}, {'[', "\\["}, {']', "\\]"}, {':', "\\:"}, {'\\', "\\\\"}});
  std::string out;
  for (const Option& option : options) {
    const auto names = spellings(option);
    const std::string all = fmt::format("{}", fmt::join(names, " "));
    const std::string excluded = option.flag.repeatable ? "*" : fmt::format("({})", all);
    std::string value;
    if (option.flag.takes_value) {
      const std::string action = !option.choices.empty() ? fmt::format("({})", replaced(option.choices, kPairs))
                                 : is_folder(option)     ? "_files -/"
                                 : is_file(option)       ? "_files"
                                                         : " ";
      value = fmt::format(":{}:{}", replaced(option.value, kPairs), action);
    }
    for (const std::string& name : names) {
      out += fmt::format(" \\\n    '{}{}[{}]{}'", excluded, name, replaced(help_of(option), kPairs), value);
    }
  }
  return out;
}

std::string fish_lines(std::string_view program, std::span<const Option> options, std::string_view condition) {
  using Pair = std::pair<char, std::string_view>;
  constexpr auto kPairs = std::to_array<Pair>({{'\'', "\\'"}, {'\\', "\\\\"}});
  std::string out;
  for (const Option& option : options) {
    out += fmt::format("complete -c {}{}", program, condition);
    if (option.flag.short_name != 0) out += fmt::format(" -s {}", option.flag.short_name);
    out += fmt::format(" -l {}", option.flag.name);
    for (const std::string_view name : split_names(option.flag.alias)) out += fmt::format(" -l {}", name);
    if (option.flag.takes_value) {
      if (!option.choices.empty()) {
        out += fmt::format(" -x -a '{}'", option.choices);
      } else if (is_folder(option)) {
        out += " -x -a '(__fish_complete_directories)'";
      } else {
        out += is_file(option) ? " -r -F" : " -x";
      }
    }
    out += fmt::format(" -d '{}'\n", replaced(help_of(option), kPairs));
  }
  return out;
}

std::string subcommand_names(const DocumentedProgram& program) {
  std::string names;
  for (const Subcommand& sub : program.subcommands) names += fmt::format("{}{}", names.empty() ? "" : " ", sub.name);
  return names;
}

}  // namespace

std::string manual_page(const DocumentedProgram& program, std::string_view version) {
  const HelpParts parts = parts_of(program.help);
  std::string title(program.name);
  for (char& c : title) c = static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  std::string page = fmt::format(".TH {} 1 \"\" \"mmrec {}\" \"User Commands\"\n.SH NAME\n{} \\- {}\n", roff(title),
                                 version, roff(program.name), roff(program.does));
  page += fmt::format(".SH SYNOPSIS\n.B {}\n[\\fIOPTION\\fR]... {}\n", roff(program.name), roff(program.operands));
  for (const Subcommand& sub : program.subcommands) {
    page += fmt::format(".br\n.B {} {}\n[\\fIOPTION\\fR]... \\fIFILE\\fR...\n", roff(program.name), roff(sub.name));
  }
  page += ".SH DESCRIPTION\n" + roff_lines(parts.does);
  if (!parts.foot.empty()) page += ".PP\n" + roff_lines(parts.foot);
  page += ".SH OPTIONS\n" + roff_options(program.options);
  std::string examples = parts.examples;
  for (const Subcommand& sub : program.subcommands) {
    const HelpParts own = parts_of(sub.help);
    page += fmt::format(".SS {} {}\n{}", roff(program.name), roff(sub.name), roff_lines(own.does)) +
            roff_options(sub.options);
    examples += own.examples;
  }
  page += ".SH EXAMPLES\n.nf\n" + roff_lines(examples) + ".fi\n";
  page += kExitStatus;
  page += ".SH SEE ALSO\n";
  std::string others;
  for (const std::string_view other : {"mmrec-bench", "mmrec-generate", "mmrec-ppl"}) {
    if (other != program.name) others += fmt::format("{}.BR {} (1)", others.empty() ? "" : ",\n", roff(other));
  }
  return page + others + "\n";
}

std::string bash_completion(const DocumentedProgram& program) {
  const std::string function = function_of(program.name);
  std::string text = fmt::format("# bash completion of {}\n", program.name);
  std::string dispatch = function;
  if (!program.subcommands.empty()) {
    std::string cases;
    for (const Subcommand& sub : program.subcommands) {
      text += bash_function(fmt::format("{}_{}", function, sub.name), sub.options, "");
      cases += fmt::format("    {0}) [ \"$COMP_CWORD\" -eq 1 ] || {{ {1}_{0}; return; }} ;;\n", sub.name, function);
    }
    text += bash_function(function + "_options", program.options, subcommand_names(program));
    text += fmt::format("{0}() {{\n  case ${{COMP_WORDS[1]}} in\n{1}  esac\n  {0}_options\n}}\n", function, cases);
  } else {
    text += bash_function(function, program.options, "");
  }
  return text + fmt::format("complete -o filenames -F {} {}\n", dispatch, program.name);
}

std::string zsh_completion(const DocumentedProgram& program) {
  std::string text = fmt::format("#compdef {}\n", program.name);
  std::string first = "*:file:_files";
  for (const Subcommand& sub : program.subcommands) {
    text += fmt::format("if (( CURRENT > 2 )) && [[ ${{words[2]}} == {} ]]; then\n  shift words\n  (( CURRENT-- ))\n",
                        sub.name);
    text += fmt::format("  _arguments -s -S{} \\\n    '*:file:_files'\n  return\nfi\n", zsh_arguments(sub.options));
    first =
        fmt::format("1: :_alternative \"subcommands:subcommand:({})\" \"files:file:_files\"' \\\n    '*:file:_files",
                    subcommand_names(program));
  }
  return text + fmt::format("_arguments -s -S{} \\\n    '{}'\n", zsh_arguments(program.options), first);
}

std::string fish_completion(const DocumentedProgram& program) {
  std::string text = fmt::format("# fish completion of {}\n", program.name);
  std::string condition;
  for (const Subcommand& sub : program.subcommands) {
    text += fmt::format("complete -c {0} -n 'not __fish_seen_subcommand_from {1}' -a {1}\n", program.name, sub.name);
    text += fish_lines(program.name, sub.options, fmt::format(" -n '__fish_seen_subcommand_from {}'", sub.name));
    condition = fmt::format(" -n 'not __fish_seen_subcommand_from {}'", subcommand_names(program));
  }
  return text + fish_lines(program.name, program.options, condition);
}

}  // namespace mmrec::apps
