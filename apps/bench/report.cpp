// What mmrec-bench prints of its runs.
#include "apps/bench/run.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/cpu/thread_pool.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

double megabytes(std::uint64_t bytes) { return static_cast<double>(bytes) * 1e-6; }

Json machine_json(const BenchRun& run) {
  if (run.on_gpu()) {
    return {{"device", device_text(run.info)},
            {"copy_gb_per_s", run.peaks.copy_bytes_per_second * 1e-9},
            {"read_gb_per_s", run.peaks.read_bytes_per_second * 1e-9},
            {"product_gflop_per_s", run.peaks.product_flops * 1e-9}};
  }
  return {{"processors", kernels::ThreadPool::available_processors()},
          {"read_gb_per_s", run.peaks.read_bytes_per_second * 1e-9},
          {"sgemm_gflop_per_s", run.peaks.product_flops * 1e-9}};
}

/// The rate of requests that were served, of the best of sequences in lock-step, which may count the prompts' prefill
/// too. Those draw as many tokens after each prompt as the requests, which may have ended early.
double share_of_lockstep(const BenchRun& run, const BenchRow& served, bool with_prefill) {
  const double tokens = static_cast<double>(served.all_tokens()) / static_cast<double>(served.batch);
  double best = 0.0;
  for (const BenchRow& other : run.rows) {
    if (other.phase != Phase::kLockstep || other.tokens != served.tokens) continue;
    if (served.phase == Phase::kServe && other.batch != served.slots) continue;
    const double seconds =
        other.seconds / static_cast<double>(other.tokens) * tokens + (with_prefill ? other.prefill_seconds : 0.0);
    best = std::max(best, static_cast<double>(other.batch) * tokens / seconds);
  }
  return served.tokens_per_second_loaded() / best;
}

Json row_json(const BenchRun& run, const BenchRow& row) {
  Json entry = {{"phase", to_string(row.phase)},
                {"batch", row.batch},
                {"tokens", row.tokens},
                {"seconds", row.seconds},
                {"tokens_per_s", row.tokens_per_second()},
                {"us_per_token_and_layer", row.microseconds_per_token_and_layer(run.info.num_layers)}};
  if (!row.has_work()) {
    if (row.phase == Phase::kServe) {
      entry["slots"] = row.slots;
    } else {
      entry["drawn_tokens"] = row.drawn;
      entry["load_seconds"] = row.load_seconds;
      entry["tokens_per_s_without_load"] = row.tokens_per_second_loaded();
    }
    entry["share_of_lockstep"] = share_of_lockstep(run, row, false);
    entry["share_of_lockstep_with_prefill"] = share_of_lockstep(run, row, true);
  } else if (row.multiplies()) {
    entry["gflop"] = row.flops * 1e-9;
    entry["gflop_per_s"] = row.flops / row.seconds * 1e-9;
    entry[run.on_gpu() ? "share_of_product_rate" : "share_of_sgemm"] =
        row.flops / row.seconds / run.peaks.product_flops;
    entry["sweeps_per_token"] = row.sweeps_per_token;
    entry["fallbacks"] = row.fallbacks;
  } else {
    if (row.phase == Phase::kLockstep) entry["prefill_seconds"] = row.prefill_seconds;
    entry["gb_per_s"] = row.bytes / row.seconds * 1e-9;
    entry[run.on_gpu() ? "share_of_copy_bandwidth" : "share_of_read_bandwidth"] =
        row.bytes / row.seconds / run.peak_bytes();
  }
  if (run.on_gpu() && row.phase != Phase::kOffline) entry["device_memory_bytes"] = row.device_memory;
  entry["host_memory_bytes"] = row.host_memory;
  return entry;
}

Json run_json(const BenchRun& run) {
  Json rows = Json::array();
  for (const BenchRow& row : run.rows) rows.push_back(row_json(run, row));
  Json json = {{"machine", machine_json(run)},
               {"model", with_device({{"folder", run.folder.string()},
                                      {"architecture", run.info.architecture},
                                      {"parameters", run.info.parameters},
                                      {"model_dim", run.info.model_dim},
                                      {"layers", run.info.num_layers},
                                      {"weight_bytes", run.info.weight_bytes},
                                      {"bytes_per_token", run.info.bytes_per_token},
                                      {"memory_bytes", run.info.memory_bytes}},
                                     run.info)},
               {"prefill_mode", kPrefillModeNames[static_cast<std::size_t>(run.options.session.prefill)]},
               {"sweep_tol", sweep_tolerance_json(run.options.session)},
               {"threads", run.options.session.threads},
               {"load_s", run.load_seconds},
               {"peak_memory_bytes", run.peak_memory}};
  if (!run.on_gpu()) json["peak_memory_limit_bytes"] = run.memory_limit();
  json["rows"] = std::move(rows);
  return json;
}

