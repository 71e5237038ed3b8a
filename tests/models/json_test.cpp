// The strict JSON reader: what it reads, and everything it must refuse.
#include "models/files/json.h"

#include "models/files/text.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

using test::error_of;
using test::expect_says;

void read_any(std::string_view text) {
  JsonReader reader(text, "f.json");
  reader.skip();
}

std::string refusal(std::string_view text) {
  return error_of([&] { read_any(text); });
}

std::string string_of(std::string_view text) { return JsonReader(text, "f.json").string(); }
std::int64_t integer_of(std::string_view text) { return JsonReader(text, "f.json").integer(); }
float real_of(std::string_view text) { return JsonReader(text, "f.json").real(); }

TEST(Json, ReadsEveryKindOfValue) {
  JsonReader reader(R"( {"a": [1, -2, 9223372036854775807], "b": {"c": "x", "d": null}, "e": true, "f": 1.5e-3} )",
                    "f");
  std::string key;
  reader.begin_object();
  ASSERT_TRUE(reader.next_key(key));
  EXPECT_EQ(key, "a");
  reader.begin_array();
  for (const std::int64_t expected : {std::int64_t{1}, std::int64_t{-2}, INT64_MAX}) {
    ASSERT_TRUE(reader.next_element());
    EXPECT_EQ(reader.integer(), expected);
  }
  EXPECT_FALSE(reader.next_element());
  ASSERT_TRUE(reader.next_key(key));
  EXPECT_EQ(key, "b");
  reader.begin_object();
  ASSERT_TRUE(reader.next_key(key));
  EXPECT_EQ(reader.string(), "x");
  ASSERT_TRUE(reader.next_key(key));
  EXPECT_EQ(key, "d");
  EXPECT_TRUE(reader.skips_null());
  EXPECT_FALSE(reader.next_key(key));
  ASSERT_TRUE(reader.next_key(key));
  EXPECT_TRUE(reader.boolean());
  ASSERT_TRUE(reader.next_key(key));
  EXPECT_EQ(key, "f");
  EXPECT_FLOAT_EQ(reader.real(), 1.5e-3F);
  EXPECT_FALSE(reader.next_key(key));
}

TEST(Json, AcceptsWhatTheGrammarAllows) {
  for (const char* text :
       {"{}", "[]", "null", "true", "false", "0", "-1", "-0.0", "1e5", "1E+5", "1.5e-7", "\"\"", " \t\r\n[ ] ",
        "[[],{},[{}]]", "{\"a\":{\"a\":1},\"b\":[1,2]}", "\"\\u00e9\\ud83d\\ude80\""}) {
    EXPECT_NO_THROW(read_any(text)) << text;
  }
}

TEST(Json, RefusesWhatTheGrammarForbids) {
  for (const char* text :
       {"",          " ",           "{",        "}",          "[1",   "[1,]", "[,1]",  "[1 2]",   "{\"a\"}",
        "{a:1}",     "{1:2}",       "{\"a\":}", "{\"a\":1,}", "{,}",  "nul",  "truex", "TRUE",    "01",
        "+1",        "1.",          ".5",       "1e",         "1e+",  "-",    "--1",   "0x1",     "NaN",
        "Infinity",  "-Infinity",   "\"a",      "'a'",        "[1]]", "{}{}", "1 2",   "// c\n1", "\"\\x\"",
        "\"\\u12\"", "\"\\u12g4\"", "\"\t\"",   "\"\n\"",     "\"\\", "\"\\u"}) {
    refusal(text);
  }
}

TEST(Json, ResolvesEscapes) {
  EXPECT_EQ(string_of(R"("a\"\\\/\b\f\n\r\tz")"), "a\"\\/\b\f\n\r\tz");
  EXPECT_EQ(string_of(R"("\u0041\u00e9\u20ac\ud83d\ude80")"), "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x9a\x80");
  EXPECT_EQ(string_of(R"("\u0000")"), std::string(1, '\0'));
}

