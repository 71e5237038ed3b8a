// The sampler's chain.
//
// What must stay true: every choice is a function of logits, options and (seed, sequence, step) alone. Selections use
// the total order (logit falling, id rising), so that the standard library's way of selecting cannot show; weights are
// computed and summed in double, in the order of ids or of that total order.
#include "mmrec/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "engine/require.h"
#include "kernels/philox.h"
#include "mmrec/errors.h"

namespace mmrec {
namespace {

std::string range_text(const SamplerOption& option, bool is_integer) {
  if (is_integer) return fmt::format("an integer >= {}", option.min);
  const std::string_view above = option.above_min ? ">" : ">=";
  if (std::isinf(option.max)) return fmt::format("a finite number {} {}", above, option.min);
  return fmt::format("a number in {}{}, {}]", option.above_min ? '(' : '[', option.min, option.max);
}

void check(const SamplerOptions& options) {
  for (const SamplerOption& option : kSamplerOptions) {
    option.visit(options, [&](auto value) {
      const auto found = static_cast<double>(value);
      const bool reaches_min = option.above_min ? found > option.min : found >= option.min;
      if (reaches_min && found <= option.max && std::isfinite(found)) return;
      throw std::invalid_argument(fmt::format("sampler option {}: found {}, expected {}", option.name, found,
                                              range_text(option, std::is_integral_v<decltype(value)>)));
    });
  }
}

/// The largest of finite logits and -inf; throws for anything else, and where all are -inf.
float largest_of(std::span<const float> logits, std::uint64_t step) {
  constexpr std::size_t kLanes = 16;  // independent maxima, which compilers turn into vector instructions
  std::array<float, kLanes> maxima{};
  maxima.fill(-std::numeric_limits<float>::infinity());
  bool is_sound = true;
  std::size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const float x = logits[i + lane];
      is_sound &= x <= std::numeric_limits<float>::max();  // false for NaN and +inf
      maxima[lane] = x > maxima[lane] ? x : maxima[lane];
    }
  }
  for (; i < logits.size(); ++i) {
    is_sound &= logits[i] <= std::numeric_limits<float>::max();
    maxima[0] = logits[i] > maxima[0] ? logits[i] : maxima[0];
  }
  if (!is_sound) {
    const auto at = std::ranges::find_if(logits, [](float x) { return !(x <= std::numeric_limits<float>::max()); });
    throw NumericError(fmt::format("step {}: logit of token {} is {}, expected a finite number or -inf", step,
                                   at - logits.begin(), std::isnan(*at) ? "NaN" : "+inf"));
  }
  const float largest = *std::ranges::max_element(maxima);
  if (std::isinf(largest)) throw NumericError(fmt::format("step {}: all {} logits are -inf", step, logits.size()));
  return largest;
}

/// Log-softmax at `token`. log Σ exp(logits) is largest + rest, kept apart because their sum would round the rest away
/// where logits are huge.
float logprob_of(std::span<const float> logits, float largest, int token) {
  // Terms of fp32 precision in a sum of fp64: good to 1e-7, what the result is rounded to.
  double sum = 0.0;
  for (const float x : logits) sum += static_cast<double>(std::exp(x - largest));
  const auto logit = static_cast<double>(logits[static_cast<std::size_t>(token)]);
  return static_cast<float>((logit - static_cast<double>(largest)) - std::log(sum));
}

// The total order of selection.
constexpr auto kBefore = [](const auto& a, const auto& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
};

}  // namespace

Sampler::Sampler(const SamplerOptions& options) : options_(options) { check(options_); }

Sample Sampler::sample(std::span<const float> logits, std::span<const int> recent, std::uint64_t step,
                       std::uint64_t sequence) {
  return sample(logits, recent, step, sequence, /*logprob=*/true);
}

Sample Sampler::sample(std::span<const float> logits, std::span<const int> recent, std::uint64_t step,
                       std::uint64_t sequence, bool logprob) {
  engine::require(!logits.empty(), "sampler: found no logits, expected one per token of the vocabulary");
  const std::size_t window = std::min(recent.size(), static_cast<std::size_t>(options_.repetition_window));
  recent = recent.last(window);
  for (std::size_t i = 0; i < recent.size(); ++i) {
    engine::require(recent[i] >= 0 && static_cast<std::size_t>(recent[i]) < logits.size(),
                    "sampler: recent token {} is {}, expected 0..{}", i, recent[i], logits.size() - 1);
  }
  const float largest = largest_of(logits, step);

  std::size_t vocab = logits.size();
  if (options_.vocab_limit > 0) vocab = std::min(vocab, static_cast<std::size_t>(options_.vocab_limit));
  candidates_.clear();
  candidates_.reserve(vocab);
  for (std::size_t i = 0; i < vocab; ++i) {
    if (!std::isinf(logits[i])) candidates_.push_back({logits[i], static_cast<int>(i)});
  }
  if (candidates_.empty()) {
    throw NumericError(fmt::format("step {}: all {} logits that may be drawn are -inf", step, vocab));
  }
  penalise(recent);

  const int token = options_.temperature == 0.0F ? std::ranges::min_element(candidates_, kBefore)->token
                                                 : draw(kernels::philox_uniform(options_.seed, sequence, step));
  return {token, logprob ? logprob_of(logits, largest, token) : 0.0F};
}

