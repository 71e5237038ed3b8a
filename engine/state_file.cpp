// Layout, between the ends of sealed_bytes.h:
//
//  24  u64  tokenizer fingerprint     56  i32  top_k, repetition_window, vocab_limit
//  32  u64  seed                      68  u32  recent tokens, n
//  40  f32  temperature, top_p,       72  u64  bytes of the state
//           min_p, repetition_penalty  80  i32  recent tokens [n]; the state, sealed itself
#include "mmrec/state_file.h"

#include <fmt/format.h>

#include <cstring>
#include <stdexcept>

#include "engine/sealed_bytes.h"
#include "models/files/file.h"
#include "models/files/replace_file.h"

namespace mmrec {
namespace {

using engine::kSealBeginBytes;
using engine::kSealEndBytes;

constexpr engine::SealedFormat kFormat = {.magic = "mmrecSQ\n", .version = 1, .what = "state file"};
constexpr std::size_t kFixedBytes = 56;  // between the beginning and the recent tokens
constexpr std::size_t kLeastBytes = kSealBeginBytes + kFixedBytes + kSealEndBytes;

}  // namespace

SavedSequence save_sequence(const Session& session, const SamplerOptions& sampler, const Tokenizer* tokenizer) {
  if (session.batch() != 1) {
    throw std::invalid_argument(fmt::format("save_sequence: found a batch of {}, expected 1", session.batch()));
  }
  const std::span<const int> recent = session.recent_tokens();
  return {.state = session.save(),
          .recent = {recent.begin(), recent.end()},
          .sampler = sampler,
          .tokenizer_fingerprint = tokenizer != nullptr ? tokenizer->fingerprint() : 0};
}

void restore_sequence(Session& session, const SavedSequence& saved, const Tokenizer* tokenizer) {
  if (session.batch() != 1) {
    throw std::invalid_argument(fmt::format("restore_sequence: found a batch of {}, expected 1", session.batch()));
  }
  if (tokenizer != nullptr && saved.tokenizer_fingerprint != 0 &&
      saved.tokenizer_fingerprint != tokenizer->fingerprint()) {
    throw std::runtime_error(
        fmt::format("saved state: of another tokenizer: found fingerprint {:#018x}, expected {:#018x}",
                    saved.tokenizer_fingerprint, tokenizer->fingerprint()));
  }
  try {
    session.restore(saved.state, saved.recent);
  } catch (const std::invalid_argument& error) {  // of its recent tokens
    throw std::runtime_error(fmt::format("saved state: {}", error.what()));
  }
}

std::vector<std::byte> encode_sequence(const SavedSequence& saved) {
  engine::SealedWriter out(kFormat, kLeastBytes + 4 * saved.recent.size() + saved.state.size());
  const SamplerOptions& s = saved.sampler;
  out.put(saved.tokenizer_fingerprint);
  out.put(s.seed);
  for (const float x : {s.temperature, s.top_p, s.min_p, s.repetition_penalty}) out.put(x);
  for (const int n : {s.top_k, s.repetition_window, s.vocab_limit}) out.put(static_cast<std::int32_t>(n));
  out.put(static_cast<std::uint32_t>(saved.recent.size()));
  out.put(static_cast<std::uint64_t>(saved.state.size()));
  out.put(saved.recent);
  out.put(saved.state);
  return out.finish();
}

SavedSequence decode_sequence(std::span<const std::byte> bytes, const std::string& name) {
  engine::SealedReader in(bytes, kFormat, name, kLeastBytes);
  SavedSequence saved;
  SamplerOptions& s = saved.sampler;
  saved.tokenizer_fingerprint = in.get<std::uint64_t>();
  s.seed = in.get<std::uint64_t>();
  for (float* x : {&s.temperature, &s.top_p, &s.min_p, &s.repetition_penalty}) *x = in.get<float>();
  for (int* n : {&s.top_k, &s.repetition_window, &s.vocab_limit}) *n = in.get<std::int32_t>();
  try {
    const Sampler checked(s);
  } catch (const std::invalid_argument& error) {
    in.fail(error.what());
  }
  const auto recent = in.get<std::uint32_t>();
  const auto state = in.get<std::uint64_t>();
  if (recent > Session::kRecentTokens) {
    in.fail(fmt::format("found {} recent tokens, expected at most {}", recent, Session::kRecentTokens));
  }
  const std::uint64_t tokens_bytes = 4 * std::uint64_t{recent};
  if (tokens_bytes > in.left() || in.left() - tokens_bytes != state) {
    in.fail(fmt::format("found {} bytes of {} recent tokens and the state, expected {} of the state alone", in.left(),
                        recent, state));
  }
  saved.recent = in.get<int>(recent, "recent");
  const auto rest = in.get_bytes(state);
  saved.state.assign(rest.begin(), rest.end());
  return saved;
}

void write_state_file(const std::filesystem::path& path, const SavedSequence& saved) {
  models::replace_file(path, encode_sequence(saved));
}

SavedSequence read_state_file(const std::filesystem::path& path) {
  const models::File file = models::File::open(path);
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 41;  // twice what a model's state may take
  if (file.size() < kLeastBytes || file.size() > kMostBytes) {
    throw std::runtime_error(
        fmt::format("{}: found {} bytes, expected {} to {}", path.string(), file.size(), kLeastBytes, kMostBytes));
  }
  // What it is before memory is taken for all of it.
  std::byte start[8];
  file.read(0, start);
  if (std::memcmp(start, kFormat.magic.data(), sizeof start) != 0) {
    throw std::runtime_error(
        fmt::format("{}: not a state file (its first 8 bytes are not \"mmrecSQ\\n\")", path.string()));
  }
  std::vector<std::byte> bytes(file.size());
  file.read(0, bytes);
  return decode_sequence(bytes, path.string());
}

}  // namespace mmrec
