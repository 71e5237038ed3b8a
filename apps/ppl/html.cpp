#include "apps/ppl/html.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "apps/ppl/html_text.h"

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

}  // namespace

HtmlReport::HtmlReport(Output& out, std::optional<Tokenizer> tokenizer, const RunIdentity& identity)
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

std::string HtmlReport::text_of(StreamDecoder* decoder, int id) const {
  return decoder != nullptr ? decoder->push(id) : fmt::format("{} ", id);
}

void HtmlReport::add(const ScoredDocument& scored) {
  out_.write(fmt::format("<h2>{}</h2>\n<p>", html_text(scored.document.name)));
  std::optional<StreamDecoder> decoder;
  if (tokenizer_) decoder.emplace(*tokenizer_);
  StreamDecoder* text = decoder ? &*decoder : nullptr;
  std::size_t next = 0;
  const auto skip_to = [&](std::size_t end) {
    for (; next < end; ++next) {
      out_.write(fmt::format("<i class=\"x\">{}</i>", html_text(text_of(text, scored.document.ids[next]))));
    }
  };
  scored.for_each_token([&](std::size_t position, int id, float logprob) {
    skip_to(position);
    ++next;
    out_.write(fmt::format("<i class=\"s{}\" title=\"{}: id {}, log p {:.4g}\">{}</i>", colour_of(logprob), position,
                           id, logprob, html_text(text_of(text, id))));
  });
  skip_to(scored.document.ids.size());
  if (decoder) out_.write(html_text(decoder->finish()));
  out_.write("</p>\n");
}

void HtmlReport::finish(const nlohmann::ordered_json& summary) {
  out_.write(fmt::format("<h2>All documents</h2>\n<pre>{}</pre>\n</body></html>\n", html_text(summary_text(summary))));
  out_.commit();
}

}  // namespace mmrec::apps
