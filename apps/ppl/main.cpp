// mmrec-ppl: scores documents, whole and exactly or by the windows of other programs, and prints perplexity and the
// field's other measures.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "apps/common/arguments.h"
#include "apps/common/cli.h"
#include "apps/common/model_folder.h"
#include "apps/common/output.h"
#include "apps/common/progress.h"
#include "apps/common/stopwatch.h"
#include "apps/ppl/corpus.h"
#include "apps/ppl/merge.h"
#include "apps/ppl/options.h"
#include "apps/ppl/report.h"
#include "apps/ppl/score.h"
#include "apps/ppl/sinks.h"
#include "mmrec/errors.h"
#include "mmrec/evaluation.h"
#include "mmrec/scorer.h"
#include "mmrec/tokenizer.h"
#include "mmrec/version.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

/// The prefix token of a mode that needs one.
std::optional<int> prefix_of(const PplOptions& options, const std::optional<Tokenizer>& tokenizer) {
  if ((options.windows.mode != WindowMode::kRolling && !options.pairs()) || !tokenizer) return std::nullopt;
  if (const auto prefix = prefix_token(*tokenizer)) return prefix;
  throw RejectedFile(
      fmt::format("{}: --mode rolling puts a token before the first (found neither BOS nor EOS). Try: --mode full",
                  Tokenizer::file_of(options.folder).string()));
}

std::string_view bos_of(const std::optional<Tokenizer>& tokenizer, std::optional<int> prefix) {
  if (!tokenizer) return "given";
  if (prefix) return *prefix == tokenizer->bos_id() ? "added" : "eos";
  return tokenizer->adds_bos() ? "added" : "none";
}

/// How the documents of a model with calls are cut; none of another.
std::optional<std::string_view> scored_calls(const ModelInfo& info, bool whole) {
  const auto calls = calls_of(info);
  if (!calls || !info.variant.bank.value_or(true)) return calls;
  return whole ? "whole" : "stepwise";
}

RunIdentity identity_of(const PplOptions& options, const Loaded& loaded, std::string_view bos) {
  RunIdentity identity = {{"mode", options.pairs() ? "pairs" : to_string(options.windows.mode)}};
  if (options.windows.mode != WindowMode::kFull) identity["window"] = options.windows.window;
  if (options.windows.mode == WindowMode::kStrided) identity["stride"] = options.windows.stride;
  if (const auto calls = scored_calls(loaded.info, options.whole_calls)) identity["calls"] = *calls;
  identity["bos"] = bos;
  identity["prefill_mode"] = kPrefillModeNames[static_cast<std::size_t>(options.run.session.prefill)];
  identity["sweep_tol"] = sweep_tolerance_json(options.run.session);
  identity["max_sweeps"] = options.run.session.max_sweeps;
  identity["precision"] = to_string(loaded.info.precision);
  identity["model"] = hex(loaded.info.fingerprint);
  identity["tokenizer"] = loaded.tokenizer ? Json(hex(loaded.tokenizer->fingerprint())) : Json(nullptr);
  identity["version"] = mmrec::version();
  identity["device"] = place_of(loaded.info);
  return identity;
}

/// What only the summary holds: what the run was made with, and what it cost.
Json details_of(const PplOptions& options, const Loaded& loaded, const PrefillStats& prefill, Json timings) {
  timings["load_s"] = loaded.seconds;
  timings["peak_memory_bytes"] = peak_memory_bytes();
  return {{"model", with_device({{"folder", options.folder.string()},
                                 {"parameters", loaded.info.parameters},
                                 {"fingerprint", hex(loaded.info.fingerprint)}},
                                loaded.info)},
          {"prefill",
           {{"mode", kPrefillModeNames[static_cast<std::size_t>(options.run.session.prefill)]},
            {"sweep_tol", sweep_tolerance_json(options.run.session)},
            {"sweeps_per_token", prefill.sweeps_per_token()},
            {"fallbacks", prefill.fallbacks}}},
          {"batch", options.batch == 0 ? Json(nullptr) : Json(options.batch)},
          {"timings", std::move(timings)}};
}

Corpus corpus_of(const PplOptions& options, const Loaded& loaded, bool has_prefix, Progress& progress,
                 ResumeFilter* resumed = nullptr) {
  CorpusOptions corpus = options.corpus;
  corpus.tokenizer = loaded.tokenizer ? &*loaded.tokenizer : nullptr;
  corpus.has_prefix = has_prefix;
  corpus.parts = options.windows.mode == WindowMode::kFull && !options.pairs();
  corpus.vocab_size = loaded.info.vocab_size;
  corpus.progress = &progress;
  corpus.resumed = resumed;
  return Corpus(std::move(corpus));
}

