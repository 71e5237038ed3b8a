// Every rule of the safetensors header, each with the smallest header that breaks it.
#include <gtest/gtest.h>

#include <string>
#include <vector>

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

TEST(SafetensorsHeader, NotJson) {
  for (const char* text : {"", "{", "{]", "{\"a\"", "{\"a\":}", "{\"a\":1,}", "{'a':1}"}) refusal(text);
}

TEST(SafetensorsHeader, NotAnObject) {
  for (const char* text : {"[]", "1", "null", "\"{}\""}) expect_says(refusal(text), {"does not begin with '{'"});
  expect_says(refusal(R"({"t":[]})"), {"t:", "found an array, expected an object"});
  expect_says(refusal(R"({"t":"F32"})"), {"expected an object"});
}

TEST(SafetensorsHeader, LeadingSpace) { expect_says(refusal(" {}"), {"does not begin with '{'"}); }

TEST(SafetensorsHeader, ByteOrderMark) { expect_says(refusal("\xef\xbb\xbf{}"), {"begin"}); }

TEST(SafetensorsHeader, OnlySpacesMayFollow) {
  EXPECT_TRUE(parse("{}     ", 0).empty());
  for (const char* text : {"{}\n", "{}\t", "{} x", "{}\r  "}) expect_says(refusal(text), {"followed by"});
  refusal("{}{}");
  refusal("{} {}");
  refusal(std::string_view("{}\0", 3));
  refusal(std::string_view("{}\0 {}", 6));
}

TEST(SafetensorsHeader, DeepNesting) {
  refusal("{\"t\":" + std::string(1'000'000, '['));
  refusal("{\"t\":{\"shape\":" + std::string(1'000'000, '['));
  refusal("{\"__metadata__\":{\"a\":" + std::string(1'000'000, '{'));
}

TEST(SafetensorsHeader, InvalidUtf8) {
  expect_says(refusal("{\"\xff\":" + entry("F32", "[0]", "[0,0]") + "}"), {"ill-formed UTF-8"});
  expect_says(refusal("{\"__metadata__\":{\"a\":\"\xc3\"}}"), {"ill-formed UTF-8"});
}

TEST(SafetensorsHeader, NulInName) {
  expect_says(refusal(R"({"a\u0000b":)" + entry("F32", "[0]", "[0,0]") + "}"), {"NUL"});
}

TEST(SafetensorsHeader, DuplicateTensor) {
  const std::string tensor = entry("F32", "[0]", "[0,0]");
  expect_says(refusal(R"({"t":)" + tensor + R"(,"t":)" + tensor + "}"), {"duplicate key", "\"t\""});
  expect_says(refusal(R"({"t":)" + tensor + R"(,"\u0074":)" + tensor + "}"), {"duplicate key"});
  expect_says(refusal(R"({"__metadata__":{},"__metadata__":{}})"), {"duplicate key"});
}

TEST(SafetensorsHeader, DuplicateInnerKey) {
  expect_says(refusal(R"({"t":{"dtype":"F32","shape":[0],"shape":[0],"data_offsets":[0,0]}})"),
              {"duplicate key", "shape"});
  expect_says(refusal(R"({"__metadata__":{"a":"1","a":"2"}})"), {"duplicate key"});
}

TEST(SafetensorsHeader, MetadataMapsStringsToStrings) {
  EXPECT_TRUE(parse(R"({"__metadata__":{"format":"pt","x":""}})", 0).empty());
  for (const char* value : {"1", "null", "[]", "{}", "true"}) {
    expect_says(refusal(R"({"__metadata__":{"a":)" + std::string(value) + "}}"), {"__metadata__", "expected a string"});
  }
  expect_says(refusal(R"({"__metadata__":[]})"), {"expected an object"});
}

TEST(SafetensorsHeader, KeysOfATensor) {
  expect_says(refusal(R"({"t":{"shape":[0],"data_offsets":[0,0]}})"), {"t:", "dtype is missing"});
  expect_says(refusal(R"({"t":{"dtype":"F32","data_offsets":[0,0]}})"), {"t:", "shape is missing"});
  expect_says(refusal(R"({"t":{"dtype":"F32","shape":[0]}})"), {"t:", "data_offsets is missing"});
  expect_says(refusal(R"({"t":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":1}})"), {"t:", "x:", "unknown key"});
}

