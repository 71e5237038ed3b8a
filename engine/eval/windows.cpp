// Windows of a document, each from its number.
#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "mmrec/evaluation.h"

namespace mmrec {

WindowMode window_mode(std::string_view name) {
  const auto found = std::find(kWindowModeNames.begin(), kWindowModeNames.end(), name);
  if (found == kWindowModeNames.end()) {
    throw std::invalid_argument(fmt::format("mode: found {}, expected {}", name, fmt::join(kWindowModeNames, ", ")));
  }
  return static_cast<WindowMode>(found - kWindowModeNames.begin());
}

Windows::Windows(const WindowOptions& options, std::size_t tokens) : options_(options), tokens_(tokens) {
  const auto refuse = [](std::string_view what, auto found, const std::string& expected) {
    throw std::invalid_argument(fmt::format("{}: found {}, expected {}", what, found, expected));
  };
  const std::int64_t least = WindowOptions::least_window(options.mode);
  if (options.window < least) refuse("window", options.window, fmt::format("at least {}", least));
  const bool is_strided = options.mode == WindowMode::kStrided;
  if (is_strided && (options.stride < 1 || options.stride > options.window)) {
    refuse("stride", options.stride, fmt::format("1..{}", options.window));
  }
  if (options.mode == WindowMode::kFull || tokens < 2) return;
  if (tokens < options.least_tokens()) refuse("tokens", tokens, fmt::format("at least {}", options.least_tokens()));
  const auto window = static_cast<std::size_t>(options.window);
  const auto parts = [](std::size_t all, std::size_t part) { return all / part + (all % part != 0 ? 1 : 0); };
  if (options.mode == WindowMode::kRolling) {
    size_ = parts(tokens - 1, window);
  } else if (is_strided) {
    size_ = 1 + parts(tokens - std::min(tokens, window), static_cast<std::size_t>(options.stride));
  } else {
    size_ = tokens / window;
  }
}

Window Windows::operator[](std::size_t i) const {
  if (options_.mode == WindowMode::kFull || tokens_ < 2) return {0, tokens_, std::max<std::size_t>(tokens_, 1) - 1};
  const auto size = static_cast<std::size_t>(options_.window);
  if (options_.mode == WindowMode::kRolling) {
    const std::size_t scored = std::min(size, tokens_ - 1 - i * size);
    const std::size_t end = 1 + i * size + scored;
    return {end - std::min(end, size + 1), end, scored};
  }
  if (options_.mode == WindowMode::kStrided) {
    const auto stride = static_cast<std::size_t>(options_.stride);
    const std::size_t begin = i * stride;
    const std::size_t end = std::min(begin + size, tokens_);
    const std::size_t before = i == 0 ? 0 : begin - stride + size;
    return {begin, end, std::min(end - before, end - begin - 1)};
  }
  return {i * size, i * size + size, size - 1 - size / 2};
}

std::vector<int> Windows::ids(std::size_t i, std::span<const int> ids) const {
  const Window window = (*this)[i];
  const auto part = ids.subspan(window.begin, window.end - window.begin);
  std::vector<int> given(part.begin(), part.end());
  if (options_.repeats_first && !given.empty()) given.front() = ids.front();
  return given;
}

}  // namespace mmrec
