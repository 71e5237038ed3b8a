#include "engine/quantize/output_folder.h"

#include <fmt/format.h>

#include <system_error>
#include <utility>

#include "engine/require.h"
#include "mmrec/errors.h"
#include "models/files/file.h"

namespace mmrec::engine {
namespace {

/// write(), whose faults become WriteError.
template <class Write>
auto writing(const Write& write) {
  try {
    return write();
  } catch (const std::system_error& error) {
    throw WriteError(error.what());
  }
}

}  // namespace

OutputFile::OutputFile(const std::filesystem::path& path)
    : path_(path),
      replacement_(writing([&] { return models::Replacement(path, models::Replacement::Mode::kUsual); })) {}

void OutputFile::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  writing([&] { replacement_.write(offset, bytes); });
}

OutputFolder::OutputFolder(std::filesystem::path path) : path_(std::move(path)) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path_, error);
  const bool is_folder = std::filesystem::is_directory(status);
  require(!std::filesystem::exists(status) || (is_folder && models::names_in(path_, 1).empty()),
          "{}: found {}, expected a new or an empty folder", path_.string(), is_folder ? "files in it" : "a file");
  is_new_ = std::filesystem::create_directory(path_, error);
  if (error) throw WriteError(fmt::format("{}: cannot create the folder: {}", path_.string(), error.message()));
}

OutputFolder::~OutputFolder() {
  std::error_code ignored;
  for (const std::filesystem::path& file : files_) std::filesystem::remove(file, ignored);
  if (is_new_) std::filesystem::remove(path_, ignored);
}

void OutputFolder::commit(OutputFile& file) {
  files_.push_back(file.path_);
  writing([&] { file.replacement_.commit(); });
}

}  // namespace mmrec::engine
