// Text for messages.
#include "models/files/text.h"

#include <fmt/format.h>

#include <algorithm>

namespace mmrec::models {
namespace {

bool is_plain_char(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '.' || c == '-';
}

}  // namespace

std::string quote(std::string_view text) {
  constexpr std::size_t kLimit = 96;
  return fmt::format("{:?}{}", text.substr(0, kLimit), text.size() > kLimit ? "..." : "");
}

std::string printable(std::string_view name) {
  const bool is_plain = !name.empty() && name.size() <= 128 && std::all_of(name.begin(), name.end(), is_plain_char);
  return is_plain ? std::string(name) : quote(name);
}

std::string list(std::span<const std::int64_t> numbers) { return fmt::format("[{}]", fmt::join(numbers, ", ")); }

}  // namespace mmrec::models
