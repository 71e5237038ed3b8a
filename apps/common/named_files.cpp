#include "apps/common/named_files.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "models/files/file.h"
#include "models/files/model_files.h"
#include "models/files/replace_file.h"

namespace mmrec::apps {
namespace {

/// The file of a name, or the folder and the name of one that is not there yet.
struct Place {
  dev_t device = 0;
  ino_t inode = 0;
  std::string name;
  mode_t mode = 0;

  bool is(const Place& other) const { return device == other.device && inode == other.inode && name == other.name; }
};

/// None if there is no such place. Opening it says why.
std::optional<Place> place_of(const std::string& path, int standard) {
  struct stat status = {};
  if ((path == "-" ? fstat(standard, &status) : stat(path.c_str(), &status)) == 0) {
    return Place{status.st_dev, status.st_ino, {}, status.st_mode};
  }
  const std::filesystem::path target = models::followed(path);
  const std::filesystem::path folder = target.has_parent_path() ? target.parent_path() : ".";
  if (stat(folder.c_str(), &status) != 0) return std::nullopt;
  return Place{status.st_dev, status.st_ino, target.filename(), 0};
}

/// Whether the file at `place` is read where `input` is.
bool is_read(const Place& place, const NamedFile& input) {
  const auto read = place_of(input.path, STDIN_FILENO);
  if (!read) return false;
  if (!S_ISDIR(read->mode)) return place.is(*read) && !S_ISCHR(read->mode) && !S_ISSOCK(read->mode);
  if (place.device == read->device && place.inode == read->inode) return models::is_model_file(place.name);
  for (const std::string& name : models::names_in(input.path)) {
    if (!models::is_model_file(name)) continue;
    const auto file = place_of(std::filesystem::path(input.path) / name, -1);
    if (file && place.is(*file)) return true;
  }
  return false;
}

std::string shown(const NamedFile& file, std::string_view standard) {
  const std::string name = file.path == "-" ? std::string(standard) : fmt::format("'{}'", printable(file.path));
  return file.option.empty() ? name : fmt::format("--{} {}", file.option, name);
}

}  // namespace

std::vector<NamedFile> named_files(const Arguments& arguments, std::span<const Option> options) {
  std::vector<NamedFile> files;
  for (const Option& option : options) {
    if (option.value.names == Names::kNothing) continue;
    for (std::string& path : arguments.list(option.name)) {
      files.push_back({option.name, std::move(path), option.value.names});
    }
  }
  for (const std::string& path : arguments.positionals()) files.push_back({{}, path, Names::kInput});
  if (!arguments.has("output")) files.push_back({{}, "-", Names::kOutput});
  return files;
}

void refuse_lost_inputs(std::span<const NamedFile> files, const NamedFile& output) {
  const auto place = place_of(output.path, STDOUT_FILENO);
  if (!place) return;
  for (const NamedFile& input : files) {
    if (input.as != Names::kInput || (input.option == "state-in" && output.option == "state-out")) continue;
    if (!is_read(*place, input)) continue;
    throw UsageError(fmt::format("{}: is the same file as the input {} (expected another file to write to)",
                                 shown(output, "stdout"), shown(input, "stdin")));
  }
}

void refuse_lost_files(std::span<const NamedFile> files) {
  const auto is_stdin = [](const NamedFile& file) {
    return file.path == "-" && file.as == Names::kInput && file.option != "state-in";  // a state is in a file
  };
  if (std::ranges::count_if(files, is_stdin) > 1) throw UsageError("-: given more than once");
  std::vector<std::pair<const NamedFile*, Place>> outputs;
  for (const NamedFile& file : files) {
    if (file.as != Names::kOutput) continue;
    refuse_lost_inputs(files, file);
    const auto place = place_of(file.path, STDOUT_FILENO);
    if (!place || (place->mode != 0 && !S_ISREG(place->mode))) continue;
    for (const auto& [other, its_place] : outputs) {
      if (!place->is(its_place)) continue;
      throw UsageError(fmt::format("{}: is the same file as the output {} (expected another file to write to)",
                                   shown(file, "stdout"), shown(*other, "stdout")));
    }
    outputs.emplace_back(&file, *place);
  }
}

}  // namespace mmrec::apps