struct Speedup {
  const BenchRow& row;
  double factor;
};

// Of the last run's rows over the same rows of `other`.
std::vector<Speedup> speedups(const BenchRun& last, const BenchRun& other) {
  std::vector<Speedup> all;
  for (const BenchRow& row : last.rows) {
    for (const BenchRow& slow : other.rows) {
      if (row.phase == slow.phase && row.batch == slow.batch && row.tokens == slow.tokens) {
        all.push_back({row, slow.seconds / row.seconds});
        break;
      }
    }
  }
  return all;
}

/// What a row says of others: a batch against one stream, a prompt against the next shorter one.
std::string ratio_line(const BenchRun& run, const BenchRow& row) {
  const auto share = [&](bool with_prefill) { return 100.0 * share_of_lockstep(run, row, with_prefill); };
  if (row.phase == Phase::kServe) {
    return fmt::format(
        "serve, {} requests in {} slots: {:.1f} % of the tokens/s of as many sequences in lock-step, {:.1f} % with "
        "the prefill of theirs\n",
        row.batch, row.slots, share(false), share(true));
  }
  if (row.phase == Phase::kOffline) {
    return fmt::format(
        "offline, {} prompts through mmrec-generate: {} tokens in {:.2f} s from its start to its end; without "
        "{:.2f} s of loading {:.1f} tok/s\n"
        "offline, without loading: {:.1f} % of the tokens/s of the best lock-step, {:.1f} % with the prefill of as "
        "many prompts\n",
        row.batch, row.drawn, row.seconds, row.load_seconds, row.tokens_per_second_loaded(), share(false), share(true));
  }
  if (row.phase == Phase::kLockstep) return {};
  const BenchRow* other = nullptr;
  for (const BenchRow& candidate : run.rows) {
    if (candidate.phase != row.phase) continue;
    if (row.phase == Phase::kPrefill) {
      const bool shorter = candidate.batch == row.batch && candidate.tokens < row.tokens;
      if (shorter && (other == nullptr || candidate.tokens > other->tokens)) other = &candidate;
    } else if (row.batch > 1 && candidate.batch == 1 &&
               (candidate.tokens == row.tokens || row.phase == Phase::kScore)) {
      other = &candidate;
    }
  }
  if (other == nullptr) return {};
  const double rate = row.tokens_per_second() / other->tokens_per_second();
  if (row.phase == Phase::kScore) {
    return fmt::format("score, {} documents: {:.2f} times the tokens/s of one as long as all\n", row.batch, rate);
  }
  if (row.phase != Phase::kPrefill) {
    return fmt::format("{}, batch {}: {:.1f} times the tokens/s of one stream\n", to_string(row.phase), row.batch,
                       rate);
  }
  std::string text = fmt::format("prefill, batch {}, {} tokens: {:.3f} times the time per token of {} tokens",
                                 row.batch, row.tokens, 1.0 / rate, other->tokens);
  if (run.on_gpu()) {
    text += fmt::format(", {:+.1f} MB of GPU memory", megabytes(row.device_memory) - megabytes(other->device_memory));
  }
  return text +
         fmt::format(", {:+.1f} MB of host memory\n", megabytes(row.host_memory) - megabytes(other->host_memory));
}

