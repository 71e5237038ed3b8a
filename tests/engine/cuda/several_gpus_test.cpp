// A model on several GPUs of the machine, against the same on one: scores are equal to the bit, texts are equal.
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mmrec/generator.h"
#include "mmrec/scorer.h"
#include "models/runtime/cuda_device.h"
#include "tests/kernels/cuda/cuda_testing.h"

namespace mmrec {
namespace {

using kernels::test::kEmulated;

std::filesystem::path folder() {
  return kEmulated ? std::filesystem::path(MMREC_FIXTURES) / "tiny"
                   : std::filesystem::path(MMREC_WEIGHTS) / "mmrec-12m";
}

std::vector<Model> load(Precision precision, const std::vector<int>& gpus = {}) {
  LoadOptions options{.precision = precision};
  return Model::load_on_gpus(folder(), options, gpus);
}

std::vector<std::vector<int>> random_documents(std::size_t count, unsigned most, std::int64_t vocab) {
  std::mt19937 rng(7);
  std::vector<std::vector<int>> documents(count);
  for (auto& document : documents) {
    document.resize(rng() % most);
    for (int& token : document) token = static_cast<int>(rng() % static_cast<unsigned>(vocab));
  }
  return documents;
}

void expect_same(const std::vector<DocumentScore>& found, const std::vector<DocumentScore>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t d = 0; d < found.size(); ++d) {
    EXPECT_EQ(found[d].logprobs, expected[d].logprobs) << "document " << d;
    EXPECT_EQ(found[d].nll, expected[d].nll) << "document " << d;
    EXPECT_TRUE(found[d].complete) << "document " << d;
  }
}

class CudaSeveral : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = models::cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
  }
};
/// With two GPUs or more.
class CudaSeveralGpus : public CudaSeveral {
 protected:
  void SetUp() override {
    CudaSeveral::SetUp();
    if (const int gpus = models::cuda_device_count(); !IsSkipped() && gpus < 2) {
      GTEST_SKIP() << "found " << gpus << " GPU, two are needed";
    }
  }
};

TEST_F(CudaSeveral, AllOfThemAreLoaded) {
  const std::vector<Model> models = load(Precision::kF32);
  ASSERT_EQ(models.size(), static_cast<std::size_t>(models::cuda_device_count()));
  for (std::size_t i = 0; i < models.size(); ++i) {
    EXPECT_EQ(models[i].info().gpu, static_cast<int>(i));
    EXPECT_EQ(models[i].info().device, Device::kCuda);
    EXPECT_EQ(models[i].info().fingerprint, models[0].info().fingerprint);
  }
  LoadOptions on_gpu{.device = Device::kCuda, .precision = Precision::kF32};
  const auto documents = random_documents(8, 40, models[0].info().vocab_size);
  expect_same(Scorer(models).score(documents), Scorer(Model::load(folder(), on_gpu)).score(documents));
}

TEST_F(CudaSeveralGpus, ScoresAreThoseOfOne) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    const std::vector<Model> all = load(precision);
    const auto documents = kEmulated ? random_documents(12, 30, all[0].info().vocab_size)
                                     : random_documents(8'000, 300, all[0].info().vocab_size);
    for (const int batch : {0, 64}) {
      ScorerOptions options{.batch = batch};
      const auto expected = Scorer(all[0], options).score(documents);
      expect_same(Scorer(all[1], options).score(documents), expected);
      Scorer several(all, options);
      for (int repeat = 0; repeat < 2; ++repeat) expect_same(several.score(documents), expected);

      // The stream is cut into blocks, so other documents share a group.
      const auto stream = [&](Scorer scorer) {
        std::size_t given = 0;
        std::vector<DocumentScore> scores;
        EXPECT_TRUE(scorer.score_stream(
            [&](std::vector<int>& ids) {
              if (given == documents.size()) return false;
              ids = documents[given++];
              return true;
            },
            [&](std::size_t document, const std::vector<int>& ids, DocumentScore& score) {
              EXPECT_EQ(document, scores.size());
              EXPECT_EQ(ids, documents[document]);
              scores.push_back(std::move(score));
              return true;
            }));
        return scores;
      };
      expect_same(stream(Scorer(all, options)), stream(Scorer(all[1], options)));
    }
  }
}

TEST_F(CudaSeveralGpus, ACallbackThatThrowsEndsTheCall) {
  const std::vector<Model> all = load(Precision::kF32);
  const auto documents = random_documents(kEmulated ? 12 : 3000, kEmulated ? 30 : 300, all[0].info().vocab_size);
  ScorerOptions options{.batch = 4};
  int left = 3;
  options.on_progress = [&](std::int64_t, double) -> bool {
    if (--left <= 0) throw std::out_of_range("enough");
    return true;
  };
  Scorer scorer(all, options);
  EXPECT_THROW(scorer.score(documents), std::out_of_range);
  left = 1 << 30;
  expect_same(scorer.score(documents), Scorer(all[0], {.batch = 4, .session = {}, .on_progress = {}}).score(documents));
}

TEST_F(CudaSeveralGpus, TextsAreThoseOfOne) {
  const std::vector<Model> all = load(Precision::kF32);
  const Tokenizer tokenizer = Tokenizer::load(folder());
  const auto prefix =
      std::make_shared<Session>(all[1].new_session());  // requests on the other GPUs take its state there
  prefix->prefill(tokenizer.encode("The river"));

  const std::size_t count = kEmulated ? 6 : 24;
  std::vector<GenerateResult> results(count);
  std::vector<GenerateResult> expected;
  Generator generator(all, tokenizer, {.slots = 3});
  EXPECT_EQ(generator.slots(), 3 * static_cast<int>(all.size()));
  for (std::size_t i = 0; i < count; ++i) {
    GenerateOptions options{.sampler = {.temperature = i % 3 == 0 ? 0.0F : 0.8F, .seed = i},
                            .max_tokens = kEmulated ? 3 : 20 + static_cast<std::int64_t>(i * 37 % 90)};
    GeneratorRequest request{.options = options,
                             .on_finish = [&results, i](GenerateResult result) { results[i] = std::move(result); }};
    Session session = i % 2 == 0 ? prefix->clone() : all[0].new_session();
    if (i % 2 == 0) {
      request.start = prefix;
    } else {
      request.prompt = tokenizer.encode("The history of the city begins");
      session.prefill(request.prompt);
    }
    expected.push_back(generate(session, tokenizer, options));
    generator.submit(std::move(request));
    generator.run_once();
  }
  generator.run();
  for (std::size_t i = 0; i < count; ++i) {
    EXPECT_EQ(results[i].tokens, expected[i].tokens) << i;
    EXPECT_EQ(results[i].text, expected[i].text) << i;
    EXPECT_EQ(results[i].finish_reason, expected[i].finish_reason) << i << ": " << results[i].error;
  }
}

}  // namespace
}  // namespace mmrec
