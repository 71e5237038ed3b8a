// mmrec-generate: continues a prompt. stdout carries the text alone, as it is drawn; one line on stderr says what it
// cost.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/background_writer.h"
#include "apps/cli.h"
#include "apps/generate_lines.h"
#include "apps/generate_report.h"
#include "apps/input.h"
#include "apps/model_folder.h"
#include "apps/output.h"
#include "apps/prefix_cache.h"
#include "apps/progress.h"
#include "apps/sampling.h"
#include "apps/saved_state.h"
#include "apps/signals.h"
#include "mmrec/errors.h"
#include "mmrec/generate.h"
#include "mmrec/generator.h"
#include "mmrec/model.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kProgram = "mmrec-generate";

constexpr std::string_view kHelp = R"(mmrec-generate -p "The old house" -n 64
mmrec-generate -m DIR -f prompt.txt --temp 0 --json > answer.json
echo "Once upon a time" | mmrec-generate --seed 7 --stop "The end"

Continues a prompt: text on stdout, timings and the seed on stderr.
  -m, --model DIR       model folder (default: the bundled model)
  -p, --prompt TEXT     prompt; or -f, --file FILE ("-": stdin); or piped stdin
  -n, --tokens N        most tokens to draw (256); -1: until an end or a stop
      --temp X          temperature (0.8), 0: greedy; --top-k N: keep N (40)
      --top-p X         keep the smallest set of probability X (0.95)
      --min-p X         drop tokens below X times the likeliest (0.05)
      --repetition-penalty X   make recent tokens less likely (1.0: do not)
      --seed N          random seed (default: random, always reported)
      --stop S          end before this text; may be repeated
      --prefix-cache DIR   keep states of prompts there, begin with the longest
      --state-out FILE  save the state at the end; --state-in FILE: go on there
      --echo            print the prompt first; --json: one JSON object, no text
      --lines           each line is a prompt: a JSON line for each, in order
      --device D        auto, cpu, cuda, cuda:N (from 0); cuda:all with --lines
      --precision P     auto, fp32, bf16, fp16; --expert E: both, text or code
      --prefill M       auto, sweeps or steps; --sweep-tol X: tolerance (auto)
      --calls C         mmrec-jax: stepwise, prompt, whole; --bank true, false
  -h, --help            this page; --version; --threads N: of the CPU (0: all)
Sampling defaults come from the folder's generation_config.json if it has one.
)";

constexpr std::array kFlags = {
    Flag{"model", 'm'},
    Flag{"prompt", 'p'},
    Flag{"file", 'f'},
    Flag{"tokens", 'n'},
    Flag{"temp"},
    Flag{"top-k"},
    Flag{"top-p"},
    Flag{"min-p"},
    Flag{"repetition-penalty"},
    Flag{"seed"},
    Flag{"stop", 0, true, true},
    Flag{"echo", 0, false},
    Flag{"json", 0, false},
    Flag{"lines", 0, false},
    Flag{"state-in"},
    Flag{"state-out"},
    Flag{"prefix-cache"},
    Flag{"prefix-cache-mb"},
    Flag{"device"},
    Flag{"precision"},
    Flag{"expert"},
    Flag{"threads"},
    Flag{"prefill"},
    Flag{"sweep-tol"},
    Flag{"calls"},
    Flag{"bank"},
    Flag{"help", 'h', false},
    Flag{"version", 0, false},
};

struct Prompt {
  std::string text;
  std::string source;  // for messages
};

/// --state-in.
struct Begun {
  std::string file;
  SavedSequence saved;
};
std::optional<Begun> begun_sequence(const Arguments& arguments) {
  const auto file = arguments.text("state-in");
  if (!file) return std::nullopt;
  return Begun{*file, read_state(*file)};
}

std::string prompt_file(const Arguments& arguments) {
  if (const auto file = arguments.text("file")) return *file;
  if (isatty(STDIN_FILENO) == 1) throw UsageError("no prompt (expected -p TEXT, -f FILE or piped stdin)");
  return "-";
}

/// None is needed after a state, and stdin then not looked at unless it is asked for.
Prompt read_prompt(const Arguments& arguments) {
  const auto text = arguments.text("prompt");
  if (!text && !arguments.has("file") && arguments.has("state-in")) return {};
  if (text && arguments.has("file")) throw UsageError("-p and -f: found both, expected one prompt");
  if (text) return {*text, "--prompt"};
  const std::string file = prompt_file(arguments);
  return {read_input(file), input_name(file)};
}

std::vector<std::string> stop_strings(const Arguments& arguments) {
  auto stop = arguments.list("stop");
  for (const std::string& text : stop) {
    if (text.empty() || count_invalid_utf8(text) > 0) {
      throw UsageError(fmt::format("--stop: not a valid value (found '{}', expected UTF-8 of at least one character)",
                                   printable(text)));
    }
  }
  return stop;
}

