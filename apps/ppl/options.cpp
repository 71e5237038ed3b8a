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

constexpr auto kOptions = std::to_array<Option>({
    {{"model", 'm'}, "DIR", "model folder, or DIR before all FILEs (the bundled model)", true, "", Names::kInput},
    {{"file", 'f', true, true}, "FILE", "a document, as FILE alone; may be repeated", false, "", Names::kInput},
    {{"ids", 0, false}, "", "each line is a document of JSON token ids, the first is context only", true},
    {{"split-by"},
     "S",
     "a document is: file, line, blank (up to a blank line) or jsonl (of *.jsonl the default)",
     true,
     "file line blank jsonl"},
    {{"field"}, "NAME", "what of a JSON line is the text (text)"},
    {{"max-text-mb"}, "N", "longest document and line that are taken (2048 MiB)"},
    {{"pairs", 0, false},
     "",
     "log p and is_greedy of the continuation in lines {\"context\": ..., \"continuation\": ...}"},
    {{"mode"},
     "M",
     "full, rolling, strided or llama: windows as other programs have",
     true,
     "full rolling strided llama"},
    {{"window"}, "N", "tokens of a window (512 for --mode llama)", false},
    {{"stride"}, "N", "from window to window of --mode strided (half a window)", false},
    {{"format"}, "F", "text, json (one object), jsonl or csv (a line a document)", true, "text json jsonl csv"},
    {{"per-token", 0, false}, "", "each token's log-prob, as jsonl, csv or json", true},
    {{"per-doc", 0, false}, "", "each document's figures, likewise"},
    {{"output", 'o'}, "FILE", "write the result there, whole or not at all; - is stdout", true, "", Names::kOutput},
    {{"compare"},
     "FILE",
     "differences from log-probs that --per-token (jsonl) or --save-logprobs wrote there",
     false,
     "",
     Names::kInput},
    {{"save-logprobs"},
     "FILE",
     "log-probs of the whole vocabulary for each token, to --compare: 4 bytes each",
     false,
     "",
     Names::kOutput},
    {{"plot"}, "FILE", "an SVG of loss against position and of documents by loss", false, "", Names::kOutput},
    {{"html"}, "FILE", "the text with each token coloured by its surprise", true, "", Names::kOutput},
    {{"resume", 0, false}, "", "go on where a run with the same -o FILE.jsonl ended"},
    {{"shard"}, "I/N", "every Nth document from the Ith (from 1); mmrec-ppl merge FILE... adds up", true},
    {{"quiet", 'q', false}, "", "no progress and no timings"},
    {{"verbose", 'v', false}, "", "say what was loaded, where it runs and why"},
    kSandboxOption,
    {{"batch"}, "N", "documents scored together at most (as many as suit the device and its memory)"},
    {{"device"}, "D", "auto, cpu, cuda, cuda:N (GPU N, from 0) or cuda:all", true, "auto cpu cuda cuda:all"},
    kPrecisionOption,
    kExpertOption,
    kPrefillOption,
    kSweepTolOption,
    kThreadsOption,
    {{"calls"},
     "C",
     "of mmrec-jax: stepwise (the default), or whole, which sees later tokens and needs --leaky",
     false,
     "stepwise whole"},
    {{"leaky", 0, false}, "", "with --calls whole: what comes out is no perplexity"},
    kBankOption,
    kHelpOption,
    kHelpAllOption,
    kVersionOption,
});
static_assert(names_are_complete(kOptions));

constexpr std::string_view kMergeHead = R"(mmrec-ppl merge part-1.jsonl part-2.jsonl part-3.jsonl
mmrec-ppl merge --format json -o result.json *.jsonl

Adds up what runs with --format jsonl, such as those of --shard, say of their
documents: the figures of one run over all of them, to the last digit.
)";
constexpr auto kMergeOptions = std::to_array<Option>({
    {{"format"}, "F", "text or json", true, "text json"},
    {{"output", 'o'}, "FILE", "write the result there, whole or not at all", true, "", Names::kOutput},
    {{"help", 'h', false}, "", "this page; --version", true},
    {{"version", 0, false}},
});
static_assert(names_are_complete(kMergeOptions));

constexpr std::array<std::string_view, 4> kFormats = {"text", "json", "jsonl", "csv"};
constexpr std::array<std::string_view, 4> kSplits = {"file", "line", "blank", "jsonl"};

/// Sets folder and files: a folder that holds a model may be the first argument, in place of -m.
void read_files(const Arguments& arguments, PplOptions& options) {
  options.files = arguments.list("file");
  std::span<const std::string> rest = arguments.positionals();
  std::error_code ignored;
  if (!rest.empty() && std::filesystem::is_regular_file(std::filesystem::path(rest.front()) / "config.json", ignored)) {
    if (arguments.has("model")) {
      throw UsageError(fmt::format("--model: not with a model folder as the first argument ('{}')", rest.front()));
    }
    options.folder = rest.front();
    rest = rest.subspan(1);
  }
  options.files.insert(options.files.end(), rest.begin(), rest.end());
  if (options.files.empty()) throw UsageError("no documents (expected FILE..., or - for stdin)");
  if (std::count(options.files.begin(), options.files.end(), "-") > 1) throw UsageError("-: given more than once");
}

void refuse_together(const Arguments& arguments, std::string_view one, std::string_view other) {
  if (arguments.has(one) && arguments.has(other)) throw UsageError(fmt::format("--{}: not with --{}", one, other));
}

