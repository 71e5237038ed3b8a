#include "apps/generate/lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <exception>
#include <future>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "apps/common/cli.h"
#include "apps/common/input.h"
#include "apps/generate/prompt.h"
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

void check_extra(std::string_view key, std::size_t bytes, const LineLimits& limits) {
  if (bytes <= limits.extra_bytes) return;
  throw RejectedFile(fmt::format("{}: too long (found {} bytes, expected at most {}, as --max-line-extra-kb says)", key,
                                 bytes, limits.extra_bytes));
}

/// A line that is an object, whose keys have values of the right kind or are refused.
class RequestReader {
 public:
  RequestReader(const Json& object, const LineOptions& defaults, const ModelInfo& info, const Tokenizer& tokenizer)
      : object_(object), members_(object), defaults_(defaults), info_(info), tokenizer_(tokenizer) {
    for (const auto& [key, value] : object.items()) {
      if (std::find(keys().begin(), keys().end(), key) == keys().end()) {
        throw RejectedFile(
            fmt::format("unknown key '{}' (expected {})", printable(key.substr(0, 60)), fmt::join(keys(), ", ")));
      }
    }
    if (has("n") && has("max_tokens")) throw RejectedFile("n: not with max_tokens, which is the same");
  }

  GeneratorRequest request(std::uint64_t seed) {
    GeneratorRequest request{.prompt = prompt(), .options = defaults_.generate, .start = defaults_.start};
    GenerateOptions& options = request.options;
    options.sampler.seed = seed;
    options.sampler = sampler_choices(object_).over(options.sampler);
    options.max_tokens =
        members_.integer(has("n") ? "n" : "max_tokens", -1, std::int64_t{1} << 40).value_or(options.max_tokens);
    if (const Json* const value = members_.find("stop")) options.stop = stop(*value);
    if (const Json* const value = members_.find("logprobs")) {
      options.top_logprobs = value->is_boolean() ? 0 : static_cast<int>(members_.integer("logprobs", *value, 0, 1000));
    }
    limit_tokens(request);
    return request;
  }
  int num_samples() const {
    return static_cast<int>(members_.integer("num_samples", 1, 65536).value_or(defaults_.num_samples));
  }
  RecordDetail detail() const {
    RecordDetail detail = defaults_.detail;
    if (const Json* const value = members_.find("logprobs")) detail.tokens = *value != false;
    return detail;
  }

 private:
  bool has(std::string_view key) const { return members_.has(key); }

  /// No more than LineLimits::tokens; max_tokens of -1 becomes as many as there may be.
  void limit_tokens(GeneratorRequest& request) const {
    if (!has("n") && !has("max_tokens") && !has("num_samples") && !has("logprobs")) return;
    const RecordDetail told = detail();
    const std::int64_t samples = num_samples();
    const std::int64_t prompt = told.prompt || told.tokens ? std::ssize(request.prompt) : 0;
    const std::int64_t each = 1 + request.options.top_logprobs;
    const std::int64_t room = defaults_.limits.tokens / samples - prompt;
    const std::int64_t most = room < 0 ? -1 : room / each;
    std::int64_t& tokens = request.options.max_tokens;
    if (tokens < 0 && most > 0) tokens = most;
    if (tokens >= 0 && tokens <= most) return;
    throw RejectedFile(fmt::format(
        "too many tokens (found num_samples {} x (max_tokens {} x (1 + logprobs {}) + {} of the prompt in the "
        "record), expected at most {}, as --max-line-tokens says)",
        samples, tokens, each - 1, prompt, defaults_.limits.tokens));
  }

  std::vector<std::string> stop(const Json& value) const {
    const Json all = value.is_string() ? Json::array({value}) : value;
    const auto is_text = [](const Json& text) {
      return text.is_string() && !text.get_ref<const std::string&>().empty();
    };
    if (!all.is_array() || !std::all_of(all.begin(), all.end(), is_text)) {
      members_.refuse("stop", value, "a string of at least one character, or an array of such");
    }
    std::vector<std::string> stops = all.get<std::vector<std::string>>();
    std::size_t bytes = 0;
    for (const std::string& text : stops) bytes += text.size();
    check_extra("stop", bytes, defaults_.limits);
    return stops;
  }

