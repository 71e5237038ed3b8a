// Many continuations at once, each a record: a line of JSON. They are drawn together and printed in the order in which
// they were asked for, or as they are completed.
//
// Must stay true: memory does not grow with the number of records; every record that is printed is whole.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "apps/input.h"
#include "apps/output.h"
#include "mmrec/generator.h"
#include "mmrec/model.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// What a record tells of a text besides the text.
struct RecordDetail {
  bool prompt = false;
  bool tokens = false;  // ids and log-probs, those of the prompt too
};

struct RecordsDone {
  std::int64_t records = 0;  // written
  std::int64_t tokens = 0;   // drawn
  std::int64_t refused = 0;  // were no requests
  std::int64_t failed = 0;   // went wrong while they ran
  std::string first_refused = {};
  std::string first_failed = {};
};

/// The likeliest tokens of each draw: for each an array of {"token", "piece", "logprob"}.
nlohmann::ordered_json top_logprobs_json(const GenerateResult& result, const Tokenizer& tokenizer);
/// Log-probs with no more digits than they have.
nlohmann::ordered_json logprobs_json(const GenerateResult& result);

class RecordQueue {
 public:
  RecordQueue(Generator& generator, Tokenizer tokenizer, Output& out, bool as_completed = false);

  /// How many may be asked for: results wait for those before them, and as many requests wait to begin.
  std::int64_t room() const { return most_ - (asked_ - done_.records); }
  bool has_room() const { return room() > 0; }
  /// `head` begins the record, its "id" being the text of a JSON value; `name` stands for the request in messages. An
  /// interrupt ends it. Throws what Generator::submit throws; then there is no record.
  void submit(nlohmann::ordered_json head, GeneratorRequest request, RecordDetail detail, std::string name);
  /// A record that says why there was no request.
  void refuse(nlohmann::ordered_json head, std::string_view error, std::string_view name);
  /// A round of the generator, after which what can be written is written. Returns whether anything is left to do.
  bool run_once();
  const RecordsDone& done() const { return done_; }

 private:
  void finish(std::int64_t number, nlohmann::ordered_json record);
  void write();

  Generator& generator_;
  Tokenizer tokenizer_;
  Output& out_;
  bool as_completed_;
  std::int64_t most_;
  std::int64_t asked_ = 0;
  std::map<std::int64_t, std::string> finished_;  // and not written
  RecordsDone done_;
};

/// What asks for the records of a line; none where it has none.
using Submission = std::function<void()>;

/// Runs the queue until all lines are done. Lines are read while there is room for them, and what runs does not wait
/// for one that is slow to come. `prepare`, which tokenizes, is called by up to `threads` threads at once (0: all the
/// processors this process may use); what it returns, or throws, is called, or thrown, in the order of lines.
void run_lines(RecordQueue& queue, LineReader& lines, int threads,
               const std::function<Submission(std::string_view line, std::int64_t number)>& prepare);

/// Branches a sequence: `request` becomes `count` requests that go on from one prefill of its prompt, each with a seed
/// of its own, that of sample i being i above the request's. An interrupt ends the prefill, and what follows it.
std::vector<GeneratorRequest> samples_of(GeneratorRequest request, int count, const Model& model,
                                         const SessionOptions& options);

}  // namespace mmrec::apps
