// The laws on a GPU, in fp32 and in 16 bits, and what holds between a GPU and the CPU. Longer than other files, because
// its tests share the models of a device.
#include "tests/engine/laws.h"

#include "kernels/cuda/runtime/cuda.h"
#include "mmrec/errors.h"
#include "mmrec/generate.h"
#include "mmrec/quantize.h"
#include "models/mmrec/mmrec.h"
#include "models/runtime/cuda_device.h"
#include "tests/engine/far_positions.h"
#include "tests/engine/held_out.h"
#include "tests/engine/sessions.h"
#include "tests/ops/op_test.h"
#include "tests/support/compare.h"
#include "tests/support/model_folder.h"
#include "tests/support/quantized_reader.h"
#include "tests/support/refusal.h"
#include "tests/support/tokenizer_builder.h"

namespace mmrec::test {
namespace {

using kernels::test::kEmulated;

std::string unusable() {
  const std::string reason = models::cuda_unusable_reason();
  return reason.empty() ? "" : "no usable CUDA device: " + reason;
}

LawsCase on_cuda(const char* folder, Precision precision) {
  LawsCase c{.folder = folder, .device = Device::kCuda, .precision = precision};
  c.chunks_equal_to_steps = {1};                         // longer ones are not computed by the one kernel of a step
  c.least_batch = precision == Precision::kF32 ? 1 : 2;  // in 16 bits nor are steps of several sequences
  if (precision != Precision::kF32) {
    c.split_bound = c.sweep_bound = precision == Precision::kBF16 ? 0.06F : 0.01F;
    c.sweep_tolerance = 0.0F;  // the precision's own
    // Its memory grows to 2e5 within 700 tokens, and what is rounded grows with it.
    if (std::string_view(folder) == "oracle/restart") c.sweep_bound = 0.2F;
  }
  if (kEmulated) c.shorten = 8;
  c.unusable = unusable;
  return c;
}

/// mmrec-jax as far as it has the laws: token by token, or without a bank.
LawsCase jax_on_cuda(Precision precision, const VariantOptions& variant) {
  LawsCase c = on_cuda("upstream/jax", precision);
  c.variant = variant;
  c.least_batch = 1;
  if (kEmulated && variant.calls == Calls::kStepwise) c.shorten = 16;  // whatever the mode of prefill
  return c;
}

std::vector<LawsCase> cases(Precision precision) {
  std::vector<LawsCase> all;
  // Emulation takes its time: one model of each architecture in two precisions; the code of fp16 is that of bf16.
  if (kEmulated) {
    if (precision == Precision::kF16) return {on_cuda("upstream/hem", precision)};
    return {on_cuda("oracle/restart", precision), on_cuda("upstream/mmrec100m", precision),
            precision == Precision::kBF16 ? jax_on_cuda(precision, {.calls = Calls::kStepwise})
                                          : jax_on_cuda(precision, {.bank = false})};
  }
  all = {jax_on_cuda(precision, {.bank = false}), jax_on_cuda(precision, {.calls = Calls::kStepwise})};
  std::vector<const char*> folders = {"upstream/hem", "upstream/mmrec100m", "oracle/tiles", "mmrec-12m"};
  // Within 700 tokens the memory of this one grows to 2e5, beyond what fp16 holds, ...
  if (precision != Precision::kF16) folders.push_back("oracle/restart");
  // ... and decays beyond 1 let |h| of these two reach 3e4 and 8e10 and come back: a matter for fp32.
  if (precision == Precision::kF32) folders.insert(folders.end(), {"oracle/slots", "oracle/dpg_bf16"});
  for (const char* folder : folders) all.push_back(on_cuda(folder, precision));
  for (const char* folder : {"upstream/mmrec100m", "mmrec-12m"}) {
    LawsCase invariant = on_cuda(folder, precision);
    invariant.batch_invariant = true;
    invariant.least_batch = 1;
    invariant.chunks_equal_to_steps = {};  // a prompt of one token is one
    all.push_back(invariant);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(CudaF32, Laws, testing::ValuesIn(cases(Precision::kF32)), laws_name);
INSTANTIATE_TEST_SUITE_P(CudaBF16, Laws, testing::ValuesIn(cases(Precision::kBF16)), laws_name);
INSTANTIATE_TEST_SUITE_P(CudaF16, Laws, testing::ValuesIn(cases(Precision::kF16)), laws_name);

class CudaEngine : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = unusable(); !reason.empty()) GTEST_SKIP() << reason;
  }
  static Model load(const std::string& folder, Device device, Precision precision = Precision::kAuto) {
    return Model::load(folder_of(folder), {.device = device, .precision = precision});
  }
  /// The bundled model, or where a device is emulated a tiny one.
  inline static const char* const kFolder = kEmulated ? "tiny" : "mmrec-12m";
};

TEST_F(CudaEngine, QuantizedWeightsAreDequantizedForTheDevice) {
  for (const std::string name : {"quantized/int8", "quantized/int4", "quantized/fp8"}) {
    const TempFolder plain;
    write_dequantized(folder_of(name), plain.path());
    for (const Precision precision : {Precision::kF32, Precision::kAuto}) {
      const Model quantized = load(name, Device::kCuda, precision);
      const Model dequantized =
          Model::load(plain.path(), {.device = Device::kCuda, .precision = quantized.info().precision});
      EXPECT_EQ(quantized.info().precision, precision == Precision::kF32 ? Precision::kF32 : Precision::kBF16);
      EXPECT_EQ(quantized.info().weight_bytes, dequantized.info().weight_bytes);
      const std::vector<int> tokens = random_tokens(quantized, 40, 9);
      Session a = begun(quantized, tokens), b = begun(dequantized, tokens);
      EXPECT_TRUE(std::ranges::equal(a.logits(), b.logits())) << name;
    }
  }
}

// Of a large model steps read the numbers themselves, and of fp8 prompts do, rounded to fp8 too. The CPU is the
// reference, which computes with them in fp32.
TEST_F(CudaEngine, LargeQuantizedModelsAreReadAsTheyAre) {
  if (kEmulated) GTEST_SKIP() << "a model of 40 million parameters";
  const TempFolder folder;
  models::write_synthetic_model(folder / "plain",
                                models::Mmrec::synthetic({.dim = 1536, .layers = 1, .vocab = 512, .ffn = 6144}),
                                kernels::DType::kBF16, 7);
  const Model plain = Model::load(folder / "plain", {.device = Device::kCuda});
  for (const QuantizedType type : {QuantizedType::kInt8, QuantizedType::kInt4, QuantizedType::kFp8}) {
    SCOPED_TRACE(to_string(type));
    const std::filesystem::path to = folder / std::string(to_string(type));
    quantize_model(folder / "plain", to, {.type = type, .group = 64});
    const Model on_gpu = Model::load(to, {.device = Device::kCuda}), on_cpu = Model::load(to, {.device = Device::kCpu});
    const std::uint64_t bytes = on_cpu.info().weight_bytes;
    EXPECT_GT(on_gpu.info().weight_bytes, plain.info().weight_bytes + bytes * 9 / 10) << "both copies";
    if (type == QuantizedType::kFp8) {  // which steps of one sequence read in bf16
      EXPECT_EQ(on_gpu.info().bytes_per_token, plain.info().bytes_per_token);
    } else {
      EXPECT_LT(on_gpu.info().bytes_per_token, bytes * 11 / 10);
      EXPECT_GT(on_gpu.info().bytes_per_token, bytes * 7 / 10);
    }
    const std::vector<int> prompt = random_tokens(on_cpu, 300, 9);
    const double most = type == QuantizedType::kFp8 ? 0.1 : 0.03;
    EXPECT_LT(largest_share(begun(on_gpu, prompt).logits(), begun(on_cpu, prompt).logits()), most);
    for (const int batch : {1, 12, 40}) {
      Session a = on_gpu.new_session(batch), b = on_cpu.new_session(batch);
      for (const int token : {5, 317, 23, 5, 99, 401}) {
        std::vector<int> tokens;
        for (int i = 0; i < batch; ++i) tokens.push_back((token + 31 * i) % 512);
        a.step(tokens);
        b.step(tokens);
        EXPECT_LT(largest_share(a.logits(), b.logits()), 0.03) << batch << " sequences";
      }
    }
  }
}

TEST_F(CudaEngine, InfoDescribesTheDevice) {
  for (const auto& [precision, size] :
       {std::pair{Precision::kF32, 4U}, {Precision::kF16, 2U}, {Precision::kBF16, 2U}}) {
    const ModelInfo cpu = load("tiny", Device::kCpu).info();
    const ModelInfo info = load("tiny", Device::kCuda, precision).info();
    EXPECT_EQ(info.device, Device::kCuda);
    EXPECT_EQ(info.gpu, 0);
    EXPECT_EQ(info.device_name, models::cuda_device_info(0).name);
    EXPECT_EQ(info.precision, precision);
    EXPECT_GE(info.weight_bytes, info.parameters * size * 15 / 16);  // a block has one matrix less
    const unsigned parts = precision == Precision::kF32 ? 6 : 0;     // bf16 parts of fp32, for some devices
    EXPECT_LE(info.weight_bytes, info.parameters * (size + parts) * 5 / 4);
    EXPECT_GT(info.bytes_per_token, info.parameters * size / 2);
    EXPECT_LE(info.bytes_per_token, info.parameters * 4);
    EXPECT_EQ(info.fingerprint, cpu.fingerprint);
    EXPECT_EQ(info.parameters, cpu.parameters);
  }
  EXPECT_EQ(load("tiny", Device::kAuto).info().device, Device::kCuda) << "auto takes a usable GPU";
}

TEST_F(CudaEngine, AGpuIsNamedByItsNumber) {
  const int count = models::cuda_device_count();
  LoadOptions o{.device = Device::kCuda, .gpu = count};
  EXPECT_EQ(refusal<DeviceUnavailable>([&] { Model::load("/nonexistent", o); }),
            "no usable CUDA device (found device " + std::to_string(count) + ", expected 0.." +
                std::to_string(count - 1) + ")");
  std::string warning;
  o.device = Device::kAuto;
  o.on_warning = [&](std::string_view text) { warning += text; };
  EXPECT_EQ(Model::load(folder_of("tiny"), o).info().device, Device::kCpu);
  EXPECT_NE(warning.find("found device " + std::to_string(count)), std::string::npos) << warning;
  if (count < 2) return;
  // Two models on two GPUs do not meet.
  o = {};
  o.device = Device::kCuda;
  std::vector<std::vector<std::byte>> states;
  for (o.gpu = 0; o.gpu < 2; ++o.gpu) {
    const Model model = Model::load(folder_of("tiny"), o);
    EXPECT_EQ(model.info().gpu, o.gpu);
    Session session = begun(model, random_tokens(model, 100, 11));
    session.step(random_tokens(model, 1, 12));
    states.push_back(session.save());
  }
  EXPECT_EQ(states[0], states[1]);
}

TEST_F(CudaEngine, GreedyTextIsTheCpus) {
  const Tokenizer tokenizer = Tokenizer::load(folder_of(kFolder));
  const std::vector<int> prompt = tokenizer.encode("The history of the city begins");
  GenerateOptions options{.sampler = {.temperature = 0.0F}, .max_tokens = kEmulated ? 4 : 200};
  const auto run = [&](Device device, bool logprobs) {
    const Model model = load(kFolder, device, Precision::kF32);
    Session session = begun(model, prompt);
    options.logprobs = logprobs;
    return generate(session, tokenizer, options);
  };
  const GenerateResult expected = run(Device::kCpu, true);
  ASSERT_EQ(static_cast<std::int64_t>(expected.tokens.size()), options.max_tokens);
  for (const bool logprobs : {true, false}) {
    const GenerateResult result = run(Device::kCuda, logprobs);
    EXPECT_EQ(result.tokens, expected.tokens);
    EXPECT_EQ(result.text, expected.text);
    if (logprobs) {
      EXPECT_LE(largest_difference(result.logprobs, expected.logprobs), 1e-3F);
    }
  }
}

TEST_F(CudaEngine, LogprobsAgreeWithTheTrainingCode) {
  if (kEmulated) GTEST_SKIP() << "too long for an emulated device";
  for (const auto& [precision, bound, nats] :
       {std::tuple{Precision::kF32, 1e-3F, 0.05}, std::tuple{Precision::kBF16, 0.3F, 20.0}}) {
    Session session = load("mmrec-12m", Device::kCuda, precision).new_session();
    expect_held_out_logprobs(session, bound, nats);
  }
}

TEST_F(CudaEngine, TheDeviceDrawsWhatTheSamplerDraws) {
  const Model model = load(kFolder, Device::kCuda, Precision::kF32);
  const int batch = 2;
  Session session = begun(model, random_tokens(model, static_cast<std::size_t>(batch) * 20, 1), batch);
  const auto vocab = static_cast<std::size_t>(model.info().vocab_size);
  std::vector<SamplerOptions> chains(7);  // the default, then each filter by itself, none, and all with a small vocab
  chains[1] = {.temperature = 0.0F};
  chains[2] = {.temperature = 1.5F, .top_k = 0, .top_p = 1.0F, .min_p = 0.0F};
  chains[3] = {.temperature = 1.0F, .top_k = 5, .top_p = 1.0F, .min_p = 0.0F};
  chains[4] = {.temperature = 1.0F, .top_k = 0, .top_p = 0.7F, .min_p = 0.0F};
  chains[5] = {.temperature = 1.0F, .top_k = 0, .top_p = 1.0F, .min_p = 0.1F};
  chains[6].vocab_limit = 50;
  for (SamplerOptions chain : chains) {
    for (std::uint64_t step = 0; step < (kEmulated ? 3 : 200); ++step) {
      chain.seed = step / 50;
      std::vector<Sample> samples(static_cast<std::size_t>(batch));
      session.draw(chain, step, 7, samples);
      std::vector<Sample> without(samples.size());
      session.draw(chain, step, 7, without, /*logprobs=*/false);
      Sampler sampler(chain);
      for (std::size_t b = 0; b < samples.size(); ++b) {
        const Sample expected = sampler.sample(session.logits().subspan(b * vocab, vocab), {}, step, 7 + b);
        EXPECT_EQ(samples[b].token, expected.token) << "chain " << &chain - chains.data() << ", step " << step;
        EXPECT_NEAR(samples[b].logprob, expected.logprob, 2e-5F);
        EXPECT_EQ(without[b].token, expected.token);
        EXPECT_EQ(without[b].logprob, 0.0F);
      }
    }
  }
}

// A drawn token waits on the device for the step that takes it; sessions of a model share that place.
TEST_F(CudaEngine, DrawsOfOneSessionDoNotMeetThoseOfAnother) {
  const Model model = load(kFolder, Device::kCuda, Precision::kF32);
  const auto prompt = random_tokens(model, 20, 13);
  const SamplerOptions greedy = {.temperature = 0.0F};
  Sample drawn;
  const auto next = [&](Session& session) {
    session.draw(greedy, 0, 0, {&drawn, 1});
    return drawn.token;
  };
  Session alone = begun(model, prompt);
  const int first = next(alone);
  alone.step({&first, 1});
  const auto expected = alone.save();

  const auto other = [&](Session session) {
    const auto batch = static_cast<std::size_t>(session.batch());
    session.prefill(random_tokens(model, batch * 3, 14));
    std::vector<Sample> samples(batch);
    session.draw(greedy, 0, 0, samples);
    std::vector<int> tokens;
    for (const Sample& sample : samples) tokens.push_back(sample.token);
    session.step(tokens);
  };
  Session session = model.new_session();
  for (const int batch : {0, 1, 2, 9, 12}) {  // one that is only made, and ever larger ones at work in between
    session.reset();
    session.prefill(prompt);
    const int token = next(session);
    EXPECT_EQ(token, first);
    if (batch == 0) {
      (void)model.new_session(8);
    } else {
      other(model.new_session(batch));
    }
    session.step({&token, 1});
    EXPECT_EQ(session.save(), expected) << batch;
  }
}

// Generation never waits for the host; what it leaves is what steps and draws one by one leave, wherever it ends, and
// whatever other sessions do in between.
void expect_ahead_as_one_by_one(const Model& model, const Tokenizer& tokenizer) {
  const auto prompt = random_tokens(model, kEmulated ? 8 : 20, 13);
  for (const auto& [temperature, penalty] : {std::pair{0.0F, 1.0F}, {1.0F, 1.0F}, {0.8F, 1.3F}, {0.0F, 1.1F}}) {
    for (const int ends_after : kEmulated ? std::vector<int>{3} : std::vector<int>{1, 2, 31, 32, 33, 34, 65, 300}) {
      GenerateOptions o;
      o.sampler = {.temperature = temperature, .seed = 5};
      o.sampler.repetition_penalty = penalty;
      o.sampler.repetition_window = 9;  // the ring turns
      o.sequence = 2;
      o.max_tokens = 400;
      o.logprobs = ends_after % 2 == 1;
      int calls = 0;
      Session other = model.new_session(2);
      o.cancelled = [&] {
        if (calls % 7 == 3) other.step(std::vector<int>{4, 5});
        return calls++ == ends_after;
      };
      Session session = begun(model, prompt);
      const GenerateResult result = generate(session, tokenizer, o);
      ASSERT_EQ(result.tokens.size(), static_cast<std::size_t>(ends_after));

      Session slow = begun(model, prompt);
      SamplerOptions chain = o.sampler;
      chain.vocab_limit = tokenizer.vocab_size();
      Sampler on_host(chain);
      std::vector<int> recent = prompt;
      for (int n = 0; n < ends_after; ++n) {
        Sample drawn;
        const std::uint64_t number = prompt.size() + static_cast<std::size_t>(n);
        if (penalty == 1.0F) {
          slow.draw(chain, number, 2, {&drawn, 1}, o.logprobs);
        } else {
          drawn = on_host.sample(slow.logits(), recent, number, 2);
          recent.push_back(drawn.token);
        }
        ASSERT_EQ(drawn.token, result.tokens[static_cast<std::size_t>(n)]) << n;
        if (o.logprobs) {
          ASSERT_NEAR(drawn.logprob, result.logprobs[static_cast<std::size_t>(n)], 2e-5F) << n;
        }
        if (n + 1 < ends_after) slow.step({&drawn.token, 1});
      }
      EXPECT_EQ(session.position(), slow.position());
      EXPECT_EQ(session.save(), slow.save()) << ends_after;
    }
  }
}

TEST_F(CudaEngine, WhatIsDrawnAheadIsWhatIsDrawnOneByOne) {
  const char* folder = kEmulated ? "tiny" : "mmrec-12m";
  expect_ahead_as_one_by_one(load(folder, Device::kCuda), Tokenizer::load(folder_of(folder)));
}
TEST_F(CudaEngine, WhatTwoExpertsDrawAheadIsWhatIsDrawnOneByOne) {
  const TempFolder folder;
  write_file(folder / "tokenizer.model",
             TokenizerBuilder().words({"\u2581once", "\u2581upon", "\u2581a", "\u2581time"}).build());
  expect_ahead_as_one_by_one(load("upstream/mmrec100m", Device::kCuda), Tokenizer::load(folder.path()));
}

using CudaFarPositions = CudaEngine;
TEST_F(CudaFarPositions, GoOnAsNearOnes) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    expect_far_positions_to_go_on(load("tiny", Device::kCuda, precision), precision == Precision::kF32 ? 1e-5F : 0.06F);
  }
}

