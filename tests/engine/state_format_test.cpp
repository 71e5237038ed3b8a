#include "engine/session/state_format.h"

#include "models/files/checksum.h"
#include "models/mmrec/state.h"
#include "tests/support/host_state.h"
#include "tests/support/refusal.h"
#include "tests/support/sealed_bytes.h"

namespace mmrec::engine {
namespace {

/// Of the architecture mmrec: 2 layers of width 4, 2 memory slots, segments of 100, a vocabulary of 5.
models::Config config_of(std::int64_t layers = 2, std::int64_t dim = 4, std::int64_t slots = 2) {
  models::Config config;
  config.num_layers = layers;
  config.model_dim = dim;
  config.memory_slots = slots;
  config.memory_segment = 100;
  config.vocab_size = 5;
  return config;
}
const StateShape kShape = {0xABCDEF0123456789, 3, models::state_layout(config_of())};

models::HostState example(std::int64_t position = 250) {
  models::HostState state = models::zero_state(kShape.layout, kShape.batch, position);
  float next = -3.0F;
  for (models::HostState::Part& part : state.parts) {
    std::visit(
        [&](auto& values) {
          for (auto& x : values) x = next += 0.37F;
        },
        part.values);
  }
  test::tensor_of(state, "h")[3] = -0.0F;
  test::tensor_of(state, "h")[4] = std::numeric_limits<float>::denorm_min();
  test::tensor_of<double>(state, "segment_sum")[0] = 1e300;
  return state;
}

std::string refusal(std::span<const std::byte> bytes, const StateShape& shape = kShape) {
  return test::file_refusal([&] { decode_state(bytes, shape); });
}

/// Bytes changed, and sealed again.
std::vector<std::byte> with(std::vector<std::byte> bytes, std::size_t at, std::uint64_t value, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) bytes[at + i] = static_cast<std::byte>(value >> (8 * i));
  return test::sealed(bytes);
}

TEST(StateFormat, RoundTripsToTheBit) {
  for (const std::int64_t position : {std::int64_t{0}, std::int64_t{1}, std::int64_t{250}, std::int64_t{1} << 60}) {
    const models::HostState state = example(position);
    const std::vector<std::byte> bytes = encode_state(state, kShape);
    const models::HostState back = decode_state(bytes, kShape);
    EXPECT_EQ(back.batch, state.batch);
    EXPECT_EQ(back.position, position);
    EXPECT_EQ(back.parts, state.parts);
    EXPECT_EQ(encode_state(back, kShape), bytes) << "signs of zeros too";
  }
}

// The layout that docs/file-formats.md promises, byte for byte.
TEST(StateFormat, LayoutIsFixed) {
  const std::vector<std::byte> bytes = encode_state(example(), kShape);
  EXPECT_EQ(bytes.size(), 88U + 24 * 4 + 48 * 4 + 24 * 8 + 15 * 4 + 8);
  EXPECT_EQ(std::memcmp(bytes.data(), "mmrecST\n\x04\x03\x02\x01\x03\0\0\0", 16), 0);
  const auto u64 = [&](std::size_t at) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < 8; ++i) value |= std::to_integer<std::uint64_t>(bytes[at + i]) << (8 * i);
    return value;
  };
  EXPECT_EQ(u64(16), bytes.size());
  EXPECT_EQ(u64(24), kShape.fingerprint);
  const std::uint64_t expected[] = {2, 3, 4, 2, 100, 5, 250};
  for (std::size_t i = 0; i < 7; ++i) EXPECT_EQ(u64(32 + 8 * i), expected[i]);
  EXPECT_EQ(u64(bytes.size() - 8), models::crc64(std::span(bytes).first(bytes.size() - 8)));
}

TEST(StateFormat, HoldsNoSlotThatNoSegmentHasFilled) {
  for (const auto& [position, filled] : {std::pair{1, 0}, {99, 0}, {100, 1}, {199, 1}, {200, 2}, {1000, 2}}) {
    const auto floats = static_cast<std::size_t>(24 + 24 * filled + 15);
    EXPECT_EQ(encode_state(example(position), kShape).size(), 88 + floats * 4 + 24 * 8 + 8) << position;
  }
}

TEST(StateFormat, EveryTruncationAndAnyAdditionIsRefused) {
  const std::vector<std::byte> bytes = encode_state(example(), kShape);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    ASSERT_NE(refusal(std::span(bytes).first(size)), "no error") << size;
  }
  std::vector<std::byte> longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_EQ(refusal(longer), "saved state: found " + std::to_string(longer.size()) + " bytes, expected " +
                                 std::to_string(bytes.size()) + " as its header says");
}

