// --state-in, --state-out and --prefix-cache of mmrec-generate: files of a sequence's state, as programs treat them.
#pragma once

#include <string>

#include "mmrec/state_file.h"

namespace mmrec::apps {

/// Throws RejectedFile naming the file where it cannot be read or is none.
SavedSequence read_state(const std::string& path);

/// Puts `session` where the sequence was. Throws RejectedFile naming `path` where the state is not of this model or
/// tokenizer.
void restore_state(Session& session, const SavedSequence& saved, const Tokenizer& tokenizer, const std::string& path);

/// Throws OutputError naming the file; one that was there is then as it was.
void write_state(const std::string& path, const SavedSequence& saved);

/// Throws OutputError where a state could not be written to `path` for reasons that show before any work is done.
void check_state_path(const std::string& path);

}  // namespace mmrec::apps
