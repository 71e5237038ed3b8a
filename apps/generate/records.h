// Many continuations at once, each a record: a line of JSON. They are drawn together and printed in the order in which
// they were asked for, or as they are completed.
//
// Must stay true: memory does not grow with the number of records, of a line's samples among them; every record that is
// printed is whole.
//
// And the report of one text: its cost, and all of it as JSON.
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "apps/common/output.h"
#include "mmrec/generate.h"
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
  std::int64_t refused = 0;  // were no requests, or memory ran out for them
  std::int64_t failed = 0;   // went wrong while they ran
  std::string first_refused = {};
  std::string first_failed = {};
  std::exception_ptr starved = {};  // of the first call of the device that found no memory
};

/// The error of a record for which there was no memory.
inline constexpr std::string_view kNoMemory = "out of memory";

/// How a record begins. The records of a line's samples share it.
struct RecordHead {
  /// `id`: what says whose the record is, its "id" being the text of a JSON value; `more`: the rest.
  explicit RecordHead(nlohmann::ordered_json id, const nlohmann::ordered_json& more = {});
  nlohmann::ordered_json id;
  std::string text;  // an object without its end
};

class RecordQueue {
 public:
  RecordQueue(Generator& generator, Tokenizer tokenizer, Output& out, bool as_completed = false);

  /// How many may be asked for: results wait for those before them, and as many requests wait to begin. None while
  /// these take more than kMostBytes.
  std::int64_t room() const { return bytes_ < kMostBytes ? most_ - (asked_ - done_.records) : 0; }
  bool has_room() const { return room() > 0; }
  /// The record is `head`, `more` and the result; `name` stands for the request in messages. `bytes`: what the request
  /// and its head take. An interrupt ends it. Throws what Generator::submit throws; then there is no record.
  void submit(std::shared_ptr<const RecordHead> head, nlohmann::ordered_json more, GeneratorRequest request,
              RecordDetail detail, std::string name, std::size_t bytes);
  /// A record that says why there was no request, or no result. `id` says whose it is.
  void refuse(nlohmann::ordered_json id, std::string_view error, std::string_view name);
  /// A round of the generator, after which what can be written is written. Returns whether anything is left to do.
  bool run_once();
  const RecordsDone& done() const { return done_; }

 private:
  struct Asked;
  static constexpr std::size_t kMostBytes = std::size_t{64} << 20;

  std::string record_of(const Asked& asked, const GenerateResult& result) const;
  std::string refusal(nlohmann::ordered_json id, std::string_view error, std::string_view name);
  void finish(std::int64_t number, std::string record);
  void write();

  Generator& generator_;
  Tokenizer tokenizer_;
  Output& out_;
  bool as_completed_;
  std::int64_t most_;
  std::int64_t asked_ = 0;
  std::size_t bytes_ = 0;                         // that requests and finished records take
  std::map<std::int64_t, std::string> finished_;  // and not written
  RecordsDone done_;
};

/// The samples of a request, made one by one: all go on from one prefill of its prompt, each with a seed of its own,
/// that of sample i being i above the request's. An interrupt ends the prefill, and what follows it.
class Samples {
 public:
  /// `model` must live on.
  Samples(GeneratorRequest request, int count, const Model& model, SessionOptions options)
      : request_(std::move(request)), count_(count), model_(&model), options_(options) {}

  bool are_several() const { return count_ > 1; }
  bool has_next() const { return next_ < count_; }
  int index() const { return next_; }  // of the next
  /// What the first takes beside its session; the others share most of it.
  std::size_t bytes() const;
  GeneratorRequest next();

 private:
  GeneratorRequest request_;
  int count_;
  const Model* model_;
  SessionOptions options_;
  int next_ = 0;
};

/// Asks for the next record of a line. Returns whether the line has more. Null for a line without records.
using Submission = std::function<bool()>;

/// Asks for a record of each sample. `has_seed`: the seed is told of a single one, too. A request that the generator
/// refuses, or for which memory runs out, has one record that says why.
Submission submission(RecordQueue& queue, RecordHead head, Samples samples, RecordDetail detail, bool has_seed,
                      std::string name);

struct Timings {
  std::string place;
  double load_seconds = 0.0;
  std::int64_t cached_tokens = 0;  // of the prompt, whose state a prefix cache had
  std::int64_t prefill_tokens = 0;
  double prefill_seconds = 0.0;
  PrefillStats prefill;
  std::int64_t decode_tokens = 0;
  std::uint64_t decode_bytes = 0;  // weights read while drawing: once for each token consumed
  double decode_seconds = 0.0;

  static double rate(double count, double seconds) { return seconds > 0.0 ? count / seconds : 0.0; }
  double prefill_rate() const { return rate(static_cast<double>(prefill_tokens), prefill_seconds); }
  double decode_rate() const { return rate(static_cast<double>(decode_tokens), decode_seconds); }
  double gigabytes_per_second() const { return rate(static_cast<double>(decode_bytes) * 1e-9, decode_seconds); }

  nlohmann::ordered_json json() const;
  /// What prefill and decoding cost, each behind " | ".
  std::string rates() const;
  /// One line. It leaves out prompt, sweeps or draws if there were none.
  std::string line(const SamplerOptions& sampler, std::string_view ending) const;
  /// The same of one turn among many: without what is that of the program.
  std::string turn_line(const SamplerOptions& sampler, std::string_view ending) const;
};

/// How tokens were drawn: the chain, and the seed where one was used.
std::string sampling_text(const SamplerOptions& sampler);

/// The object of --json, schema "mmrec-generate/1"; `with_tops`: and the likeliest tokens of each draw, for each an
/// array of {"token", "piece", "logprob"}.
nlohmann::ordered_json result_json(const GenerateResult& result, const SamplerOptions& sampler,
                                   std::span<const int> prompt, const ModelInfo& info,
                                   const std::filesystem::path& folder, const Tokenizer& tokenizer,
                                   const Timings& timings, bool with_tops);

}  // namespace mmrec::apps
