// --prefix-cache: states of prompts and of their beginnings, in files of a folder, so that a prompt begins where a
// prompt before it has been.
//
// What must stay true: a state is used only for the model, the tokenizer, all the tokens and all else that decides its
// bits (mmrec/computed_with.h). So a run with the cache is one whose prompt was consumed in parts. A damaged file costs
// time only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "mmrec/model.h"
#include "mmrec/session.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

class PrefixCache {
 public:
  /// In `folder`, which is made if need be, private to its owner; its files are kept below `most_bytes` in all by
  /// removing those that have not been used for longest. Throws OutputError where the folder cannot be made.
  PrefixCache(std::filesystem::path folder, std::uint64_t most_bytes, const ModelInfo& model,
              const SessionOptions& options, const Tokenizer& tokenizer);

  /// Puts `session` behind the longest beginning of `ids` that there is a state of, and returns its length; 0: there is
  /// none. A file that cannot be used is reported, removed and passed over.
  std::int64_t restore(Session& session, std::span<const int> ids);

  /// Where a prompt of so many tokens should be stored on its way: powers of 2, so that at least half of what it has in
  /// common with another prompt need not be consumed again, and its end. Rising, beyond `from`.
  static std::vector<std::int64_t> checkpoints(std::int64_t from, std::int64_t size);

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
  std::string identity_;  // begins the names of what may be used
  std::string computed_with_;
  const Tokenizer& tokenizer_;
};

}  // namespace mmrec::apps
