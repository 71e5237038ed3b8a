// Quantised checkpoints: written by the package compressed-tensors and by this engine they are read number by number as
// they stand there, and the model computes with just these numbers; what does not fit is refused.

#include <nlohmann/json.hpp>

#include "kernels/cpu/simd.h"
#include "mmrec/quantize.h"
#include "tests/engine/sessions.h"
#include "tests/support/compare.h"
#include "tests/support/model_folder.h"
#include "tests/support/quantized_reader.h"

namespace mmrec::test {
namespace {

namespace fs = std::filesystem;

/// Logits after a prompt of so many tokens for each of two sequences, and after some steps.
std::vector<float> logits_of(const Model& model, std::size_t prompt) {
  std::vector<float> all;
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    Session session = model.new_session(2, {.threads = 2, .prefill = mode});
    session.prefill(random_tokens(model, 2 * prompt, 7));
    for (const unsigned seed : {0U, 1U, 2U}) {
      session.step(random_tokens(model, 2, seed));
      const auto logits = session.logits();
      all.insert(all.end(), logits.begin(), logits.end());
    }
  }
  return all;
}

void expect_computes_with_its_numbers(const fs::path& folder) {
  const TempFolder plain;
  write_dequantized(folder, plain.path());
  const Model quantized = on_cpu(folder), dequantized = on_cpu(plain.path());
  for (const kernels::SimdKernels* table : kernels::supported_simd_kernels()) {
    SCOPED_TRACE(table->name);
    kernels::choose_simd(*table);
    for (const std::size_t prompt : {60U, 150U}) {
      if (prompt > 60 && table != kernels::supported_simd_kernels().front()) continue;  // tiles are the library's
      const std::vector<float> got = logits_of(quantized, prompt), want = logits_of(dequantized, prompt);
      // Whole tiles of rows, and digits, may be multiplied before the scales are.
      const bool has_bits = prompt == 60 && !table->matvec.by_digits;
      EXPECT_LE(largest_share(got, want), has_bits ? 0.0 : 1e-4) << prompt;
    }
  }
  kernels::choose_simd(*kernels::supported_simd_kernels().front());
  if (quantized.info().model_dim >= 64) {
    EXPECT_LT(quantized.info().weight_bytes, dequantized.info().weight_bytes);
  }
  EXPECT_EQ(quantized.info().parameters, dequantized.info().parameters);
  EXPECT_NE(quantized.info().fingerprint, dequantized.info().fingerprint);
}

TEST(Quantized, FoldersOfCompressedTensorsAreReadNumberByNumber) {
  const auto values = nlohmann::json::parse(read_file(folder_of("quantized") / "values.json"));
  for (const std::string name : {"int8", "int4", "fp8"}) {
    SCOPED_TRACE(name);
    const fs::path folder = folder_of("quantized") / name;
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
      const QuantizedModel made = quantize_model(folder_of(model), folder / "q", {.type = type, .group = 64});
      ASSERT_TRUE(made.complete);
      expect_computes_with_its_numbers(folder / "q");
    }
  }
}

struct Edited : EditedFolder {
  explicit Edited(const std::string& name)
      : EditedFolder(folder_of("quantized") / name),
        json(nlohmann::ordered_json::parse(read_file(*this / "config.json"))) {}
  nlohmann::ordered_json& scheme() { return json["quantization_config"]["config_groups"]["group_0"]["weights"]; }
  nlohmann::ordered_json json;
};

// W_z is sensitive, so its neighbours may have 4 bits where it has 8. On the CPU they stay as they are in one stack.
TEST(Quantized, Int4BesideInt8StaysQuantised) {
  Edited e("int4");
  const EditableCheckpoint int8(folder_of("quantized") / "int8" / "model.safetensors");
  for (const EditableTensor& tensor : int8.tensors) {
    if (tensor.name.find(".W_z.weight_") != std::string::npos) e.checkpoint.at(tensor.name) = tensor;
  }
  expect_computes_with_its_numbers(e.written());
  // Each of 2 x 64 rows has 32 bytes more than where all have 4 bits.
  const std::uint64_t all_int4 = on_cpu(folder_of("quantized") / "int4").info().weight_bytes;
  EXPECT_EQ(on_cpu(e.path()).info().weight_bytes, all_int4 + std::uint64_t{2 * 64 * 32});
}

