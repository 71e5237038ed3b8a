// Text to token ids and back. Optional: an embedder may bring its own tokens.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mmrec {

/// A sentencepiece model. Immutable and thread-safe; copies share it.
class Tokenizer {
 public:
  /// Loads tokenizer.model of a model folder (or the file itself), with tokenizer_config.json beside it if there is one.
  /// The file is validated before sentencepiece sees it. Throws std::runtime_error naming file, found and expected,
  /// std::system_error where it cannot be read.
  static Tokenizer load(const std::filesystem::path& path);

  int vocab_size() const;
  int bos_id() const;  ///< -1: none
  int eos_id() const;  ///< -1: none
  int unk_id() const;
  /// Whether documents begin with BOS: tokenizer_config.json's add_bos_token, else whether there is a BOS.
  bool adds_bos() const;
  /// Identity of the file's bytes.
  std::uint64_t fingerprint() const;

  /// Ids of `text`. BOS is put first if `add_bos` and adds_bos(). Invalid UTF-8 is replaced by U+FFFD. Long texts are
  /// tokenised in pieces cut at line ends, so memory beyond the ids stays bounded.
  std::vector<int> encode(std::string_view text, bool add_bos = true) const;

  /// Text of `tokens`: control tokens vanish, byte tokens are gathered, bytes that are no UTF-8 become U+FFFD. The space
  /// that begins the text's first word is dropped.
  std::string decode(std::span<const int> tokens) const;

  /// The piece of one id as stored ("▁the"). Throws std::out_of_range.
  std::string piece(int token) const;

 private:
  friend class StreamDecoder;
  struct Impl;
  explicit Tokenizer(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

/// Decodes a stream of tokens into text, emitting complete UTF-8 characters only: what was emitted never changes.
class StreamDecoder {
 public:
  /// `at_start`: the stream begins the text, so the first word's leading space is dropped. False after a prompt.
  explicit StreamDecoder(Tokenizer tokenizer, bool at_start = true);

  /// Text that `token` completes; often empty inside a multi-byte character. Throws std::out_of_range for a bad id.
  std::string push(int token);
  /// The end of the stream: an incomplete character becomes U+FFFD.
  std::string finish();

 private:
  Tokenizer tokenizer_;
  std::string pending_;  // bytes of an incomplete character
  bool at_start_;
};

}  // namespace mmrec
