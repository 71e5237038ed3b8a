// A file of prompts through mmrec-generate, as its users run it: a process of its own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "apps/bench/serve.h"

namespace mmrec::apps {

/// What to run, and where.
struct OfflinePlan {
  std::int64_t prompts = 0;          // 0: nothing is run
  std::filesystem::path scratch;     // a folder for the two files below
  std::vector<std::string> options;  // of mmrec-generate, beside the model and the file of prompts
};

inline constexpr const char* kPromptsFile = "prompts.jsonl";
inline constexpr const char* kRecordsFile = "records.jsonl";
inline constexpr const char* kTokenizerFile = "tokenizer.model";

struct OfflineRun {
  std::int64_t mean_prompt = 0;  // tokens
  std::int64_t drawn = 0;        // tokens of all prompts; an end of sequence ends one early
  double seconds = 0.0;          // from the program's start to its end
  double load_seconds = 0.0;     // the same with one prompt that draws one token
};

/// Runs the mmrec-generate that lies beside this program on the model of `folder`: twice with one prompt, then with
/// all of `requests`, which draw `tokens` tokens each. Throws Interrupted, when the program has ended;
/// std::runtime_error with its last words if it fails; std::system_error if it cannot be started; WriteError.
OfflineRun run_offline(const std::filesystem::path& folder, const OfflinePlan& plan,
                       const std::vector<ServedRequest>& requests, std::int64_t tokens);

/// Writes a made-up tokenizer of `vocab` pieces, without an end of sequence, into a folder that has none. Throws
/// WriteError.
void give_tokenizer(const std::filesystem::path& folder, std::int64_t vocab);

}  // namespace mmrec::apps
