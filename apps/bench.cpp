// mmrec-bench: prefill and decode rates of a model, and what share they are of what this machine can do.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "apps/bench_machine.h"
#include "apps/bench_work.h"
#include "apps/cli.h"
#include "apps/model_folder.h"
#include "apps/output.h"
#include "apps/processors.h"
#include "apps/signals.h"
#include "mmrec/model.h"
#include "models/config.h"
#include "models/synthetic.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr std::string_view kProgram = "mmrec-bench";

constexpr std::string_view kHelp = R"(mmrec-bench
mmrec-bench -m DIR --lengths 128,2048 --batches 1,8 --json > bench.json
mmrec-bench --synthetic 1024,14,32000 --lengths 2048

Measures load time, peak memory, prefill and decode, and the shares of this
machine's read bandwidth and matrix-product peak, measured in the same run.
  -m, --model DIR        model folder (default: the bundled model)
      --synthetic D,L,V[,F]  a random bf16 model instead: width, layers,
                         vocabulary, FFN width (4 D)
      --lengths N,...    tokens per prefill (128,512,2048)
      --batches N,...    sequences in lock-step (1,4)
      --decode N         tokens per decode run (64)
      --repeat N         runs of each, the best counts (3)
      --json             JSON instead of a table
  -o, --output FILE      write the result there, whole or not at all
      --device D         auto or cpu; --threads N: threads (0: all)
      --prefill M        auto, sweeps or steps; --sweep-tol X: tolerance (1e-5)
  -h, --help             this page; --version
)";