/// Opened before the work, so that a place that cannot be written to costs no time.
struct Outputs {
  explicit Outputs(const PplOptions& options) {
    const auto open = [](const std::optional<std::string>& path) {
      return path ? std::make_unique<Output>(std::filesystem::path(*path)) : nullptr;
    };
    result = options.resume ? std::make_unique<Output>(*options.output, Output::GoesOn{})
                            : std::make_unique<Output>(options.output.value_or("-"));
    logprobs = open(options.save_logprobs);
    html = open(options.html);
    plot = open(options.plot);
  }
  std::unique_ptr<Output> result, logprobs, html, plot;
};

/// The report, and what else is made of documents. The report comes first.
DocumentSinks sinks_of(const PplOptions& options, const Loaded& loaded, const RunIdentity& identity,
                       const Outputs& outputs, std::unique_ptr<Report> report) {
  DocumentSinks sinks;
  sinks.push_back(std::move(report));
  auto saved = options.compare ? std::make_unique<LineReader>(*options.compare) : nullptr;
  const bool compares = saved && is_distributions(*saved);
  if (compares && (options.windows.mode != WindowMode::kFull || options.whole_calls)) {
    throw UsageError("--compare: distributions are those of --mode full");
  }
  if (saved && !compares) sinks.push_back(token_comparison(std::exchange(saved, nullptr)));
  if (compares || outputs.logprobs) {
    sinks.push_back(distributions(loaded.models.front(), options.run.session, outputs.logprobs.get(), std::move(saved),
                                  loaded.tokenizer ? loaded.tokenizer->fingerprint() : 0));
  }
  if (outputs.html) sinks.push_back(html_page(*outputs.html, loaded.tokenizer, identity));
  if (outputs.plot) sinks.push_back(loss_plot(*outputs.plot));
  return sinks;
}

/// Calls `work`. If that throws, calls `stop`, which ends a line that was begun, and writes out all lines so far.
template <class Work, class Stop>
auto flush_on_error(Output& out, const PplOptions& options, Work&& work, Stop&& stop) {
  try {
    return work();
  } catch (const WriteError&) {
    throw;  // more would stand behind a gap
  } catch (...) {
    stop();
    if (!options.output || options.resume) out.flush();
    throw;
  }
}

int run_pairs(const PplOptions& options, const Loaded& loaded, const RunIdentity& identity, Output& out) {
  const VariantOptions& variant = loaded.info.variant;
  if (variant.calls.value_or(Calls::kStepwise) != Calls::kStepwise && variant.bank.value_or(true)) {
    throw UsageError("--pairs: this model cuts calls otherwise than scores do. Try: --calls stepwise");
  }
  Records records(out, options.format, "pairs", true);
  Progress progress(!options.quiet);
  Corpus corpus = corpus_of(options, loaded, false, progress);
  std::int64_t consumed = 0;
  ScorerOptions scorer{.batch = options.batch, .session = options.run.session, .whole_calls = false, .on_progress = {}};
  scorer.on_progress = [&](std::int64_t tokens, double) {
    progress.update(consumed += tokens, corpus.expected_tokens());
    return interrupt_exit_code() == 0;
  };
  const GracefulScope graceful;
  const Stopwatch watch;
  const PairsDone done = flush_on_error(
      out, options,
      [&] {
        return score_pairs(loaded.models, *loaded.tokenizer, scorer, corpus,
                           [&](const Document& pair, const PairScore& score) {
                             Json record = {{"pair", pair.index},
                                            {"name", pair.name},
                                            {"loglikelihood", score.loglikelihood},
                                            {"is_greedy", *score.is_greedy},
                                            {"tokens", pair.ids.size() - pair.context},
                                            {"context_tokens", pair.context}};
                             record.update(identity);
                             records.add(record);
                           });
      },
      [] {});
  progress.clear();
  const double seconds = watch.seconds();
  if (done.interrupted) {
    if (!options.output) out.flush();
    log_line(fmt::format("interrupted after {} pairs", done.pairs));
    return interrupt_exit_code();
  }
  Json summary = {{"schema", "mmrec-ppl-pairs/1"},       {"count", done.pairs},   {"tokens", done.tokens},
                  {"loglikelihood", done.loglikelihood}, {"greedy", done.greedy}, {"empty_pairs", done.empty}};
  add_identity(summary, identity);
  summary.update(details_of(options, loaded, done.prefill, {{"score_s", seconds}, {"decoded_pairs", done.decoded}}));
  records.finish(summary);
  out.commit();
  if (!options.quiet) {
    log_line(cost_text(loaded.seconds, fmt::format("{} | {} pairs in {:.2f} s, {:.1f} pairs/s", place_of(loaded.info),
                                                   done.pairs, seconds, static_cast<double>(done.pairs) / seconds)));
  }
  return kOk;
}

