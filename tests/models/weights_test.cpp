// Binding and reading weights: layout, every mismatch with the configuration, non-finite values, identity. Longer than
// other files: a case for each refusal.
#include "models/mmrec/mmrec.h"

#include "models/files/checkpoint.h"
#include "models/files/elements.h"
#include "models/mmrec/config.h"
#include "models/weights/stored_matrix.h"
#include "tests/support/compare.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

namespace fs = std::filesystem;
using kernels::DType;
using test::EditableCheckpoint;
using test::error_of;
using test::expect_says;
using test::SafetensorsReader;
using test::TempFolder;

fs::path fixture(const std::string& name) { return test::folder_of("upstream/" + name); }

HostWeights load(const fs::path& folder, const WeightOptions& options = {}, const WarningSink& warn = {}) {
  return load_weights(Checkpoint::open(folder), test::config_of<Config>(folder), options, warn);
}

std::vector<float> values(const HostMatrix& matrix, std::int64_t first_row, std::int64_t rows) {
  std::vector<float> out(static_cast<std::size_t>(rows * matrix.cols));
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = element(matrix.bytes.data(), static_cast<std::size_t>(first_row * matrix.cols) + i, matrix.format.code);
  }
  return out;
}
std::vector<float> values(const HostMatrix& matrix) { return values(matrix, 0, matrix.rows); }
std::vector<float> values(const HostVector& vector) { return {vector.data(), vector.data() + vector.size()}; }

std::vector<float> part_of(const std::vector<float>& from, std::int64_t begin, std::int64_t count) {
  return {from.begin() + begin, from.begin() + begin + count};
}
/// Columns [first, first + count) of a matrix with `cols` columns.
std::vector<float> columns(const std::vector<float>& from, std::int64_t cols, std::int64_t first, std::int64_t count) {
  return test::columns_of(from, cols, std::ssize(from) / cols, first, count);
}

struct Edited : test::EditedFolder {
  explicit Edited(const std::string& name) : EditedFolder(fixture(name)) {}
  HostWeights load(const WeightOptions& options = {}, const WarningSink& warn = {}) const {
    return models::load(written(), options, warn);
  }
  std::string refusal() const {
    std::string message = error_of([&] { load(); });
    expect_says(message, {"model.safetensors"});
    return message;
  }
};

/// Compares what was loaded from a fixture with its tensors.
void expect_layout(const std::string& name, const HostWeights& weights, const Config& config) {
  const SafetensorsReader file(fixture(name) / "model.safetensors");
  const auto of = [&](const std::string& tensor) { return file.at(tensor).values; };
  const std::int64_t d = config.model_dim;
  EXPECT_EQ(values(weights.embedding), of("embedding.weight"));
  EXPECT_EQ(values(weights.norm), of("norm.weight"));
  ASSERT_EQ(weights.layers.size(), static_cast<std::size_t>(config.num_layers));
  for (std::size_t i = 0; i < weights.layers.size(); ++i) {
    SCOPED_TRACE(name + " block " + std::to_string(i));
    const std::string p = "blocks." + std::to_string(i) + ".";
    const auto& w = weights.layers[i];
    const int stacked = config.use_dpg ? 3 : 4;
    EXPECT_EQ(w.qvzk.rows, stacked * d);
    EXPECT_EQ(w.qvzk.cols, d);
    EXPECT_EQ(w.qvzk_bias.size(), static_cast<std::size_t>(stacked * d));
    const char* order[] = {"q", "v", "z", "k"};
    const int fused_row[] = {0, 2, 3, 1};
    for (int j = 0; j < stacked; ++j) {
      if (config.use_hem) {
        EXPECT_EQ(values(w.qvzk, j * d, d), part_of(of(p + "W_fused.weight"), fused_row[j] * d * d, d * d)) << j;
        EXPECT_EQ(part_of(values(w.qvzk_bias), j * d, d), part_of(of(p + "W_fused.bias"), fused_row[j] * d, d)) << j;
      } else {
        EXPECT_EQ(values(w.qvzk, j * d, d), of(p + "W_" + order[j] + ".weight")) << j;
        EXPECT_EQ(part_of(values(w.qvzk_bias), j * d, d), of(p + "W_" + order[j] + ".bias")) << j;
      }
    }
    EXPECT_EQ(values(w.gate, 0, d), of(p + "W_g.weight"));
    EXPECT_EQ(values(w.gate, d, d), columns(of(p + "mdi.W_g.weight"), 2 * d, d, d));
    EXPECT_EQ(w.gate.rows, 2 * d);
    EXPECT_EQ(values(w.gate_z), columns(of(p + "mdi.W_g.weight"), 2 * d, 0, d));
    EXPECT_EQ(values(w.gate_bias), of(p + "W_g.bias"));
    EXPECT_EQ(values(w.gate_z_bias), of(p + "mdi.W_g.bias"));
    const auto expect_dense = [&](const HostMatrix& matrix, const HostVector& bias, const std::string& tensor) {
      EXPECT_EQ(values(matrix), of(p + tensor + ".weight"));
      EXPECT_EQ(values(bias), of(p + tensor + ".bias"));
    };
    expect_dense(w.gamma_in, w.gamma_in_bias, config.use_dpg ? "W_gamma_down" : "mdi.W_gamma.0");
    expect_dense(w.gamma_up, w.gamma_up_bias, config.use_dpg ? "W_gamma_up" : "mdi.W_gamma.2");
    if (config.use_dpg) {
      EXPECT_EQ(w.context_in.rows, 0);
      EXPECT_EQ(w.context_up_bias.size(), 0U);
    } else {
      expect_dense(w.context_in, w.context_in_bias, "mdi.W_context.0");
      expect_dense(w.context_up, w.context_up_bias, "mdi.W_context.2");
    }
    expect_dense(w.memory_q, w.memory_q_bias, "multi_mem_attention.W_q");
    expect_dense(w.memory_out, w.memory_out_bias, "multi_mem_attention.W_o");
    expect_dense(w.ffn_in, w.ffn_in_bias, "ffn.0");
    expect_dense(w.ffn_out, w.ffn_out_bias, "ffn.3");
    EXPECT_EQ(values(w.norm1), of(p + "norm1.weight"));
    EXPECT_EQ(values(w.norm2), of(p + "norm2.weight"));
  }
}

