#include "apps/ppl/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace mmrec::apps {
namespace {

constexpr std::string_view kHead = R"(mmrec-ppl book.txt
mmrec-ppl -m DIR corpus.jsonl --format csv -o result.csv
echo "[1, 17, 42]" | mmrec-ppl -m DIR --ids --per-token -

Perplexity of documents, "-" is stdin. Results are on stdout, timings on stderr.
)";

/// A member of each format, `between` two of them, as a constant of the program.
struct JoinedFormats {
  constexpr JoinedFormats(std::string_view ReportFormat::*member, std::string_view between) {
    for (const ReportFormat& format : kReportFormats) {
      if (size > 0) append(between);
      append(format.*member);
    }
  }
  constexpr void append(std::string_view more) {
    for (const char c : more) text[size++] = c;
  }
  constexpr std::string_view view() const { return {text, size}; }
  char text[200] = {};
  std::size_t size = 0;
};
constexpr JoinedFormats kFormatNames(&ReportFormat::name, " ");
constexpr JoinedFormats kFormatHelp(&ReportFormat::help, ", ");

constexpr auto kOptions = std::to_array<Option>({
    {"model", 'm', kModelFolder, "model folder, or DIR before all FILEs (the bundled model)", true},
    {"file", 'f', kInputFile, "a document, as FILE alone; may be repeated", false, {}, true},
    {"ids", 0, kNoValue, "each line is a document of JSON token ids, the first is context only", true},
    {"split-by",
     0,
     {"S", "file line blank jsonl"},
     "a document is: file, line, blank (up to a blank line) or jsonl (of *.jsonl the default)",
     true},
    {"field", 0, {"NAME"}, "what of a JSON line is the text (text)"},
    {"max-text-mb", 0, {"N"}, "longest document and line that are taken (2048 MiB)"},
    {"pairs", 0, kNoValue,
     "log p and is_greedy of the continuation in lines {\"context\": ..., \"continuation\": ...}"},
    {"mode",
     0,
     {"M", "full rolling strided llama"},
     "full, rolling, strided or llama: windows as other programs have",
     true},
    {"window", 0, {"N"}, "tokens of a window (512 for --mode llama)"},
    {"stride", 0, {"N"}, "from window to window of --mode strided (half a window)"},
    {"format", 0, {"F", kFormatNames.view()}, kFormatHelp.view(), true},
    {"per-token", 0, kNoValue, "each token's log-prob, as jsonl, csv or json", true},
    {"per-doc", 0, kNoValue, "each document's figures, likewise"},
    {"output", 'o', kOutputFile, "write the result there, whole or not at all; - is stdout", true},
    {"compare", 0, kInputFile, "differences from log-probs that --per-token (jsonl) or --save-logprobs wrote there"},
    {"save-logprobs", 0, kOutputFile, "log-probs of the whole vocabulary for each token, to --compare: 4 bytes each"},
    {"plot", 0, kOutputFile, "an SVG of loss against position and of documents by loss"},
    {"html", 0, kOutputFile, "the text with each token coloured by its surprise", true},
    {"resume", 0, kNoValue, "go on where a run with the same -o FILE.jsonl ended"},
    {"shard", 0, {"I/N"}, "every Nth document from the Ith (from 1); mmrec-ppl merge FILE... adds up", true},
    kQuietOption,
    kVerboseOption,
    kSandboxOption,
    {"batch", 0, {"N"}, "documents scored together at most (as many as suit the device and its memory)"},
    {"device", 0, {"D", "auto cpu cuda cuda:all"}, "auto, cpu, cuda, cuda:N (GPU N, from 0) or cuda:all", true},
    kPrecisionOption,
    kExpertOption,
    kPrefillOption,
    kSweepTolOption,
    kThreadsOption,
    {"calls",
     0,
     {"C", "stepwise whole"},
     "of mmrec-jax: stepwise (the default), or whole, which sees later tokens and needs --leaky"},
    {"leaky", 0, kNoValue, "with --calls whole: what comes out is no perplexity"},
    kBankOption,
    kHelpOption,
    kHelpAllOption,
    kVersionOption,
});

