// Stop strings in a stream of text: finds the first to be complete, whatever way the text is cut, and holds back what
// may yet become part of one. Each stop string has a Knuth-Morris-Pratt automaton, which is fed byte by byte.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/require.h"
#include "models/files/utf8.h"

namespace mmrec::engine {

class StopMatcher {
 public:
  /// Throws std::invalid_argument for a stop string that is empty or not UTF-8.
  explicit StopMatcher(const std::vector<std::string>& stops) {
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

  /// Whether there is no stop string: no text is ever held back.
  bool is_empty() const { return patterns_.empty(); }
  /// Takes the next text and returns what is now known to be before any stop string. Of several that end at one place
  /// the longest counts. Requires: !stopped().
  std::string push(std::string_view text) {
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
  /// True once a stop string was complete; it and what follows are gone.
  bool stopped() const { return stopped_; }
  /// The end of the text: what was held back. Empty if stopped.
  std::string finish() { return std::exchange(held_, {}); }

 private:
  struct Pattern {
    std::string text;
    std::vector<std::size_t> failure;  // [text size]: longest proper border of each prefix
    std::size_t matched = 0;           // the longest prefix of `text` that the stream ends with
  };
  std::vector<Pattern> patterns_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace mmrec::engine