TEST(Weights, FixturesHaveTheDocumentedLayout) {
  for (const std::string name : {"mdi", "dpg", "hem", "segments"}) {
    const Config config = test::config_of<Config>(fixture(name));
    for (const int threads : {1, 4}) {
      expect_layout(name, load(fixture(name), {.threads = threads}), config);
    }
  }
}

TEST(Weights, TiedHeadIsNotKeptTwice) {
  const HostWeights weights = load(fixture("mdi"));
  EXPECT_EQ(weights.head.rows, 0);
  EXPECT_EQ(view_of(weights).head.data, weights.embedding.bytes.data());
  Edited without("mdi");
  without.checkpoint.erase("lm_head.weight");
  const HostWeights same = without.load();
  EXPECT_EQ(same.head.rows, 0);
  EXPECT_EQ(same.fingerprint, weights.fingerprint);
  EXPECT_EQ(same.bytes, weights.bytes);
}

TEST(Weights, HeadOfItsOwnIsKept) {
  Edited edited("mdi");
  auto& head = edited.checkpoint.at("lm_head.weight");
  head.set(16383, head.at(16383) + 1);  // the last element
  const HostWeights weights = edited.load();
  const HostWeights tied = load(fixture("mdi"));
  EXPECT_EQ(weights.head.rows, 256);
  EXPECT_EQ(values(weights.head).back(), head.at(16383));
  EXPECT_EQ(weights.bytes, tied.bytes + 65536);
  EXPECT_EQ(weights.parameters, tied.parameters + 16384);
  EXPECT_NE(weights.fingerprint, tied.fingerprint);
}

TEST(Weights, CountsBytesAndParameters) {
  const HostWeights weights = load(fixture("segments"));
  std::uint64_t parameters = 0;
  for (const TensorSpec& spec : tensor_specs(test::config_of<Config>(fixture("segments")))) {
    std::uint64_t elements = 1;
    for (const std::int64_t extent : spec.shape) elements *= static_cast<std::uint64_t>(extent);
    if (spec.use == TensorSpec::Use::kRequired) parameters += elements;
  }
  EXPECT_EQ(weights.parameters, parameters);
  EXPECT_EQ(weights.bytes, 4 * parameters);
}

TEST(Weights, EveryTensorMustBeThereAndFit) {
  for (const std::string name : {"mdi", "dpg", "hem"}) {
    for (const TensorSpec& spec : tensor_specs(test::config_of<Config>(fixture(name)))) {
      Edited edited(name);
      edited.checkpoint.at(spec.name).shape.push_back(1);  // the same bytes in another shape
      expect_says(edited.refusal(), {spec.name, "found shape [", ", 1], expected ["});
      edited.checkpoint.erase(spec.name);
      if (spec.use == TensorSpec::Use::kRequired) expect_says(edited.refusal(), {spec.name, "missing"});
    }
  }
}

