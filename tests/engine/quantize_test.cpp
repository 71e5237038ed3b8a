// Quantised model folders: the numbers against a reading of the files in float64 by the test's own rules, their layout
// bit by bit, what stays, and what is refused.
#include "mmrec/quantize.h"

#include <nlohmann/json.hpp>

#include "kernels/tensor.h"
#include "mmrec/errors.h"
#include "models/mmrec/mmrec.h"
#include "tests/support/model_folder.h"
#include "tests/support/quantized_reader.h"
#include "tests/support/refusal.h"

namespace mmrec::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

const fs::path kTinyFolder = folder_of("tiny"), kUpstreamFolder = folder_of("upstream");

/// A model in bf16, in two shards, with every other file of a model's folder.
const fs::path& stored_folder() {
  static const TempFolder folder;
  if (!fs::exists(folder / "config.json")) {
    const TempFolder whole;
    models::write_synthetic_model(whole.path(),
                                  models::Mmrec::synthetic({.dim = 128, .layers = 2, .vocab = 300, .ffn = 256}),
                                  kernels::DType::kBF16, 1);
    write_shards(whole.path(), folder.path());
    fs::copy(whole / "config.json", folder / "config.json");
    for (const auto& entry : fs::directory_iterator(kTinyFolder)) {
      const fs::path name = entry.path().filename();
      if (name.string().starts_with("token") || name.string().starts_with("gen"))
        fs::copy(entry.path(), folder / name.string());
    }
  }
  return folder.path();
}

/// Of a matrix; and of the same with the scales that put each group's largest weight on the largest number.
struct Errors {
  double found = 0.0, of_largest = 0.0;
};

/// Each number is the nearest one for its scale, and each scale is at least as good as the one that puts the largest
/// weight on the largest number. Returns the relative errors.
Errors expect_well_rounded(const RawTensor& weights, const QuantizedReading& read, QuantizedType type) {
  Errors errors;
  double squares = 0.0;
  for (std::int64_t r = 0; r < read.rows; ++r) {
    for (std::int64_t first = 0; first < read.cols; first += read.group) {
      const double scale = read.scale(r, first);
      EXPECT_GT(scale, 0.0);
      double largest = 0.0;
      double found = 0.0;
      std::vector<double> group;
      for (std::int64_t c = first; c < first + read.group; ++c) {
        const auto i = static_cast<std::size_t>(r * read.cols + c);
        const double weight = plain(weights, i);
        const double best = nearest(weight / scale, type);
        const double difference = weight - read.numbers[i] * scale;
        EXPECT_LE(std::fabs(difference), std::fabs(weight - best * scale) + 1e-6 * std::fabs(weight))
            << weights.name << " " << r << " " << c;
        found += difference * difference;
        largest = std::max(largest, std::fabs(weight));
        group.push_back(weight);
        squares += weight * weight;
      }
      errors.found += found;
      if (largest == 0.0) {
        EXPECT_EQ(scale, 1.0);
        continue;
      }
      const auto plain_scale = static_cast<double>(
          kernels::to_float(kernels::from_float<kernels::BFloat16>(static_cast<float>(largest / read.largest))));
      double plain_error = 0.0;
      for (const double weight : group) {
        const double difference = weight - nearest(weight / plain_scale, type) * plain_scale;
        plain_error += difference * difference;
      }
      errors.of_largest += plain_error;
      EXPECT_LE(found, plain_error * (1.0 + 1e-5)) << weights.name << " " << r << " " << first;
    }
  }
  return {std::sqrt(errors.found / squares), std::sqrt(errors.of_largest / squares)};
}

/// A folder with a checkpoint that a test makes up.
struct Made : EditedFolder {
  explicit Made(std::vector<EditableTensor> tensors) : EditedFolder(kTinyFolder) {
    checkpoint.tensors = std::move(tensors);
    written();
    config(R"({"model_type": "mmrec"})");
  }
};

EditableTensor matrix(std::string name, std::vector<std::int64_t> shape, const std::vector<float>& values) {
  std::string bytes(values.size() * sizeof(float), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return {{std::move(name), "F32", std::move(shape), std::move(bytes)}};
}

/// Normally distributed weights, of which a few are far larger.
EditableTensor random_matrix(std::string name, std::int64_t rows, std::int64_t cols) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0F, 0.05F);
  std::vector<float> values(static_cast<std::size_t>(rows * cols));
  for (float& value : values) value = normal(random) * (random() % 50 == 0 ? 6.0F : 1.0F);
  return matrix(std::move(name), {rows, cols}, values);
}

QuantizedModel quantized(const fs::path& from, const fs::path& to, QuantizeOptions options) {
  QuantizedModel model = quantize_model(from, to, options);
  EXPECT_TRUE(model.complete);
  return model;
}

