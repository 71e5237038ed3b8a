// A build without PCRE2: what asks for a pattern is told so.
#include <fmt/format.h>

#include <stdexcept>

#include "engine/tokenizer/split_pattern.h"

namespace mmrec::engine {

struct SplitPattern::Code {};

SplitPattern::SplitPattern(std::string_view /*pattern*/, const std::string& name) {
  throw std::runtime_error(fmt::format(
      "{}: found a \"pattern\", which this build cannot match: it was made without PCRE2 (libpcre2-dev)", name));
}

std::size_t SplitPattern::split(std::string_view text, std::size_t /*at*/, std::size_t /*end*/,
                                const std::function<void(std::string_view)>& /*piece*/) const {
  return text.size();
}

}  // namespace mmrec::engine