  /// A text, or the ids of one; none where there is a state to go on from.
  std::vector<int> prompt() const {
    const bool goes_on = defaults_.start != nullptr;
    const Json* const given = members_.find("prompt");
    if (given == nullptr) {
      if (goes_on) return {};
      throw RejectedFile("no prompt (expected \"prompt\": a string or an array of token ids)");
    }
    const Json& value = *given;
    if (value.is_string()) {
      try {
        return encode_prompt(tokenizer_, info_, value.get_ref<const std::string&>(), goes_on);
      } catch (const std::runtime_error& error) {  // it is empty, or beyond what the tokenizer can match
        throw RejectedFile(error.what());
      }
    }
    const std::int64_t vocab = info_.vocab_size;
    const auto is_id = [&](const Json& id) {
      return id.is_number_unsigned() && id.get<std::uint64_t>() < static_cast<std::uint64_t>(vocab);
    };
    if (!value.is_array() || (value.empty() && !goes_on) || !std::all_of(value.begin(), value.end(), is_id)) {
      members_.refuse("prompt", value, fmt::format("a string, or an array of token ids from 0 to {}", vocab - 1));
    }
    return value.get<std::vector<int>>();
  }

  const Json& object_;
  Members members_;
  const LineOptions& defaults_;
  const ModelInfo& info_;
  const Tokenizer& tokenizer_;
};

/// Below 2^53, and other ones for all lines of all runs (the finaliser of splitmix64).
std::uint64_t seed_of(std::uint64_t run, std::int64_t line) {
  std::uint64_t x = run + static_cast<std::uint64_t>(line) * 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return (x ^ (x >> 31U)) >> 11U;
}

Submission prepare_object(RecordQueue& queue, std::string_view line, std::int64_t number, const Model& model,
                          const Tokenizer& tokenizer, const LineOptions& options, const std::string& name) {
  Json head = {{"line", number}};
  std::string refused;
  try {
    const Json object = parse_object(line, "");
    if (object.contains("id")) {
      // As it is written: a number may have more digits than this program could give back.
      std::string id(member_text(line, "id"));
      check_extra("id", id.size(), options.limits);
      head = {{"id", std::move(id)}, {"line", number}};
    }
    LineRequest asked =
        read_request(object, options, model.info(), tokenizer, seed_of(options.generate.sampler.seed, number));
    Json more = Json::object();
    if (asked.detail.prompt && object.contains("prompt")) more["prompt"] = object["prompt"];
    if (asked.detail.tokens) more["prompt_tokens"] = asked.request.prompt;
    return submission(queue, RecordHead(std::move(head), more),
                      Samples(std::move(asked.request), asked.num_samples, model, options.session), asked.detail, true,
                      name);
  } catch (const RejectedFile& error) {
    refused = error.what();
  } catch (const std::invalid_argument& error) {
    refused = error.what();
  }
  return [&queue, head = std::move(head), refused, name] {
    queue.refuse(head, refused, name);
    return false;
  };
}

Submission prepare_text(RecordQueue& queue, std::string_view text, std::int64_t number, const Model& model,
                        const Tokenizer& tokenizer, const LineOptions& options, const std::string& name) {
  if (text.ends_with('\r')) text.remove_suffix(1);
  GeneratorRequest request{.prompt = encode_prompt(tokenizer, model.info(), text, options.start != nullptr),
                           .options = options.generate,
                           .start = options.start};
  request.options.sequence = static_cast<std::uint64_t>(number - 1);
  Json more = Json::object();
  if (options.detail.prompt) more["prompt"] = text;
  if (options.detail.tokens) more["prompt_tokens"] = request.prompt;
  Submission submit =
      submission(queue, RecordHead({{"line", number}}, more),
                 Samples(std::move(request), options.num_samples, model, options.session), options.detail, false, name);
  const std::int64_t runs = count_invalid_utf8(text);
  if (runs == 0) return submit;
  return [submit = std::move(submit), name, runs, is_new = true]() mutable {
    if (std::exchange(is_new, false)) warn(invalid_utf8_warning(name, runs));
    return submit();
  };
}