TEST(Json, MessagesShowWhatIsWrongAndWhere) {
  EXPECT_EQ(
      refusal("{\"a\": [1,\n nul]}"),
      "f.json: a: invalid JSON: syntax error while parsing value - invalid literal in \"1,<U+000A> nul]\" (at byte "
      "14, line 2)");
  EXPECT_LT(refusal("{\"a\": \"" + std::string(10'000, 'x')).size(), 300U);
}

TEST(Json, RefusesUnpairedSurrogates) {
  for (const char* text : {R"("\ud83d")", R"("\ude80")", R"("\ud83dx")", R"("\ud83d\u0041")", R"("\ud83d\n")"}) {
    expect_says(refusal(text), {"surrogate"});
  }
}

TEST(Json, RefusesInvalidUtf8) {
  for (const char* text :
       {"\"\x80\"", "\"\xc0\xaf\"", "\"\xc3\"", "\"\xe0\x80\x80\"", "\"\xed\xa0\x80\"", "\"\xf0\x80\x80\x80\"",
        "\"\xf4\x90\x80\x80\"", "\"\xf5\x80\x80\x80\"", "\"\xff\"", "\"\xe2\x82\""}) {
    expect_says(refusal(text), {"ill-formed UTF-8"});
  }
  EXPECT_EQ(string_of("\"\xed\x9f\xbf\xf4\x8f\xbf\xbf\""), "\xed\x9f\xbf\xf4\x8f\xbf\xbf");
}

TEST(Json, RefusesByteOrderMarkAndNul) {
  expect_says(refusal("\xef\xbb\xbf{}"), {"byte order mark"});
  expect_says(refusal(std::string_view("{}\0garbage", 10)), {"NUL", "byte 2"});
  expect_says(refusal(std::string_view("\"a\0b\"", 5)), {"NUL"});
}

TEST(Json, RefusesDuplicateKeysAtAnyDepth) {
  expect_says(refusal(R"({"a":1,"a":2})"), {"duplicate key", "\"a\""});
  expect_says(refusal(R"({"x":[{"a":1,"\u0061":2}]})"), {"duplicate key"});
  EXPECT_NO_THROW(read_any(R"({"a":{"a":1},"b":{"a":1}})"));
  std::string many = "{";
  for (int i = 0; i < 1000; ++i) many += "\"k" + std::to_string(i) + "\":0,";
  EXPECT_NO_THROW(read_any(many + "\"z\":0}"));
  expect_says(refusal(many + "\"k3\":0}"), {"duplicate key", "k3"});
  expect_says(refusal(many + "\"k999\":0}"), {"duplicate key", "k999"});
}

TEST(Json, KeysWithEscapesAreResolvedAtEveryLevel) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += "{\"\\u0041 long enough to need memory of its own\":";
  text += "0" + std::string(60, '}');
  JsonReader reader(text, "f.json");
  std::string key;
  for (int i = 0; i < 60; ++i) {
    reader.begin_object();
    ASSERT_TRUE(reader.next_key(key));
    EXPECT_EQ(key, "A long enough to need memory of its own");
  }
  expect_says(error_of([&] { reader.boolean(); }), {"A long enough", "found a number"});
}

TEST(Json, RefusesMoreKeysThanAsked) {
  std::string many = "{";
  for (int i = 0; i < 40; ++i) many += "\"k" + std::to_string(i) + "\":0,";
  many += "\"z\":0}";
  const auto read = [&](std::size_t limit) {
    JsonReader reader(many, "f.json", limit);
    reader.skip();
  };
  EXPECT_NO_THROW(read(41));
  expect_says(error_of([&] { read(40); }), {"more than 40 keys"});
}

TEST(Json, RefusesDeepNesting) {
  const std::size_t limit = JsonReader::kMaxDepth;
  EXPECT_NO_THROW(read_any(std::string(limit, '[') + std::string(limit, ']')));
  expect_says(refusal(std::string(limit + 1, '[') + std::string(limit + 1, ']')), {"nested too deeply"});
  refusal(std::string(5'000'000, '['));
}

TEST(Json, IntegersAreIntegers) {
  EXPECT_EQ(integer_of("-9223372036854775808"), INT64_MIN);
  for (const char* text : {"1.0", "1e3", "-0", "9223372036854775808", "18446744073709551616", "-9223372036854775809",
                           "123456789012345678901234567890", "1.5"}) {
    expect_says(error_of([&] { integer_of(text); }), {"expected an integer", text});
  }
  expect_says(error_of([&] { integer_of("\"1\""); }), {"found a string, expected an integer"});
  expect_says(error_of([&] { integer_of("null"); }), {"found null"});
}

TEST(Json, RealsFitInFp32) {
  EXPECT_EQ(real_of("0.1"), 0.1F);
  EXPECT_EQ(real_of("3"), 3.0F);
  for (const char* text : {"1e39", "-1e39", "1e-60"}) {
    expect_says(error_of([&] { real_of(text); }), {"fits in fp32"});
  }
  expect_says(refusal("1e400"), {"number overflow"});
}

TEST(Json, StringsHaveALimit) {
  EXPECT_EQ(JsonReader("\"abc\"", "f").string(3), "abc");
  expect_says(error_of([&] { JsonReader("\"abcd\"", "f").string(3); }), {"too long"});
  expect_says(error_of([&] { JsonReader(R"("\u0041bcd")", "f").string(3); }), {"too long"});
}

TEST(Json, ErrorsNameFileKeysByteAndLine) {
  const std::string message = error_of([&] {
    JsonReader reader("{\"outer\":\n {\"in ner\": 1.5}}", "dir/f.json");
    std::string key;
    reader.begin_object();
    reader.next_key(key);
    reader.begin_object();
    reader.next_key(key);
    reader.integer();
  });
  EXPECT_EQ(message, "dir/f.json: outer: \"in ner\": found \"1.5\", expected an integer (at byte 22, line 2)");
}

TEST(Json, MessagesQuoteWhatTheyFind) {
  EXPECT_EQ(quote("a\"b\\\n\x01\xff\x7f\xc3\xa9"), "\"a\\\"b\\\\\\n\\x01\\xff\\x7f\xc3\xa9\"");
  EXPECT_LT(quote(std::string(10'000, 'x')).size(), 120U);
  EXPECT_EQ(printable("blocks.0.W_g"), "blocks.0.W_g");
  EXPECT_EQ(printable("a b"), "\"a b\"");
  EXPECT_EQ(printable(""), "\"\"");
}

TEST(Json, BehindTheLastValueThereIsNothing) {
  JsonReader reader("[1]", "x.json");
  reader.skip();
  expect_says(error_of([&] { reader.integer(); }), {"x.json", "found \"\", expected an integer"});
}

}  // namespace
}  // namespace mmrec::models
