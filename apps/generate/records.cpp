#include "apps/generate/records.h"

#include <fmt/format.h>

#include <new>
#include <stdexcept>
#include <vector>

#include "apps/common/arguments.h"
#include "apps/common/cli.h"
#include "apps/common/input.h"
#include "apps/common/model_folder.h"
#include "apps/generate/sampling.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

/// Log-probs with no more digits than they have.
Json logprobs_json(const GenerateResult& result) {
  Json logprobs = Json::array();
  for (const float logprob : result.logprobs) logprobs.push_back(shortest(logprob));
  return logprobs;
}

/// The likeliest tokens of draw i.
Json likeliest_json(const GenerateResult& result, std::size_t i, const Tokenizer& tokenizer) {
  Json likeliest = Json::array();
  const std::size_t row = result.top_logprobs.size() / result.tokens.size();
  for (std::size_t k = i * row; k < (i + 1) * row; ++k) {
    const Sample& sample = result.top_logprobs[k];
    likeliest.push_back(
        {{"token", sample.token}, {"piece", tokenizer.piece(sample.token)}, {"logprob", shortest(sample.logprob)}});
  }
  return likeliest;
}

/// The text of an object, whose "id" is the text of a JSON value.
std::string text_of(Json object) {
  std::string id;
  if (object.contains("id")) {
    id = fmt::format("\"id\":{},", object["id"].get<std::string>());
    object.erase("id");
  }
  return dump(object).insert(1, id);
}

/// Appends the fields of `more` to an object that has no end yet.
void append_fields(std::string& object, const Json& more) {
  if (more.empty()) return;
  if (object.size() > 1) object += ',';
  const std::string text = dump(more);
  object.append(text, 1, text.size() - 2);
}

}  // namespace

RecordHead::RecordHead(Json its_id, const Json& more) : id(std::move(its_id)), text(text_of(id)) {
  text.pop_back();
  append_fields(text, more);
}

RecordQueue::RecordQueue(Generator& generator, Tokenizer tokenizer, Output& out, bool as_completed)
    : generator_(generator),
      tokenizer_(std::move(tokenizer)),
      out_(out),
      as_completed_(as_completed),
      most_(4 * static_cast<std::int64_t>(generator.slots())) {}

struct RecordQueue::Asked {
  std::shared_ptr<const RecordHead> head;
  Json more;
  RecordDetail detail;
  bool with_tops = false;
  std::string name;
  std::int64_t number = 0;
  std::size_t bytes = 0;
};

void RecordQueue::submit(std::shared_ptr<const RecordHead> head, Json more, GeneratorRequest request,
                         RecordDetail detail, std::string name, std::size_t bytes) {
  request.options.logprobs = detail.tokens;
  request.options.cancelled = [] { return interrupt_exit_code() != 0; };
  auto asked = std::make_shared<Asked>(Asked{.head = std::move(head),
                                             .more = std::move(more),
                                             .detail = detail,
                                             .with_tops = request.options.top_logprobs > 0,
                                             .name = std::move(name),
                                             .number = asked_,
                                             .bytes = bytes});
  request.on_finish = [this, asked = std::move(asked)](const GenerateResult& result) {
    bytes_ -= asked->bytes;
    std::string record;
    try {
      if (result.error == std::bad_alloc().what()) throw std::bad_alloc();
      record = record_of(*asked, result);
    } catch (const std::bad_alloc&) {
      Json id = asked->head->id;
      id.update(asked->more);
      return finish(asked->number, refusal(std::move(id), kNoMemory, asked->name));
    }
    if (result.finish_reason == FinishReason::kError && done_.failed++ == 0) {
      done_.first_failed = fmt::format("{}: {}", asked->name, result.error);
    }
    done_.tokens += std::ssize(result.tokens);
    finish(asked->number, std::move(record));
  };
  generator_.submit(std::move(request));
  ++asked_;
  bytes_ += bytes;
}

std::string RecordQueue::record_of(const Asked& asked, const GenerateResult& result) const {
  std::string record = asked.head->text;
  append_fields(record, asked.more);
  if (record.size() > 1) record += ',';
  record += "\"text\":";
  append_json_string(record, result.text);
  append_fields(record, {{"finish_reason", to_string(result.finish_reason)}});
  if (asked.detail.tokens) append_fields(record, {{"tokens", result.tokens}, {"logprobs", logprobs_json(result)}});
  if (asked.with_tops) {  // row by row: as one value they would take ten times their text
    record += ",\"top_logprobs\":[";
    for (std::size_t i = 0; i < result.tokens.size(); ++i) {
      if (i > 0) record += ',';
      record += dump(likeliest_json(result, i, tokenizer_));
    }
    record += ']';
  }
  if (result.finish_reason == FinishReason::kError) append_fields(record, {{"error", result.error}});
  return record + "}\n";
}

std::string RecordQueue::refusal(Json id, std::string_view error, std::string_view name) {
  if (done_.refused++ == 0) done_.first_refused = fmt::format("{}: {}", name, error);
  id["error"] = error;
  return text_of(std::move(id)) + "\n";
}

void RecordQueue::refuse(Json id, std::string_view error, std::string_view name) {
  finish(asked_++, refusal(std::move(id), error, name));
}

void RecordQueue::finish(std::int64_t number, std::string record) {
  bytes_ += record.size();
  finished_.emplace(number, std::move(record));
}

bool RecordQueue::run_once() {
  const std::int64_t failed = done_.failed + done_.refused;
  bool has_work = true;
  try {
    has_work = generator_.run_once();
  } catch (const std::bad_alloc&) {  // the requests in the call that failed have records that say so
    if (done_.failed + done_.refused == failed) throw;
    if (!done_.starved) done_.starved = std::current_exception();
    has_work = generator_.running() + generator_.waiting() > 0;
  }
  write();
  return has_work;
}