// The prompt's ids, begun as the tokenizer says; a prompt without any id starts from BOS. One that goes on from a state
// begins nothing.
std::vector<int> encode_prompt(const Tokenizer& tokenizer, const ModelInfo& info, std::string_view text, bool goes_on) {
  std::vector<int> ids = tokenizer.encode(text, !goes_on);
  if (!ids.empty() || goes_on) return ids;
  const int bos = tokenizer.bos_id() >= 0 ? tokenizer.bos_id() : info.bos_token_id;
  if (bos < 0) throw UsageError("the prompt is empty and the model has no BOS to start from");
  return {bos};
}

std::vector<int> end_of_sequence(const ModelInfo& info, const GenerationDefaults& defaults,
                                 const Tokenizer& tokenizer) {
  if (!info.eos_token_ids.empty()) return info.eos_token_ids;
  if (!defaults.eos_token_ids.empty()) return defaults.eos_token_ids;
  if (tokenizer.eos_id() >= 0) return {tokenizer.eos_id()};
  return {};
}

/// Consumes the prompt, with a progress bar where it takes more than one chunk; an interrupt ends it after a chunk.
/// Returns how many tokens the cache had.
std::int64_t prefill(Session& session, std::span<const int> ids, PrefixCache* cache) {
  const std::int64_t cached = cache != nullptr ? cache->restore(session, ids) : 0;
  std::vector<std::int64_t> ends = {std::ssize(ids)};
  if (cache != nullptr) ends = PrefixCache::checkpoints(cached, std::ssize(ids));
  Progress progress;
  std::int64_t at = cached;
  for (const std::int64_t end : ends) {
    if (end == at || interrupt_exit_code() != 0) break;
    const auto part = ids.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(end - at));
    const std::int64_t before = session.position();
    session.prefill(part, {.on_progress = [&](std::int64_t done, std::int64_t) {
                      progress.update(at - cached + done, std::ssize(ids) - cached);
                      return interrupt_exit_code() == 0;
                    }});
    at += session.position() - before;
    if (at != end) break;
    if (cache != nullptr) cache->store(session, ids.first(static_cast<std::size_t>(end)));
  }
  return cached;
}

/// --prefix-cache.
std::optional<PrefixCache> prefix_cache(const Arguments& arguments, const ModelInfo& info, const Tokenizer& tokenizer) {
  const auto folder = arguments.text("prefix-cache");
  if (!folder) return std::nullopt;
  if (info.variant.bank.value_or(false) && info.variant.calls != Calls::kStepwise) {
    throw UsageError(
        "--prefix-cache: not where a prompt is a call of the model, because its parts would be others (expected "
        "--calls "
        "stepwise)");
  }
  const std::int64_t megabytes = arguments.integer("prefix-cache-mb", 1024, 1, std::int64_t{1} << 24);
  return PrefixCache(*folder, static_cast<std::uint64_t>(megabytes) << 20, info, tokenizer);
}
void check_prefix_cache(const Arguments& arguments) {
  if (!arguments.has("prefix-cache")) {
    if (arguments.has("prefix-cache-mb")) throw UsageError("--prefix-cache-mb: without --prefix-cache DIR");
    return;
  }
  for (const char* other : {"state-in", "lines"}) {
    if (arguments.has(other)) throw UsageError(fmt::format("--prefix-cache: not with --{}", other));
  }
}

/// --state-out: the state after all that was drawn, whose last token the session has not consumed.
void save_state(const std::string& file, Session& session, const GenerateResult& result, const SamplerOptions& sampler,
                const Tokenizer& tokenizer) {
  if (!result.tokens.empty() && result.finish_reason != FinishReason::kEndOfSequence) {
    session.step(std::span(&result.tokens.back(), 1));
  }
  write_state(file, save_sequence(session, sampler, &tokenizer));
  if (result.finish_reason == FinishReason::kStopString) {
    warn(fmt::format("{}: the state goes on to the end of the last token drawn, the text ends before the stop string",
                     file));
  }
}

