#include "apps/generate/lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <future>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "apps/common/cli.h"
#include "apps/generate/prompt.h"
#include "apps/generate/sampling.h"
#include "kernels/cpu/thread_pool.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

/// What an object may have.
const std::vector<std::string_view>& keys() {
  static const auto all = [] {
    std::vector<std::string_view> names = {"prompt", "id", "n", "max_tokens"};
    for (const SamplerOption& option : kSamplerOptions) {
      if (option.in_programs()) names.push_back(option.name);
    }
    names.insert(names.end(), {"stop", "logprobs", "num_samples"});
    return names;
  }();
  return all;
}

void check_extra(std::string_view key, std::size_t bytes, std::size_t most) {
  if (bytes <= most) return;
  throw RejectedFile(
      fmt::format("{}: too long (found {} bytes, expected at most {}, as --max-line-extra-kb says)", key, bytes, most));
}

/// A text, or the ids of one; none where there is a state to go on from.
std::vector<int> prompt_of(const Members& members, bool goes_on, const ModelInfo& info, const Tokenizer& tokenizer) {
  const Json* const given = members.find("prompt");
  if (given == nullptr) {
    if (goes_on) return {};
    throw RejectedFile("no prompt (expected \"prompt\": a string or an array of token ids)");
  }
  const Json& value = *given;
  if (value.is_string()) {  // it may be empty, or beyond what the tokenizer can match
    return rethrown_as<RejectedFile>(
        [&] { return encode_prompt(tokenizer, info, value.get_ref<const std::string&>(), goes_on); });
  }
  const std::int64_t vocab = info.vocab_size;
  const auto is_id = [&](const Json& id) {
    return id.is_number_unsigned() && id.get<std::uint64_t>() < static_cast<std::uint64_t>(vocab);
  };
  if (!value.is_array() || (value.empty() && !goes_on) || !std::all_of(value.begin(), value.end(), is_id)) {
    members.refuse("prompt", value, fmt::format("a string, or an array of token ids from 0 to {}", vocab - 1));
  }
  return value.get<std::vector<int>>();
}

std::vector<std::string> stop_of(const Members& members, const Json& value, std::size_t most_bytes) {
  const Json all = value.is_string() ? Json::array({value}) : value;
  const auto is_text = [](const Json& text) { return text.is_string() && !text.get_ref<const std::string&>().empty(); };
  if (!all.is_array() || !std::all_of(all.begin(), all.end(), is_text)) {
    members.refuse("stop", value, "a string of at least one character, or an array of such");
  }
  std::vector<std::string> stops = all.get<std::vector<std::string>>();
  std::size_t bytes = 0;
  for (const std::string& text : stops) bytes += text.size();
  check_extra("stop", bytes, most_bytes);
  return stops;
}

/// No more than `max_line_tokens` of all records; max_tokens of -1 becomes as many as there may be.
void limit_tokens(LineRequest& asked, std::int64_t max_line_tokens) {
  GenerateOptions& options = asked.request.options;
  const std::int64_t prompt = asked.detail.prompt || asked.detail.tokens ? std::ssize(asked.request.prompt) : 0;
  const std::int64_t each = 1 + options.top_logprobs;
  const std::int64_t room = max_line_tokens / asked.num_samples - prompt;
  const std::int64_t most = room < 0 ? -1 : room / each;
  std::int64_t& tokens = options.max_tokens;
  if (tokens < 0 && most > 0) tokens = most;
  if (tokens >= 0 && tokens <= most) return;
  throw RejectedFile(fmt::format(
      "too many tokens (found num_samples {} x (max_tokens {} x (1 + logprobs {}) + {} of the prompt in the "
      "record), expected at most {}, as --max-line-tokens says)",
      asked.num_samples, tokens, each - 1, prompt, max_line_tokens));
}

/// Below 2^53, and other ones for all lines of all runs (the finaliser of splitmix64).
std::uint64_t seed_of(std::uint64_t run, std::int64_t line) {
  std::uint64_t x = run + static_cast<std::uint64_t>(line) * 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return (x ^ (x >> 31U)) >> 11U;
}

/// Makes requests of lines.
class LineRequests {
 public:
  LineRequests(RecordQueue& queue, const Model& model, const Tokenizer& tokenizer, const GenerateCommand& command,
               std::shared_ptr<const Session> start)
      : queue_(queue), model_(model), tokenizer_(tokenizer), command_(command), start_(std::move(start)) {}