constexpr std::string_view kMergeHead = R"(mmrec-ppl merge part-1.jsonl part-2.jsonl part-3.jsonl
mmrec-ppl merge --format json -o result.json *.jsonl

Adds up what runs with --format jsonl, such as those of --shard, say of their
documents: the figures of one run over all of them, to the last digit.
)";
constexpr auto kMergeOptions = std::to_array<Option>({
    {"format", 0, {"F", "text json"}, "text or json", true},
    {"output", 'o', kOutputFile, "write the result there, whole or not at all", true},
    kHelpOption,
    kHelpAllOption,
    kVersionOption,
});

constexpr std::array<std::string_view, 4> kSplits = {"file", "line", "blank", "jsonl"};

/// Sets folder and files: a folder that holds a model may be the first argument, in place of -m.
void read_files(const Arguments& arguments, PplOptions& options) {
  options.corpus.files = arguments.list("file");
  std::span<const std::string> rest = arguments.positionals();
  std::error_code ignored;
  if (!rest.empty() && std::filesystem::is_regular_file(std::filesystem::path(rest.front()) / "config.json", ignored)) {
    if (arguments.has("model")) {
      throw UsageError(fmt::format("--model: not with a model folder as the first argument ('{}')", rest.front()));
    }
    options.folder = rest.front();
    rest = rest.subspan(1);
  }
  options.corpus.files.insert(options.corpus.files.end(), rest.begin(), rest.end());
  if (options.corpus.files.empty()) throw UsageError("no documents (expected FILE..., or - for stdin)");
}

void read_input(const Arguments& arguments, PplOptions& options) {
  read_files(arguments, options);
  arguments.refuse_together("ids", {"split-by", "field"});
  arguments.refuse_together("pairs", {"ids", "split-by", "field", "mode", "per-token", "per-doc", "compare",
                                      "save-logprobs", "plot", "html", "leaky"});
  if (arguments.has("split-by")) options.corpus.split = static_cast<Split>(arguments.choice("split-by", kSplits));
  if (arguments.has("ids")) options.corpus.split = Split::kIds;
  if (arguments.has("pairs")) options.corpus.split = Split::kPairs;
  const auto is_jsonl = [&](const std::string& file) { return options.corpus.split_of(file) == Split::kJsonl; };
  arguments.refuse_unless(std::ranges::any_of(options.corpus.files, is_jsonl), {"field"},
                          "only with --split-by jsonl or a FILE.jsonl");
  options.corpus.field = arguments.text("field").value_or("text");
  options.corpus.most_bytes = static_cast<std::size_t>(arguments.integer("max-text-mb", 2048, 1, std::int64_t{1} << 20))
                              << 20;
}

void read_windows(const Arguments& arguments, PplOptions& options) {
  WindowOptions& windows = options.windows;
  windows.mode = static_cast<WindowMode>(arguments.choice("mode", kWindowModeNames));
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  constexpr std::int64_t kLlamaWindow = 512;  // llama-perplexity's own
  const bool llama = windows.mode == WindowMode::kLlama;
  windows.window = arguments.integer("window", llama ? kLlamaWindow : 0,
                                     std::max<std::int64_t>(WindowOptions::least_window(windows.mode), 1), kMost);
  const bool has_windows = windows.mode != WindowMode::kFull;
  if (arguments.has("window") != has_windows && !llama) {
    throw UsageError(has_windows ? fmt::format("--mode {}: needs --window N", to_string(windows.mode))
                                 : "--window: not with --mode full, which has none");
  }
  const bool has_stride = windows.mode == WindowMode::kStrided;
  arguments.refuse_unless(has_stride, {"stride"}, "only with --mode strided");
  if (has_stride) windows.stride = arguments.integer("stride", windows.window / 2, 1, windows.window);
}

