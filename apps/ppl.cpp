// mmrec-ppl: scores whole documents exactly, each token once, and prints perplexity and the field's other measures.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <deque>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/cli.h"
#include "apps/corpus.h"
#include "apps/model_folder.h"
#include "apps/output.h"
#include "apps/ppl_report.h"
#include "apps/progress.h"
#include "apps/signals.h"
#include "mmrec/errors.h"
#include "mmrec/scorer.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

constexpr std::string_view kProgram = "mmrec-ppl";

constexpr std::string_view kHelp = R"(mmrec-ppl book.txt
mmrec-ppl -m DIR a.txt b.txt --format json -o result.json
echo "[1, 17, 42]" | mmrec-ppl -m DIR --ids --per-token -

Scores whole documents, each token once and given all before it. Every FILE is
one document, "-" is stdin. The result is on stdout, timings are on stderr.
  -m, --model DIR      model folder (default: the bundled model)
      --ids            lines of JSON token ids instead of text; each line is a
                       document, its first id is context only
      --format F       text, json (one summary object) or jsonl (a line per
                       document)
      --per-token      each token's log-prob: in jsonl (the default then) a line
                       per token, in json an entry of `documents`
  -o, --output FILE    write the result there, whole or not at all
      --batch N        documents scored together at most (as many as suit the
                       device and its memory)
      --device D       auto, cpu, cuda, cuda:N (GPU N, from 0) or cuda:all
      --precision P    auto, fp32, bf16 or fp16
      --prefill M      auto, sweeps or steps; --sweep-tol X: tolerance (auto)
      --threads N      threads of the CPU (0: all)
      --calls C        mmrec-jax: stepwise (the default), or whole calls, which
                       see later tokens: no perplexity, so only with --leaky;
      --bank B         true or false: whether it writes a memory bank
  -h, --help           this page; --version
)";

constexpr std::array kFlags = {
    Flag{"model", 'm'},      Flag{"ids", 0, false}, Flag{"format"},           Flag{"per-token", 0, false},
    Flag{"output", 'o'},     Flag{"batch"},         Flag{"device"},           Flag{"precision"},
    Flag{"threads"},         Flag{"prefill"},       Flag{"sweep-tol"},        Flag{"calls"},
    Flag{"leaky", 0, false}, Flag{"bank"},          Flag{"help", 'h', false}, Flag{"version", 0, false},
};

std::vector<std::string> input_files(const Arguments& arguments) {
  const auto& files = arguments.positionals();
  if (files.empty()) throw UsageError("no documents (expected FILE..., or - for stdin)");
  if (std::count(files.begin(), files.end(), "-") > 1) throw UsageError("-: given more than once");
  return files;
}

void check_finite(const Document& document, const DocumentScore& score) {
  for (std::size_t i = 0; i < score.logprobs.size(); ++i) {
    if (!std::isfinite(score.logprobs[i])) {
      throw NumericError(
          fmt::format("{}: log-prob of token {} is not finite (found {})", document.name, i + 1, score.logprobs[i]));
    }
  }
}

struct Scored {
  PerplexitySummary summary;
  std::int64_t empty_docs = 0;
  PrefillStats prefill;
  bool interrupted = false;
  std::int64_t tokens_done = 0;  // these two also count what was interrupted
  double nll_done = 0.0;
  double seconds = 0.0;       // without those in which the only device had nothing to score
  double read_seconds = 0.0;  // for documents to be read and tokenized

  double running_ppl() const { return std::exp(nll_done / static_cast<double>(tokens_done)); }
};

// One line each for the first few; the summary counts them all.
void report_empty(const Document& document, std::int64_t count) {
  constexpr std::int64_t kMost = 10;
  if (count <= kMost) warn(fmt::format("{}: 0 scored tokens", document.name));
  if (count == kMost) warn("further documents with 0 scored tokens are counted only");
}

Scored score_corpus(const std::vector<Model>& models, ScorerOptions options, Corpus& corpus, Progress& progress,
                    Report& report) {
  Scored scored;
  options.on_progress = [&](std::int64_t tokens, double nll) {
    scored.tokens_done += tokens;
    scored.nll_done += nll;
    progress.update(scored.tokens_done, corpus.expected_tokens(), scored.running_ppl());
    return interrupt_exit_code() == 0;
  };
  Scorer scorer(models, options);
  PerplexityAccumulator accumulator;
  std::deque<Document> read_ahead;  // without their ids, which the scorer has
  const auto next = [&](std::vector<int>& ids) {
    const auto start = Clock::now();
    std::optional<Document> document = corpus.next();
    if (document) {
      ids = std::exchange(document->ids, {});
      read_ahead.push_back(std::move(*document));
    }
    scored.read_seconds += seconds_between(start, Clock::now());
    return document.has_value();
  };
  const auto on_score = [&](std::size_t /*number*/, std::vector<int>& ids, const DocumentScore& score) {
    Document document = std::move(read_ahead.front());
    read_ahead.pop_front();
    document.ids = std::move(ids);
    check_finite(document, score);
    const bool empty = score.logprobs.empty();
    if (empty) {
      progress.clear();
      report_empty(document, ++scored.empty_docs);
    }
    // A document without a scored token is counted and otherwise left out: its bytes would dilute bits per byte.
    accumulator.add(score, empty ? 0 : std::max<std::int64_t>(document.bytes, 0),
                    empty ? 0 : std::max<std::int64_t>(document.words, 0));
    report.add(document, score);
    return true;
  };
  const auto start = Clock::now();
  scored.interrupted = !scorer.score_stream(next, on_score) || interrupt_exit_code() != 0;
  scored.seconds = seconds_between(start, Clock::now());
  if (models.size() == 1) scored.seconds -= scored.read_seconds;  // several are at work meanwhile
  scored.summary = accumulator.summary();
  scored.prefill = scorer.prefill_stats();
  return scored;
}

