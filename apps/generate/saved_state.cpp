#include "apps/generate/saved_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <vector>

#include "apps/common/cli.h"
#include "apps/common/output.h"
#include "models/files/replace_file.h"

namespace mmrec::apps {
namespace {

constexpr std::string_view kSeveral = "settings that changed on the way";

/// The items of `text` that `other` has not, of what computed_with() says.
std::string without(std::string_view text, std::string_view other) {
  constexpr std::string_view kBetween = "; ";
  const auto items_of = [&](std::string_view list) {
    std::vector<std::string_view> items;
    for (std::size_t end = 0; end != std::string_view::npos; list.remove_prefix(std::min(end + 2, list.size()))) {
      end = list.find(kBetween);
      items.push_back(list.substr(0, end));
    }
    return items;
  };
  const std::vector<std::string_view> others = items_of(other);
  std::vector<std::string_view> items = items_of(text);
  std::erase_if(items, [&](auto item) { return std::find(others.begin(), others.end(), item) != others.end(); });
  return fmt::format("{}", fmt::join(items, kBetween));
}

}  // namespace

SavedSequence read_state(const std::string& path) {
  try {
    return read_state_file(path);
  } catch (const std::runtime_error& error) {  // system errors too
    throw RejectedFile(error.what());
  }
}

std::string restore_state(Session& session, const SavedSequence& saved, const Tokenizer& tokenizer,
                          const std::string& path, const std::string& with) {
  try {
    restore_sequence(session, saved, &tokenizer);
  } catch (const std::system_error&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw RejectedFile(fmt::format("{}: {}", path, error.what()));
  }
  if (saved.computed_with == with || saved.computed_with.empty()) return saved.computed_with;
  warn(fmt::format("{}: computed with {} (this run: {})", path, printable(without(saved.computed_with, with)),
                   without(with, saved.computed_with)));
  return std::string(kSeveral);
}

void write_state(const std::string& path, const Session& session, const SamplerOptions& sampler,
                 const Tokenizer& tokenizer, const std::string& with) {
  try {
    SavedSequence saved = save_sequence(session, sampler, &tokenizer);
    saved.computed_with = with;
    write_state_file(path, saved);
  } catch (const std::runtime_error& error) {
    throw OutputError(error.what());
  }
}

void check_state_path(const std::string& path) {
  try {
    const models::Replacement possible(path, models::Replacement::Mode::kPrivate);
  } catch (const std::runtime_error& error) {
    throw OutputError(error.what());
  }
}

}  // namespace mmrec::apps
