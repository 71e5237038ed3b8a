// The model of a tokenizer.model. sentencepiece does the segmentation of a chunk of text; everything else is done here,
// on the pieces: its own decoder loses spaces and splits characters, and ids out of range abort it.
#include <sentencepiece_processor.h>

#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>

#include "engine/require.h"
#include "engine/tokenizer/charsmap.h"
#include "engine/tokenizer/sentencepiece_file.h"
#include "engine/tokenizer/tokenizer_config.h"
#include "engine/tokenizer/tokenizer_model.h"
#include "kernels/cpu/thread_pool.h"
#include "models/files/checksum.h"
#include "models/files/utf8.h"

namespace mmrec::engine {
namespace {

using sentencepiece::SentencePieceProcessor;

constexpr std::string_view kSpaceSymbol = "\xE2\x96\x81";  // ▁

/// Why sentencepiece refuses a call that returns its status; "" if it does not. std::bad_alloc passes.
template <class Call>
std::string fault_of(const Call& call) {
  try {
    const auto status = call();
    return status.ok() ? std::string() : status.ToString();
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  }
}

std::unique_ptr<SentencePieceProcessor> load_processor(const SentencePieceFile& file, bool add_dummy_prefix,
                                                       const std::string& name) {
  auto processor = std::make_unique<SentencePieceProcessor>();
  std::string fault = fault_of([&] { return processor->LoadFromSerializedProto(serialize(file, add_dummy_prefix)); });
  if (fault.empty() && processor->GetPieceSize() != static_cast<int>(file.pieces.size())) fault = "it lost pieces";
  expect(fault.empty(), "{}: sentencepiece refuses it: {}", name, fault);
  return processor;
}

Token token_of(const Piece& piece, const SentencePieceFile& file) {
  Token token{piece.text, {}, Token::Kind::kText};
  switch (piece.type) {
    case PieceType::kControl:
      token.kind = Token::Kind::kControl;
      break;
    case PieceType::kByte:
      token.kind = Token::Kind::kBytes;
      token.text = static_cast<char>(byte_of_piece(piece.text));
      break;
    case PieceType::kUnknown:
      token.kind = Token::Kind::kUnknown;
      token.text = file.unk_surface;
      break;
    default:
      for (std::string_view rest = piece.text; !rest.empty();) {
        const bool is_space = rest.starts_with(kSpaceSymbol);
        token.text += is_space ? ' ' : rest.front();
        rest.remove_prefix(is_space ? kSpaceSymbol.size() : 1);
      }
  }
  return token;
}

class SentencePieceModel final : public TokenizerModel {
 public:
  SentencePieceModel(const SentencePieceFile& file, const std::string& name)
      : byte_fallback_(file.byte_fallback),
        add_dummy_prefix_(file.add_dummy_prefix),
        remove_extra_whitespaces_(file.remove_extra_whitespaces) {
    tokens.reserve(file.pieces.size());
    for (const Piece& piece : file.pieces) tokens.push_back(token_of(piece, file));
    bos_id = file.bos_id;
    eos_id = file.eos_id;
    unk_id = file.unk_id;
    drops_first_space = add_dummy_prefix_ || remove_extra_whitespaces_;
    for (int byte = 0; byte < 256; ++byte) {
      const auto replacement = charsmap_replacement(file.charsmap, static_cast<unsigned char>(byte));
      is_space_[static_cast<std::size_t>(byte)] = replacement ? *replacement == " " : byte == ' ';
    }
    plain_ = load_processor(file, false, name);
    if (drops_first_space) prefixed_ = load_processor(file, true, name);
  }

  void encode_part(Encoding& encoding, std::vector<int>& ids, int threads) const override {
    // Several a thread even out uneven ones. The first parts have fewer, because what uses them waits.
    const auto each = static_cast<std::size_t>(threads);
    const std::size_t at_once = threads == 1 ? 1 : std::clamp(encoding.done / kChunkBytes, each, 4 * each);
    std::vector<Chunk> chunks;
    while (chunks.size() < at_once && !encoding.is_at_end()) {
      const std::string_view rest = encoding.given.substr(encoding.done);
      const bool goes_on = encoding.last || !chunks.empty();
      const auto before = encoding.done > 0 ? std::optional(encoding.given[encoding.done - 1]) : std::nullopt;
      chunks.push_back({.text = rest.substr(0, chunk_length(rest)), .before = before, .goes_on = goes_on, .ids = {}});
      encoding.done += chunks.back().text.size();
    }
    kernels::parallel_items(chunks.size(), threads, [&](std::size_t i) { encode_chunk(chunks[i]); });
    for (Chunk& chunk : chunks) {
      if (chunk.goes_on && !encoding.last) {  // those before it had no token
        chunk.goes_on = false;
        encode_chunk(chunk);
      }
      append(chunk, encoding.last, ids);
    }
  }