class Quantized : public testing::TestWithParam<QuantizedType> {};
INSTANTIATE_TEST_SUITE_P(Types, Quantized,
                         testing::Values(QuantizedType::kInt8, QuantizedType::kInt4, QuantizedType::kFp8),
                         [](const auto& type) { return std::string(to_string(type.param)); });

TEST_P(Quantized, NumbersAreTheNearestAndScalesNoWorseThanThatOfTheLargest) {
  EditableTensor zeros = random_matrix("blocks.0.W_v.weight", 3, 128);
  std::fill_n(zeros.bytes.begin(), 128 * 4, '\0');  // a row
  const Made made({random_matrix("blocks.0.W_q.weight", 5, 256), zeros, random_matrix("blocks.0.W_g.weight", 3, 7),
                   random_matrix("blocks.0.ffn.0.weight", 2, 130)});
  const TempFolder out;
  for (const fs::path& from : {made.path(), kTinyFolder, kUpstreamFolder / "mmrec100m", kUpstreamFolder / "hem"}) {
    const fs::path to = out / from.filename().string();
    const QuantizedModel model = quantized(from, to, {.type = GetParam()});
    const Tensors before = tensors_of(from);
    const Tensors after = tensors_of(to);
    EXPECT_GE(model.matrices.size(), 4U);
    for (const QuantizedMatrix& of : model.matrices) {
      const QuantizedReading read_back = read_quantized(after, of.name);
      EXPECT_EQ(read_back.rows, of.rows);
      EXPECT_EQ(read_back.cols, of.cols);
      EXPECT_EQ(read_back.group, of.group == 0 ? of.cols : of.group);
      const double error = expect_well_rounded(before.at(of.name + ".weight"), read_back, of.type).found;
      EXPECT_NEAR(of.error, error, 1e-4 * error) << of.name;
    }
  }
}

// The search is worth its time.
TEST(QuantizedScales, AreBetterThanThatOfTheLargest) {
  const Made made({random_matrix("blocks.0.W_q.weight", 16, 256)});
  const TempFolder out;
  quantized(made.path(), out / "q", {.type = QuantizedType::kInt4, .group = 128});
  const RawTensor weights = tensors_of(made.path()).at("blocks.0.W_q.weight");
  const QuantizedReading read = read_quantized(tensors_of(out / "q"), "blocks.0.W_q");
  const Errors errors = expect_well_rounded(weights, read, QuantizedType::kInt4);
  EXPECT_LT(errors.found, 0.95 * errors.of_largest);
}

TEST(QuantizedLayout, FourBitsAreForWhatBearsThem) {
  const TempFolder out;
  const auto types = [&](const fs::path& from, const std::string& to, int group) {
    std::map<std::string, std::string> found;
    for (const QuantizedMatrix& of :
         quantized(from, out / to, {.type = QuantizedType::kInt4, .group = group}).matrices) {
      found[of.name] = std::string(to_string(of.type)) + (of.group == 0 ? "" : " g" + std::to_string(of.group));
    }
    return found;
  };
  auto found = types(kUpstreamFolder / "mdi", "mdi", 64);
  for (const char* name : {"W_q", "W_k", "W_v", "W_g", "mdi.W_g", "ffn.0", "ffn.3", "multi_mem_attention.W_o"}) {
    EXPECT_EQ(found.at("blocks.1." + std::string(name)), "int4 g64") << name;
  }
  for (const char* name : {"W_z", "mdi.W_gamma.0", "mdi.W_context.0", "mdi.W_context.2"}) {
    EXPECT_EQ(found.at("blocks.1." + std::string(name)), "int8") << name;
  }
  EXPECT_EQ(found.at("embedding"), "int8");
  const Made made({random_matrix("text_expert.blocks.1.W_q.weight", 2, 192),
                   random_matrix("blocks.1.W_q.weight", 2, 96), random_matrix("lm_head.weight", 2, 192),
                   random_matrix("blocks.12.W_v.weight", 2, 64), random_matrix("blocks.W_q.weight", 2, 64),
                   random_matrix("other.W_q.weight", 2, 64)});
  found = types(made.path(), "made", 64);
  const std::map<std::string, std::string> expected = {{"text_expert.blocks.1.W_q", "int4 g64"},
                                                       {"blocks.1.W_q", "int8"},
                                                       {"lm_head", "int8"},
                                                       {"blocks.12.W_v", "int4 g64"},
                                                       {"blocks.W_q", "int8"},
                                                       {"other.W_q", "int8"}};
  EXPECT_EQ(found, expected);
}