class Stopwatch {
 public:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// --lines: as many prompts as there are lines, on as many GPUs as were asked for.
int lines_main(const Arguments& arguments, const RunOptions& run, const std::filesystem::path& folder,
               const GenerationDefaults& defaults, const std::optional<Begun>& begun, GenerateOptions options,
               Output& out) {
  if (arguments.has("prompt")) throw UsageError("--lines: not with -p (expected -f FILE or piped stdin)");
  if (arguments.has("state-out")) throw UsageError("--state-out: not with --lines (each line has a state of its own)");
  const std::string file = prompt_file(arguments);
  LineReader lines(file);
  Stopwatch watch;
  const std::vector<Model> models = load_models(folder, run);
  const ModelInfo info = info_of(models);
  const Tokenizer tokenizer = load_tokenizer(folder, info);
  options.eos_token_ids = end_of_sequence(info, defaults, tokenizer);
  std::shared_ptr<Session> start;
  if (begun) {
    start = std::make_shared<Session>(models.front().new_session(1, run.session));
    restore_state(*start, begun->saved, tokenizer, begun->file);
  }
  Generator generator(models, tokenizer, {.session = run.session});
  const double load_seconds = watch.lap();

  const GracefulScope graceful;
  LineOptions lines_options;
  lines_options.generate = options;
  lines_options.name = input_name(file);
  lines_options.start = start;
  lines_options.encode = [&](std::string_view text) { return encode_prompt(tokenizer, info, text, start != nullptr); };
  lines_options.with_tokens = arguments.has("json");
  lines_options.with_prompt = arguments.has("echo");
  const LinesDone done = generate_lines(generator, lines, lines_options, out);
  const double seconds = watch.lap();
  out.commit();
  log_line(fmt::format(
      "load {:.3f} s | {} | {} prompts, {} tokens in {:.2f} s, {:.1f} tok/s | peak {:.1f} MB | seed {}", load_seconds,
      place_of(info), done.prompts, done.tokens, seconds, Timings::rate(static_cast<double>(done.tokens), seconds),
      static_cast<double>(peak_memory_bytes()) * 1e-6, options.sampler.seed));
  if (done.failed > 0) {
    throw NumericError(fmt::format("{} of {} prompts failed, {}", done.failed, done.prompts, done.first_failure));
  }
  return interrupt_exit_code();
}

int generate_main(int argc, char** argv) {
  const Arguments arguments(kFlags, false, argc, argv);
  if (print_help_or_version(arguments, kHelp, kProgram)) return kOk;
  Output out;

  // Everything that can be wrong with the command line, before anything is loaded.
  const RunOptions run = run_options(arguments);
  GenerateOptions options;
  options.max_tokens = arguments.integer("tokens", 256, -1, std::int64_t{1} << 40);
  options.stop = stop_strings(arguments);
  const std::filesystem::path folder = model_folder(arguments);
  const GenerationDefaults defaults = load_generation_defaults(folder);
  const auto state_out = arguments.text("state-out");
  if (state_out) check_state_path(*state_out);
  check_prefix_cache(arguments);
  const std::optional<Begun> begun = begun_sequence(arguments);
  options.sampler = begun ? sampler_options(arguments, begun->saved.sampler, begun->saved.sampler.seed)
                          : sampler_options(arguments, defaults.sampler);
  if (arguments.has("lines")) return lines_main(arguments, run, folder, defaults, begun, std::move(options), out);
  const bool as_json = arguments.has("json");
  options.logprobs = as_json;
  const Prompt prompt = read_prompt(arguments);
  if (const auto runs = count_invalid_utf8(prompt.text); runs > 0) {
    warn(fmt::format("{}: {} places are no UTF-8 and are read as U+FFFD", prompt.source, runs));
  }

  Stopwatch watch;
  Timings timings;
  const Model model = load_model(folder, run);  // of all GPUs the first: a sequence runs on one
  const Tokenizer tokenizer = load_tokenizer(folder, model.info());
  timings.load_seconds = watch.lap();
  timings.place = place_of(model.info());

  Session session = model.new_session(1, run.session);
  if (begun) restore_state(session, begun->saved, tokenizer, begun->file);
  const std::int64_t began_at = session.position();
  const std::vector<int> ids = encode_prompt(tokenizer, model.info(), prompt.text, began_at > 0);
  options.eos_token_ids = end_of_sequence(model.info(), defaults, tokenizer);
  if (arguments.has("echo") && !as_json) {
    out.write(prompt.text);
    out.flush();
  }
  std::optional<PrefixCache> cache = prefix_cache(arguments, model.info(), tokenizer);
  const GracefulScope graceful;
  watch.lap();
  timings.cached_tokens = prefill(session, ids, cache ? &*cache : nullptr);
  timings.prefill_seconds = watch.lap();
  timings.prefill_tokens = session.position() - began_at - timings.cached_tokens;
  timings.prefill = session.prefill_stats();

  bool line_open = false;
  std::optional<BackgroundWriter> writer;
  if (!as_json) {
    writer.emplace(out);
    options.on_text = [&](std::string_view text) {
      writer->write(text);
      if (!text.empty()) line_open = text.back() != '\n';
      return true;
    };
  }
  options.cancelled = [] { return interrupt_exit_code() != 0; };
  GenerateResult result;
  if (session.position() - began_at == std::ssize(ids)) {
    result = generate(session, tokenizer, options);
  } else {  // interrupted
    result.finish_reason = FinishReason::kCancelled;
  }
  if (writer) writer->finish();
  timings.decode_seconds = watch.lap();
  timings.decode_tokens = static_cast<std::int64_t>(result.tokens.size());
  const std::int64_t prompt_end = began_at + timings.cached_tokens + timings.prefill_tokens;
  timings.decode_bytes = decoded_bytes(model.info(), prompt_end, session.position() - prompt_end);
  if (state_out) save_state(*state_out, session, result, options.sampler, tokenizer);

  if (as_json) {
    Json json = result_json(result, options.sampler, ids, model.info(), folder, tokenizer, timings);
    if (arguments.has("echo")) json["prompt"] = prompt.text;
    json["state"] = {{"began_at", began_at}, {"position", session.position()}};
    out.write(json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
  } else if (line_open && out.is_terminal()) {
    out.write("\n");
  }
  out.commit();
  log_line(timings.line(options.sampler.seed, result.finish_reason));
  return interrupt_exit_code();
}

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  return mmrec::apps::run_program("mmrec-generate", [&] { return mmrec::apps::generate_main(argc, argv); });
}
