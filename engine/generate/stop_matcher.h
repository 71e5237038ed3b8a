// Stop strings in a stream of text: finds the first to be complete, whatever way the text is cut, and holds back what
// may yet become part of one.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace mmrec::engine {

class StopMatcher {
 public:
  /// Throws std::invalid_argument for a stop string that is empty or not UTF-8.
  explicit StopMatcher(const std::vector<std::string>& stops);

  /// Takes the next text and returns what is now known to be before any stop string. Of several that end at one place
  /// the longest counts. Requires: !stopped().
  std::string push(std::string_view text);
  /// True once a stop string was complete; it and what follows are gone.
  bool stopped() const { return stopped_; }
  /// The end of the text: what was held back. Empty if stopped.
  std::string finish();

 private:
  struct Pattern {
    std::string text;
    std::vector<std::size_t> failure;  // [text size]: longest proper border of each prefix (Knuth, Morris and Pratt)
    std::size_t matched = 0;           // the longest prefix of `text` that the stream ends with
  };
  std::vector<Pattern> patterns_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace mmrec::engine
