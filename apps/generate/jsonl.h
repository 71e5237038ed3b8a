// --jsonl: many prompts, each an object on a line with options of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "apps/common/input.h"
#include "apps/generate/records.h"
#include "apps/generate/sampling.h"
#include "mmrec/generator.h"
#include "mmrec/model.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// What a line may ask for.
struct LineLimits {
  /// Of its records together: num_samples * (max_tokens * (1 + logprobs) + tokens of the prompt, where records have
  /// it). Lines that leave all of this to the command line are not asked.
  std::int64_t tokens = std::int64_t{1} << 22;
  std::size_t extra_bytes = std::size_t{16} << 10;  // of its id; of its stop strings together
};

/// What stands for whatever a line leaves out.
struct JsonlOptions {
  GenerateOptions generate;
  int num_samples = 1;
  RecordDetail detail;
  LineLimits limits = {};
  std::string name;                           // of the file, for messages
  std::shared_ptr<const Session> start = {};  // what each goes on from, if not from nothing
  SessionOptions session = {};
};

/// What a line asks for.
struct LineRequest {
  GeneratorRequest request;
  int num_samples = 1;
  RecordDetail detail;
};

/// Of a line that is `object`; `seed` is its seed where it has none. Throws RejectedFile naming key, found and
/// expected.
LineRequest read_request(const nlohmann::ordered_json& object, const JsonlOptions& options, const ModelInfo& info,
                         const Tokenizer& tokenizer, std::uint64_t seed);

/// One record for each line but blank ones, or for each sample of it: a line that is no request has one that says why.
/// Draws are those of mmrec-generate for the record's prompt, options and seed alone; a line without a seed has one
/// that follows from the run's and its number. Prompts are read while there is room for them. An interrupt ends the
/// reading and all that runs. Throws what reading and writing throw, and where the device fails.
void generate_jsonl(RecordQueue& queue, LineReader& lines, const Model& model, const Tokenizer& tokenizer,
                    const JsonlOptions& options);

}  // namespace mmrec::apps
