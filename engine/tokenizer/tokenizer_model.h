// What a tokenizer's file becomes, whatever its format: a table of tokens, which is all that decoding needs, and an
// encoder. Tokenizer and StreamDecoder are written on it; each format is an implementation of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mmrec::engine {

/// The limits of docs/file-formats.md.
inline constexpr std::size_t kMaxTokenizerBytes = std::size_t{64} << 20;
inline constexpr std::size_t kMaxTokens = std::size_t{1} << 20;
inline constexpr std::size_t kMaxTokenBytes = 1024;

/// What one id contributes to the text.
struct Token {
  enum class Kind : std::uint8_t {
    kText,     // whole characters, of which a text's first space may be dropped
    kBytes,    // bytes that make characters together with those of the tokens around
    kUnknown,  // text that stands for what the vocabulary lacks
    kControl,  // nothing: special tokens, and ids that no token has
  };
  std::string piece;  // as the file stores it, "▁the"
  std::string text;   // empty for control tokens
  Kind kind = Kind::kControl;
};

/// A text that is encoded in parts, and how far it is.
struct Encoding {
  explicit Encoding(std::string_view text) : given(text) {}
  std::string_view text() const { return valid.empty() ? given : valid; }
  bool is_at_end() const { return done == text().size(); }

  std::string_view given;
  std::string valid;          // if set, the text with U+FFFD for what is no UTF-8
  std::size_t done = 0;       // bytes of text()
  std::optional<int> last{};  // id so far
};

/// Immutable once loaded, and thread-safe.
class TokenizerModel {
 public:
  TokenizerModel() = default;
  TokenizerModel(const TokenizerModel&) = delete;
  TokenizerModel& operator=(const TokenizerModel&) = delete;
  virtual ~TokenizerModel() = default;

  /// Appends the ids of the next part, without BOS: about kChunkBytes, with several threads a few times that for each.
  /// Invalid UTF-8 is read as U+FFFD. The ids of all parts do not depend on `threads`, which is at least 1. Requires:
  /// the text is not at its end.
  static constexpr std::size_t kChunkBytes = std::size_t{64} << 10;
  virtual void encode_part(Encoding& encoding, std::vector<int>& ids, int threads) const = 0;

  /// Throws std::out_of_range for an id that is none.
  const Token& at(int token) const;
  /// The first token whose piece is `piece`; -1: none.
  int find(std::string_view piece) const;

  std::vector<Token> tokens;
  int bos_id = -1;  // -1: none
  int eos_id = -1;
  int unk_id = -1;
  bool adds_bos = false;
  bool drops_first_space = false;  // a text's: encode() puts one there
  std::uint64_t fingerprint = 0;
};

/// The model of a tokenizer.model. `config` is the text of a tokenizer_config.json, empty if there is none; the names
/// stand for the files in messages. Throws std::runtime_error.
std::unique_ptr<TokenizerModel> load_sentencepiece(std::string_view model, const std::string& name,
                                                   std::string_view config, const std::string& config_name);

/// The model of a tokenizer.tiktoken, likewise. It needs the config, for pattern and special tokens.
std::unique_ptr<TokenizerModel> load_tiktoken(std::string_view ranks, const std::string& name, std::string_view config,
                                              const std::string& config_name);

}  // namespace mmrec::engine
