#include "apps/saved_state.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include "apps/cli.h"
#include "apps/output.h"

namespace mmrec::apps {

SavedSequence read_state(const std::string& path) {
  try {
    return read_state_file(path);
  } catch (const std::runtime_error& error) {  // system errors too
    throw RejectedFile(error.what());
  }
}

void restore_state(Session& session, const SavedSequence& saved, const Tokenizer& tokenizer, const std::string& path) {
  try {
    restore_sequence(session, saved, &tokenizer);
  } catch (const std::system_error&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw RejectedFile(fmt::format("{}: {}", path, error.what()));
  }
}

void write_state(const std::string& path, const SavedSequence& saved) {
  try {
    write_state_file(path, saved);
  } catch (const std::runtime_error& error) {
    throw OutputError(error.what());
  }
}

void check_state_path(const std::string& path) {
  const auto refuse = [&](int error) {
    throw OutputError(fmt::format("{}: cannot write ({})", path, std::generic_category().message(error)));
  };
  std::error_code ignored;
  if (path.empty()) refuse(ENOENT);
  if (std::filesystem::is_directory(path, ignored)) refuse(EISDIR);
  std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) folder = ".";
  if (access(folder.c_str(), W_OK | X_OK) != 0) refuse(errno);
}

}  // namespace mmrec::apps
