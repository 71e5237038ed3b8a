// Any line of `mmrec-generate --jsonl` is refused by one line, or is a request that a sampler and a model take. The
// first byte of the input says whether the line goes on from a state.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>

#include "apps/common/cli.h"
#include "apps/common/json_text.h"
#include "apps/generate/jsonl.h"
#include "mmrec/sampler.h"
#include "tests/engine/toy_executor.h"
#include "tests/fuzz/harness.h"
#include "tests/support/tokenizer_builder.h"

namespace {

namespace apps = mmrec::apps;
using mmrec::fuzz::require;

constexpr int kVocabSize = 300;

const mmrec::Tokenizer& tokenizer() {
  static const mmrec::Tokenizer tokenizer = [] {
    mmrec::test::TokenizerBuilder builder;
    builder.words({"\xE2\x96\x81", "a", "b", "ab", "t", "h", "e"}).bytes();
    return mmrec::Tokenizer::from_bytes(builder.build());
  }();
  return tokenizer;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  static const auto state = std::make_shared<const mmrec::Session>(mmrec::test::toy_session());
  apps::JsonlOptions options;
  if (data[0] % 2 == 1) options.start = state;
  mmrec::ModelInfo info;
  info.vocab_size = kVocabSize;
  try {
    const std::string_view text = mmrec::fuzz::text_of(data + 1, size - 1);
    const nlohmann::ordered_json object = apps::parse_object(text, "");
    for (const auto& [key, value] : object.items()) {
      require(nlohmann::ordered_json::parse(apps::member_text(text, key)) == value);
    }
    const apps::LineRequest line = apps::read_request(object, options, info, tokenizer(), 7);
    const mmrec::GenerateOptions& asked = line.request.options;
    require(line.num_samples >= 1 && line.num_samples <= 65536);
    require(asked.max_tokens >= -1 && asked.top_logprobs >= 0 && asked.top_logprobs <= 1000);
    const mmrec::Sampler takes(asked.sampler);
    require(options.start || !line.request.prompt.empty());
    for (const int id : line.request.prompt) require(id >= 0 && id < kVocabSize);
    for (const std::string& text : asked.stop) require(!text.empty());
  } catch (const apps::RejectedFile& error) {
    mmrec::fuzz::require_line(error.what());
  }
  return 0;
}
