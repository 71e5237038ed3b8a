// Writes the manual pages and completions of all programs, from the tables that they parse by. They lie under a folder
// as under PREFIX/share. Run by the build: mmrec-write-documents FOLDER
#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/common/arguments.h"
#include "apps/common/output.h"
#include "mmrec/version.h"

namespace mmrec::apps {
namespace {

const std::span<const Program* const> kPrograms = programs();

/// What an option is, also where another option's line speaks of it.
std::string_view help_of(const Option& option) {
  if (option.name == "help") return "print the common options";
  if (option.name == "help-all") return "print all options";
  if (option.name == "version") return "print version and backends";
  return option.help;
}

using Pair = std::pair<char, std::string_view>;

std::string replaced(std::string_view text, std::span<const Pair> pairs) {
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

/// How a shell completes an option's value: by the words that it may be, or as one of these.
struct Completions {
  std::string words, folder, file, other;
};
std::string completion_of(const Option& option, const Completions& all) {
  if (!option.value.choices.empty()) return all.words;
  return option.value.text == "DIR" ? all.folder : option.value.text == "FILE" ? all.file : all.other;
}

/// "--name" of each of its names, and "-n".
std::vector<std::string> spellings(const Option& option) {
  std::vector<std::string> all;
  if (option.short_name != 0) all.push_back(fmt::format("-{}", option.short_name));
  all.push_back(fmt::format("--{}", option.name));
  for (const std::string_view name : split(option.aliases)) all.push_back(fmt::format("--{}", name));
  return all;
}

/// The examples of a program, and what it does.
std::pair<std::string_view, std::string_view> examples_and_purpose(const Program& program) {
  const std::size_t end = program.head.find("\n\n");
  std::string_view purpose = program.head.substr(end + 2);
  while (purpose.ends_with("\n\n")) purpose.remove_suffix(1);
  return {program.head.substr(0, end + 1), purpose};
}

std::string roff(std::string_view text) {
  constexpr auto kPairs = std::to_array<Pair>(
      {{'\\', "\\e"}, {'-', "\\-"}, {'\'', "\\(aq"}, {'^', "\\(ha"}, {'~', "\\(ti"}, {'`', "\\(ga"}});
  const std::string line = replaced(text, kPairs);
  return line.starts_with(".") ? "\\&" + line : line;
}

std::string roff_lines(std::string_view text) {
  if (text.ends_with('\n')) text.remove_suffix(1);
  std::string out;
  for (const std::string_view line : split(text, "\n")) out += roff(line) + "\n";
  return out;
}

std::string roff_options(std::span<const Option> options) {
  std::string out;
  for (const Option& option : options) {
    std::string names;
    for (const std::string& name : spellings(option)) {
      names += fmt::format("{}\\fB{}\\fR", names.empty() ? "" : ", ", roff(name));
    }
    if (!option.value.text.empty()) names += fmt::format(" \\fI{}\\fR", roff(option.value.text));
    out += fmt::format(".TP\n{}\n{}\n", names, roff(help_of(option)));
  }
  return out;
}

// As docs/embedding.md has them, of the programs.
constexpr auto kExitStatus = std::to_array<std::pair<std::string_view, std::string_view>>({
    {"0", "success"},
    {"1", "a fault at run time, an unusable GPU among them"},
    {"2", "the command line is wrong"},
    {"3", "a model, tokenizer, state or token-id file is missing or malformed"},
    {"4", "out of memory, of the host or of a GPU"},
    {"5", "the result could not be written"},
    {"6", "NaN or infinity where a number must be"},
    {"129, 130, 143", "interrupted by SIGHUP, by SIGINT, by SIGTERM"},
    {"141", "nobody reads standard output any more"},
});

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
    if (option.value.text.empty()) continue;
    const std::string what = completion_of(option, {fmt::format("-W '{}'", option.value.choices), "-d", "-f", ""});
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
  constexpr auto kPairs = std::to_array<Pair>({{'-', "_"}});
  return "_" + replaced(program, kPairs);
}

std::string zsh_arguments(std::span<const Option> options) {
  constexpr auto kPairs =
      std::to_array<Pair>({{'\'', "'\\''"}, {'[', "\\["}, {']', "\\]"}, {':', "\\:"}, {'\\', "\\\\"}});
  std::string out;
  for (const Option& option : options) {
    const auto names = spellings(option);
    const std::string all = fmt::format("{}", fmt::join(names, " "));
    const std::string excluded = option.repeatable ? "*" : fmt::format("({})", all);
    std::string value;
    if (!option.value.text.empty()) {
      const std::string words = fmt::format("({})", replaced(option.value.choices, kPairs));
      value = fmt::format(":{}:{}", replaced(option.value.text, kPairs),
                          completion_of(option, {words, "_files -/", "_files", " "}));
    }
    for (const std::string& name : names) {
      out += fmt::format(" \\\n    '{}{}[{}]{}'", excluded, name, replaced(help_of(option), kPairs), value);
    }
  }
  return out;
}

std::string fish_lines(std::string_view program, std::span<const Option> options, std::string_view condition) {
  constexpr auto kPairs = std::to_array<Pair>({{'\'', "\\'"}, {'\\', "\\\\"}});
  std::string out;
  for (const Option& option : options) {
    out += fmt::format("complete -c {}{}", program, condition);
    if (option.short_name != 0) out += fmt::format(" -s {}", option.short_name);
    out += fmt::format(" -l {}", option.name);
    for (const std::string_view name : split(option.aliases)) out += fmt::format(" -l {}", name);
    if (!option.value.text.empty()) {
      out += completion_of(option, {fmt::format(" -x -a '{}'", option.value.choices),
                                    " -x -a '(__fish_complete_directories)'", " -r -F", " -x"});
    }
    out += fmt::format(" -d '{}'\n", replaced(help_of(option), kPairs));
  }
  return out;
}

/// The word of a program's subcommand.
std::string_view word_of(const Program& program) { return program.subcommand->name.substr(program.name.size() + 1); }

std::string manual_page(const Program& program) {
  const auto [examples, purpose] = examples_and_purpose(program);
  std::string title(program.name);
  for (char& c : title) c = static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  std::string page = fmt::format(".TH {} 1 \"\" \"mmrec {}\" \"User Commands\"\n.SH NAME\n{} \\- {}\n", roff(title),
                                 version(), roff(program.name), roff(program.does));
  page += fmt::format(".SH SYNOPSIS\n.B {}\n[\\fIOPTION\\fR]... {}\n", roff(program.name), roff(program.operands));
  const Program* const sub = program.subcommand;
  if (sub != nullptr) page += fmt::format(".br\n.B {}\n[\\fIOPTION\\fR]... \\fIFILE\\fR...\n", roff(sub->name));
  page += ".SH DESCRIPTION\n" + roff_lines(purpose);
  if (!program.foot.empty()) page += ".PP\n" + roff_lines(program.foot);
  page += ".SH OPTIONS\n" + roff_options(program.options);
  std::string all_examples(examples);
  if (sub != nullptr) {
    const auto [its_examples, its_purpose] = examples_and_purpose(*sub);
    page += fmt::format(".SS {}\n{}{}", roff(sub->name), roff_lines(its_purpose), roff_options(sub->options));
    all_examples += its_examples;
  }
  page += ".SH EXAMPLES\n.nf\n" + roff_lines(all_examples) + ".fi\n";
  page += ".SH EXIT STATUS\n";
  for (const auto& [code, means] : kExitStatus) page += fmt::format(".TP\n{}\n{}\n", code, roff(means));
  page += ".SH SEE ALSO\n";
  std::string others;
  for (const Program* other : kPrograms) {
    if (other != &program) others += fmt::format("{}.BR {} (1)", others.empty() ? "" : ",\n", roff(other->name));
  }
  return page + others + "\n";
}

std::string bash_completion(const Program& program) {
  const std::string function = function_of(program.name);
  std::string text = fmt::format("# bash completion of {}\n", program.name);
  if (program.subcommand == nullptr) {
    text += bash_function(function, program.options, "");
  } else {
    const std::string_view word = word_of(program);
    text += bash_function(fmt::format("{}_{}", function, word), program.subcommand->options, "");
    text += bash_function(function + "_options", program.options, word);
    text += fmt::format(
        "{0}() {{\n  if [[ ${{COMP_WORDS[1]}} == {1} && $COMP_CWORD -gt 1 ]]; then\n    {0}_{1}\n  else\n"
        "    {0}_options\n  fi\n}}\n",
        function, word);
  }
  return text + fmt::format("complete -o filenames -F {} {}\n", function, program.name);
}

std::string zsh_completion(const Program& program) {
  std::string text = fmt::format("#compdef {}\n", program.name);
  std::string first = "*:file:_files";
  if (program.subcommand != nullptr) {
    const std::string_view word = word_of(program);
    text += fmt::format(
        "if (( CURRENT > 2 )) && [[ ${{words[2]}} == {} ]]; then\n  shift words\n  (( CURRENT-- ))\n"
        "  _arguments -s -S{} \\\n    '*:file:_files'\n  return\nfi\n",
        word, zsh_arguments(program.subcommand->options));
    first = fmt::format(
        "1: :_alternative \"subcommands:subcommand:({})\" \"files:file:_files\"' \\\n    '*:file:_files", word);
  }
  return text + fmt::format("_arguments -s -S{} \\\n    '{}'\n", zsh_arguments(program.options), first);
}

std::string fish_completion(const Program& program) {
  std::string text = fmt::format("# fish completion of {}\n", program.name);
  std::string condition;
  if (program.subcommand != nullptr) {
    const std::string_view word = word_of(program);
    condition = fmt::format(" -n 'not __fish_seen_subcommand_from {}'", word);
    text += fmt::format("complete -c {}{} -a {}\n", program.name, condition, word);
    text += fish_lines(program.name, program.subcommand->options,
                       fmt::format(" -n '__fish_seen_subcommand_from {}'", word));
  }
  return text + fish_lines(program.name, program.options, condition);
}

void write_file(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::create_directories(path.parent_path());
  Output out(path.string());
  out.write(text);
  out.commit();
}

int write_documents(const Arguments& arguments) {
  if (arguments.positionals().size() != 1) throw UsageError("expected a folder");
  const std::filesystem::path share = arguments.positionals().front();
  for (const Program* program : kPrograms) {
    const std::string name(program->name);
    write_file(share / "man/man1" / (name + ".1"), manual_page(*program));
    write_file(share / "bash-completion/completions" / name, bash_completion(*program));
    write_file(share / "zsh/site-functions" / ("_" + name), zsh_completion(*program));
    write_file(share / "fish/vendor_completions.d" / (name + ".fish"), fish_completion(*program));
  }
  return kOk;
}

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  constexpr mmrec::apps::Program kWriter = {
      .name = "mmrec-write-documents", .does = "", .operands = "FOLDER", .head = "", .options = {}};
  return mmrec::apps::run_command(kWriter, argc, argv, mmrec::apps::write_documents);
}
