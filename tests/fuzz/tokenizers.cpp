// The files of tokenizers, and texts and ids.
#include "mmrec/tokenizer.h"

#include "models/files/utf8.h"
#include "tests/fuzz/harness.h"
#include "tests/support/rank_file_builder.h"
#include "tests/support/tokenizer_builder.h"

namespace {

using mmrec::Tokenizer;
using mmrec::fuzz::require;
using mmrec::models::is_valid_utf8;

std::string every_byte() {
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  return bytes;
}

std::vector<int> encode(const Tokenizer& tokenizer, std::string_view text, bool add_bos = true) {
  std::vector<int> ids = tokenizer.encode(text, add_bos);
  for (const int id : ids) require(id >= 0 && id < tokenizer.vocab_size());
  return ids;
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

// A tokenizer.model of any bytes is refused, or loads and then encodes and decodes whatever it is given.
MMREC_FUZZ(tokenizer_model) {
  mmrec::fuzz::takes([&] {
    const Tokenizer tokenizer = Tokenizer::from_bytes(input);
    std::string pieces;  // what its own tries match
    for (int id = 0; id < tokenizer.vocab_size() && pieces.size() < 512; ++id) pieces += tokenizer.piece(id);
    for (const std::string& text :
         {std::string(" the  cat\n\nsat "), every_byte(), pieces, std::string(input.substr(0, 512))}) {
      (void)tokenizer.decode(encode(tokenizer, text));
    }
  });
}

// A tokenizer.tiktoken and its tokenizer_config.json of any bytes are refused, or load and then encode any text to ids
// that decode to it. The input is the config, a zero byte and the rank file; "*" first in the latter stands for the 256
// single bytes, so that mutations find what comes after them.
MMREC_FUZZ(tokenizer_ranks) {
  const auto parts = mmrec::fuzz::parts_of(input, 2);
  std::string ranks(parts[1]);
  if (ranks.starts_with('*')) ranks.replace(0, 1, mmrec::test::rank_file(mmrec::test::bytes_and({})));
  mmrec::fuzz::takes([&] {
    const Tokenizer tokenizer = Tokenizer::from_bytes(ranks, std::string(parts[0]), "tokenizer.tiktoken");
    for (const std::string& text : {std::string(" the  cat's\r\n\n12345 sat "), every_byte(), std::string(28, 'a'),
                                    std::string(input.substr(0, 512))}) {
      require(tokenizer.decode(encode(tokenizer, text, false)) == mmrec::models::replace_invalid_utf8(text));
    }
  });
}

// Any text encodes to ids that decode to it; any ids decode to valid UTF-8, streamed or at once.
MMREC_FUZZ(tokenizer_text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(input[i]); };
  for (const Tokenizer& tokenizer : tokenizers()) {
    require(is_valid_utf8(tokenizer.decode(encode(tokenizer, input))));

    std::vector<int> any;
    for (std::size_t i = 0; i + 1 < input.size(); i += 2) {
      any.push_back((byte(i) + 256 * byte(i + 1)) % tokenizer.vocab_size());
    }
    mmrec::StreamDecoder decoder(tokenizer);
    std::string joined;
    for (const int id : any) {
      const std::string part = decoder.push(id);
      require(is_valid_utf8(part));
      joined += part;
    }
    joined += decoder.finish();
    require(joined == tokenizer.decode(any));
  }
  // The first keeps everything but the symbol that stands for a space.
  std::string expected = mmrec::models::replace_invalid_utf8(input);
  const std::string_view symbol = "\xE2\x96\x81";
  for (std::size_t at = 0; (at = expected.find(symbol, at)) != std::string::npos;)
    expected.replace(at, symbol.size(), " ");
  require(tokenizers().front().decode(tokenizers().front().encode(input)) == expected);
}
