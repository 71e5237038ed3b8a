// What a sampling chain must draw, whoever draws: the chain done in float64 by sorting, and tables of cases.
#pragma once

#include "kernels/philox.h"
#include "mmrec/sampler.h"
#include "tests/support/prelude.h"

namespace mmrec::test {

/// `is_close` says that a cumulative sum lies so near to the number it is compared with that the precision of fp32
/// weights may decide.
struct SampleReference {
  int token = -1;
  bool is_close = false;
};

/// The chain as mmrec/sampler.h words it, but for the repetition penalty. No token: of a fault, or without a candidate.
inline SampleReference reference_sample(const SamplerOptions& options, std::span<const float> logits,
                                        std::uint64_t step, std::uint64_t sequence = 0) {
  constexpr double kClose = 2e-6;  // of the sum of weights
  struct Item {
    int token;
    double logit, weight;
  };
  std::vector<Item> items;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i]) || logits[i] == HUGE_VALF) return {};
    const bool is_allowed = options.vocab_limit == 0 || std::cmp_less(i, options.vocab_limit);
    if (is_allowed && logits[i] != -HUGE_VALF) {
      items.push_back({static_cast<int>(i), static_cast<double>(logits[i]), 0.0});
    }
  }
  if (items.empty()) return {};
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.logit > b.logit; });
  if (options.temperature == 0.0F) return {items.front().token};
  const double largest = items.front().logit;
  for (Item& i : items) i.weight = std::exp((i.logit - largest) / static_cast<double>(options.temperature));
  if (options.top_k > 0 && std::cmp_less(options.top_k, items.size())) {
    items.resize(static_cast<std::size_t>(options.top_k));
  }
  const auto total_of = [&] {
    double total = 0.0;
    for (const Item& i : items) total += i.weight;
    return total;
  };
  SampleReference found;
  if (options.top_p < 1.0F) {
    const double total = total_of();
    const double wanted = static_cast<double>(options.top_p) * total;
    double sum = 0.0;
    std::size_t kept = 0;
    while (kept < items.size() && (kept == 0 || sum < wanted)) {
      sum += items[kept++].weight;
      found.is_close |= std::abs(sum - wanted) < kClose * total;
    }
    items.resize(kept);
  }
  std::erase_if(items, [&](const Item& i) { return i.weight < static_cast<double>(options.min_p); });
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.token < b.token; });
  const double total = total_of();
  const double target = kernels::philox_uniform(options.seed, sequence, step) * total;
  double sum = 0.0;
  for (const Item& i : items) {
    if (i.weight == 0.0) continue;
    sum += i.weight;
    found.is_close |= std::abs(sum - target) < kClose * total;
    if (found.token < 0 && sum > target) found.token = i.token;
  }
  return found;
}

/// Each of the recent tokens is penalised once.
inline void penalise(std::vector<float>& logits, const std::set<int>& recent, float penalty) {
  for (const int id : recent) {
    float& logit = logits[static_cast<std::size_t>(id)];
    logit = logit > 0.0F ? logit / penalty : logit * penalty;
  }
}

/// One of the values, at random.
template <class Random, class... Values>
auto pick(Random& random, Values... values) {
  const std::common_type_t<Values...> list[] = {values...};
  return list[random() % (sizeof...(values))];
}

/// A chain of which nothing but the draw is left.
inline constexpr SamplerOptions kPlainSampler = {.temperature = 1.0F, .top_k = 0, .top_p = 1.0F, .min_p = 0.0F};

struct SampleCase {
  const char* name;
  std::vector<float> logits;
  SamplerOptions options;
  std::set<int> tokens;  // that are drawn, each of them in 24 draws
};
inline std::vector<SampleCase> sample_cases() {
  const auto with = [](auto member, auto value) {
    SamplerOptions options = kPlainSampler;
    options.*member = value;
    return options;
  };
  const auto heated = [&](float temperature) { return with(&SamplerOptions::temperature, temperature); };
  const auto least = [](SamplerOptions options, float min_p) {
    options.min_p = min_p;
    return options;
  };
  constexpr float kCoolest = std::numeric_limits<float>::denorm_min(), kHottest = std::numeric_limits<float>::max();
  const std::vector<float> p = {std::log(0.1F), std::log(0.4F), std::log(0.2F), std::log(0.3F)};
  const std::vector<float> flat(100, 1.5F), steep = {1.0F, 3.0F, 3.0F, -30.0F};
  const SamplerOptions greedy = heated(0.0F);
  return {
      {"all", p, kPlainSampler, {0, 1, 2, 3}},
      {"top-k", p, with(&SamplerOptions::top_k, 2), {1, 3}},
      {"top-p: 0.4 + 0.3", p, with(&SamplerOptions::top_p, 0.65F), {1, 3}},
      {"top-p: and 0.2", p, with(&SamplerOptions::top_p, 0.75F), {1, 2, 3}},
      {"least top-p", p, with(&SamplerOptions::top_p, 1e-30F), {1}},
      {"min-p: 0.24", p, with(&SamplerOptions::min_p, 0.6F), {1, 3}},
      {"largest min-p", p, with(&SamplerOptions::min_p, 1.0F), {1}},
      {"vocabulary", p, with(&SamplerOptions::vocab_limit, 2), {0, 1}},
      {"masked", {-HUGE_VALF, 0.0F, -HUGE_VALF, 0.0F}, kPlainSampler, {1, 3}},
      {"ties at the edge of top-k go to the lowest ids", flat, with(&SamplerOptions::top_k, 3), {0, 1, 2}},
      {"and of top-p", flat, with(&SamplerOptions::top_p, 0.025F), {0, 1, 2}},
      {"cold", steep, heated(1e-30F), {1, 2}},
      {"coldest", steep, heated(kCoolest), {1, 2}},
      {"hot", steep, heated(1e30F), {0, 1, 2, 3}},
      {"hottest", steep, heated(kHottest), {0, 1, 2, 3}},
      {"hot, where all weights round to 1", steep, least(heated(1e30F), 1.0F), {0, 1, 2, 3}},
      {"hottest, where all weights round to 1", steep, least(heated(kHottest), 1.0F), {0, 1, 2, 3}},
      {"hottest, far apart", {3e38F, -3e38F, -HUGE_VALF}, heated(kHottest), {0, 1}},
      {"greedy", {1.0F, 5.0F, 5.0F, -2.0F}, greedy, {1}},
      {"greedy, masked", {-HUGE_VALF, -3.0F, -2.5F}, greedy, {2}},
      {"greedy, one", {7.0F}, greedy, {0}},
      {"greedy, zeros are equal", {-0.0F, 0.0F}, greedy, {0}},
      {"greedy, least number", {-1e-45F, -0.0F, 0.0F}, greedy, {1}},
  };
}

}  // namespace mmrec::test
