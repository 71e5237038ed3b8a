// Files of one sequence's state: a text that goes on later, elsewhere, or in several ways.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "mmrec/export.h"
#include "mmrec/sampler.h"
#include "mmrec/session.h"
#include "mmrec/tokenizer.h"

namespace mmrec {

/// What a sequence has come to: all that is needed to go on as if it had never been interrupted.
struct SavedSequence {
  std::vector<std::byte> state;  ///< Session::save of a batch of 1: bound to the model, whatever the device
  std::vector<int> recent;       ///< its last tokens, oldest first: what repetition penalties and half a character need
  SamplerOptions sampler;        ///< that its tokens were drawn with
  std::uint64_t tokenizer_fingerprint = 0;  ///< 0: it knows token ids alone
  std::string computed_with = {};           ///< what computed_with() said where the state was made; empty: not known
  std::vector<int> tokens = {};             ///< all that the state has consumed; empty: not known
};

/// Of a session of batch 1; `computed_with` and `tokens` are left empty. Throws std::invalid_argument for another
/// batch, and what Session::save throws.
MMREC_EXPORT SavedSequence save_sequence(const Session& session, const SamplerOptions& sampler = {},
                                         const Tokenizer* tokenizer = nullptr);
/// Puts a session of batch 1 where the sequence was; position() and recent_tokens() are those then. Throws
/// std::runtime_error saying what was found and expected where the state is not of the session's model, or `tokenizer`
/// is given and is not the one it was saved with; the session is then unchanged.
MMREC_EXPORT void restore_sequence(Session& session, const SavedSequence& saved, const Tokenizer* tokenizer = nullptr);

/// The bytes of a state file: versioned and checksummed (docs/file-formats.md). They can betray the text: treat them
/// like it. Throws std::invalid_argument for what decode_sequence would refuse: a sampler's option out of range, more
/// than Session::kRecentTokens recent tokens, and more than 4096 bytes of computed_with.
MMREC_EXPORT std::vector<std::byte> encode_sequence(const SavedSequence& saved);
/// Throws std::runtime_error beginning with `name` and saying what was found and expected for bytes that are no state
/// file, damaged, or hold a value out of its range.
MMREC_EXPORT SavedSequence decode_sequence(std::span<const std::byte> bytes, const std::string& name = "state file");

/// Writes a state file, which only its owner can read: beside `path` first, put in its place when the disk has all of
/// it. Throws as encode_sequence, and std::system_error and std::runtime_error naming `path`; a file that was there
/// is then as it was.
MMREC_EXPORT void write_state_file(const std::filesystem::path& path, const SavedSequence& saved);
/// Throws as decode_sequence, and std::system_error where the file cannot be read.
MMREC_EXPORT SavedSequence read_state_file(const std::filesystem::path& path);

}  // namespace mmrec
