// What harnesses share. A broken promise ends the process, which the fuzzer and the tests see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace mmrec::fuzz {

using Harness = void (*)(std::string_view input);

/// The harnesses of this program, by their subjects.
inline std::map<std::string, Harness>& harnesses() {
  static std::map<std::string, Harness> all;
  return all;
}

/// MMREC_FUZZ(subject) { ... } defines and registers the harness of a subject; its body sees the bytes `input`.
/// CMake finds the subjects by this macro at the beginning of a line.
#define MMREC_FUZZ(subject)                                              \
  static void fuzz_##subject(std::string_view input);                    \
  [[maybe_unused]] static const bool fuzz_##subject##_is_there =         \
      mmrec::fuzz::harnesses().emplace(#subject, fuzz_##subject).second; \
  static void fuzz_##subject(std::string_view input)

inline void require(bool holds) {
  if (!holds) std::abort();
}

/// A message of ours is one line.
inline void require_line(std::string_view message) {
  require(!message.empty() && message.find('\n') == std::string_view::npos);
}

/// Whether `read` takes the input. It may refuse it by one line.
template <class Error = std::runtime_error, class Read>
bool takes(const Read& read) {
  try {
    read();
    return true;
  } catch (const Error& error) {
    require_line(error.what());
    return false;
  }
}

/// What `read` returns, or nothing if it refuses the input by one line.
template <class Error = std::runtime_error, class Read>
auto accepted(const Read& read) {
  std::optional<decltype(read())> result;
  takes<Error>([&] { result = read(); });
  return result;
}

/// Takes the first byte of the input, which chooses what the rest is.
inline std::uint8_t take_byte(std::string_view& input) {
  const auto byte = static_cast<std::uint8_t>(input.front());
  input.remove_prefix(1);
  return byte;
}

/// The input cut at zero bytes into `count` parts: the last one has the rest, missing ones are empty.
inline std::vector<std::string_view> parts_of(std::string_view input, std::size_t count) {
  std::vector<std::string_view> parts(count);
  for (std::size_t i = 0; i + 1 < count; ++i) {
    const std::size_t end = input.find('\0');
    parts[i] = input.substr(0, end);
    if (end == std::string_view::npos) return parts;
    input.remove_prefix(end + 1);
  }
  parts.back() = input;
  return parts;
}

}  // namespace mmrec::fuzz
