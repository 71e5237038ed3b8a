// Any text encodes to ids that decode to it; any ids decode to valid UTF-8, streamed or at once.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "mmrec/tokenizer.h"
#include "models/files/utf8.h"
#include "tests/support/rank_file_builder.h"
#include "tests/support/tokenizer_builder.h"

namespace {

using mmrec::Tokenizer;

void require(bool holds) {
  if (!holds) std::abort();
}

/// One that keeps text as it is, one that normalises it, and one of ranks, where they are read.
const std::vector<Tokenizer>& tokenizers() {
  static const std::vector<Tokenizer> list = [] {
    const std::string space = "\xE2\x96\x81";
    mmrec::test::TokenizerBuilder faithful;
    faithful.words({space, space + "a", space + "the", "a", "b", "ab", "aba", "t", "h", "e", "\xC3\xA9"}).bytes();
    faithful.model_type = 2;
    mmrec::test::TokenizerBuilder normalising;
    normalising.words({space, space + "a", space + "the", "a", "b", "ab", "e", "xx", "xxx"});
    normalising.pieces.push_back({"<sep>", 0.0F, 4});
    normalising.remove_extra_whitespaces = true;
    normalising.charsmap =
        mmrec::test::CharsmapBuilder(mmrec::test::Rules{{"\n", " "}, {"\xC3\xA9", "e"}, {"ab", "b"}, {"abc", ""}})
            .build();
    std::vector all{Tokenizer::from_bytes(faithful.build()), Tokenizer::from_bytes(normalising.build())};
    try {
      const std::string ranks = mmrec::test::rank_file(mmrec::test::bytes_and({"th", "the", " the", "ab", "\xC3\xA9"}));
      all.push_back(Tokenizer::from_bytes(ranks, R"({"pattern": " ?[a-z]+|\\s+|."})", "tokenizer.tiktoken"));
    } catch (const std::runtime_error&) {  // a build without PCRE2
    }
    return all;
  }();
  return list;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const Tokenizer& tokenizer : tokenizers()) {
    const std::vector<int> ids = tokenizer.encode(text);
    for (const int id : ids) require(id >= 0 && id < tokenizer.vocab_size());
    require(mmrec::models::is_valid_utf8(tokenizer.decode(ids)));

    std::vector<int> any;
    for (std::size_t i = 0; i + 1 < size; i += 2) any.push_back((data[i] + 256 * data[i + 1]) % tokenizer.vocab_size());
    mmrec::StreamDecoder decoder(tokenizer);
    std::string joined;
    for (const int id : any) {
      const std::string part = decoder.push(id);
      require(mmrec::models::is_valid_utf8(part));
      joined += part;
    }
    joined += decoder.finish();
    require(joined == tokenizer.decode(any));
  }
  // The first keeps everything but the symbol that stands for a space.
  std::string expected = mmrec::models::replace_invalid_utf8(text);
  const std::string_view symbol = "\xE2\x96\x81";
  for (std::size_t at = 0; (at = expected.find(symbol, at)) != std::string::npos;)
    expected.replace(at, symbol.size(), " ");
  require(tokenizers().front().decode(tokenizers().front().encode(text)) == expected);
  return 0;
}