TEST(SafetensorsHeader, BeginAfterEnd) {
  expect_says(refusal(one("[1]", "[4,0]"), 4), {"begins at 4, after its end at 0"});
}

TEST(SafetensorsHeader, EndBeyondData) {
  expect_says(refusal(one("[2]", "[0,8]"), 4), {"t:", "ends at 8", "4 bytes of data"});
  expect_says(refusal(one("[1]", "[9223372036854775803,9223372036854775807]"), 4), {"beyond"});
}

TEST(SafetensorsHeader, Overlap) {
  const std::string header =
      R"({"a":)" + entry("F32", "[2]", "[0,8]") + R"(,"b":)" + entry("F32", "[2]", "[4,12]") + "}";
  expect_says(refusal(header, 12), {"b:", "begins at 4, expected 8", "overlaps"});
  const std::string twice = R"({"a":)" + entry("F32", "[1]", "[0,4]") + R"(,"b":)" + entry("F32", "[1]", "[0,4]") + "}";
  expect_says(refusal(twice, 4), {"b:", "overlaps"});
}

TEST(SafetensorsHeader, Hole) {
  const std::string header =
      R"({"a":)" + entry("F32", "[1]", "[0,4]") + R"(,"b":)" + entry("F32", "[1]", "[8,12]") + "}";
  expect_says(refusal(header, 12), {"b:", "begins at 8, expected 4", "hole"});
}

TEST(SafetensorsHeader, TrailingBytes) {
  expect_says(refusal(one("[1]", "[0,4]"), 5), {"ends at byte 4", "5 bytes of data"});
  expect_says(refusal("{}", 1), {"1 bytes of data"});
}

TEST(SafetensorsHeader, StartNotAtZero) { expect_says(refusal(one("[1]", "[4,8]"), 8), {"begins at 4, expected 0"}); }

TEST(SafetensorsHeader, NegativeNumbers) {
  expect_says(refusal(one("[1]", "[-4,0]"), 4), {"data_offsets", "found -4"});
  expect_says(refusal(one("[-1]", "[0,4]"), 4), {"shape", "found -1"});
  expect_says(refusal(one("[-1,-1]", "[0,4]"), 4), {"shape"});
}

TEST(SafetensorsHeader, NumbersThatAreNotIntegers) {
  for (const char* number :
       {"1.0", "1e3", "1e0", "-0", "\"1\"", "null", "true", "[1]", "18446744073709551616", "9223372036854775808"}) {
    expect_says(refusal(one("[" + std::string(number) + "]", "[0,4]"), 4), {"t:", "shape", "expected an integer"});
    expect_says(refusal(one("[1]", "[0," + std::string(number) + "]"), 4),
                {"t:", "data_offsets", "expected an integer"});
  }
}

TEST(SafetensorsHeader, OffsetsAreTwo) {
  for (const char* offsets : {"[]", "[0]", "[0,4,4]", "0", "{}"}) {
    expect_says(refusal(one("[1]", offsets), 4), {"data_offsets", "expected"});
  }
}

TEST(SafetensorsHeader, BytesMustMatchTheShape) {
  expect_says(refusal(one("[2]", "[0,4]"), 4), {"t:", "found 4 bytes, expected 8"});
  expect_says(refusal(one("[]", "[0,8]"), 8), {"found 8 bytes, expected 4"});
  expect_says(refusal(one("[0]", "[0,4]"), 4), {"found 4 bytes, expected 0"});
}

TEST(SafetensorsHeader, ShapeProductOverflows) {
  for (const char* shape : {"[4294967296,4294967296]", "[4611686018427387904]", "[9223372036854775807,2]",
                            "[65536,65536,65536,65536]", "[4611686018427387904,4,0]"}) {
    expect_says(refusal(one(shape, "[0,0]")), {"t:", "shape does not fit in 64 bits"});
  }
}