TEST(QuantizedFolder, BytesDoNotDependOnThreads) {
  const Made made({random_matrix("blocks.0.W_q.weight", 700, 256), random_matrix("blocks.0.W_g.weight", 900, 100)});
  const TempFolder out;
  QuantizedModel models[2];
  for (int i = 0; i < 2; ++i) {
    models[i] = quantized(made.path(), out / std::to_string(i), {.type = QuantizedType::kInt4, .threads = 1 + 4 * i});
  }
  for (const char* file : {"model.safetensors", "config.json"}) {
    EXPECT_TRUE(read_file(out / "0" / file) == read_file(out / "1" / file)) << file;
  }
  EXPECT_EQ(models[0].matrices[0].error, models[1].matrices[0].error);
}

TEST(QuantizedFolder, HasAllElseOfTheModelAsItWas) {
  const TempFolder in;
  fs::copy(stored_folder(), in.path(), fs::copy_options::recursive);
  write_file(in / "notes.txt", "no file of a model");
  const TempFolder out;
  const QuantizedModel model =
      quantized(in.path(), out.path(), {.type = QuantizedType::kInt4, .keep = {"*.W_q", "embed*"}});
  std::size_t files = 0;
  for (const auto& entry : fs::directory_iterator(in.path())) {
    const std::string name = entry.path().filename();
    EXPECT_EQ(fs::exists(out / name), name != "notes.txt") << name;
    ++files;
    if (name == "config.json" || name.starts_with("model") || name == "notes.txt") continue;
    EXPECT_TRUE(read_file(out / name) == read_file(entry.path())) << name;
  }
  EXPECT_EQ(static_cast<std::size_t>(std::distance(fs::directory_iterator(out.path()), {})), files - 1);

  Tensors after = tensors_of(out.path());
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : after) bytes += tensor.bytes.size();
  EXPECT_EQ(model.bytes_after, bytes);
  std::size_t copied = 0;
  for (const auto& [name, tensor] : tensors_of(stored_folder())) {
    bytes += tensor.bytes.size();
    const bool is_matrix = tensor.shape.size() == 2;
    if (is_matrix && name.find(".W_q") == std::string::npos && !name.starts_with("embed")) continue;
    EXPECT_EQ(after.at(name).bytes, tensor.bytes) << name;
    EXPECT_EQ(after.at(name).dtype, tensor.dtype) << name;
    EXPECT_EQ(after.at(name).shape, tensor.shape) << name;
    ++copied;
  }
  EXPECT_EQ(model.bytes_before + model.bytes_after, bytes);
  EXPECT_EQ(copied, 2U * 18U + 2U);  // biases, norms and W_q of both kinds; embedding and the last norm

  const auto index_of = [](const fs::path& folder) {
    return Json::parse(read_file(folder / "model.safetensors.index.json"));
  };
  const Json index = index_of(out.path());
  EXPECT_EQ(index["metadata"]["total_size"], model.bytes_after);
  Json found = Json::object();
  for (const char* shard : {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}) {
    for (const RawTensor& tensor : read_safetensors(out / shard)) found[tensor.name] = shard;
  }
  EXPECT_EQ(found.size(), after.size());
  EXPECT_EQ(nlohmann::json(index["weight_map"]), nlohmann::json(found));
  const Json before = index_of(stored_folder());
  for (const auto& [name, shard] : before["weight_map"].items()) {
    EXPECT_EQ(found.contains(name) ? found[name] : found[name + "_packed"], shard) << name;
  }
}

TEST(QuantizedFolder, ConfigSaysHowAndKeepsWhatItSaid) {
  const TempFolder out;
  quantized(stored_folder(), out / "q", {.type = QuantizedType::kInt4, .keep = {"blocks.?.W_q"}});
  const std::string before = read_file(stored_folder() / "config.json");
  const std::string after = read_file(out / "q" / "config.json");
  const std::size_t kept = before.find_last_not_of(" \n}") + 1;
  EXPECT_EQ(after.substr(0, kept), before.substr(0, kept));
  const Json quantization = Json::parse(after).at("quantization_config");
  EXPECT_EQ(std::prev(Json::parse(after).end()).key(), "quantization_config");
  EXPECT_EQ(quantization["quant_method"], "compressed-tensors");
  EXPECT_EQ(quantization["format"], "mixed-precision");
  EXPECT_EQ(quantization["quantization_status"], "compressed");
  EXPECT_EQ(quantization["ignore"].size(), 2U);
  EXPECT_EQ(quantization["ignore"][1], "blocks.1.W_q");
  const Json& groups = quantization["config_groups"];
  ASSERT_EQ(groups.size(), 2U);
  for (const auto& [name, group] : groups.items()) {
    const bool is_int4 = group["weights"]["num_bits"] == 4;
    EXPECT_EQ(group["format"], is_int4 ? "pack-quantized" : "int-quantized");
    EXPECT_EQ(group["weights"]["type"], "int");
    EXPECT_EQ(group["weights"]["strategy"], is_int4 ? "group" : "channel");
    EXPECT_EQ(group["weights"]["group_size"], is_int4 ? Json(64) : Json());
    EXPECT_EQ(group["weights"]["symmetric"], true);
    EXPECT_EQ(group["weights"]["dynamic"], false);
    EXPECT_TRUE(group["input_activations"].is_null());
    EXPECT_EQ(group["targets"].size(), is_int4 ? 16U : 11U);
  }
  quantized(stored_folder(), out / "fp8", {.type = QuantizedType::kFp8});
  const Json fp8 = Json::parse(read_file(out / "fp8" / "config.json")).at("quantization_config");
  EXPECT_EQ(fp8["format"], "mixed-precision");
  for (const auto& [name, group] : fp8["config_groups"].items()) {
    const bool is_embedding = group["targets"] == Json({"embedding"});
    EXPECT_EQ(group["format"], is_embedding ? "int-quantized" : "float-quantized");
    EXPECT_EQ(group["weights"]["type"], is_embedding ? "int" : "float");
  }
  EXPECT_EQ(fp8["config_groups"].size(), 2U);
}

