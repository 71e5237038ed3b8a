// Checks of the caller's arguments.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

namespace mmrec::engine {

/// Throws std::invalid_argument with the formatted text unless `holds`.
template <class... Args>
void require(bool holds, fmt::format_string<Args...> text, Args&&... args) {
  if (!holds) throw std::invalid_argument(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace mmrec::engine
