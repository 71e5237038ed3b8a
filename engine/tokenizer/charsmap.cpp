// A lookup starts at unit 0, whose offset gives the first base. From base b, byte c leads to unit u = b ^ c if that
// unit's label is c; the next base is u ^ offset(u); if u has a leaf, the unit at that next base holds the rule's
// value. So a lookup reads units b ^ 0 .. b ^ 255 of the bases it reaches and nothing else, and the bases form a graph
// that must have no cycle. The file is walked once, depth first, without recursion.
#include "engine/tokenizer/charsmap.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "models/files/utf8.h"

namespace mmrec::engine {
namespace {

constexpr std::size_t kMaxBytes = std::size_t{4} << 20;
constexpr std::size_t kMaxReplacementBytes = 128;
constexpr unsigned kMaxMatches = 32;  // sentencepiece's Normalizer::kMaxTrieResultsSize

std::uint32_t u32_at(std::string_view blob, std::size_t at) {
  std::uint32_t value = 0;
  for (unsigned i = 0; i < 4; ++i) value |= std::uint32_t{static_cast<unsigned char>(blob[at + i])} << (8 * i);
  return value;
}

/// Throws std::runtime_error of the formatted text unless `holds`. `name` is the file's.
template <class... Args>
void check(bool holds, const std::string& name, fmt::format_string<Args...> text, Args&&... args) {
  if (holds) return;
  throw std::runtime_error(
      fmt::format("{}: precompiled_charsmap: {}", name, fmt::format(text, std::forward<Args>(args)...)));
}

// The fields of a trie unit.
constexpr std::uint32_t offset_of(std::uint32_t unit) { return (unit >> 10) << ((unit & (1U << 9)) >> 6); }
constexpr std::uint32_t label_of(std::uint32_t unit) { return unit & ((1U << 31) | 0xFFU); }
constexpr bool has_leaf(std::uint32_t unit) { return ((unit >> 8) & 1U) != 0; }
constexpr std::uint32_t value_of(std::uint32_t unit) { return unit & ((1U << 31) - 1U); }

class Walk {
 public:
  Walk(std::string_view trie, std::string_view replacements, const std::string& name)
      : trie_(trie), replacements_(replacements), name_(name), seen_(trie.size() / 4, kUnseen) {}

  void run() {
    enter(base_after(0));
    while (!path_.empty()) {
      if (path_.back().label == 256) {
        const Frame done = path_.back();
        path_.pop_back();
        seen_[done.base] = static_cast<std::uint8_t>(done.matches);
        if (!path_.empty()) count(path_.back(), done.matches + path_.back().pending);
        continue;
      }
      visit(path_.back());
    }
  }

 private:
  struct Frame {
    std::uint32_t base;
    unsigned label = 0;    // the next byte to try
    unsigned matches = 0;  // most rules matched from here on, over the bytes tried
    unsigned pending = 0;  // 1 if the unit that led to the frame above has a leaf
  };
  static constexpr std::uint8_t kUnseen = 0xFF;
  static constexpr std::uint8_t kOnPath = 0xFE;

  std::uint32_t unit(std::uint32_t at) const { return u32_at(trie_, std::size_t{4} * at); }

  std::uint32_t base_after(std::uint32_t at) const {
    const std::uint32_t base = at ^ offset_of(unit(at));
    check((base | 0xFFU) < seen_.size(), name_, "unit {} leads to unit {}, expected less than {}", at, base | 0xFFU,
          seen_.size());
    return base;
  }

  void enter(std::uint32_t base) {
    seen_[base] = kOnPath;
    path_.push_back({base});
  }

  void count(Frame& frame, unsigned matches) const {
    frame.matches = std::max(frame.matches, matches);
    check(frame.matches <= kMaxMatches, name_, "more than {} rules begin one another", kMaxMatches);
  }

  void visit(Frame& frame) {
    const unsigned label = frame.label++;
    const std::uint32_t at = frame.base ^ label;
    if (label_of(unit(at)) != label) return;
    const std::uint32_t next = base_after(at);
    frame.pending = has_leaf(unit(at)) ? 1 : 0;
    if (frame.pending != 0) check_replacement(value_of(unit(next)));
    check(seen_[next] != kOnPath, name_, "units {} and {} form a cycle", at, next);
    if (seen_[next] == kUnseen) return enter(next);
    count(frame, seen_[next] + frame.pending);
  }

  void check_replacement(std::uint32_t value) const {
    check(value < replacements_.size(), name_, "replacement at {}, expected less than {}", value, replacements_.size());
    check(!models::is_continuation(replacements_[value]), name_, "the replacement at {} begins inside a character",
          value);
    check(replacements_.substr(value, kMaxReplacementBytes + 1).find('\0') != std::string_view::npos, name_,
          "the replacement at {} is longer than {} bytes", value, kMaxReplacementBytes);
  }

  std::string_view trie_;
  std::string_view replacements_;
  const std::string& name_;
  std::vector<std::uint8_t> seen_;  // of each base: kUnseen, kOnPath, or the most rules matched from there on
  std::vector<Frame> path_;
};

struct Parts {
  std::string_view trie, replacements;
};

Parts split(std::string_view blob) {
  const std::size_t trie_bytes = u32_at(blob, 0);
  return {blob.substr(4, trie_bytes), blob.substr(4 + trie_bytes)};
}

}  // namespace

void check_charsmap(std::string_view blob, const std::string& name) {
  if (blob.empty()) return;
  check(blob.size() > 4 && blob.size() <= kMaxBytes, name, "found {} bytes, expected 5..{}", blob.size(), kMaxBytes);
  const std::size_t trie_bytes = u32_at(blob, 0);
  // Darts makes tries in blocks of 256 units; it is what keeps b ^ c of a base inside the block.
  check(trie_bytes > 0 && trie_bytes % 1024 == 0 && trie_bytes < blob.size() - 4, name,
        "found a trie of {} bytes in {}, expected a positive multiple of 1024 with replacements after it", trie_bytes,
        blob.size());
  const auto [trie, replacements] = split(blob);
  check(replacements.back() == '\0', name, "the replacements do not end with NUL");
  check(models::is_valid_utf8(replacements), name, "the replacements are not valid UTF-8");
  Walk(trie, replacements, name).run();
}

std::optional<std::string_view> charsmap_replacement(std::string_view blob, unsigned char key) {
  if (blob.empty()) return {};
  const auto [trie, replacements] = split(blob);
  const std::uint32_t at = offset_of(u32_at(trie, 0)) ^ key;
  const std::uint32_t unit = u32_at(trie, std::size_t{4} * at);
  if (label_of(unit) != key || !has_leaf(unit)) return {};
  const std::uint32_t value = value_of(u32_at(trie, std::size_t{4} * (at ^ offset_of(unit))));
  const std::string_view rest = replacements.substr(value);
  return rest.substr(0, rest.find('\0'));
}

}  // namespace mmrec::engine
