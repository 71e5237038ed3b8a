// mmrec-ppl: scores documents, whole and exactly or by the windows of other programs, and prints perplexity and the
// field's other measures.
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/common/cli.h"
#include "apps/common/model_folder.h"
#include "apps/common/output.h"
#include "apps/common/progress.h"
#include "apps/common/sandbox.h"
#include "apps/common/signals.h"
#include "apps/ppl/compare.h"
#include "apps/ppl/corpus.h"
#include "apps/ppl/distributions.h"
#include "apps/ppl/html.h"
#include "apps/ppl/merge.h"
#include "apps/ppl/options.h"
#include "apps/ppl/pairs.h"
#include "apps/ppl/plot.h"
#include "apps/ppl/report.h"
#include "apps/ppl/score.h"
#include "mmrec/errors.h"
#include "mmrec/evaluation.h"
#include "mmrec/scorer.h"
#include "mmrec/tokenizer.h"
#include "mmrec/version.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr std::string_view kProgram = "mmrec-ppl";

/// The models of a run and the tokenizer that they came with.
struct Loaded {
  std::vector<Model> models;
  ModelInfo info;
  std::optional<Tokenizer> tokenizer;
  double seconds = 0.0;
};

Loaded load(const PplOptions& options) {
  const auto start = Clock::now();
  const Sandbox sandbox(options.sandbox, files_of(options));
  Loaded loaded{.models = load_models(options.folder, options.run), .info = {}, .tokenizer = {}};
  sandbox.loaded();
  loaded.info = info_of(loaded.models);
  if (options.split != Split::kIds) loaded.tokenizer = load_tokenizer(options.folder, loaded.info);
  loaded.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (options.verbose) {
    log_loaded(options.folder, options.run, loaded.info, loaded.tokenizer ? &*loaded.tokenizer : nullptr);
  }
  return loaded;
}

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

std::function<bool(std::int64_t index)> in_shard(const PplOptions& options) {
  if (options.shards == 1) return nullptr;
  return [shard = options.shard, shards = options.shards](std::int64_t index) { return index % shards == shard; };
}

Corpus corpus_of(const PplOptions& options, const Loaded& loaded, bool has_prefix, Progress& progress,
                 std::function<bool(const Document& document)> is_left = nullptr) {
  return Corpus({.files = options.files,
                 .split = options.split,
                 .field = options.field,
                 .tokenizer = loaded.tokenizer ? &*loaded.tokenizer : nullptr,
                 .threads = options.run.session.threads,
                 .has_prefix = has_prefix,
                 .vocab_size = loaded.info.vocab_size,
                 .most_bytes = options.most_bytes,
                 .on_warning =
                     [&progress](std::string_view text) {
                       progress.clear();
                       warn(text);
                     },
                 .on_encoding =
                     [&progress, reading = std::make_shared<std::optional<Progress>>(), quiet = options.quiet](
                         std::size_t bytes, std::size_t all) {
                       if (!*reading) {
                         progress.clear();
                         reading->emplace(Progress::Elsewhere::kLines, !quiet, ProgressUnit::kBytes);
                       }
                       (*reading)->update(static_cast<std::int64_t>(bytes), static_cast<std::int64_t>(all));
                       if (bytes >= all) reading->reset();
                       return interrupt_exit_code() == 0;
                     },
                 .is_wanted = in_shard(options),
                 .is_left = std::move(is_left)});
}

/// What an interrupted run has done, taken for granted as the corpus comes by it.
class Done {
 public:
  Done(Resumed resumed, std::string file, PerplexityAccumulator& sums)
      : resumed_(std::move(resumed)), file_(std::move(file)), sums_(sums) {}

  bool is_left(const Document& document) {
    if (next_ == resumed_.records.size()) {
      check_tail(record_head(document));
      return true;
    }
    const DocumentRecord& record = resumed_.records[next_++];
    // As a record has the name: what is no UTF-8 was replaced.
    const auto id = [](std::int64_t index, const std::string& name, std::string_view hash) {
      return fmt::format("document {} {}, hash {}", index, printable(dump(name)), hash);
    };
    const std::string found = id(record.index, record.name, record.hash);
    const std::string expected = id(document.index, document.name, hex(document.hash));
    if (found != expected) {
      throw RejectedFile(fmt::format("{}:{}: --resume: a record of another document (found {}, expected {})", file_,
                                     next_, found, expected));
    }
    if (!add_record(record, sums_)) ++empty_;
    return false;
  }
  void finish() {
    if (next_ < resumed_.records.size()) {
      throw RejectedFile(fmt::format("{}: --resume: more records than documents (found {}, expected {})", file_,
                                     resumed_.records.size(), next_));
    }
    if (!resumed_.tail.empty()) refuse_tail("the end of the file");
  }
  std::int64_t empty() const { return empty_; }

