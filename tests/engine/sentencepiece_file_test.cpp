#include "engine/tokenizer/sentencepiece_file.h"

#include "engine/tokenizer/charsmap.h"
#include "tests/support/model_folder.h"
#include "tests/support/refusal.h"
#include "tests/support/tokenizer_builder.h"

namespace mmrec::engine {
namespace {

using test::CharsmapBuilder;
using test::ProtoBuilder;
using test::Rules;
using test::TokenizerBuilder;

std::string refusal(std::string_view bytes) {
  return test::file_refusal([&] { parse_sentencepiece(bytes, "t.model"); });
}

std::string refusal(const TokenizerBuilder& builder) { return refusal(builder.build()); }

TokenizerBuilder good() {
  return TokenizerBuilder().words({"\xE2\x96\x81", "a",
                                   "\xE2\x96\x81"
                                   "a",
                                   "b"});
}

TokenizerBuilder with_piece(const TokenizerBuilder::Piece& piece) {
  TokenizerBuilder builder = good();
  builder.pieces.push_back(piece);
  return builder;
}

std::string charsmap_refusal(const std::string& blob) {
  return test::file_refusal([&] { check_charsmap(blob, "t.model"); });
}

TEST(SentencePieceFile, ReadsWhatItUses) {
  TokenizerBuilder builder = good();
  builder.bytes();
  builder.model_type = 2;
  builder.add_dummy_prefix = false;
  builder.charsmap = CharsmapBuilder(Rules{{"\n", " "}}).build();
  builder.extra_trainer.bytes(44, "??").bytes(46, "</s>").varint(4, 8192).real(10, 0.99F);
  builder.extra.bytes(4, "self-test")
      .raw(std::string("\x39"
                       "12345678",
                       9));  // 64-bit field 7
  const SentencePieceFile file = parse_sentencepiece(builder.build(), "t.model");
  ASSERT_EQ(file.pieces.size(), 263U);
  EXPECT_EQ(file.pieces[5].text,
            "\xE2\x96\x81"
            "a");
  EXPECT_EQ(file.pieces[5].score, -1.25F);
  EXPECT_EQ(file.pieces[7].type, PieceType::kByte);
  EXPECT_EQ(file.model_type, 2);
  EXPECT_TRUE(file.byte_fallback);
  EXPECT_FALSE(file.add_dummy_prefix);
  EXPECT_FALSE(file.remove_extra_whitespaces);
  EXPECT_EQ(file.charsmap, builder.charsmap);
  EXPECT_EQ(file.unk_surface, "??");
  EXPECT_EQ(file.unk_id, 0);
  EXPECT_EQ(file.bos_id, 2);
  EXPECT_EQ(file.eos_id, 2);
}

TEST(SentencePieceFile, WhatIsWrittenReadsBackTheSame) {
  TokenizerBuilder builder = good();
  builder.bytes();
  builder.charsmap = CharsmapBuilder(Rules{{"\n", " "}}).build();
  const SentencePieceFile file = parse_sentencepiece(builder.build(), "t.model");
  for (const bool prefix : {false, true}) {
    const SentencePieceFile again = parse_sentencepiece(serialize(file, prefix), "again");
    ASSERT_EQ(again.pieces.size(), file.pieces.size());
    for (std::size_t i = 0; i < file.pieces.size(); ++i) {
      EXPECT_EQ(again.pieces[i].text, file.pieces[i].text);
      EXPECT_EQ(again.pieces[i].score, file.pieces[i].score);
      EXPECT_EQ(again.pieces[i].type, file.pieces[i].type);
    }
    EXPECT_EQ(again.add_dummy_prefix, prefix);
    EXPECT_EQ(again.charsmap, file.charsmap);
    EXPECT_EQ(serialize(again, prefix), serialize(file, prefix));
  }
}

TEST(SentencePieceFile, RefusesBadPieces) {
  EXPECT_EQ(refusal(good()), "no error");
  EXPECT_EQ(refusal(with_piece({std::string(1024, 'x')})), "no error");
  const std::pair<TokenizerBuilder::Piece, const char*> cases[] = {
      {{""}, "found an empty piece"},
      {{std::string("x\0y", 3)}, "found \"x\\x00y\", expected UTF-8 without NUL"},
      {{"\xC3"}, "found \"\\xc3\", expected UTF-8 without NUL"},
      {{"x", std::nanf("")}, "found score nan, expected a finite number"},
      {{"x", -std::numeric_limits<float>::infinity()}, "found score -inf, expected a finite number"},
      {{"a"}, "\"a\" occurs twice"},
      {{"x", 0.0F, 7}, "found type 7, expected 1..6"},
      {{"x", 0.0F, 0}, "found type 0, expected 1..6"},
      {{"x", 0.0F, 2}, "a second unknown piece, the first is 0"},
      {{std::string(1025, 'x')}, "found 1025 bytes, expected at most 1024"},
      // sentencepiece 0.1.97 dies inside Load of this one.
      {{std::string(110000, 'x')}, "found 110000 bytes, expected at most 1024"}};
  for (const auto& [piece, what] : cases)
    EXPECT_EQ(refusal(with_piece(piece)), std::string("t.model: piece 7: ") + what);
  TokenizerBuilder builder = good();
  builder.pieces.erase(builder.pieces.begin());
  EXPECT_EQ(refusal(builder), "t.model: found no unknown piece, expected one");
  builder.pieces.clear();
  EXPECT_EQ(refusal(builder), "t.model: not a sentencepiece model: found no pieces");
}

TEST(SentencePieceFile, BytePiecesComeAllOrNot) {
  TokenizerBuilder builder = good();
  builder.bytes();
  EXPECT_EQ(refusal(builder), "no error");
  builder.pieces.pop_back();
  EXPECT_EQ(refusal(builder), "t.model: found 255 byte pieces, expected 256 as byte_fallback says");
  EXPECT_EQ(refusal(with_piece({"<0x41>", 0.0F, 6})), "t.model: found 1 byte pieces, expected 0 as byte_fallback says");
  for (const char* text : {"<0x4>", "<0x41", "<0x-1>", "<0xg1>", "<0x4a>", "<0X41>", "41", "<0x041>"}) {
    test::expect_says(refusal(with_piece({text, 0.0F, 6})), {"expected <0x00>..<0xFF>"});
  }
  builder = good();
  builder.byte_fallback = true;
  EXPECT_EQ(refusal(builder), "t.model: found 0 byte pieces, expected 256 as byte_fallback says");
}

// sentencepiece reads beyond an array of 64 for these.
TEST(SentencePieceFile, UserDefinedSymbolsMayNotNestDeeply) {
  TokenizerBuilder builder = good();
  for (std::size_t n = 1; n <= 64; ++n) builder.pieces.push_back({std::string(n, 'x'), 0.0F, 4});
  EXPECT_EQ(refusal(builder), "no error");
  builder.pieces.push_back({"y", 0.0F, 4});
  EXPECT_EQ(refusal(builder), "no error");
  builder.pieces.push_back({std::string(70, 'x'), 0.0F, 4});
  test::expect_says(refusal(builder), {"more than 64 user-defined symbols begin \"xxx"});
  builder = good();
  for (int n = 0; n <= 1 << 16; ++n) builder.pieces.push_back({"u" + std::to_string(n), 0.0F, 4});
  EXPECT_EQ(refusal(builder), "t.model: found 65537 user-defined symbols, expected at most 65536");
}

TEST(SentencePieceFile, RefusesBadMessages) {
  const std::string bytes = good().build();
  const std::pair<std::string, const char*> cases[] = {
      {"", "found no pieces"},
      {"\x0A\x05"
       "ab",
       "ModelProto: field 1 of 5 bytes, 2 are left"},
      {"\x0B", "ModelProto: field 1 has wire type 3, expected 0, 1, 2 or 5"},
      {std::string(2, '\0'), "ModelProto: field number 0, expected 1..536870911"},
      {ProtoBuilder().varint(std::uint64_t{1} << 29, 1).str(),
       "ModelProto: field number 536870912, expected 1..536870911"},
      {"\x08\x01", "ModelProto: field 1 has wire type 0, expected 2"},
      {std::string(11, '\xFF'), "ModelProto: number of more than 64 bits"},
      {"\xFF\xFF\xFF", "ModelProto: ends inside a number"},
      {ProtoBuilder().bytes(1, ProtoBuilder().varint(2, 1).str()).str(),
       "SentencePiece: field 2 has wire type 0, expected 5"}};
  for (const auto& [message, what] : cases) {
    EXPECT_EQ(refusal(message), std::string("t.model: not a sentencepiece model: ") + what);
  }
  // A length that would wrap a pointer, and every truncation.
  EXPECT_NE(refusal(std::string("\x0A") + std::string(9, '\xFF') + "\x01"), "no error");
  int accepted = 0;
  for (std::size_t n = 0; n < bytes.size(); ++n) accepted += refusal(bytes.substr(0, n)) == "no error";
  EXPECT_LE(accepted, 8);  // cuts between fields, once there is a whole vocabulary, are models of their own
}

TEST(SentencePieceFile, RefusesWhatItDoesNotSupport) {
  const auto refused = [](const auto& change) {
    TokenizerBuilder builder = good();
    change(builder);
    return refusal(builder);
  };
  EXPECT_EQ(refused([](auto& b) { b.model_type = 5; }), "t.model: found model_type 5, expected 1..4");
  EXPECT_EQ(refused([](auto& b) { b.extra_trainer.varint(24, 1); }),
            "t.model: treat_whitespace_as_suffix is set, expected white space to begin words");
  for (const std::string& text : {std::string("\xFF"), std::string(1025, 'x'), std::string("a\0b", 3)}) {
    const std::string found = refused([&](auto& b) { b.extra_trainer.bytes(44, text); });
    test::expect_says(found, {"TrainerSpec: field 44 is"});
    test::expect_says(found, {"expected UTF-8 without NUL of at most 1024 bytes"});
  }
  std::string many;
  for (std::size_t i = 0; i <= std::size_t{1} << 20; ++i) many += {'\x0a', '\0'};
  test::expect_says(refusal(many), {"more than 1048576 pieces"});
}

TEST(Charsmap, FindsSingleByteRules) {
  const std::string blob = CharsmapBuilder(Rules{{"\n", " "}, {"A", "alpha"}, {"AB", "x"}, {"\xC3\xA9", "e"}}).build();
  EXPECT_EQ(charsmap_refusal(blob), "no error");
  EXPECT_EQ(charsmap_replacement(blob, '\n'), " ");
  EXPECT_EQ(charsmap_replacement(blob, 'A'), "alpha");
  for (const int key : {0x00, 0x42, 0xC3, 0xA9, 0xFF}) {
    EXPECT_FALSE(charsmap_replacement(blob, static_cast<unsigned char>(key))) << key;
  }
  EXPECT_EQ(charsmap_refusal(""), "no error");
  EXPECT_FALSE(charsmap_replacement("", 'A'));
}

TEST(Charsmap, RefusesBadSizes) {
  const std::string blob = CharsmapBuilder(Rules{{"A", "a"}}).build();
  for (std::size_t n = 1; n < blob.size(); ++n) ASSERT_NE(charsmap_refusal(blob.substr(0, n)), "no error") << n;
  EXPECT_NE(charsmap_refusal(blob + "x"), "no error");                       // no NUL at the end
  EXPECT_NE(charsmap_refusal(blob + std::string("\xFF\0", 2)), "no error");  // not UTF-8
  EXPECT_NE(charsmap_refusal(std::string("\xFF\xFF\xFF\xFF", 4) + blob.substr(4)), "no error");
  EXPECT_NE(charsmap_refusal(std::string("\0\0\0\0", 4) + blob.substr(4)), "no error");
  EXPECT_NE(charsmap_refusal(std::string("\x04\x04\0\0", 4) + blob.substr(4)), "no error");  // 1028
  EXPECT_NE(charsmap_refusal(std::string((std::size_t{4} << 20) + 1, '\0')), "no error");
}

TEST(Charsmap, RefusesLookupsThatLeaveTheTrieOrNeverEnd) {
  const Rules rules = {{"A", "a"}, {"AB", "b"}};
  CharsmapBuilder builder(rules);
  builder.units()[0] = 0x80000000 | (0x00200000U << 10);  // the root leads out
  test::expect_says(charsmap_refusal(builder.build()), {"unit 0 leads to unit"});
  builder = CharsmapBuilder(rules);
  builder.units()[256 ^ 'A'] |= 1U << 9;  // an offset 256 times as far
  test::expect_says(charsmap_refusal(builder.build()), {"leads to unit"});
  builder = CharsmapBuilder(rules);
  const std::uint32_t at = 256 ^ 'A';
  builder.units()[at] = ((at ^ 256U) << 10) | (1U << 8) | 'A';  // back to the first base: AAAA... matches for ever
  builder.units()[256] = CharsmapBuilder::kNever;
  test::expect_says(charsmap_refusal(builder.build()), {"form a cycle"});
  builder = CharsmapBuilder(rules);
  builder.units()[512] = CharsmapBuilder::kNever | 0x7FFFFFFF;  // the replacement of "A"
  test::expect_says(charsmap_refusal(builder.build()), {"replacement at 2147483647, expected less than 4"});
  builder.units()[512] = CharsmapBuilder::kNever | 4;
  test::expect_says(charsmap_refusal(builder.build()), {"replacement at 4"});
}

TEST(Charsmap, RefusesReplacementsThatAreLongOrBeginInsideACharacter) {
  EXPECT_EQ(charsmap_refusal(CharsmapBuilder(Rules{{"A", std::string(128, 'x')}}).build()), "no error");
  EXPECT_NE(charsmap_refusal(CharsmapBuilder(Rules{{"A", std::string(129, 'x')}}).build()), "no error");
  CharsmapBuilder builder(Rules{{"A", "\xC3\xA9"}});
  EXPECT_EQ(charsmap_refusal(builder.build()), "no error");
  builder.units()[512] |= 1;
  test::expect_says(charsmap_refusal(builder.build()), {"begins inside a character"});
}

TEST(SentencePieceFile, AnOrdinaryPieceIsNoBos) {
  TokenizerBuilder builder = good();
  builder.pieces[1].type = 1;
  const SentencePieceFile file = parse_sentencepiece(builder.build(), "t.model");
  EXPECT_EQ(file.bos_id, -1);
  EXPECT_EQ(file.eos_id, 2);
}

TEST(SentencePieceFile, WritingKeepsHowWhiteSpaceIsWritten) {
  for (const std::uint64_t escapes : {0, 1}) {
    TokenizerBuilder builder = good();
    builder.extra_normalizer.varint(5, escapes);
    const SentencePieceFile file = parse_sentencepiece(builder.build(), "t.model");
    EXPECT_EQ(parse_sentencepiece(serialize(file, true), "again").escape_whitespaces, escapes == 1);
  }
}

// sentencepiece keeps 32 matches of a lookup on its stack and reads as many as there were.
TEST(Charsmap, RefusesMoreRulesThatBeginOneAnotherThanTheLibraryKeeps) {
  Rules rules;
  for (std::size_t n = 1; n <= 32; ++n) rules[std::string(n, 'A')] = "a";
  EXPECT_EQ(charsmap_refusal(CharsmapBuilder(rules).build()), "no error");
  rules[std::string(40, 'A')] = "b";
  test::expect_says(charsmap_refusal(CharsmapBuilder(rules).build()), {"more than 32 rules begin one another"});
}

}  // namespace
}  // namespace mmrec::engine
