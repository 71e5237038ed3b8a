// A model's prefill and decode on one device, measured beside what that device can do; and the report of it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "apps/bench/offline.h"
#include "apps/bench/peaks.h"
#include "apps/common/model_folder.h"
#include "mmrec/model.h"
#include "models/architecture.h"

namespace mmrec::apps {

/// Ends the program from between two measurements, so that temporary folders are removed.
struct Interrupted {};
void check_interrupt();

/// What to measure.
struct BenchPlan {
  std::vector<std::int64_t> lengths;         // tokens of a prefill
  std::vector<std::int64_t> batches;         // sequences prefilled in lock-step
  std::vector<std::int64_t> decode_batches;  // sequences decoded in lock-step
  std::int64_t decode = 0;                   // tokens of a decode run
  std::int64_t documents = 0;                // scored together; 0: no scoring
  std::int64_t requests = 0;                 // served; 0: none
  std::int64_t slots = 0;                    // that they share
  std::int64_t most_drawn = 0;               // tokens of a request
  std::int64_t repeat = 0;                   // runs of each; on the CPU the best counts, on a GPU the median
  OfflinePlan offline;                       // each prompt draws `decode` tokens
};

/// prefill   logits after a prompt, fetched
/// decode    given tokens, one after another; logits fetched after the last
/// generate  tokens drawn where the logits are (greedily), each before the next is computed
/// lockstep  the same by the default chain of samplers, after prompts of mean length: for serve as many sequences as
///           there are slots, which draw as many tokens as requests on average; for offline several numbers of them
/// serve     requests of different lengths through a Generator, prompts and all; tokens are those drawn
/// score     log-probs of `batch` documents of kLeastDocument to kMostDocument tokens, `tokens` on average, or of one
///           with as many as all
/// offline   a file of prompts through mmrec-generate, from the program's start to its end; tokens are the most drawn
enum class Phase : std::uint8_t { kPrefill, kDecode, kGenerate, kLockstep, kServe, kScore, kOffline };
inline constexpr std::int64_t kLeastDocument = 32;
inline constexpr std::int64_t kMostDocument = 96;
constexpr std::string_view to_string(Phase phase) {
  constexpr std::array<std::string_view, 7> kNames = {"prefill", "decode", "generate", "lockstep",
                                                      "serve",   "score",  "offline"};
  return kNames[static_cast<std::size_t>(phase)];
}

struct BenchRow {
  Phase phase = Phase::kPrefill;
  std::int64_t batch = 0;
  std::int64_t tokens = 0;  // per sequence: of the prompt, or decoded; served: on average
  std::int64_t slots = 0;   // served: sequences at once
  double seconds = 0.0;
  double prefill_seconds = 0.0;  // in lock-step: of the prompts before it, all at once
  double load_seconds = 0.0;     // offline: of the program with one prompt that draws one token
  std::int64_t drawn = 0;        // offline: tokens of all prompts
  double flops = 0.0;            // prefill, score: products done
  double bytes = 0.0;            // decode, generate: weights read
  double sweeps_per_token = 0.0;
  std::int64_t fallbacks = 0;
  std::uint64_t device_memory = 0;  // GPU bytes in use during it, beyond those in use before the model came
  std::uint64_t host_memory = 0;    // peak resident bytes of the process so far

  /// Whether products limit it, not the reading of weights.
  bool multiplies() const { return phase == Phase::kPrefill || phase == Phase::kScore; }
  /// Whether there is a number of bytes read or products done to go by.
  bool has_work() const { return phase != Phase::kServe && phase != Phase::kOffline; }
  std::int64_t all_tokens() const { return phase == Phase::kOffline ? drawn : batch * tokens; }
  double tokens_per_second() const { return static_cast<double>(all_tokens()) / seconds; }
  /// Offline: without loading, unless so little was drawn that the two runs took the same time.
  double tokens_per_second_loaded() const {
    return static_cast<double>(all_tokens()) / (seconds > load_seconds ? seconds - load_seconds : seconds);
  }
  /// Of one sequence's token, or of one step of all sequences; offline of one token of any.
  double microseconds_per_token_and_layer(std::int64_t layers) const {
    const std::int64_t done = multiplies() || !has_work() ? all_tokens() : tokens;
    return seconds * 1e6 / static_cast<double>(done * layers) * static_cast<double>(std::max<std::int64_t>(slots, 1));
  }
};

struct BenchRun {
  RunOptions options;
  std::filesystem::path folder;
  ModelInfo info;
  models::ProductCounts products;
  double load_seconds = 0.0;
  std::uint64_t peak_memory = 0;  // host bytes, after the smallest batch
  std::vector<BenchRow> rows;
  Peaks peaks;

  bool on_gpu() const { return info.device == Device::kCuda; }
  /// Decode is a share of this rate of bytes.
  double peak_bytes() const { return on_gpu() ? peaks.copy_bytes_per_second : peaks.read_bytes_per_second; }
  /// What the weights should need at most beside themselves.
  std::uint64_t memory_limit() const { return info.weight_bytes + info.weight_bytes * 15 / 100 + 50'000'000; }
};

/// Floating-point operations of the matrix products of a prefill of `tokens` tokens in each of `batch` sequences from
/// position 0: two per weight element and token; those of the recurrent gates again for every sweep beyond the first;
/// the head for the last token. Scans, norms and activations are not counted.
inline double prefill_flops(const models::ProductCounts& counts, std::int64_t batch, std::int64_t tokens,
                            const PrefillStats& stats) {
  const std::int64_t with_memory = counts.of_memory == 0 ? 0 : std::max<std::int64_t>(0, tokens - counts.memory_from);
  const std::int64_t more_sweeps = std::max<std::int64_t>(0, stats.token_sweeps - stats.layer_tokens);
  const double elements =
      static_cast<double>(batch) * (static_cast<double>(tokens) * static_cast<double>(counts.per_token) +
                                    static_cast<double>(with_memory) * static_cast<double>(counts.of_memory) +
                                    static_cast<double>(counts.head)) +
      static_cast<double>(more_sweeps) * static_cast<double>(counts.per_sweep);
  return 2.0 * elements;
}

/// Whether a model will run on a GPU, decided as Model::load does.
bool takes_gpu(const RunOptions& options);

/// Loads the model of `folder` and measures it; the device's peaks before and after, so that another program at work
/// during either does not count. Throws Interrupted, and what loading and running throw.
BenchRun run_bench(const std::filesystem::path& folder, const RunOptions& options, const BenchPlan& plan);

/// The last run as an object of schema "mmrec-bench/1". "compare" has the runs before it, "speedups" how many times as
/// fast the last run's rows are.
nlohmann::ordered_json bench_json(const std::vector<BenchRun>& runs);
/// A table for each run, then the speed-ups.
std::string bench_table(const std::vector<BenchRun>& runs);

}  // namespace mmrec::apps
