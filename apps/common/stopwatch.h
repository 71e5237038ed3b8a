// Seconds of work.
#pragma once

#include <chrono>
#include <utility>

namespace mmrec::apps {

class Stopwatch {
 public:
  /// Since the last lap.
  double seconds() const { return between(last_, Clock::now()); }
  double lap() {
    const auto now = Clock::now();
    return between(std::exchange(last_, now), now);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double between(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  }
  Clock::time_point last_ = Clock::now();
};

}  // namespace mmrec::apps
