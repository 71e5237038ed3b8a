#include "apps/generate_lines.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "apps/cli.h"
#include "apps/signals.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

class Lines {
 public:
  Lines(Generator& generator, LineReader& lines, const LineOptions& options, Output& out)
      : generator_(generator), lines_(lines), options_(options), out_(out) {}

  LinesDone run() {
    // Results wait for those before them; as many prompts wait for room.
    const std::int64_t most = 4 * static_cast<std::int64_t>(generator_.slots());
    bool has_work = false;
    while (!is_at_end_ || has_work) {
      while (!is_at_end_ && lines_.lines() - done_.prompts < most && (!has_work || !lines_.would_wait())) {
        has_work = submit() || has_work;
      }
      has_work = generator_.run_once();
      write();
    }
    return done_;
  }

 private:
  /// False at the end.
  bool submit() {
    const auto line = lines_.next();
    is_at_end_ = !line;
    if (!line) return false;
    std::string_view text = *line;
    if (text.ends_with('\r')) text.remove_suffix(1);
    const std::int64_t number = lines_.lines();
    if (const auto runs = count_invalid_utf8(text); runs > 0) {
      warn(fmt::format("{}:{}: {} places are no UTF-8 and are read as U+FFFD", options_.name, number, runs));
    }
    GeneratorRequest request{.prompt = options_.encode(text), .options = options_.generate, .start = options_.start};
    request.options.sequence = static_cast<std::uint64_t>(number - 1);
    request.options.logprobs = options_.with_tokens;
    request.options.cancelled = [] { return interrupt_exit_code() != 0; };
    Json json = {{"line", number}};
    if (options_.with_prompt) json["prompt"] = text;
    if (options_.with_tokens) json["prompt_tokens"] = request.prompt;
    request.on_finish = [this, number, json = std::move(json)](const GenerateResult& result) mutable {
      finish(number, std::move(json), result);
    };
    generator_.submit(std::move(request));
    return true;
  }

  void finish(std::int64_t number, Json json, const GenerateResult& result) {
    json["text"] = result.text;
    json["finish_reason"] = to_string(result.finish_reason);
    if (options_.with_tokens) {
      json["tokens"] = result.tokens;
      Json& logprobs = json["logprobs"] = Json::array();
      for (const float logprob : result.logprobs) logprobs.push_back(shortest(logprob));
    }
    if (result.finish_reason == FinishReason::kError) {
      json["error"] = result.error;
      if (done_.failed++ == 0) done_.first_failure = fmt::format("{}:{}: {}", options_.name, number, result.error);
    }
    done_.tokens += std::ssize(result.tokens);
    finished_.emplace(number, json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
  }

  void write() {
    bool has_written = false;
    for (auto first = finished_.begin(); first != finished_.end() && first->first == done_.prompts + 1;
         first = finished_.erase(first)) {
      out_.write(first->second);
      ++done_.prompts;
      has_written = true;
    }
    if (has_written) out_.flush();
  }

  Generator& generator_;
  LineReader& lines_;
  const LineOptions& options_;
  Output& out_;
  bool is_at_end_ = false;
  std::map<std::int64_t, std::string> finished_;  // and not written
  LinesDone done_;
};

}  // namespace

LinesDone generate_lines(Generator& generator, LineReader& lines, const LineOptions& options, Output& out) {
  return Lines(generator, lines, options, out).run();
}

}  // namespace mmrec::apps