TEST(Quantized, WhatDoesNotFitIsRefused) {
  const std::string q = "blocks.0.W_q.weight", packed = q + "_packed", scale = q + "_scale", shape = q + "_shape";
  const auto refused = [](const char* folder, auto change, std::initializer_list<std::string_view> says) {
    Edited e(folder);
    change(e);
    e.config(e.json.dump());
    expect_says(error_of([&] { on_cpu(e.written()); }), says);
  };
  const auto without_config = [](Edited& e) { e.json.erase("quantization_config"); };
  refused("int4", without_config, {packed, "found int4", "config.json has no quantization_config"});
  refused("fp8", without_config, {"found F8_E4M3", "config.json has no quantization_config"});
  for (const std::string& tensor : {scale, shape}) {
    refused("int4", [&](Edited& e) { e.checkpoint.erase(tensor); }, {packed, "found no " + tensor + " beside it"});
  }
  refused("int4",
          [&](Edited& e) {
            e.checkpoint.at(scale).shape = {32, 2};
          },
          {scale, "found shape [32, 2], expected [64, 1]"});
  refused("int4",
          [&](Edited& e) {
            e.checkpoint.at(scale).dtype = "I32";
            e.checkpoint.at(scale).shape = {32, 1};
          },
          {scale, "found I32, expected F32, F16 or BF16"});
  refused("int8", [&](Edited& e) { e.checkpoint.at(scale).bytes.replace(2, 2, "\x80\x7f"); },
          {scale, "element 1 is infinite"});
  refused("fp8", [&](Edited& e) { e.checkpoint.at(q).bytes[70] = '\xff'; }, {q, "element 70 is NaN"});
  refused("int4", [&](Edited& e) { e.checkpoint.at(shape).bytes[0] = 63; },
          {packed, "found shape [64, 8], expected [63, 8]"});
  refused("int4", [&](Edited& e) { e.checkpoint.at(shape).bytes[7] = '\x80'; }, {shape, "expected positive sizes"});
  refused("int4",
          [&](Edited& e) {
            e.checkpoint.add_zeros(q + "_zero_point", {64, 1});
          },
          {q + "_zero_point", "unexpected tensor"});
  refused("int8",
          [&](Edited& e) {
            e.checkpoint.at("norm.weight").dtype = "I8";
            e.checkpoint.at("norm.weight").bytes.resize(64);
          },
          {"norm.weight", "found I8, expected F32, F16 or BF16"});

  // The configuration must have a scheme for what is there.
  refused("fp8", [](Edited& e) { e.scheme()["type"] = "int"; },
          {"found fp8 with scales of shape [64, 1], expected a scheme of config.json's quantization_config"});
  refused("int4", [](Edited& e) { e.scheme()["group_size"] = 32; },
          {"group_size: found 32, expected a multiple of 64"});
  refused("int4", [](Edited& e) { e.scheme()["symmetric"] = false; }, {"symmetric", "found false, expected true"});
  refused("int8", [](Edited& e) { e.scheme()["num_bits"] = 6; },
          {"group_0: weights: found \"int\" of 6 bits, expected int of 4 or 8 bits or float of 8"});
  refused("int8", [](Edited& e) { e.scheme()["strategy"] = "block"; },
          {"group_0: weights: strategy: found \"block\", expected \"tensor\", \"channel\" or \"group\""});
  refused("int8", [](Edited& e) { e.json["quantization_config"]["quant_method"] = "gptq"; },
          {"quant_method", "found \"gptq\", expected \"compressed-tensors\""});
  refused("int8", [](Edited& e) { e.json["quantization_config"].erase("config_groups"); },
          {"quantization_config: found no weights in config_groups, expected a scheme of them"});
}

}  // namespace
}  // namespace mmrec::test
