// --state-in, --state-out and --prefix-cache of mmrec-generate: files of a sequence's state, as programs treat them.
#pragma once

#include <string>

#include "mmrec/state_file.h"

namespace mmrec::apps {

/// Throws RejectedFile, which names the file, if the file cannot be read or holds no state.
SavedSequence read_state(const std::string& path);

/// Puts `session`, which goes on with `with` (computed_with()), where the sequence was. Returns what a state that is
/// saved later was computed with; warns where that is not one and the same. Throws RejectedFile naming `path` where the
/// state is not of this model or tokenizer.
std::string restore_state(Session& session, const SavedSequence& saved, const Tokenizer& tokenizer,
                          const std::string& path, const std::string& with);

/// Throws OutputError naming the file; one that was there is then as it was.
void write_state(const std::string& path, const Session& session, const SamplerOptions& sampler,
                 const Tokenizer& tokenizer, const std::string& with);

/// Throws OutputError unless a state can be written to `path`.
void check_state_path(const std::string& path);

}  // namespace mmrec::apps
