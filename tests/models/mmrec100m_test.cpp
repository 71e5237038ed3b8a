// What a folder of mmrec100m may hold, and what is made of it.

#include "models/mmrec100m/mmrec100m.h"
#include "models/architecture.h"
#include "models/weights/synthetic.h"
#include "tests/models/lockstep.h"
#include "tests/support/host_state.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

using test::error_of;
using test::expect_says;
using test::TempFolder;

class Folder100m : public testing::Test {
 protected:
  static SyntheticModel made() {
    return synthetic_model("mmrec100m", {.dim = 64, .layers = 2, .vocab = 50, .ffn = 128});
  }
  void write(const SyntheticModel& model) const {
    write_synthetic_folder(folder_.path(), model, kernels::DType::kF32, 5);
  }
  std::unique_ptr<LoadedModel> load(const VariantOptions& variant = {}, const WarningSink& warn = {}) const {
    return load_model(folder_.path(), variant, {}, warn);
  }
  std::string refusal(const SyntheticModel& model) const {
    write(model);
    return error_of([&] { load(); });
  }

  TempFolder folder_;
};

TEST_F(Folder100m, EveryTensorMustBeThereAndFit) {
  const SyntheticModel whole = made();
  write(whole);
  EXPECT_NO_THROW(load());
  for (std::size_t i = 0; i < whole.tensors.size(); i += 3) {
    SyntheticModel less = whole;
    less.tensors.erase(less.tensors.begin() + static_cast<std::ptrdiff_t>(i));
    expect_says(refusal(less), {whole.tensors[i].name, "missing"});
    SyntheticModel other = whole;
    other.tensors[i].shape.back() += 1;
    expect_says(refusal(other), {whole.tensors[i].name, "found shape"});
  }
}

TEST_F(Folder100m, OtherTensorsAreNamed) {
  SyntheticModel model = made();
  model.tensors.push_back({.name = "text_expert.blocks.0.mdi.W_planning_a.weight", .shape = {2}});
  write(model);
  std::vector<std::string> warnings;
  load({}, [&](std::string_view line) { warnings.emplace_back(line); });
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("1 tensors that only training uses"), std::string::npos);
  model.tensors.back().name = "fusion.gate.weight";
  expect_says(refusal(model), {"fusion.gate.weight", "unexpected tensor", "concatenate"});
  model.tensors.back().name = "code_expert.blocks.2.W_q.weight";
  expect_says(refusal(model), {"code_expert.blocks.2.W_q.weight", "num_layers 2"});
}

TEST_F(Folder100m, AnExpertThatDoesNotRunTakesNoMemory) {
  write(made());
  const auto both = load(), text = load({.expert = Expert::kText}), code = load({.expert = Expert::kCode});
  EXPECT_EQ(both->info().variant.expert, Expert::kBoth);
  EXPECT_EQ(code->info().variant.expert, Expert::kCode);
  EXPECT_EQ(text->info().weight_bytes, code->info().weight_bytes);
  EXPECT_LT(text->info().weight_bytes, both->info().weight_bytes);
  EXPECT_LT(text->info().bytes_per_token, both->info().bytes_per_token);
  EXPECT_NE(text->info().fingerprint, code->info().fingerprint);
  EXPECT_EQ(text->state().parts.size(), 2U);
  EXPECT_EQ(both->state().parts.size(), 3U);
}

TEST(Architectures, RefuseEachOthersOptions) {
  struct Case {
    const char* folder;
    VariantOptions options;
    const char* option;
    const char* architecture;
  };
  for (const Case& c : {Case{"upstream/mmrec100m", {.calls = Calls::kWhole}, "calls", "mmrec100m"},
                        {"upstream/mmrec100m", {.bank = false}, "bank", "mmrec100m"},
                        {"upstream/jax", {.expert = Expert::kText}, "expert", "mmrec-jax"},
                        {"upstream/mdi", {.bank = false}, "bank", "mmrec"},
                        {"tiny", {.expert = Expert::kText}, "expert", "mmrec"}}) {
    expect_says(error_of<std::invalid_argument>([&] { load_model(test::folder_of(c.folder), c.options, {}); }),
                {c.option, c.architecture});
  }
}

TEST(Architectures, UnknownOnesAreNamed) {
  const TempFolder folder;
  test::write_file(folder / "config.json", R"({"model_type":"transformer"})");
  expect_says(error_of([&] { load_model(folder.path(), {}, {}); }),
              {"config.json", "model_type", "\"transformer\"", "\"mmrec\"", "\"mmrec100m\""});
  test::write_file(folder / "config.json", "{}");
  expect_says(error_of([&] { load_model(folder.path(), {}, {}); }), {"model_type is missing"});
  test::write_file(folder / "config.json", R"({"model_type":3})");
  expect_says(error_of([&] { load_model(folder.path(), {}, {}); }),
              {"config.json", "model_type", "found a number, expected a string"});
  EXPECT_THROW(synthetic_model("transformer", {}), std::invalid_argument);
}

// Sums of segments that never end are not part of it.
TEST_F(Folder100m, TheStateIsHOfBothExperts) {
  write(made());
  const auto model = load();
  Lockstep one(model->on_cpu(), model->info().vocab_size, 2);
  one.prefill(std::vector<int>{1, 2, 3, 4, 5, 6});
  const HostState state = one.state();
  ASSERT_EQ(state.parts.size(), 3U);
  EXPECT_EQ(test::tensor_of(state, "text.h").size(), 2U * 2 * 64);
  EXPECT_EQ(test::tensor_of(state, "code.h").size(), 2U * 2 * 64);
  EXPECT_EQ(test::tensor_of(state, "logits").size(), 2U * 50);
  EXPECT_NE(test::tensor_of(state, "text.h"), test::tensor_of(state, "code.h"));
  Lockstep other(model->on_cpu(), model->info().vocab_size, 2);
  other.set_state(state);
  const std::vector<int> next = {7, 8};
  const auto a = one.step(next), b = other.step(next);
  EXPECT_EQ(std::vector<float>(a.begin(), a.end()), std::vector<float>(b.begin(), b.end()));
}

}  // namespace
}  // namespace mmrec::models