ReportFormat report_format(const Arguments& arguments) {
  constexpr std::array<std::string_view, 3> kNames = {"text", "json", "jsonl"};
  const bool per_token = arguments.has("per-token");
  if (per_token && !arguments.has("format")) return ReportFormat::kJsonl;
  const auto format = static_cast<ReportFormat>(arguments.choice("format", kNames));
  if (per_token && format == ReportFormat::kText) {
    throw UsageError("--per-token: not with --format text (expected json or jsonl)");
  }
  return format;
}

// Whether log-probs may be given later tokens. Both must be said: what comes out looks like a perplexity and is none.
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

// How the documents of a model with calls were cut; none of another.
std::optional<std::string_view> scored_calls(const ModelInfo& info, bool whole) {
  const auto calls = calls_of(info);
  if (!calls || !info.variant.bank.value_or(true)) return calls;
  return whole ? "whole" : "stepwise";
}

int ppl_main(int argc, char** argv) {
  const Arguments arguments(kFlags, true, argc, argv);
  if (print_help_or_version(arguments, kHelp, kProgram)) return kOk;

  const RunOptions run = run_options(arguments);
  ScorerOptions options;
  options.session = run.session;
  options.whole_calls = scores_whole_calls(arguments, run);
  options.batch = static_cast<int>(arguments.integer("batch", 0, 1, 65536));
  const ReportFormat format = report_format(arguments);
  const std::vector<std::string> files = input_files(arguments);
  const std::filesystem::path folder = model_folder(arguments);
  const bool as_ids = arguments.has("ids");
  // Made before the work, so that a place that cannot be written to costs no time.
  const auto out =
      arguments.has("output") ? std::make_unique<Output>(*arguments.text("output")) : std::make_unique<Output>();
  const auto start = Clock::now();
  const std::vector<Model> models = load_models(folder, run);
  const ModelInfo info = info_of(models);
  const std::optional<std::string_view> calls = scored_calls(info, options.whole_calls);
  Report report(*out, format, arguments.has("per-token"), calls);
  std::optional<Tokenizer> tokenizer;
  if (!as_ids) tokenizer = load_tokenizer(folder, info);
  const double load_seconds = seconds_between(start, Clock::now());

  Progress progress;
  Corpus corpus(files, tokenizer ? &*tokenizer : nullptr, info.vocab_size, [&](std::string_view text) {
    progress.clear();
    warn(text);
  });
  const GracefulScope graceful;
  const Scored scored = score_corpus(models, options, corpus, progress, report);
  progress.clear();
  const double rate = scored.seconds > 0.0 ? static_cast<double>(scored.tokens_done) / scored.seconds : 0.0;
  if (scored.interrupted) {
    if (!arguments.has("output")) out->flush();
    log_line(fmt::format("interrupted after {} tokens{}, ppl so far {:.6g}", scored.tokens_done,
                         corpus.is_at_end() ? fmt::format(" of {}", corpus.tokens()) : "", scored.running_ppl()));
    return interrupt_exit_code();
  }

  SummaryContext context;
  context.has_text = !as_ids;
  context.empty_docs = scored.empty_docs;
  context.details = {{"mode", "full"},
                     {"bos", as_ids                  ? "given"
                             : tokenizer->adds_bos() ? "added"
                                                     : "none"},
                     {"tokenizer_fingerprint", tokenizer ? Json(hex(tokenizer->fingerprint())) : Json(nullptr)},
                     {"model", with_device({{"folder", folder.string()},
                                            {"parameters", info.parameters},
                                            {"fingerprint", hex(info.fingerprint)}},
                                           info)},
                     {"prefill",
                      {{"mode", prefill_names()[static_cast<std::size_t>(run.session.prefill)]},
                       {"sweep_tol", sweep_tolerance_json(run.session)},
                       {"sweeps_per_token", scored.prefill.sweeps_per_token()},
                       {"fallbacks", scored.prefill.fallbacks}}},
                     {"batch", options.batch == 0 ? Json(nullptr) : Json(options.batch)},
                     {"timings",
                      {{"load_s", load_seconds},
                       {"read_s", scored.read_seconds},
                       {"score_s", scored.seconds},
                       {"tokens_per_s", rate},
                       {"peak_memory_bytes", peak_memory_bytes()}}}};
  report.finish(scored.summary, context);
  out->commit();
  if (scored.summary.tokens == 0) log_line("0 scored tokens: there is no perplexity");
  log_line(fmt::format(
      "load {:.3f} s | {} | {} tokens in {:.2f} s, {:.1f} tok/s, {:.2f} sweeps/token | ppl {:.6g} | peak {:.1f} MB",
      load_seconds, place_of(info), scored.summary.tokens, scored.seconds, rate, scored.prefill.sweeps_per_token(),
      scored.summary.ppl, static_cast<double>(peak_memory_bytes()) * 1e-6));
  return kOk;
}

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  return mmrec::apps::run_program("mmrec-ppl", [&] { return mmrec::apps::ppl_main(argc, argv); });
}
