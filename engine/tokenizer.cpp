// Tokenizer and StreamDecoder. sentencepiece does the segmentation of a chunk of text; everything else is done here, on
// the pieces: its own decoder loses spaces and splits characters, and ids out of range abort it.
#include "mmrec/tokenizer.h"

#include <fmt/format.h>
#include <sentencepiece_processor.h>

#include <array>
#include <cerrno>
#include <new>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "engine/charsmap.h"
#include "engine/tokenizer_file.h"
#include "engine/utf8.h"
#include "models/files/checksum.h"
#include "models/files/file.h"
#include "models/files/json.h"
#include "models/files/text.h"

namespace mmrec {
namespace {

using engine::Piece;
using engine::PieceType;
using engine::TokenizerFile;
using sentencepiece::SentencePieceProcessor;

constexpr std::size_t kChunkBytes = std::size_t{64} << 10;
constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{16} << 20;
constexpr std::string_view kSpaceSymbol = "\xE2\x96\x81";  // ▁

/// What tokenizer_config.json says; a token it does not mention is the tokenizer's own, one that is null is none.
struct TokenizerConfig {
  std::optional<bool> add_bos;
  std::optional<std::string> bos, eos;  // empty: null
};

std::filesystem::path config_beside(const std::filesystem::path& model) {
  return model.parent_path() / "tokenizer_config.json";
}

/// A string, or an object with the string as its "content".
std::string read_token(models::JsonReader& in) {
  using Kind = models::JsonReader::Kind;
  if (in.peek() == Kind::kNull) {
    in.null();
    return {};
  }
  if (in.peek() == Kind::kString) return in.string();
  std::optional<std::string> content;
  std::string key;
  in.begin_object();
  while (in.next_key(key)) {
    if (key == "content") {
      content = in.string();
    } else {
      in.skip();
    }
  }
  if (!content || content->empty()) in.fail("expected a string, or an object with a \"content\"");
  return *content;
}

TokenizerConfig parse_config(std::string_view text, const std::string& name) {
  models::require_json_object(text, name);
  TokenizerConfig config;
  models::JsonReader in(text, name);
  std::string key;
  in.begin_object();
  while (in.next_key(key)) {
    if (key == "add_bos_token" && in.peek() == models::JsonReader::Kind::kBool) {
      config.add_bos = in.boolean();
    } else if (key == "add_bos_token" && in.peek() != models::JsonReader::Kind::kNull) {
      in.fail("add_bos_token: expected true, false or null");
    } else if (key == "bos_token") {
      config.bos = read_token(in);
    } else if (key == "eos_token") {
      config.eos = read_token(in);
    } else {
      in.skip();
    }
  }
  return config;
}

std::unique_ptr<SentencePieceProcessor> load_processor(const TokenizerFile& file, bool add_dummy_prefix,
                                                       const std::string& name) {
  auto processor = std::make_unique<SentencePieceProcessor>();
  std::string fault;
  try {
    const auto status = processor->LoadFromSerializedProto(engine::serialize(file, add_dummy_prefix));
    if (!status.ok()) fault = status.ToString();
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    fault = error.what();
  }
  if (fault.empty() && processor->GetPieceSize() != static_cast<int>(file.pieces.size())) fault = "it lost pieces";
  if (!fault.empty()) throw std::runtime_error(fmt::format("{}: sentencepiece refuses it: {}", name, fault));
  return processor;
}

/// What a piece contributes to the text.
struct Token {
  std::string piece;
  std::string text;  // ▁ as a space; empty for control and byte pieces
  PieceType type = PieceType::kNormal;
  char byte = 0;
};

Token token_of(const Piece& piece, const TokenizerFile& file) {
  Token token{piece.text, {}, piece.type, 0};
  switch (piece.type) {
    case PieceType::kControl:
      break;
    case PieceType::kByte:
      token.byte = static_cast<char>(engine::byte_of_piece(piece.text));
      break;
    case PieceType::kUnknown:
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

}  // namespace

struct Tokenizer::Impl {
  std::vector<Token> tokens;
  int bos_id = -1;
  int eos_id = -1;
  int unk_id = -1;
  std::optional<bool> adds_bos;  // set once loaded
  bool byte_fallback = false;
  bool add_dummy_prefix = false;
  bool remove_extra_whitespaces = false;
  std::uint64_t fingerprint = 0;
  std::array<bool, 256> is_space{};  // bytes that normalise to a space

  // The file's model with its dummy prefix (the space put before a text) on and off. One of them is the file itself;
  // the other continues texts and is null where no continuation can need it.
  std::unique_ptr<SentencePieceProcessor> prefixed, plain;

  const Token& at(int token) const {
    if (token < 0 || static_cast<std::size_t>(token) >= tokens.size()) {
      throw std::out_of_range(fmt::format("token id {}, expected 0..{}", token, tokens.size() - 1));
    }
    return tokens[static_cast<std::size_t>(token)];
  }

  void apply(const TokenizerConfig& config, const TokenizerFile& file, const std::string& name) {
    const std::string config_name = config_beside(name).string();
    const auto resolve = [&](const std::optional<std::string>& token, const char* key, int& id) {
      if (!token) return;
      id = token->empty() ? -1 : file.find(*token);
      if (id < 0 && !token->empty()) {
        throw std::runtime_error(
            fmt::format("{}: {}: found {}, expected a piece of {}", config_name, key, models::quote(*token), name));
      }
    };
    resolve(config.bos, "bos_token", bos_id);
    resolve(config.eos, "eos_token", eos_id);
    adds_bos = config.add_bos;
    if (adds_bos.value_or(false) && bos_id < 0) {
      throw std::runtime_error(
          fmt::format("{}: add_bos_token: found true, expected false as there is no BOS", config_name));
    }
  }

  bool space_at(std::string_view text, std::size_t i) const { return is_space[static_cast<unsigned char>(text[i])]; }

  /// Bytes of the next chunk of `text`, which is not empty.
  std::size_t chunk_length(std::string_view text) const {
    if (text.size() <= kChunkBytes) return text.size();
    if (!remove_extra_whitespaces && !is_space['\n']) {
      for (std::size_t i = kChunkBytes; i > 0; --i) {
        if (text[i - 1] == '\n' && text[i] != '\n') return i;
      }
    }
    for (std::size_t i = kChunkBytes; i > 0; --i) {
      if (space_at(text, i) && !space_at(text, i - 1)) return i;
    }
    for (std::size_t i = kChunkBytes; i > kChunkBytes - 4; --i) {
      if (!engine::is_continuation(text[i])) return i;
    }
    return kChunkBytes;  // no UTF-8 here
  }

  /// Appends the ids of one chunk. `ids` from `first` on are those of the text so far, `before` is the byte before it.
  void encode_chunk(std::string_view chunk, std::optional<char> before, std::size_t first,
                    std::vector<int>& ids) const {
    const SentencePieceProcessor* processor = add_dummy_prefix ? prefixed.get() : plain.get();
    if (ids.size() > first) {
      // The text goes on. Where white space is squeezed, the library trims it from both ends of a chunk; the dummy
      // prefix then stands for the white space at the cut.
      const bool cut_at_space = is_space[static_cast<unsigned char>(before.value_or('x'))] || space_at(chunk, 0);
      processor = remove_extra_whitespaces && cut_at_space ? prefixed.get() : plain.get();
    }
    std::string valid;
    if (!engine::is_valid_utf8(chunk)) {
      valid = engine::replace_invalid_utf8(chunk);
      chunk = valid;
    }
    std::vector<int> found;
    std::string fault;
    try {
      const auto status = processor->Encode({chunk.data(), chunk.size()}, &found);
      if (!status.ok()) fault = status.ToString();
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      fault = error.what();
    }
    if (!fault.empty()) throw std::runtime_error(fmt::format("sentencepiece cannot encode the text: {}", fault));
    auto begin = found.begin();
    // Without byte fallback the library makes one unknown token of a run of unknown characters.
    const bool joins_unknown = ids.size() > first && ids.back() == unk_id && !found.empty() && found.front() == unk_id;
    if (!byte_fallback && joins_unknown) ++begin;
    for (auto id = begin; id != found.end(); ++id) at(*id);
    ids.insert(ids.end(), begin, found.end());
  }
};

Tokenizer::Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  std::error_code ignored;  // a path that cannot be examined fails when it is opened
  const auto file_path = std::filesystem::is_directory(path, ignored) ? path / "tokenizer.model" : path;
  const std::string model = models::read_text(file_path, engine::kMaxTokenizerBytes);
  std::string config;
  try {
    config = models::read_text(config_beside(file_path), kMaxConfigBytes);
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::no_such_file_or_directory) throw;
  }
  return from_bytes(model, config, file_path.string());
}

Tokenizer Tokenizer::from_bytes(std::string_view model, std::string_view config, const std::string& name) {
  const TokenizerFile file = engine::parse_tokenizer(model, name);
  auto impl = std::make_shared<Impl>();
  impl->tokens.reserve(file.pieces.size());
  for (const Piece& piece : file.pieces) impl->tokens.push_back(token_of(piece, file));
  impl->bos_id = file.bos_id;
  impl->eos_id = file.eos_id;
  impl->unk_id = file.unk_id;
  impl->byte_fallback = file.byte_fallback;
  impl->add_dummy_prefix = file.add_dummy_prefix;
  impl->remove_extra_whitespaces = file.remove_extra_whitespaces;
  impl->fingerprint = models::crc64(std::as_bytes(std::span(model)));
  for (int byte = 0; byte < 256; ++byte) {
    const auto replacement = engine::charsmap_replacement(file.charsmap, static_cast<unsigned char>(byte));
    impl->is_space[static_cast<std::size_t>(byte)] = replacement ? *replacement == " " : byte == ' ';
  }
  impl->plain = load_processor(file, false, name);
  if (file.add_dummy_prefix || file.remove_extra_whitespaces) impl->prefixed = load_processor(file, true, name);
  if (!config.empty()) impl->apply(parse_config(config, config_beside(name).string()), file, name);
  impl->adds_bos = impl->adds_bos.value_or(impl->bos_id >= 0);
  return Tokenizer(std::move(impl));
}

int Tokenizer::vocab_size() const { return static_cast<int>(impl_->tokens.size()); }
int Tokenizer::bos_id() const { return impl_->bos_id; }
int Tokenizer::eos_id() const { return impl_->eos_id; }
int Tokenizer::unk_id() const { return impl_->unk_id; }
bool Tokenizer::adds_bos() const { return *impl_->adds_bos; }
std::uint64_t Tokenizer::fingerprint() const { return impl_->fingerprint; }

std::vector<int> Tokenizer::encode(std::string_view text, bool add_bos) const {
  std::vector<int> ids;
  if (add_bos && adds_bos()) ids.push_back(impl_->bos_id);
  const std::size_t first = ids.size();
  std::optional<char> before;
  while (!text.empty()) {
    const std::size_t length = impl_->chunk_length(text);
    impl_->encode_chunk(text.substr(0, length), before, first, ids);
    before = text[length - 1];
    text.remove_prefix(length);
  }
  return ids;
}

std::string Tokenizer::decode(std::span<const int> tokens) const {
  StreamDecoder decoder(*this);
  std::string text;
  for (const int token : tokens) text += decoder.push(token);
  return text += decoder.finish();
}

std::string Tokenizer::piece(int token) const { return impl_->at(token).piece; }

StreamDecoder::StreamDecoder(Tokenizer tokenizer, bool at_start)
    : tokenizer_(std::move(tokenizer)),
      at_start_(at_start && (tokenizer_.impl_->add_dummy_prefix || tokenizer_.impl_->remove_extra_whitespaces)) {}

std::string StreamDecoder::push(int token) {
  const Token& found = tokenizer_.impl_->at(token);
  if (found.type != PieceType::kByte) {
    std::string out = finish();
    if (found.type == PieceType::kControl) return out;
    const bool drops_space = at_start_ && found.type != PieceType::kUnknown && found.text.starts_with(' ');
    at_start_ = false;
    return out.append(found.text, drops_space ? 1 : 0);
  }
  at_start_ = false;
  pending_ += found.byte;
  std::string out;
  while (!pending_.empty()) {
    const engine::Utf8Unit unit = engine::first_unit(pending_);
    if (unit.incomplete) break;
    out.append(unit.valid ? std::string_view(pending_).substr(0, unit.length) : engine::kReplacement);
    pending_.erase(0, unit.length);
  }
  return out;
}

std::string StreamDecoder::finish() {
  std::string out = engine::replace_invalid_utf8(pending_);
  pending_.clear();
  return out;
}

}  // namespace mmrec
