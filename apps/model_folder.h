// Finding and loading a model folder with its tokenizer, and saying why where that fails.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "apps/cli.h"
#include "mmrec/model.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// The folder named by -m, else the bundled model: beside the installed program, else where the program was built.
/// Throws RejectedFile naming both places.
std::filesystem::path model_folder(const Arguments& arguments);

/// What --device, --threads, --prefill and --sweep-tol say.
struct RunOptions {
  Device device = Device::kAuto;
  SessionOptions session;
};
RunOptions run_options(const Arguments& arguments);

/// The names --prefill takes, in the order of PrefillMode.
std::span<const std::string_view> prefill_names();

/// Model::load; warnings go to stderr, every fault of a file becomes RejectedFile.
Model load_model(const std::filesystem::path& folder, const RunOptions& options);

/// Tokenizer::load with the checks that need the model: more pieces than the model has rows are refused, fewer
/// reported.
Tokenizer load_tokenizer(const std::filesystem::path& folder, const ModelInfo& info);

/// Peak resident bytes of this process; 0 where the system does not say.
std::uint64_t peak_memory_bytes();

/// A 64-bit identity as 16 hexadecimal digits.
std::string hex(std::uint64_t identity);

}  // namespace mmrec::apps
