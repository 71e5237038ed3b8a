// Stop strings in a stream of text: finds the first to be complete, whatever way the text is cut, and holds back what
// may yet become part of one.
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
  explicit StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
    for (std::size_t i = 0; i < stops_.size(); ++i) {
      require(!stops_[i].empty(), "stop string {} is empty, expected text", i);
      require(models::is_valid_utf8(stops_[i]), "stop string {} is not valid UTF-8", i);
    }
  }

  /// Whether there is no stop string: no text is ever held back.
  bool is_empty() const { return stops_.empty(); }
  /// Takes the next text and returns what is now known to be before any stop string. Of several that end at one place
  /// the longest counts. Requires: !stopped().
  std::string push(std::string_view text) {
    held_ += text;
    std::size_t begin = 0, end = std::string::npos;  // of the stop string that is complete first
    std::size_t hold = 0;                            // bytes at the end that a stop string begins with
    for (const std::string& stop : stops_) {
      if (const std::size_t at = held_.find(stop); at != std::string::npos) {
        const std::size_t stop_end = at + stop.size();
        if (stop_end < end || (stop_end == end && at < begin)) begin = at, end = stop_end;
      }
      for (std::size_t n = std::min(stop.size() - 1, held_.size()); n > hold; --n) {
        if (held_.ends_with(std::string_view(stop).substr(0, n))) hold = n;
      }
    }
    stopped_ = end != std::string::npos;
    std::string ready = held_.substr(0, stopped_ ? begin : held_.size() - hold);
    held_.erase(0, stopped_ ? std::string::npos : ready.size());
    return ready;
  }
  /// True once a stop string was complete; it and what follows are gone.
  bool stopped() const { return stopped_; }
  /// The end of the text: what was held back. Empty if stopped.
  std::string finish() { return std::exchange(held_, {}); }

 private:
  std::vector<std::string> stops_;
  std::string held_;  // in which no stop string is complete
  bool stopped_ = false;
};

}  // namespace mmrec::engine
