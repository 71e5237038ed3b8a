// A model on several GPUs of the machine, against the same on one: scores are equal to the bit, texts are equal. And
// many requests at once, on one GPU or several, against each on a session of its own.

#include "mmrec/generator.h"
#include "models/runtime/cuda_device.h"
#include "tests/engine/sessions.h"
#include "tests/ops/op_test.h"

namespace mmrec::test {
namespace {

using kernels::test::kEmulated;
using kernels::test::small_sizes;

std::filesystem::path folder() { return folder_of(small_sizes() ? "tiny" : "mmrec-12m"); }

std::vector<Model> load(Precision precision, const std::vector<int>& gpus = {}) {
  return Model::load_on_gpus(folder(), {.precision = precision}, gpus);
}

Documents random_documents(std::size_t count, unsigned most, std::int64_t vocab) {
  std::mt19937 rng(7);
  Documents documents(count);
  for (auto& document : documents) document = random_tokens(vocab, rng() % most, rng);
  return documents;
}

void expect_same(const std::vector<DocumentScore>& found, const std::vector<DocumentScore>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  expect_begins(found, expected);
  for (const DocumentScore& score : found) EXPECT_TRUE(score.complete);
}

class CudaSeveral : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = models::cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
  }
};
using CudaGenerator = CudaSeveral;
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
  const LoadOptions on_gpu{.device = Device::kCuda, .precision = Precision::kF32};
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
        EXPECT_TRUE(scorer.score_stream(stream_of(documents, given),
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

/// Each of `count` requests gets what it gets on a session of its own. Their steps are those of sequences at positions
/// of their own, in slots with gaps, that join and leave. On several GPUs they take the prefix's state from the last.
void expect_texts_as_alone(std::span<const Model> models, std::size_t count, int slots) {
  const Tokenizer tokenizer = Tokenizer::load(folder());
  const auto prefix = std::make_shared<Session>(begun(models.back(), tokenizer.encode("The river")));
  std::vector<GenerateResult> results(count), expected;
  Generator generator(std::vector(models.begin(), models.end()), tokenizer, {.slots = slots});
  EXPECT_EQ(generator.slots(), slots * static_cast<int>(models.size()));
  for (std::size_t i = 0; i < count; ++i) {
    GenerateOptions options{.sampler = {.temperature = i % 3 == 0 ? 0.0F : 0.8F, .seed = i},
                            .max_tokens = static_cast<std::int64_t>(small_sizes() ? 1 + i * 5 % 7 : 20 + i * 37 % 90),
                            .logprobs = slots % 4 != 0 && i % 2 == 0};  // else rules name the rows that are drawn
    if (i % 4 == 1) options.sampler.repetition_penalty = 1.2F;
    if (i % 5 == 3) options.stop = {"e"};
    if (i % 7 == 5) options.on_token = [left = 2](int, float) mutable { return left-- > 0; };
    GeneratorRequest request{.options = options,
                             .on_finish = [&results, i](GenerateResult result) { results[i] = std::move(result); }};
    if (i % 3 == 2) {
      request.start = prefix;
    } else {
      request.prompt = tokenizer.encode(i % 3 == 0 ? "In 1914" : "The history of the city begins");
      if (i % 10 == 7 && !small_sizes()) {  // comes in pieces
        for (const int token : std::vector(request.prompt)) request.prompt.insert(request.prompt.end(), 1500, token);
      }
    }
    Session session = request.start ? prefix->clone() : begun(models.front(), request.prompt);
    expected.push_back(generate(session, tokenizer, options));
    generator.submit(std::move(request));
    generator.run_once();
  }
  generator.run();
  for (std::size_t i = 0; i < count; ++i) {
    EXPECT_EQ(results[i].tokens, expected[i].tokens) << i;
    EXPECT_EQ(results[i].text, expected[i].text) << i;
    EXPECT_EQ(results[i].finish_reason, expected[i].finish_reason) << i << ": " << results[i].error;
    // Prompts that are packed take another path through the kernels, so log-probs agree within a bound.
    ASSERT_EQ(results[i].logprobs.size(), expected[i].logprobs.size()) << i;
    if (models.front().info().batch_invariant) {
      EXPECT_EQ(results[i].logprobs, expected[i].logprobs) << i;
      continue;
    }
    for (std::size_t t = 0; t < expected[i].logprobs.size(); ++t) {
      EXPECT_NEAR(results[i].logprobs[t], expected[i].logprobs[t], 1e-3F) << "request " << i << " token " << t;
    }
  }
}
TEST_F(CudaGenerator, EachRequestGetsWhatItGetsAlone) {
  const std::vector<Model> models = load(Precision::kF32, {0});
  for (const int slots : small_sizes() ? std::vector<int>{2, 7, 64} : std::vector<int>{1, 2, 4, 7, 64}) {
    expect_texts_as_alone(models, small_sizes() || slots < 64 ? 12 : 114, slots);
  }
}
TEST_F(CudaGenerator, EachOfManyRequestsGetsWhatItGetsAlone) {
  if (small_sizes()) GTEST_SKIP() << "takes too long on an emulated device";
  const std::vector<Model> models = load(Precision::kF32, {0});
  for (const int slots : {300, 1024}) expect_texts_as_alone(models, static_cast<std::size_t>(slots) + 450, slots);
}
Model invariant_model(Precision precision) {
  return Model::load(folder(), {.device = Device::kCuda, .precision = precision, .batch_invariant = true});
}
TEST_F(CudaGenerator, EachRequestHasTheBitsThatItHasAloneIfBatchInvariant) {
  using Slots = std::vector<int>;
  const std::vector<std::pair<Precision, Slots>> cases =
      small_sizes()
          ? std::vector<std::pair<Precision, Slots>>{{Precision::kBF16, {64}}, {Precision::kF32, {7}}}
          : std::vector<std::pair<Precision, Slots>>{
                {Precision::kBF16, {1, 2, 7, 64, 300, 1024}}, {Precision::kF16, {7, 300}}, {Precision::kF32, {7, 300}}};
  for (const auto& [precision, all_slots] : cases) {
    const Model model = invariant_model(precision);
    for (const int slots : all_slots) {
      const std::size_t count = small_sizes() || slots < 64 ? 12 : static_cast<std::size_t>(slots) + 50;
      expect_texts_as_alone({&model, 1}, count, slots);
    }
  }
}
TEST_F(CudaSeveral, CutsAtEndsOfSegmentsChangeNoBitsIfBatchInvariant) {
  const Model model = invariant_model(Precision::kBF16);
  const auto segment = static_cast<std::size_t>(model.info().memory_segment);
  const std::vector<int> tokens = random_tokens(model, 4 * segment + segment / 2 + 3, 1);
  Session whole = begun(model, tokens);
  const std::span<const float> expected = whole.logits();
  // Beside two others, in calls that end there.
  for (const std::size_t cut : {segment, 3 * segment}) {
    Session session = model.new_session(3);
    for (const auto& part : {std::span(tokens).first(cut), std::span(tokens).subspan(cut)}) {
      std::vector<int> of_each;
      for (int sequence = 0; sequence < session.batch(); ++sequence)
        of_each.insert(of_each.end(), part.begin(), part.end());
      session.prefill(of_each);
    }
    EXPECT_TRUE(std::ranges::equal(session.logits().last(expected.size()), expected)) << cut;
  }
}
TEST_F(CudaSeveralGpus, TextsAreThoseOfOne) { expect_texts_as_alone(load(Precision::kF32), small_sizes() ? 9 : 24, 3); }

}  // namespace
}  // namespace mmrec::test
