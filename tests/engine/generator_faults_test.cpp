// Requests that fail, and what others notice of it: nothing.

#include "mmrec/generator.h"
#include "tests/engine/generator_queue.h"
#include "tests/support/refusal.h"

namespace mmrec::test {
namespace {

TEST(GeneratorFaults, WhatACallbackThrowsArrivesAfterTheRoundAndCancelsItsRequest) {
  const Wish wanted = wish({1, kThe}, 12);
  for (const int which : {0, 1, 2}) {
    Queue queue(model_with(), 3);
    queue.submit(wanted);
    GeneratorRequest bad = queue.request(wanted);
    int left = 4;
    const auto answer = [&] {
      if (--left == 0) throw std::out_of_range("enough");
      return true;
    };
    if (which == 0) bad.options.on_token = [&](int, float) { return answer(); };
    if (which == 1) bad.options.on_text = [&](std::string_view) { return answer(); };
    if (which == 2) bad.options.cancelled = [&] { return !answer(); };
    queue.generator.submit(std::move(bad));
    queue.submit(wanted);
    EXPECT_THROW(queue.generator.run(), std::out_of_range);
    EXPECT_EQ(queue.results.at(2).finish_reason, FinishReason::kCancelled);
    EXPECT_EQ(queue.results.size(), 1U);
    queue.generator.run();
    expect_same(queue.results.at(1), alone(wanted));
    expect_same(queue.results.at(3), alone(wanted));
  }
  Queue queue(model_with(), 1);
  for (int i = 0; i < 3; ++i) {
    GeneratorRequest bad = queue.request(wanted);
    bad.on_finish = [then = bad.on_finish, i](GenerateResult result) {
      then(std::move(result));
      throw std::runtime_error(std::to_string(i));
    };
    queue.generator.submit(std::move(bad));
  }
  for (const char* what : {"0", "1", "2"}) {
    EXPECT_EQ(refusal<std::runtime_error>([&] { queue.generator.run(); }), what);
  }
  EXPECT_FALSE(queue.generator.run_once());
  for (Generator::RequestId id = 1; id <= 3; ++id) expect_same(queue.results.at(id), alone(wanted));
}

TEST(GeneratorFaults, ANumericFaultIsTheFaultOfItsRequestAlone) {
  float fault = 0.0F;
  const auto logits = [&fault](double summary, std::int64_t position, int token) {
    return position == 9 ? fault : toy_logit(summary, position, token);
  };
  for (const auto& [device_draws, device_steps] : {std::pair{false, false}, {true, false}, {true, true}}) {
    for (const auto& [penalty, is_nan] : {std::pair{1.0F, true}, {1.5F, true}, {1.0F, false}}) {
      fault = is_nan ? std::numeric_limits<float>::quiet_NaN() : -HUGE_VALF;
      const auto log = logged({.draws = device_draws, .steps = device_steps});
      Queue queue(model_with(log, logits), 3);
      std::vector<Wish> wishes = {wish({1, kThe}, 6), wish({1, kThe, kCat, kCat, kS}, 6),  // comes to the position
                                  wish({kS, kThe}, 6), wish({kS, kThe}, 6)};
      for (Wish& wanted : wishes) {
        wanted.options.sampler.repetition_penalty = penalty;
        queue.submit(wanted);
      }
      queue.generator.run();
      EXPECT_EQ(queue.results.at(2).finish_reason, FinishReason::kError);
      const std::string why = is_nan         ? device_steps  // the logits have gone
                                                   ? "a logit is NaN or +inf, expected finite numbers or -inf"
                                                   : "logit of token 0 is NaN, expected a finite number or -inf"
                              : device_steps ? "all logits that may be drawn are -inf"
                                             : "all 263 logits are -inf";
      EXPECT_EQ(queue.results.at(2).error, "step 9: " + why);
      EXPECT_EQ(queue.results.at(2).tokens.size(), 4U);
      wishes[1].options.max_tokens = 4;
      EXPECT_EQ(queue.results.at(2).tokens, alone(wishes[1]).tokens);
      for (const std::size_t i : {0U, 2U, 3U}) expect_same(queue.results.at(i + 1), alone(wishes[i]));
    }
  }
}

TEST(GeneratorFaults, ACallOfTheDeviceThatFailsEndsThoseInItAndNoOthers) {
  bool is_broken = false;
  Queue queue(model_with(nullptr, logits_unless(is_broken)), 2);
  const Wish wanted = wish({1, kThe}, 5);
  for (int i = 0; i < 4; ++i) queue.submit(wanted);
  queue.generator.run_once();
  queue.generator.run_once();
  is_broken = true;
  EXPECT_THROW(queue.generator.run_once(), std::runtime_error);
  for (const Generator::RequestId id : {1U, 2U}) {
    EXPECT_EQ(queue.results.at(id).finish_reason, FinishReason::kError);
    EXPECT_EQ(queue.results.at(id).error, "the device is gone");
    EXPECT_EQ(queue.results.at(id).tokens.size(), 2U);
  }
  is_broken = false;
  queue.generator.run();
  expect_same(queue.results.at(3), alone(wanted));
  expect_same(queue.results.at(4), alone(wanted));
}

TEST(GeneratorFaults, RefusesWhatCannotBeAndKeepsTheRest) {
  const Model model = model_with();
  Queue queue(model);
  queue.submit(wish({1}));
  const auto refused = [&](auto change, const std::string& why) {
    GeneratorRequest request = queue.request(wish({1}));
    change(request);
    --queue.next;
    EXPECT_EQ(refusal([&] { queue.generator.submit(std::move(request)); }), why);
  };
  const std::vector<int> one = {1};
  refused([](GeneratorRequest& r) { r.prompt = {}; },
          "prompt: found no tokens and no state to go on from, expected at least one token");
  refused([](GeneratorRequest& r) { r.prompt = {1, 263}; }, "prompt token 1 has id 263, expected 0..262");
  refused([](GeneratorRequest& r) { r.options.max_tokens = -2; }, "max_tokens: found -2, expected >= -1");
  refused([](GeneratorRequest& r) { r.options.stop = {"x", ""}; }, "stop string 1 is empty, expected text");
  refused([](GeneratorRequest& r) { r.options.eos_token_ids = {-1}; },
          "end-of-sequence token 0 has id -1, expected 0..262");
  refused([](GeneratorRequest& r) { r.options.sampler.top_k = -1; },
          "sampler option top_k: found -1, expected an integer >= 0");
  refused([&](GeneratorRequest& r) { r.options.context = one; },
          "context: found 1 tokens without a state that has consumed them");
  refused([&](GeneratorRequest& r) { r.start = std::make_shared<Session>(model.new_session(2)); },
          "start: found a session of batch 2, expected 1");
  refused([](GeneratorRequest& r) { r.start = std::make_shared<Session>(model_with().new_session()); },
          "start: found a session of another model, expected one of the generator's");
  refused(
      [&](GeneratorRequest& r) {
        r.start = std::make_shared<Session>(model.new_session());
        r.state = r.start->save();
      },
      "request: found a session to start from and a saved state, expected one of them");
  GeneratorRequest damaged = queue.request(wish({1}));
  --queue.next;
  damaged.state.resize(7);
  EXPECT_THROW(queue.generator.submit(std::move(damaged)), std::runtime_error);

  EXPECT_EQ(queue.submit(wish({2})), 2U);
  queue.generator.run();
  EXPECT_EQ(queue.results.size(), 2U);
  expect_same(queue.results.at(1), alone(wish({1})));
  expect_same(queue.results.at(2), alone(wish({2})));
}

}  // namespace
}  // namespace mmrec::test
