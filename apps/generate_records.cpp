#include "apps/generate_records.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "apps/cli.h"
#include "apps/processors.h"
#include "apps/signals.h"

namespace mmrec::apps {

using Json = nlohmann::ordered_json;

Json logprobs_json(const GenerateResult& result) {
  Json logprobs = Json::array();
  for (const float logprob : result.logprobs) logprobs.push_back(shortest(logprob));
  return logprobs;
}

Json top_logprobs_json(const GenerateResult& result, const Tokenizer& tokenizer) {
  Json all = Json::array();
  if (result.tokens.empty()) return all;
  const std::size_t row = result.top_logprobs.size() / result.tokens.size();
  for (std::size_t i = 0; i < result.tokens.size(); ++i) {
    Json likeliest = Json::array();
    for (std::size_t k = i * row; k < (i + 1) * row; ++k) {
      const Sample& sample = result.top_logprobs[k];
      likeliest.push_back(
          {{"token", sample.token}, {"piece", tokenizer.piece(sample.token)}, {"logprob", shortest(sample.logprob)}});
    }
    all.push_back(std::move(likeliest));
  }
  return all;
}

RecordQueue::RecordQueue(Generator& generator, Tokenizer tokenizer, Output& out, bool as_completed)
    : generator_(generator),
      tokenizer_(std::move(tokenizer)),
      out_(out),
      as_completed_(as_completed),
      most_(4 * static_cast<std::int64_t>(generator.slots())) {}

void RecordQueue::submit(Json head, GeneratorRequest request, RecordDetail detail, std::string name) {
  request.options.logprobs = detail.tokens;
  request.options.cancelled = [] { return interrupt_exit_code() != 0; };
  const bool with_tops = request.options.top_logprobs > 0;
  request.on_finish = [this, number = asked_, head = std::move(head), detail, with_tops,
                       name = std::move(name)](const GenerateResult& result) mutable {
    Json record = std::move(head);
    record["text"] = result.text;
    record["finish_reason"] = to_string(result.finish_reason);
    if (detail.tokens) {
      record["tokens"] = result.tokens;
      record["logprobs"] = logprobs_json(result);
    }
    if (with_tops) record["top_logprobs"] = top_logprobs_json(result, tokenizer_);
    if (result.finish_reason == FinishReason::kError) {
      record["error"] = result.error;
      if (done_.failed++ == 0) done_.first_failed = fmt::format("{}: {}", name, result.error);
    }
    done_.tokens += std::ssize(result.tokens);
    finish(number, std::move(record));
  };
  generator_.submit(std::move(request));
  ++asked_;
}

void RecordQueue::refuse(Json head, std::string_view error, std::string_view name) {
  head["error"] = error;
  if (done_.refused++ == 0) done_.first_refused = fmt::format("{}: {}", name, error);
  finish(asked_++, std::move(head));
}

void RecordQueue::finish(std::int64_t number, Json record) {
  std::string id;
  if (record.contains("id")) {
    id = fmt::format("\"id\":{},", record["id"].get<std::string>());
    record.erase("id");
  }
  finished_.emplace(number, record.dump(-1, ' ', false, Json::error_handler_t::replace).insert(1, id) + "\n");
}

bool RecordQueue::run_once() {
  const bool has_work = generator_.run_once();
  write();
  return has_work;
}

void RecordQueue::write() {
  bool has_written = false;
  for (auto first = finished_.begin(); first != finished_.end(); first = finished_.erase(first)) {
    if (!as_completed_ && first->first != done_.records) break;
    out_.write(first->second);
    ++done_.records;
    has_written = true;
  }
  if (has_written) out_.flush();
}

std::vector<GeneratorRequest> samples_of(GeneratorRequest request, int count, const Model& model,
                                         const SessionOptions& options) {
  if (count == 1) return {std::move(request)};
  if (!request.prompt.empty()) {
    const auto session =
        std::make_shared<Session>(request.start ? request.start->clone() : model.new_session(1, options));
    session->prefill(request.prompt, {.on_progress = [](auto, auto) { return interrupt_exit_code() == 0; }});
    request.prompt = {};
    request.start = session;
  }
  std::vector<GeneratorRequest> samples(static_cast<std::size_t>(count), request);
  for (GeneratorRequest& sample : samples) {
    sample.options.sampler.seed += static_cast<std::uint64_t>(&sample - samples.data());
  }
  return samples;
}

namespace {

/// Calls work(), which does not throw, on as many threads, of which the caller's is one; on fewer where the system has
/// no more.
template <class Work>
void on_threads(int count, const Work& work) {
  std::vector<std::jthread> others;
  try {
    while (std::ssize(others) < count - 1) others.emplace_back(work);
  } catch (const std::system_error&) {  // those there are do the work
  }
  work();
}

}  // namespace

void run_lines(RecordQueue& queue, LineReader& lines, int threads,
               const std::function<Submission(std::string_view, std::int64_t)>& prepare) {
  constexpr std::size_t kMostBytes = std::size_t{4} << 20;  // that are tokenized together
  struct Line {
    std::string text;
    std::int64_t number = 0;
  };
  const int most_threads = threads > 0 ? threads : usable_processors();
  std::deque<Submission> ready;
  bool is_at_end = false;
  bool has_work = false;
  const auto read = [&] {
    std::vector<Line> some;
    const auto most = static_cast<std::size_t>(queue.room());
    for (std::size_t bytes = 0; some.size() < most && bytes < kMostBytes;) {
      if ((has_work || !some.empty()) && lines.would_wait()) break;
      const auto line = lines.next();
      is_at_end = !line;
      if (is_at_end) break;
      bytes += line->size();
      some.push_back({std::string(*line), lines.lines()});
    }
    ready.resize(some.size());
    std::atomic<std::size_t> next = 0;
    on_threads(std::min(most_threads, static_cast<int>(some.size())), [&] {
      for (std::size_t i = 0; (i = next++) < some.size();) {
        try {
          ready[i] = prepare(some[i].text, some[i].number);
        } catch (...) {
          ready[i] = [fault = std::current_exception()] { std::rethrow_exception(fault); };
        }
      }
    });
  };
  while (!is_at_end || !ready.empty() || has_work) {
    while (queue.has_room()) {
      if (ready.empty() && !is_at_end) read();
      if (ready.empty()) break;
      if (ready.front()) ready.front()();
      ready.pop_front();
      has_work = true;
    }
    has_work = queue.run_once();
  }
}

}  // namespace mmrec::apps
