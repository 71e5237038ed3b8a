#include "engine/generate/likeliest.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace mmrec::engine {

void append_likeliest(std::span<const float> logits, std::size_t limit, std::size_t count, std::vector<Sample>& to) {
  std::vector<int> ids(std::min(limit, logits.size()));
  std::iota(ids.begin(), ids.end(), 0);
  count = std::min(count, ids.size());
  const auto logit = [&](int id) { return logits[static_cast<std::size_t>(id)]; };
  std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(count), ids.end(),
                    [&](int a, int b) { return logit(a) > logit(b) || (logit(a) == logit(b) && a < b); });
  const auto largest = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - largest);
  const double rest = std::log(sum);
  for (const int id : std::span(ids).first(count)) {
    // Not minus their sum, which would round the rest away where logits are huge.
    to.push_back({id, static_cast<float>(static_cast<double>(logit(id)) - largest - rest)});
  }
}

}  // namespace mmrec::engine