void read_input(const Arguments& arguments, PplOptions& options) {
  read_files(arguments, options);
  refuse_together(arguments, "ids", "split-by");
  refuse_together(arguments, "ids", "field");
  for (const std::string_view other : {"ids", "split-by", "field", "mode", "per-token", "per-doc", "compare",
                                       "save-logprobs", "plot", "html", "leaky"}) {
    refuse_together(arguments, "pairs", other);
  }
  if (arguments.has("split-by")) options.split = static_cast<Split>(arguments.choice("split-by", kSplits));
  if (arguments.has("ids")) options.split = Split::kIds;
  if (arguments.has("pairs")) options.split = Split::kPairs;
  options.field = arguments.text("field").value_or("text");
  options.most_bytes = static_cast<std::size_t>(arguments.integer("max-text-mb", 2048, 1, std::int64_t{1} << 20)) << 20;
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
  if (windows.mode == WindowMode::kStrided) {
    windows.stride = arguments.integer("stride", windows.window / 2, 1, windows.window);
  } else if (arguments.has("stride")) {
    throw UsageError("--stride: only with --mode strided");
  }
}

void read_report(const Arguments& arguments, PplOptions& options) {
  refuse_together(arguments, "per-token", "per-doc");
  options.format = static_cast<ReportFormat>(arguments.choice("format", kFormats));
  options.detail = arguments.has("per-token") ? ReportDetail::kTokens
                   : arguments.has("per-doc") ? ReportDetail::kDocuments
                                              : ReportDetail::kSummary;
  options.output = arguments.file("output");
  if (options.output == "-") options.output.reset();
  refuse_together(arguments, "quiet", "verbose");
  options.quiet = arguments.has("quiet");
  options.verbose = arguments.has("verbose");
  options.sandbox = arguments.has("sandbox");
  if (arguments.has("pairs")) options.detail = ReportDetail::kDocuments;
  if (options.detail == ReportDetail::kSummary) return;
  if (!arguments.has("format")) options.format = ReportFormat::kJsonl;
  if (options.format == ReportFormat::kText && !arguments.has("pairs")) {
    throw UsageError(fmt::format("--{}: not with --format text (expected json, jsonl or csv)",
                                 arguments.has("per-token") ? "per-token" : "per-doc"));
  }
}

// Both must be said: what comes out looks like a perplexity and is none.
bool scores_whole_calls(const Arguments& arguments, const RunOptions& run) {
  const bool leaky = arguments.has("leaky");
  if (run.variant.calls == Calls::kPrompt) {
    throw UsageError("--calls prompt: not for scores (expected stepwise, or whole and --leaky)");
  }
  const bool whole = run.variant.calls == Calls::kWhole;
  if (whole && !leaky) {
    throw UsageError(
        "--calls whole: log-probs would be given later tokens too, which is no perplexity (expected --leaky)");
  }
  if (leaky && !whole) throw UsageError("--leaky: only with --calls whole");
  return whole;
}

void read_parts(const Arguments& arguments, PplOptions& options) {
  if (const auto shard = arguments.text("shard")) {
    const std::size_t slash = std::min(shard->find('/'), shard->size());
    const auto number = parse_integer(std::string_view(*shard).substr(0, slash));
    const auto of = parse_integer(std::string_view(*shard).substr(std::min(slash + 1, shard->size())));
    if (!number || !of || *number < 1 || *of < *number) {
      throw UsageError(
          fmt::format("--shard: not a valid value (found '{}', expected I/N with 1 <= I <= N)", printable(*shard)));
    }
    options.shard = *number - 1;
    options.shards = *of;
  }
  options.compare = arguments.file("compare");
  options.save_logprobs = arguments.file("save-logprobs");
  options.plot = arguments.file("plot");
  options.html = arguments.file("html");
  options.resume = arguments.has("resume");
  for (const std::string_view other : {"compare", "save-logprobs", "plot", "html"})
    refuse_together(arguments, "resume", other);
  if (options.save_logprobs && (options.windows.mode != WindowMode::kFull || arguments.has("leaky"))) {
    throw UsageError(fmt::format("--save-logprobs: not with {} (expected each token given all before it)",
                                 arguments.has("leaky") ? "--leaky" : "--mode"));
  }
  const bool has_records = options.format == ReportFormat::kJsonl && options.detail != ReportDetail::kTokens;
  if (options.resume && (!has_records || !options.output || options.pairs())) {
    throw UsageError("--resume: only with -o FILE and a line of JSON a document (--format jsonl)");
  }
}

}  // namespace

std::span<const Option> merge_option_table() { return kMergeOptions; }
std::string merge_help() { return help_page(kMergeHead, kMergeOptions, true); }

std::span<const Option> ppl_option_table() { return kOptions; }
std::string ppl_help(bool all) { return help_page(kHead, kOptions, all); }

PplOptions ppl_options(const Arguments& arguments) {
  PplOptions options;
  options.run = run_options(arguments);
  options.whole_calls = scores_whole_calls(arguments, options.run);
  options.batch = static_cast<int>(arguments.integer("batch", 0, 1, 65536));
  read_report(arguments, options);
  read_windows(arguments, options);
  read_input(arguments, options);
  read_parts(arguments, options);
  if (options.folder.empty()) options.folder = model_folder(arguments);
  options.named = named_files(arguments, kOptions);
  options.named.push_back({{}, options.folder, Names::kInput});
  refuse_lost_files(options.named);
  return options;
}

SandboxFiles files_of(const PplOptions& options) {
  SandboxFiles files = sandbox_files(options.named, options.folder, may_use_gpu(options.run));
  if (options.resume) files.readable.emplace_back(*options.output);
  return files;
}

}  // namespace mmrec::apps
