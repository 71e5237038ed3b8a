// Many prompts, a line each: texts (--lines), or objects with options of their own (--jsonl).
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/common/input.h"
#include "apps/generate/options.h"
#include "mmrec/generator.h"
#include "mmrec/model.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// What a line asks for.
struct LineRequest {
  GeneratorRequest request;
  int num_samples = 1;
  RecordDetail detail;
};

/// The request of a line, `object`. What it leaves out is the command line's; `seed` is used if the line has none.
/// `start`: what it goes on from, if not from nothing. Throws RejectedFile naming key, found and expected.
///
/// The records of a line together have at most --max-line-tokens: num_samples * (max_tokens * (1 + logprobs) + tokens
/// of the prompt, where records have it). Lines that leave all of this to the command line are not asked.
LineRequest read_request(const nlohmann::ordered_json& object, const GenerateCommand& command,
                         std::shared_ptr<const Session> start, const ModelInfo& info, const Tokenizer& tokenizer,
                         std::uint64_t seed);

/// One record for each line, or for each sample of it. Lines are read, and records asked for, while there is room for
/// them, and what runs does not wait for a line that is slow to come. A line that is too long, or for which memory runs
/// out, has a record that says so. An interrupt ends the reading and all that runs. Throws what reading and writing
/// throw, and if the device fails.
///
/// Text n draws with the random numbers of sequence n - 1. Blank lines are no objects; a line that is no request has a
/// record that says why. Draws of an object are those of mmrec-generate for its prompt, options and seed alone; one
/// without a seed has one that follows from the run's and its number.
void generate_lines(RecordQueue& queue, LineReader& lines, const Model& model, const Tokenizer& tokenizer,
                    const GenerateCommand& command, std::shared_ptr<const Session> start);

}  // namespace mmrec::apps
