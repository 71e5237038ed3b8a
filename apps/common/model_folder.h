// Finding and loading a model folder with its tokenizer, and saying why where that fails.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/common/arguments.h"
#include "apps/common/named_files.h"
#include "mmrec/model.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// The folder named by -m, else the bundled model: beside the installed program, else where the program was built.
/// Throws RejectedFile naming both places.
std::filesystem::path model_folder(const Arguments& arguments);

/// What --device, --precision, --threads, --prefill, --sweep-tol, --expert, --calls and --bank say.
struct RunOptions : LoadOptions {
  bool all_gpus = false;  // instead of one
  SessionOptions session = {};
};
/// Warnings of loading will go to stderr.
RunOptions run_options(const Arguments& arguments);

/// What the command lines of programs that run a model have in common.
struct ModelCommand {
  RunOptions run;
  std::filesystem::path folder;
  std::optional<std::string> output;  // none: stdout
  bool quiet = false;
  bool verbose = false;
  bool sandbox = false;
  std::vector<NamedFile> named;  // the files that are opened by name: those of the command line, and the model's folder
};
/// Sets all but the folder and the files.
void read_model_command(const Arguments& arguments, ModelCommand& command);
/// Sets the files, when the folder is known. `more` are files that no option names. Throws as refuse_lost_files().
void name_files(const Arguments& arguments, const Program& program, ModelCommand& command,
                std::initializer_list<NamedFile> more = {});

/// The models of a run, and the tokenizer that they came with.
struct Loaded {
  std::vector<Model> models;
  ModelInfo info;
  std::optional<Tokenizer> tokenizer;
  double seconds = 0.0;
};
/// Loads them in a sandbox, if one is asked for, and says what -v asks for. With `one` the first of several GPUs alone.
Loaded load(const ModelCommand& command, bool with_tokenizer, bool one = false);

/// What --sweep-tol says, or "auto"; for JSON.
nlohmann::ordered_json sweep_tolerance_json(const SessionOptions& options);

/// What the model runs on: "cpu", "cuda (NVIDIA H200)", for any GPU but the first "cuda:1 (NVIDIA H200)", and for
/// several "cuda:all (2 x NVIDIA H200)".
std::string device_text(const ModelInfo& info);

/// Where and how the model runs: "cpu", or "cuda (NVIDIA H200), bf16".
std::string place_of(const ModelInfo& info);

/// How the model's calls are cut: "stepwise", "prompt" or "whole", or "one" where there is no bank; none for models
/// without calls.
std::optional<std::string_view> calls_of(const ModelInfo& info);

/// `description` of a model with what it runs on: device, precision and GPU bytes; and with the variant that runs.
nlohmann::ordered_json with_device(nlohmann::ordered_json description, const ModelInfo& info);

/// Calls `read`, which reads files of a model folder: every fault of a file becomes RejectedFile.
void read_folder(const std::filesystem::path& folder, const RunOptions& options, const std::function<void()>& read);

/// Model::load; every fault of a file becomes RejectedFile.
Model load_model(const std::filesystem::path& folder, const RunOptions& options);

/// Weight bytes that decoding `steps` tokens from position `first` reads.
std::uint64_t decoded_bytes(const ModelInfo& info, std::int64_t first, std::int64_t steps);

/// What a run cost: "load 0.100 s | WORK | peak 12.3 MB".
std::string cost_text(double load_seconds, std::string_view work);

/// Peak resident bytes of this process; 0 where the system does not say.
std::uint64_t peak_memory_bytes();

/// A 64-bit identity as 16 hexadecimal digits.
std::string hex(std::uint64_t identity);
/// Whether `text` is what hex() writes.
bool is_hex(std::string_view text);

}  // namespace mmrec::apps
