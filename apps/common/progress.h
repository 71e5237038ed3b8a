// Progress on stderr: a bar on a terminal, else a line now and then for long work.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace mmrec::apps {

/// Bytes of a text whose tokenizing takes long enough to be shown.
inline constexpr std::size_t kLongText = std::size_t{1} << 20;

/// What is counted.
enum class ProgressUnit : std::uint8_t { kTokens, kBytes };

/// Perplexity so far, and its standard error; NaN if that is not known.
struct PerplexityEstimate {
  double ppl = 0.0;
  double standard_error = 0.0;
};

/// On a terminal it redraws one line at most five times a second, never wider than the terminal, and wipes it when it
/// goes. Elsewhere it writes a line every ten seconds.
class Progress {
 public:
  /// Not `enabled`, it does nothing.
  explicit Progress(bool enabled, ProgressUnit unit = ProgressUnit::kTokens);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` of `total` so far, and the perplexity if it is known. A total of 0 means unknown. The first call begins the
  /// time and shows nothing, so that rates leave out what came before, such as tokenizing.
  void update(std::int64_t done, std::int64_t total, std::optional<PerplexityEstimate> ppl = std::nullopt);
  /// Wipes the line, so that other text may follow.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  ProgressUnit unit_;
  bool is_enabled_;
  bool draws_;  // else lines
  bool drawn_ = false;
  std::optional<std::int64_t> first_;  // done at the first update
  Clock::time_point start_;            // of the first update
  Clock::time_point last_;
};

/// The line itself, at most `width` columns; apart from the terminal so that it can be tested.
std::string progress_line(std::int64_t done, std::int64_t total, double seconds, std::optional<PerplexityEstimate> ppl,
                          int width, ProgressUnit unit = ProgressUnit::kTokens);
/// The same without the bar: as much of it as `width` columns hold.
std::string progress_facts(std::int64_t done, std::int64_t total, double seconds, std::optional<PerplexityEstimate> ppl,
                           int width = 1000, ProgressUnit unit = ProgressUnit::kTokens);

}  // namespace mmrec::apps
