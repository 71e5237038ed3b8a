#include "apps/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <string_view>

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

}  // namespace

std::string progress_line(std::int64_t done, std::int64_t total, double seconds, std::optional<double> ppl, int width) {
  const double share = total > 0 ? std::min(1.0, static_cast<double>(done) / static_cast<double>(total)) : 0.0;
  const double rate = seconds > 0.0 ? static_cast<double>(done) / seconds : 0.0;
  const double left = rate > 0.0 ? static_cast<double>(total - done) / rate : -1.0;
  const std::string facts = fmt::format("{:3.0f}% {:.0f} tok/s{} ETA {}", std::floor(share * 100.0), rate,
                                        ppl ? fmt::format(" ppl {:.4g}", *ppl) : std::string(), clock_text(left));
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

Progress::Progress() : enabled_(isatty(STDERR_FILENO) == 1), start_(Clock::now()), last_(start_) {}

Progress::~Progress() { clear(); }

void Progress::update(std::int64_t done, std::int64_t total, std::optional<double> ppl) {
  if (!enabled_) return;
  const auto now = Clock::now();
  if (drawn_ && now - last_ < std::chrono::milliseconds(200)) return;
  last_ = now;
  drawn_ = true;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  // One column stays free: a full last column makes some terminals wrap, and every redraw would then scroll.
  put("\r" + progress_line(done, total, seconds, ppl, terminal_width() - 1) + "\x1b[K");
}

void Progress::clear() {
  if (!enabled_ || !drawn_) return;
  put("\r\x1b[K");
  drawn_ = false;
}

}  // namespace mmrec::apps
