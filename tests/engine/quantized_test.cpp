// Quantised checkpoints: written by the package compressed-tensors and by this engine they are read number by number as
// they stand there, and the model computes with just these numbers; what does not fit is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "mmrec/model.h"
#include "mmrec/quantize.h"
#include "mmrec/session.h"
#include "tests/support/model_folder.h"
#include "tests/support/quantized_reader.h"

namespace mmrec::test {
namespace {

namespace fs = std::filesystem;

fs::path fixture(const std::string& name) { return fs::path(MMREC_FIXTURES) / name; }

Model load(const fs::path& folder) {
  LoadOptions options{.device = Device::kCpu};
  return Model::load(folder, options);
}

std::vector<int> some_tokens(const Model& model, int count, int seed) {
  std::vector<int> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * i + 37 * seed) % static_cast<int>(model.info().vocab_size));
  return tokens;
}

/// Logits after a prompt of so many tokens for each of two sequences, and after some steps.
std::vector<float> logits_of(const Model& model, int prompt) {
  std::vector<float> all;
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    Session session = model.new_session(2, {.threads = 2, .prefill = mode});
    session.prefill(some_tokens(model, 2 * prompt, 7));
    for (int i = 0; i < 3; ++i) {
      session.step(some_tokens(model, 2, i));
      const auto logits = session.logits();
      all.insert(all.end(), logits.begin(), logits.end());
    }
  }
  return all;
}

void expect_computes_with_its_numbers(const fs::path& folder) {
  const TempFolder plain;
  write_dequantized(folder, plain.path());
  const Model quantized = load(folder), dequantized = load(plain.path());
  EXPECT_EQ(logits_of(quantized, 60), logits_of(dequantized, 60));
  // Whole tiles of rows may be multiplied before their scales are.
  const std::vector<float> a = logits_of(quantized, 150), b = logits_of(dequantized, 150);
  float largest = 0.0F, apart = 0.0F;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::abs(b[i]));
    apart = std::max(apart, std::abs(a[i] - b[i]));
  }
  EXPECT_LE(apart, 1e-4F * largest);
  if (quantized.info().model_dim >= 64) {
    EXPECT_LT(quantized.info().weight_bytes, dequantized.info().weight_bytes);
  }
  EXPECT_EQ(quantized.info().parameters, dequantized.info().parameters);
  EXPECT_NE(quantized.info().fingerprint, dequantized.info().fingerprint);
}

TEST(Quantized, FoldersOfCompressedTensorsAreReadNumberByNumber) {
  const auto values = nlohmann::json::parse(read_file(fixture("quantized") / "values.json"));
  for (const std::string name : {"int8", "int4", "fp8"}) {
    SCOPED_TRACE(name);
    const fs::path folder = fixture("quantized") / name;
    int matrices = 0;
    for_quantized(tensors_of(folder), [&](const std::string& module, const QuantizedReading& read) {
      const auto& expected = values.at(name).at(module + ".weight");
      double sum = 0.0;
      for (std::int64_t i = 0; i < read.rows * read.cols; ++i) {
        // The package decompresses to bf16.
        const double exact = read.numbers[static_cast<std::size_t>(i)] * read.scale(i / read.cols, i % read.cols);
        const auto x = static_cast<double>(to_float(kernels::from_float<kernels::BFloat16>(static_cast<float>(exact))));
        sum += x;
        if (i < 8) {
          EXPECT_EQ(x, expected.at("first").at(static_cast<std::size_t>(i)).get<double>()) << module;
        }
      }
      EXPECT_NEAR(sum, expected.at("sum").get<double>(), 1e-9) << module;
      ++matrices;
    });
    EXPECT_EQ(matrices, 28);
    expect_computes_with_its_numbers(folder);
  }
}

TEST(Quantized, ModelsOfThisEngineComputeWithTheirNumbers) {
  for (const std::string model : {"oracle/tiles", "oracle/dpg_bf16", "upstream/hem", "upstream/mmrec100m"}) {
    for (const QuantizedType type : {QuantizedType::kInt8, QuantizedType::kInt4, QuantizedType::kFp8}) {
      SCOPED_TRACE(model + " " + std::string(to_string(type)));
      const TempFolder folder;
      const QuantizedModel made = quantize_model(fixture(model), folder / "q", {.type = type, .group = 64});
      ASSERT_TRUE(made.complete);
      expect_computes_with_its_numbers(folder / "q");
    }
  }
}

/// A folder of the fixtures to change.
struct Edited : TempFolder {
  explicit Edited(const std::string& name)
      : checkpoint(fixture("quantized") / name / "model.safetensors"),
        config(nlohmann::ordered_json::parse(read_file(fixture("quantized") / name / "config.json"))) {}
  nlohmann::ordered_json& scheme() { return config["quantization_config"]["config_groups"]["group_0"]["weights"]; }
  void expect_refused(std::initializer_list<std::string_view> says) const {
    checkpoint.write(*this / "model.safetensors");
    write_file(*this / "config.json", config.dump());
    expect_says(error_of([&] { load(path()); }), says);
  }
  EditableCheckpoint checkpoint;
  nlohmann::ordered_json config;
};

