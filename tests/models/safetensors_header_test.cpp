// Every rule of the safetensors header, each with the smallest header that breaks it.

#include "models/files/checkpoint.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

using test::error_of;
using test::expect_says;

std::vector<TensorInfo> parse(std::string_view json, std::uint64_t data_bytes) {
  return parse_safetensors_header(json, data_bytes, "m.safetensors");
}

std::string refusal(std::string_view json, std::uint64_t data_bytes = 0) {
  std::string message = error_of([&] { parse(json, data_bytes); });
  expect_says(message, {"m.safetensors"});
  return message;
}

std::string entry(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return R"({"dtype":")" + std::string(dtype) + R"(","shape":)" + std::string(shape) + R"(,"data_offsets":)" +
         std::string(offsets) + "}";
}

/// A header of one F32 tensor "t".
std::string one(std::string_view shape, std::string_view offsets) {
  return R"({"t":)" + entry("F32", shape, offsets) + "}";
}

TEST(SafetensorsHeader, ReadsTensorsInTheOrderOfTheirData) {
  const auto tensors = parse(R"({"b":)" + entry("F16", "[2,3]", "[8,20]") + R"(,"__metadata__":{"format":"pt"},"a":)" +
                                 entry("F32", "[2]", "[0,8]") + R"(,"c":)" + entry("BF16", "[]", "[20,22]") + "}   ",
                             22);
  ASSERT_EQ(tensors.size(), 3U);
  EXPECT_EQ(tensors[0].name, "a");
  EXPECT_EQ(tensors[0].dtype, kernels::DType::kF32);
  EXPECT_EQ(tensors[0].shape, (std::vector<std::int64_t>{2}));
  EXPECT_EQ(tensors[1].name, "b");
  EXPECT_EQ(tensors[1].dtype, kernels::DType::kF16);
  EXPECT_EQ(tensors[1].begin, 8U);
  EXPECT_EQ(tensors[1].end, 20U);
  EXPECT_EQ(tensors[2].dtype, kernels::DType::kBF16);
  EXPECT_TRUE(tensors[2].shape.empty());
}

TEST(SafetensorsHeader, NoTensorsAndEmptyTensorsAreAllowed) {
  EXPECT_TRUE(parse("{}", 0).empty());
  EXPECT_EQ(parse(R"({"a":)" + entry("F32", "[0,5]", "[0,0]") + R"(,"b":)" + entry("F32", "[1]", "[0,4]") + R"(,"c":)" +
                      entry("F32", "[0]", "[4,4]") + "}",
                  4)
                .size(),
            3U);
}

/// The smallest headers that break a rule, and what the refusal says.
struct Broken {
  const char* rule;
  std::string header;
  std::uint64_t data_bytes;
  std::initializer_list<std::string_view> says = {};
};