  /// What asks for the records of a line; `place` is FILE:LINE.
  Submission prepare(std::string_view line, std::int64_t number, const std::string& place) const {
    if (!command_.jsonl) return prepare_text(line, number, place);
    return is_blank(line) ? nullptr : prepare_object(line, number, place);
  }
  /// What makes a record that says why there is no request. `id` says whose it is.
  Submission refusing(Json id, std::string_view error, const std::string& place) const {
    return [&queue = queue_, id = std::move(id), error = std::string(error), place] {
      queue.refuse(id, error, place);
      return false;
    };
  }

 private:
  Submission prepare_object(std::string_view line, std::int64_t number, const std::string& place) const {
    Json head = {{"line", number}};
    const auto refused = [&](const std::exception& error) { return refusing(head, error.what(), place); };
    try {
      const Json object = parse_object(line, "");
      if (object.contains("id")) {
        // As it is written: a number may have more digits than this program could give back.
        std::string id(member_text(line, "id"));
        check_extra("id", id.size(), command_.max_line_extra_bytes);
        head = {{"id", std::move(id)}, {"line", number}};
      }
      LineRequest asked = read_request(object, command_, start_, model_.info(), tokenizer_,
                                       seed_of(command_.options.sampler.seed, number));
      Json more = Json::object();
      if (asked.detail.prompt && object.contains("prompt")) more["prompt"] = object["prompt"];
      return submission(std::move(head), std::move(more), std::move(asked), true, place);
    } catch (const RejectedFile& error) {
      return refused(error);
    } catch (const std::invalid_argument& error) {
      return refused(error);
    }
  }

  Submission prepare_text(std::string_view text, std::int64_t number, const std::string& place) const {
    if (text.ends_with('\r')) text.remove_suffix(1);
    LineRequest asked{.request = {.prompt = encode_prompt(tokenizer_, model_.info(), text, start_ != nullptr),
                                  .options = command_.options,
                                  .start = start_},
                      .num_samples = command_.num_samples,
                      .detail = command_.detail()};
    asked.request.options.sequence = static_cast<std::uint64_t>(number - 1);
    Json more = Json::object();
    if (asked.detail.prompt) more["prompt"] = text;
    Submission submit = submission({{"line", number}}, std::move(more), std::move(asked), false, place);
    const std::int64_t runs = count_invalid_utf8(text);
    if (runs == 0) return submit;
    return [submit = std::move(submit), place, runs, is_new = true]() mutable {
      if (std::exchange(is_new, false)) warn(invalid_utf8_warning(place, runs));
      return submit();
    };
  }

  Submission submission(Json id, Json more, LineRequest asked, bool has_seed, const std::string& place) const {
    if (asked.detail.tokens) more["prompt_tokens"] = asked.request.prompt;
    Samples samples(std::move(asked.request), asked.num_samples, model_, command_.run.session);
    return apps::submission(queue_, RecordHead(std::move(id), more), std::move(samples), asked.detail, has_seed, place);
  }

  RecordQueue& queue_;
  const Model& model_;
  const Tokenizer& tokenizer_;
  const GenerateCommand& command_;
  std::shared_ptr<const Session> start_;
};

/// Reads lines and prepares their requests, several at a time, on threads beside the caller's. Faults come in the order
/// of lines.
class Preparer {
 public:
  /// At most `most_lines` at a time. `threads` prepare; a single one is the caller's.
  Preparer(LineReader& lines, std::size_t most_lines, int threads, const LineRequests& requests)
      : lines_(lines), most_lines_(most_lines), threads_(threads), requests_(requests) {
    begin();
  }
  Preparer(const Preparer&) = delete;
  Preparer& operator=(const Preparer&) = delete;
  ~Preparer() {
    if (coming_.valid()) lines_.stop();  // it may wait for a pipe
  }

  /// Whether the last line has been handed over.
  bool is_at_end() const { return is_at_end_; }
  /// The next lines, at least one unless the end has come. Empty where they are not ready and `waits` is false.
  std::deque<Submission> next(bool waits) {
    is_at_end_ = is_at_end_ || interrupt_exit_code() != 0;
    if (is_at_end_) return {};
    const std::future_status status = coming_.wait_for(std::chrono::seconds(0));
    const bool is_ready =
        status == std::future_status::deferred ? !lines_.would_wait() : status == std::future_status::ready;
    if (!waits && !is_ready) return {};
    Lines some = coming_.get();
    is_at_end_ = some.are_last;
    if (!is_at_end_) begin();
    return std::move(some.ready);
  }

 private:
  static constexpr std::size_t kMostBytes = std::size_t{4} << 20;  // that are tokenized together
  struct Line {
    std::string text;
    std::int64_t number = 0;
    std::string place = {};
    std::string fault = {};
  };
  struct Lines {
    std::deque<Submission> ready;
    bool are_last = false;
  };

