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

/// `message` contains `part`.
inline void expect_part(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << "\"" << message << "\" does not say \"" << part << "\"";
}

}  // namespace mmrec::test
