// What a call says when it refuses its arguments.
#pragma once

#include "tests/support/prelude.h"

namespace mmrec::test {

/// The text of the Error that `action` throws; "no error" if it throws nothing. Another exception passes.
template <class Error = std::invalid_argument, class Action>
std::string refusal(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

/// The same of a file or of bytes that are refused.
template <class Action>
std::string file_refusal(const Action& action) {
  return refusal<std::runtime_error>(action);
}

/// The same, of one line; a test failure if nothing is thrown.
template <class Error = std::runtime_error, class Action>
std::string error_of(const Action& action) {
  std::string message = refusal<Error>(action);
  EXPECT_NE(message, "no error");
  EXPECT_EQ(message.find('\n'), std::string::npos) << "an error is one line: " << message;
  return message;
}

/// `message` contains every one of `parts`.
inline void expect_says(const std::string& message, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "\"" << message << "\" does not say \"" << part << "\"";
  }
}

}  // namespace mmrec::test
