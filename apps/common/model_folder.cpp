#include "apps/common/model_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <map>
#include <new>
#include <stdexcept>
#include <system_error>

#include "apps/common/sandbox.h"
#include "apps/common/stopwatch.h"
#include "kernels/cpu/thread_pool.h"
#include "mmrec/errors.h"
#include "mmrec/version.h"

namespace mmrec::apps {
namespace {

constexpr std::string_view kNumberedGpu = "cuda:";
constexpr std::string_view kAllGpus = "cuda:all";

std::filesystem::path beside_program() {
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return {};
  return (program.parent_path() / MMREC_INSTALLED_MODEL).lexically_normal();
}

bool is_model_folder(const std::filesystem::path& folder) {
  std::error_code error;
  return !folder.empty() && std::filesystem::exists(folder / "config.json", error);
}

/// A file in a folder's place: what it is, and what to do with it. Throws RejectedFile.
void expect_folder(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return;
  const std::string ending = path.extension().string();
  const auto checkpoints = {".pt", ".pth", ".bin", ".ckpt", ".msgpack"};
  const auto refuse = [&](std::string_view what, const std::string& advice) {
    throw RejectedFile(fmt::format("{}: {} (expected a model folder). Try: {}", path.string(), what, advice));
  };
  if (std::find(checkpoints.begin(), checkpoints.end(), ending) != checkpoints.end()) {
    refuse("a checkpoint",
           fmt::format("weights/convert.py {} -o FOLDER --tokenizer FILE, and -m FOLDER", path.string()));
  }
  if (ending == ".gguf") {
    refuse("a GGUF file, which is not read",
           "weights/convert.py with the checkpoint that it was made of (MM-Rec models alone run here)");
  }
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  refuse("a file", fmt::format("-m {}", folder.string()));
}

// What the library says about a file, with the exit code that goes with it. What is wrong with a GPU is none of the
// file's.
template <class Load>
auto rejecting(const std::filesystem::path& folder, Load&& load) {
  try {
    return load();
  } catch (const DeviceUnavailable&) {
    throw;
  } catch (const WriteError&) {  // of what is made of the folder
    throw;
  } catch (const NumericError& error) {
    throw RejectedFile(error.what());
  } catch (const std::system_error& error) {
    const bool of_the_system =
        error.code().category() == std::generic_category() || error.code().category() == std::system_category();
    if (!of_the_system) throw;
    if (means_no_memory(error.code())) throw std::bad_alloc();
    std::string message = error.what();
    if (error.code() == std::errc::no_such_file_or_directory) {
      message += fmt::format(
          ". Try: a folder that holds config.json, model.safetensors and tokenizer.model or tokenizer.tiktoken (found "
          "{})",
          folder.string());
    }
    throw RejectedFile(message);
  } catch (const std::runtime_error& error) {
    throw RejectedFile(error.what());
  }
}

/// A message of the library with the program's flag in place of the option: "load option a_b: ..." is "--a-b: ...".
std::string with_flag(std::string message) {
  for (const std::string_view option : {"load option ", "quantize option "}) {
    const std::size_t end = message.find(':');
    if (!message.starts_with(option) || end == std::string::npos) continue;
    std::replace(message.begin(), message.begin() + static_cast<std::ptrdiff_t>(end), '_', '-');
    return message.replace(0, option.size(), "--");
  }
  return message;
}

/// The same of a model, whose architecture or device may not have an option that the command line chose.
template <class Load>
auto loading(const std::filesystem::path& folder, const RunOptions& options, Load&& load) {
  expect_folder(folder);
  try {
    return rejecting(folder, std::forward<Load>(load));
  } catch (const std::invalid_argument& error) {
    const std::string message = with_flag(error.what());
    if (options.variant == VariantOptions{} && !options.batch_invariant) throw std::invalid_argument(message);
    throw UsageError(message);
  }
}

/// Sets the device: a name, or "cuda:" and the GPU's number or "all".
void read_device(const Arguments& arguments, RunOptions& options) {
  const std::string given = arguments.text("device").value_or("auto");
  options.all_gpus = given == kAllGpus;
  if (!set_device(options, options.all_gpus ? "cuda" : given)) {
    refuse_value("device", given, "auto or cpu or cuda or cuda:N or cuda:all");
  }
}

}  // namespace

std::filesystem::path model_folder(const Arguments& arguments) {
  if (const auto given = arguments.file("model")) return *given;
  const std::filesystem::path installed = beside_program();
  const std::filesystem::path built = MMREC_SOURCE_MODEL;
  for (const auto& folder : {installed, built}) {
    if (!folder.empty() && is_model_folder(folder)) return folder;
  }
  const std::string beside =
      installed.empty() ? "it beside the program, whose place /proc does not tell" : installed.string();
  throw RejectedFile(fmt::format("the bundled model is missing (looked for {}{}{}). Try: -m DIR", beside,
                                 built.empty() ? "" : " and ", built.string()));
}

RunOptions run_options(const Arguments& arguments) {
  RunOptions options;
  options.on_warning = warn;
  read_device(arguments, options);
  options.precision = static_cast<Precision>(arguments.choice("precision", kPrecisionNames));
  if (options.device == Device::kCpu && options.precision == Precision::kF16) {
    throw UsageError("--precision fp16: not with --device cpu, which computes in fp32 or bf16");
  }
  options.batch_invariant = arguments.has("batch-invariant");
  const std::size_t expert = arguments.choice("expert", kExpertNames);
  if (arguments.has("expert")) options.variant.expert = static_cast<Expert>(expert);
  // Far more threads than processors would spend the time waiting for one another.
  const std::int64_t most = std::int64_t{4} * kernels::ThreadPool::available_processors();
  const std::int64_t threads = arguments.integer("threads", 0, 0, 1'000'000);
  if (threads > most) warn(fmt::format("--threads {}: {} are used", threads, most));
  options.threads = options.session.threads = static_cast<int>(std::min(threads, most));
  options.session.prefill = static_cast<PrefillMode>(arguments.choice("prefill", kPrefillModeNames));
  options.session.sweep_tolerance =
      arguments.real("sweep-tol", 0.0F, 1.0F, true).value_or(options.session.sweep_tolerance);
  const std::size_t calls = arguments.choice("calls", kCallsNames);
  if (arguments.has("calls")) options.variant.calls = static_cast<Calls>(calls);
  constexpr std::array<std::string_view, 2> kNoAndYes = {"false", "true"};
  const std::size_t bank = arguments.choice("bank", kNoAndYes);
  if (arguments.has("bank")) options.variant.bank = bank == 1;
  return options;
}

std::optional<std::string_view> calls_of(const ModelInfo& info) {
  if (!info.variant.calls) return std::nullopt;
  if (!info.variant.bank.value_or(true)) return "one";
  return kCallsNames[static_cast<std::size_t>(*info.variant.calls)];
}

nlohmann::ordered_json sweep_tolerance_json(const SessionOptions& options) {
  if (options.sweep_tolerance == 0.0F) return "auto";
  return shortest(options.sweep_tolerance);
}

std::string device_text(const ModelInfo& info) {
  if (info.device != Device::kCuda) return info.device_name;
  const std::string gpu = info.gpu == 0  ? "cuda"
                          : info.gpu > 0 ? fmt::format("{}{}", kNumberedGpu, info.gpu)
                                         : std::string(kAllGpus);
  return fmt::format("{} ({})", gpu, info.device_name);
}

std::string place_of(const ModelInfo& info) {
  const std::string device = device_text(info);
  const bool names = info.device == Device::kCuda || info.precision != Precision::kF32;
  return names ? fmt::format("{}, {}", device, to_string(info.precision)) : device;
}

nlohmann::ordered_json with_device(nlohmann::ordered_json description, const ModelInfo& info) {
  description["device"] = device_text(info);
  description["precision"] = to_string(info.precision);
  if (info.variant.expert) description["expert"] = kExpertNames[static_cast<std::size_t>(*info.variant.expert)];
  description["device_bytes"] = info.device == Device::kCuda ? info.weight_bytes : 0;
  if (info.variant.bank) description["bank"] = *info.variant.bank;
  if (const auto calls = calls_of(info)) description["calls"] = *calls;
  return description;
}

void read_folder(const std::filesystem::path& folder, const RunOptions& options, const std::function<void()>& read) {
  loading(folder, options, read);
}

Model load_model(const std::filesystem::path& folder, const RunOptions& options) {
  return loading(folder, options, [&] { return Model::load(folder, options); });
}

namespace {

/// What models are together: the facts of the first, with the devices and weight bytes of all.
ModelInfo info_of(std::span<const Model> models) {
  ModelInfo all = models.front().info();
  if (models.size() == 1) return all;
  all.gpu = -1;
  all.weight_bytes = 0;
  all.device_name.clear();
  std::map<std::string, int> names;
  for (const Model& model : models) {
    all.weight_bytes += model.info().weight_bytes;
    ++names[model.info().device_name];
  }
  for (const auto& [name, count] : names) {
    all.device_name += fmt::format("{}{} x {}", all.device_name.empty() ? "" : ", ", count, name);
  }
  return all;
}

/// With the checks that need the model: more pieces than the model has rows are refused, fewer reported.
Tokenizer load_tokenizer(const std::filesystem::path& folder, const ModelInfo& info) {
  std::error_code unknown;  // then opening it says why
  const auto tokenizer_file = rejecting(folder, [&] { return Tokenizer::file_of(folder); });
  if (!std::filesystem::exists(tokenizer_file, unknown) && !unknown) {
    throw RejectedFile(
        fmt::format("{}: the tokenizer is missing. Try: weights/convert.py --tokenizer FILE when the folder is made, "
                    "or mmrec-ppl --ids, which needs none",
                    tokenizer_file.string()));
  }
  Tokenizer tokenizer = rejecting(folder, [&] { return Tokenizer::load(folder); });
  const std::int64_t pieces = tokenizer.vocab_size();
  if (pieces > info.vocab_size) {
    throw RejectedFile(
        fmt::format("{}: the tokenizer has more pieces than the model has embeddings (found {}, expected "
                    "at most {}). Try: the tokenizer that came with this model",
                    tokenizer_file.string(), pieces, info.vocab_size));
  }
  if (pieces < info.vocab_size) {
    warn(fmt::format("{}: {} pieces for {} embeddings; ids from {} on are never drawn", tokenizer_file.string(), pieces,
                     info.vocab_size, pieces));
  }
  return tokenizer;
}

/// Lines of -v: the model and where it runs, with the reason for each choice that `options` left open, and the
/// tokenizer, if there is one.
void log_loaded(const std::filesystem::path& folder, const RunOptions& options, const ModelInfo& info,
                const Tokenizer* tokenizer) {
  log_line(fmt::format("model {}: {}, {} layers of {}, vocabulary {}, {:.1f} M parameters, {:.1f} MB, fingerprint {}",
                       folder.string(), info.architecture, info.num_layers, info.model_dim, info.vocab_size,
                       static_cast<double>(info.parameters) * 1e-6, static_cast<double>(info.weight_bytes) * 1e-6,
                       hex(info.fingerprint)));
  if (tokenizer != nullptr) {
    log_line(fmt::format("tokenizer {}: {} pieces, BOS {}, EOS {}, fingerprint {}", Tokenizer::file_of(folder).string(),
                         tokenizer->vocab_size(), tokenizer->bos_id(), tokenizer->eos_id(),
                         hex(tokenizer->fingerprint())));
  }
  const bool on_gpu = info.device == Device::kCuda;
  const std::string device = options.device != Device::kAuto ? "as --device says"
                             : on_gpu                        ? "a usable GPU was found"
                                                             : "no usable GPU, or a build without CUDA";
  const std::string precision = options.precision != Precision::kAuto ? "as --precision says"
                                : on_gpu                              ? "the type of the stored weights"
                                                                      : "what the CPU computes in";
  const int threads =
      options.session.threads > 0 ? options.session.threads : kernels::ThreadPool::available_processors();
  const std::string more = !on_gpu                ? fmt::format(", {} threads", threads)
                           : info.batch_invariant ? std::string(", batch-invariant")
                                                  : std::string();
  log_line(fmt::format("device {} ({}), precision {} ({}){}", device_text(info), device, to_string(info.precision),
                       precision, more));
}

}  // namespace

Loaded load(const ModelCommand& command, bool with_tokenizer, bool one) {
  const Stopwatch watch;
  // A model may be loaded onto a GPU: asked for, or left open in a build that can.
  const auto built = backends();
  const bool gpu = command.run.device != Device::kCpu && std::find(built.begin(), built.end(), "cuda") != built.end();
  if (command.sandbox) {
    restrict_files(command.named, command.folder, gpu);
    gpu ? restrict_start() : restrict_calls();
  }
  Loaded loaded;
  if (command.run.all_gpus && !one) {
    read_folder(command.folder, command.run, [&] { loaded.models = Model::load_on_gpus(command.folder, command.run); });
  } else {
    loaded.models.push_back(load_model(command.folder, command.run));
  }
  if (command.sandbox && gpu) restrict_calls(true);
  loaded.info = info_of(loaded.models);
  if (with_tokenizer) loaded.tokenizer = load_tokenizer(command.folder, loaded.info);
  if (!command.quiet && command.run.precision == Precision::kAuto) {
    if (const std::string advice = bf16_advice(loaded.info, "--precision bf16"); !advice.empty()) log_line(advice);
  }
  if (command.verbose) {
    log_loaded(command.folder, command.run, loaded.info, loaded.tokenizer ? &*loaded.tokenizer : nullptr);
  }
  loaded.seconds = watch.seconds();
  return loaded;
}

void read_model_command(const Arguments& arguments, ModelCommand& command) {
  command.run = run_options(arguments);
  command.output = arguments.file("output");
  if (command.output == "-") command.output.reset();
  arguments.refuse_together("quiet", {"verbose"});
  command.quiet = arguments.has("quiet");
  command.verbose = arguments.has("verbose");
  command.sandbox = arguments.has("sandbox");
}

void name_files(const Arguments& arguments, const Program& program, ModelCommand& command,
                std::initializer_list<NamedFile> more) {
  command.named = named_files(arguments, program.options);
  command.named.push_back({{}, command.folder, Names::kInput});
  command.named.insert(command.named.end(), more.begin(), more.end());
  refuse_lost_files(command.named);
}

std::uint64_t decoded_bytes(const ModelInfo& info, std::int64_t first, std::int64_t steps) {
  const std::int64_t several_slots = 2 * info.memory_segment;
  const std::int64_t with_memory =
      info.memory_slots < 2 ? 0 : std::clamp<std::int64_t>(first + steps - several_slots, 0, steps);
  return static_cast<std::uint64_t>(steps) * info.bytes_per_token +
         static_cast<std::uint64_t>(with_memory) * info.memory_bytes;
}

std::string cost_text(double load_seconds, std::string_view work) {
  return fmt::format("load {:.3f} s | {} | peak {:.1f} MB", load_seconds, work,
                     static_cast<double>(peak_memory_bytes()) * 1e-6);
}

std::uint64_t peak_memory_bytes() {
  // Not getrusage: its maximum is inherited from the program that called exec.
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return 1024 * std::strtoull(line.c_str() + 6, nullptr, 10);
  }
  return 0;
}

std::string hex(std::uint64_t identity) { return fmt::format("{:016x}", identity); }
bool is_hex(std::string_view text) {
  return text.size() == 16 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace mmrec::apps