 private:
  /// Drops the beginning of a record that a killed run left. Refuses any other text.
  void check_tail(std::string_view head) {
    const std::string_view tail = resumed_.tail;
    if (!tail.starts_with(head) && !head.starts_with(tail)) refuse_tail(head);
    resumed_.tail.clear();
  }
  [[noreturn]] void refuse_tail(std::string_view expected) const {
    throw RejectedFile(
        fmt::format("{}:{}: --resume: not the beginning of this run's next record (found {}, expected {})", file_,
                    next_ + 1, printable(resumed_.tail.substr(0, 80)), printable(expected)));
  }

  Resumed resumed_;
  std::string file_;
  PerplexityAccumulator& sums_;
  std::size_t next_ = 0;
  std::int64_t empty_ = 0;
};

/// Opened before the work, so that a place that cannot be written to costs no time.
struct Outputs {
  explicit Outputs(const PplOptions& options) {
    const auto open = [](const std::optional<std::string>& path) {
      return path ? std::make_unique<Output>(std::filesystem::path(*path)) : nullptr;
    };
    result = options.resume ? std::make_unique<Output>(*options.output, Output::GoesOn{}) : open(options.output);
    if (!result) result = std::make_unique<Output>();
    logprobs = open(options.save_logprobs);
    html = open(options.html);
    plot = open(options.plot);
  }
  std::unique_ptr<Output> result, logprobs, html, plot;
};

/// What is made of documents besides the report.
struct Extras {
  Extras(const PplOptions& options, const Loaded& loaded, const RunIdentity& identity, const Outputs& outputs) {
    const DistributionSource source{.model = loaded.info.fingerprint,
                                    .tokenizer = loaded.tokenizer ? loaded.tokenizer->fingerprint() : 0,
                                    .vocab_size = loaded.info.vocab_size};
    if (options.compare && DistributionComparison::is_one(*options.compare)) {
      if (options.windows.mode != WindowMode::kFull || options.whole_calls) {
        throw UsageError("--compare: distributions are those of --mode full");
      }
      divergence.emplace(*options.compare, source);
    } else if (options.compare) {
      comparison.emplace(*options.compare);
    }
    if (outputs.logprobs) saved.emplace(*outputs.logprobs, source);
    if (divergence || saved) distributions.emplace(loaded.models.front(), options.run.session);
    if (outputs.html) html.emplace(*outputs.html, loaded.tokenizer, identity);
    if (outputs.plot) plot = std::make_unique<LossPlot>();
    plot_file = outputs.plot.get();
  }
  void add(const ScoredDocument& scored) {
    if (comparison) comparison->add(scored);
    if (distributions) {
      distributions->of(scored, [&](std::size_t position, int id, std::span<const float> logprobs) {
        if (divergence) divergence->add(scored.document.index, position, id, logprobs);
        if (saved) saved->add(scored.document.index, position, id, logprobs);
      });
    }
    if (html) html->add(scored);
    if (plot) plot->add(scored);
  }
  /// Of --compare.
  std::optional<Json> differences() {
    if (comparison) return comparison->finish();
    if (divergence) return divergence->finish();
    return std::nullopt;
  }
  void finish(const Json& summary) {
    if (saved) saved->commit();
    if (html) html->finish(summary);
    if (!plot) return;
    plot_file->write(
        plot->svg(fmt::format("ppl {} ({} tokens, mode {})",
                              summary["ppl"].is_number() ? fmt::format("{:.6g}", summary["ppl"].get<double>()) : "n/a",
                              dump(summary["tokens"]), summary["mode"].get<std::string>())));
    plot_file->commit();
  }

  std::optional<Comparison> comparison;
  std::optional<DistributionComparison> divergence;
  std::optional<DistributionWriter> saved;
  std::optional<Distributions> distributions;
  std::optional<HtmlReport> html;
  std::unique_ptr<LossPlot> plot;
  Output* plot_file = nullptr;
};

