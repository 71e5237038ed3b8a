#include "apps/ppl/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "apps/ppl/html_text.h"

namespace mmrec::apps {
namespace {

// A panel's area, in the units of the file.
constexpr double kLeft = 60, kTop = 40, kWide = 360, kHigh = 240, kApart = 460;

std::string text(double x, double y, std::string_view anchor, std::string_view words) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor, html_text(words));
}

std::string frame(double left, std::string_view title, std::string_view below, std::string_view unit) {
  return text(left + kWide / 2, kTop - 16, "middle", title) +
         fmt::format("<path d=\"M{0} {1}V{2}H{3}\" fill=\"none\" stroke=\"#444\"/>\n", left, kTop, kTop + kHigh,
                     left + kWide) +
         text(left + kWide / 2, kTop + kHigh + 34, "middle", below) + text(left - 4, kTop - 16, "end", unit);
}

std::string mark_below(double x, std::string_view label) { return text(x, kTop + kHigh + 16, "middle", label); }
std::string mark_left(double left, double y, std::string_view label) { return text(left - 6, y + 4, "end", label); }

}  // namespace

void LossPlot::add(const ScoredDocument& scored) {
  scored.for_each_token([&](std::size_t position, int, float logprob) {
    const double octave = std::log2(static_cast<double>(std::max<std::size_t>(position, 1)));
    Class& of = positions_[std::min(static_cast<std::size_t>(octave * kPerOctave), positions_.size() - 1)];
    ++of.count;
    of.nll -= static_cast<double>(logprob);
  });
  if (scored.score.logprobs.empty()) return;
  const double mean = scored.score.nll / static_cast<double>(scored.score.logprobs.size());
  ++documents_[std::min(static_cast<std::size_t>(std::max(mean, 0.0) / kWidth), documents_.size() - 1)];
}

std::string LossPlot::svg(const std::string& caption) const {
  std::string file = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      kLeft + kApart + kWide + 40, kTop + kHigh + 70);

  file += frame(kLeft, "Loss against position", "position of the token", "nats");
  std::size_t last = 0;
  double most = 1e-9;
  for (std::size_t c = 0; c < positions_.size(); ++c) {
    if (positions_[c].count == 0) continue;
    last = c;
    most = std::max(most, positions_[c].nll / static_cast<double>(positions_[c].count));
  }
  std::string line;
  const auto x_of = [&](double at) { return kLeft + kWide * at / static_cast<double>(last + 1); };
  for (std::size_t c = 0; c <= last; ++c) {
    if (positions_[c].count == 0) continue;
    const double mean = positions_[c].nll / static_cast<double>(positions_[c].count);
    fmt::format_to(std::back_inserter(line), "{}{:.1f} {:.1f}", line.empty() ? "M" : "L",
                   x_of(static_cast<double>(c) + 0.5), kTop + kHigh * (1.0 - mean / most));
  }
  if (!line.empty()) file += fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"#06c\" stroke-width=\"2\"/>\n", line);
  const std::size_t step = std::max<std::size_t>(1, (last / kPerOctave + 7) / 8);
  for (std::size_t octave = 0; octave * kPerOctave <= last; octave += step) {
    file += mark_below(x_of(static_cast<double>(octave * kPerOctave)), std::to_string(std::uint64_t{1} << octave));
  }
  for (const double share : {0.0, 0.5, 1.0}) {
    file += mark_left(kLeft, kTop + kHigh * (1.0 - share), fmt::format("{:.2f}", most * share));
  }

  const double left = kLeft + kApart;
  file += frame(left, "Documents by loss", "nats per token", "documents");
  const auto is_some = [](std::int64_t count) { return count > 0; };
  const auto first =
      static_cast<std::size_t>(std::find_if(documents_.begin(), documents_.end(), is_some) - documents_.begin());
  if (first < documents_.size()) {
    const auto end = static_cast<std::size_t>(
        documents_.size() -
        static_cast<std::size_t>(std::find_if(documents_.rbegin(), documents_.rend(), is_some) - documents_.rbegin()));
    const auto highest = static_cast<double>(*std::max_element(documents_.begin(), documents_.end()));
    const double wide = kWide / static_cast<double>(end - first);
    for (std::size_t c = first; c < end; ++c) {
      const double high = kHigh * static_cast<double>(documents_[c]) / highest;
      file +=
          fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"#06c\"/>\n",
                      left + wide * static_cast<double>(c - first), kTop + kHigh - high, std::max(wide - 1, 0.5), high);
    }
    file += mark_below(left, fmt::format("{:.3f}", static_cast<double>(first) * kWidth));
    file += mark_below(left + kWide, fmt::format("{:.3f}", static_cast<double>(end) * kWidth));
    file += mark_left(left, kTop, fmt::format("{:.0f}", highest));
  }
  return file + text(kLeft, kTop + kHigh + 60, "start", caption) + "</svg>\n";
}

}  // namespace mmrec::apps