int run(PplOptions options) {
  const Outputs outputs(options);
  Output& out = *outputs.result;
  const Loaded loaded = load(options, options.corpus.split != Split::kIds);
  const std::optional<int> prefix = prefix_of(options, loaded.tokenizer);
  const std::string_view bos = bos_of(loaded.tokenizer, options.pairs() ? std::nullopt : prefix);
  options.windows.repeats_first = options.windows.mode == WindowMode::kLlama && bos != "none";
  SummaryContext context{.has_text = options.corpus.split != Split::kIds,
                         .scores_all = options.windows.scores_all(),
                         .identity = identity_of(options, loaded, bos)};
  if (options.pairs()) return run_pairs(options, loaded, context.identity, out);

  PerplexityAccumulator sums;
  ResumeFilter resumed(options.resume ? options.output : std::nullopt, context.identity, sums, out);
  auto first = std::make_unique<Report>(out, options.format, options.detail, context.identity, resumed.unended(),
                                        options.resume);
  Report& report = *first;
  const DocumentSinks sinks = sinks_of(options, loaded, context.identity, outputs, std::move(first));
  Progress progress(!options.quiet);
  Corpus corpus = corpus_of(options, loaded, prefix.has_value(), progress, &resumed);
  const GracefulScope graceful;
  const ScorerOptions scorer{
      .batch = options.batch, .session = options.run.session, .whole_calls = options.whole_calls, .on_progress = {}};
  const Scored scored = flush_on_error(
      out, options, [&] { return score_corpus(loaded.models, scorer, options.windows, corpus, progress, sums, sinks); },
      [&] { report.stop(); });
  progress.clear();
  const double rate = scored.seconds > 0.0 ? static_cast<double>(scored.tokens_done) / scored.seconds : 0.0;
  if (scored.interrupted) {
    report.stop();
    if (!options.output || options.resume) out.flush();
    log_line(fmt::format("interrupted after {} tokens{}, ppl so far {:.6g}", scored.tokens_done,
                         corpus.is_at_end() ? fmt::format(" of {}", corpus.tokens()) : "", scored.running.ppl()));
    return interrupt_exit_code();
  }

  resumed.finish();
  require_finite(scored.summary);
  context.empty_docs = scored.empty_docs + resumed.empty();
  context.details = details_of(options, loaded, scored.prefill,
                               {{"read_s", scored.read_seconds}, {"score_s", scored.seconds}, {"tokens_per_s", rate}});
  if (options.corpus.shards > 1)
    context.details["shard"] = fmt::format("{}/{}", options.corpus.shard + 1, options.corpus.shards);
  for (const auto& sink : sinks) {
    const Json differences = sink->differences();
    if (differences.is_null()) continue;
    context.details.update(differences);
    log_line(fmt::format("{}: {}", input_name(*options.compare), dump(differences)));
  }
  const Json summary = summary_json(scored.summary, context);
  report.finish_corpus(summary, corpus.documents());
  for (const auto& sink : sinks) sink->finish(summary);
  out.commit();
  if (scored.summary.tokens == 0) log_line("0 scored tokens: there is no perplexity");
  if (options.quiet) return kOk;
  const std::string sweeps = scored.prefill.token_sweeps == 0
                                 ? std::string()
                                 : fmt::format(", {:.2f} sweeps/token", scored.prefill.sweeps_per_token());
  const std::string ppl = scored.summary.tokens == 0 ? std::string() : fmt::format(" | ppl {:.6g}", scored.summary.ppl);
  log_line(cost_text(loaded.seconds, fmt::format("{} | {} tokens in {:.2f} s, {:.1f} tok/s{}{}", place_of(loaded.info),
                                                 scored.summary.tokens, scored.seconds, rate, sweeps, ppl)));
  return kOk;
}

int ppl_main(const Arguments& arguments) { return run(ppl_options(arguments)); }

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  using namespace mmrec::apps;
  return run_command(ppl_program(), argc, argv, ppl_main, merge_main);
}
