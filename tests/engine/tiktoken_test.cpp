
#include <nlohmann/json.hpp>

#include "engine/tokenizer/byte_pairs.h"
#include "mmrec/tokenizer.h"
#include "models/files/utf8.h"
#include "tests/support/host_threads.h"
#include "tests/support/in_parts.h"
#include "tests/support/model_folder.h"
#include "tests/support/rank_file_builder.h"
#include "tests/support/utf8.h"

namespace mmrec::test {
namespace {

using engine::BytePairs;
using Json = nlohmann::json;

const std::filesystem::path kFolder = folder_of("tiktoken");
const std::string kName = "there/tokenizer.tiktoken";

Json config_of(const std::string& pattern, const Json& more = Json::object()) {
  Json config = {{"pattern", pattern}};
  config.update(more);
  return config;
}

Tokenizer made(const std::vector<std::string>& more, const Json& config = config_of(R"(\w+|\W)")) {
  return Tokenizer::from_bytes(rank_file(bytes_and(more)), config.dump(), kName);
}

std::string refusal(const std::string& ranks, const std::string& config) {
  return error_of([&] { (void)Tokenizer::from_bytes(ranks, config, kName); });
}

std::string config_refusal(const Json& config) { return refusal(rank_file(bytes_and({"ab"})), config.dump()); }

/// The merges as they are defined, all pairs looked at anew for each.
std::vector<int> naive_merges(const std::vector<std::string>& tokens, std::string_view piece) {
  const auto rank_of = [&](const std::string& bytes) {
    return static_cast<std::size_t>(std::find(tokens.begin(), tokens.end(), bytes) - tokens.begin());
  };
  std::vector<std::string> parts;
  for (const char c : piece) parts.emplace_back(1, c);
  if (rank_of(std::string(piece)) < tokens.size()) parts = {std::string(piece)};
  for (;;) {
    std::size_t best = tokens.size();
    std::size_t at = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      if (const std::size_t rank = rank_of(parts[i] + parts[i + 1]); rank < best) {
        best = rank;
        at = i;
      }
    }
    if (best == tokens.size()) break;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
  std::vector<int> ids;
  for (const std::string& part : parts) ids.push_back(static_cast<int>(rank_of(part)));
  return ids;
}

// The ids that the tiktoken package computed (tests/fixtures/tiktoken/make.py), with either form of the pattern.
TEST(Tiktoken, IdsAreThoseOfTheReference) {
  const Json expected = Json::parse(read_file(kFolder / "expected.json"));
  const std::string ranks = read_file(kFolder / "tokenizer.tiktoken");
  Json config = Json::parse(read_file(kFolder / "tokenizer_config.json"));
  const Tokenizer plain = Tokenizer::load(kFolder);
  config["pattern"] = expected["possessive_pattern"];
  const Tokenizer possessive = Tokenizer::from_bytes(ranks, config.dump(), kName);
  config["pattern"] = "(*NO_JIT)" + config["pattern"].get<std::string>();
  const Tokenizer interpreted = Tokenizer::from_bytes(ranks, config.dump(), kName);
  ASSERT_GT(expected["cases"].size(), 25U);
  for (const Json& c : expected["cases"]) {
    SCOPED_TRACE(c["name"].get<std::string>());
    const std::string text = c["text"];
    const std::vector<int> ids = c["ids"];
    EXPECT_EQ(plain.encode(text), ids);
    EXPECT_EQ(possessive.encode(text), c["possessive_ids"].get<std::vector<int>>());
    EXPECT_EQ(interpreted.encode(text), c["possessive_ids"].get<std::vector<int>>());
    EXPECT_EQ(plain.decode(ids), text);
    EXPECT_EQ(decoded_in_parts(plain, ids), text);
  }
}

TEST(Tiktoken, FactsOfTheFixture) {
  const Tokenizer t = Tokenizer::load(kFolder);
  const Json special = Json::parse(read_file(kFolder / "tokenizer_config.json"))["special_tokens"];
  EXPECT_EQ(t.eos_id(), special["<|endoftext|>"].get<int>());
  EXPECT_EQ(t.vocab_size(), special["<|endofprompt|>"].get<int>() + 1);
  EXPECT_EQ(t.bos_id(), -1);
  EXPECT_EQ(t.unk_id(), -1);
  EXPECT_FALSE(t.adds_bos());
  EXPECT_EQ(t.piece('a'), "a");
  EXPECT_EQ(t.piece(t.eos_id()), "<|endoftext|>");
  EXPECT_EQ(t.piece(t.eos_id() - 1), "");  // between ranks and special tokens
  EXPECT_EQ(t.decode(std::vector<int>{'a', t.eos_id(), t.eos_id() - 1, 'b'}), "ab");
}

TEST(Tiktoken, AnyBytesComeBack) {
  const Tokenizer t = Tokenizer::load(kFolder);
  std::mt19937 rng(7);
  for (int i = 0; i < 400; ++i) {
    std::string text;
    const bool any = i % 2 == 0;
    for (std::size_t n = rng() % 200; text.size() < n;) {
      if (any) {
        text += static_cast<char>(rng());
      } else {
        char32_t code = 0;
        do {
          code = static_cast<char32_t>(rng() % (i % 4 == 1 ? 0x3000 : 0x110000));
        } while (code >= 0xD800 && code < 0xE000);
        text += utf8_of(code);
      }
    }
    const std::string valid = models::replace_invalid_utf8(text);
    if (!any) {
      ASSERT_EQ(valid, text);
    }
    const std::vector<int> ids = t.encode(text);
    EXPECT_EQ(t.decode(ids), valid);
    EXPECT_EQ(decoded_in_parts(t, ids), valid);
    EXPECT_EQ(t.encode(valid), ids);
  }
}

TEST(Tiktoken, ATokenMayEndOneCharacterHoldAnotherAndBeginAThird) {
  const Tokenizer across = made({"\xA9-\xC3"});
  EXPECT_EQ(decoded_in_parts(across, std::vector<int>{0xC3, 256, 0xA9}), "é-é");
  EXPECT_EQ(across.decode(across.encode(" first")), " first");  // no space is dropped
  StreamDecoder skipped(across);
  skipped.skip(std::vector<int>{'x', 0xC3, 256});
  EXPECT_EQ(skipped.push(0xA9), "é");
}

TEST(Tiktoken, MergesAreThoseOfTheDefinition) {
  std::mt19937 rng(3);
  for (int round = 0; round < 40; ++round) {
    std::vector<std::string> tokens = bytes_and({});
    const std::size_t letters = 1 + rng() % 3;
    for (std::size_t count = 256 + 1 + rng() % 40; tokens.size() < count;) {
      std::string token;
      if (tokens.size() > 256 && rng() % 3 != 0) token = tokens[256 + rng() % (tokens.size() - 256)];
      for (std::size_t n = 1 + rng() % 2; n > 0; --n) token += static_cast<char>('a' + rng() % letters);
      if (token.size() < 2) token += 'a';
      if (std::find(tokens.begin(), tokens.end(), token) == tokens.end()) tokens.push_back(token);
    }
    const BytePairs pairs(tokens);
    for (const std::size_t size : {1, 2, 3, 7, 30, 63, 64, 65, 66, 150}) {
      std::string piece;
      while (piece.size() < size) piece += static_cast<char>('a' + rng() % letters);
      std::vector<int> ids;
      pairs.encode(piece, ids);
      EXPECT_EQ(ids, naive_merges(tokens, piece)) << piece;
    }
  }
}

TEST(Tiktoken, LongPieces) {
  const std::size_t size = std::size_t{1} << 20;
  const Tokenizer t = made({"aa", "aaaa", "aaaaaaaa", "aaa"});
  const std::vector<int> ids = t.encode(std::string(size + 3, 'a'));
  ASSERT_EQ(ids.size(), size / 8 + 1);
  EXPECT_EQ(ids.front(), 258);
  EXPECT_EQ(ids.back(), 259);
  // The pattern backtracks over all of it.
  const Tokenizer fixture = Tokenizer::load(kFolder);
  for (const char* text : {" ", "\n", "\r\n", " \n", "a", "1", "!", "\xE3\x80\x80", "\xE4\xB8\xAD", "e\xCC\x81", "'"}) {
    std::string run;
    while (run.size() < size / 4) run += text;
    EXPECT_EQ(fixture.decode(fixture.encode(run)), run);
    run += "x";
    const std::vector<int> all = fixture.encode(run);
    EXPECT_EQ(fixture.decode(all), run);
    EXPECT_EQ(encoded_in_parts(fixture, run), all);
  }
}

TEST(Tiktoken, PartsHaveTheIdsOfThePiecesOfTheText) {
  // The reference: each piece of the pattern has its own ids, so those of texts that a pattern cuts apart add up.
  const Tokenizer t = Tokenizer::load(kFolder);
  std::mt19937 rng(5);
  const std::vector<std::string> words = {" river",
                                          " \xC3\xBC"
                                          "ber",
                                          " \xF0\x9F\x9A\x80", " it",
                                          " a\xFF"
                                          "b"};
  std::string text;
  std::vector<int> expected = t.encode("");
  while (text.size() < 400'000) {
    const std::string& word = words[rng() % words.size()];
    text += word;
    const std::vector<int> ids = t.encode(word, false);
    expected.insert(expected.end(), ids.begin(), ids.end());
  }
  EXPECT_EQ(encoded_in_parts(t, text), expected);
  EXPECT_EQ(t.encode(text), expected);
}

TEST(Tiktoken, SpecialTokensNeverComeOfText) {
  const Tokenizer t = made({}, config_of("(?s).+", {{"added_tokens_decoder", {{"300", {{"content", "<s>"}}}}},
                                                    {"special_tokens", {{"</s>", 256}, {"<s>", 300}}},
                                                    {"bos_token", {{"content", "<s>"}}},
                                                    {"eos_token", "</s>"}}));
  EXPECT_EQ(t.vocab_size(), 301);
  EXPECT_EQ(t.bos_id(), 300);
  EXPECT_EQ(t.eos_id(), 256);
  EXPECT_TRUE(t.adds_bos());
  EXPECT_EQ(t.encode("<s>"), (std::vector<int>{300, '<', 's', '>'}));
  EXPECT_EQ(t.encode("<s>", false), (std::vector<int>{'<', 's', '>'}));
  EXPECT_EQ(t.decode(t.encode("<s>")), "<s>");
}

TEST(Tiktoken, ASpecialTokenMayFillAGapOfTheRanks) {
  std::vector<std::string> tokens = bytes_and({"", "ab"});
  const Json config = config_of(".", {{"special_tokens", {{"<e>", 256}}}});
  const Tokenizer t = Tokenizer::from_bytes(rank_file(tokens), config.dump(), kName);
  EXPECT_EQ(t.vocab_size(), 258);
  EXPECT_EQ(t.piece(257), "ab");
  expect_says(refusal(rank_file(tokens), config_of(".").dump()), {kName, "rank 256", "0..257"});
}

TEST(Tiktoken, LinesInAnyOrderAndWithAnyLineEnds) {
  const std::string forward = rank_file(bytes_and({"ab"}));
  std::string backward;
  for (std::size_t end = forward.size(); end > 0;) {
    const std::size_t begin = forward.rfind('\n', end - 2) + 1;
    backward += forward.substr(begin, end - 1 - begin) + "\r\n\r\n";
    end = begin;
  }
  backward.resize(backward.size() - 4);
  const std::string config = config_of(".+").dump();
  const Tokenizer a = Tokenizer::from_bytes(forward, config, kName);
  const Tokenizer b = Tokenizer::from_bytes(backward, config, kName);
  EXPECT_EQ(a.encode("aab"), (std::vector<int>{'a', 256}));
  EXPECT_EQ(b.encode("aab"), (std::vector<int>{'a', 256}));
  EXPECT_EQ(b.vocab_size(), 257);
}

TEST(Tiktoken, MalformedRankFiles) {
  const std::string good = rank_file(bytes_and({"ab"}));
  const std::string config = config_of(".").dump();
  const auto says = [&](const std::string& ranks, std::initializer_list<std::string_view> parts) {
    const std::string message = refusal(ranks, config);
    expect_says(message, {kName});
    expect_says(message, parts);
  };
  says("", {"found no tokens"});
  says("\n\n", {"found no tokens"});
  says(good + "YWM=", {"line 258", "a space and its rank"});
  says(good + " 257\n", {"line 258", "expected base64"});
  says(good + "YWM= \n", {"line 258", "rank \"\""});
  for (const char* rank : {"-1", "+257", "1048576", "99999999999999999999999", "257 ", " 257", "0x101", "257.0"}) {
    says(good + "YWM= " + rank + "\n", {"line 258", "rank", rank, "0..1048575"});
  }
  for (const char* token : {"YWM", "YW=M", "Y===", "====", "YWN=", "YR==", "Y-M=", "Y{M=", "YW\xC3\xA9", "YWM=YWM="}) {
    says(good + token + " 257\n", {"line 258", "expected base64"});
  }
  says(good + "YWM= 256\n", {"line 258", "rank 256 again"});
  says(good + "YWI= 257\n", {"line 258", "\"ab\"", "256 and 257", "each once"});
  says(good + "YWM= 258\n", {"rank 257", "0..258"});
  says(good + base64(std::string(1025, 'x')) + " 257\n", {"line 258", "1025", "1024"});
  says(good + std::string(5000, 'A') + " 257\n", {"line 258", "5000 bytes of base64"});
  says(good.substr(good.find('\n') + 1), {"0x00", "all 256"});
  says(std::string((std::size_t{64} << 20) + 1, 'A'), {"67108865 bytes", "at most 67108864"});
  says("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", {"looks like"});
  for (std::size_t size = 0; size < good.size(); size += 97) {
    (void)error_of([&] { (void)Tokenizer::from_bytes(good.substr(0, size), config, kName); });
  }
}

TEST(Tiktoken, MalformedConfigs) {
  const std::string good = rank_file(bytes_and({"ab"}));
  const std::string file = "there/tokenizer_config.json";
  expect_says(refusal(good, ""), {file, "found no such file", "\"pattern\""});
  expect_says(refusal(good, "{}"), {file, "found no \"pattern\""});
  expect_says(refusal(good, "[]"), {file});
  expect_says(config_refusal({{"pattern", 1}}), {file, "pattern"});
  expect_says(config_refusal(config_of(std::string(5000, 'a'))), {file, "pattern"});
  for (const char* pattern :
       {"(", "[", "a{2,1}", "\\p{Nonsense}", "\\C", "(?P<n>a)(?P<n>b)", "\\", "(?<=a+)b", "[\\s"}) {
    expect_says(config_refusal(config_of(pattern)), {file, "pattern: found ", "expected a regular expression: "});
  }
  expect_says(config_refusal(config_of("((a{1000}){1000}){1000}")), {file, "expected a regular expression: "});
  const auto special = [](const Json& tokens) { return config_refusal(config_of(".", {{"special_tokens", tokens}})); };
  expect_says(special({{"<s>", 256}}), {file, "\"<s>\"", "id 256", "it is a rank of " + kName});
  expect_says(special({{"ab", 257}}), {file, "\"ab\"", "that of rank 256"});
  expect_says(special({{"<s>", 257}, {"<t>", 257}}), {file, "found id 257 for", "one token"});
  expect_says(special({{"", 257}}), {file, "0 bytes"});
  expect_says(special({{std::string(1025, 'x'), 257}}), {file, "1025 bytes"});
  expect_says(special({{"<s>", -1}}), {file, "id -1", "0..1048575"});
  expect_says(special({{"<s>", 1 << 20}}), {file, "id 1048576", "0..1048575"});
  expect_says(special({{"<s>", 1.0}}), {file, "special_tokens"});
  expect_says(special(Json::array()), {file, "special_tokens"});
  Json many = Json::object();
  for (int id = 0; id <= 1 << 16; ++id) many["<" + std::to_string(id) + ">"] = 300 + id;
  expect_says(special(many), {file, "found more than 65536 tokens"});
  const auto added = [](const Json& tokens) {
    return config_refusal(config_of(".", {{"special_tokens", {{"<s>", 257}}}, {"added_tokens_decoder", tokens}}));
  };
  expect_says(added({{"258", "<s>"}}), {file, "found ids 258 and 257", "one id"});
  expect_says(added({{"257x", "<t>"}}), {file, "\"257x\"", "expected an id"});
  expect_says(added({{"x", "<t>"}}), {file, "\"x\"", "expected an id"});
  expect_says(added({{"258", {{"special", true}}}}), {file, "content"});
  expect_says(config_refusal(config_of(".", {{"eos_token", "<e>"}})), {file, "eos_token", "\"<e>\""});
  expect_says(config_refusal(config_of(".", {{"add_bos_token", true}})), {file, "add_bos_token", "no BOS"});
}

TEST(Tiktoken, Identity) {
  const std::string ranks = rank_file(bytes_and({"ab", "bc"}));
  const std::string other = rank_file(bytes_and({"bc", "ab"}));
  const auto of = [](const std::string& file, const Json& config) {
    return Tokenizer::from_bytes(file, config.dump(), kName).fingerprint();
  };
  const Json special = {{"special_tokens", {{"<s>", 300}}}};
  EXPECT_EQ(of(ranks, config_of(".", special)), of(ranks, config_of(".", special)));
  EXPECT_EQ(of(ranks, config_of(".")), of(ranks, config_of(".", {{"model_max_length", 5}})));  // changes no id
  EXPECT_NE(of(ranks, config_of(".")), of(other, config_of(".")));
  EXPECT_NE(of(ranks, config_of(".")), of(ranks, config_of(".+")));
  EXPECT_NE(of(ranks, config_of(".")), of(ranks, config_of(".", special)));
  EXPECT_NE(of(ranks, config_of(".", {{"special_tokens", {{"<s>", 301}}}})), of(ranks, config_of(".", special)));
}

TEST(Tiktoken, FilesOfAFolder) {
  const TempFolder folder;
  EXPECT_EQ(Tokenizer::file_of(folder.path()), folder / "tokenizer.model");
  EXPECT_THROW((void)Tokenizer::load(folder.path()), std::system_error);
  std::filesystem::copy(kFolder / "tokenizer.tiktoken", folder / "tokenizer.tiktoken");
  EXPECT_EQ(Tokenizer::file_of(folder.path()), folder / "tokenizer.tiktoken");
  expect_says(error_of([&] { (void)Tokenizer::load(folder.path()); }), {"tokenizer_config.json", "no such file"});
  std::filesystem::copy(kFolder / "tokenizer_config.json", folder / "tokenizer_config.json");
  EXPECT_EQ(Tokenizer::load(folder.path()).fingerprint(), Tokenizer::load(folder / "tokenizer.tiktoken").fingerprint());
  write_file(folder / "tokenizer.model", "x");
  expect_says(error_of([&] { (void)Tokenizer::load(folder.path()); }),
              {folder.path().string(), "tokenizer.model and tokenizer.tiktoken", "expected one"});
}

TEST(Tiktoken, ThreadsShareATokenizer) {
  const Tokenizer t = Tokenizer::load(kFolder);
  const std::string text = read_file(kFolder / "expected.json");
  const std::vector<int> ids = t.encode(text);
  std::vector<int> first, second;
  run_together({[&] { first = t.encode(text); }, [&] { second = t.encode(text); }});
  EXPECT_EQ(first, ids);
  EXPECT_EQ(second, ids);
}

}  // namespace
}  // namespace mmrec::test
