// A progress bar on stderr, only where stderr is a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace mmrec::apps {

/// Redraws one line at most five times a second, never wider than the terminal, and wipes it when it goes.
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` of `total` tokens so far, of perplexity `ppl` where that is known. A total of 0 is not known.
  void update(std::int64_t done, std::int64_t total, std::optional<double> ppl = std::nullopt);
  /// Wipes the line, so that other text may follow.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  bool enabled_;
  bool drawn_ = false;
  Clock::time_point start_;
  Clock::time_point last_;
};

/// The line itself, at most `width` columns; apart from the terminal so that it can be tested.
std::string progress_line(std::int64_t done, std::int64_t total, double seconds, std::optional<double> ppl, int width);

}  // namespace mmrec::apps
