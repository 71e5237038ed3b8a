// mmrec-ppl: scores whole documents exactly, each token once, and prints perplexity and the field's other measures.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "apps/cli.h"
#include "apps/input.h"
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
      --device D       auto, cpu, cuda, or cuda:N for GPU N, from 0
      --precision P    auto, fp32, bf16 or fp16
      --prefill M      auto, sweeps or steps; --sweep-tol X: tolerance (auto)
      --threads N      threads of the CPU (0: all)
  -h, --help           this page; --version
)";

constexpr std::array kFlags = {
    Flag{"model", 'm'},        Flag{"ids", 0, false}, Flag{"format"},    Flag{"per-token", 0, false},
    Flag{"output", 'o'},       Flag{"batch"},         Flag{"device"},    Flag{"precision"},
    Flag{"threads"},           Flag{"prefill"},       Flag{"sweep-tol"}, Flag{"help", 'h', false},
    Flag{"version", 0, false},
};

// Documents are scored in groups: enough of them to fill batches with similar lengths, few enough that log-probs are
// written out before they add up.
constexpr std::size_t kGroupDocuments = 1024;
constexpr std::size_t kGroupTokens = std::size_t{1} << 22;

struct Corpus {
  std::vector<Document> documents;
  std::vector<std::vector<int>> ids;  // of each document, while they wait to be scored

  std::int64_t scored_tokens() const {
    std::int64_t tokens = 0;
    for (const auto& document : ids) tokens += std::max<std::int64_t>(std::ssize(document) - 1, 0);
    return tokens;
  }
};

std::vector<std::string> input_files(const Arguments& arguments) {
  const auto& files = arguments.positionals();
  if (files.empty()) throw UsageError("no documents (expected FILE..., or - for stdin)");
  if (std::count(files.begin(), files.end(), "-") > 1) throw UsageError("-: given more than once");
  return files;
}

Corpus read_corpus(const std::vector<std::string>& files, const Tokenizer* tokenizer, const ModelInfo& info) {
  Corpus corpus;
  for (const std::string& file : files) {
    const std::string text = read_input(file);
    const std::string name = input_name(file);
    if (tokenizer == nullptr) {
      for (IdDocument& document : parse_id_lines(text, name, info.vocab_size)) {
        corpus.documents.push_back({std::move(document.name), {}, -1, -1});
        corpus.ids.push_back(std::move(document.ids));
      }
      continue;
    }
    if (const auto runs = count_invalid_utf8(text); runs > 0) {
      warn(fmt::format("{}: {} places are no UTF-8 and are read as U+FFFD", name, runs));
    }
    corpus.documents.push_back({name, {}, std::ssize(text), count_words(text)});
    corpus.ids.push_back(tokenizer->encode(text));
  }
  return corpus;
}

void check_finite(const Document& document, const DocumentScore& score) {
  for (std::size_t i = 0; i < score.logprobs.size(); ++i) {
    if (!std::isfinite(score.logprobs[i])) {
      throw NumericError(
          fmt::format("{}: log-prob of token {} is not finite (found {})", document.name, i + 1, score.logprobs[i]));
    }
  }
}

std::size_t group_end(const Corpus& corpus, std::size_t first) {
  std::size_t tokens = 0;
  std::size_t end = first;
  while (end < corpus.ids.size() && end - first < kGroupDocuments && (end == first || tokens < kGroupTokens)) {
    tokens += corpus.ids[end++].size();
  }
  return end;
}

struct Scored {
  PerplexitySummary summary;
  std::int64_t empty_docs = 0;
  PrefillStats prefill;
  bool interrupted = false;
  std::int64_t tokens_done = 0;  // these two also count what was interrupted
  double nll_done = 0.0;

  double running_ppl() const { return std::exp(nll_done / static_cast<double>(tokens_done)); }
};

// One line each for the first few; the summary counts them all.
void report_empty(const Document& document, std::int64_t count) {
  constexpr std::int64_t kMost = 10;
  if (count <= kMost) warn(fmt::format("{}: 0 scored tokens", document.name));
  if (count == kMost) warn("further documents with 0 scored tokens are counted only");
}

