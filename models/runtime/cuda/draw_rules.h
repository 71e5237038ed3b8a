// The rules of a device's draws and the rings of recent tokens, in its memory. They advance there from draw to draw, so
// nothing is sent while the same sequences are drawn again and again.
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

/// Whether a device can make this draw from logits of `vocab` tokens.
inline bool can_draw(const Draw& draw, std::int64_t vocab) {
  const bool penalises = draw.options.repetition_penalty != 1.0F;
  return vocab <= kernels::kMostSampleWords &&
         (!penalises || draw.options.repetition_window <= kernels::kMostSampleWindow);
}

/// The recent tokens that the repetition penalty counts.
inline std::span<const int> counted_tokens(const Draw& draw) {
  if (draw.options.repetition_penalty == 1.0F) return {};
  return draw.recent.last(std::min(draw.recent.size(), static_cast<std::size_t>(draw.options.repetition_window)));
}

class DrawRules {
 public:
  /// Rules of these draws, on the device. They are sent unless the device has them already. The caller must draw and
  /// call have_drawn() next; otherwise the next call sends the rules again.
  kernels::SampleRule* for_draws(kernels::Cuda& cuda, std::span<const Draw> draws) {
    std::vector<Next> next;
    next.swap(next_);
    const bool are_there = std::equal(draws.begin(), draws.end(), next.begin(), next.end(),
                                      [](const Draw& draw, const Next& as) { return as.is(draw); });
    if (!are_there) {
      next.clear();
      for (const Draw& draw : draws) next.emplace_back(draw);
      send(cuda, draws, next);
    }
    drawing_.swap(next);
    return rules_.data();
  }
  /// The tokens that were drawn, -1 for none.
  void have_drawn(std::span<const int> tokens) {
    for (std::size_t i = 0; i < drawing_.size(); ++i) drawing_[i].follows(tokens[i]);
    next_.swap(drawing_);
  }

 private:
  /// The next draw of a rule on the device, with the tokens in its ring.
  class Next {
   public:
    explicit Next(const Draw& draw) : draw_(draw), recent_(counted_tokens(draw).begin(), counted_tokens(draw).end()) {
      draw_.recent = {};
    }
    bool is(const Draw& draw) const {
      const std::span<const int> recent = counted_tokens(draw);
      return draw.slot == draw_.slot && draw.options == draw_.options && draw.sequence == draw_.sequence &&
             draw.step == draw_.step && std::equal(recent.begin(), recent.end(), recent_.begin(), recent_.end());
    }
    /// Tokens of its ring.
    std::size_t ring() const {
      return draw_.options.repetition_penalty == 1.0F ? 0 : static_cast<std::size_t>(draw_.options.repetition_window);
    }
    void follows(int token) {
      draw_.step += 1;
      if (ring() == 0) return;
      if (recent_.size() == ring()) recent_.erase(recent_.begin());
      recent_.push_back(std::max(token, 0));
    }

   private:
    Draw draw_;
    std::vector<int> recent_;  // oldest first
  };

  void send(kernels::Cuda& cuda, std::span<const Draw> draws, std::span<const Next> next) {
    std::size_t rings = 0;
    for (const Next& one : next) rings += one.ring();
    if (rules_.size() < draws.size()) {
      rules_ = kernels::DeviceBuffer<kernels::SampleRule>(draws.size());
      sent_rules_ = kernels::PinnedBuffer<kernels::SampleRule>(draws.size());
    }
    if (rings_.size() < rings) {
      rings_ = kernels::DeviceBuffer<int>(rings);
      sent_rings_ = kernels::PinnedBuffer<int>(rings);
    }
    std::size_t ring = 0;  // one behind the other
    for (std::size_t i = 0; i < draws.size(); ++i) {
      const std::span<const int> recent = counted_tokens(draws[i]);
      const bool has_ring = next[i].ring() > 0;
      sent_rules_.data()[i] = {.options = draws[i].options,
                               .sequence = draws[i].sequence,
                               .step = draws[i].step,
                               .recent = has_ring ? rings_.data() + ring : nullptr,
                               .recent_count = recent.size()};
      std::copy(recent.begin(), recent.end(), sent_rings_.data() + ring);
      ring += next[i].ring();
    }
    if (rings > 0) cuda.upload(sent_rings_.data(), rings_.data(), rings);
    cuda.upload(sent_rules_.data(), rules_.data(), draws.size());
  }

  kernels::DeviceBuffer<kernels::SampleRule> rules_;
  kernels::DeviceBuffer<int> rings_;
  // Page-locked, so that sending waits for nothing. The draws between two sendings are over when the second begins.
  kernels::PinnedBuffer<kernels::SampleRule> sent_rules_;
  kernels::PinnedBuffer<int> sent_rings_;
  std::vector<Next> next_;     // what they draw next; none: not known
  std::vector<Next> drawing_;  // what they are drawing
};

}  // namespace mmrec::models
