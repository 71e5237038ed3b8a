// The model of a tokenizer.tiktoken: the pattern of tokenizer_config.json cuts text into pieces, whose bytes are joined
// by rank. Special tokens have ids of their own and never come of text.
#include <algorithm>
#include <unordered_map>
#include <utility>

#include "engine/require.h"
#include "engine/tokenizer/byte_pairs.h"
#include "engine/tokenizer/rank_file.h"
#include "engine/tokenizer/split_pattern.h"
#include "engine/tokenizer/tokenizer_config.h"
#include "engine/tokenizer/tokenizer_model.h"
#include "models/files/checksum.h"
#include "models/files/text.h"
#include "models/files/utf8.h"

namespace mmrec::engine {
namespace {

using models::quote;

constexpr std::string_view kEndOfText = "<|endoftext|>";

class TiktokenModel final : public TokenizerModel {
 public:
  TiktokenModel(const std::vector<std::string>& ranks, SplitPattern pattern)
      : pattern_(std::move(pattern)), pairs_(ranks) {
    tokens.reserve(ranks.size());
    for (const std::string& rank : ranks) {
      tokens.push_back({rank, rank, rank.empty() ? Token::Kind::kControl : Token::Kind::kBytes});
    }
  }

  // In one thread: a pattern may look any way ahead, so no place is known to be a cut.
  void encode_part(Encoding& encoding, std::vector<int>& ids, int /*threads*/) const override {
    if (encoding.done == 0 && !models::is_valid_utf8(encoding.given)) {
      encoding.valid = models::replace_invalid_utf8(encoding.given);
    }
    const std::size_t end = encoding.done + kChunkBytes;
    encoding.done =
        pattern_.split(encoding.text(), encoding.done, end, [&](std::string_view piece) { pairs_.encode(piece, ids); });
  }

 private:
  SplitPattern pattern_;
  BytePairs pairs_;
};

/// Adds the special tokens, each at an id and of a text that no other token has. Ids beyond the ranks may be unused.
void add_special_tokens(const TokenizerConfig& config, const std::string& name, const std::string& config_name,
                        TokenizerModel& model) {
  const std::size_t ranks = model.tokens.size();
  if (!config.special_tokens.empty()) {
    model.tokens.resize(std::max(ranks, static_cast<std::size_t>(config.special_tokens.rbegin()->first) + 1));
  }
  std::unordered_map<std::string_view, std::size_t> ids;
  for (std::size_t id = 0; id < ranks; ++id) {
    if (!model.tokens[id].piece.empty()) ids.emplace(model.tokens[id].piece, id);
  }
  for (const auto& [id, text] : config.special_tokens) {
    Token& token = model.tokens[static_cast<std::size_t>(id)];
    expect(token.piece.empty(), "{}: found special token {} of id {}, expected another id: it is a rank of {}",
           config_name, quote(text), id, name);
    const auto same = ids.find(text);
    expect(same == ids.end(), "{}: found special token {} of id {}, expected another text: it is that of rank {} of {}",
           config_name, quote(text), id, same == ids.end() ? 0 : same->second, name);
    token.piece = text;
  }
  for (std::size_t id = 0; id < ranks; ++id) {
    expect(!model.tokens[id].piece.empty(), "{}: found no token of rank {}, expected ranks 0..{} each once", name, id,
           ranks - 1);
  }
}

}  // namespace

std::unique_ptr<TokenizerModel> load_tiktoken(std::string_view ranks, const std::string& name, std::string_view config,
                                              const std::string& config_name) {
  const std::vector<std::string> tokens = RankReader(name).run(ranks);
  expect(!config.empty(), "{}: found no such file, expected the \"pattern\" of {}", config_name, name);
  const TokenizerConfig split = parse_tokenizer_config(config, config_name, true);
  expect(split.pattern.has_value(), "{}: found no \"pattern\", expected that of {}", config_name, name);
  auto model = std::make_unique<TiktokenModel>(tokens, SplitPattern(*split.pattern, config_name));
  add_special_tokens(split, name, config_name, *model);
  model->eos_id = model->find(kEndOfText);
  apply(split, config_name, name, *model);

  models::Crc64 identity;
  identity.update(ranks);
  identity.update(*split.pattern);
  for (const auto& [id, text] : split.special_tokens) {
    identity.update(static_cast<std::uint64_t>(id));
    identity.update(text);
  }
  model->fingerprint = identity.value();
  return model;
}

}  // namespace mmrec::engine
