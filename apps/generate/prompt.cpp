#include "apps/generate/prompt.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <map>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "apps/common/cli.h"
#include "apps/common/input.h"
#include "apps/common/model_folder.h"
#include "apps/common/progress.h"
#include "mmrec/computed_with.h"
#include "mmrec/errors.h"
#include "models/files/file.h"
#include "models/files/replace_file.h"

namespace mmrec::apps {
namespace {

constexpr std::string_view kSeveral = "settings that changed on the way";

/// The items of `text` that `other` has not, of what computed_with() says.
std::string without(std::string_view text, std::string_view other) {
  constexpr std::string_view kBetween = "; ";
  const std::vector<std::string_view> others = split(other, kBetween);
  std::vector<std::string_view> items = split(text, kBetween);
  std::erase_if(items, [&](auto item) { return std::find(others.begin(), others.end(), item) != others.end(); });
  return fmt::format("{}", fmt::join(items, kBetween));
}

constexpr std::string_view kEnding = ".prefix";
constexpr std::int64_t kFirstCheckpoint = 256;       // less is consumed in no time
constexpr std::int64_t kCutsWithoutSegments = 4096;  // docs/numerics.md#batch-invariance

/// FNV-1a of `bytes`, behind those that gave `hash`: of what a state was computed with, then of its ids. It finds files
/// quickly; what a file holds decides whether it is used.
std::uint64_t name_hash(std::string_view bytes, std::uint64_t hash = 0xCBF29CE484222325U) {
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001B3U;
  return hash;
}

std::string_view bytes_of(std::span<const int> ids) {
  return {reinterpret_cast<const char*>(ids.data()), ids.size_bytes()};
}

/// The number of tokens that a name of this identity tells.
std::optional<std::int64_t> count_in(std::string_view name, std::string_view identity) {
  if (!name.starts_with(identity) || !name.ends_with(kEnding)) return std::nullopt;
  const auto count = parse_integer(split(name.substr(identity.size()), "-").front());
  return count.value_or(0) < 1 ? std::nullopt : count;
}

/// Whether a file is one of these, of whatever model, or what a killed writer of one left (see Replacement): nothing
/// else in the folder is ever touched.
bool is_ours(std::string_view name) {
  constexpr std::string_view kLeft = ".mmrec-";
  if (name.starts_with(kLeft)) return is_hex(name.substr(kLeft.size()));
  if (!name.ends_with(kEnding)) return false;
  name.remove_suffix(kEnding.size());
  const std::vector<std::string_view> fields = split(name, "-");
  return fields.size() == 6 && is_hex(fields[0]) && is_hex(fields[1]) && is_hex(fields[5]);
}

/// Gives a file of the cache the time of now. Not by utimensat(): --sandbox refuses it, since it reaches any file.
void touch(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return;
  struct stat status = {};
  if (::fstat(fd, &status) == 0) (void)!::ftruncate(fd, status.st_size);  // no file of the cache is ever appended to
  (void)::close(fd);
}

}  // namespace

std::string prompt_file(const GenerateCommand& command) {
  if (command.file) return *command.file;
  if (isatty(STDIN_FILENO) == 1) throw UsageError("no prompt (expected -p TEXT, -f FILE or piped stdin)");
  return "-";
}

std::string read_prompt(const GenerateCommand& command) {
  if (!command.prompt && !command.file && command.state_in) return {};
  const std::string file = command.prompt ? "" : prompt_file(command);
  std::string prompt = command.prompt ? *command.prompt : read_input(file);
  if (const auto runs = count_invalid_utf8(prompt); runs > 0) {
    warn(invalid_utf8_warning(command.prompt ? "--prompt" : input_name(file), runs));
  }
  return prompt;
}

std::vector<int> encode_prompt(const Tokenizer& tokenizer, const ModelInfo& info, std::string_view text, bool goes_on,
                               bool shows_progress, int threads) {
  Progress progress(shows_progress && text.size() >= kLongText, ProgressUnit::kBytes);
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

std::int64_t prefill(Session& session, std::span<const int> ids, PrefixCache* cache, bool quiet) {
  const std::int64_t cached = cache != nullptr ? cache->restore(session, ids) : 0;
  std::vector<std::int64_t> ends = {std::ssize(ids)};
  if (cache != nullptr) ends = cache->checkpoints(cached, std::ssize(ids));
  Progress progress(!quiet);
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
  return rethrown_as<RejectedFile>([&] { return read_state_file(path); });
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
  rethrown_as<WriteError>([&] {
    SavedSequence saved = save_sequence(session, sampler, &tokenizer);
    saved.computed_with = with;
    write_state_file(path, saved);
  });
}

void check_state_path(const std::string& path) {
  rethrown_as<WriteError>([&] { const models::Replacement possible(path, models::Replacement::Mode::kPrivate); });
}

void consume_last(Session& session, const GenerateResult& result) {
  if (!result.tokens.empty() && result.finish_reason != FinishReason::kEndOfSequence) {
    session.step(std::span(&result.tokens.back(), 1));
  }
}

PrefixCache::PrefixCache(const GenerateCommand& command, const ModelInfo& model, const Tokenizer& tokenizer)
    : folder_(*command.prefix_cache),
      most_bytes_(static_cast<std::uint64_t>(command.prefix_cache_mb) << 20),
      grid_(!model.batch_invariant      ? 1
            : model.memory_segment != 0 ? model.memory_segment
                                        : kCutsWithoutSegments),
      identity_(fmt::format("{}-{}-{}-{}-", hex(model.fingerprint), hex(tokenizer.fingerprint()),
                            model.device == Device::kCpu ? "cpu" : "cuda", to_string(model.precision))),
      computed_with_(computed_with(model, command.run.session)),
      tokenizer_(tokenizer) {
  if (model.variant.bank.value_or(false) && model.variant.calls != Calls::kStepwise) {
    throw UsageError(
        "--prefix-cache: not where a prompt is a call of the model, because its parts would be others (expected "
        "--calls stepwise)");
  }
  if (mkdir(folder_.c_str(), 0700) != 0 && errno != EEXIST) {
    throw WriteError(
        fmt::format("{}: cannot make the folder ({})", folder_.string(), std::generic_category().message(errno)));
  }
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder_, ignored)) {
    throw WriteError(fmt::format("{}: not a folder", folder_.string()));
  }
}

