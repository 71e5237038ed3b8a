// The last tokens of sequences in lock-step. Memory is fixed when it is made; a token costs a store, and now and then
// the last ones move to the front.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace mmrec::engine {

class RecentTokens {
 public:
  /// Remembers `most` tokens of each of `batch` sequences.
  RecentTokens(int batch, int most)
      : most_(static_cast<std::size_t>(most)), tokens_(static_cast<std::size_t>(batch) * 2 * most_) {}

  /// Appends the first `count` of each row of tokens [batch, row_size].
  void push(std::span<const int> tokens, std::size_t row_size, std::size_t count) {
    const std::size_t used = std::min(count, most_);  // of the row's `count`, the last
    const std::size_t kept = size_ + used <= 2 * most_ ? size_ : most_ - used;
    for (std::size_t b = 0; b * 2 * most_ < tokens_.size(); ++b) {
      int* row = &tokens_[b * 2 * most_];
      if (kept < size_) std::copy(row + size_ - kept, row + size_, row);
      const int* from = &tokens[b * row_size + count - used];
      std::copy(from, from + used, row + kept);
    }
    size_ = kept + used;
  }

  /// Oldest first.
  std::span<const int> of(int sequence) const {
    const std::size_t shown = std::min(size_, most_);
    return std::span(tokens_).subspan(static_cast<std::size_t>(sequence) * 2 * most_ + size_ - shown, shown);
  }

  void clear() { size_ = 0; }

 private:
  std::size_t most_;
  std::vector<int> tokens_;  // [B, 2 most_], of which the first size_ of each row are used
  std::size_t size_ = 0;
};

}  // namespace mmrec::engine