void read_report(const Arguments& arguments, PplOptions& options) {
  arguments.refuse_together("per-token", {"per-doc"});
  options.format = kReportFormats[arguments.choice("format", split(kFormatNames.view()))];
  options.detail = arguments.has("per-token") ? ReportDetail::kTokens
                   : arguments.has("per-doc") ? ReportDetail::kDocuments
                                              : ReportDetail::kSummary;
  if (arguments.has("pairs")) options.detail = ReportDetail::kDocuments;
  if (options.detail == ReportDetail::kSummary) return;
  if (!arguments.has("format")) options.format = report_format("jsonl");
  if (options.format.layout == Layout::kSummary && !arguments.has("pairs")) {
    throw UsageError(fmt::format("--{}: not with --format {} (expected a format with records)",
                                 arguments.has("per-token") ? "per-token" : "per-doc", options.format.name));
  }
}

// Both must be given: the result looks like a perplexity and is not one.
bool scores_whole_calls(const Arguments& arguments, const RunOptions& run) {
  if (run.variant.calls == Calls::kPrompt) {
    throw UsageError("--calls prompt: not for scores (expected stepwise, or whole and --leaky)");
  }
  const bool whole = run.variant.calls == Calls::kWhole;
  if (whole && !arguments.has("leaky")) {
    throw UsageError(
        "--calls whole: log-probs would be given later tokens too, which is no perplexity (expected --leaky)");
  }
  arguments.refuse_unless(whole, {"leaky"}, "only with --calls whole");
  return whole;
}

void read_parts(const Arguments& arguments, PplOptions& options) {
  if (const auto shard = arguments.text("shard")) {
    const auto parts = split(*shard, "/");
    const auto number = parse_integer(parts.empty() ? "" : parts.front());
    const auto of = parse_integer(parts.size() == 2 ? parts.back() : "");
    if (!number || !of || *number < 1 || *of < *number) {
      refuse_value("shard", *shard, "I/N with 1 <= I <= N");
    }
    options.corpus.shard = *number - 1;
    options.corpus.shards = *of;
  }
  options.compare = arguments.file("compare");
  options.save_logprobs = arguments.file("save-logprobs");
  options.plot = arguments.file("plot");
  options.html = arguments.file("html");
  options.resume = arguments.has("resume");
  arguments.refuse_together("resume", {"compare", "save-logprobs", "plot", "html"});
  if (options.save_logprobs && (options.windows.mode != WindowMode::kFull || arguments.has("leaky"))) {
    throw UsageError(fmt::format("--save-logprobs: not with {} (expected each token given all before it)",
                                 arguments.has("leaky") ? "--leaky" : "--mode"));
  }
  const bool has_records = options.format.layout == Layout::kLines && options.detail != ReportDetail::kTokens;
  if (options.resume && (!has_records || !options.output || options.pairs())) {
    throw UsageError("--resume: only with -o FILE and a line of JSON a document (--format jsonl)");
  }
}

}  // namespace

const Program& merge_program() {
  static constexpr Program kProgram = {.name = "mmrec-ppl merge",
                                       .does = "add up records of documents",
                                       .operands = "FILE...",
                                       .head = kMergeHead,
                                       .options = kMergeOptions};
  return kProgram;
}

const Program& ppl_program() {
  static const Program program = {.name = "mmrec-ppl",
                                  .does = "perplexity of documents under an MM-Rec model",
                                  .operands = "[DIR] FILE...",
                                  .head = kHead,
                                  .options = kOptions,
                                  .subcommand = &merge_program()};
  return program;
}

PplOptions ppl_options(const Arguments& arguments) {
  PplOptions options;
  read_model_command(arguments, options);
  options.corpus.threads = options.run.session.threads;
  options.corpus.quiet = options.quiet;
  options.whole_calls = scores_whole_calls(arguments, options.run);
  options.batch = static_cast<int>(arguments.integer("batch", 0, 1, 65536));
  read_report(arguments, options);
  read_windows(arguments, options);
  read_input(arguments, options);
  read_parts(arguments, options);
  if (options.folder.empty()) options.folder = model_folder(arguments);
  name_files(arguments, ppl_program(), options);
  if (options.resume) options.named.push_back({{}, *options.output, Names::kInput});
  return options;
}

}  // namespace mmrec::apps