 private:
  /// A part of a text, and what becomes of it.
  struct Chunk {
    std::string_view text;
    std::optional<char> before;  // the byte before it
    bool goes_on = false;        // the text so far has tokens
    std::vector<int> ids;
  };

  bool space_at(std::string_view text, std::size_t i) const { return is_space_[static_cast<unsigned char>(text[i])]; }

  /// Bytes of the next chunk of `text`, which is not empty.
  std::size_t chunk_length(std::string_view text) const {
    if (text.size() <= kChunkBytes) return text.size();
    if (!remove_extra_whitespaces_ && !is_space_['\n']) {
      for (std::size_t i = kChunkBytes; i > 0; --i) {
        if (text[i - 1] == '\n' && text[i] != '\n') return i;
      }
    }
    for (std::size_t i = kChunkBytes; i > 0; --i) {
      if (space_at(text, i) && !space_at(text, i - 1)) return i;
    }
    for (std::size_t i = kChunkBytes; i > kChunkBytes - 4; --i) {
      if (!models::is_continuation(text[i])) return i;
    }
    return kChunkBytes;  // no UTF-8 here
  }

  void encode_chunk(Chunk& chunk) const {
    const SentencePieceProcessor* processor = add_dummy_prefix_ ? prefixed_.get() : plain_.get();
    if (chunk.goes_on) {
      // Where white space is squeezed, the library trims it from both ends of a chunk; the dummy prefix then stands for
      // the white space at the cut.
      const bool cut_at_space =
          is_space_[static_cast<unsigned char>(chunk.before.value_or('x'))] || space_at(chunk.text, 0);
      processor = remove_extra_whitespaces_ && cut_at_space ? prefixed_.get() : plain_.get();
    }
    std::string valid;
    std::string_view text = chunk.text;
    if (!models::is_valid_utf8(text)) {
      valid = models::replace_invalid_utf8(text);
      text = valid;
    }
    const std::string fault = fault_of([&] { return processor->Encode({text.data(), text.size()}, &chunk.ids); });
    expect(fault.empty(), "sentencepiece cannot encode the text: {}", fault);
    for (const int id : chunk.ids) at(id);
  }

  void append(const Chunk& chunk, std::optional<int>& last, std::vector<int>& ids) const {
    if (chunk.ids.empty()) return;
    // Without byte fallback the library makes one unknown token of a run of unknown characters.
    const bool joins_unknown = !byte_fallback_ && last == unk_id && chunk.ids.front() == unk_id;
    ids.insert(ids.end(), chunk.ids.begin() + (joins_unknown ? 1 : 0), chunk.ids.end());
    last = chunk.ids.back();
  }

  bool byte_fallback_, add_dummy_prefix_, remove_extra_whitespaces_;
  std::array<bool, 256> is_space_{};  // bytes that normalise to a space

  // The file's model with its dummy prefix (the space put before a text) on and off. One of them is the file itself;
  // the other continues texts and is null where no continuation can need it.
  std::unique_ptr<SentencePieceProcessor> prefixed_, plain_;
};

}  // namespace

std::unique_ptr<TokenizerModel> load_sentencepiece(std::string_view model, const std::string& name,
                                                   std::string_view config, const std::string& config_name) {
  auto loaded = std::make_unique<SentencePieceModel>(parse_sentencepiece(model, name), name);
  loaded->fingerprint = models::crc64(std::as_bytes(std::span(model)));
  apply(config.empty() ? TokenizerConfig{} : parse_tokenizer_config(config, config_name, false), config_name, name,
        *loaded);
  return loaded;
}

}  // namespace mmrec::engine