TEST(SafetensorsHeader, ExtentBeyond63Bits) {
  expect_says(refusal(one("[0,9223372036854775808]", "[0,0]")), {"shape"});
}

TEST(SafetensorsHeader, Rank) {
  EXPECT_EQ(parse(one("[1,1,1,1,1,1,1,1]", "[0,4]"), 4).size(), 1U);
  expect_says(refusal(one("[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4), {"more than 8 dimensions"});
  std::string many = "[1";
  for (int i = 0; i < 1'000'000; ++i) many += ",1";
  expect_says(refusal(one(many + "]", "[0,4]"), 4), {"more than 8 dimensions"});
}

TEST(SafetensorsHeader, OtherTypes) {
  for (const char* dtype : {"F64", "I8", "I32", "I64", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "C64", "f32", "", "F32 "}) {
    expect_says(refusal(R"({"t":)" + entry(dtype, "[0]", "[0,0]") + "}"),
                {"t:", "dtype", "\"" + std::string(dtype) + "\"", "expected F32, F16 or BF16"});
  }
  expect_says(refusal(R"({"t":{"dtype":1,"shape":[0],"data_offsets":[0,0]}})"), {"dtype", "expected a string"});
  refusal(R"({"t":{"dtype":")" + std::string(1'000'000, 'F') + R"(","shape":[0],"data_offsets":[0,0]}})");
}

TEST(SafetensorsHeader, NamesHaveALimit) {
  const std::string tensor = entry("F32", "[0]", "[0,0]");
  EXPECT_EQ(parse("{\"" + std::string(512, 'n') + "\":" + tensor + "}", 0).size(), 1U);
  expect_says(refusal("{\"" + std::string(513, 'n') + "\":" + tensor + "}"), {"tensor name of 513 bytes"});
  expect_says(refusal("{\"\":" + tensor + "}"), {"tensor name of 0 bytes"});
  refusal("{\"" + std::string(1'000'000, 'n') + "\":" + tensor + "}");
}

/// `count` empty tensors.
std::string many_tensors(std::size_t count) {
  std::string header = "{";
  for (std::size_t i = 0; i < count; ++i) {
    header += (i == 0 ? "\"blocks." : ",\"blocks.") + std::to_string(i) + "\":" + entry("F32", "[0]", "[0,0]");
  }
  return header + "}";
}

TEST(SafetensorsHeader, TensorCountHasALimit) {
  EXPECT_EQ(parse(many_tensors(kMaxTensors), 0).size(), kMaxTensors);
  expect_says(refusal(many_tensors(kMaxTensors + 1)), {"more than 100000 tensors"});
}

TEST(SafetensorsHeader, EveryTruncationIsRefused) {
  const std::string header = R"({"__metadata__":{"format":"pt"},"a":)" + entry("F32", "[2,2]", "[0,16]") + R"(,"b":)" +
                             entry("BF16", "[3]", "[16,22]") + "}";
  EXPECT_EQ(parse(header, 22).size(), 2U);
  for (std::size_t n = 0; n < header.size(); ++n) refusal(header.substr(0, n), 22);
}

TEST(SafetensorsHeader, EveryFlippedBitIsRefusedOrKeepsTheLayoutSound) {
  const std::string header =
      R"({"a":)" + entry("F32", "[2,2]", "[0,16]") + R"(,"b":)" + entry("BF16", "[3]", "[16,22]") + "}";
  for (std::size_t i = 0; i < header.size() * 8; ++i) {
    std::string flipped = header;
    flipped[i / 8] = static_cast<char>(flipped[i / 8] ^ (1 << (i % 8)));
    std::vector<TensorInfo> tensors;
    try {
      tensors = parse(flipped, 22);
    } catch (const std::runtime_error&) {
      continue;
    }
    std::uint64_t end = 0;
    for (const TensorInfo& tensor : tensors) {
      EXPECT_EQ(tensor.begin, end);
      end = tensor.end;
    }
    EXPECT_EQ(end, 22U);
  }
}

}  // namespace
}  // namespace mmrec::models
