// Tokenizer and StreamDecoder: finding the files of a folder, and decoding, which is the same for every format.
#include "mmrec/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "engine/require.h"
#include "engine/tokenizer/tokenizer_config.h"
#include "engine/tokenizer/tokenizer_model.h"
#include "kernels/cpu/thread_pool.h"
#include "models/files/file.h"
#include "models/files/model_files.h"
#include "models/files/utf8.h"

namespace mmrec {
namespace {

std::filesystem::path config_beside(const std::filesystem::path& model) {
  return model.parent_path() / models::kTokenizerConfigFile;
}

int checked_threads(int threads) {
  constexpr int kMostThreads = 256;
  engine::require(threads >= 0, "threads: found {}, expected >= 0", threads);
  return std::min(threads > 0 ? threads : kernels::ThreadPool::available_processors(), kMostThreads);
}

}  // namespace

const engine::Token& engine::TokenizerModel::at(int token) const {
  if (token < 0 || static_cast<std::size_t>(token) >= tokens.size()) {
    throw std::out_of_range(fmt::format("token id {}, expected 0..{}", token, tokens.size() - 1));
  }
  return tokens[static_cast<std::size_t>(token)];
}

int engine::TokenizerModel::find(std::string_view piece) const {
  const auto found = std::ranges::find(tokens, piece, &Token::piece);
  return found == tokens.end() ? -1 : static_cast<int>(found - tokens.begin());
}

Tokenizer::Tokenizer(std::shared_ptr<const engine::TokenizerModel> model) : model_(std::move(model)) {}

std::filesystem::path Tokenizer::file_of(const std::filesystem::path& folder) {
  auto sentencepiece = folder / models::kSentencePieceFile;
  auto tiktoken = folder / models::kTiktokenFile;
  std::error_code ignored;  // a path that cannot be examined fails when it is opened
  if (!std::filesystem::exists(tiktoken, ignored)) return sentencepiece;
  engine::expect(!std::filesystem::exists(sentencepiece, ignored),
                 "{}: found tokenizer.model and tokenizer.tiktoken, expected one of them", folder.string());
  return tiktoken;
}

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto file_path = std::filesystem::is_directory(path, ignored) ? file_of(path) : path;
  const std::string model = models::read_text(file_path, engine::kMaxTokenizerBytes);
  std::string config;
  try {
    config = models::read_text(config_beside(file_path), engine::kMaxTokenizerConfigBytes);
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::no_such_file_or_directory) throw;
  }
  return from_bytes(model, config, file_path.string());
}

Tokenizer Tokenizer::from_bytes(std::string_view model, std::string_view config, const std::string& name) {
  const auto load = name.ends_with(".tiktoken") ? engine::load_tiktoken : engine::load_sentencepiece;
  engine::expect(model.size() <= engine::kMaxTokenizerBytes, "{}: found {} bytes, expected at most {}", name,
                 model.size(), engine::kMaxTokenizerBytes);
  try {
    return Tokenizer(load(model, name, config, config_beside(name).string()));
  } catch (const std::runtime_error& error) {
    const std::string hint = models::content_hint(model.substr(0, 1024));  // what such a file looks like
    if (hint.empty()) throw;
    throw std::runtime_error(error.what() + hint);
  }
}

int Tokenizer::vocab_size() const { return static_cast<int>(model_->tokens.size()); }
int Tokenizer::bos_id() const { return model_->bos_id; }
int Tokenizer::eos_id() const { return model_->eos_id; }
int Tokenizer::unk_id() const { return model_->unk_id; }
bool Tokenizer::adds_bos() const { return model_->adds_bos; }
std::uint64_t Tokenizer::fingerprint() const { return model_->fingerprint; }

std::vector<int> Tokenizer::encode(std::string_view text, bool add_bos) const { return encode(text, add_bos, nullptr); }

std::vector<int> Tokenizer::encode(std::string_view text, bool add_bos,
                                   const std::function<bool(std::size_t)>& on_progress, int threads) const {
  std::vector<int> ids;
  StreamEncoder encoder(*this, text, add_bos, threads);
  for (bool goes_on = true; goes_on;) {
    goes_on = encoder.next(ids);
    if (on_progress && !on_progress(encoder.bytes())) break;
  }
  return ids;
}