// W_z is sensitive, so its neighbours may have 4 bits where it has 8. They are stacked, and all get 8 then.
TEST(Quantized, Int4BesideInt8StaysQuantised) {
  Edited e("int4");
  const EditableCheckpoint int8(fixture("quantized") / "int8" / "model.safetensors");
  for (const EditableTensor& tensor : int8.tensors) {
    if (tensor.name.find(".W_z.weight_") != std::string::npos) e.checkpoint.at(tensor.name) = tensor;
  }
  e.checkpoint.write(e / "model.safetensors");
  write_file(e / "config.json", e.config.dump());
  expect_computes_with_its_numbers(e.path());
  // Each of 2 x 4 x 64 rows has 32 bytes more than where all have 4 bits.
  const std::uint64_t all_int4 = load(fixture("quantized") / "int4").info().weight_bytes;
  EXPECT_EQ(load(e.path()).info().weight_bytes, all_int4 + std::uint64_t{2 * 4 * 64 * 32});
}

TEST(Quantized, WhatDoesNotFitIsRefused) {
  const std::string q = "blocks.0.W_q.weight", packed = q + "_packed", scale = q + "_scale", shape = q + "_shape";
  Edited without("int4");
  without.config.erase("quantization_config");
  without.expect_refused({packed, "found int4", "config.json has no quantization_config"});
  Edited without_fp8("fp8");
  without_fp8.config.erase("quantization_config");
  without_fp8.expect_refused({"found F8_E4M3", "config.json has no quantization_config"});

  for (const std::string& tensor : {scale, shape}) {
    Edited e("int4");
    e.checkpoint.erase(tensor);
    e.expect_refused({packed, "found no " + tensor + " beside it"});
  }
  Edited other_scales("int4");
  other_scales.checkpoint.at(scale).shape = {32, 2};
  other_scales.expect_refused({scale, "found shape [32, 2], expected [64, 1]"});
  Edited whole_scales("int4");
  whole_scales.checkpoint.at(scale).dtype = "I32";
  whole_scales.checkpoint.at(scale).shape = {32, 1};
  whole_scales.expect_refused({scale, "found I32, expected F32, F16 or BF16"});
  Edited infinite("int8");
  infinite.checkpoint.at(scale).bytes[3] = '\x7f';
  infinite.checkpoint.at(scale).bytes[2] = '\x80';
  infinite.expect_refused({scale, "element 1 is infinite"});
  Edited nan("fp8");
  nan.checkpoint.at(q).bytes[70] = '\xff';
  nan.expect_refused({q, "element 70 is NaN"});
  Edited other_shape("int4");
  other_shape.checkpoint.at(shape).bytes[0] = 63;
  other_shape.expect_refused({packed, "found shape [64, 8], expected [63, 8]"});
  Edited negative("int4");
  negative.checkpoint.at(shape).bytes[7] = '\x80';
  negative.expect_refused({shape, "expected positive sizes"});
  Edited points("int4");
  points.checkpoint.add_zeros(q + "_zero_point", {64, 1});
  points.expect_refused({q + "_zero_point", "unexpected tensor"});
  Edited norm("int8");
  norm.checkpoint.at("norm.weight").dtype = "I8";
  norm.checkpoint.at("norm.weight").bytes.resize(64);
  norm.expect_refused({"norm.weight", "found I8, expected F32, F16 or BF16"});

  // The configuration must have a scheme for what is there.
  Edited bits("fp8");
  bits.scheme()["type"] = "int";
  bits.expect_refused(
      {"found fp8 with scales of shape [64, 1], expected a scheme of config.json's quantization_config"});
  Edited group("int4");
  group.scheme()["group_size"] = 32;
  group.expect_refused({"group_size: found 32, expected a multiple of 64"});
  Edited asymmetric("int4");
  asymmetric.scheme()["symmetric"] = false;
  asymmetric.expect_refused({"symmetric", "found false, expected true"});
  Edited six("int8");
  six.scheme()["num_bits"] = 6;
  six.expect_refused({"found \"int\" of 6 bits, expected int of 4 or 8 bits or float of 8"});
  Edited strategy("int8");
  strategy.scheme()["strategy"] = "block";
  strategy.expect_refused({"strategy: found \"block\", expected \"tensor\", \"channel\" or \"group\""});
  Edited method("int8");
  method.config["quantization_config"]["quant_method"] = "gptq";
  method.expect_refused({"quant_method", "found \"gptq\", expected \"compressed-tensors\""});
  Edited groups("int8");
  groups.config["quantization_config"].erase("config_groups");
  groups.expect_refused({"config_groups is missing"});
}

}  // namespace
}  // namespace mmrec::test
