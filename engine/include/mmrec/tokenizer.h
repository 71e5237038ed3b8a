// Text to token ids and back. Optional: an embedder may bring its own tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mmrec/export.h"

namespace mmrec {

namespace engine {
class TokenizerModel;
struct Encoding;
}  // namespace engine

/// A sentencepiece model or a tiktoken rank file. Immutable and thread-safe; copies share it.
class MMREC_EXPORT Tokenizer {
 public:
  /// Loads tokenizer.model or tokenizer.tiktoken of a model folder (or the file itself: a rank file if its name ends in
  /// .tiktoken), with tokenizer_config.json beside it if there is one. The file is validated before sentencepiece sees
  /// it. Throws std::runtime_error naming file, found and expected, std::system_error where it cannot be read.
  static Tokenizer load(const std::filesystem::path& path);
  /// The same from bytes: those of the tokenizer's file and of a tokenizer_config.json, empty if there is none. `name`
  /// stands for the file in messages and tells its format as above.
  static Tokenizer from_bytes(std::string_view model, std::string_view config = {},
                              const std::string& name = "tokenizer.model");

  /// The file that load() takes from `folder`, whether or not it exists. Throws std::runtime_error where there are two.
  static std::filesystem::path file_of(const std::filesystem::path& folder);

  /// The highest id plus one.
  int vocab_size() const;
  int bos_id() const;  ///< -1: none
  int eos_id() const;  ///< -1: none
  int unk_id() const;  ///< -1: none
  /// Whether documents begin with BOS: tokenizer_config.json's add_bos_token, else whether there is a BOS.
  bool adds_bos() const;
  /// Identity of the file's bytes; of a rank file with the pattern and special tokens of the config.
  std::uint64_t fingerprint() const;

  /// Ids of `text`. BOS is put first if `add_bos` and adds_bos(). Invalid UTF-8 is replaced by U+FFFD.
  ///
  /// Special tokens are never recognised in the text. A rank file's ids are tiktoken's. Throws std::runtime_error where
  /// its pattern exceeds the limits of matching.
  ///
  /// For sentencepiece, texts beyond 64 KiB are tokenised in chunks, so that memory beyond the ids stays bounded. A
  /// chunk ends after a line if it can, else before white space, else between two characters. The ids are those of the
  /// uncut text as long as no piece of the vocabulary reaches across a cut: true of line ends where '\n' is a piece or
  /// a byte of its own, of white space where pieces hold it at their beginning only. (In a unigram model
  /// sentencepiece's fp32 score of the whole text so far can tip a near tie late in a long text; chunks keep it small.)
  std::vector<int> encode(std::string_view text, bool add_bos = true) const;
  /// The same of a long text: calls on_progress every 64 KiB or so, with the bytes of `text` that are done. Where it
  /// returns false the ids so far are returned; what it throws passes through. `threads` of the CPU (0: all the
  /// processors this process may use) share sentencepiece's chunks, and then it is called every few of these for each
  /// thread. Throws std::invalid_argument for `threads` < 0.
  std::vector<int> encode(std::string_view text, bool add_bos,
                          const std::function<bool(std::size_t bytes)>& on_progress, int threads = 1) const;
  /// The ids of each of many texts, as encode() gives them, by `threads` of the CPU as above. Throws what encode()
  /// throws of the first text that fails.
  std::vector<std::vector<int>> encode_batch(std::span<const std::string_view> texts, bool add_bos = true,
                                             int threads = 0) const;

  /// Text of `tokens`: control tokens vanish, tokens of bytes are gathered, bytes that are no UTF-8 become U+FFFD, the
  /// unknown token becomes the file's surface for it (" ⁇ "). The space that encode() puts before the text's first word
  /// is dropped. Throws std::out_of_range for an id outside [0, vocab_size).
  std::string decode(std::span<const int> tokens) const;

  /// The piece of one id as stored ("▁the"), of a rank file its bytes; empty for an id that no token has. Throws
  /// std::out_of_range.
  std::string piece(int token) const;

 private:
  friend class StreamDecoder;
  friend class StreamEncoder;
  MMREC_NO_EXPORT explicit Tokenizer(std::shared_ptr<const engine::TokenizerModel> model);
  std::shared_ptr<const engine::TokenizerModel> model_;
};

/// Encodes a long text in parts, so that the first ids are of use while the rest is encoded. The ids of all parts,
/// joined, are Tokenizer::encode of the text.
class MMREC_EXPORT StreamEncoder {
 public:
  /// Of a text that must live on. The other arguments are those of Tokenizer::encode.
  explicit StreamEncoder(Tokenizer tokenizer, std::string_view text, bool add_bos = true, int threads = 1);
  StreamEncoder(StreamEncoder&&) noexcept;             ///< movable only
  StreamEncoder& operator=(StreamEncoder&&) noexcept;  ///< likewise
  ~StreamEncoder();

  /// Appends the ids of the next part and returns whether another part follows. A part has some 64 KiB of the text,
  /// with several threads up to 256 KiB for each of them. Throws what Tokenizer::encode throws.
  bool next(std::vector<int>& ids);
  /// Bytes of the text that are done.
  std::size_t bytes() const;

 private:
  Tokenizer tokenizer_;
  std::unique_ptr<engine::Encoding> encoding_;
  bool puts_bos_;
  int threads_;
};

/// Decodes a stream of tokens into text, emitting complete UTF-8 characters only: what was emitted never changes. All
/// that push() and finish() return, joined, is Tokenizer::decode of the tokens.
class MMREC_EXPORT StreamDecoder {
 public:
  /// `at_start`: the stream begins the text, so the first word's leading space is dropped. False after a prompt.
  explicit StreamDecoder(Tokenizer tokenizer, bool at_start = true);

  /// Text that `token` completes; often empty inside a multi-byte character. Throws std::out_of_range for a bad id.
  std::string push(int token);
  /// The same, appended to `text`.
  void push(int token, std::string& text);
  /// As if all of these were pushed and their text dropped, but looks at the last ones only. Ids that the tokenizer
  /// does not know are passed over.
  void skip(std::span<const int> tokens);
  /// The end of the stream: an incomplete character becomes U+FFFD.
  std::string finish();

 private:
  Tokenizer tokenizer_;
  std::string pending_;  // bytes of an incomplete character
  bool at_start_;
};

}  // namespace mmrec
