// Cutting text into the pieces that a tokenizer's pattern matches. Patterns are written for the regular expressions of
// Rust; PCRE2 reads them the same with the adaptations named in split_pattern.cpp.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace mmrec::engine {

/// Immutable; thread-safe; copies share it.
class SplitPattern {
 public:
  /// Throws std::runtime_error beginning with `name` if `pattern` is no regular expression or too large a one.
  SplitPattern(std::string_view pattern, const std::string& name);

  /// Calls `piece` with each piece of `text`, which is valid UTF-8, in order, from byte `at` on, where a piece begins.
  /// Ends with the first piece that reaches byte `end`, or with the text, and returns the end of the last piece. What
  /// lies between two matches is a piece too: all pieces joined are the text. Empty matches are none. Throws
  /// std::runtime_error where a match takes more steps, depth or memory than is allowed.
  std::size_t split(std::string_view text, std::size_t at, std::size_t end,
                    const std::function<void(std::string_view)>& piece) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

/// `pattern` with \s and \S, in and outside of classes, as the ranges of Unicode's White_Space: PCRE2's \s has U+180E
/// more.
std::string with_unicode_white_space(std::string_view pattern);

}  // namespace mmrec::engine
