// --lines: many prompts, a line each.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/common/input.h"
#include "apps/generate/records.h"

namespace mmrec::apps {

/// How lines are continued, and what is printed of them.
struct LineOptions {
  GenerateOptions generate;  // of each; line n draws with the random numbers of sequence n - 1
  std::string name;          // of the file, for messages
  std::function<std::vector<int>(std::string_view text)> encode;  // a prompt's ids, from several threads at once
  int threads = 0;                                                // that do; 0: as many as there are processors
  std::shared_ptr<const Session> start = {};                      // what each goes on from, if not from nothing
  int num_samples = 1;
  const Model* model = nullptr;  // of samples; must live on
  SessionOptions session = {};   // likewise
  RecordDetail detail;
};

/// Prompts are read while there is room for them, so that memory does not grow with their number. An interrupt ends
/// the reading and all that runs. Throws what reading, generating and writing throw.
void generate_lines(RecordQueue& queue, LineReader& lines, const LineOptions& options);

}  // namespace mmrec::apps