TEST(StateFormat, SaysWhatIsWrong) {
  const std::vector<std::byte> bytes = encode_state(example(), kShape);
  EXPECT_EQ(refusal({}), "saved state: found 0 bytes, expected at least 96");
  std::vector<std::byte> other(200, std::byte{'x'});
  EXPECT_EQ(refusal(other), "saved state: not a saved state (its first 8 bytes are not \"mmrecST\\n\")");
  EXPECT_EQ(refusal(with(bytes, 8, 0x04030201, 4)),
            "saved state: found byte order mark 0x04030201, expected 0x01020304");
  EXPECT_EQ(refusal(with(bytes, 12, 1, 4)),
            "saved state: of an earlier version of mmrec: found format 1, expected 3. Make it again with this version");
  EXPECT_EQ(refusal(std::span(bytes).first(300)),
            "saved state: found 300 bytes, expected " + std::to_string(bytes.size()) + " as its header says");
  EXPECT_EQ(refusal(with(bytes, 24, 1, 8)),
            "saved state: of another model: found fingerprint 0x0000000000000001, expected 0xabcdef0123456789");
  const char* names[] = {"num_layers", "batch", "model_dim", "memory_slots", "memory_segment", "vocab_size"};
  const std::string expected[] = {"2", "3", "4", "2", "100", "5"};
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(refusal(with(bytes, 32 + 8 * i, ~std::uint64_t{0}, 8)),
              "saved state: found " + std::string(names[i]) + " -1, expected " + expected[i]);
  }
  EXPECT_EQ(refusal(with(bytes, 80, ~std::uint64_t{0}, 8)), "saved state: found position -1, expected >= 0");
  // Position 0 has no logits: the size betrays it.
  test::expect_says(refusal(with(bytes, 80, 0, 8)), {"found size"});
}

TEST(StateFormat, NonFiniteNumbersAreRefused) {
  const std::vector<std::byte> bytes = encode_state(example(), kShape);
  EXPECT_EQ(refusal(with(bytes, 88 + 4 * 7, 0x7FC00000, 4)), "saved state: h[7] is nan, expected a finite number");
  EXPECT_EQ(refusal(with(bytes, 88 + 96, 0x7F800000, 4)), "saved state: memory[0] is inf, expected a finite number");
  EXPECT_EQ(refusal(with(bytes, 88 + 96 + 192 + 8, 0xFFF0000000000000, 8)),
            "saved state: segment_sum[1] is -inf, expected a finite number");
  EXPECT_EQ(refusal(with(bytes, bytes.size() - 12, 0x7F800001, 4)),
            "saved state: logits[14] is nan, expected a finite number");
}

TEST(StateFormat, HugeShapesAllocateNothing) {
  const std::vector<std::byte> bytes = encode_state(example(), kShape);
  StateShape huge = kShape;
  huge.batch = std::int64_t{1} << 24;
  huge.layout = models::state_layout(config_of(huge.batch, huge.batch, huge.batch));
  auto claim = with(with(with(with(bytes, 32, 1 << 24, 8), 40, 1 << 24, 8), 48, 1 << 24, 8), 56, 1 << 24, 8);
  EXPECT_EQ(refusal(claim, huge), "saved state: the shapes of this session exceed the address space");
  huge = kShape;
  huge.layout = models::state_layout(config_of(2, 4, std::int64_t{1} << 40));
  const auto long_ago = with(bytes, 80, std::uint64_t{1} << 60, 8);  // all slots are filled
  test::expect_says(refusal(with(long_ago, 56, std::uint64_t{1} << 40, 8), huge), {"found size"});
}

TEST(StateFormat, EncodingRefusesAStateOfOtherShapes) {
  const auto expect_refused = [](const auto& change) {
    models::HostState state = example();
    change(state);
    EXPECT_THROW(encode_state(state, kShape), std::logic_error);
  };
  expect_refused([](auto& state) { test::tensor_of(state, "logits").pop_back(); });
  expect_refused([](auto& state) { ++state.batch; });
  expect_refused([](auto& state) { state.parts.pop_back(); });
  expect_refused([](auto& state) {
    const std::vector<float> h = test::tensor_of(state, "h");
    for (models::HostState::Part& part : state.parts) {
      if (part.name == "h") part.values = std::vector<double>(h.begin(), h.end());
    }
  });
}

}  // namespace
}  // namespace mmrec::engine
