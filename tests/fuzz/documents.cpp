// Any line of JSON that should be a document is refused by one line, or is one: a text, a pair of texts, or a record
// that mmrec-ppl wrote before. The first byte of the input says which.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>

#include "apps/common/cli.h"
#include "apps/common/json_text.h"
#include "apps/ppl/corpus.h"
#include "apps/ppl/merge.h"
#include "mmrec/evaluation.h"
#include "mmrec/tokenizer.h"
#include "tests/fuzz/harness.h"
#include "tests/support/tokenizer_builder.h"

namespace {

namespace apps = mmrec::apps;
using mmrec::fuzz::require;

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

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view line = mmrec::fuzz::text_of(data + 1, size - 1);
  try {
    if (data[0] % 3 == 0) read_text(line);
    if (data[0] % 3 == 1) read_pair(line);
    if (data[0] % 3 == 2) read_record(line);
  } catch (const apps::RejectedFile& error) {
    mmrec::fuzz::require_line(error.what());
  }
  return 0;
}
