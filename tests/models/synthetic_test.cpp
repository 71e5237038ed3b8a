// Synthetic model folders: valid, reproducible, with live gates. And the checksum and the checked sizes they rest on.

#include "models/files/checked.h"
#include "models/files/checkpoint.h"
#include "models/files/checksum.h"
#include "models/files/elements.h"
#include "models/mmrec/mmrec.h"
#include "tests/models/small_models.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

namespace fs = std::filesystem;
using kernels::DType;
using test::SafetensorsReader;
using test::TempFolder;

Config narrow_config() {
  Config config = small_config(24);
  config.num_layers = 3;
  config.ffn_dim = 40;
  return config;
}

HostWeights load(const fs::path& folder) {
  return load_weights(Checkpoint::open(folder), test::config_of<Config>(folder));
}

TEST(Synthetic, EveryVariantAndTypeLoads) {
  for (const bool hem : {false, true}) {
    for (const bool dpg : {false, true}) {
      for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
        const TempFolder folder;
        Config config = narrow_config();
        config.use_hem = hem;
        config.use_dpg = dpg;
        config.dpg_rank = 5;
        write_synthetic_model(folder.path(), config, dtype, 1);
        EXPECT_EQ(test::config_of<Config>(folder.path()), config);
        EXPECT_EQ(load(folder.path()).embedding.format, dtype);
      }
    }
  }
}

TEST(Synthetic, DependsOnTheSeedAlone) {
  const TempFolder a, b, c;
  write_synthetic_model(a.path(), narrow_config(), DType::kF32, 1);
  write_synthetic_model(b.path(), narrow_config(), DType::kF32, 1);
  write_synthetic_model(c.path(), narrow_config(), DType::kF32, 2);
  EXPECT_EQ(test::read_file(a / "model.safetensors"), test::read_file(b / "model.safetensors"));
  EXPECT_NE(test::read_file(a / "model.safetensors"), test::read_file(c / "model.safetensors"));
  EXPECT_NE(load(a.path()).fingerprint, load(c.path()).fingerprint);
}

TEST(Synthetic, ValuesHaveTheScaleOfPyTorchsDefaults) {
  const TempFolder folder;
  Config config = narrow_config();
  config.model_dim = 64;
  write_synthetic_model(folder.path(), config, DType::kF32, 1);
  const SafetensorsReader file(folder / "model.safetensors");
  for (const auto& [name, bound] :
       {std::pair("blocks.0.W_g.weight", 1 / 8.0), std::pair("blocks.2.mdi.W_g.weight", 1 / std::sqrt(128.0)),
        std::pair("blocks.1.mdi.W_gamma.2.weight", 0.25)}) {
    const auto& values = file.at(name).values;
    double sum = 0, square = 0, largest = 0;
    for (const double x : values) {
      sum += x;
      square += x * x;
      largest = std::max(largest, std::abs(x));
    }
    const auto n = static_cast<double>(values.size());
    EXPECT_LE(largest, bound) << name;
    EXPECT_GT(largest, 0.95 * bound) << name;
    EXPECT_LT(std::abs(sum / n), 0.1 * bound) << name;
    EXPECT_NEAR(std::sqrt(square / n), bound / std::sqrt(3.0), 0.1 * bound) << name;
  }
}

TEST(Synthetic, OutputThatCannotBeWrittenIsAnError) {
  EXPECT_THROW(write_synthetic_model("/proc/none", narrow_config()), std::system_error);
  const TempFolder folder;
  fs::create_symlink("/dev/full", folder / "model.safetensors");
  EXPECT_THROW(write_synthetic_model(folder.path(), narrow_config()), std::system_error);
}

TEST(Checksum, HasTheCheckValueOfCrc64Xz) {
  Crc64 crc;
  crc.update(std::string_view("123456789"));
  EXPECT_EQ(crc.value(), 0x995dc9bbdf1939faU);
  EXPECT_EQ(Crc64().value(), 0U);
}

TEST(Checksum, DoesNotDependOnThePieces) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += static_cast<char>(i * 7);
  const std::uint64_t whole = crc64(std::as_bytes(std::span(text)));
  for (const std::size_t piece : {1U, 3U, 8U, 13U, 999U}) {
    Crc64 crc;
    for (std::size_t at = 0; at < text.size(); at += piece) crc.update(std::string_view(text).substr(at, piece));
    EXPECT_EQ(crc.value(), whole);
  }
}

TEST(CheckedSize, RemembersOverflow) {
  const CheckedSize big = std::uint64_t{1} << 63;
  EXPECT_TRUE((big + big).overflowed());
  EXPECT_TRUE((big * 2).overflowed());
  EXPECT_TRUE((big * 2 * 0).overflowed());
  EXPECT_TRUE((CheckedSize(0) * (big * 2)).overflowed());
  EXPECT_FALSE((big * 1 + 0).overflowed());
  EXPECT_FALSE((big + big).at_most(~std::uint64_t{0}));
  EXPECT_TRUE(CheckedSize(-1).overflowed());
  EXPECT_TRUE(CheckedSize(5).at_most(5));
  EXPECT_FALSE(CheckedSize(6).at_most(5));
  EXPECT_EQ((CheckedSize(6) * 7 + 1).value(), 43U);
  EXPECT_TRUE(checked_product(std::vector<std::int64_t>{-1, 2}).overflowed());
  EXPECT_EQ(checked_product(std::vector<std::int64_t>{}).value(), 1U);
}

TEST(Checksum, TablesOfTheCompilerAreThoseOfTheProgram) {
  EXPECT_EQ(detail::make_crc64_tables(), detail::kCrc64Tables);
}

// A value that is no enumerator, as damaged memory could hold.
TEST(Checkpoint, WhatIsNoElementTypeHasNeitherNameNorNumbers) {
  const auto none = static_cast<DType>(99);
  EXPECT_EQ(name_in_file(none), "");
  bool called = false;
  with_element_type(none, [&](auto) { called = true; });
  EXPECT_FALSE(called);
}

}  // namespace
}  // namespace mmrec::models
