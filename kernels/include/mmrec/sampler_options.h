// How the next token is chosen from logits.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <variant>

namespace mmrec {

/// The chain, in this order: repetition penalty, temperature, top-k, top-p, min-p, then one draw. A filter at its
/// neutral value is skipped. Each filter works on what the one before it has left, renormalised.
struct SamplerOptions {
  float temperature = 0.8F;         ///< finite, >= 0; 0 is greedy: the largest logit, ties to the lowest id
  int top_k = 40;                   ///< >= 0; keep the k largest, ties to the lowest ids; 0 or k >= vocab: all
  float top_p = 0.95F;              ///< keep the smallest set with at least this probability; (0, 1]; 1: all
  float min_p = 0.05F;              ///< drop tokens below min_p × the largest probability; [0, 1]; 0: none
  float repetition_penalty = 1.0F;  ///< finite, > 0; divides positive and multiplies negative logits of recent tokens
  int repetition_window = 64;       ///< how many of the last tokens count as recent; >= 0
  int vocab_limit = 0;     ///< > 0: ids from here on are never drawn (a tokenizer smaller than the model); 0: all
  std::uint64_t seed = 0;  ///< keys the random numbers; any value

  /// Member by member.
  bool operator==(const SamplerOptions&) const = default;
};

/// What checks, command lines, JSON, Python and state files know of one of the options above.
struct SamplerOption {
  std::string_view name;  ///< the member's, also in JSON and in Python
  std::variant<float SamplerOptions::*, int SamplerOptions::*, std::uint64_t SamplerOptions::*> member;  ///< which one
  double min = 0.0;                                      ///< the least value; numbers with a fraction are finite
  bool above_min = false;                                ///< values are larger than `min`
  double max = std::numeric_limits<double>::infinity();  ///< the largest value; infinity: any that is finite
  std::optional<double> off = {};                        ///< where a filter keeps everything; none: it is no filter
  std::string_view flag = {};   ///< its name on command lines; empty: for users of the library alone
  std::string_view alias = {};  ///< another one, as other programs have it
  char letter = 0;              ///< a short one
  bool is_common = false;       ///< it stands on the page of --help
  std::string_view help = {};   ///< one line
  std::uint32_t since = 2;      ///< the version of state files that first has it; new options: the next version

  /// Whether a user of the programs may set it.
  constexpr bool in_programs() const { return !flag.empty(); }
  /// use(value): the option's value in `options`, SamplerOptions that may be const.
  template <class Options, class Use>
  constexpr decltype(auto) visit(Options& options, const Use& use) const {
    return std::visit([&](auto at) -> decltype(auto) { return use(options.*at); }, member);
  }
};

/// The one table of them, in the order of the members.
inline constexpr auto kSamplerOptions = std::to_array<SamplerOption>({
    {.name = "temperature",
     .member = &SamplerOptions::temperature,
     .flag = "temp",
     .alias = "temperature",
     .is_common = true,
     .help = "temperature (0.8); 0: greedy. --top-k, --top-p, --min-p"},
    {.name = "top_k",
     .member = &SamplerOptions::top_k,
     .off = 0.0,
     .flag = "top-k",
     .help = "keep the N likeliest tokens (40); 0: all"},
    {.name = "top_p",
     .member = &SamplerOptions::top_p,
     .above_min = true,
     .max = 1.0,
     .off = 1.0,
     .flag = "top-p",
     .help = "keep the smallest set of probability X (0.95); 1: all"},
    {.name = "min_p",
     .member = &SamplerOptions::min_p,
     .max = 1.0,
     .off = 0.0,
     .flag = "min-p",
     .help = "drop tokens below X times the likeliest (0.05); 0: none"},
    {.name = "repetition_penalty",
     .member = &SamplerOptions::repetition_penalty,
     .above_min = true,
     .flag = "repetition-penalty",
     .alias = "repeat-penalty",
     .help = "make tokens of the last 64 less likely (1.0: do not)"},
    {.name = "repetition_window", .member = &SamplerOptions::repetition_window},
    {.name = "vocab_limit", .member = &SamplerOptions::vocab_limit},
    {.name = "seed",
     .member = &SamplerOptions::seed,
     .flag = "seed",
     .letter = 's',
     .is_common = true,
     .help = "random seed (default: random, always reported)"},
});

}  // namespace mmrec
