// What stands before the first drawn token of mmrec-generate, and behind the last: where a prompt comes from, its ids,
// their prefill, and the state that is saved.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/generate/options.h"
#include "apps/generate/sampling.h"
#include "mmrec/generate.h"
#include "mmrec/model.h"
#include "mmrec/session.h"
#include "mmrec/state_file.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// --prefix-cache: states of prompts and of their beginnings, in files of a folder, so that a prompt begins where a
/// prompt before it has been. A state is used only for the model, the tokenizer, all the tokens and all else that
/// decides its bits (mmrec/computed_with.h): a run with the cache is one whose prompt was consumed in parts. Of a
/// batch-invariant model these parts end where they change no bits (docs/numerics.md#batch-invariance). A damaged file
/// costs time only.
class PrefixCache {
 public:
  /// In the folder that --prefix-cache names, which is made if need be, private to its owner; its files are kept below
  /// --prefix-cache-mb in all by removing those that have not been used for longest. Throws UsageError for a model
  /// whose prompts cannot be cut, and WriteError where the folder cannot be made.
  PrefixCache(const GenerateCommand& command, const ModelInfo& model, const Tokenizer& tokenizer);

  /// Puts `session` behind the longest beginning of `ids` that there is a state of, and returns its length; 0: there is
  /// none. A file that cannot be used is reported, removed and passed over.
  std::int64_t restore(Session& session, std::span<const int> ids);

  /// The positions at which a prompt of `size` tokens should be stored: powers of 2, or the next places for a cut, so
  /// that at least half of what it has in common with another prompt need not be consumed again, and its end. Rising,
  /// beyond `from`.
  std::vector<std::int64_t> checkpoints(std::int64_t from, std::int64_t size) const;

  /// Keeps the state of a session that has consumed `ids`. What cannot be written is reported: it costs the next run
  /// time only.
  void store(const Session& session, std::span<const int> ids);

 private:
  struct Entry {
    std::filesystem::path path;
    std::uint64_t bytes = 0;
    std::filesystem::file_time_type used;
  };
  std::vector<Entry> entries() const;
  std::string name_of(std::int64_t count, std::uint64_t hash) const;
  void make_room() const;

  std::filesystem::path folder_;
  std::uint64_t most_bytes_;
  std::int64_t grid_;     // multiples of it are places for a cut
  std::string identity_;  // begins the names of what may be used
  std::string computed_with_;
  const Tokenizer& tokenizer_;
};

/// None is needed after a state, and stdin then not looked at unless it is asked for. Throws UsageError where there is
/// none, std::runtime_error where it cannot be read.
std::string read_prompt(const GenerateCommand& command);

/// The file that prompts come from: -f, else piped stdin. Throws UsageError where stdin is a terminal.
std::string prompt_file(const GenerateCommand& command);

/// A prompt's ids, begun as the tokenizer says; a prompt without any id starts from BOS. One that goes on from a state
/// begins nothing. `threads` share a long one (0: all the processors this process may use).
std::vector<int> encode_prompt(const Tokenizer& tokenizer, const ModelInfo& info, std::string_view text, bool goes_on,
                               bool shows_progress = false, int threads = 1);

/// What ends a sequence: what config.json says, else generation_config.json, else the tokenizer.
std::vector<int> end_of_sequence(const ModelInfo& info, const GenerationDefaults& defaults, const Tokenizer& tokenizer);

/// Consumes the prompt, with a progress bar where it takes more than one chunk, unless `quiet`; an interrupt ends it
/// after a chunk. Returns how many tokens the cache had.
std::int64_t prefill(Session& session, std::span<const int> ids, PrefixCache* cache, bool quiet);

/// --state-in. Throws RejectedFile, which names the file, if the file cannot be read or holds no state.
SavedSequence read_state(const std::string& path);

/// Puts `session`, which goes on with `with` (computed_with()), where the sequence was. Returns what a state that is
/// saved later was computed with; warns if that is not a single setting. Throws RejectedFile naming `path` where the
/// state is not of this model or tokenizer.
std::string restore_state(Session& session, const SavedSequence& saved, const Tokenizer& tokenizer,
                          const std::string& path, const std::string& with);

/// Throws WriteError naming the file; one that was there is then as it was.
void write_state(const std::string& path, const Session& session, const SamplerOptions& sampler,
                 const Tokenizer& tokenizer, const std::string& with);

/// Throws WriteError unless a state can be written to `path`.
void check_state_path(const std::string& path);

/// Consumes the last token drawn, which generate() has not: so that a text goes on behind it.
void consume_last(Session& session, const GenerateResult& result);

}  // namespace mmrec::apps
