#include "mmrec/session.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "mmrec/errors.h"
#include "mmrec/model.h"
#include "mmrec/sampler.h"
#include "tests/engine/toy_runner.h"
#include "tests/support/host_threads.h"

namespace mmrec {
namespace {

using test::toy_config;
using test::toy_model;
using test::toy_session;
using test::ToyLog;

std::vector<float> copy(std::span<const float> x) { return {x.begin(), x.end()}; }

template <class F>
std::string refusal(F f) {
  try {
    f();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

TEST(Session, ConsumesTokensAndReturnsLogits) {
  Session session = toy_session(2);
  EXPECT_EQ(session.batch(), 2);
  EXPECT_EQ(session.vocab_size(), 11);
  EXPECT_EQ(session.position(), 0);
  EXPECT_TRUE(session.logits().empty());
  const std::vector<int> prompt = {1, 2, 3, 4, 5, 6};  // [2, 3]
  EXPECT_EQ(session.prefill(prompt).size(), 22U);
  EXPECT_EQ(session.position(), 3);
  EXPECT_EQ(session.step(std::vector<int>{7, 8}).size(), 22U);
  EXPECT_EQ(session.position(), 4);
  EXPECT_EQ(session.prefill_stats().token_sweeps, 8);
  EXPECT_EQ(session.prefill_stats().fallbacks, 1);
  session.reset();
  EXPECT_EQ(session.position(), 0);
  EXPECT_TRUE(session.logits().empty());
}

TEST(Session, ARefusedCallChangesNothing) {
  Session session = toy_session(2);
  session.prefill(std::vector<int>{1, 2, 3, 4});
  const std::vector<std::byte> before = session.save();
  EXPECT_EQ(refusal([&] { session.prefill({}); }), "found 0 tokens, expected a positive multiple of the batch of 2");
  EXPECT_EQ(refusal([&] {
              session.prefill(std::vector<int>{1, 2, 3});
            }),
            "found 3 tokens, expected a positive multiple of the batch of 2");
  EXPECT_EQ(refusal([&] {
              session.step(std::vector<int>{1, 2, 3, 4});
            }),
            "found 4 tokens, expected one per sequence: 2");
  EXPECT_EQ(refusal([&] { session.prefill(std::vector<int>{1, 2, 3, 11}); }), "token 3 has id 11, expected 0..10");
  EXPECT_EQ(refusal([&] { session.step(std::vector<int>{-1, 2}); }), "token 0 has id -1, expected 0..10");
  EXPECT_EQ(refusal([&] {
              session.score(std::vector<int>{1, std::numeric_limits<int>::min()});
            }),
            "token 1 has id -2147483648, expected 0..10");
  EXPECT_NE(refusal([&] { session.score({}); }), "no error");
  EXPECT_EQ(session.save(), before);
}

TEST(Session, AdvancingIsSteppingWithoutLogits) {
  Session stepped = toy_session(2);
  Session advanced = toy_session(2);
  for (int t = 0; t < 5; ++t) {
    const std::vector<int> tokens = {t, 10 - t};
    const std::vector<float> logits = copy(stepped.step(tokens));
    advanced.advance(tokens);
    EXPECT_EQ(copy(advanced.logits()), logits);
  }
  EXPECT_EQ(advanced.save(), stepped.save());
  EXPECT_EQ(refusal([&] { advanced.advance(std::vector<int>{1}); }), "found 1 tokens, expected one per sequence: 2");
  EXPECT_EQ(refusal([&] { advanced.advance(std::vector<int>{1, 11}); }), "token 1 has id 11, expected 0..10");
  EXPECT_EQ(advanced.save(), stepped.save());
}

TEST(Session, DrawsWhatTheSamplerDrawsForEverySequence) {
  for (const bool device_draws : {false, true}) {
    const auto log = std::make_shared<ToyLog>();
    log->draws = device_draws;
    Session session = toy_model(log).new_session(3);
    SamplerOptions o;
    o.temperature = 4.0F;
    o.seed = 9;
    std::vector<int> tokens(3);
    EXPECT_EQ(refusal([&] { session.draw(o, 0, 0, tokens); }),
              "draw: found a session at position 0, expected a prompt");
    session.prefill(std::vector<int>{1, 2, 3});
    const std::vector<std::byte> before = session.save();
    std::set<int> seen;
    for (std::uint64_t step = 0; step < 40; ++step) {
      session.draw(o, step, 100, tokens);
      Sampler sampler(o);
      for (std::size_t b = 0; b < 3; ++b) {
        EXPECT_EQ(tokens[b], sampler.sample(session.logits().subspan(b * 11, 11), {}, step, 100 + b).token);
        seen.insert(tokens[b]);
      }
    }
    EXPECT_GT(seen.size(), 5U);
    EXPECT_EQ(session.save(), before);
    EXPECT_EQ(log->drawn, device_draws ? 40 : 0);

    o.repetition_penalty = 1.5F;
    EXPECT_EQ(refusal([&] { session.draw(o, 0, 0, tokens); }), "draw: found a repetition penalty of 1.5, expected 1");
    o = {};
    o.top_p = 0.0F;
    EXPECT_NE(refusal([&] { session.draw(o, 0, 0, tokens); }), "no error");
    EXPECT_EQ(refusal([&] { session.draw({}, 0, 0, std::span(tokens).first(2)); }),
              "found 2 tokens, expected one per sequence: 3");
  }
}

TEST(Session, AnUndrawableRowIsANumericFaultWhoeverDraws) {
  for (const bool device_draws : {false, true}) {
    const auto log = std::make_shared<ToyLog>();
    log->draws = device_draws;
    const Model model = toy_model(log, toy_config(), [](double, std::int64_t, int token) {
      return token == 4 ? std::numeric_limits<float>::quiet_NaN() : 0.0F;
    });
    Session session = model.new_session();
    session.step(std::vector<int>{1});
    int token = 0;
    try {
      session.draw({}, 7, 0, {&token, 1});
      FAIL();
    } catch (const NumericError& error) {
      EXPECT_STREQ(error.what(), "step 7: logit of token 4 is NaN, expected a finite number or -inf");
    }
  }
}

TEST(Session, ScoreIsTheLogSoftmaxOfTheLogitsBefore) {
  Session scored = toy_session();
  Session stepped = toy_session();
  const std::vector<int> tokens = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};
  const std::vector<float> logprobs = scored.score(tokens);
  EXPECT_EQ(logprobs[0], 0.0F);
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    if (t > 0) {
      double sum = 0.0;
      for (const float x : stepped.logits()) sum += std::exp(static_cast<double>(x));
      const float logit = stepped.logits()[static_cast<std::size_t>(tokens[t])];
      EXPECT_NEAR(logprobs[t], static_cast<double>(logit) - std::log(sum), 1e-5);
    }
    stepped.step({&tokens[t], 1});
  }
  EXPECT_EQ(copy(scored.logits()), copy(stepped.logits()));
  // A later call knows what came before.
  EXPECT_NE(scored.score(std::vector<int>{7})[0], 0.0F);
}

TEST(Session, SavedAndRestoredItContinuesToTheBit) {
  for (const int batch : {1, 3}) {
    Session session = toy_session(batch);
    std::vector<int> tokens;
    for (int i = 0; i < 9 * batch; ++i) tokens.push_back(i % 11);
    session.prefill(tokens);
    const std::vector<std::byte> saved = session.save();
    const std::vector<float> at_save = copy(session.logits());
    session.prefill(tokens);
    const std::vector<float> expected = copy(session.logits());

    Session other = toy_session(batch);
    other.step(std::vector<int>(static_cast<std::size_t>(batch), 2));
    other.restore(saved);
    EXPECT_EQ(other.position(), 9);
    EXPECT_EQ(copy(other.logits()), at_save);
    EXPECT_EQ(other.save(), saved);
    other.prefill(tokens);
    EXPECT_EQ(copy(other.logits()), expected);
    EXPECT_EQ(other.save(), session.save());
  }
}

TEST(Session, AFreshStateSavesAndRestores) {
  Session session = toy_session();
  const std::vector<std::byte> fresh = session.save();
  session.step(std::vector<int>{1});
  session.restore(fresh);
  EXPECT_EQ(session.position(), 0);
  EXPECT_TRUE(session.logits().empty());
}

TEST(Session, AFailedRestoreChangesNothing) {
  Session session = toy_session();
  session.prefill(std::vector<int>{1, 2, 3});
  const std::vector<std::byte> before = session.save();
  Session other = toy_session(1, toy_config(), 99);  // another model
  other.prefill(std::vector<int>{1, 2});
  EXPECT_THROW(session.restore(other.save()), std::runtime_error);
  std::vector<std::byte> damaged = before;
  damaged[100] ^= std::byte{1};
  EXPECT_THROW(session.restore(damaged), std::runtime_error);
  EXPECT_THROW(session.restore({}), std::runtime_error);
  EXPECT_EQ(session.save(), before);
}

TEST(Session, ACloneGoesItsOwnWay) {
  Session session = toy_session();
  session.prefill(std::vector<int>{1, 2, 3});
  Session clone = session.clone();
  EXPECT_EQ(clone.save(), session.save());
  const std::vector<std::byte> before = session.save();
  clone.step(std::vector<int>{5});
  EXPECT_EQ(session.save(), before);
  session.step(std::vector<int>{5});
  EXPECT_EQ(clone.save(), session.save());
}

TEST(Session, SessionsInTwoThreadsDoNotMeet) {
  const Model model = toy_model();
  const auto run = [&](int first, std::vector<std::byte>& saved) {
    Session session = model.new_session();
    for (int i = 0; i < 300; ++i) session.step(std::vector<int>{(first + i) % 11});
    saved = session.save();
  };
  std::vector<std::byte> a, b, together_a, together_b;
  run(0, a);
  run(5, b);
  test::run_together({[&] { run(0, together_a); }, [&] { run(5, together_b); }});
  EXPECT_EQ(together_a, a);
  EXPECT_EQ(together_b, b);
  EXPECT_NE(a, b);
}

TEST(Session, MovesLeaveTheStateWhole) {
  Session session = toy_session();
  session.prefill(std::vector<int>{1, 2, 3});
  const std::vector<std::byte> saved = session.save();
  Session moved = std::move(session);
  EXPECT_EQ(moved.save(), saved);
  session = toy_session();
  session = std::move(moved);
  EXPECT_EQ(session.save(), saved);
}

TEST(Model, ChecksBatchAndOptions) {
  const auto log = std::make_shared<ToyLog>();
  const Model model = toy_model(log);
  for (const int batch : {0, -1, 65537, std::numeric_limits<int>::max()}) {
    EXPECT_EQ(refusal([&] { (void)model.new_session(batch); }),
              "batch: found " + std::to_string(batch) + ", expected 1..65536");
  }
  const auto refused = [&](auto member, auto value) {
    SessionOptions o;
    o.*member = value;
    return refusal([&] { (void)model.new_session(1, o); });
  };
  EXPECT_EQ(refused(&SessionOptions::threads, -1), "session option threads: found -1, expected >= 0");
  EXPECT_EQ(refused(&SessionOptions::max_sweeps, 0), "session option max_sweeps: found 0, expected >= 1");
  for (const float x : {-1.0F, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    EXPECT_NE(refused(&SessionOptions::sweep_tolerance, x), "no error");
  }
  EXPECT_EQ(refused(&SessionOptions::prefill, static_cast<PrefillMode>(9)),
            "session option prefill: found 9, expected a PrefillMode");
  EXPECT_TRUE(log->batches.empty());  // refused before a runner was made

  SessionOptions o;
  o.threads = 10000;
  o.prefill = PrefillMode::kSteps;
  o.max_sweeps = 3;
  EXPECT_EQ(model.new_session(2, o).batch(), 2);
  EXPECT_EQ(log->options.threads, 256);
  EXPECT_EQ(log->options.prefill, models::PrefillMode::kSteps);
  EXPECT_EQ(log->options.max_sweeps, 3);
  EXPECT_EQ(log->options.sweep_tolerance, 0.0F);  // the runner knows what is best
}

TEST(Model, LoadRefusesBadOptionsAndMissingFolders) {
  LoadOptions o;
  o.threads = -1;
  EXPECT_EQ(refusal([&] { Model::load("/nonexistent", o); }), "load option threads: found -1, expected >= 0");
  o = {};
  o.device = static_cast<Device>(77);
  EXPECT_EQ(refusal([&] { Model::load("/nonexistent", o); }), "load option device: found 77, expected a Device");
  o = {};
  o.precision = static_cast<Precision>(77);
  EXPECT_EQ(refusal([&] { Model::load("/nonexistent", o); }), "load option precision: found 77, expected a Precision");
  o.device = Device::kCpu;
  o.precision = Precision::kBF16;
  EXPECT_EQ(refusal([&] { Model::load("/nonexistent", o); }),
            "load option precision: found bf16 on the CPU, expected auto or fp32");
  EXPECT_THROW(Model::load("/nonexistent"), std::system_error);
}

}  // namespace
}  // namespace mmrec
