// mmrec-bench: prefill and decode rates of a model, and what share they are of what this machine can do.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "apps/bench/offline.h"
#include "apps/bench/run.h"
#include "apps/common/cli.h"
#include "apps/common/model_folder.h"
#include "apps/common/named_files.h"
#include "apps/common/output.h"
#include "mmrec/errors.h"
#include "models/architecture.h"
#include "models/files/file.h"
#include "models/weights/synthetic.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

/// Paths of files of a folder, and its own.
std::vector<std::string> paths_in(const std::filesystem::path& folder, std::initializer_list<const char*> files) {
  std::vector<std::string> paths;
  for (const char* file : files) paths.push_back(folder / file);
  paths.push_back(folder);
  return paths;
}

/// A folder under the system's temporary one that goes away with its owner.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "mmrec-bench-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw WriteError(name + ": cannot make a temporary folder");
    path_ = name;
    const auto files = {"model.safetensors", "config.json", kTokenizerFile, kPromptsFile, kRecordsFile};
    removed_.emplace(paths_in(path_, files));
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
  std::optional<RemovedAtInterrupt> removed_;
};

/// A model of random weights to be made, of a vocabulary of `vocab`.
models::SyntheticModel synthetic_model(const Arguments& arguments, std::int64_t& vocab) {
  const auto sizes = arguments.integers("synthetic", {}, 1, std::int64_t{1} << 24);
  if (sizes.size() < 3 || sizes.size() > 4 || sizes[0] % 4 != 0) {
    refuse_value("synthetic", arguments.text("synthetic").value_or(""), "D,L,V or D,L,V,F with D a multiple of 4");
  }
  const std::vector<std::string_view> names = models::architecture_names();
  const std::size_t name = arguments.choice("arch", names);
  const std::int64_t ffn = sizes.size() == 4 ? sizes[3] : 4 * sizes[0];
  vocab = sizes[2];
  return models::synthetic_model(names[name], {.dim = sizes[0], .layers = sizes[1], .vocab = vocab, .ffn = ffn});
}

void write_synthetic(const std::filesystem::path& folder, const models::SyntheticModel& model) {
  rethrown_as<WriteError, std::system_error>(
      [&] { models::write_synthetic_folder(folder, model, kernels::DType::kBF16, 0, check_interrupt); });
}

/// The model of --keep: written unless it is there. It appears whole or not at all: config.json comes last.
void keep_synthetic(const std::filesystem::path& folder, const models::SyntheticModel& model) {
  if (!std::filesystem::exists(folder / "config.json")) {
    if (std::filesystem::exists(folder / "model.safetensors")) {
      throw RejectedFile(folder.string() + ": holds a model.safetensors without a config.json. Try: another --keep");
    }
    const bool is_new = !std::filesystem::exists(folder);
    const RemovedAtInterrupt removed(paths_in(folder, {"model.safetensors", "config.json"}));
    try {
      return write_synthetic(folder, model);
    } catch (...) {
      std::error_code ignored;
      if (is_new) std::filesystem::remove(folder, ignored);
      throw;
    }
  }
  if (models::read_text(folder / "config.json", std::uint64_t{1} << 20) == model.config) return;
  throw RejectedFile(
      fmt::format("{}: holds another model than --synthetic asks for. Try: another --keep", folder.string()));
}

constexpr std::int64_t kDocumentsOnCpu = 64;
constexpr std::int64_t kRequestsOnCpu = 8;
constexpr std::int64_t kSlotsOnCpu = 4;
constexpr std::int64_t kDrawnOnCpu = 64;