// A chunk of a GPU's prefill begins on a grid of 4,096 positions; between, calls of more than a few tokens go through
// the same products whatever their length.
TEST_F(CudaEngine, CutsOnTheGridChangeNoBit) {
  if (kEmulated) GTEST_SKIP() << "too long for an emulated device";
  for (const auto& [folder, precision] :
       {std::pair{"mmrec-12m", Precision::kF32}, std::pair{"mmrec-12m", Precision::kBF16},
        std::pair{"upstream/mmrec100m", Precision::kF32}, std::pair{"upstream/mmrec100m", Precision::kBF16}}) {
    const Model model = load(folder, Device::kCuda, precision);
    const auto tokens = random_tokens(model, 9000, 4);
    for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
      SessionOptions o{.prefill = mode};
      Session whole = begun(model, tokens, 1, o);
      for (const auto& ends : {std::vector<std::size_t>{4096, 9000}, {8192, 9000}, {4096, 8192, 9000}}) {
        Session session = model.new_session(1, o);
        prefill_to(session, tokens, ends);
        EXPECT_EQ(session.save(), whole.save()) << "first cut at " << ends[0];
      }
    }
  }
}

// The third step of a kind and later ones are replayed.
void expect_many_as_one(const Model& model, float bound) {
  const auto vocab = static_cast<std::size_t>(model.info().vocab_size);
  const std::size_t batch = kEmulated ? 9 : 64;  // more than the kernels for few rows take
  const std::size_t steps = 6;
  const auto tokens = random_tokens(model, batch * steps, 5);  // [steps, batch]
  Session together = model.new_session(static_cast<int>(batch));
  for (std::size_t s = 0; s < steps; ++s) together.step(std::span(tokens).subspan(s * batch, batch));
  for (const std::size_t b : {std::size_t{0}, batch / 2, batch - 1}) {
    Session alone = model.new_session();
    for (std::size_t s = 0; s < steps; ++s) alone.step(std::span(&tokens[s * batch + b], 1));
    EXPECT_LE(largest_difference(together.logits().subspan(b * vocab, vocab), alone.logits()),
              bound * scale_of(alone.logits()))
        << "sequence " << b;
  }
}
TEST_F(CudaEngine, ManySequencesAgreeWithOne) {
  expect_many_as_one(load(kFolder, Device::kCuda, Precision::kF32), 5e-5F);
  expect_many_as_one(load("upstream/mmrec100m", Device::kCuda, Precision::kF32), 5e-5F);
  expect_many_as_one(load("upstream/mmrec100m", Device::kCuda, Precision::kF16), 0.01F);
}

