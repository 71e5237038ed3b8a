// Checks of the caller's arguments, and of files.
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

/// The same of what a file or a saved state says: throws std::runtime_error.
template <class... Args>
void expect(bool holds, fmt::format_string<Args...> text, Args&&... args) {
  if (!holds) throw std::runtime_error(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace mmrec::engine
