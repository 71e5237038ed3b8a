#include "apps/ppl/windows.h"

#include <fmt/format.h>

#include <algorithm>

#include "apps/common/cli.h"

namespace mmrec::apps {

Windows::Windows(const WindowOptions& options, std::size_t tokens, const std::string& name)
    : options_(options), tokens_(tokens) {
  if (options.mode == Mode::kLlama && tokens > 1 && tokens < 2 * static_cast<std::size_t>(options.window)) {
    throw RejectedFile(fmt::format(
        "{}: too short for --mode llama --window {} (found {} tokens, expected at least {}). Try: a smaller "
        "--window, or --mode full",
        name, options.window, tokens, 2 * options.window));
  }
  while (const auto window = cut()) {
    ++count_;
    evaluated_ += static_cast<std::int64_t>(std::max<std::size_t>(window->end - window->begin, 1)) - 1;
  }
  begin_ = 0;
  is_over_ = false;
}

std::optional<Window> Windows::next() { return cut(); }

std::optional<Window> Windows::cut() {
  if (is_over_) return std::nullopt;
  const auto size = static_cast<std::size_t>(options_.window);
  if (options_.mode == Mode::kFull || tokens_ < 2) {
    is_over_ = true;
    return Window{0, tokens_, std::max<std::size_t>(tokens_, 1) - 1};
  }
  if (options_.mode == Mode::kRolling) {
    const std::size_t scored = std::min(size, tokens_ - 1 - begin_);
    const std::size_t end = 1 + begin_ + scored;
    begin_ += scored;
    is_over_ = end == tokens_;
    return Window{end - std::min(end, size + 1), end, scored};
  }
  if (options_.mode == Mode::kStrided) {
    const std::size_t end = std::min(begin_ + size, tokens_);
    const std::size_t before = begin_ == 0 ? 0 : begin_ - static_cast<std::size_t>(options_.stride) + size;
    const Window window{begin_, end, std::min(end - before, end - begin_ - 1)};
    begin_ += static_cast<std::size_t>(options_.stride);
    is_over_ = end == tokens_;
    return window;
  }
  const Window window{begin_, begin_ + size, size - 1 - size / 2};
  begin_ += size;
  is_over_ = begin_ + size > tokens_;
  return window;
}

std::vector<int> ids_of(const Window& window, std::span<const int> ids, const WindowOptions& options) {
  const auto part = ids.subspan(window.begin, window.end - window.begin);
  std::vector<int> given(part.begin(), part.end());
  if (options.repeats_first && !given.empty()) given.front() = ids.front();
  return given;
}

}  // namespace mmrec::apps
