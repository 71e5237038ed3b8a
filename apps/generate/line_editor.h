// Lines that a person edits while typing them, with a history.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace mmrec::apps {

/// The next line of stdin without its end, asked for with a prompt on stderr; none at the end of the input, and inside
/// a GracefulScope after an interrupt.
using LineEditor = std::function<std::optional<std::string>(std::string_view prompt)>;

/// Null where stdin is no terminal that can, and in builds without libedit (line_editor_plain.cpp).
LineEditor line_editor();

}  // namespace mmrec::apps
