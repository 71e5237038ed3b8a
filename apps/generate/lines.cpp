#include "apps/generate/lines.h"

#include <fmt/format.h>

#include <utility>

#include "apps/common/cli.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

Submission prepare_line(RecordQueue& queue, std::string_view text, std::int64_t number, const LineOptions& options) {
  if (text.ends_with('\r')) text.remove_suffix(1);
  GeneratorRequest request{.prompt = options.encode(text), .options = options.generate, .start = options.start};
  request.options.sequence = static_cast<std::uint64_t>(number - 1);
  Json more = Json::object();
  if (options.detail.prompt) more["prompt"] = text;
  if (options.detail.tokens) more["prompt_tokens"] = request.prompt;
  const std::string name = fmt::format("{}:{}", options.name, number);
  Samples samples(std::move(request), options.num_samples, *options.model, options.session);
  Submission submit =
      submission(queue, RecordHead({{"line", number}}, more), std::move(samples), options.detail, false, name);
  const std::int64_t runs = count_invalid_utf8(text);
  if (runs == 0) return submit;
  return [submit = std::move(submit), name, runs, is_new = true]() mutable {
    if (std::exchange(is_new, false)) {
      warn(fmt::format("{}: {} places are no UTF-8 and are read as U+FFFD", name, runs));
    }
    return submit();
  };
}

}  // namespace

void generate_lines(RecordQueue& queue, LineReader& lines, const LineOptions& options) {
  run_lines(queue, lines, options.threads,
            [&](std::string_view line, std::int64_t number) { return prepare_line(queue, line, number, options); });
}

}  // namespace mmrec::apps
