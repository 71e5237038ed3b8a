// --plot: two drawings in one SVG file, loss against position and the distribution of loss over documents. Memory is
// that of their classes, whatever the size of the corpus.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "apps/ppl/score.h"

namespace mmrec::apps {

class LossPlot {
 public:
  void add(const ScoredDocument& scored);
  /// The file, with `caption` below the drawings.
  std::string svg(const std::string& caption) const;

 private:
  static constexpr std::size_t kPerOctave = 4;  // classes of positions, which grow by the fourth root of 2
  static constexpr double kWidth = 0.125;       // of a class of documents, nats per token

  struct Class {
    std::int64_t count = 0;
    double nll = 0.0;
  };
  std::array<Class, 40 * kPerOctave> positions_;
  std::array<std::int64_t, 256> documents_{};  // the last one has all beyond too
};

}  // namespace mmrec::apps