Scored score_corpus(const Model& model, ScorerOptions options, Corpus& corpus, Report& report) {
  Scored scored;
  Progress progress(corpus.scored_tokens());
  options.on_progress = [&](std::int64_t tokens, double nll) {
    scored.tokens_done += tokens;
    scored.nll_done += nll;
    progress.update(scored.tokens_done, scored.running_ppl());
    return interrupt_exit_code() == 0;
  };
  Scorer scorer(model, options);
  PerplexityAccumulator accumulator;
  for (std::size_t first = 0; first < corpus.ids.size() && !scored.interrupted;) {
    const std::size_t end = group_end(corpus, first);
    const std::vector<DocumentScore> scores = scorer.score(std::span(corpus.ids).subspan(first, end - first));
    for (std::size_t i = first; i < end && i - first < scores.size(); ++i) {
      const DocumentScore& score = scores[i - first];
      if (!score.complete) {
        scored.interrupted = true;
        break;
      }
      Document& document = corpus.documents[i];
      document.ids = std::move(corpus.ids[i]);
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
      document.ids = {};
    }
    scored.interrupted = scored.interrupted || interrupt_exit_code() != 0;
    first = end;
  }
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

int ppl_main(int argc, char** argv) {
  const Arguments arguments(kFlags, true, argc, argv);
  if (print_help_or_version(arguments, kHelp, kProgram)) return kOk;

  const RunOptions run = run_options(arguments);
  ScorerOptions options;
  options.session = run.session;
  options.batch = static_cast<int>(arguments.integer("batch", 0, 1, 65536));
  const ReportFormat format = report_format(arguments);
  const std::vector<std::string> files = input_files(arguments);
  const std::filesystem::path folder = model_folder(arguments);
  const bool as_ids = arguments.has("ids");
  // Made before the work, so that a place that cannot be written to costs no time.
  const auto out =
      arguments.has("output") ? std::make_unique<Output>(*arguments.text("output")) : std::make_unique<Output>();
  Report report(*out, format, arguments.has("per-token"));

  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  const auto start = Clock::now();
  const Model model = load_model(folder, run);
  std::optional<Tokenizer> tokenizer;
  if (!as_ids) tokenizer = load_tokenizer(folder, model.info());
  const auto loaded = Clock::now();
  Corpus corpus = read_corpus(files, tokenizer ? &*tokenizer : nullptr, model.info());

  const std::int64_t total = corpus.scored_tokens();
  const GracefulScope graceful;
  const auto scoring = Clock::now();
  const Scored scored = score_corpus(model, options, corpus, report);
  const double score_seconds = seconds(Clock::now() - scoring);
  const double rate = score_seconds > 0.0 ? static_cast<double>(scored.tokens_done) / score_seconds : 0.0;
  if (scored.interrupted) {
    if (!arguments.has("output")) out->flush();
    log_line(fmt::format("interrupted after {} of {} tokens, ppl so far {:.6g}", scored.tokens_done, total,
                         scored.running_ppl()));
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
                                            {"parameters", model.info().parameters},
                                            {"fingerprint", hex(model.info().fingerprint)}},
                                           model.info())},
                     {"prefill",
                      {{"mode", prefill_names()[static_cast<std::size_t>(run.session.prefill)]},
                       {"sweep_tol", sweep_tolerance_json(run.session)},
                       {"sweeps_per_token", scored.prefill.sweeps_per_token()},
                       {"fallbacks", scored.prefill.fallbacks}}},
                     {"batch", options.batch == 0 ? Json(nullptr) : Json(options.batch)},
                     {"timings",
                      {{"load_s", seconds(loaded - start)},
                       {"score_s", score_seconds},
                       {"tokens_per_s", rate},
                       {"peak_memory_bytes", peak_memory_bytes()}}}};
  report.finish(scored.summary, context);
  out->commit();
  if (scored.summary.tokens == 0) log_line("0 scored tokens: there is no perplexity");
  log_line(fmt::format(
      "load {:.3f} s | {} | {} tokens in {:.2f} s, {:.1f} tok/s, {:.2f} sweeps/token | ppl {:.6g} | peak {:.1f} MB",
      seconds(loaded - start), place_of(model.info()), scored.summary.tokens, score_seconds, rate,
      scored.prefill.sweeps_per_token(), scored.summary.ppl, static_cast<double>(peak_memory_bytes()) * 1e-6));
  return kOk;
}

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  return mmrec::apps::run_program("mmrec-ppl", [&] { return mmrec::apps::ppl_main(argc, argv); });
}
