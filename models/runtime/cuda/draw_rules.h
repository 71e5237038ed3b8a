// The rules of a device's draws and the rings of recent tokens, in its memory. They advance there from draw to draw, so
// that only those of sequences that have come or moved are sent.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cuda/runtime/cuda.h"
#include "models/runtime/executor.h"

namespace mmrec::models {

/// Tokens of a draw's ring: the most recent ones that the repetition penalty counts.
inline std::size_t ring_of(const Draw& draw) {
  return draw.options.repetition_penalty == 1.0F ? 0 : static_cast<std::size_t>(draw.options.repetition_window);
}

/// Whether a device can make this draw from logits of `vocab` tokens.
inline bool can_draw(const Draw& draw, std::int64_t vocab) {
  return vocab <= kernels::kMostSampleWords && ring_of(draw) <= std::size_t{kernels::kMostSampleWindow};
}

/// The recent tokens that the repetition penalty counts.
inline std::span<const int> counted_tokens(const Draw& draw) {
  return draw.recent.last(std::min(draw.recent.size(), ring_of(draw)));
}

class DrawRules {
 public:
  /// Rules of these draws, on the device, each in its place. Those that the device does not have there are sent.
  /// logits_of(slot): where the logits are. The caller must draw and call have_drawn() next; otherwise the next call
  /// sends all rules.
  template <class LogitsOf>
  kernels::SampleRule* for_draws(kernels::Cuda& cuda, std::span<const Draw> draws, const LogitsOf& logits_of) {
    if (!has_room(draws) || !std::exchange(are_known_, false)) next_.clear();
    const std::size_t known = next_.size();
    next_.resize(draws.size());
    std::size_t first = 0, end = 0;  // of rules that wait to be sent
    for (std::size_t i = 0; i < draws.size(); ++i) {
      if (i < known && next_[i].is(draws[i])) continue;
      next_[i].become(draws[i]);
      if (end == 0 || i >= end + kClose) {
        send(cuda, draws, first, end, logits_of);
        first = i;
      }
      end = i + 1;
    }
    send(cuda, draws, first, end, logits_of);
    return rules_.data();
  }
  /// The tokens that were drawn, negative for none.
  void have_drawn(std::span<const int> tokens) {
    for (std::size_t i = 0; i < tokens.size(); ++i) next_[i].follows(tokens[i]);
    are_known_ = true;
  }

 private:
  static constexpr std::size_t kClose = 16;  // rules: those between two are sent along, rather than in two pieces

  /// The next draw of a rule on the device, with the tokens in its ring.
  class Next {
   public:
    void become(const Draw& draw) {
      const std::span<const int> recent = counted_tokens(draw);
      recent_.assign(recent.begin(), recent.end());
      draw_ = draw;
      draw_.recent = {};
    }
    bool is(const Draw& draw) const {
      const std::span<const int> recent = counted_tokens(draw);
      return draw.slot == draw_.slot && draw.options == draw_.options && draw.sequence == draw_.sequence &&
             draw.step == draw_.step && std::equal(recent.begin(), recent.end(), recent_.begin(), recent_.end());
    }
    void follows(int token) {
      draw_.step += 1;
      const std::size_t ring = ring_of(draw_);
      if (ring == 0) return;
      if (recent_.size() == ring) recent_.erase(recent_.begin());
      recent_.push_back(std::max(token, 0));
    }

   private:
    Draw draw_;
    std::vector<int> recent_;  // oldest first
  };

  /// Whether the memory suffices for these draws; if not, it is new.
  bool has_room(std::span<const Draw> draws) {
    std::size_t ring = ring_;
    for (const Draw& draw : draws) ring = std::max(ring, ring_of(draw));
    const std::size_t count = std::max(draws.size(), sent_.size());
    if (count == sent_.size() && ring == ring_) return true;
    sent_.clear();
    rules_ = kernels::DeviceBuffer<kernels::SampleRule>(count);
    rings_ = kernels::DeviceBuffer<int>(count * ring);
    sent_rings_.resize(count * ring);
    sent_.resize(count);
    ring_ = ring;
    return false;
  }
  template <class LogitsOf>
  void send(kernels::Cuda& cuda, std::span<const Draw> draws, std::size_t first, std::size_t end,
            const LogitsOf& logits_of) {
    for (std::size_t i = first; i < end; ++i) {
      const std::span<const int> recent = counted_tokens(draws[i]);
      sent_[i] = {.options = draws[i].options,
                  .sequence = draws[i].sequence,
                  .step = draws[i].step,
                  .recent = ring_of(draws[i]) == 0 ? nullptr : rings_.data() + i * ring_,
                  .recent_count = recent.size(),
                  .logits = logits_of(draws[i].slot)};
      std::copy(recent.begin(), recent.end(), sent_rings_.begin() + static_cast<std::ptrdiff_t>(i * ring_));
    }
    cuda.upload(sent_rings_.data() + first * ring_, rings_.data() + first * ring_, (end - first) * ring_);
    cuda.upload(sent_.data() + first, rules_.data() + first, end - first);
  }

  kernels::DeviceBuffer<kernels::SampleRule> rules_;
  kernels::DeviceBuffer<int> rings_;  // of ring_ tokens each
  std::size_t ring_ = 0;
  std::vector<kernels::SampleRule> sent_;
  std::vector<int> sent_rings_;
  std::vector<Next> next_;  // what they draw next
  bool are_known_ = false;
};

}  // namespace mmrec::models
