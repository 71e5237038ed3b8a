// Layout, between the ends of sealed_bytes.h:
//
//  24  u64  tokenizer fingerprint     56  i32  top_k, repetition_window, vocab_limit
//  32  u64  seed                      68  u32  recent tokens, n
//  40  f32  temperature, top_p,       72  u64  bytes of the state; all tokens, m; bytes of computed_with
//           min_p, repetition_penalty  96       options of the sampler since version 3
//                                           i32  recent tokens [n]; all tokens [m]; computed_with; the state, sealed
//                                                itself
#include "mmrec/state_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "engine/require.h"
#include "engine/session/sealed_bytes.h"
#include "models/files/checked.h"
#include "models/files/file.h"
#include "models/files/replace_file.h"

namespace mmrec {
namespace {

using engine::kSealBeginBytes;
using engine::kSealEndBytes;

constexpr std::uint32_t kOldest = 2;
constexpr std::uint32_t kNewer = kOldest + 1;
constexpr std::uint32_t kVersion = std::ranges::max(kSamplerOptions, {}, &SamplerOption::since).since;
constexpr engine::SealedFormat kFormat = {
    .magic = "mmrecSQ\n", .version = kVersion, .what = "state file", .oldest = kOldest};
constexpr std::size_t kFixedBytes = 72;    // of version 2, between the beginning and the recent tokens
constexpr std::uint64_t kMostText = 4096;  // of computed_with
constexpr std::size_t kLeastBytes = kSealBeginBytes + kFixedBytes + kSealEndBytes;

/// visit(value) for the sampler's options that came with versions `first` to `last`: first u64, then f32, then i32,
/// each in the order of kSamplerOptions.
template <class Options, class Visit>
void visit_options(std::uint32_t first, std::uint32_t last, Options& options, const Visit& visit) {
  const auto visit_type = [&]<class T>(T) {
    for (const SamplerOption& option : kSamplerOptions) {
      // uncovered: no option is newer than version 2
      if (option.since < first || option.since > last) continue;
      option.visit(options, [&](auto& value) {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, T>) visit(value);
      });
    }
  };
  visit_type(std::uint64_t{}), visit_type(float{}), visit_type(int{});
}

/// Of those that a file of `version` has beyond version 2.
std::size_t newer_bytes(std::uint32_t version) {
  std::size_t bytes = 0;
  const SamplerOptions any;
  visit_options(kNewer, version, any, [&](auto value) { bytes += sizeof value; });
  return bytes;
}

/// Says which size a state file cannot hold: "" if it can hold both.
std::string fault_of(std::uint64_t recent, std::uint64_t computed_with) {
  if (recent > Session::kRecentTokens) {
    return fmt::format("found {} recent tokens, expected at most {}", recent, Session::kRecentTokens);
  }
  if (computed_with <= kMostText) return {};
  return fmt::format("found {} bytes of computed_with, expected at most {}", computed_with, kMostText);
}

}  // namespace

SavedSequence save_sequence(const Session& session, const SamplerOptions& sampler, const Tokenizer* tokenizer) {
  engine::require(session.batch() == 1, "save_sequence: found a batch of {}, expected 1", session.batch());
  const std::span<const int> recent = session.recent_tokens();
  return {.state = session.save(),
          .recent = {recent.begin(), recent.end()},
          .sampler = sampler,
          .tokenizer_fingerprint = tokenizer != nullptr ? tokenizer->fingerprint() : 0};
}

void restore_sequence(Session& session, const SavedSequence& saved, const Tokenizer* tokenizer) {
  engine::require(session.batch() == 1, "restore_sequence: found a batch of {}, expected 1", session.batch());
  if (tokenizer != nullptr && saved.tokenizer_fingerprint != 0) {
    engine::expect(saved.tokenizer_fingerprint == tokenizer->fingerprint(),
                   "saved state: of another tokenizer: found fingerprint {:#018x}, expected {:#018x}",
                   saved.tokenizer_fingerprint, tokenizer->fingerprint());
  }
  try {
    session.restore(saved.state, saved.recent);
  } catch (const std::invalid_argument& error) {  // of its recent tokens
    throw std::runtime_error(fmt::format("saved state: {}", error.what()));
  }
}

std::vector<std::byte> encode_sequence(const SavedSequence& saved) {
  const std::string fault = fault_of(saved.recent.size(), saved.computed_with.size());
  engine::require(fault.empty(), "saved sequence: {}", fault);
  const Sampler checked(saved.sampler);
  engine::SealedWriter out(kFormat, kLeastBytes + newer_bytes(kVersion) +
                                        4 * (saved.recent.size() + saved.tokens.size()) + saved.computed_with.size() +
                                        saved.state.size());
  const auto put = [&](auto value) { out.put(value); };
  out.put(saved.tokenizer_fingerprint);
  visit_options(kOldest, kOldest, saved.sampler, put);
  out.put(static_cast<std::uint32_t>(saved.recent.size()));
  for (const std::size_t size : {saved.state.size(), saved.tokens.size(), saved.computed_with.size()}) {
    out.put(static_cast<std::uint64_t>(size));
  }
  visit_options(kNewer, kVersion, saved.sampler, put);
  out.put(saved.recent);
  out.put(saved.tokens);
  out.put(std::as_bytes(std::span(saved.computed_with)));
  out.put(saved.state);
  return out.finish();
}

SavedSequence decode_sequence(std::span<const std::byte> bytes, const std::string& name) {
  engine::SealedReader in(bytes, kFormat, name, kLeastBytes);
  SavedSequence saved;
  const auto get = [&]<class T>(T& value) { value = in.get<T>(); };
  saved.tokenizer_fingerprint = in.get<std::uint64_t>();
  visit_options(kOldest, kOldest, saved.sampler, get);
  const auto recent = in.get<std::uint32_t>();
  const auto state = in.get<std::uint64_t>();
  const auto tokens = in.get<std::uint64_t>();
  const auto text = in.get<std::uint64_t>();
  if (const std::string fault = fault_of(recent, text); !fault.empty()) in.fail(fault);
  models::CheckedSize bytes_after = models::CheckedSize(tokens) * 4;
  bytes_after += newer_bytes(in.version()) + 4 * std::uint64_t{recent} + text;
  bytes_after += state;
  if (bytes_after.overflowed() || bytes_after.value() != in.left()) {
    in.fail(fmt::format("found {} bytes, expected those of {} + {} tokens, {} of computed_with and {} of the state",
                        in.left(), recent, tokens, text, state));
  }
  visit_options(kNewer, in.version(), saved.sampler, get);
  try {
    const Sampler checked(saved.sampler);
  } catch (const std::invalid_argument& error) {
    in.fail(error.what());
  }
  saved.recent = in.get<int>(recent, "recent");
  saved.tokens = in.get<int>(tokens, "tokens");
  const auto with = in.get_bytes(text);
  saved.computed_with.assign(reinterpret_cast<const char*>(with.data()), with.size());
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
  engine::expect(file.size() >= kLeastBytes && file.size() <= kMostBytes, "{}: found {} bytes, expected {} to {}",
                 path.string(), file.size(), kLeastBytes, kMostBytes);
  // What it is before memory is taken for all of it.
  std::byte start[8];
  file.read(0, start);
  engine::expect(std::memcmp(start, kFormat.magic.data(), sizeof start) == 0,
                 "{}: not a state file (its first 8 bytes are not \"mmrecSQ\\n\")", path.string());
  std::vector<std::byte> bytes(file.size());
  file.read(0, bytes);
  return decode_sequence(bytes, path.string());
}

}  // namespace mmrec
