// Many prompts, a line each: they are continued together and printed as lines of JSON, in their order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/input.h"
#include "apps/output.h"
#include "mmrec/generator.h"

namespace mmrec::apps {

/// How lines are continued, and what is printed of them.
struct LineOptions {
  GenerateOptions generate;  // of each; line n draws with the random numbers of sequence n - 1
  std::string name;          // of the file, for messages
  std::function<std::vector<int>(std::string_view text)> encode;  // a prompt's ids
  std::shared_ptr<const Session> start = {};                      // what each goes on from, if not from nothing
  bool with_tokens = false;
  bool with_prompt = false;
};

struct LinesDone {
  std::int64_t prompts = 0;
  std::int64_t tokens = 0;  // drawn
  std::int64_t failed = 0;
  std::string first_failure = {};  // names the line
};

/// Prompts are read while there is room for them, so that memory does not grow with their number. An interrupt ends
/// the reading and all that runs. Throws what reading, generating and writing throw.
LinesDone generate_lines(Generator& generator, LineReader& lines, const LineOptions& options, Output& out);

}  // namespace mmrec::apps
