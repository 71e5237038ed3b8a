// Byte-pair encoding by rank, as tiktoken does it: a piece of text begins as its single bytes; of all neighbours that
// together are a token, the two whose token has the lowest rank are joined, the leftmost of equals, until none are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mmrec::engine {

/// Immutable; thread-safe.
class BytePairs {
 public:
  /// `tokens` by rank: fewer than 2^20, empty ones are none, no two are alike, every single byte is one.
  explicit BytePairs(std::span<const std::string> tokens);

  /// Appends the ids of one piece. A piece that is a token is taken at once; n bytes take n log n.
  void encode(std::string_view piece, std::vector<int>& ids) const;

 private:
  struct Slot {
    std::uint32_t tag = 0;  // of the hash, to spare most comparisons
    std::uint32_t rank = 0;
  };

  /// Rank of the token of these bytes, or kNone.
  std::uint32_t rank_of(std::string_view bytes) const;
  std::string_view token(std::uint32_t rank) const {
    return std::string_view(bytes_).substr(begins_[rank], begins_[rank + 1] - begins_[rank]);
  }
  void merge_short(std::string_view piece, std::vector<int>& ids) const;
  void merge_long(std::string_view piece, std::vector<int>& ids) const;

  std::string bytes_;                  // of all tokens
  std::vector<std::uint32_t> begins_;  // of each, and the end
  std::size_t longest_ = 0;
  std::vector<Slot> slots_;  // open addressing; a power of two
};

}  // namespace mmrec::engine
