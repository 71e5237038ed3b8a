#include "models/files/model_files.h"

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <system_error>

namespace mmrec::models {

namespace fs = std::filesystem;

fs::path resolve_model_file(const fs::path& folder, std::string_view name) {
  const fs::path path = folder / name;
  std::error_code error;
  fs::path target = fs::canonical(path, error);
  if (error) throw std::system_error(error, path.string() + ": cannot resolve");
  const fs::path own = fs::canonical(folder);
  const fs::path snapshots = own.parent_path();
  const bool is_cached =
      snapshots.filename() == "snapshots" && target.parent_path() == snapshots.parent_path() / "blobs";
  if (target.parent_path() == own || is_cached) return target;
  throw std::runtime_error(
      fmt::format("{}: a link out of the model folder (expected a file in the folder)", path.string()));
}

}  // namespace mmrec::models
