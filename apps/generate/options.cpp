#include "apps/generate/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>
#include <tuple>
#include <type_traits>
#include <variant>

#include "apps/common/input.h"
#include "apps/generate/sampling.h"

namespace mmrec::apps {
namespace {

constexpr std::string_view kHead = R"(mmrec-generate -p "The old house" -n 64
mmrec-generate -m DIR -f prompt.txt --temp 0 --json > answer.json
echo "Once upon a time" | mmrec-generate --seed 7 --stop "The end"

Continues a prompt: text on stdout, timings and the seed on stderr.
)";

constexpr auto kFirstOptions = std::to_array<Option>({
    {"model", 'm', kModelFolder, "model folder, or DIR alone (the bundled model)", true},
    {"prompt", 'p', {"TEXT"}, "the prompt; else what is piped into stdin", true},
    {"file", 'f', kInputFile, "the prompt is in FILE; - is stdin", true},
    {"escape", 'e', kNoValue, "resolve \\n, \\t, \\\\, \\\" and \\xHH in -p and --stop"},
    {"tokens",
     'n',
     {"N"},
     "most tokens to draw (256); -1: until an end or a stop",
     true,
     "predict n-predict max-tokens"},
});

/// The engine's table of the sampler's options.
constexpr auto kSampling = [] {
  std::array<Option, std::ranges::count_if(kSamplerOptions, &SamplerOption::in_programs)> options;
  auto to = options.begin();
  for (const SamplerOption& from : kSamplerOptions) {
    if (!from.in_programs()) continue;
    const bool is_real = std::holds_alternative<float SamplerOptions::*>(from.member);
    *to++ = {from.flag, from.letter, {is_real ? "X" : "N"}, from.help, from.is_common, from.alias};
  }
  return options;
}();

constexpr auto kLastOptions = std::to_array<Option>({
    {"stop", 0, {"S"}, "end before this text; may be repeated", true, {}, true},
    {"num-samples", 0, {"N"}, "continuations: a line of JSON each, of seeds rising by 1", true},
    {"logprobs", 0, {"K"}, "in JSON, tokens with log-probs, and of each draw the K likeliest"},
    {"echo", 0, kNoValue, "print the prompt first"},
    {"json", 0, kNoValue, "one JSON object, no text", true},
    {"lines", 0, kNoValue, "each line is a prompt: a line of JSON for each, in order", true},
    {"jsonl", 0, kInputFile, "each line is {\"prompt\": ..., \"n\": ..., ...}: a record for each", true},
    {"as-completed", 0, kNoValue, "records of --jsonl and --lines as they are ready, not in order"},
    {"slots", 0, {"N"}, "prompts or samples that run at once on each device (as many as are fastest)"},
    {"max-line-mb", 0, {"N"}, "longest line of --jsonl and --lines (16 MiB)"},
    {"max-line-tokens", 0, {"N"}, "most tokens a line of --jsonl may ask for, its samples together (4194304)"},
    {"max-line-extra-kb", 0, {"N"}, "longest id of such a line, and stop strings together (16 KiB)"},
    {"interactive", 'i', kNoValue, "take turns: lines of stdin are continued; /help there", true},
    {"output", 'o', kOutputFile, "write there, whole or not at all; - is stdout", true},
    {"state-out", 0, kOutputFile, "save the state at the end", true},
    {"state-in", 0, kInputFile, "go on where that was saved", true},
    {"prefix-cache", 0, {"DIR", {}, Names::kFolder}, "keep states of prompts there, begin with the longest"},
    {"prefix-cache-mb", 0, {"N"}, "what they may take (1024 MiB): the oldest go"},
    {"device", 0, {"D", "auto cpu cuda cuda:all"}, "auto, cpu, cuda, cuda:N (from 0); cuda:all with --lines", true},
    kPrecisionOption,
    kBatchInvariantOption,
    kThreadsOption,
    {"quiet", 'q', kNoValue, kQuietOption.help, true},
    kVerboseOption,
    kSandboxOption,
    kExpertOption,
    kPrefillOption,
    kSweepTolOption,
    {"calls", 0, {"C", "prompt stepwise whole"}, "of mmrec-jax: prompt (the default), stepwise or whole"},
    kBankOption,
    kHelpOption,
    kHelpAllOption,
    kVersionOption,
});

constexpr auto kOptions = [](const auto&... tables) {
  std::array<Option, (std::tuple_size_v<std::remove_cvref_t<decltype(tables)>> + ...)> all;
  auto to = all.begin();
  ((to = std::ranges::copy(tables, to).out), ...);
  return all;
}(kFirstOptions, kSampling, kLastOptions);
constexpr std::string_view kFoot = "Sampling defaults come from the folder's generation_config.json if it has one.\n";

/// A folder, or a file in its place, may stand alone instead of after -m.
std::filesystem::path folder_of(const Arguments& arguments) {
  const std::vector<std::string>& alone = arguments.positionals();
  if (alone.empty()) return model_folder(arguments);
  std::error_code ignored;
  const bool is_there = std::filesystem::exists(alone.front(), ignored);
  if (alone.size() > 1 || !is_there) {
    throw UsageError(
        fmt::format("unexpected argument '{}' (expected options and at most a model folder; a prompt goes "
                    "after -p)",
                    printable(alone[is_there ? 1 : 0])));
  }
  if (arguments.has("model")) {
    throw UsageError(fmt::format("--model: not with a model folder beside it ('{}')", printable(alone.front())));
  }
  return alone.front();
}

void read_files(const Arguments& arguments, GenerateCommand& command) {
  command.prompt = arguments.text("prompt");
  if (command.prompt && arguments.has("escape")) command.prompt = unescaped(*command.prompt, "prompt");
  command.file = arguments.file("file");
  command.state_in = arguments.file("state-in");
  command.state_out = arguments.file("state-out");
  command.prefix_cache = arguments.file("prefix-cache");
  command.prefix_cache_mb = arguments.integer("prefix-cache-mb", 1024, 1, std::int64_t{1} << 24);
  if (command.prompt && command.file) throw UsageError("-p and -f: found both, expected one prompt");
  if (arguments.has("lines") && command.prompt) {
    throw UsageError("--lines: not with -p (expected -f FILE or piped stdin)");
  }
  arguments.refuse_together("state-out", {"lines", "jsonl"}, " (each line has a state of its own)");
  arguments.refuse_together("prefix-cache", {"lines", "jsonl", "state-in"});
  arguments.refuse_together("jsonl", {"prompt", "file", "lines"});
  arguments.refuse_together("interactive",
                            {"json", "lines", "jsonl", "num-samples", "logprobs", "prefix-cache", "output"});
  command.interactive = arguments.has("interactive");
  if (command.interactive && command.file == "-")
    throw UsageError("--interactive: not with -f -, as stdin has the turns");
  const bool has_lines = command.lines || command.jsonl;
  const bool has_records = has_lines || command.num_samples > 1;
  arguments.refuse_unless(has_lines, {"as-completed"}, "only with --jsonl or --lines");
  arguments.refuse_unless(has_records, {"slots"}, "only with --jsonl, --lines or --num-samples");
  arguments.refuse_unless(has_lines, {"max-line-mb", "max-line-tokens", "max-line-extra-kb"},
                          "only with --jsonl or --lines");
  command.max_line_bytes = static_cast<std::size_t>(arguments.integer("max-line-mb", 16, 1, 2048)) << 20;
  command.max_line_tokens = arguments.integer("max-line-tokens", command.max_line_tokens, 1, std::int64_t{1} << 50);
  command.max_line_extra_bytes =
      static_cast<std::size_t>(arguments.integer("max-line-extra-kb", 16, 0, std::int64_t{1} << 20)) << 10;
  arguments.refuse_unless(command.num_samples == 1, {"state-out"},
                          "not with --num-samples (each sample has a state of its own)");
  arguments.refuse_unless(command.json || has_records, {"logprobs"},
                          "only in JSON (expected --json, --lines, --jsonl or --num-samples)");
  arguments.refuse_unless(command.prefix_cache.has_value(), {"prefix-cache-mb"}, "without --prefix-cache DIR");
}

}  // namespace

