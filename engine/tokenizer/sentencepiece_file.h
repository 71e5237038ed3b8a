// tokenizer.model: a sentencepiece ModelProto, read with a protobuf reader that trusts no byte and written anew.
//
// What must stay true: sentencepiece never sees a byte of the file itself, only what serialize() writes from a checked
// SentencePieceFile. sentencepiece 0.1.97 crashes inside Load on a long piece, reads beyond an array for user-defined
// symbols that begin one another and for crafted normalisation rules, and accepts NaN scores and pieces that are not
// UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tokenizer/tokenizer_model.h"

namespace mmrec::engine {

/// Numbers of the file format.
enum class PieceType : std::uint8_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6
};

struct Piece {
  std::string text;  // as stored, "▁the"
  float score = 0.0F;
  PieceType type = PieceType::kNormal;
};

/// The limits of docs/file-formats.md.
inline constexpr std::size_t kMaxUserDefined = std::size_t{1} << 16;
inline constexpr std::size_t kMaxNestedUserDefined = 64;  // sentencepiece's PrefixMatcher keeps 64 matches

/// What this engine uses of the file. Invariants: pieces as check() in sentencepiece_file.cpp has it; the charsmap
/// passed check_charsmap().
struct SentencePieceFile {
  std::vector<Piece> pieces;
  int model_type = 1;  // 1 unigram, 2 BPE, 3 word, 4 char
  bool byte_fallback = false;
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;
  std::string charsmap;
  std::string unk_surface = " \xE2\x81\x87 ";  // what an unknown token decodes to
  int unk_id = -1;
  int bos_id = -1;  // -1: none
  int eos_id = -1;  // -1: none
};

/// Value of the byte piece "<0xNN>"; -1 if `piece` is not of this form.
int byte_of_piece(std::string_view piece);

/// Throws std::runtime_error beginning with `name`, the file's name in messages.
SentencePieceFile parse_sentencepiece(std::string_view bytes, const std::string& name);

/// A ModelProto of the fields above, with `add_dummy_prefix` in place of the file's.
std::string serialize(const SentencePieceFile& file, bool add_dummy_prefix);

}  // namespace mmrec::engine