TEST(SafetensorsHeader, EveryBrokenRuleIsRefused) {
  const std::string empty = entry("F32", "[0]", "[0,0]"), first = entry("F32", "[1]", "[0,4]");
  const auto two = [](const std::string& a, const std::string& b) { return R"({"a":)" + a + R"(,"b":)" + b + "}"; };
  const Broken all[] = {
      {"is an object", "[]", 0, {"does not begin with '{'"}},
      {"is an object", "1", 0, {"does not begin with '{'"}},
      {"is an object", "null", 0, {"does not begin with '{'"}},
      {"is an object", "\"{}\"", 0, {"does not begin with '{'"}},
      {"a tensor is an object", R"({"t":[]})", 0, {"t:", "found an array, expected an object"}},
      {"a tensor is an object", R"({"t":"F32"})", 0, {"expected an object"}},
      {"no leading space", " {}", 0, {"does not begin with '{'"}},
      {"no byte order mark", "\xef\xbb\xbf{}", 0, {"begin"}},
      {"only spaces follow", "{}\n", 0, {"followed by"}},
      {"only spaces follow", "{}\t", 0, {"followed by"}},
      {"only spaces follow", "{} x", 0, {"followed by"}},
      {"only spaces follow", "{}\r  ", 0, {"followed by"}},
      {"only spaces follow", "{}{}", 0},
      {"only spaces follow", "{} {}", 0},
      {"only spaces follow", std::string("{}\0", 3), 0},
      {"only spaces follow", std::string("{}\0 {}", 6), 0},
      {"no deep nesting", "{\"t\":" + std::string(1'000'000, '['), 0},
      {"no deep nesting", "{\"t\":{\"shape\":" + std::string(1'000'000, '['), 0},
      {"no deep nesting", "{\"__metadata__\":{\"a\":" + std::string(1'000'000, '{'), 0},
      {"valid UTF-8", "{\"\xff\":" + empty + "}", 0, {"ill-formed UTF-8"}},
      {"valid UTF-8", "{\"__metadata__\":{\"a\":\"\xc3\"}}", 0, {"ill-formed UTF-8"}},
      {"no NUL in a name", R"({"a\u0000b":)" + empty + "}", 0, {"NUL"}},
      {"tensors once", R"({"t":)" + empty + R"(,"t":)" + empty + "}", 0, {"duplicate key", "\"t\""}},
      {"tensors once", R"({"t":)" + empty + R"(,"\u0074":)" + empty + "}", 0, {"duplicate key"}},
      {"metadata once", R"({"__metadata__":{},"__metadata__":{}})", 0, {"duplicate key"}},
      {"keys once",
       R"({"t":{"dtype":"F32","shape":[0],"shape":[0],"data_offsets":[0,0]}})",
       0,
       {"duplicate key", "shape"}},
      {"keys once", R"({"__metadata__":{"a":"1","a":"2"}})", 0, {"duplicate key"}},
      {"metadata is an object", R"({"__metadata__":[]})", 0, {"expected an object"}},
      {"dtype is there", R"({"t":{"shape":[0],"data_offsets":[0,0]}})", 0, {"t:", "dtype is missing"}},
      {"shape is there", R"({"t":{"dtype":"F32","data_offsets":[0,0]}})", 0, {"t:", "shape is missing"}},
      {"offsets are there", R"({"t":{"dtype":"F32","shape":[0]}})", 0, {"t:", "data_offsets is missing"}},
      {"no other keys",
       R"({"t":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":1}})",
       0,
       {"t:", "x:", "unknown key"}},
      {"begin before end", one("[1]", "[4,0]"), 4, {"begins at 4, after its end at 0"}},
      {"end within the data", one("[2]", "[0,8]"), 4, {"t:", "ends at 8", "4 bytes of data"}},
      {"end within the data", one("[1]", "[9223372036854775803,9223372036854775807]"), 4, {"beyond"}},
      {"no overlap",
       two(entry("F32", "[2]", "[0,8]"), entry("F32", "[2]", "[4,12]")),
       12,
       {"b:", "begins at 4, expected 8", "overlaps"}},
      {"no overlap", two(first, first), 4, {"b:", "overlaps"}},
      {"no hole", two(first, entry("F32", "[1]", "[8,12]")), 12, {"b:", "begins at 8, expected 4", "hole"}},
      {"no trailing bytes", one("[1]", "[0,4]"), 5, {"ends at byte 4", "5 bytes of data"}},
      {"no trailing bytes", "{}", 1, {"1 bytes of data"}},
      {"starts at zero", one("[1]", "[4,8]"), 8, {"begins at 4, expected 0"}},
      {"no negative numbers", one("[1]", "[-4,0]"), 4, {"data_offsets", "found -4"}},
      {"no negative numbers", one("[-1]", "[0,4]"), 4, {"shape", "found -1"}},
      {"no negative numbers", one("[-1,-1]", "[0,4]"), 4, {"shape"}},
      {"bytes match the shape", one("[2]", "[0,4]"), 4, {"t:", "found 4 bytes, expected 8"}},
      {"bytes match the shape", one("[]", "[0,8]"), 8, {"found 8 bytes, expected 4"}},
      {"bytes match the shape", one("[0]", "[0,4]"), 4, {"found 4 bytes, expected 0"}},
      {"extents of 63 bits", one("[0,9223372036854775808]", "[0,0]"), 0, {"shape"}},
      {"rank of at most 8", one("[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, {"more than 8 dimensions"}},
      {"dtype is a string", R"({"t":{"dtype":1,"shape":[0],"data_offsets":[0,0]}})", 0, {"dtype", "expected a string"}},
      {"dtype is short", R"({"t":{"dtype":")" + std::string(1'000'000, 'F') + R"(","shape":[0],"data_offsets":[0,0]}})",
       0},
      {"names of at most 512 bytes", "{\"" + std::string(513, 'n') + "\":" + empty + "}", 0, {"name of 513 bytes"}},
      {"names of at most 512 bytes", "{\"" + std::string(1'000'000, 'n') + "\":" + empty + "}", 0},
      {"names are not empty", "{\"\":" + empty + "}", 0, {"tensor name of 0 bytes"}}};
  for (const Broken& broken : all) {
    SCOPED_TRACE(broken.rule);
    expect_says(refusal(broken.header, broken.data_bytes), broken.says);
  }
}