/// Reads lines and prepares them, several at a time, on threads beside the caller's. prepare(line, number) makes what
/// is called, and throws what is thrown, in the order of lines.
template <class Prepare>
class Preparer {
 public:
  /// At most `most_lines` at a time. `threads` prepare; a single one is the caller's.
  Preparer(LineReader& lines, RecordQueue& queue, std::size_t most_lines, int threads, const Prepare& prepare)
      : lines_(lines), queue_(queue), most_lines_(most_lines), threads_(threads), prepare_(prepare) {}
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
    if (threads_ == 1) {
      if (!waits && lines_.would_wait()) return {};
      return take(read());
    }
    if (!coming_.valid()) begin();
    if (!waits && coming_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return {};
    Lines some = coming_.get();
    if (!some.are_last) begin();
    return take(std::move(some));
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

  std::deque<Submission> take(Lines some) {
    is_at_end_ = some.are_last;
    return std::move(some.ready);
  }
  void begin() {
    const auto read_them = [this] { return read(); };
    try {
      coming_ = std::async(std::launch::async, read_them);
    } catch (const std::system_error&) {  // there is no thread: the caller's reads when it has to wait
      coming_ = std::async(std::launch::deferred, read_them);
    }
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
      try {
        const Line& line = some[i];
        result.ready[i] = line.fault.empty() ? prepare_(line.text, line.number) : refusing(line, line.fault);
      } catch (const std::bad_alloc&) {
        result.ready[i] = refusing(some[i], kNoMemory);
      } catch (...) {
        result.ready[i] = [fault = std::current_exception()]() -> bool { std::rethrow_exception(fault); };
      }
    });
    return result;
  }
  Submission refusing(const Line& line, std::string_view error) {
    return [&queue = queue_, number = line.number, place = line.place, error = std::string(error)] {
      queue.refuse({{"line", number}}, error, place);
      return false;
    };
  }

  LineReader& lines_;
  RecordQueue& queue_;
  std::size_t most_lines_;
  int threads_;
  const Prepare& prepare_;
  bool is_at_end_ = false;
  std::future<Lines> coming_;  // its destructor waits for the thread
};

/// Runs the queue until all lines are done. What runs does not wait for lines.
template <class Prepare>
void run_lines(RecordQueue& queue, LineReader& lines, int threads, const Prepare& prepare) {
  constexpr std::int64_t kParts = 4;  // of what the queue has room for: some run while others are read
  const auto most_lines = static_cast<std::size_t>(std::max<std::int64_t>(queue.room() / kParts, 1));
  Preparer preparer(lines, queue, most_lines, threads > 0 ? threads : kernels::ThreadPool::available_processors(),
                    prepare);
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

}  // namespace

LineRequest read_request(const Json& object, const LineOptions& options, const ModelInfo& info,
                         const Tokenizer& tokenizer, std::uint64_t seed) {
  RequestReader reader(object, options, info, tokenizer);
  return {.request = reader.request(seed), .num_samples = reader.num_samples(), .detail = reader.detail()};
}

void generate_lines(RecordQueue& queue, LineReader& lines, const Model& model, const Tokenizer& tokenizer,
                    const LineOptions& options) {
  run_lines(queue, lines, options.session.threads, [&](std::string_view line, std::int64_t number) -> Submission {
    const std::string name = fmt::format("{}:{}", options.name, number);
    if (!options.are_objects) return prepare_text(queue, line, number, model, tokenizer, options, name);
    if (is_blank(line)) return nullptr;
    return prepare_object(queue, line, number, model, tokenizer, options, name);
  });
}

}  // namespace mmrec::apps