TEST(Weights, DpgNeedsNoneOfTheTensorsItDoesNotUse) {
  Edited edited("dpg");
  std::erase_if(edited.checkpoint.tensors, [](const auto& tensor) {
    return tensor.name.find("W_k.") != std::string::npos || tensor.name.find("mdi.W_gamma") != std::string::npos ||
           tensor.name.find("mdi.W_context") != std::string::npos;
  });
  EXPECT_EQ(edited.load().fingerprint, load(fixture("dpg")).fingerprint);
}

TEST(Weights, ExtraTensor) {
  for (const char* name :
       {"extra", "blocks.2.W_g.bias", "blocks.0.W_g.bias2", "blocks.00.W_g.bias", "model.norm.weight"}) {
    Edited edited("mdi");
    edited.checkpoint.add_zeros(name, {64});
    expect_says(edited.refusal(), {name, "unexpected tensor", "F32 [64]"});
  }
}

TEST(Weights, TrainingOnlyTensorsAreIgnoredAndReported) {
  Edited edited("mdi");
  edited.checkpoint.add_zeros("blocks.0.mdi.W_planning_gate.weight", {3, 5});
  edited.checkpoint.add_zeros("blocks.1.mdi.W_planning_error.bias", {7});
  std::vector<std::string> warnings;
  const HostWeights weights = edited.load({}, [&](std::string_view line) { warnings.emplace_back(line); });
  ASSERT_EQ(warnings.size(), 1U);
  expect_says(warnings[0], {"2 tensors", "W_planning_"});
  EXPECT_EQ(weights.fingerprint, load(fixture("mdi")).fingerprint);
}

TEST(Weights, ConfigurationOfAnotherVariant) {
  const auto config = [](const char* more) {
    return std::string(R"({"model_type":"mmrec","vocab_size":256,"model_dim":64,"num_heads":4,)") + more + "}";
  };
  Edited edited("mdi");
  edited.config(config(R"("num_layers":3)"));
  expect_says(edited.refusal(), {"blocks.2.", "missing", "num_layers 3"});
  edited.config(config(R"("num_layers":1)"));
  expect_says(edited.refusal(), {"blocks.1.", "unexpected", "num_layers 1"});
  edited.config(config(R"("num_layers":2,"use_hem":true)"));
  expect_says(edited.refusal(), {"W_fused", "missing", "use_hem true"});
  edited.config(config(R"("num_layers":2,"use_dpg":true)"));
  expect_says(edited.refusal(), {"W_gamma_down", "missing", "use_dpg true"});
  edited.config(R"({"model_type":"mmrec","vocab_size":255,"model_dim":64,"num_layers":2,"num_heads":4})");
  expect_says(edited.refusal(), {"embedding.weight", "found shape [256, 64], expected [255, 64]"});
  Edited dpg("dpg");
  dpg.config(config(R"("num_layers":2)"));
  expect_says(dpg.refusal(), {"W_gamma_down", "unexpected", "use_dpg false"});
}

TEST(Weights, FusedProjectionMayHaveMoreRowsButNotFewer) {
  Edited edited("hem");
  auto& fused = edited.checkpoint.at("blocks.0.W_fused.weight");
  auto& bias = edited.checkpoint.at("blocks.0.W_fused.bias");
  fused.shape[0] = bias.shape[0] = 192;
  fused.bytes.resize(36864);  // 192 * 48 * 4
  bias.bytes.resize(768);
  EXPECT_EQ(values(edited.load().layers[0].qvzk), values(load(fixture("hem")).layers[0].qvzk));
  fused.shape[0] = 191;
  fused.bytes.resize(36672);
  expect_says(edited.refusal(), {"blocks.0.W_fused.weight", "[191, 48]", "[192, 48] or more rows"});
}