std::string header_lines(const BenchRun& run) {
  std::string text;
  if (run.on_gpu()) {
    text += fmt::format("machine  {}: copies {:.0f} GB/s, reads {:.0f} GB/s, {} products {:.1f} TFLOP/s\n",
                        device_text(run.info), run.peaks.copy_bytes_per_second * 1e-9,
                        run.peaks.read_bytes_per_second * 1e-9, to_string(run.info.precision),
                        run.peaks.product_flops * 1e-12);
  } else {
    text += fmt::format("machine  {} processors, reads {:.1f} GB/s, sgemm {:.1f} GFLOP/s\n",
                        kernels::ThreadPool::available_processors(), run.peaks.read_bytes_per_second * 1e-9,
                        run.peaks.product_flops * 1e-9);
  }
  text += fmt::format("model    {}: {:.1f} M parameters, {:.1f} MB of weights\n", run.folder.string(),
                      static_cast<double>(run.info.parameters) * 1e-6, megabytes(run.info.weight_bytes));
  text += fmt::format("load     {:.3f} s from the page cache, {:.2f} GB/s\n", run.load_seconds,
                      megabytes(run.info.weight_bytes) * 1e-3 / run.load_seconds);
  text += fmt::format("peak     {:.1f} MB at batch {}", megabytes(run.peak_memory),
                      run.rows.empty() ? 0 : run.rows.front().batch);
  if (!run.on_gpu()) {
    text += fmt::format(", {} weights + 15 % + 50 MB = {:.1f} MB",
                        run.peak_memory <= run.memory_limit() ? "within" : "above", megabytes(run.memory_limit()));
  }
  return text + "\n";
}

std::string run_table(const BenchRun& run) {
  std::string text = header_lines(run);
  text += fmt::format("\n{:<9}{:>6}{:>9}{:>12}{:>11}{:>11}{:>9}{:>9}{:>9}{:>8}{}\n", "phase", "batch", "tokens",
                      "tok/s", "us/tok/lay", "GFLOP/s", "of gemm", "GB/s", run.on_gpu() ? "of copy" : "of read",
                      "sweeps", run.on_gpu() ? "    GPU MB" : "");
  for (const BenchRow& row : run.rows) {
    const bool prefill = row.multiplies();
    const double rate = (prefill ? row.flops : row.bytes) / row.seconds;
    const double share = 100.0 * rate / (prefill ? run.peaks.product_flops : run.peak_bytes());
    text += fmt::format("{:<9}{:>6}{:>9}{:>12.1f}{:>11.3f}", to_string(row.phase), row.batch, row.tokens,
                        row.tokens_per_second(), row.microseconds_per_token_and_layer(run.info.num_layers));
    text += !row.has_work() ? fmt::format("{:>11}{:>9}{:>9}{:>9}{:>8}", "", "", "", "", "")
            : prefill
                ? fmt::format("{:>11.1f}{:>8.1f}%{:>9}{:>9}{:>8.2f}", rate * 1e-9, share, "", "", row.sweeps_per_token)
                : fmt::format("{:>11}{:>9}{:>9.2f}{:>8.1f}%{:>8}", "", "", rate * 1e-9, share, "");
    if (run.on_gpu() && row.phase != Phase::kOffline) text += fmt::format("{:>10.1f}", megabytes(row.device_memory));
    text += "\n";
  }
  std::string ratios;
  for (const BenchRow& row : run.rows) ratios += ratio_line(run, row);
  return ratios.empty() ? text : text + "\n" + ratios;
}

}  // namespace

Json bench_json(const std::vector<BenchRun>& runs) {
  const BenchRun& last = runs.back();
  Json json = {{"schema", "mmrec-bench/1"}};
  json.update(run_json(last));
  if (runs.size() < 2) return json;
  json["compare"] = run_json(runs.front());
  Json factors = Json::array();
  for (const Speedup& s : speedups(last, runs.front())) {
    factors.push_back(
        {{"phase", to_string(s.row.phase)}, {"batch", s.row.batch}, {"tokens", s.row.tokens}, {"factor", s.factor}});
  }
  json["speedups"] = std::move(factors);
  return json;
}

std::string bench_table(const std::vector<BenchRun>& runs) {
  std::string text;
  for (const BenchRun& run : runs) text += (text.empty() ? "" : "\n") + run_table(run);
  if (runs.size() < 2) return text;
  text += fmt::format("\n{} against {}:\n", device_text(runs.back().info), device_text(runs.front().info));
  for (const Speedup& s : speedups(runs.back(), runs.front())) {
    text += fmt::format("{:<9}{:>6}{:>9}{:>10.1f} times as fast\n", to_string(s.row.phase), s.row.batch, s.row.tokens,
                        s.factor);
  }
  return text;
}

}  // namespace mmrec::apps
