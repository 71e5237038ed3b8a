#include "apps/common/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "apps/common/cli.h"

namespace mmrec::apps {
namespace {

int terminal_width() {
  winsize size = {};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

void put(std::string_view text) { (void)!write(STDERR_FILENO, text.data(), text.size()); }

std::string clock_text(double seconds) {
  if (!(seconds >= 0.0) || seconds > 359'999.0) return "--:--";
  const auto s = static_cast<std::int64_t>(std::ceil(seconds));
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{:02}:{:02}", s / 60, s % 60);
}

double share_of(std::int64_t done, std::int64_t total) {
  return total > 0 ? std::min(1.0, static_cast<double>(done) / static_cast<double>(total)) : 0.0;
}

}  // namespace

std::string progress_facts(std::int64_t done, std::int64_t total, double seconds, std::optional<PerplexityEstimate> ppl,
                           int width, ProgressUnit unit) {
  const double rate = seconds > 0.0 ? static_cast<double>(done) / seconds : 0.0;
  const double left = rate > 0.0 ? static_cast<double>(total - done) / rate : -1.0;
  std::string speed =
      unit == ProgressUnit::kTokens ? fmt::format(" {:.0f} tok/s", rate) : fmt::format(" {:.1f} MB/s", rate * 1e-6);
  std::string estimate, error;
  if (ppl && std::isfinite(ppl->ppl)) estimate = fmt::format(" ppl {:.4g}", ppl->ppl);
  if (!estimate.empty() && std::isfinite(ppl->standard_error)) error = fmt::format(" +/- {:.2g}", ppl->standard_error);
  const std::string share = fmt::format("{:3.0f}%", std::floor(share_of(done, total) * 100.0));
  const std::string end = fmt::format(" ETA {}", clock_text(left));
  // Without room the least important part goes first.
  for (std::string* part : {&error, &speed, &estimate}) {
    if (static_cast<int>(share.size() + speed.size() + estimate.size() + error.size() + end.size()) <= width) break;
    part->clear();
  }
  return share + speed + estimate + error + end;
}

std::string progress_line(std::int64_t done, std::int64_t total, double seconds, std::optional<PerplexityEstimate> ppl,
                          int width, ProgressUnit unit) {
  const double share = share_of(done, total);
  const std::string facts = progress_facts(done, total, seconds, ppl, width, unit);
  const int room = width - static_cast<int>(facts.size()) - 3;  // "[" "] "
  std::string line;
  if (room >= 5) {
    const int cells = std::min(room, 40);
    const int full = static_cast<int>(share * cells);
    line = fmt::format("[{}{}] ", std::string(static_cast<std::size_t>(full), '#'),
                       std::string(static_cast<std::size_t>(cells - full), '.'));
  }
  line += facts;
  if (static_cast<int>(line.size()) > width) line.resize(static_cast<std::size_t>(std::max(width, 0)));
  return line;
}

Progress::Progress(bool enabled, ProgressUnit unit)
    : unit_(unit), is_enabled_(enabled), draws_(isatty(STDERR_FILENO) == 1), start_(Clock::now()), last_(start_) {}

Progress::~Progress() { clear(); }

void Progress::update(std::int64_t done, std::int64_t total, std::optional<PerplexityEstimate> ppl) {
  if (!is_enabled_) return;
  const auto now = Clock::now();
  if (!first_) {
    first_ = done;
    start_ = now;
    return;
  }
  // The time of all that is done, at the rate since then.
  const double seconds = std::chrono::duration<double>(now - start_).count() * static_cast<double>(done) /
                         static_cast<double>(std::max<std::int64_t>(done - *first_, 1));
  if (!draws_) {
    if (now - last_ < std::chrono::seconds(10)) return;
    last_ = now;
    log_line(progress_facts(done, total, seconds, ppl, 1000, unit_));
    return;
  }
  if (drawn_ && now - last_ < std::chrono::milliseconds(200)) return;
  last_ = now;
  drawn_ = true;
  // One column stays free: a full last column makes some terminals wrap, and every redraw would then scroll.
  put("\r" + progress_line(done, total, seconds, ppl, terminal_width() - 1, unit_) + "\x1b[K");
}

void Progress::clear() {
  if (!drawn_) return;
  put("\r\x1b[K");
  drawn_ = false;
}

}  // namespace mmrec::apps
