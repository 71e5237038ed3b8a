// --html: the documents with each token coloured by its surprise. --plot: loss against position, and the distribution
// of loss over documents. Each is one file that needs nothing else.
#include "apps/ppl/sinks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "models/files/utf8.h"

namespace mmrec::apps {
namespace {

constexpr std::string_view kHead = R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>mmrec-ppl</title>
<style>
body { font-family: sans-serif; margin: 2em auto; padding: 0 1.5em; max-width: 60em; line-height: 1.6; }
p, pre { white-space: pre-wrap; overflow-wrap: anywhere; }
i { font-style: normal; border-radius: 2px; }
.x { color: #888; }
)";

// A token of 1 bit or less is white, one of 16 bits or more the deepest red; half bits between.
constexpr int kColours = 32;

int colour_of(float logprob) {
  const double bits = -static_cast<double>(logprob) / std::log(2.0);
  return std::clamp(static_cast<int>(std::lround(2.0 * (bits - 1.0))), 0, kColours - 1);
}

class HtmlPage : public DocumentSink {
 public:
  HtmlPage(Output& out, std::optional<Tokenizer> tokenizer, const RunIdentity& identity)
      : out_(out), tokenizer_(std::move(tokenizer)) {
    out_.write(kHead);
    for (int c = 0; c < kColours; ++c) {
      out_.write(fmt::format(".s{} {{ background: rgba(220, 40, 20, {:.2f}); }}\n", c, 0.85 * c / (kColours - 1)));
    }
    out_.write("</style></head><body>\n<h1>Surprise of each token</h1>\n<p class=\"x\">");
    for (const auto& [key, value] : identity.items()) {
      out_.write(html_text(fmt::format("{} {}  ", key, value.is_string() ? value.get<std::string>() : dump(value))));
    }
    out_.write("</p>\n");
  }

  void add(const ScoredDocument& scored) override {
    out_.write(fmt::format("<h2>{}</h2>\n<p>", html_text(scored.document.name)));
    std::optional<StreamDecoder> decoder;
    if (tokenizer_) decoder.emplace(*tokenizer_);
    const auto text_of = [&](int id) { return html_text(decoder ? decoder->push(id) : fmt::format("{} ", id)); };
    std::size_t next = 0;
    const auto skip_to = [&](std::size_t end) {
      for (; next < end; ++next) {
        out_.write(fmt::format("<i class=\"x\">{}</i>", text_of(scored.document.ids[next])));
      }
    };
    scored.for_each_token([&](std::size_t position, int id, float logprob) {
      skip_to(position);
      ++next;
      out_.write(fmt::format("<i class=\"s{}\" title=\"{}: id {}, log p {:.4g}\">{}</i>", colour_of(logprob), position,
                             id, logprob, text_of(id)));
    });
    skip_to(scored.document.ids.size());
    if (decoder) out_.write(html_text(decoder->finish()));
    out_.write("</p>\n");
  }

  void finish(const nlohmann::ordered_json& summary) override {
    out_.write(
        fmt::format("<h2>All documents</h2>\n<pre>{}</pre>\n</body></html>\n", html_text(summary_text(summary))));
    out_.commit();
  }

 private:
  Output& out_;
  std::optional<Tokenizer> tokenizer_;
};

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

class LossPlot : public DocumentSink {
 public:
  explicit LossPlot(Output& out) : out_(out) {}

  void add(const ScoredDocument& scored) override {
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

  void finish(const nlohmann::ordered_json& summary) override {
    const auto& ppl = summary["ppl"];
    out_.write(svg(fmt::format("ppl {} ({} tokens, mode {})",
                               ppl.is_number() ? fmt::format("{:.6g}", ppl.get<double>()) : "n/a",
                               dump(summary["tokens"]), summary["mode"].get<std::string>())));
    out_.commit();
  }

 private:
  static constexpr std::size_t kPerOctave = 4;  // classes of positions, which grow by the fourth root of 2
  static constexpr double kWidth = 0.125;       // of a class of documents, nats per token

  struct Class {
    std::int64_t count = 0;
    double nll = 0.0;
    double mean() const { return nll / static_cast<double>(count); }
  };

  /// The file, with `caption` below the drawings.
  std::string svg(const std::string& caption) const {
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
      most = std::max(most, positions_[c].mean());
    }
    std::string line;
    const auto x_of = [&](double at) { return kLeft + kWide * at / static_cast<double>(last + 1); };
    for (std::size_t c = 0; c <= last; ++c) {
      if (positions_[c].count == 0) continue;
      const double mean = positions_[c].mean();
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
    std::size_t first = 0, end = documents_.size();
    while (first < end && documents_[first] == 0) ++first;
    while (first < end && documents_[end - 1] == 0) --end;
    if (first < end) {
      const auto highest = static_cast<double>(*std::max_element(documents_.begin(), documents_.end()));
      const double wide = kWide / static_cast<double>(end - first);
      for (std::size_t c = first; c < end; ++c) {
        const double high = kHigh * static_cast<double>(documents_[c]) / highest;
        file += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"#06c\"/>\n",
                            left + wide * static_cast<double>(c - first), kTop + kHigh - high, std::max(wide - 1, 0.5),
                            high);
      }
      file += mark_below(left, fmt::format("{:.3f}", static_cast<double>(first) * kWidth));
      file += mark_below(left + kWide, fmt::format("{:.3f}", static_cast<double>(end) * kWidth));
      file += mark_left(left, kTop, fmt::format("{:.0f}", highest));
    }
    return file + text(kLeft, kTop + kHigh + 60, "start", caption) + "</svg>\n";
  }

  Output& out_;
  std::array<Class, 40 * kPerOctave> positions_;
  std::array<std::int64_t, 256> documents_{};  // the last one has all beyond too
};

}  // namespace

std::string html_text(std::string_view text) {
  constexpr std::string_view kMarks = "&<>\"'";
  constexpr std::array<std::string_view, 5> kEntities = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
  std::string escaped;
  for (const char c : models::replace_invalid_utf8(text)) {
    const std::size_t mark = kMarks.find(c);
    const bool is_unknown = static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' && c != '\r';
    if (mark != std::string_view::npos) {
      escaped += kEntities[mark];
    } else if (is_unknown) {
      escaped += models::kReplacement;
    } else {
      escaped += c;
    }
  }
  return escaped;
}

std::unique_ptr<DocumentSink> html_page(Output& out, std::optional<Tokenizer> tokenizer, const RunIdentity& identity) {
  return std::make_unique<HtmlPage>(out, std::move(tokenizer), identity);
}

std::unique_ptr<DocumentSink> loss_plot(Output& out) { return std::make_unique<LossPlot>(out); }

}  // namespace mmrec::apps
