// Requests to a generator that can be made again of generate(), and what a generator has made of them.
#pragma once

#include "mmrec/generator.h"
#include "tests/engine/toy_executor.h"
#include "tests/support/model_folder.h"
#include "tests/support/tokenizer_builder.h"

namespace mmrec::test {

inline constexpr int kEos = 2, kThe = 3, kCat = 4, kS = 5, kDot = 6, kByte0 = 7;

inline const Tokenizer& tokenizer() {
  static const Tokenizer loaded = [] {
    const std::string space = "\xE2\x96\x81";
    const TempFolder folder;
    write_file(folder / "tokenizer.model",
               TokenizerBuilder().words({space + "the", space + "cat", "s", "."}).bytes().build());
    return Tokenizer::load(folder.path());
  }();
  return loaded;
}

inline Model model_with(std::shared_ptr<ToyLog> log = nullptr, ToyExecutor::Logits logits = {}) {
  return toy_model(std::move(log), toy_config(tokenizer().vocab_size()), std::move(logits));
}

/// The usual logits, until a flag says that the device has gone.
template <class Flag>
ToyExecutor::Logits logits_unless(const Flag& is_broken) {
  return [&is_broken](double summary, std::int64_t position, int token) {
    return is_broken ? throw std::runtime_error("the device is gone") : toy_logit(summary, position, token);
  };
}

/// A request that can be made again, its callbacks' answers with it.
struct Wish {
  std::vector<int> prompt = {1};
  GenerateOptions options = {};
  std::size_t most_text = std::string::npos;  // on_text answers false from here on
  int most_asked = std::numeric_limits<int>::max();

  GenerateOptions make() const {
    GenerateOptions made = options;
    made.on_text = [most = most_text, received = std::string()](std::string_view text) mutable {
      received += text;
      return received.size() < most;
    };
    made.cancelled = [left = most_asked]() mutable { return left-- <= 0; };
    return made;
  }
};

inline Wish wish(std::vector<int> prompt, std::int64_t max_tokens = 8) {
  Wish made;
  made.prompt = std::move(prompt);
  made.options.max_tokens = max_tokens;
  made.options.sampler.temperature = 2.0F;
  made.options.sampler.top_k = 0;
  return made;
}

/// All that can be asked for, at random.
inline Wish random_wish(std::mt19937& rng, int vocab = tokenizer().vocab_size()) {
  const auto below = [&](unsigned n) { return static_cast<int>(rng() % n); };
  Wish made = wish({}, std::array<std::int64_t, 6>{0, 1, 2, 9, 25, 40}[rng() % 6]);
  for (int n = 1 + below(below(4) == 0 ? 400 : 12); n > 0; --n) {
    made.prompt.push_back(below(static_cast<unsigned>(vocab)));
  }
  GenerateOptions& o = made.options;
  o.sampler.temperature = std::array{0.0F, 0.7F, 5.0F}[rng() % 3];
  o.sampler.top_k = below(2) * 30;
  o.sampler.seed = rng() % 5;
  o.sequence = rng() % 3;
  if (below(3) == 0) o.sampler.repetition_penalty = 1.5F;
  if (below(3) == 0) o.sampler.repetition_window = below(300);
  o.logprobs = below(2) == 0;
  if (below(4) == 0) o.top_logprobs = below(400);
  if (below(2) == 0) o.stop = {"the", "0"};
  for (int n = below(2) == 0 ? 8 : 0; n > 0; --n) o.stop.emplace_back(1, static_cast<char>(below(128)));
  for (int n = below(3) == 0 ? 20 : 0; n > 0; --n) o.eos_token_ids.push_back(below(263));
  if (below(6) == 0) made.most_text = static_cast<std::size_t>(below(30));
  if (below(6) == 0) made.most_asked = below(20);
  return made;
}

inline GenerateResult continued(Session session, const Wish& wanted) {
  if (!wanted.prompt.empty()) session.prefill(wanted.prompt);
  return generate(session, tokenizer(), wanted.make());
}
/// What a request gets on a session of its own.
inline GenerateResult alone(const Wish& wanted, const Model& model = model_with()) {
  return continued(model.new_session(), wanted);
}

inline void expect_same(const GenerateResult& found, const GenerateResult& expected, const std::string& what = "") {
  EXPECT_EQ(found.text, expected.text) << what;
  EXPECT_EQ(found.tokens, expected.tokens) << what;
  EXPECT_EQ(found.logprobs, expected.logprobs) << what;
  ASSERT_EQ(found.top_logprobs.size(), expected.top_logprobs.size()) << what;
  for (std::size_t i = 0; i < found.top_logprobs.size(); ++i) {
    EXPECT_EQ(found.top_logprobs[i].token, expected.top_logprobs[i].token) << what;
    EXPECT_EQ(found.top_logprobs[i].logprob, expected.top_logprobs[i].logprob) << what;
  }
  EXPECT_EQ(to_string(found.finish_reason), to_string(expected.finish_reason)) << what;
  EXPECT_EQ(found.error, expected.error) << what;
}

/// The same of requests that are numbered from 1.
inline void expect_alone(const std::map<Generator::RequestId, GenerateResult>& results,
                         const std::vector<Wish>& wishes) {
  ASSERT_EQ(results.size(), wishes.size());
  for (std::size_t i = 0; i < wishes.size(); ++i) {
    expect_same(results.at(i + 1), alone(wishes[i]), "request " + std::to_string(i + 1));
  }
}

/// A generator, and what it has finished, by number and in order.
struct Queue {
  explicit Queue(const Model& model, int slots = 3) : generator(model, tokenizer(), {.slots = slots}) {}
  explicit Queue(std::vector<Model> models, int slots = 3)
      : generator(std::move(models), tokenizer(), {.slots = slots}) {}