constexpr std::array kFlags = {
    Flag{"model", 'm'},       Flag{"synthetic"},
    Flag{"lengths"},          Flag{"batches"},
    Flag{"decode"},           Flag{"repeat"},
    Flag{"json", 0, false},   Flag{"output", 'o'},
    Flag{"device"},           Flag{"threads"},
    Flag{"prefill"},          Flag{"sweep-tol"},
    Flag{"help", 'h', false}, Flag{"version", 0, false},
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Ends the program from between two measurements, so that temporary folders are removed.
struct Interrupted {};
void check_interrupt() {
  if (interrupt_exit_code() != 0) throw Interrupted{};
}

/// A folder under the system's temporary one that goes away with its owner.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "mmrec-bench-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw OutputError(name + ": cannot make a temporary folder");
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

models::Config synthetic_config(const Arguments& arguments) {
  const auto sizes = arguments.integers("synthetic", {}, 1, std::int64_t{1} << 24);
  if (sizes.size() < 3 || sizes.size() > 4 || sizes[0] % 64 != 0) {
    throw UsageError(
        fmt::format("--synthetic: not a valid value (found '{}', expected D,L,V or D,L,V,F with D a multiple "
                    "of 64)",
                    arguments.text("synthetic").value_or("")));
  }
  models::Config config;
  config.model_dim = sizes[0];
  config.num_layers = sizes[1];
  config.vocab_size = sizes[2];
  config.ffn_dim = sizes.size() == 4 ? sizes[3] : 4 * sizes[0];
  config.num_heads = sizes[0] / 64;
  return config;
}

// In a child process, so that the writer's memory does not count towards this one's peak.
void write_synthetic(const std::filesystem::path& folder, const models::Config& config) {
  const pid_t child = fork();
  if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (child == 0) {
    try {
      models::write_synthetic_model(folder, config, kernels::DType::kBF16);
    } catch (const std::exception& error) {
      log_line(error.what());
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  check_interrupt();
  if (status != 0) throw OutputError(fmt::format("{}: cannot write the synthetic model", folder.string()));
}

void read_into_page_cache(const std::filesystem::path& folder) {
  std::vector<char> block(std::size_t{1} << 20);
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    while (file.read(block.data(), std::ssize(block))) {
    }
  }
}

struct Row {
  std::string phase;
  std::int64_t batch = 0;
  std::int64_t tokens = 0;  // per sequence: of the prompt, or drawn
  double seconds = 0.0;
  double flops = 0.0;  // prefill: products done
  double bytes = 0.0;  // decode: weights read
  double sweeps_per_token = 0.0;
  std::int64_t fallbacks = 0;

  double tokens_per_second() const { return static_cast<double>(batch * tokens) / seconds; }
};

class Bench {
 public:
  Bench(const Arguments& arguments, const RunOptions& run)
      : run_(run),
        lengths_(arguments.integers("lengths", {128, 512, 2048}, 1, std::int64_t{1} << 24)),
        batches_(arguments.integers("batches", {1, 4}, 1, 1024)),
        decode_(arguments.integer("decode", 64, 1, 1'000'000)),
        repeat_(arguments.integer("repeat", 3, 1, 1000)) {
    std::sort(batches_.begin(), batches_.end());  // the peak of one stream is read before larger batches raise it
  }

  void run(const std::filesystem::path& folder) {
    folder_ = folder;
    read_into_page_cache(folder);
    const auto start = Clock::now();
    const Model model = load_model(folder, run_);
    load_seconds_ = seconds_since(start);
    info_ = model.info();
    config_ = models::load_config(folder / "config.json");
    for (const std::int64_t batch : batches_) {
      for (const std::int64_t length : lengths_) measure(model, batch, length);
      if (batch == batches_.front()) peak_memory_ = peak_memory_bytes();
    }
  }

  /// Another measurement of the machine; the best counts.
  void add_peaks(const MachinePeaks& peaks) { peaks_ = best_of(peaks_, peaks); }

  Json json() const;
  std::string table() const;

 private:
  void measure(const Model& model, std::int64_t batch, std::int64_t length);
  std::uint64_t memory_limit() const { return info_.weight_bytes + info_.weight_bytes * 15 / 100 + 50'000'000; }

  RunOptions run_;
  std::vector<std::int64_t> lengths_;
  std::vector<std::int64_t> batches_;
  std::int64_t decode_;
  std::int64_t repeat_;
  std::filesystem::path folder_;
  models::Config config_;
  ModelInfo info_;
  MachinePeaks peaks_;
  double load_seconds_ = 0.0;
  std::uint64_t peak_memory_ = 0;  // after the smallest batch
  std::vector<Row> rows_;
};

// Token ids that look like text to the engine: no two runs alike, the same in every process.
std::vector<int> some_tokens(std::int64_t count, std::int64_t vocab_size) {
  std::vector<int> tokens(static_cast<std::size_t>(count));
  std::uint64_t state = 1;
  for (int& token : tokens) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    token = static_cast<int>((state >> 33) % static_cast<std::uint64_t>(vocab_size));
  }
  return tokens;
}

// One prefill row and one decode row that follows it.
void Bench::measure(const Model& model, std::int64_t batch, std::int64_t length) {
  Session session = model.new_session(static_cast<int>(batch), run_.session);
  const std::vector<int> prompt = some_tokens(batch * length, info_.vocab_size);
  Row prefill{"prefill", batch, length};
  prefill.seconds = 1e300;
  for (std::int64_t i = 0; i < repeat_; ++i) {
    session.reset();
    const auto start = Clock::now();
    session.prefill(prompt);
    prefill.seconds = std::min(prefill.seconds, seconds_since(start));
    check_interrupt();
  }
  const PrefillStats stats = session.prefill_stats();
  prefill.flops = prefill_flops(config_, batch, length, stats);
  prefill.sweeps_per_token = stats.sweeps_per_token();
  prefill.fallbacks = stats.fallbacks;
  rows_.push_back(prefill);

  Row decode{"decode", batch, decode_};
  decode.seconds = 1e300;
  const std::vector<int> tokens = some_tokens(batch * decode_, info_.vocab_size);
  for (std::int64_t i = 0; i < repeat_; ++i) {
    const auto start = Clock::now();
    for (std::int64_t t = 0; t < decode_; ++t) {
      session.step(std::span(tokens).subspan(static_cast<std::size_t>(t * batch), static_cast<std::size_t>(batch)));
    }
    decode.seconds = std::min(decode.seconds, seconds_since(start));
    check_interrupt();
  }
  decode.bytes = static_cast<double>(info_.bytes_per_token) * static_cast<double>(decode_);
  rows_.push_back(decode);
}

Json Bench::json() const {
  Json rows = Json::array();
  for (const Row& row : rows_) {
    Json entry = {{"phase", row.phase},
                  {"batch", row.batch},
                  {"tokens", row.tokens},
                  {"seconds", row.seconds},
                  {"tokens_per_s", row.tokens_per_second()}};
    if (row.phase == "prefill") {
      entry["gflop"] = row.flops * 1e-9;
      entry["gflop_per_s"] = row.flops / row.seconds * 1e-9;
      entry["share_of_sgemm"] = row.flops / row.seconds / peaks_.sgemm_flops;
      entry["sweeps_per_token"] = row.sweeps_per_token;
      entry["fallbacks"] = row.fallbacks;
    } else {
      entry["gb_per_s"] = row.bytes / row.seconds * 1e-9;
      entry["share_of_read_bandwidth"] = row.bytes / row.seconds / peaks_.read_bytes_per_second;
    }
    rows.push_back(std::move(entry));
  }
  return {{"schema", "mmrec-bench/1"},
          {"machine",
           {{"processors", usable_processors()},
            {"read_gb_per_s", peaks_.read_bytes_per_second * 1e-9},
            {"sgemm_gflop_per_s", peaks_.sgemm_flops * 1e-9}}},
          {"model",
           {{"folder", folder_.string()},
            {"parameters", info_.parameters},
            {"weight_bytes", info_.weight_bytes},
            {"bytes_per_token", info_.bytes_per_token},
            {"device", info_.device}}},
          {"prefill_mode", prefill_names()[static_cast<std::size_t>(run_.session.prefill)]},
          {"threads", run_.session.threads},
          {"load_s", load_seconds_},
          {"peak_memory_bytes", peak_memory_},
          {"peak_memory_limit_bytes", memory_limit()},
          {"rows", std::move(rows)}};
}

std::string Bench::table() const {
  const auto megabytes = [](std::uint64_t bytes) { return static_cast<double>(bytes) * 1e-6; };
  std::string text = fmt::format("machine  {} processors, reads {:.1f} GB/s, sgemm {:.1f} GFLOP/s\n",
                                 usable_processors(), peaks_.read_bytes_per_second * 1e-9, peaks_.sgemm_flops * 1e-9);
  text += fmt::format("model    {}: {:.1f} M parameters, {:.1f} MB of weights\n", folder_.string(),
                      static_cast<double>(info_.parameters) * 1e-6, megabytes(info_.weight_bytes));
  text += fmt::format("load     {:.3f} s from the page cache, {:.2f} GB/s\n", load_seconds_,
                      megabytes(info_.weight_bytes) * 1e-3 / load_seconds_);
  text +=
      fmt::format("peak     {:.1f} MB at batch {}, {} weights + 15 % + 50 MB = {:.1f} MB\n", megabytes(peak_memory_),
                  batches_.front(), peak_memory_ <= memory_limit() ? "within" : "above", megabytes(memory_limit()));
  text += fmt::format("\n{:<8}{:>6}{:>8}{:>11}{:>10}{:>9}{:>8}{:>9}{:>8}\n", "phase", "batch", "tokens", "tok/s",
                      "GFLOP/s", "of gemm", "GB/s", "of read", "sweeps");
  for (const Row& row : rows_) {
    const bool prefill = row.phase == "prefill";
    const double rate = (prefill ? row.flops : row.bytes) / row.seconds;
    const double share = 100.0 * rate / (prefill ? peaks_.sgemm_flops : peaks_.read_bytes_per_second);
    text += fmt::format("{:<8}{:>6}{:>8}{:>11.1f}", row.phase, row.batch, row.tokens, row.tokens_per_second());
    text += prefill ? fmt::format("{:>10.1f}{:>8.1f}%{:>8}{:>9}{:>8.2f}\n", rate * 1e-9, share, "", "",
                                  row.sweeps_per_token)
                    : fmt::format("{:>10}{:>9}{:>8.2f}{:>8.1f}%\n", "", "", rate * 1e-9, share);
  }
  return text;
}

int bench_main(int argc, char** argv) {
  const Arguments arguments(kFlags, false, argc, argv);
  if (print_help_or_version(arguments, kHelp, kProgram)) return kOk;
  const RunOptions run = run_options(arguments);
  Bench bench(arguments, run);
  if (arguments.has("model") && arguments.has("synthetic")) throw UsageError("--model and --synthetic: found both");
  std::optional<models::Config> config;
  std::filesystem::path given;
  if (arguments.has("synthetic")) {
    config = synthetic_config(arguments);
  } else {
    given = model_folder(arguments);
  }
  const auto out =
      arguments.has("output") ? std::make_unique<Output>(*arguments.text("output")) : std::make_unique<Output>();

  // The machine is measured before and after: another program may be at work during either.
  bench.add_peaks(measure_machine_apart());
  const GracefulScope graceful;
  try {
    if (config) {
      const TemporaryFolder folder;
      write_synthetic(folder.path(), *config);
      bench.run(folder.path());
    } else {
      bench.run(given);
    }
    check_interrupt();
    bench.add_peaks(measure_machine());
    check_interrupt();
  } catch (const Interrupted&) {
    log_line("interrupted");
    return interrupt_exit_code();
  }
  out->write(arguments.has("json") ? bench.json().dump(2, ' ', false, Json::error_handler_t::replace) + "\n"
                                   : bench.table());
  out->commit();
  return kOk;
}

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  return mmrec::apps::run_program("mmrec-bench", [&] { return mmrec::apps::bench_main(argc, argv); });
}
