// The engine on real model folders, beyond the laws of laws_test.cpp: what loading says and refuses, groups, and the
// bundled model against the code that trained it. And the version of the library that runs.
#include "mmrec/model.h"

#include "engine/kernels/kernel_backend.h"
#include "mmrec/errors.h"
#include "mmrec/scorer.h"
#include "mmrec/version.h"
#include "models/runtime/cuda_device.h"
#include "tests/engine/held_out.h"
#include "tests/engine/sessions.h"
#include "tests/support/refusal.h"

namespace mmrec::test {
namespace {

std::filesystem::path fixture(const std::string& name) { return folder_of("upstream/" + name); }

TEST(Bf16Advice, IsForAModelInFp32OnAGpu) {
  ModelInfo info;
  info.bytes_per_token = 200'000'000;
  info.device = Device::kCuda;
  const std::string advice = bf16_advice(info, "--precision bf16");
  expect_says(advice, {"With --precision bf16 a token reads 100 MB", "in place of 200 MB", "docs/numerics.md"});
  info.precision = Precision::kBF16;
  EXPECT_EQ(bf16_advice(info, "--precision bf16"), "");
  info.precision = Precision::kF32;
  info.device = Device::kCpu;
  EXPECT_EQ(bf16_advice(info, "--precision bf16"), "");
}

const Model& bundled_model() {
  static const Model model = on_cpu(folder_of("mmrec-12m"));
  return model;
}

TEST(LoadedModel, OnSeveralGpusSaysWhichItCannotUse) {
  const auto refused = [](const LoadOptions& options, const std::vector<int>& gpus) -> std::string {
    try {
      Model::load_on_gpus("/nonexistent", options, gpus);  // no file is read
    } catch (const DeviceUnavailable& error) {
      return std::string("unavailable: ") + error.what();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "nothing";
  };
  LoadOptions on_cpu{.device = Device::kCpu};
  EXPECT_EQ(refused(on_cpu, {}), "load option device: found cpu, expected a GPU");
  EXPECT_EQ(refused({}, {0, -1}), "gpus: found -1, expected >= 0");
  EXPECT_EQ(refused({}, {0, 2, 0}), "gpus: found 0 twice, expected each GPU once");
  const auto unavailable = [](int gpu) {
    return "unavailable: no usable CUDA device (" + models::cuda_unusable_reason(gpu) + ")";
  };
  EXPECT_EQ(refused({}, {1 << 20}), unavailable(1 << 20));
  if (!models::cuda_unusable_reason().empty()) {
    EXPECT_EQ(refused({}, {}), unavailable(0));
  }
}

TEST(LoadedModel, ThatMustRunOnAGpuSaysWhyItCannot) {
  const std::string reason = models::cuda_unusable_reason();
  if (reason.empty()) GTEST_SKIP() << "there is a usable GPU";
  LoadOptions options;
  std::vector<std::string> warnings;
  options.on_warning = [&](std::string_view text) { warnings.emplace_back(text); };
  options.device = Device::kCuda;
  EXPECT_EQ(refusal<DeviceUnavailable>([&] { Model::load("/nonexistent", options); }),
            "no usable CUDA device (" + reason + ")");
  EXPECT_TRUE(warnings.empty());

  // Left to itself it takes the CPU, with one notice in a process where the build would have served a GPU; none before
  // a file that is refused.
  options.device = Device::kAuto;
  EXPECT_THROW((void)Model::load("/nonexistent", options), std::system_error);
  EXPECT_TRUE(warnings.empty());
  for (int load = 0; load < 3; ++load) EXPECT_EQ(Model::load(fixture("mdi"), options).info().device, Device::kCpu);
  if (engine::built_with_cuda()) {
    EXPECT_EQ(warnings, std::vector<std::string>{"no usable CUDA device (" + reason + "): running on the CPU"});
  } else {
    EXPECT_TRUE(warnings.empty());
  }
  warnings.clear();
  options.device = Device::kCpu;
  Model::load(fixture("mdi"), options);
  EXPECT_TRUE(warnings.empty());

  options.device = Device::kAuto;
  options.precision = Precision::kF16;
  EXPECT_EQ(refusal([&] { Model::load(fixture("mdi"), options); }),
            "load option precision: found fp16 on the CPU, expected auto, fp32 or bf16: no usable CUDA device (" +
                reason + ")");
  EXPECT_TRUE(warnings.empty());
  options.precision = Precision::kF32;
  const ModelInfo wide = Model::load(fixture("mdi"), options).info();
  EXPECT_EQ(wide.precision, Precision::kF32);
  options.precision = Precision::kBF16;
  const ModelInfo rounded = Model::load(fixture("mdi"), options).info();
  EXPECT_EQ(rounded.precision, Precision::kBF16);
  EXPECT_EQ(rounded.fingerprint, wide.fingerprint);
  EXPECT_LT(rounded.weight_bytes, wide.weight_bytes);
  EXPECT_LT(rounded.bytes_per_token, wide.bytes_per_token);
}

TEST(LoadedModel, AGpuHasANumber) {
  LoadOptions options;
  for (const Device device : {Device::kAuto, Device::kCpu, Device::kCuda}) {
    options.device = device;
    options.gpu = -1;
    EXPECT_EQ(refusal([&] { Model::load("/nonexistent", options); }), "load option gpu: found -1, expected >= 0");
  }
  options.device = Device::kCpu;  // where a number means nothing
  options.gpu = 1000;
  EXPECT_EQ(Model::load(fixture("mdi"), options).info().gpu, -1);
  options.device = Device::kCuda;
  const std::string says = models::cuda_unusable_reason(1000);
  EXPECT_EQ(refusal<DeviceUnavailable>([&] { Model::load("/nonexistent", options); }),
            "no usable CUDA device (" + says + ")");
}

TEST(LoadedModel, ADeviceHasAName) {
  for (const auto& [name, device, gpu] : {std::tuple{"auto", Device::kAuto, 7},
                                          {"cpu", Device::kCpu, 7},
                                          {"cuda", Device::kCuda, 7},
                                          {"cuda:0", Device::kCuda, 0},
                                          {"cuda:12", Device::kCuda, 12}}) {
    LoadOptions options{.gpu = 7};
    EXPECT_TRUE(set_device(options, name));
    EXPECT_TRUE(options.device == device && options.gpu == gpu) << name;
  }
  for (const char* name : {"", "gpu", "CPU", "cuda:", "cuda:-0", "cuda:+1", "cuda:1x", "cuda: 1", "cuda:9999999999"}) {
    LoadOptions options{.device = Device::kCpu, .gpu = 7};
    EXPECT_FALSE(set_device(options, name));
    EXPECT_TRUE(options.device == Device::kCpu && options.gpu == 7) << name;
  }
}

TEST(LoadedModel, InfoDescribesTheFolder) {
  const ModelInfo& info = bundled_model().info();
  EXPECT_EQ(info.vocab_size, 8192);
  EXPECT_EQ(info.model_dim, 384);
  EXPECT_EQ(info.num_layers, 5);
  EXPECT_EQ(info.num_heads, 6);
  EXPECT_EQ(info.ffn_dim, 768);
  EXPECT_EQ(info.memory_segment, 256);
  EXPECT_EQ(info.memory_slots, 32);
  EXPECT_EQ(info.bos_token_id, 1);
  EXPECT_EQ(info.eos_token_ids, std::vector<int>{2});
  EXPECT_EQ(info.device, Device::kCpu);
  EXPECT_EQ(info.gpu, -1);
  EXPECT_EQ(info.device_name, "cpu");
  EXPECT_EQ(info.precision, Precision::kF32);
  EXPECT_GT(info.parameters, 10'000'000U);
  EXPECT_NE(info.fingerprint, 0U);
}

TEST(LoadedModel, BytesPerTokenAreTheWeightsButForTheEmbedding) {
  for (const char* name : {"mdi", "dpg", "hem", "segments"}) {
    const ModelInfo info = on_cpu(fixture(name)).info();
    const auto row = static_cast<std::uint64_t>(info.model_dim) * 4;  // fp32
    const std::uint64_t tied = info.weight_bytes + row;               // the head is read, and a row again as embedding
    const std::uint64_t untied = info.weight_bytes - static_cast<std::uint64_t>(info.vocab_size - 1) * row;
    const std::uint64_t all = info.bytes_per_token + info.memory_bytes;
    EXPECT_TRUE(all == tied || all == untied) << name << ": " << all << " of " << info.weight_bytes;
    EXPECT_EQ(info.memory_bytes, static_cast<std::uint64_t>(2 * info.num_layers * info.model_dim * info.model_dim) * 4);
  }
}

class BundledModel : public testing::TestWithParam<PrefillMode> {};

TEST_P(BundledModel, LogprobsAgreeWithTheTrainingCode) {
  Session session = bundled_model().new_session(1, {.prefill = GetParam()});
  expect_held_out_logprobs(session, 1e-3F, 0.05);
  // 16 segments of 256 tokens: the memory slots took part.
  EXPECT_GT(session.position(), 8 * bundled_model().info().memory_segment);
}

INSTANTIATE_TEST_SUITE_P(Modes, BundledModel, testing::Values(PrefillMode::kSteps, PrefillMode::kSweeps),
                         [](const auto& info) { return info.param == PrefillMode::kSteps ? "Steps" : "Sweeps"; });

TEST(Version, IsThatOfTheHeaders) {
  EXPECT_EQ(version(), MMREC_VERSION);
  const std::string numbers = std::to_string(MMREC_VERSION_MAJOR) + "." + std::to_string(MMREC_VERSION_MINOR) + "." +
                              std::to_string(MMREC_VERSION_PATCH);
  EXPECT_EQ(version(), numbers);
}

TEST(Version, NamesTheBackends) {
  ASSERT_GE(backends().size(), 1U);
  EXPECT_EQ(backends()[0], "cpu");
  ASSERT_LE(backends().size(), 2U);
  EXPECT_EQ(backends().back(), backends().size() == 2 ? "cuda" : "cpu");
}

}  // namespace
}  // namespace mmrec::test