/// Calls `work`; what it has written before it throws is not lost. `stop` ends what is begun.
template <class Work, class Stop>
auto keeping(Output& out, const PplOptions& options, Work&& work, Stop&& stop) {
  try {
    return work();
  } catch (const OutputError&) {
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
  Progress progress(Progress::Elsewhere::kLines, !options.quiet);
  Corpus corpus = corpus_of(options, loaded, false, progress);
  std::int64_t consumed = 0;
  ScorerOptions scorer{.batch = options.batch, .session = options.run.session, .whole_calls = false, .on_progress = {}};
  scorer.on_progress = [&](std::int64_t tokens, double) {
    progress.update(consumed += tokens, corpus.expected_tokens());
    return interrupt_exit_code() == 0;
  };
  const GracefulScope graceful;
  const auto start = Clock::now();
  const PairsDone done = keeping(
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
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
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
    log_line(fmt::format("load {:.3f} s | {} | {} pairs in {:.2f} s, {:.1f} pairs/s | peak {:.1f} MB", loaded.seconds,
                         place_of(loaded.info), done.pairs, seconds, static_cast<double>(done.pairs) / seconds,
                         static_cast<double>(peak_memory_bytes()) * 1e-6));
  }
  return kOk;
}

int run(PplOptions options) {
  const Outputs outputs(options);
  Output& out = *outputs.result;
  const Loaded loaded = load(options);
  const std::optional<int> prefix = prefix_of(options, loaded.tokenizer);
  const std::string_view bos = bos_of(loaded.tokenizer, options.pairs() ? std::nullopt : prefix);
  options.windows.repeats_first = options.windows.mode == WindowMode::kLlama && bos != "none";
  SummaryContext context{.has_text = options.split != Split::kIds,
                         .scores_all = options.windows.scores_all(),
                         .identity = identity_of(options, loaded, bos)};
  if (options.pairs()) return run_pairs(options, loaded, context.identity, out);

  PerplexityAccumulator sums;
  Resumed resumed;
  std::optional<std::int64_t> unended;
  if (options.resume) {
    resumed = read_resumed(*options.output, context.identity);
    out.keep(resumed.keep);
    if (!resumed.records.empty()) unended = resumed.records.back().index;
  }
  Done before(std::move(resumed), options.output.value_or(""), sums);
  Report report(out, options.format, options.detail, context.identity, unended);
  Extras extras(options, loaded, context.identity, outputs);
  Progress progress(Progress::Elsewhere::kLines, !options.quiet);
  Corpus corpus = corpus_of(options, loaded, prefix.has_value(), progress,
                            [&](const Document& document) { return before.is_left(document); });
  const GracefulScope graceful;
  const ScorerOptions scorer{
      .batch = options.batch, .session = options.run.session, .whole_calls = options.whole_calls, .on_progress = {}};
  const Scored scored = keeping(
      out, options,
      [&] {
        return score_corpus(loaded.models, scorer, options.windows, corpus, progress, sums,
                            [&](const ScoredDocument& document) {
                              report.add(document);
                              extras.add(document);
                              if (options.resume) out.flush();
                            });
      },
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

  before.finish();
  require_finite(scored.summary);
  context.empty_docs = scored.empty_docs + before.empty();
  context.details = details_of(options, loaded, scored.prefill,
                               {{"read_s", scored.read_seconds}, {"score_s", scored.seconds}, {"tokens_per_s", rate}});
  if (options.shards > 1) context.details["shard"] = fmt::format("{}/{}", options.shard + 1, options.shards);
  if (const auto differences = extras.differences()) {
    context.details.update(*differences);
    log_line(fmt::format("{}: {}", *options.compare, dump(*differences)));
  }
  const Json summary = summary_json(scored.summary, context);
  report.finish(summary, corpus.documents());
  extras.finish(summary);
  out.commit();
  if (scored.summary.tokens == 0) log_line("0 scored tokens: there is no perplexity");
  if (options.quiet) return kOk;
  const std::string sweeps = scored.prefill.token_sweeps == 0
                                 ? std::string()
                                 : fmt::format(", {:.2f} sweeps/token", scored.prefill.sweeps_per_token());
  const std::string ppl = scored.summary.tokens == 0 ? std::string() : fmt::format(" | ppl {:.6g}", scored.summary.ppl);
  log_line(fmt::format("load {:.3f} s | {} | {} tokens in {:.2f} s, {:.1f} tok/s{}{} | peak {:.1f} MB", loaded.seconds,
                       place_of(loaded.info), scored.summary.tokens, scored.seconds, rate, sweeps, ppl,
                       static_cast<double>(peak_memory_bytes()) * 1e-6));
  return kOk;
}

int ppl_main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "merge") return merge_main(argc - 1, argv + 1);
  const std::vector<Flag> flags = flags_of(ppl_option_table());
  const Arguments arguments(flags, true, argc, argv);
  if (print_help_or_version(arguments, ppl_help(false), ppl_help(true), kProgram)) return kOk;
  return run(ppl_options(arguments));
}

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  return mmrec::apps::run_program("mmrec-ppl", [&] { return mmrec::apps::ppl_main(argc, argv); });
}