TEST(Weights, StacksOfOneTypeKeepItAndMixedOnesWiden) {
  Edited edited("segments");
  for (const char* part : {"W_q", "W_v", "W_z", "W_k"}) {
    edited.checkpoint.at("blocks.0." + std::string(part) + ".weight").narrow<kernels::BFloat16>();
  }
  edited.checkpoint.at("blocks.0.W_g.weight").narrow<kernels::Float16>();
  edited.checkpoint.at("blocks.0.W_g.bias").narrow<kernels::Float16>();
  edited.checkpoint.at("blocks.1.mdi.W_g.weight").narrow<kernels::BFloat16>();
  const HostWeights weights = edited.load();
  const SafetensorsReader file(edited / "model.safetensors");
  const auto of = [&](const std::string& tensor) { return file.at(tensor).values; };

  EXPECT_EQ(weights.layers[0].qvzk.format, DType::kBF16);
  EXPECT_EQ(values(weights.layers[0].qvzk, 32, 32), of("blocks.0.W_v.weight"));
  EXPECT_EQ(weights.layers[1].qvzk.format, DType::kF32);
  EXPECT_EQ(weights.layers[0].gate.format, DType::kF32);  // F16 above F32
  EXPECT_EQ(values(weights.layers[0].gate, 0, 32), of("blocks.0.W_g.weight"));
  EXPECT_EQ(values(weights.layers[0].gate, 32, 32), columns(of("blocks.0.mdi.W_g.weight"), 64, 32, 32));
  EXPECT_EQ(values(weights.layers[0].gate_bias), of("blocks.0.W_g.bias"));
  EXPECT_EQ(weights.layers[1].gate.format, DType::kF32);  // F32 above BF16
  EXPECT_EQ(weights.layers[1].gate_z.format, DType::kBF16);
  EXPECT_EQ(values(weights.layers[1].gate, 32, 32), columns(of("blocks.1.mdi.W_g.weight"), 64, 32, 32));
  EXPECT_EQ(values(weights.layers[1].gate_z), columns(of("blocks.1.mdi.W_g.weight"), 64, 0, 32));
}

TEST(Weights, NonFiniteValuesAreNamed) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  struct Case {
    const char* tensor;
    std::size_t element;
    float value;
    std::string_view narrowed = {};
  };
  for (const Case& c :
       {Case{"embedding.weight", 0, nan}, Case{"embedding.weight", 16383, -infinity},
        Case{"blocks.1.mdi.W_g.weight", 8191, infinity}, Case{"blocks.0.norm1.weight", 63, nan},
        Case{"blocks.1.ffn.3.bias", 5, -nan}, Case{"norm.weight", 1, infinity}, Case{"lm_head.weight", 7, infinity},
        Case{"blocks.0.W_q.weight", 9, 1e30F, "F16"}, Case{"blocks.0.W_q.bias", 9, nan, "BF16"}}) {
    Edited edited("mdi");
    if (std::string_view(c.tensor) == "embedding.weight") edited.checkpoint.erase("lm_head.weight");
    test::EditableTensor& tensor = edited.checkpoint.at(c.tensor);
    tensor.set(c.element, c.value);
    if (c.narrowed == "F16") tensor.narrow<kernels::Float16>();  // in which 1e30 is infinite
    if (c.narrowed == "BF16") tensor.narrow<kernels::BFloat16>();
    expect_says(edited.refusal(),
                {c.tensor, "element " + std::to_string(c.element) + " is", std::isnan(c.value) ? "NaN" : "infinite"});
    EXPECT_NO_THROW(edited.load({.allow_nonfinite = true}));
  }
}

TEST(Weights, UnusedRowsOfAFusedProjectionAreNotScanned) {
  Edited edited("hem");
  edited.checkpoint.at("blocks.0.W_fused.weight").set(9216, std::numeric_limits<float>::quiet_NaN());
  EXPECT_NO_THROW(edited.load());
  edited.checkpoint.at("blocks.0.W_fused.weight").set(9215, std::numeric_limits<float>::quiet_NaN());
  expect_says(edited.refusal(), {"W_fused.weight", "element 9215 is NaN"});
}

TEST(Weights, TheErrorDoesNotDependOnTheThreads) {
  Edited edited("mdi");
  for (auto& tensor : edited.checkpoint.tensors) {
    if (tensor.name != "embedding.weight") tensor.set(0, std::numeric_limits<float>::quiet_NaN());
  }
  for (int i = 0; i < 20; ++i) {
    expect_says(error_of([&] { edited.load({.threads = 1 + i % 8}); }), {"blocks.0.W_q.weight: element 0 is NaN"});
  }
}

