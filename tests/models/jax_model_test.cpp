// mmrec-jax's folders: tensors in either of their two forms and transposed, and every refusal.
#include "models/architecture.h"
#include "models/mmrec_jax/mmrec_jax.h"

#include "models/mmrec_jax/config.h"
#include "models/weights/synthetic.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

namespace fs = std::filesystem;
using test::EditableCheckpoint;
using test::error_of;
using test::expect_says;
using test::TempFolder;

fs::path fixture() { return test::folder_of("upstream/jax"); }

struct Edited : test::EditedFolder {
  Edited() : EditedFolder(fixture()) {}
  mmrec_jax::HostWeights load(const WarningSink& warn = {}) const {
    return load_weights(Checkpoint::open(written()), test::config_of<mmrec_jax::Config>(path()), {}, warn);
  }
};

std::vector<float> values(const HostMatrix& matrix) {
  const auto* first = reinterpret_cast<const float*>(matrix.bytes.data());
  return {first, first + matrix.rows * matrix.cols};
}
std::vector<float> transposed(const std::vector<float>& from, std::int64_t rows, std::int64_t cols) {
  std::vector<float> to(from.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      to[static_cast<std::size_t>(c * rows + r)] = from[static_cast<std::size_t>(r * cols + c)];
    }
  }
  return to;
}

TEST(JaxWeights, KernelsAreTransposed) {
  const test::SafetensorsReader file(fixture() / "model.safetensors");
  const Edited folder;
  std::vector<std::string> warnings;
  const mmrec_jax::HostWeights weights = folder.load([&](std::string_view line) { warnings.emplace_back(line); });
  ASSERT_EQ(warnings.size(), 1U);
  expect_says(warnings[0], {"W_planning_*", "12 tensors"});
  const auto expect = [&](const std::string& name, const HostMatrix& matrix, std::int64_t in, std::int64_t out) {
    EXPECT_EQ(matrix.rows, out) << name;
    EXPECT_EQ(matrix.cols, in) << name;
    EXPECT_EQ(values(matrix), transposed(file.at(name).values, in, out)) << name;
  };
  const auto& layer = weights.layers[1];
  expect("block_1.W_fused.kernel", layer.qkvz, 32, 128);
  expect("block_1.W_g_h.kernel", layer.gate_h, 32, 32);
  expect("block_1.W_gamma_1.kernel", layer.gamma_in, 32, 8);
  expect("block_1.W_gamma_context_2.kernel", layer.context_up, 8, 32);
  expect("block_1.attn.out_proj.kernel", layer.attended, 32, 32);
  expect("block_1.ffn_dense2.kernel", layer.ffn_out, 128, 32);
  EXPECT_EQ(values(weights.embedding), file.at("shared_embed.embedding").values);
  const std::vector<float>& scale = file.at("block_1.norm_recurrence.scale").values;
  EXPECT_TRUE(std::equal(scale.begin(), scale.end(), layer.norm_recurrence.data()));
}

TEST(JaxWeights, FourProjectionsAreAsGoodAsOne) {
  const Edited fused;
  Edited split;
  for (int layer = 0; layer < 3; ++layer) {
    const std::string prefix = "block_" + std::to_string(layer) + ".W_";
    const test::EditableTensor kernel = split.checkpoint.at(prefix + "fused.kernel");
    const test::EditableTensor bias = split.checkpoint.at(prefix + "fused.bias");
    for (std::size_t part = 0; part < 4; ++part) {
      const std::string name = prefix + "qkvz"[part];
      split.checkpoint.add_zeros(name + ".kernel", {32, 32});
      split.checkpoint.add_zeros(name + ".bias", {32});
      for (std::size_t c = 0; c < 32; ++c) {
        for (std::size_t r = 0; r < 32; ++r) {
          split.checkpoint.at(name + ".kernel").set(r * 32 + c, kernel.at(r * 128 + part * 32 + c));
        }
        split.checkpoint.at(name + ".bias").set(c, bias.at(part * 32 + c));
      }
    }
    split.checkpoint.erase(prefix + "fused.kernel");
    split.checkpoint.erase(prefix + "fused.bias");
  }
  const mmrec_jax::HostWeights one = fused.load(), four = split.load();
  for (std::size_t layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(values(one.layers[layer].qkvz), values(four.layers[layer].qkvz));
    EXPECT_TRUE(std::equal(one.layers[layer].qkvz_bias.data(), one.layers[layer].qkvz_bias.data() + 128,
                           four.layers[layer].qkvz_bias.data()));
  }
  EXPECT_EQ(one.parameters, four.parameters);
}