std::vector<std::vector<int>> Tokenizer::encode_batch(std::span<const std::string_view> texts, bool add_bos,
                                                      int threads) const {
  // All threads share a text of many chunks, so that no thread is left with it at the end.
  constexpr std::size_t kLong = 16 * engine::TokenizerModel::kChunkBytes;
  const int most = checked_threads(threads);
  std::vector<std::vector<int>> ids(texts.size());
  kernels::parallel_items(texts.size(), most, [&](std::size_t i) {
    if (texts[i].size() < kLong) ids[i] = encode(texts[i], add_bos);
  });
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (texts[i].size() >= kLong) ids[i] = encode(texts[i], add_bos, nullptr, most);
  }
  return ids;
}

std::string Tokenizer::decode(std::span<const int> tokens) const {
  StreamDecoder decoder(*this);
  std::string text;
  for (const int token : tokens) text += decoder.push(token);
  return text += decoder.finish();
}

std::string Tokenizer::piece(int token) const { return model_->at(token).piece; }

StreamEncoder::StreamEncoder(Tokenizer tokenizer, std::string_view text, bool add_bos, int threads)
    : tokenizer_(std::move(tokenizer)),
      encoding_(std::make_unique<engine::Encoding>(text)),
      puts_bos_(add_bos && tokenizer_.adds_bos()),
      threads_(checked_threads(threads)) {}
StreamEncoder::StreamEncoder(StreamEncoder&&) noexcept = default;
StreamEncoder& StreamEncoder::operator=(StreamEncoder&&) noexcept = default;
StreamEncoder::~StreamEncoder() = default;

bool StreamEncoder::next(std::vector<int>& ids) {
  if (std::exchange(puts_bos_, false)) ids.push_back(tokenizer_.bos_id());
  if (!encoding_->is_at_end()) tokenizer_.model_->encode_part(*encoding_, ids, threads_);
  return !encoding_->is_at_end();
}

std::size_t StreamEncoder::bytes() const {
  // Replacements are longer than what they stand for.
  return std::min(encoding_->done, encoding_->given.size());
}

StreamDecoder::StreamDecoder(Tokenizer tokenizer, bool at_start)
    : tokenizer_(std::move(tokenizer)), at_start_(at_start && tokenizer_.model_->drops_first_space) {}

std::string StreamDecoder::push(int token) {
  std::string text;
  push(token, text);
  return text;
}

void StreamDecoder::push(int token, std::string& text) {
  using Kind = engine::Token::Kind;
  const engine::Token& found = tokenizer_.model_->at(token);
  if (found.kind != Kind::kBytes) {
    if (!pending_.empty()) text += finish();
    if (found.kind == Kind::kControl) return;
    const bool drops_space = at_start_ && found.kind != Kind::kUnknown && found.text.starts_with(' ');
    at_start_ = false;
    text.append(found.text, drops_space ? 1 : 0);
    return;
  }
  at_start_ = false;
  pending_ += found.text;
  while (!pending_.empty()) {
    const models::Utf8Unit unit = models::first_unit(pending_);
    if (unit.incomplete) break;
    text.append(unit.valid ? std::string_view(pending_).substr(0, unit.length) : models::kReplacement);
    pending_.erase(0, unit.length);
  }
}

void StreamDecoder::skip(std::span<const int> tokens) {
  using Kind = engine::Token::Kind;
  constexpr std::size_t kLongest = 4;  // bytes of a character: what came before them has no part in it
  const std::vector<engine::Token>& known = tokenizer_.model_->tokens;
  const auto is_known = [&](int token) { return token >= 0 && static_cast<std::size_t>(token) < known.size(); };
  const auto at = [&](int token) -> const engine::Token& { return known[static_cast<std::size_t>(token)]; };
  std::size_t begin = tokens.size();  // of the bytes at the end
  bool is_cut = false;
  for (std::size_t bytes = 0; begin > 0 && !is_cut; --begin) {
    const int token = tokens[begin - 1];
    if (!is_known(token)) continue;
    bytes += at(token).text.size();
    is_cut = at(token).kind != Kind::kBytes || bytes > kLongest;
  }
  if (is_cut) {
    pending_.clear();
    const auto has_text = [&](int token) { return is_known(token) && at(token).kind != Kind::kControl; };
    at_start_ = at_start_ && std::ranges::none_of(tokens, has_text);
  }
  std::string dropped;
  for (const int token : tokens.subspan(begin)) {
    if (is_known(token)) push(token, dropped);
  }
}

std::string StreamDecoder::finish() {
  std::string out = models::replace_invalid_utf8(pending_);
  pending_.clear();
  return out;
}

}  // namespace mmrec
