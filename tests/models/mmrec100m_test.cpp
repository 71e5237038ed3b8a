// What a folder of mmrec100m may hold, and what is made of it.

#include "models/mmrec100m/mmrec100m.h"
#include "kernels/cpu/cpu.h"
#include "models/architecture.h"
#include "models/mmrec/stack.h"
#include "models/mmrec100m/config.h"
#include "models/runtime/cpu_executor.h"
#include "models/weights/synthetic.h"
#include "tests/models/lockstep.h"
#include "tests/support/model_folder.h"
#include "tests/support/safetensors_reader.h"

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

TEST_F(Folder100m, OptionsOfOtherArchitecturesAreRefused) {
  write(made());
  expect_says(error_of<std::invalid_argument>([&] { load({.calls = Calls::kWhole}); }), {"calls", "mmrec100m"});
  expect_says(error_of<std::invalid_argument>([&] { load({.bank = false}); }), {"bank", "mmrec100m"});
  expect_says(
      error_of<std::invalid_argument>([&] { load_model(test::folder_of("tiny"), {.expert = Expert::kText}, {}); }),
      {"expert", "mmrec"});
}

TEST(Architectures, UnknownOnesAreNamed) {
  const TempFolder folder;
  test::write_file(folder / "config.json", R"({"model_type":"transformer"})");
  expect_says(error_of([&] { load_model(folder.path(), {}, {}); }),
              {"config.json", "model_type", "\"transformer\"", "\"mmrec\"", "\"mmrec100m\""});
  test::write_file(folder / "config.json", "{}");
  expect_says(error_of([&] { load_model(folder.path(), {}, {}); }), {"model_type is missing"});
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
  EXPECT_EQ(state.get("text.h").size(), 2U * 2 * 64);
  EXPECT_EQ(state.get("code.h").size(), 2U * 2 * 64);
  EXPECT_EQ(state.get("logits").size(), 2U * 50);
  EXPECT_NE(state.get("text.h"), state.get("code.h"));
  Lockstep other(model->on_cpu(), model->info().vocab_size, 2);
  other.set_state(state);
  const std::vector<int> next = {7, 8};
  const auto a = one.step(next), b = other.step(next);
  EXPECT_EQ(std::vector<float>(a.begin(), a.end()), std::vector<float>(b.begin(), b.end()));
}

// --- The public code's blocks

TEST(Parity100m, EveryBlockOfBothExperts) {
  const std::filesystem::path folder = test::folder_of("upstream/mmrec100m");
  const test::SafetensorsReader reference(folder / "reference.safetensors");
  const test::ReferenceTensor& ids = reference.at("input_ids");
  const std::int64_t batch = ids.dim(0), count = ids.dim(1);
  const std::vector<int> tokens(ids.integers.begin(), ids.integers.end());
  const mmrec100m::Config config = test::config_of<mmrec100m::Config>(folder);
  const mmrec100m::HostWeights weights = load_weights(Checkpoint::open(folder), config);
  const mmrec100m::SlotLayout layout(config);
  kernels::Cpu cpu(1);
  int compared = 0;
  for (std::size_t expert = 0; expert < 2; ++expert) {
    for (const bool sweeps : {false, true}) {
      for (std::int64_t layers = 1; layers <= config.num_layers; ++layers) {
        Config cut = config.stack();
        cut.num_layers = layers;
        ModelView<kernels::Host> view = mmrec100m::stack_view(view_of(weights), expert);
        view.layers.resize(static_cast<std::size_t>(layers));
        Stack<kernels::Cpu, float> stack(cut, view, cpu, kCpuPlan, layout.stacks[expert]);
        stack.work().reserve(batch, sweeps);
        kernels::HostBuffer<std::byte> slots(static_cast<std::size_t>(batch) * layout.bytes);
        const Batch all{.slot = slots.data(), .sequences = batch, .tokens = count, .ends = true};
        Done done;
        const Chunk chunk{.tokens = tokens.data(),
                          .batches = {&all, 1},
                          .rows = batch * count,
                          .options = {.sweeps = sweeps, .tolerance = 1e-6F}};
        stack.run(stack.choose(chunk, cpu), chunk, {}, done);
        const std::string name =
            std::string(expert == 0 ? "text" : "code") + ".block" + std::to_string(layers - 1) + ".output";
        const std::vector<float>& want = reference.at(name).values;
        ASSERT_EQ(std::ssize(want), batch * count * config.expert_dim);
        const std::span got(stack.work().x(batch * count).data, want.size());
        ASSERT_LE(largest_difference(got, want), 5e-5) << name;
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared, 4 * config.num_layers);
}

}  // namespace
}  // namespace mmrec::models
