// Manual pages and completions of shells, made from the tables that the programs parse and print help from.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/common/option_table.h"

namespace mmrec::apps {

/// A word in the first place that is followed by options of its own.
struct Subcommand {
  std::string_view name;
  std::span<const Option> options;
  std::string help;  // its page
};

/// What a program's documents are made of. `help` is the page of --help-all: examples, a blank line, what the program
/// does, and what stands behind the options.
struct DocumentedProgram {
  std::string_view name;
  std::string_view does;      // one line, for a list of programs
  std::string_view operands;  // behind the options
  std::span<const Option> options;
  std::string help;
  std::vector<Subcommand> subcommands = {};
};

/// roff of a page of section 1.
std::string manual_page(const DocumentedProgram& program, std::string_view version);
/// Scripts that complete options, the words an option may have, files and folders.
std::string bash_completion(const DocumentedProgram& program);
std::string zsh_completion(const DocumentedProgram& program);
std::string fish_completion(const DocumentedProgram& program);

}  // namespace mmrec::apps