  GeneratorRequest request(const Wish& wanted) {
    return {.prompt = wanted.prompt, .options = wanted.make(), .on_finish = [this, id = next++](GenerateResult result) {
              EXPECT_TRUE(results.emplace(id, std::move(result)).second) << "finished twice: " << id;
              order.push_back(id);
            }};
  }
  Generator::RequestId submit(const Wish& wanted) { return generator.submit(request(wanted)); }

  Generator generator;
  Generator::RequestId next = 1;
  std::map<Generator::RequestId, GenerateResult> results;
  std::vector<Generator::RequestId> order;
};

/// 60 requests at random, that come as others go: each gets what it gets alone, and that in this thread.
inline void expect_each_as_alone(Queue& queue, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<Wish> wishes;
  while (wishes.size() < 60 || queue.generator.run_once()) {
    for (unsigned n = rng() % 4; n > 0 && wishes.size() < 60; --n) {
      wishes.push_back(random_wish(rng));
      GeneratorRequest request = queue.request(wishes.back());
      request.options.on_token = [here = std::this_thread::get_id()](int, float) {
        EXPECT_EQ(std::this_thread::get_id(), here);
        return true;
      };
      EXPECT_EQ(queue.generator.submit(std::move(request)), wishes.size());
    }
    EXPECT_LE(queue.generator.running(), static_cast<std::size_t>(queue.generator.slots()));
  }
  expect_alone(queue.results, wishes);
  EXPECT_GT(queue.generator.prefill_stats().layer_tokens, 0);
}

/// So many requests at random go on from `prefix`, every other one without a prompt of its own: each gets what it gets
/// alone.
inline void expect_branches_as_alone(Queue& queue, const std::shared_ptr<const Session>& prefix, int count) {
  std::mt19937 rng(5);
  std::vector<Wish> wishes;
  for (int i = 0; i < count; ++i) {
    Wish wanted = random_wish(rng);
    if (i % 2 == 0) wanted.prompt.clear();
    GeneratorRequest request = queue.request(wanted);
    request.start = prefix;
    queue.generator.submit(std::move(request));
    wishes.push_back(std::move(wanted));
  }
  queue.generator.run();
  for (std::size_t i = 0; i < wishes.size(); ++i) {
    expect_same(queue.results.at(i + 1), continued(prefix->clone(), wishes[i]), "branch " + std::to_string(i));
  }
}

}  // namespace mmrec::test