TEST(QuantizedFolder, OfWhatCannotBeQuantisedIsRefusedAndNothingIsLeft) {
  const TempFolder out;
  const fs::path to = out / "q";
  const auto refused = [&](const fs::path& from, std::initializer_list<std::string_view> says) {
    expect_says(file_refusal([&] { quantize_model(from, to); }), says);
    EXPECT_FALSE(fs::exists(to));
  };
  refused(kUpstreamFolder / "jax", {"model.safetensors", "no matrix NAME.weight"});
  const Made vectors({matrix("norm.weight", {4}, {1, 2, 3, 4}), matrix("empty.weight", {0, 4}, {})});
  refused(vectors.path(), {"no matrix NAME.weight"});
  quantize_model(kTinyFolder, to);
  expect_says(file_refusal([&] { quantize_model(to, out / "again"); }), {"config.json: has quantization_config"});
  EXPECT_FALSE(fs::exists(out / "again"));
  fs::remove_all(to);
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    EditableTensor tensor = random_matrix("blocks.0.W_q.weight", 300, 256);
    tensor.set(256 * 256 + 9, bad);
    const Made made({random_matrix("blocks.0.W_g.weight", 2, 2), tensor});
    refused(made.path(), {"model.safetensors", "blocks.0.W_q.weight", "element 65545 is ", "expected finite"});
  }
}

TEST(QuantizedFolder, MustBeNewOrEmpty) {
  const TempFolder out;
  quantized(kTinyFolder, out.path(), {});
  expect_says(refusal([&] { quantize_model(kTinyFolder, out.path()); }), {"expected a new or an empty folder"});
  expect_says(refusal([&] { quantize_model(kTinyFolder, out / "config.json"); }), {"found a file"});
  expect_says(refusal<WriteError>([&] { quantize_model(kTinyFolder, out / "no" / "folder"); }),
              {"cannot create the folder"});
}

TEST(QuantizedFolder, IsNotThereOrEmptyWhenCancelled) {
  const TempFolder out;
  std::uint64_t all = 0;
  for (const fs::path& to : {out / "new", out.path()}) {
    int calls = 0;
    const QuantizedModel model =
        quantize_model(stored_folder(), to, {.on_progress = [&](std::uint64_t done, std::uint64_t total) {
                         EXPECT_GE(total, done);
                         all = total;
                         return 2 * done < total || ++calls > 1;
                       }});
    EXPECT_FALSE(model.complete);
    EXPECT_EQ(calls, 1);
    EXPECT_FALSE(fs::exists(out / "new"));
    EXPECT_TRUE(fs::is_empty(out.path()));
  }
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors_of(stored_folder())) bytes += tensor.bytes.size();
  EXPECT_EQ(all, bytes);
}

TEST(QuantizeOptions, OutOfRangeAreRefused) {
  const TempFolder out;
  const auto refused = [&](const QuantizeOptions& options) {
    return refusal([&] { quantize_model(kTinyFolder, out.path(), options); });
  };
  for (const int group : {0, 32, 96, 65600}) expect_says(refused({.group = group}), {"multiple of 64"});
  expect_says(refused({.threads = -1}), {"threads"});
  expect_says(refused({.keep = {"*.W_q", "W_q"}}), {"keep", "W_q"});
  expect_says(refused({.type = static_cast<QuantizedType>(3)}), {"type"});
  EXPECT_TRUE(fs::is_empty(out.path()));
}

}  // namespace
}  // namespace mmrec::test
