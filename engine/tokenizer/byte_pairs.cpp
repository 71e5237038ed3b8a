// Short pieces, which nearly all are, search their few pairs anew after each join; long ones keep pairs in a heap.
#include "engine/tokenizer/byte_pairs.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <queue>

namespace mmrec::engine {
namespace {

constexpr std::uint32_t kNone = ~std::uint32_t{0};
constexpr std::size_t kShort = 64;
constexpr unsigned kPositionBits = 44;  // beside a rank of 20 in one number of the heap

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a ^ 0x9E3779B97F4A7C15U) * (b ^ 0xD6E8FEB86659FD93U);
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t hash(std::string_view bytes) {
  std::uint64_t value = bytes.size();
  while (bytes.size() > 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), 8);
    value = mix(value, word);
    bytes.remove_prefix(8);
  }
  std::uint64_t word = 0;
  for (const char c : bytes) word = (word << 8) | static_cast<unsigned char>(c);
  return mix(value, word);
}

std::uint32_t tag_of(std::uint64_t hash) { return static_cast<std::uint32_t>(hash >> 32); }

}  // namespace

BytePairs::BytePairs(std::span<const std::string> tokens)
    : slots_(std::bit_ceil(2 * tokens.size() + 1), Slot{0, kNone}) {
  begins_.reserve(tokens.size() + 1);
  for (const std::string& token : tokens) {
    begins_.push_back(static_cast<std::uint32_t>(bytes_.size()));
    bytes_ += token;
    longest_ = std::max(longest_, token.size());
  }
  begins_.push_back(static_cast<std::uint32_t>(bytes_.size()));
  for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
    if (tokens[rank].empty()) continue;
    const std::uint64_t value = hash(tokens[rank]);
    std::size_t at = value & (slots_.size() - 1);
    while (slots_[at].rank != kNone) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = {tag_of(value), static_cast<std::uint32_t>(rank)};
  }
}

std::uint32_t BytePairs::rank_of(std::string_view bytes) const {
  if (bytes.size() > longest_) return kNone;
  const std::uint64_t value = hash(bytes);
  for (std::size_t at = value & (slots_.size() - 1);; at = (at + 1) & (slots_.size() - 1)) {
    const Slot& slot = slots_[at];
    if (slot.rank == kNone) return kNone;
    if (slot.tag == tag_of(value) && token(slot.rank) == bytes) return slot.rank;
  }
}

void BytePairs::encode(std::string_view piece, std::vector<int>& ids) const {
  if (piece.empty()) return;
  if (const std::uint32_t rank = rank_of(piece); rank != kNone) {
    ids.push_back(static_cast<int>(rank));
  } else if (piece.size() <= kShort) {
    merge_short(piece, ids);
  } else {
    merge_long(piece, ids);
  }
}

void BytePairs::merge_short(std::string_view piece, std::vector<int>& ids) const {
  struct Part {
    std::size_t begin = 0;
    std::uint32_t pair = kNone;  // rank of this part joined with the next
  };
  std::array<Part, kShort + 1> parts;  // the last is the end
  std::size_t count = piece.size();
  const auto pair_at = [&](std::size_t i) {
    if (i + 2 > count) return kNone;
    return rank_of(piece.substr(parts[i].begin, parts[i + 2].begin - parts[i].begin));
  };
  for (std::size_t i = 0; i <= count; ++i) parts[i].begin = i;
  for (std::size_t i = 0; i < count; ++i) parts[i].pair = pair_at(i);
  for (;;) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < count; ++i) {
      if (parts[i].pair < parts[best].pair) best = i;
    }
    if (parts[best].pair == kNone) break;
    std::copy(parts.begin() + static_cast<std::ptrdiff_t>(best) + 2,
              parts.begin() + static_cast<std::ptrdiff_t>(count) + 1,
              parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    --count;
    parts[best].pair = pair_at(best);
    if (best > 0) parts[best - 1].pair = pair_at(best - 1);
  }
  for (std::size_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<int>(rank_of(piece.substr(parts[i].begin, parts[i + 1].begin - parts[i].begin))));
  }
}

void BytePairs::merge_long(std::string_view piece, std::vector<int>& ids) const {
  // Parts are named by their first byte. An entry of the heap is out of date where the part's pair has another rank;
  // a part only grows, so no rank comes back.
  struct Part {
    std::size_t previous = 0, next = 0;
    std::uint32_t pair = kNone;
  };
  const std::size_t size = piece.size();
  std::vector<Part> parts(size + 1);
  std::priority_queue<std::uint64_t, std::vector<std::uint64_t>, std::greater<>> heap;
  const auto set_pair = [&](std::size_t part) {
    const std::size_t next = parts[part].next;
    parts[part].pair = next == size ? kNone : rank_of(piece.substr(part, parts[next].next - part));
    if (parts[part].pair != kNone) heap.push((std::uint64_t{parts[part].pair} << kPositionBits) | part);
  };
  for (std::size_t i = 0; i <= size; ++i) parts[i] = {i - 1, i + 1, kNone};
  for (std::size_t i = 0; i < size; ++i) set_pair(i);
  while (!heap.empty()) {
    const std::uint64_t top = heap.top();
    heap.pop();
    const auto part = static_cast<std::size_t>(top & ((std::uint64_t{1} << kPositionBits) - 1));
    if (parts[part].pair != top >> kPositionBits) continue;
    Part& joined = parts[parts[part].next];
    joined.pair = kNone;
    parts[part].next = joined.next;
    parts[joined.next].previous = part;
    set_pair(part);
    if (part > 0) set_pair(parts[part].previous);
  }
  for (std::size_t part = 0; part < size; part = parts[part].next) {
    ids.push_back(static_cast<int>(rank_of(piece.substr(part, parts[part].next - part))));
  }
}

}  // namespace mmrec::engine
