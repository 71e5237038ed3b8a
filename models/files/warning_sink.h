// Where what is worth knowing goes that is not an error.
#pragma once

#include <functional>
#include <string_view>

namespace mmrec::models {

/// Receives one line for each such thing (an unknown key, say). May be empty.
using WarningSink = std::function<void(std::string_view)>;

}  // namespace mmrec::models
