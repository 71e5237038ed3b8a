// Every kind of tokenizer model, and what the engine promises of all of them. Long, because they share their builders.
#include "mmrec/tokenizer.h"

#include <sentencepiece_processor.h>

#include <clocale>
#include <locale>

#include "tests/support/in_parts.h"
#include "tests/support/model_folder.h"
#include "tests/support/refusal.h"
#include "tests/support/tokenizer_builder.h"

namespace mmrec::test {
namespace {

const std::string kSpace = "\xE2\x96\x81";
const std::string kFffd = "\xEF\xBF\xBD";

Tokenizer bundled() { return Tokenizer::load(folder_of("mmrec-12m")); }

Tokenizer made(const TokenizerBuilder& builder, const std::string& config = "") {
  return Tokenizer::from_bytes(builder.build(), config);
}

std::string refusal(const TokenizerBuilder& builder, const std::string& config = "") {
  return file_refusal([&] { made(builder, config); });
}

/// Words of a few letters, with a byte for everything else.
TokenizerBuilder words_and_bytes() {
  TokenizerBuilder builder;
  builder.words({kSpace, kSpace + "a", kSpace + "the", "a", "b", "ab", "t", "h", "e", kSpace + "b"});
  return builder.bytes();
}

/// Text in several scripts with every kind of white space, lines of all lengths.
std::string mixed_text(std::size_t bytes, unsigned seed, const std::vector<std::string>& parts) {
  std::mt19937 rng(seed);
  std::string text;
  while (text.size() < bytes) text += parts[rng() % parts.size()];
  return text;
}

/// What sentencepiece itself makes of the whole text at once.
std::vector<int> uncut(const std::string& model, std::string_view text) {
  sentencepiece::SentencePieceProcessor processor;
  EXPECT_TRUE(processor.LoadFromSerializedProto(model).ok());
  std::vector<int> ids;
  EXPECT_TRUE(processor.Encode({text.data(), text.size()}, &ids).ok());
  return ids;
}

TEST(Tokenizer, TheBundledOne) {
  const Tokenizer t = bundled();
  EXPECT_EQ(t.vocab_size(), 8192);
  EXPECT_EQ(t.unk_id(), 0);
  EXPECT_EQ(t.bos_id(), 1);
  EXPECT_EQ(t.eos_id(), 2);
  EXPECT_TRUE(t.adds_bos());
  EXPECT_NE(t.fingerprint(), 0U);
  EXPECT_EQ(t.piece(1), "<s>");
  const std::vector<int> ids = t.encode("Hello world");
  EXPECT_EQ(ids.front(), 1);
  EXPECT_EQ(t.encode("Hello world", false), std::vector<int>(ids.begin() + 1, ids.end()));
  EXPECT_EQ(t.decode(ids), "Hello world");
  EXPECT_EQ(t.encode(""), std::vector<int>{1});
  EXPECT_TRUE(t.encode("", false).empty());
  EXPECT_EQ(t.decode({}), "");
}

TEST(Tokenizer, DecodingReturnsTheText) {
  const Tokenizer t = bundled();
  for (const std::string text :
       {" ", "  ", "   a", "a", " a", "a ", "\n", "\n\n a\n", "\t\r\n", "tabs\tand 🚀 naïve", "\xEF\xBB\xBF bom",
        "caf\xC3\xA9 \xF0\x9F\x9A\x80\xF0\x9F\x9A\x80 x", "\xE6\x97\xA5\xE6\x9C\xAC\xE8\xAA\x9E",
        " two  spaces\n\n = Title = \n", "<s> </s> <unk> <0x41>"}) {
    EXPECT_EQ(t.decode(t.encode(text)), text);
  }
  EXPECT_EQ(t.decode(t.encode("a▁b")), "a b");  // the library's own symbol for a space
  EXPECT_EQ(t.decode(t.encode(std::string("a\0b", 3))), std::string("a\0b", 3));
}

TEST(Tokenizer, InvalidUtf8IsReplacedFirst) {
  const Tokenizer t = bundled();
  EXPECT_EQ(t.encode("a\xFF\xE2\x82z"), t.encode("a" + kFffd + kFffd + "z"));
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  EXPECT_NO_THROW(t.decode(t.encode(all)));
}

TEST(Tokenizer, AStreamJoinsToTheDecodedText) {
  const Tokenizer t = bundled();
  std::mt19937 rng(3);
  for (int round = 0; round < 300; ++round) {
    std::vector<int> tokens(rng() % 30);
    for (int& id : tokens) id = static_cast<int>(rng() % (round % 2 == 0 ? 262U : 8192U));  // many bytes, or anything
    ASSERT_EQ(decoded_in_parts(t, tokens), t.decode(tokens));
  }
}

TEST(StreamDecoder, BytesWaitForTheirCharacter) {
  const Tokenizer t = made(words_and_bytes());
  const int byte0 = 13;
  ASSERT_EQ(t.piece(byte0), "<0x00>");
  StreamDecoder d(t);
  EXPECT_EQ(d.push(byte0 + 0xF0), "");
  EXPECT_EQ(d.push(byte0 + 0x9F), "");
  EXPECT_EQ(d.push(byte0 + 0x9A), "");
  EXPECT_EQ(d.push(byte0 + 0x80), "\xF0\x9F\x9A\x80");
  EXPECT_EQ(d.push(byte0 + 0x80), kFffd);  // a continuation of nothing
  EXPECT_EQ(d.push(byte0 + 0xE2), "");
  EXPECT_EQ(d.push(byte0 + 0x41), kFffd + "A");
  EXPECT_EQ(d.push(byte0 + 0xE2), "");
  EXPECT_EQ(d.push(4), kFffd + " a");  // a piece ends what was incomplete
  EXPECT_EQ(d.push(byte0 + 0xE2), "");
  EXPECT_EQ(d.push(1), kFffd);  // and so does a control token
  EXPECT_EQ(d.push(byte0 + 0xE2), "");
  EXPECT_EQ(d.push(byte0 + 0x82), "");
  EXPECT_EQ(d.finish(), kFffd);
  EXPECT_EQ(d.finish(), "");
}

TEST(StreamDecoder, SkippedTokensLeaveWhatPushedOnesLeave) {
  const Tokenizer t = made(words_and_bytes());
  const std::vector<int> some = {0,         1,         3,         5,         6,         13 + 'x',
                                 13 + 0xF0, 13 + 0x9F, 13 + 0x9A, 13 + 0xE2, 13 + 0x82, 1 << 20};
  std::mt19937 rng(1);
  for (int repeat = 0; repeat < 4000; ++repeat) {
    std::vector<int> tokens(rng() % 12);
    // Mostly bytes; every other time what may stand at the start of a text.
    for (int& token : tokens)
      token = some[rng() % 4 != 0 ? 6 + rng() % 6 : rng() % (repeat % 2 == 0 ? 2 : some.size())];
    StreamDecoder pushed(t), skipped(t);
    for (const int token : {13 + 0xC3, 1}) {
      if (rng() % 2 == 0) continue;
      ASSERT_EQ(pushed.push(token), skipped.push(token));
    }
    for (const int token : tokens) {
      if (token < t.vocab_size()) pushed.push(token);
    }
    skipped.skip(tokens);
    for (const int token : {13 + 0x82, 13 + 0x80, 5}) ASSERT_EQ(pushed.push(token), skipped.push(token)) << repeat;
  }
}

TEST(StreamDecoder, OnlyTheFirstSpaceOfTheWholeTextIsDropped) {
  const Tokenizer t = made(words_and_bytes());
  const int space = 3, the = 5, a = 6;
  EXPECT_EQ(t.decode(std::vector<int>{the, the}), "the the");
  EXPECT_EQ(t.decode(std::vector<int>{1, the}), "the");  // BOS is not text
  EXPECT_EQ(t.decode(std::vector<int>{space, the}), " the");
  EXPECT_EQ(t.decode(std::vector<int>{a, the}), "a the");
  EXPECT_EQ(t.decode(std::vector<int>{13 + '\n', the}), "\n the");
  EXPECT_EQ(t.decode(std::vector<int>{0, the}), " \xE2\x81\x87  the");  // unknown, as sentencepiece shows it
  StreamDecoder later(t, false);
  EXPECT_EQ(later.push(the), " the");
  // A tokenizer that puts no space before a text has none to take away.
  TokenizerBuilder builder = words_and_bytes();
  builder.add_dummy_prefix = false;
  EXPECT_EQ(made(builder).decode(std::vector<int>{the}), " the");
  EXPECT_EQ(made(builder).decode(made(builder).encode(" the a", false)), " the a");
}

TEST(Tokenizer, IdsOutOfRangeAreRefused) {
  const Tokenizer t = bundled();
  for (const int id : {-1, 8192, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
    EXPECT_THROW(t.piece(id), std::out_of_range);
    EXPECT_THROW(t.decode({&id, 1}), std::out_of_range);
    EXPECT_THROW(StreamDecoder(t).push(id), std::out_of_range);
  }
}

/// Bytes of a text that is encoded in three chunks.
constexpr std::size_t kThreeChunks = 140'000;

/// Ids of a long text, which do not depend on how many threads share it, nor on whether it is encoded in parts.
std::vector<int> shared_out(const Tokenizer& t, const std::string& text) {
  std::vector<int> ids = t.encode(text, false);
  EXPECT_EQ(t.encode(text, false, nullptr, 2), ids);
  EXPECT_EQ(encoded_in_parts(t, text, false, 2), ids);
  return ids;
}

TEST(Tokenizer, PartsOfATextAreBounded) {
  const Tokenizer t = bundled();
  std::string text;
  while (text.size() < 300'000) text += "the small river runs past the old mill\n";
  StreamEncoder encoder(t, text);
  std::vector<int> ids;
  std::size_t parts = 1;
  for (std::size_t before = 0; encoder.next(ids); before = encoder.bytes(), ++parts) {
    EXPECT_GT(encoder.bytes(), before);
    EXPECT_LE(encoder.bytes() - before, std::size_t{64} << 10);
  }
  EXPECT_EQ(parts, 5U);
  EXPECT_EQ(encoder.bytes(), text.size());
  EXPECT_EQ(encoded_in_parts(t, "", true), t.encode(""));
  // With several threads the first part is as soon there, and later ones are larger.
  StreamEncoder shared(t, text, true, 2);
  EXPECT_TRUE(shared.next(ids));
  EXPECT_LE(shared.bytes(), std::size_t{128} << 10);
}

TEST(Tokenizer, LongTextsGiveTheIdsOfTheUncutText) {
  const std::vector<std::string> parts = {
      "the ", "a", " ab", "\n", "\n\n", "  ", "\xC3\xA9", "the the a b.", "\xF0\x9F\x9A\x80", "\t"};
  for (const int model_type : {1, 2}) {
    for (const bool dummy_prefix : {true, false}) {
      TokenizerBuilder builder = words_and_bytes();
      builder.model_type = model_type;
      builder.add_dummy_prefix = dummy_prefix;
      for (const unsigned seed : {1U, 2U}) {
        const std::string text = mixed_text(kThreeChunks, seed, parts);
        const std::vector<int> ids = shared_out(made(builder), text);
        EXPECT_EQ(ids, uncut(builder.build(), text)) << "model type " << model_type << " prefix " << dummy_prefix;
        EXPECT_EQ(made(builder).decode(ids), text);
      }
    }
  }
}

TEST(Tokenizer, LongTextsOfTheBundledTokenizer) {
  const Tokenizer t = bundled();
  const std::string model = read_file(folder_of("mmrec-12m") / "tokenizer.model");
  const std::string text = mixed_text(400000, 9,
                                      {"The quick brown fox ", "jumps", " over\n", "\n\n", "lazy dogs. ", "  1,234",
                                       "\xC3\xBC"
                                       "ber ",
                                       "\xF0\x9F\x9A\x80", "\t", " \n "});
  const std::vector<int> ids = shared_out(t, text);
  EXPECT_EQ(ids, uncut(model, text));
  EXPECT_EQ(t.decode(ids), text);
}

TEST(Tokenizer, LongTextsWhereWhiteSpaceIsSqueezed) {
  // As the library's default: runs of white space become one, line ends are spaces, both ends are trimmed.
  TokenizerBuilder builder = words_and_bytes();
  builder.model_type = 2;
  builder.remove_extra_whitespaces = true;
  for (const bool maps_line_ends : {true, false}) {
    builder.charsmap =
        maps_line_ends ? CharsmapBuilder(Rules{{"\n", " "}, {"\t", " "}, {"\xC3\xA9", "e"}}).build() : "";
    for (const bool dummy_prefix : {true, false}) {
      builder.add_dummy_prefix = dummy_prefix;
      const Tokenizer t = made(builder);
      const std::string model = builder.build();
      for (const std::string& text :
           {mixed_text(kThreeChunks, 4, {"the ", "a", " ab", "\n", "\n\n", "    ", "\xC3\xA9", "\t"}),
            mixed_text(kThreeChunks, 5, {"the", "a", "b", "\n"}),  // no spaces
            std::string(kThreeChunks, ' ') + "the" + std::string(kThreeChunks, ' ') + "b" + std::string(70000, ' '),
            "a" + std::string(65536, ' ') + "b" + std::string(131072, '\n') + "the a",
            std::string(65535, 'a') + " b" + std::string(65534, 'a') + " " + std::string(100, 'b')}) {
        EXPECT_EQ(shared_out(t, text), uncut(model, text)) << maps_line_ends << dummy_prefix << text.size();
      }
    }
  }
}

TEST(Tokenizer, LongLinesAreCutBetweenCharacters) {
  TokenizerBuilder builder = words_and_bytes();
  builder.model_type = 2;
  std::string text = "a";  // odd, so that the characters of four bytes straddle the limit
  for (std::size_t i = 0; i < kThreeChunks / 4; ++i) text += "\xF0\x9F\x9A\x80";
  EXPECT_EQ(shared_out(made(builder), text), uncut(builder.build(), text));
  const std::string garbage = std::string(kThreeChunks, '\x80') + std::string(70000, '\xF0');
  std::string replaced;
  for (std::size_t i = 0; i < garbage.size(); ++i) replaced += kFffd;
  EXPECT_EQ(shared_out(made(builder), garbage), made(builder).encode(replaced, false));
}

TEST(Tokenizer, RunsOfUnknownCharactersStayOneTokenAcrossCuts) {
  TokenizerBuilder builder;
  builder.words({kSpace, "a"});
  builder.model_type = 2;
  std::string text = "a ";
  for (int i = 0; i < 70000; ++i) text += "\xC3\xA9";
  text += "a";
  EXPECT_EQ(shared_out(made(builder), text), uncut(builder.build(), text));
  EXPECT_LT(made(builder).encode(text, false).size(), 8U);
}

TEST(Tokenizer, ABatchHasTheIdsOfEachText) {
  const Tokenizer t = bundled();
  std::vector<std::string> texts = {"", "a", mixed_text(1'050'000, 3, {"The fox ", "jumps", "\n", "\xC3\xBC"}), "\xFF",
                                    " "};
  for (unsigned i = 0; i < 300; ++i) texts.push_back(mixed_text(i, i, {"one ", "two", "\n"}));
  const std::vector<std::string_view> views(texts.begin(), texts.end());
  for (const bool add_bos : {true, false}) {
    std::vector<std::vector<int>> alone;
    for (const std::string& text : texts) alone.push_back(t.encode(text, add_bos));
    for (const int threads : {0, 3}) EXPECT_TRUE(t.encode_batch(views, add_bos, threads) == alone) << threads;
  }
  EXPECT_EQ(t.encode_batch(std::span(views).subspan(3), true, 1000),
            t.encode_batch(std::span(views).subspan(3), true, 1));
  EXPECT_TRUE(t.encode_batch({}).empty());
  EXPECT_THROW(t.encode_batch(views, true, -1), std::invalid_argument);
  EXPECT_THROW(t.encode("a", true, nullptr, -1), std::invalid_argument);
}

TEST(Tokenizer, ProgressOfSeveralThreadsIsToldInOrder) {
  const Tokenizer t = bundled();
  const std::string text = mixed_text(1'200'000, 5, {"The fox ", "jumps", "\n"});
  const std::thread::id here = std::this_thread::get_id();
  std::vector<std::size_t> told;
  const auto ids = t.encode(
      text, true,
      [&](std::size_t bytes) {
        EXPECT_EQ(std::this_thread::get_id(), here);
        told.push_back(bytes);
        return true;
      },
      2);
  EXPECT_EQ(ids, t.encode(text));
  EXPECT_GT(told.size(), 1U);
  EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
  EXPECT_EQ(told.back(), text.size());
  const auto some = t.encode(
      text, true, [](std::size_t) { return false; }, 2);
  EXPECT_LT(some.size(), ids.size());
  EXPECT_TRUE(std::equal(some.begin(), some.end(), ids.begin()));
  EXPECT_THROW(t.encode(
                   text, true, [](std::size_t) -> bool { throw std::out_of_range("enough"); }, 2),
               std::out_of_range);
}

TEST(Tokenizer, ConfigNamesTheTokens) {
  const TokenizerBuilder builder = words_and_bytes();
  EXPECT_EQ(made(builder).bos_id(), 1);
  EXPECT_TRUE(made(builder).adds_bos());
  EXPECT_FALSE(made(builder, R"({"add_bos_token": false})").adds_bos());
  EXPECT_EQ(made(builder, R"({"bos_token": "</s>", "eos_token": {"content": "<s>", "lstrip": false}})").bos_id(), 2);
  EXPECT_EQ(made(builder, R"({"bos_token": "</s>", "eos_token": {"content": "<s>", "lstrip": false}})").eos_id(), 1);
  EXPECT_EQ(made(builder, R"({"bos_token": null, "chat_template": "x", "added_tokens_decoder": {"1": {}}})").bos_id(),
            -1);
  EXPECT_FALSE(made(builder, R"({"bos_token": null})").adds_bos());
  EXPECT_TRUE(made(builder, R"({"add_bos_token": null})").adds_bos());
  expect_says(refusal(builder, R"({"bos_token": "<nope>"})"), {"bos_token: found \"<nope>\", expected a piece of"});
  expect_says(refusal(builder, R"({"bos_token": null, "add_bos_token": true})"), {"there is no BOS"});
  for (const char* bad : {"{", "[]", "not json", R"({"add_bos_token": 1})", R"({"bos_token": 5})",
                          R"({"bos_token": {}})", R"({"bos_token": {"content": ""}})",
                          R"({"add_bos_token": true, "add_bos_token": true})", R"({"bos_token": ""}x)"}) {
    expect_says(refusal(builder, bad), {"tokenizer_config.json"});
  }
  // Beside the file, in a folder.
  const TempFolder folder;
  write_file(folder / "tokenizer.model", builder.build());
  EXPECT_TRUE(Tokenizer::load(folder.path()).adds_bos());
  EXPECT_EQ(Tokenizer::load(folder.path()).fingerprint(), made(builder).fingerprint());
  write_file(folder / "tokenizer_config.json", R"({"add_bos_token": false})");
  EXPECT_FALSE(Tokenizer::load(folder.path()).adds_bos());
  EXPECT_FALSE(Tokenizer::load(folder / "tokenizer.model").adds_bos());
  // No BOS in the file: none is added.
  TokenizerBuilder plain = words_and_bytes();
  plain.pieces.erase(plain.pieces.begin() + 1);
  EXPECT_EQ(made(plain).bos_id(), -1);
  EXPECT_FALSE(made(plain).adds_bos());
}

TEST(Tokenizer, FilesThatCannotBeReadSayWhy) {
  const TempFolder folder;
  EXPECT_THROW(Tokenizer::load(folder.path()), std::system_error);
  EXPECT_THROW(Tokenizer::load(folder / "none.model"), std::system_error);
  EXPECT_THROW(Tokenizer::load("/dev/zero"), std::runtime_error);
  write_file(folder / "tokenizer.model", "<html>");
  expect_says(file_refusal([&] { Tokenizer::load(folder.path()); }), {"tokenizer.model", "web page"});
  write_file(folder / "tokenizer.model", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n");
  expect_says(file_refusal([&] { Tokenizer::load(folder.path()); }), {"Git LFS pointer"});
  std::filesystem::remove(folder / "tokenizer.model");
  std::filesystem::create_directory(folder / "tokenizer.model");
  EXPECT_THROW(Tokenizer::load(folder.path()), std::runtime_error);
  write_file(folder / "t.model", words_and_bytes().build());
  std::filesystem::create_directory(folder / "tokenizer_config.json");
  EXPECT_THROW(Tokenizer::load(folder / "t.model"), std::runtime_error);
}

// Files that end sentencepiece 0.1.97 itself; here each is an error, or loads and encodes. sentencepiece_file_test.cpp
// has more of them.
TEST(Tokenizer, TheLibrarysCrashersAreErrors) {
  TokenizerBuilder builder = words_and_bytes();
  builder.extra.bytes(4, std::string(1000, '\xFF'));  // self-test data, which the library would run
  EXPECT_EQ(refusal(builder), "no error");

  builder = words_and_bytes();
  for (std::size_t n = 2; n <= 65; ++n) builder.pieces.push_back({std::string(n, 'x'), 0.0F, 4});
  EXPECT_EQ(made(builder).encode(std::string(200, 'x'), false).size(), 5U);  // ▁, 65, 65, 65, 5
}

/// Numbers with decimal commas and grouping, as some locales write them.
struct CommaNumbers : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(Tokenizer, TheLocaleDoesNotMatter) {
  const std::vector<int> expected = bundled().encode("Some 1,234.5 text");
  const std::string error = refusal(TokenizerBuilder().words({std::string(1234567, 'x')}));
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new CommaNumbers));
  for (const char* name : {"de_DE.UTF-8", "de_DE.utf8", "tr_TR.UTF-8"}) {
    if (std::setlocale(LC_ALL, name) != nullptr) break;
  }
  EXPECT_EQ(bundled().encode("Some 1,234.5 text"), expected);
  EXPECT_EQ(refusal(TokenizerBuilder().words({std::string(1234567, 'x')})).substr(error.find(": piece")),
            error.substr(error.find(": piece")));
  EXPECT_NE(error.find("1234567 bytes"), std::string::npos);
  std::locale::global(before);
  std::setlocale(LC_ALL, "C");
}

}  // namespace
}  // namespace mmrec::test