/// The command line's plan, with defaults that take a GPU or the processors seconds.
BenchPlan plan_of(const Arguments& arguments, const RunOptions& run) {
  const bool gpu = takes_gpu(run);
  constexpr std::int64_t kMostBatch = 1024;
  BenchPlan plan;
  using List = std::vector<std::int64_t>;
  plan.lengths =
      arguments.integers("lengths", gpu ? List{4096, 32768} : List{128, 512, 2048}, 1, std::int64_t{1} << 24);
  plan.batches = arguments.integers("batches", gpu ? List{1} : List{1, 4}, 1, kMostBatch);
  plan.decode_batches = arguments.integers("decode-batches", gpu ? List{1, 2, 4, 8, 64} : plan.batches, 1, kMostBatch);
  plan.decode = arguments.integer("decode", gpu ? 256 : 64, 1, 1'000'000);
  plan.documents = arguments.integer("documents", gpu ? 4096 : kDocumentsOnCpu, 0, 1'000'000);
  plan.requests = arguments.integer("requests", gpu ? 2000 : kRequestsOnCpu, 0, 1'000'000);
  plan.slots = arguments.integer("slots", gpu ? 64 : kSlotsOnCpu, 1, kMostBatch);
  plan.most_drawn = gpu ? 512 : kDrawnOnCpu;
  plan.repeat = arguments.integer("repeat", gpu ? 5 : 3, 1, 1000);
  // By default none: they need a second program and a tokenizer, and take a CPU more time than all the rest.
  plan.offline.prompts = arguments.integer("offline", 0, 0, 1'000'000);
  for (const char* name : {"device", "precision", "threads", "expert", "prefill", "sweep-tol", "calls", "bank"}) {
    const auto value = arguments.text(name);
    if (value) plan.offline.options.insert(plan.offline.options.end(), {fmt::format("--{}", name), *value});
  }
  if (arguments.has("batch-invariant")) plan.offline.options.emplace_back("--batch-invariant");
  return plan;
}

/// The runs that were asked for, the one to compare with first: it shall see no thread and no memory of the other's.
std::vector<BenchRun> run_all(const std::filesystem::path& folder, const RunOptions& options, const BenchPlan& plan,
                              bool compare_cpu) {
  std::vector<BenchRun> runs;
  if (compare_cpu) {
    RunOptions on_cpu = options;
    on_cpu.device = Device::kCpu;
    on_cpu.precision = Precision::kAuto;
    BenchPlan shorter = plan;
    shorter.documents = std::min(plan.documents, kDocumentsOnCpu);
    shorter.requests = std::min(plan.requests, kRequestsOnCpu);
    shorter.slots = std::min(plan.slots, kSlotsOnCpu);
    shorter.most_drawn = kDrawnOnCpu;
    shorter.offline.prompts = 0;
    runs.push_back(run_bench(folder, on_cpu, shorter));
  }
  runs.push_back(run_bench(folder, options, plan));
  return runs;
}

int bench_main(const Arguments& arguments) {
  const RunOptions options = run_options(arguments);
  if (options.all_gpus) throw UsageError("--device cuda:all: one device is measured (expected cuda or cuda:N)");
  BenchPlan plan = plan_of(arguments, options);
  constexpr std::array<std::string_view, 1> kComparable = {"cpu"};
  (void)arguments.choice("compare", kComparable);
  const bool compare = arguments.has("compare");
  if (arguments.has("model") && arguments.has("synthetic")) throw UsageError("--model and --synthetic: found both");
  arguments.refuse_unless(arguments.has("synthetic"), {"keep", "arch"}, "only with --synthetic");
  std::optional<models::SyntheticModel> synthetic;
  std::int64_t vocab = 0;
  std::filesystem::path given;
  if (arguments.has("synthetic")) {
    synthetic = synthetic_model(arguments, vocab);
  } else {
    given = model_folder(arguments);
  }
  std::vector<NamedFile> files = named_files(arguments, program("mmrec-bench").options);
  files.push_back({{}, given, Names::kInput});
  refuse_lost_files(files);
  Output out(arguments.file("output").value_or("-"));

  std::vector<BenchRun> runs;
  const GracefulScope graceful;
  try {
    const bool keeps = arguments.has("keep");
    const bool offline = plan.offline.prompts > 0;
    if (keeps) keep_synthetic(given = *arguments.text("keep"), *synthetic);
    std::optional<TemporaryFolder> temporary;
    if (offline || (synthetic && !keeps)) plan.offline.scratch = temporary.emplace().path();
    if (synthetic && !keeps) write_synthetic(given = temporary->path(), *synthetic);
    if (synthetic && offline) give_tokenizer(given, vocab);
    runs = run_all(given, options, plan, compare);
  } catch (const Interrupted&) {
    log_line("interrupted");
    return interrupt_exit_code();
  }
  out.write(arguments.has("json") ? bench_json(runs).dump(2, ' ', false, Json::error_handler_t::replace) + "\n"
                                  : bench_table(runs));
  out.commit();
  return kOk;
}

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  return mmrec::apps::run_command(mmrec::apps::program("mmrec-bench"), argc, argv, mmrec::apps::bench_main);
}