TEST(SafetensorsHeader, WhatTheRulesAllow) {
  EXPECT_TRUE(parse("{}     ", 0).empty());
  EXPECT_TRUE(parse(R"({"__metadata__":{"format":"pt","x":""}})", 0).empty());
  EXPECT_EQ(parse(one("[1,1,1,1,1,1,1,1]", "[0,4]"), 4).size(), 1U);
  EXPECT_EQ(parse("{\"" + std::string(512, 'n') + "\":" + entry("F32", "[0]", "[0,0]") + "}", 0).size(), 1U);
}

TEST(SafetensorsHeader, ValuesOfTheWrongKind) {
  for (const char* value : {"1", "null", "[]", "{}", "true"}) {
    expect_says(refusal(R"({"__metadata__":{"a":)" + std::string(value) + "}}"), {"__metadata__", "expected a string"});
  }
  for (const std::string number :
       {"1.0", "1e3", "1e0", "-0", "\"1\"", "null", "true", "[1]", "18446744073709551616", "9223372036854775808"}) {
    expect_says(refusal(one("[" + number + "]", "[0,4]"), 4), {"t:", "shape", "expected an integer"});
    expect_says(refusal(one("[1]", "[0," + number + "]"), 4), {"t:", "data_offsets", "expected an integer"});
  }
  for (const char* offsets : {"[]", "[0]", "[0,4,4]", "0", "{}"}) {
    expect_says(refusal(one("[1]", offsets), 4), {"data_offsets", "expected"});
  }
  for (const char* dtype : {"F64", "I16", "U8", "BOOL", "F8_E5M2", "C64", "f32", "", "F32 "}) {
    expect_says(refusal(R"({"t":)" + entry(dtype, "[0]", "[0,0]") + "}"),
                {"t:", "dtype", "\"" + std::string(dtype) + "\"", "expected F32, F16, BF16, F8_E4M3, I8, I32 or I64"});
  }
}

TEST(SafetensorsHeader, ShapeProductOverflows) {
  for (const char* shape : {"[4294967296,4294967296]", "[4611686018427387904]", "[9223372036854775807,2]",
                            "[65536,65536,65536,65536]", "[4611686018427387904,4,0]"}) {
    expect_says(refusal(one(shape, "[0,0]")), {"t:", "shape does not fit in 64 bits"});
  }
  std::string many = "[1";
  for (int i = 0; i < 1'000'000; ++i) many += ",1";
  expect_says(refusal(one(many + "]", "[0,4]"), 4), {"more than 8 dimensions"});
}

TEST(SafetensorsHeader, EveryTruncationIsRefused) {
  const std::string header = R"({"__metadata__":{"format":"pt"},"a":)" + entry("F32", "[2,2]", "[0,16]") + R"(,"b":)" +
                             entry("BF16", "[3]", "[16,22]") + "}";
  EXPECT_EQ(parse(header, 22).size(), 2U);
  for (std::size_t n = 0; n < header.size(); ++n) refusal(header.substr(0, n), 22);
}

}  // namespace
}  // namespace mmrec::models
