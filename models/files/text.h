// Names, extents and foreign text as one-line messages show them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace mmrec::models {

/// `text` in double quotes: control characters and bytes that are not UTF-8 escaped, long text cut.
std::string quote(std::string_view text);

/// A name as it is where letters, digits and . _ - make it up, quoted otherwise.
std::string printable(std::string_view name);

/// "[2, 3]".
std::string list(std::span<const std::int64_t> numbers);

}  // namespace mmrec::models