TEST(JaxWeights, TypesThatDisagreeAreWidened) {
  Edited folder;
  test::EditableTensor& tensor = folder.checkpoint.at("block_0.W_g_z.kernel");
  const std::vector<float> before = values(folder.load().layers[0].gate_z);
  tensor.narrow<kernels::BFloat16>();
  const mmrec_jax::HostWeights weights = folder.load();
  const HostMatrix& matrix = weights.layers[0].gate_z;
  EXPECT_EQ(matrix.format, kernels::DType::kBF16);
  for (std::size_t i = 0; i < before.size(); ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, matrix.bytes.data() + 2 * i, 2);
    EXPECT_EQ(bits, kernels::from_float<kernels::BFloat16>(before[i]).bits) << i;
  }
  EXPECT_EQ(common_dtype(weights), kernels::DType::kF32);
}

TEST(JaxWeights, EveryMismatchIsRefusedByName) {
  struct Mismatch {
    void (*edit)(EditableCheckpoint& checkpoint);
    std::initializer_list<std::string_view> says;
  };
  const Mismatch mismatches[] = {
      {[](auto& c) { c.erase("block_1.norm_recurrence.scale"); },
       {"block_1.norm_recurrence.scale", "missing", "norm", "not supported"}},
      {[](auto& c) { c.erase("block_2.W_fused.kernel"); }, {"block_2.W_fused.kernel", "missing"}},
      {[](auto& c) {
         c.at("block_0.ffn_dense1.kernel").shape = {128, 32};
       },
       {"block_0.ffn_dense1.kernel", "[128, 32]", "[32, 128]"}},
      {[](auto& c) {
         c.add_zeros("block_0.moe_ffn.expert_w1", {8, 32, 128});
       },
       {"block_0.moe_ffn.expert_w1", "unexpected", "mixture of experts"}},
      {[](auto& c) { c.add_zeros("block_3.norm1.scale", {32}); },
       {"block_3.norm1.scale", "unexpected", "num_layers 3"}},
      {[](auto& c) { c.at("block_0.W_g_h.kernel").set(37, std::nanf("")); },
       {"block_0.W_g_h.kernel", "element 37", "NaN"}}};
  for (const Mismatch& mismatch : mismatches) {
    Edited folder;
    mismatch.edit(folder.checkpoint);
    expect_says(error_of([&] { folder.load(); }), mismatch.says);
  }
}

TEST(JaxModel, OptionsOverruleTheFolderAndItsFingerprintKnowsTheBankAlone) {
  const auto load = [](const VariantOptions& variant) { return load_model(fixture(), variant, {}); };
  const auto plain = load({});
  EXPECT_EQ(plain->info().architecture, "mmrec-jax");
  EXPECT_EQ(plain->info().variant.calls, Calls::kPrompt);
  EXPECT_EQ(plain->info().variant.bank, true);
  EXPECT_EQ(plain->state().parts.front().name, "bank");
  const auto stepwise = load({.calls = Calls::kStepwise});
  EXPECT_EQ(stepwise->info().variant.calls, Calls::kStepwise);
  EXPECT_EQ(stepwise->info().fingerprint, plain->info().fingerprint);
  const auto without = load({.bank = false});
  EXPECT_NE(without->info().fingerprint, plain->info().fingerprint);
  EXPECT_EQ(without->state().parts.front().name, "h");
}

TEST(JaxModel, SyntheticOnesHaveFourTimesTheirWidth) {
  const TempFolder folder;
  write_synthetic_folder(folder.path(),
                         synthetic_model("mmrec-jax", {.dim = 64, .layers = 2, .vocab = 100, .ffn = 256}),
                         kernels::DType::kBF16, 3);
  EXPECT_GT(product_counts(folder.path()).per_token, 2 * 15 * 64 * 64);
  expect_says(error_of<std::invalid_argument>(
                  [] { synthetic_model("mmrec-jax", {.dim = 64, .layers = 2, .vocab = 100, .ffn = 128}); }),
              {"ffn", "128", "256"});
}

}  // namespace
}  // namespace mmrec::models
