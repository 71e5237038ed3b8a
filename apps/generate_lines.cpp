#include "apps/generate_lines.h"

#include <fmt/format.h>

#include <utility>

#include "apps/cli.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

Submission prepare_line(RecordQueue& queue, std::string_view text, std::int64_t number, const LineOptions& options) {
  if (text.ends_with('\r')) text.remove_suffix(1);
  GeneratorRequest request{.prompt = options.encode(text), .options = options.generate, .start = options.start};
  request.options.sequence = static_cast<std::uint64_t>(number - 1);
  Json head = {{"line", number}};
  if (options.detail.prompt) head["prompt"] = text;
  if (options.detail.tokens) head["prompt_tokens"] = request.prompt;
  return [&queue, &options, name = fmt::format("{}:{}", options.name, number), head = std::move(head),
          request = std::move(request), runs = count_invalid_utf8(text)]() mutable {
    if (runs > 0) warn(fmt::format("{}: {} places are no UTF-8 and are read as U+FFFD", name, runs));
    int sample = 0;
    for (GeneratorRequest& one : options.branch(std::move(request))) {
      if (options.num_samples > 1) head["sample"] = sample++;
      if (options.num_samples > 1) head["seed"] = one.options.sampler.seed;
      queue.submit(head, std::move(one), options.detail, name);
    }
  };
}

}  // namespace

void generate_lines(RecordQueue& queue, LineReader& lines, const LineOptions& options) {
  run_lines(queue, lines, options.threads,
            [&](std::string_view line, std::int64_t number) { return prepare_line(queue, line, number, options); });
}

}  // namespace mmrec::apps