  void begin() {
    const auto read_them = [this] { return read(); };
    try {
      if (threads_ > 1) coming_ = std::async(std::launch::async, read_them);
    } catch (const std::system_error&) {  // there is no thread
    }
    if (!coming_.valid()) coming_ = std::async(std::launch::deferred, read_them);  // the caller's reads
  }
  Lines read() {
    Lines result;
    std::vector<Line> some;
    for (std::size_t bytes = 0; some.size() < most_lines_ && bytes < kMostBytes;) {
      if (!some.empty() && lines_.would_wait()) break;
      try {
        const auto line = lines_.next();
        result.are_last = !line;
        if (!line) break;
        bytes += line->size();
        some.push_back({std::string(*line), lines_.lines(), lines_.place()});
      } catch (const TooLong& error) {
        some.push_back({{}, lines_.lines(), lines_.place(), error.reason()});
      }
    }
    result.ready.resize(some.size());
    kernels::parallel_items(some.size(), threads_, [&](std::size_t i) {
      const Line& line = some[i];
      const auto refuse = [&](std::string_view error) {
        result.ready[i] = requests_.refusing({{"line", line.number}}, error, line.place);
      };
      try {
        if (!line.fault.empty()) return refuse(line.fault);
        result.ready[i] = requests_.prepare(line.text, line.number, line.place);
      } catch (const std::bad_alloc&) {
        refuse(kNoMemory);
      } catch (...) {
        result.ready[i] = [fault = std::current_exception()]() -> bool { std::rethrow_exception(fault); };
      }
    });
    return result;
  }
  LineReader& lines_;
  std::size_t most_lines_;
  int threads_;
  const LineRequests& requests_;
  bool is_at_end_ = false;
  std::future<Lines> coming_;  // its destructor waits for the thread
};

}  // namespace

LineRequest read_request(const Json& object, const GenerateCommand& command, std::shared_ptr<const Session> start,
                         const ModelInfo& info, const Tokenizer& tokenizer, std::uint64_t seed) {
  for (const auto& [key, value] : object.items()) {
    if (std::find(keys().begin(), keys().end(), key) == keys().end()) {
      throw RejectedFile(
          fmt::format("unknown key '{}' (expected {})", printable(key.substr(0, 60)), fmt::join(keys(), ", ")));
    }
  }
  const Members members(object);
  const bool has_n = members.has("n");
  const bool has_max_tokens = members.has("max_tokens");
  if (has_n && has_max_tokens) throw RejectedFile("n: not with max_tokens, which is the same");
  LineRequest asked{.request = {.prompt = prompt_of(members, start != nullptr, info, tokenizer),
                                .options = command.options,
                                .start = std::move(start)},
                    .detail = command.detail()};
  GenerateOptions& options = asked.request.options;
  options.sampler.seed = seed;
  set_sampler(object, options.sampler);
  options.max_tokens =
      members.integer(has_n ? "n" : "max_tokens", -1, std::int64_t{1} << 40).value_or(options.max_tokens);
  if (const Json* const value = members.find("stop")) {
    options.stop = stop_of(members, *value, command.max_line_extra_bytes);
  }
  if (const Json* const value = members.find("logprobs")) {
    options.top_logprobs = value->is_boolean() ? 0 : static_cast<int>(members.integer("logprobs", *value, 0, 1000));
    asked.detail.tokens = *value != false;
  }
  asked.num_samples = static_cast<int>(members.integer("num_samples", 1, 65536).value_or(command.num_samples));
  if (has_n || has_max_tokens || members.has("num_samples") || members.has("logprobs")) {
    limit_tokens(asked, command.max_line_tokens);
  }
  return asked;
}

void generate_lines(RecordQueue& queue, LineReader& lines, const Model& model, const Tokenizer& tokenizer,
                    const GenerateCommand& command, std::shared_ptr<const Session> start) {
  constexpr std::int64_t kParts = 4;  // of what the queue has room for: some run while others are read
  const auto most_lines = static_cast<std::size_t>(std::max<std::int64_t>(queue.room() / kParts, 1));
  const int threads = command.run.session.threads;
  const LineRequests requests(queue, model, tokenizer, command, std::move(start));
  Preparer preparer(lines, most_lines, threads > 0 ? threads : kernels::ThreadPool::available_processors(), requests);
  std::deque<Submission> ready;
  bool has_work = false;
  while (!preparer.is_at_end() || !ready.empty() || has_work) {
    while (queue.has_room()) {
      if (ready.empty()) ready = preparer.next(!has_work);
      if (ready.empty()) break;
      if (!ready.front() || !ready.front()()) ready.pop_front();
      has_work = true;
    }
    has_work = queue.run_once();
  }
}

}  // namespace mmrec::apps
