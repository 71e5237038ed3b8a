// Options that are declared once: what is parsed and what --help and --help-all print come from one table.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/common/cli.h"

namespace mmrec::apps {

/// What an option's value names.
enum class Names {
  kNothing,
  kInput,   // a file to read, or a model folder
  kOutput,  // a file to write
  kFolder,  // a folder to read from and write to
};

/// An option and its help.
struct Option {
  Flag flag;
  std::string_view value = {};    // what stands for its value
  std::string_view help = {};     // empty: another option's line speaks of it
  bool is_common = false;         // on the page of --help
  std::string_view choices = {};  // the words that its value may be, separated by spaces, where these are few
  Names names = Names::kNothing;
};

/// Whether each option with a FILE or a DIR says what it names.
constexpr bool names_are_complete(std::span<const Option> options) {
  for (const Option& option : options) {
    if ((option.value == "FILE" || option.value == "DIR") != (option.names != Names::kNothing)) return false;
  }
  return true;
}

// What every program that runs a model has; run_options() of model_folder.h reads it.
inline constexpr Option kPrecisionOption = {
    {"precision"}, "P", "auto, fp32, bf16 or fp16", false, "auto fp32 bf16 fp16"};
inline constexpr Option kThreadsOption = {{"threads", 't'}, "N", "threads of the CPU (0: all)"};
inline constexpr Option kExpertOption = {
    {"expert"}, "E", "of mmrec100m: both, text or code (as config.json says)", false, "both text code"};
inline constexpr Option kPrefillOption = {{"prefill"}, "M", "auto, sweeps or steps", false, "auto sweeps steps"};
inline constexpr Option kSweepTolOption = {{"sweep-tol"}, "X", "tolerance of sweeps (auto)"};
inline constexpr Option kBankOption = {
    {"bank"},
    "B",
    "of mmrec-jax: true or false, whether it writes a memory bank (as config.json says)",
    false,
    "true false"};
inline constexpr Option kSandboxOption = {
    {"sandbox", 0, false}, "", "no network, no other programs, no files but those of this command"};
inline constexpr Option kHelpOption = {
    {"help", 'h', false}, "", "the common options; --help-all: all of them; --version", true};
inline constexpr Option kHelpAllOption = {{"help-all", 0, false}};
inline constexpr Option kVersionOption = {{"version", 0, false}};

std::vector<Flag> flags_of(std::span<const Option> options);

/// `head`, then a line or more of each option, at most 80 columns: the common ones, or all.
std::string help_page(std::string_view head, std::span<const Option> options, bool all);

}  // namespace mmrec::apps
