// Options that are declared once: what is parsed and what --help and --help-all print come from one table.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/cli.h"

namespace mmrec::apps {

/// An option and its help.
struct Option {
  Flag flag;
  std::string_view value = {};    // what stands for its value
  std::string_view help = {};     // empty: another option's line speaks of it
  bool is_common = false;         // on the page of --help
  std::string_view choices = {};  // the words that its value may be, separated by spaces, where these are few
};

std::vector<Flag> flags_of(std::span<const Option> options);

/// `head`, then a line or more of each option, at most 80 columns: the common ones, or all.
std::string help_page(std::string_view head, std::span<const Option> options, bool all);

}  // namespace mmrec::apps
