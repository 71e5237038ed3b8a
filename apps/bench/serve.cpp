#include "apps/bench/serve.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <string_view>
#include <utility>

#include "apps/bench/run.h"
#include "apps/common/stopwatch.h"
#include "mmrec/generator.h"

namespace mmrec::apps {
namespace {

/// Random numbers that are the same in every process: the upper bits of each count.
using Numbers =
    std::linear_congruential_engine<std::uint64_t, 6364136223846793005ULL, 1442695040888963407ULL, 0 /* 2^64 */>;

std::int64_t below(std::int64_t end, Numbers& numbers) {
  return static_cast<std::int64_t>((numbers() >> 33) % static_cast<std::uint64_t>(end));
}

// Fields of a protobuf message: a sentencepiece model is one.
void put_number(std::string& to, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) to += static_cast<char>(value | 0x80);
  to += static_cast<char>(value);
}
void put_bytes(std::string& to, unsigned field, std::string_view bytes) {
  put_number(to, field << 3 | 2);
  put_number(to, bytes.size());
  to += bytes;
}
void put_value(std::string& to, unsigned field, std::uint64_t value) {
  put_number(to, field << 3);
  put_number(to, value);
}

}  // namespace

std::vector<int> some_tokens(std::int64_t count, std::int64_t vocab) {
  Numbers numbers(1);
  std::vector<int> tokens(static_cast<std::size_t>(count));
  for (int& token : tokens) token = static_cast<int>(below(vocab, numbers));
  return tokens;
}

std::vector<ServedRequest> some_requests(std::int64_t count, std::int64_t most_drawn, std::int64_t vocab) {
  Numbers numbers(7);
  constexpr std::int64_t kFine = 1 << 20;
  const std::int64_t mean = mean_drawn(most_drawn);
  std::vector<ServedRequest> requests(static_cast<std::size_t>(count));
  std::int64_t off = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const double share = static_cast<double>(below(kFine, numbers)) / static_cast<double>(kFine);
    const double length = static_cast<double>(kLeastPrompt) *
                          std::pow(static_cast<double>(kMostPrompt) / static_cast<double>(kLeastPrompt), share);
    requests[i].prompt.resize(static_cast<std::size_t>(std::lround(length)));
    for (int& token : requests[i].prompt) token = static_cast<int>(below(vocab, numbers));
    // Pairs that draw as many more as fewer than the mean.
    const bool is_second = i % 2 == 1;
    if (!is_second)
      off = i + 1 == requests.size() ? 0 : below(2 * (mean - kLeastDrawn) + 1, numbers) - (mean - kLeastDrawn);
    requests[i].drawn = is_second ? mean - off : mean + off;
  }
  return requests;
}

std::int64_t mean_prompt(const std::vector<ServedRequest>& requests) {
  std::int64_t total = 0;
  for (const ServedRequest& request : requests) total += std::ssize(request.prompt);
  return total / std::ssize(requests);
}

std::string made_up_pieces(std::int64_t vocab) {
  enum Type : std::uint8_t { kNormal = 1, kUnknown = 2, kControl = 3 };
  std::string model;
  const auto add = [&](const std::string& text, Type type) {
    std::string piece;
    put_bytes(piece, 1, text);
    put_value(piece, 3, type);
    put_bytes(model, 1, piece);
  };
  add("<unk>", kUnknown);
  if (vocab > 1) add("<s>", kControl);
  for (std::int64_t i = 2; i < vocab; ++i) add(fmt::format("w{}", i), kNormal);
  std::string trainer;
  constexpr std::uint64_t kUnigram = 1;
  put_value(trainer, 3, kUnigram);
  put_bytes(model, 2, trainer);
  return model;
}

double serve_seconds(const Model& model, const Tokenizer& tokenizer, const SessionOptions& options, int slots,
                     const std::vector<ServedRequest>& requests) {
  Generator generator(model, tokenizer, {.slots = slots, .session = options});
  const Stopwatch watch;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    GeneratorRequest request;
    request.prompt = requests[i].prompt;
    request.options.max_tokens = requests[i].drawn;
    request.options.sequence = i;
    generator.submit(std::move(request));
  }
  while (generator.run_once()) check_interrupt();
  return watch.seconds();
}

double lock_step_seconds(Session& session, std::int64_t tokens) {
  const SamplerOptions chain = GenerateOptions{}.sampler;
  std::vector<Sample> drawn(static_cast<std::size_t>(session.batch()));
  std::vector<int> next(drawn.size());
  const Stopwatch watch;
  for (std::int64_t t = 0; t < tokens; ++t) {
    session.draw(chain, static_cast<std::uint64_t>(session.position()), 0, drawn, /*logprobs=*/false);
    std::transform(drawn.begin(), drawn.end(), next.begin(), [](const Sample& sample) { return sample.token; });
    session.step(next);
    if (t % 16 == 0) check_interrupt();
  }
  (void)session.logits();  // waits for the last
  return watch.seconds();
}

}  // namespace mmrec::apps
