// tokenizer_config.json beside a tokenizer's file.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "engine/tokenizer/tokenizer_model.h"

namespace mmrec::engine {

inline constexpr std::size_t kMaxTokenizerConfigBytes = std::size_t{16} << 20;
inline constexpr std::size_t kMaxPatternBytes = 4096;
inline constexpr std::size_t kMaxSpecialTokens = std::size_t{1} << 16;

/// The fields of the file. A token that the file does not mention is the tokenizer's own; a token that is null is none.
struct TokenizerConfig {
  std::optional<bool> add_bos;
  std::optional<std::string> bos, eos;  // empty: null
  // For a rank file alone:
  std::optional<std::string> pattern;
  std::map<int, std::string> special_tokens;  // by id; the texts differ
};

/// `of_ranks`: pattern and special tokens are read too; else other programs may give them any form. Throws
/// std::runtime_error beginning with `name`.
TokenizerConfig parse_tokenizer_config(std::string_view text, const std::string& name, bool of_ranks);

/// Sets BOS, EOS and adds_bos of a model whose own are set. `name` is the model's file. Throws std::runtime_error for a
/// token that the model lacks.
void apply(const TokenizerConfig& config, const std::string& config_name, const std::string& name,
           TokenizerModel& model);

}  // namespace mmrec::engine