/// Once per distinct token, however often it occurred. Requires: candidates_ in order of ids.
void Sampler::penalise(std::span<const int> recent) {
  if (options_.repetition_penalty == 1.0F || recent.empty()) return;
  recent_.assign(recent.begin(), recent.end());
  std::ranges::sort(recent_);
  recent_.erase(std::unique(recent_.begin(), recent_.end()), recent_.end());
  auto candidate = candidates_.begin();
  for (const int token : recent_) {
    candidate = std::ranges::lower_bound(candidate, candidates_.end(), token, {}, &Candidate::token);
    if (candidate == candidates_.end()) return;
    if (candidate->token != token) continue;
    const float penalised = candidate->logit > 0.0F ? candidate->logit / options_.repetition_penalty
                                                    : candidate->logit * options_.repetition_penalty;
    // An extreme penalty overflows: the logit stays finite, so the token stays comparable.
    candidate->logit = std::clamp(penalised, std::numeric_limits<float>::lowest(), std::numeric_limits<float>::max());
  }
}

/// Filters candidates_ and draws one of them.
int Sampler::draw(double uniform) {
  const auto largest = static_cast<double>(std::ranges::max_element(candidates_, {}, &Candidate::logit)->logit);
  const auto temperature = static_cast<double>(options_.temperature);
  // Relative to the most probable token, whose weight is exactly 1 at any temperature.
  const auto weight = [&](const Candidate& c) {
    return std::exp((static_cast<double>(c.logit) - largest) / temperature);
  };

  const auto top_k = static_cast<std::size_t>(options_.top_k);
  if (top_k > 0 && top_k < candidates_.size()) {
    const auto end = candidates_.begin() + static_cast<std::ptrdiff_t>(top_k);
    if (top_k < candidates_.size() / 32) {  // a heap of the best k so far: mostly one comparison for each candidate
      std::partial_sort(candidates_.begin(), end, candidates_.end(), kBefore);
    } else {
      std::nth_element(candidates_.begin(), end - 1, candidates_.end(), kBefore);
    }
    candidates_.resize(top_k);
    std::ranges::sort(candidates_, {}, &Candidate::token);
  }

  if (options_.top_p < 1.0F) {
    double total = 0.0;
    for (const Candidate& c : candidates_) total += weight(c);
    const double wanted = static_cast<double>(options_.top_p) * total;
    // The set is usually small: order ever larger heads of the candidates instead of all of them.
    std::size_t kept = 0;
    std::size_t ordered = 0;
    double sum = 0.0;
    while (kept < candidates_.size() && (kept == 0 || sum < wanted)) {
      if (kept == ordered) {
        ordered = std::min(candidates_.size(), std::max<std::size_t>(64, 4 * ordered));
        const auto begin = candidates_.begin() + static_cast<std::ptrdiff_t>(kept);
        std::partial_sort(begin, candidates_.begin() + static_cast<std::ptrdiff_t>(ordered), candidates_.end(),
                          kBefore);
      }
      sum += weight(candidates_[kept++]);
    }
    candidates_.resize(kept);
    std::ranges::sort(candidates_, {}, &Candidate::token);
  }

  if (options_.min_p > 0.0F) {
    const auto least = static_cast<double>(options_.min_p);  // × 1, the largest weight
    std::erase_if(candidates_, [&](const Candidate& c) { return weight(c) < least; });
  }

  double total = 0.0;
  for (const Candidate& c : candidates_) total += weight(c);
  const double target = uniform * total;
  double sum = 0.0;
  int token = -1;
  for (const Candidate& c : candidates_) {
    const double w = weight(c);
    if (w == 0.0) continue;  // rounded away by a low temperature: never drawn
    token = c.token;
    sum += w;
    if (sum > target) break;
  }
  return token;
}

}  // namespace mmrec