TEST_F(CudaEngine, MemoryDoesNotGrowWithThePrompt) {
  if (kEmulated) GTEST_SKIP() << "the host's memory is not the device's";
  const Model model = load("mmrec-12m", Device::kCuda);
  constexpr std::int64_t kAllParts = 20000;  // tokens by which all parts that go side by side have their memory
  Session session = begun(model, random_tokens(model, kAllParts, 6));
  logprobs_of(session, random_tokens(model, kAllParts, 7));
  const std::uint64_t before = models::cuda_device_info().free_bytes;
  session.prefill(random_tokens(model, 60000, 8));
  logprobs_of(session, random_tokens(model, 60000, 9));
  EXPECT_LE(before - std::min(before, models::cuda_device_info().free_bytes), 1U << 20);
}

TEST_F(CudaEngine, OutOfMemorySaysWhatWasNeededAndTheProcessGoesOn) {
  if (kEmulated) GTEST_SKIP() << "the host's memory is not the device's";
  const Model model = load("mmrec-12m", Device::kCuda);
  Session session = model.new_session();
  const auto tokens = random_tokens(model, 100, 10);
  session.prefill(tokens);
  const auto state = session.save();
  {
    constexpr std::size_t kLeft = std::size_t{64} << 20;
    const std::size_t free = models::cuda_device_info().free_bytes;
    const kernels::DeviceBuffer<std::byte> rest(free > kLeft ? free - kLeft : 0);
    for (const bool loading : {true, false}) {
      const auto take = [&] {
        if (loading) {
          for (std::vector<Model> models;;) models.push_back(load("mmrec-12m", Device::kCuda));
        }
        (void)model.new_session(4096);
      };
      expect_says(refusal<std::bad_alloc>(take), {"needed ", "free "});
    }
  }
  Session again = begun(model, tokens);
  EXPECT_EQ(again.save(), state);
  EXPECT_EQ(session.save(), state);
}

TEST_F(CudaEngine, AutoTakesTheCpuWhereTheWeightsDoNotFit) {
  if (kEmulated) GTEST_SKIP() << "the host's memory is not the device's";
  constexpr std::size_t kLeft = std::size_t{8} << 20;
  const std::size_t free = models::cuda_device_info().free_bytes;
  const kernels::DeviceBuffer<std::byte> rest(free > kLeft ? free - kLeft : 0);
  std::vector<std::string> warnings;
  LoadOptions options;
  options.on_warning = [&](std::string_view line) { warnings.emplace_back(line); };
  const Model model = Model::load(folder_of("mmrec-12m"), options);
  EXPECT_EQ(model.info().device, Device::kCpu);
  ASSERT_EQ(warnings.size(), 1U);
  expect_says(warnings[0], {"free ", "running on the CPU"});
  EXPECT_THROW((void)load("mmrec-12m", Device::kCuda), std::bad_alloc);
}

}  // namespace
}  // namespace mmrec::test
