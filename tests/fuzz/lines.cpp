// Lines and files of JSON that the programs read: token ids, documents, requests and generation_config.json.
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/common/cli.h"
#include "apps/common/input.h"
#include "apps/generate/lines.h"
#include "apps/generate/sampling.h"
#include "apps/ppl/corpus.h"
#include "apps/ppl/merge.h"
#include "mmrec/evaluation.h"
#include "mmrec/sampler.h"
#include "tests/engine/toy_executor.h"
#include "tests/fuzz/harness.h"
#include "tests/support/tokenizer_builder.h"

namespace {

namespace apps = mmrec::apps;
using mmrec::fuzz::accepted;
using mmrec::fuzz::require;
using mmrec::fuzz::takes;

const mmrec::Tokenizer& tokenizer() {
  static const mmrec::Tokenizer tokenizer = [] {
    const std::string space = "\xE2\x96\x81";
    mmrec::test::TokenizerBuilder builder;
    builder.words({space, space + "a", space + "the", "a", "b", "ab", "t", "h", "e"}).bytes();
    return mmrec::Tokenizer::from_bytes(builder.build());
  }();
  return tokenizer;
}

void read_text(std::string_view line) {
  const nlohmann::ordered_json object = apps::parse_object(line, "input:1");
  const std::string text = apps::string_field(object, "text", "input:1");
  require(text == nlohmann::json::parse(line).at("text").get<std::string>());
}

void read_pair(std::string_view line) {
  const nlohmann::ordered_json object = apps::parse_object(line, "input:1");
  const std::string context = apps::string_field(object, "context", "input:1");
  const std::string both = context + apps::string_field(object, "continuation", "input:1");
  const mmrec::TextPair pair{both, context.size()};
  const mmrec::PairTokens tokens = mmrec::encode_pairs(tokenizer(), std::span(&pair, 1), true, 0, 1).front();
  require(tokens.context >= 1 && tokens.context <= tokens.ids.size());
  for (const int id : tokens.ids) require(id >= 0 && id < tokenizer().vocab_size());
}

void read_record(std::string_view line) {
  const apps::DocumentRecord record = apps::parse_record(line, "input:1");
  require(record.index >= 0 && record.sums.tokens >= 0 && record.bytes >= -1 && record.words >= -1);
  for (const auto& [key, value] : record.identity.items()) require(key.size() <= 20 && value.dump().size() <= 420);
  apps::check_comparable(record.identity, record.identity, "input:1");
  mmrec::PerplexityAccumulator sums;
  require(apps::add_record(record, sums) == (record.sums.tokens > 0));
}

void read_request(std::string_view line, bool goes_on) {
  constexpr int kVocabSize = 300;
  static const auto state = std::make_shared<const mmrec::Session>(mmrec::test::toy_session());
  mmrec::ModelInfo info;
  info.vocab_size = kVocabSize;
  const nlohmann::ordered_json object = apps::parse_object(line, "");
  for (const auto& [key, value] : object.items()) {
    require(nlohmann::ordered_json::parse(apps::member_text(line, key)) == value);
  }
  const auto start = goes_on ? state : nullptr;
  const apps::LineRequest read = apps::read_request(object, {}, start, info, tokenizer(), 7);
  const mmrec::GenerateOptions& asked = read.request.options;
  require(read.num_samples >= 1 && read.num_samples <= 65536);
  require(asked.max_tokens >= -1 && asked.top_logprobs >= 0 && asked.top_logprobs <= 1000);
  const mmrec::Sampler sampler(asked.sampler);
  require(start || !read.request.prompt.empty());
  for (const int id : read.request.prompt) require(id >= 0 && id < kVocabSize);
  for (const std::string& text : asked.stop) require(!text.empty());
}

}  // namespace

// Any line of token ids is refused by one line, or holds the numbers that nlohmann's JSON reads there; and what JSON
// says are ids of the vocabulary is never refused.
MMREC_FUZZ(token_ids) {
  constexpr std::int64_t kVocabSize = 1000;
  if (input.find('\n') != std::string_view::npos) return;  // is two lines
  const auto ids = accepted<apps::RejectedFile>([&] { return apps::parse_ids(input, "input:1", kVocabSize); });
  const nlohmann::json json = nlohmann::json::parse(input, nullptr, false);
  if (ids) {
    require(json.is_array() && json.get<std::vector<int>>() == *ids);
    for (const int id : *ids) require(id >= 0 && id < kVocabSize);
  } else if (input.find('\0') == std::string_view::npos && !input.starts_with("\xef\xbb\xbf")) {
    require(!json.is_array() || !std::ranges::all_of(json, [](const nlohmann::json& id) {
      return id.is_number_unsigned() && id.get<std::uint64_t>() < kVocabSize;
    }));
  }
}

// Any line of JSON that should be a document is refused by one line, or is one: a text, a pair of texts, or a record
// that mmrec-ppl wrote before. The first byte of the input says which.
MMREC_FUZZ(documents) {
  if (input.empty()) return;
  const int kind = mmrec::fuzz::take_byte(input) % 3;
  takes<apps::RejectedFile>([&] { kind == 0 ? read_text(input) : kind == 1 ? read_pair(input) : read_record(input); });
}

// Any line of `mmrec-generate --jsonl` is refused by one line, or is a request that a sampler and a model take. The
// first byte of the input says whether the line goes on from a state.
MMREC_FUZZ(prompts) {
  if (input.empty()) return;
  const bool goes_on = mmrec::fuzz::take_byte(input) % 2 == 1;
  takes<apps::RejectedFile>([&] { read_request(input, goes_on); });
}

// Any generation_config.json is refused by one line, or gives settings that the sampler takes.
MMREC_FUZZ(generation_config) {
  const auto defaults = accepted<apps::RejectedFile>([&] { return apps::parse_generation_defaults(input, "input"); });
  if (!defaults) return;
  const mmrec::Sampler sampler(defaults->sampler);
  for (const int id : defaults->eos_token_ids) require(id >= 0);
  require(!apps::chain_text(defaults->sampler).empty());
}
