#include "apps/generate/prompt.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>

#include "apps/common/cli.h"
#include "apps/common/input.h"
#include "apps/common/output.h"
#include "apps/common/progress.h"
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

std::string prompt_file(const GenerateCommand& command) {
  if (command.file) return *command.file;
  if (isatty(STDIN_FILENO) == 1) throw UsageError("no prompt (expected -p TEXT, -f FILE or piped stdin)");
  return "-";
}

Prompt read_prompt(const GenerateCommand& command) {
  if (!command.prompt && !command.file && command.state_in) return {};
  Prompt prompt;
  if (command.prompt) {
    prompt = {*command.prompt, "--prompt"};
  } else {
    const std::string file = prompt_file(command);
    prompt = {read_input(file), input_name(file)};
  }
  if (const auto runs = count_invalid_utf8(prompt.text); runs > 0) {
    warn(invalid_utf8_warning(prompt.source, runs));
  }
  return prompt;
}

std::vector<int> encode_prompt(const Tokenizer& tokenizer, const ModelInfo& info, std::string_view text, bool goes_on,
                               bool shows_progress, int threads) {
  Progress progress(Progress::Elsewhere::kLines, shows_progress && text.size() >= kLongText, ProgressUnit::kBytes);
  const auto on_progress = [&](std::size_t bytes) {
    progress.update(static_cast<std::int64_t>(bytes), std::ssize(text));
    return true;
  };
  std::vector<int> ids = tokenizer.encode(text, !goes_on, on_progress, threads);
  if (!ids.empty() || goes_on) return ids;
  const int bos = tokenizer.bos_id() >= 0 ? tokenizer.bos_id() : info.bos_token_id;
  if (bos < 0) throw UsageError("the prompt is empty and the model has no BOS to start from");
  return {bos};
}

std::vector<int> end_of_sequence(const ModelInfo& info, const GenerationDefaults& defaults,
                                 const Tokenizer& tokenizer) {
  if (!info.eos_token_ids.empty()) return info.eos_token_ids;
  for (const int id : defaults.eos_token_ids) {
    if (id < info.vocab_size) continue;
    throw RejectedFile(
        fmt::format("{}: eos_token_id: not a valid value (found {}, expected ids below the vocab_size {})",
                    defaults.file, id, info.vocab_size));
  }
  if (!defaults.eos_token_ids.empty()) return defaults.eos_token_ids;
  if (tokenizer.eos_id() >= 0) return {tokenizer.eos_id()};
  return {};
}

std::optional<PrefixCache> prefix_cache(const GenerateCommand& command, const ModelInfo& info,
                                        const Tokenizer& tokenizer) {
  if (!command.prefix_cache) return std::nullopt;
  if (info.variant.bank.value_or(false) && info.variant.calls != Calls::kStepwise) {
    throw UsageError(
        "--prefix-cache: not where a prompt is a call of the model, because its parts would be others (expected "
        "--calls stepwise)");
  }
  return PrefixCache(*command.prefix_cache, static_cast<std::uint64_t>(command.prefix_cache_mb) << 20, info,
                     command.run.session, tokenizer);
}

std::int64_t prefill(Session& session, std::span<const int> ids, PrefixCache* cache, bool quiet) {
  const std::int64_t cached = cache != nullptr ? cache->restore(session, ids) : 0;
  std::vector<std::int64_t> ends = {std::ssize(ids)};
  if (cache != nullptr) ends = PrefixCache::checkpoints(cached, std::ssize(ids));
  Progress progress(Progress::Elsewhere::kLines, !quiet);
  std::int64_t at = cached;
  for (const std::int64_t end : ends) {
    if (end == at || interrupt_exit_code() != 0) break;
    const auto part = ids.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(end - at));
    const std::int64_t before = session.position();
    session.prefill(part, {.on_progress = [&](std::int64_t done, std::int64_t) {
                      progress.update(at - cached + done, std::ssize(ids) - cached);
                      return interrupt_exit_code() == 0;
                    }});
    at += session.position() - before;
    if (at != end) break;
    if (cache != nullptr) cache->store(session, ids.first(static_cast<std::size_t>(end)));
  }
  return cached;
}

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

void consume_last(Session& session, const GenerateResult& result) {
  if (!result.tokens.empty() && result.finish_reason != FinishReason::kEndOfSequence) {
    session.step(std::span(&result.tokens.back(), 1));
  }
}

void save_state(const std::string& file, Session& session, const GenerateResult& result, const SamplerOptions& sampler,
                const Tokenizer& tokenizer, const std::string& with) {
  consume_last(session, result);
  write_state(file, session, sampler, tokenizer, with);
  if (result.finish_reason == FinishReason::kStopString) {
    warn(fmt::format("{}: the state goes on to the end of the last token drawn, the text ends before the stop string",
                     file));
  }
}

}  // namespace mmrec::apps