TEST(Weights, FileThatShrinksAfterItsHeaderWasRead) {
  Edited edited("mdi");
  const Checkpoint checkpoint = Checkpoint::open(edited.written());
  fs::resize_file(edited / "model.safetensors", 20'000);
  const Config config = test::config_of<Config>(edited.path());
  expect_says(error_of([&] { load_weights(checkpoint, config); }), {"model.safetensors", "became shorter"});
}

TEST(Weights, MoreMemoryThanTheMachineHasIsRefusedBeforeAnyIsTaken) {
  const TempFolder folder;
  Config config;
  config.vocab_size = std::int64_t{1} << 24;
  config.model_dim = std::int64_t{1} << 16;
  config.num_layers = 1;
  config.num_heads = 1;
  config.ffn_dim = 4;
  std::string header = "{";
  std::uint64_t end = 0;
  for (const TensorSpec& spec : tensor_specs(config)) {
    if (spec.use != TensorSpec::Use::kRequired) continue;
    std::uint64_t bytes = 2;
    std::string shape;
    for (const std::int64_t extent : spec.shape) {
      bytes *= static_cast<std::uint64_t>(extent);
      shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    }
    header += (end == 0 ? "\"" : ",\"") + spec.name + R"(":{"dtype":"BF16","shape":[)" + shape +
              R"(],"data_offsets":[)" + std::to_string(end) + "," + std::to_string(end + bytes) + "]}";
    end += bytes;
  }
  const std::string file = test::safetensors_bytes(header + "}");
  test::write_file(folder / "model.safetensors", file);
  std::error_code error;
  fs::resize_file(folder / "model.safetensors", file.size() + end, error);
  if (error) GTEST_SKIP() << "the file system has no sparse file of " << end << " bytes";
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  expect_says(error_of<std::bad_alloc>([&] { load_weights(checkpoint, config); }),
              {"model.safetensors: not enough memory for the weights", "needed ", "available"});
}

TEST(Weights, AProductTakesNoFormatItDoesNotLoad) {
  const std::uint16_t numbers[6] = {};
  const kernels::WeightView<kernels::Host> matrix{numbers, DType::kBF16, 2, 3};
  EXPECT_EQ(bytes_of(matrix.format, matrix.rows, matrix.cols), sizeof(numbers));
  EXPECT_EQ(matrix.as<kernels::BFloat16>(), static_cast<const void*>(numbers));
  EXPECT_EQ(matrix.middle_rows(1, 1).data, numbers + 3);
  expect_says(error_of<std::invalid_argument>([&] { matrix.as<float>(); }), {"weights: found bf16, expected fp32"});
  EXPECT_EQ(kernels::WeightView<kernels::Host>().as<kernels::Float16>(), nullptr);  // what a model has not
}

TEST(Weights, AWordOfFewInputsIsWhatTheSchemesSay) {
  const TempFolder folder;
  EditableCheckpoint file;
  file.tensors.push_back({{"m.weight_packed", "I32", {2, 1}, std::string(8, '\0')}});
  file.tensors.push_back({{"m.weight_scale", "F32", {2, 1}, std::string(8, '\0')}});
  file.tensors.push_back({{"m.weight_shape", "I64", {2}, std::string("\2\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0", 16)}});
  file.write(folder / "model.safetensors");
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  const auto code_by = [&](const QuantSchemes& schemes) {
    return find_matrix(checkpoint, "m.weight", schemes).format.code;
  };
  EXPECT_EQ(code_by({{DType::kI4}}), DType::kI4);
  EXPECT_EQ(code_by({{DType::kI8}}), DType::kI8);
  EXPECT_EQ(code_by({{DType::kI4}, {DType::kI8}}), DType::kI8);
}

TEST(Weights, FingerprintIgnoresShardingAndTokenIds) {
  const TempFolder one;
  const TempFolder many;
  Config config = test::config_of<Config>(fixture("segments"));
  write_synthetic_model(one.path(), config, DType::kF32, 3);
  config.ids.bos = 1;
  config.ids.eos = {2};
  test::write_file(many / "config.json", to_json(config));
  test::write_shards(one.path(), many.path());
  EXPECT_EQ(load(one.path()).fingerprint, load(many.path()).fingerprint);
}

TEST(Weights, FingerprintSeesANumberOfTheConfiguration) {
  Edited mix("segments");
  std::string text = test::read_file(mix / "config.json");
  text.insert(text.find('{') + 1, "\"mdi_mix\": 0.2,");
  mix.config(text);
  EXPECT_NE(mix.load().fingerprint, load(fixture("segments")).fingerprint);
}

}  // namespace
}  // namespace mmrec::models