void RecordQueue::write() {
  bool has_written = false;
  for (auto first = finished_.begin(); first != finished_.end(); first = finished_.erase(first)) {
    if (!as_completed_ && first->first != done_.records) break;
    out_.write(first->second);
    bytes_ -= first->second.size();
    ++done_.records;
    has_written = true;
  }
  if (has_written) out_.flush();
}

std::size_t Samples::bytes() const {
  std::size_t bytes = request_.prompt.size() * sizeof(int);
  // The matcher of a stop string takes several times its text.
  for (const std::string& stop : request_.options.stop) bytes += 128 + 6 * stop.size();
  return bytes;
}

GeneratorRequest Samples::next() {
  const auto index = static_cast<std::uint64_t>(next_++);
  if (count_ == 1) return std::move(request_);
  if (!request_.prompt.empty()) {
    const auto session =
        std::make_shared<Session>(request_.start ? request_.start->clone() : model_->new_session(1, options_));
    session->prefill(request_.prompt, {.on_progress = [](auto, auto) { return interrupt_exit_code() == 0; }});
    request_.prompt = {};
    request_.start = session;
  }
  GeneratorRequest sample = request_;
  sample.options.sampler.seed += index;
  return sample;
}

Submission submission(RecordQueue& queue, RecordHead head, Samples samples, RecordDetail detail, bool has_seed,
                      std::string name) {
  return [&queue, head = std::make_shared<const RecordHead>(std::move(head)), samples = std::move(samples), detail,
          has_seed, name = std::move(name)]() mutable {
    try {
      const std::size_t bytes = samples.bytes() + (samples.index() == 0 ? head->text.size() : 0);
      Json more = Json::object();
      if (samples.are_several()) more["sample"] = samples.index();
      GeneratorRequest request = samples.next();
      if (has_seed || samples.are_several()) more["seed"] = request.options.sampler.seed;
      queue.submit(head, std::move(more), std::move(request), detail, name, bytes);
      return samples.has_next();
    } catch (const std::invalid_argument& error) {
      queue.refuse(head->id, error.what(), name);
    } catch (const std::bad_alloc&) {
      queue.refuse(head->id, kNoMemory, name);
    }
    return false;
  };
}

Json Timings::json() const {
  return {{"load_s", load_seconds},
          {"cached_tokens", cached_tokens},
          {"prefill_tokens", prefill_tokens},
          {"prefill_s", prefill_seconds},
          {"prefill_tokens_per_s", prefill_rate()},
          {"sweeps_per_token", prefill.sweeps_per_token()},
          {"sweep_fallbacks", prefill.fallbacks},
          {"decode_tokens", decode_tokens},
          {"decode_s", decode_seconds},
          {"decode_tokens_per_s", decode_rate()},
          {"decode_gb_per_s", gigabytes_per_second()},
          {"peak_memory_bytes", peak_memory_bytes()}};
}

std::string sampling_text(const SamplerOptions& sampler) {
  const std::string chain = chain_text(sampler);
  return sampler.temperature == 0.0F ? chain : fmt::format("{}, seed {}", chain, sampler.seed);
}

std::string Timings::rates() const {
  std::string line;
  if (cached_tokens > 0) line += fmt::format(" | {} tokens from the prefix cache", cached_tokens);
  if (prefill_tokens > 0) {
    line += fmt::format(" | prefill {} tokens, {:.1f} tok/s", prefill_tokens, prefill_rate());
    if (prefill.token_sweeps > 0) line += fmt::format(", {:.2f} sweeps/token", prefill.sweeps_per_token());
  }
  if (decode_tokens > 0) {
    line += fmt::format(" | decode {} tokens, {:.1f} tok/s", decode_tokens, decode_rate());
    // None where several sequences share a reading of the weights.
    if (decode_bytes > 0) line += fmt::format(", {:.2f} GB/s", gigabytes_per_second());
  }
  return line;
}

std::string Timings::line(const SamplerOptions& sampler, std::string_view ending) const {
  return fmt::format("{} | {} | {}", cost_text(load_seconds, place + rates()), sampling_text(sampler), ending);
}

std::string Timings::turn_line(const SamplerOptions& sampler, std::string_view ending) const {
  std::string line = rates() + fmt::format(" | {} | {}", sampling_text(sampler), ending);
  return line.substr(3);  // " | "
}

Json result_json(const GenerateResult& result, const SamplerOptions& sampler, std::span<const int> prompt,
                 const ModelInfo& info, const std::filesystem::path& folder, const Tokenizer& tokenizer,
                 const Timings& timings, bool with_tops) {
  Json json = {{"schema", "mmrec-generate/1"},
               {"text", result.text},
               {"tokens", result.tokens},
               {"logprobs", logprobs_json(result)}};
  if (with_tops) {
    Json& tops = json["top_logprobs"] = Json::array();
    for (std::size_t i = 0; i < result.tokens.size(); ++i) tops.push_back(likeliest_json(result, i, tokenizer));
  }
  Json sampling = {{"chain", chain_text(sampler)}};
  sampling.update(sampling_json(sampler));
  json.update(Json{{"finish_reason", to_string(result.finish_reason)},
                   {"seed", sampler.seed},
                   {"prompt_tokens", std::vector<int>(prompt.begin(), prompt.end())},
                   {"sampling", std::move(sampling)},
                   {"model", with_device({{"folder", folder.string()},
                                          {"parameters", info.parameters},
                                          {"fingerprint", hex(info.fingerprint)},
                                          {"tokenizer_fingerprint", hex(tokenizer.fingerprint())}},
                                         info)},
                   {"timings", timings.json()}});
  return json;
}

}  // namespace mmrec::apps