std::string PrefixCache::name_of(std::int64_t count, std::uint64_t hash) const {
  return fmt::format("{}{}-{}{}", identity_, count, hex(hash), kEnding);
}

std::vector<PrefixCache::Entry> PrefixCache::entries() const {
  std::vector<Entry> entries;
  for (const std::string& name : models::names_in(folder_)) {
    if (!is_ours(name)) continue;
    Entry entry{folder_ / name, 0, {}};
    std::error_code no_size, no_time;  // gone, or not to be asked now
    entry.bytes = std::filesystem::file_size(entry.path, no_size);
    entry.used = std::filesystem::last_write_time(entry.path, no_time);
    if (!no_size && !no_time) entries.push_back(std::move(entry));
  }
  return entries;
}

std::int64_t PrefixCache::restore(Session& session, std::span<const int> ids) {
  std::map<std::int64_t, std::uint64_t> hashes;  // of beginnings that there may be states of
  for (const Entry& entry : entries()) {
    const auto count = count_in(entry.path.filename().string(), identity_);
    const bool fits = count && (*count == std::ssize(ids) || (*count < std::ssize(ids) && *count % grid_ == 0));
    if (fits) hashes.emplace(*count, 0);
  }
  std::uint64_t hash = name_hash(computed_with_);
  std::size_t hashed = 0;
  for (auto& [count, value] : hashes) {
    const auto end = static_cast<std::size_t>(count);
    value = hash = name_hash(bytes_of(ids.subspan(hashed, end - hashed)), hash);
    hashed = end;
  }
  for (; !hashes.empty(); hashes.erase(std::prev(hashes.end()))) {
    const auto& [count, value] = *hashes.rbegin();
    const std::filesystem::path path = folder_ / name_of(count, value);
    std::error_code fault;
    if (!std::filesystem::exists(path, fault)) continue;
    try {
      const SavedSequence saved = read_state_file(path);
      const auto beginning = ids.first(static_cast<std::size_t>(count));
      const bool is_of_it = std::equal(saved.tokens.begin(), saved.tokens.end(), beginning.begin(), beginning.end());
      if (!is_of_it || saved.computed_with != computed_with_) continue;  // two of one name
      restore_sequence(session, saved, &tokenizer_);
      if (session.position() != count) throw std::runtime_error("found another number of tokens than its name's");
      touch(path);
      return count;
    } catch (const std::system_error& error) {  // the system's fault, and none of the file's
      session.reset();
      warn(fmt::format("{}: not used ({})", path.string(), error.what()));
    } catch (const std::runtime_error& error) {
      session.reset();
      std::filesystem::remove(path, fault);
      warn(fmt::format("{}: not used, and removed ({})", path.string(), error.what()));
    }
  }
  return 0;
}

std::vector<std::int64_t> PrefixCache::checkpoints(std::int64_t from, std::int64_t size) const {
  std::vector<std::int64_t> points;
  for (std::int64_t next = kFirstCheckpoint; next < size; next *= 2) {
    const std::int64_t point = (next + grid_ - 1) / grid_ * grid_;
    if (point > std::max(from, points.empty() ? 0 : points.back()) && point < size) points.push_back(point);
  }
  if (size > from) points.push_back(size);
  return points;
}

void PrefixCache::store(const Session& session, std::span<const int> ids) {
  const std::uint64_t hash = name_hash(bytes_of(ids), name_hash(computed_with_));
  const std::filesystem::path path = folder_ / name_of(std::ssize(ids), hash);
  try {
    SavedSequence saved = save_sequence(session, {}, &tokenizer_);
    saved.computed_with = computed_with_;
    saved.tokens.assign(ids.begin(), ids.end());
    write_state_file(path, saved);
  } catch (const std::runtime_error& error) {
    warn(fmt::format("the state is not kept: {}", error.what()));
  }
  make_room();
}

void PrefixCache::make_room() const {
  std::vector<Entry> all = entries();
  std::sort(all.begin(), all.end(), [](const Entry& a, const Entry& b) { return a.used < b.used; });
  std::uint64_t bytes = 0;
  for (const Entry& entry : all) bytes += entry.bytes;
  for (auto oldest = all.begin(); oldest != all.end() && bytes > most_bytes_; ++oldest) {
    std::error_code ignored;  // another process may have been faster
    std::filesystem::remove(oldest->path, ignored);
    bytes -= oldest->bytes;
  }
}

}  // namespace mmrec::apps
