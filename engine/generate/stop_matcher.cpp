// One Knuth-Morris-Pratt automaton per stop string, fed byte by byte.
#include "engine/generate/stop_matcher.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "engine/require.h"
#include "models/files/utf8.h"

namespace mmrec::engine {

StopMatcher::StopMatcher(const std::vector<std::string>& stops) {
  for (std::size_t i = 0; i < stops.size(); ++i) {
    const std::string& stop = stops[i];
    require(!stop.empty(), "stop string {} is empty, expected text", i);
    require(models::is_valid_utf8(stop), "stop string {} is not valid UTF-8", i);
    std::vector<std::size_t> failure(stop.size(), 0);
    for (std::size_t at = 1, border = 0; at < stop.size(); ++at) {
      while (border > 0 && stop[at] != stop[border]) border = failure[border - 1];
      if (stop[at] == stop[border]) ++border;
      failure[at] = border;
    }
    patterns_.push_back({stop, std::move(failure)});
  }
}

std::string StopMatcher::push(std::string_view text) {
  std::size_t hold = 0;
  for (const char c : text) {
    held_ += c;
    hold = 0;
    std::size_t complete = 0;
    for (Pattern& p : patterns_) {
      while (p.matched > 0 && (p.matched == p.text.size() || p.text[p.matched] != c))
        p.matched = p.failure[p.matched - 1];
      if (p.text[p.matched] == c) ++p.matched;
      hold = std::max(hold, p.matched);
      if (p.matched == p.text.size()) complete = std::max(complete, p.matched);
    }
    if (complete > 0) {
      stopped_ = true;
      held_.resize(held_.size() - complete);
      return std::exchange(held_, {});
    }
  }
  if (text.empty()) return {};
  std::string ready = held_.substr(0, held_.size() - hold);
  held_.erase(0, ready.size());
  return ready;
}

std::string StopMatcher::finish() { return std::exchange(held_, {}); }

}  // namespace mmrec::engine