const Program& generate_program() {
  static constexpr Program kProgram = {.name = "mmrec-generate",
                                       .does = "continue a prompt with an MM-Rec model",
                                       .operands = "[DIR]",
                                       .head = kHead,
                                       .options = kOptions,
                                       .foot = kFoot};
  return kProgram;
}

std::string unescaped(std::string_view text, std::string_view option) {
  constexpr std::string_view kLetters = "nrte\\\"'\n";
  constexpr std::array<std::string_view, 8> kMeanings = {"\n", "\r", "\t", "\x1b", "\\", "\"", "'", ""};
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\') {
      result += text[i];
      continue;
    }
    const char letter = i + 1 < text.size() ? text[i + 1] : '\0';
    const std::size_t known = kLetters.find(letter);
    if (known != std::string_view::npos && letter != '\0') {
      result += kMeanings[known];
      ++i;
    } else if (unsigned byte = 0; letter == 'x' && text.size() - i > 3 &&
                                  std::from_chars(&text[i + 2], &text[i + 2] + 2, byte, 16).ptr == &text[i + 2] + 2) {
      result += static_cast<char>(byte);
      i += 3;
    } else {
      throw UsageError(
          fmt::format("--{}: unknown escape (found '{}', expected \\n, \\r, \\t, \\e, \\\\, \\\", \\' or \\xHH)",
                      option, printable(text.substr(i, 4))));
    }
  }
  return result;
}

void set_options(const Arguments& arguments, GenerateOptions& options) {
  options.max_tokens = arguments.integer("tokens", options.max_tokens, -1, std::int64_t{1} << 40);
  if (!arguments.has("stop")) return;
  options.stop = arguments.list("stop");
  for (std::string& text : options.stop) {
    if (arguments.has("escape")) text = unescaped(text, "stop");
    if (text.empty() || count_invalid_utf8(text) > 0) {
      refuse_value("stop", text, "UTF-8 of at least one character");
    }
  }
}

GenerateCommand generate_command(const Arguments& arguments) {
  GenerateCommand command;
  read_model_command(arguments, command);
  set_options(arguments, command.options);
  set_sampler(arguments, command.options.sampler);
  command.num_samples = static_cast<int>(arguments.integer("num-samples", 1, 1, 65536));
  command.options.top_logprobs = static_cast<int>(arguments.integer("logprobs", 0, 0, 1000));
  command.slots = static_cast<int>(arguments.integer("slots", 0, 1, 65536));
  command.echo = arguments.has("echo");
  command.json = arguments.has("json");
  command.lines = arguments.has("lines");
  command.jsonl = arguments.file("jsonl");
  command.as_completed = arguments.has("as-completed");
  read_files(arguments, command);
  command.folder = folder_of(arguments);
  if (command.prompt || command.file || command.jsonl) {
    name_files(arguments, generate_program(), command);
  } else {
    name_files(arguments, generate_program(), command, {{{}, "-", Names::kInput}});
  }
  if (command.interactive && command.state_out) {  // for /load
    command.named.push_back({{}, std::filesystem::absolute(*command.state_out).parent_path(), Names::kFolder});
  }
  return command;
}

}  // namespace mmrec::apps
