// The promises of Session on a toy executor: arguments, positions, logits, progress, draws, clones and saved states.
// Longer than other files, because one class makes them all.
#include "mmrec/session.h"

#include "mmrec/computed_with.h"
#include "mmrec/errors.h"
#include "mmrec/model.h"
#include "mmrec/sampler.h"
#include "tests/engine/sessions.h"
#include "tests/engine/toy_executor.h"
#include "tests/support/refusal.h"

namespace mmrec::test {
namespace {

TEST(Session, ConsumesTokensAndReturnsLogits) {
  Session session = toy_session(2);
  EXPECT_EQ(session.batch(), 2);
  EXPECT_EQ(session.vocab_size(), 11);
  EXPECT_EQ(session.position(), 0);
  EXPECT_TRUE(session.logits().empty());
  const std::vector<int> prompt = {1, 2, 3, 4, 5, 6};  // [2, 3]
  session.prefill(prompt);
  EXPECT_EQ(session.logits().size(), 22U);
  EXPECT_EQ(session.position(), 3);
  const std::vector<float> before = copy(session.logits());
  session.step(std::vector<int>{7, 8});
  EXPECT_EQ(session.logits().size(), 22U);
  EXPECT_NE(copy(session.logits()), before);
  EXPECT_EQ(session.position(), 4);
  session.prefill(prompt);
  EXPECT_EQ(session.prefill_stats().token_sweeps, 2 * 12);  // of two sequences and both calls
  EXPECT_EQ(session.prefill_stats().fallbacks, 4);
  session.reset();
  EXPECT_EQ(session.position(), 0);
  EXPECT_EQ(session.prefill_stats().token_sweeps, 0);
  EXPECT_TRUE(session.logits().empty());
}

TEST(Session, ARefusedCallChangesNothing) {
  Session session = toy_session(2);
  session.prefill(std::vector<int>{1, 2, 3, 4});
  const std::vector<std::byte> before = session.save();
  using Tokens = std::vector<int>;
  const auto prefill = [&](const Tokens& tokens) { return refusal([&] { session.prefill(tokens); }); };
  const auto step = [&](const Tokens& tokens) { return refusal([&] { session.step(tokens); }); };
  EXPECT_EQ(prefill({}), "found 0 tokens, expected a positive multiple of the batch of 2");
  EXPECT_EQ(prefill({1, 2, 3}), "found 3 tokens, expected a positive multiple of the batch of 2");
  EXPECT_EQ(step({1, 2, 3, 4}), "found 4 tokens, expected one per sequence: 2");
  EXPECT_EQ(prefill({1, 2, 3, 11}), "token 3 has id 11, expected 0..10");
  EXPECT_EQ(step({-1, 2}), "token 0 has id -1, expected 0..10");
  const Tokens least = {1, std::numeric_limits<int>::min()};
  EXPECT_EQ(refusal([&] { logprobs_of(session, least); }), "token 1 has id -2147483648, expected 0..10");
  EXPECT_NE(refusal([&] { session.score({}, {}); }), "no error");
  std::vector<float> logprobs(3);
  const Tokens four = {1, 2, 3, 4};
  EXPECT_EQ(refusal([&] { session.score(four, logprobs); }), "found room for 3 log-probs, expected one per token: 4");
  EXPECT_EQ(refusal([&] { (void)session.recent_tokens(2); }), "found sequence 2, expected 0..1");
  EXPECT_NE(refusal([&] { (void)session.recent_tokens(-1); }), "no error");
  EXPECT_EQ(session.save(), before);
}

TEST(Session, LogitsAreFetchedWhenAskedForAndOnce) {
  const auto log = logged();
  Session session = toy_model(log).new_session(2);
  EXPECT_TRUE(session.logits().empty());
  session.prefill(std::vector<int>{1, 2, 3, 4});
  session.step(std::vector<int>{5, 6});
  logprobs_of(session, std::vector<int>{7, 8});
  EXPECT_EQ(log->fetched, 0);
  const std::vector<float> logits = copy(session.logits());
  EXPECT_EQ(copy(session.logits()), logits);
  EXPECT_EQ(log->fetched, 1);
  // Each call that changes the state makes them stale.
  const std::vector<std::byte> state = session.save();
  int fetched = 1;
  const auto expect_fetch = [&](auto call) {
    call();
    (void)session.logits();
    EXPECT_EQ(log->fetched, ++fetched);
  };
  expect_fetch([&] { session.prefill(std::vector<int>{1, 2}); });
  expect_fetch([&] { session.step(std::vector<int>{1, 2}); });
  expect_fetch([&] { logprobs_of(session, std::vector<int>{1, 2}); });
  expect_fetch([&] { session.restore(state); });
  EXPECT_EQ(copy(session.logits()), logits);
  EXPECT_EQ(copy(session.clone().logits()), logits);
  session.reset();
  EXPECT_TRUE(session.logits().empty());
}

TEST(Session, AWatchedCallIsAskedBetweenChunksAndCanBeEnded) {
  for (const bool one_by_one : {false, true}) {
    for (const bool scores : {false, true}) {
      const auto log =
          logged({.chunk = 10, .one_by_one = one_by_one});  // an executor that lets some sequences lag behind
      const Model model = toy_model(log);
      std::vector<int> tokens(3 * 45);
      for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int>(i * i % 11);
      std::vector<float> logprobs(tokens.size());
      Session session = model.new_session(3);
      const auto consume = [&](const CallOptions& options) {
        if (scores) {
          session.score(tokens, logprobs, options);
        } else {
          session.prefill(tokens, options);
        }
      };
      std::vector<std::int64_t> asked;
      const auto watch = [&](std::int64_t done, std::int64_t total) {
        EXPECT_EQ(total, 45);
        asked.push_back(done);
        return true;
      };
      consume({.on_progress = watch});
      EXPECT_EQ(session.position(), 45);
      EXPECT_EQ(asked, (std::vector<std::int64_t>{10, 20, 30, 40}));
      const std::vector<std::byte> whole = session.save();

      session.reset();
      bool was_asked = false;
      consume({.on_progress = [&](std::int64_t done, std::int64_t) {
        EXPECT_FALSE(was_asked) << "after the end was asked for";
        was_asked = true;
        return done < 10;
      }});
      EXPECT_TRUE(was_asked);
      const auto reached = static_cast<std::size_t>(session.position());
      EXPECT_EQ(reached, one_by_one ? 45U : 20U);
      EXPECT_EQ(session.logits().size(), 33U);
      EXPECT_EQ(session.recent_tokens(1).size(), reached);
      // The state, and the log-probs, are those of the tokens consumed.
      std::vector<int> consumed, rest;
      for (std::size_t b = 0; b < 3; ++b) {
        const auto row = tokens.begin() + static_cast<std::ptrdiff_t>(b * 45);
        consumed.insert(consumed.end(), row, row + static_cast<std::ptrdiff_t>(reached));
        rest.insert(rest.end(), row + static_cast<std::ptrdiff_t>(reached), row + 45);
      }
      Session less = model.new_session(3);
      const std::vector<float> expected = logprobs_of(less, consumed);
      EXPECT_EQ(session.save(), less.save());
      for (std::size_t b = 0; b < 3 && scores; ++b) {
        for (std::size_t t = 0; t < reached; ++t) EXPECT_EQ(logprobs[b * 45 + t], expected[b * reached + t]);
      }
      if (!rest.empty()) session.prefill(rest);
      EXPECT_EQ(session.save(), whole);
    }
  }
}

TEST(Session, WhatACallbackThrowsArrivesAndTheSessionStandsWhereItHasCome) {
  const auto log = logged({.chunk = 10});
  const Model model = toy_model(log);
  const std::vector<int> tokens(45, 3);
  Session session = model.new_session();
  const CallOptions options{.on_progress = [](std::int64_t, std::int64_t) -> bool { throw std::out_of_range("no"); }};
  EXPECT_THROW(session.prefill(tokens, options), std::out_of_range);
  EXPECT_EQ(session.position(), 20);
  Session less = begun(model, std::span(tokens).first(20));
  EXPECT_EQ(session.save(), less.save());
}

TEST(Session, RemembersTheLastTokensOfEachSequence) {
  constexpr int kMost = Session::kRecentTokens;
  Session session = toy_session(2);
  std::vector<std::vector<int>> all(2);
  int next = 0;
  const auto give = [&](std::size_t count, bool scores) {
    std::vector<int> tokens;
    for (std::vector<int>& row : all) {
      for (std::size_t i = 0; i < count; ++i) tokens.push_back((next = (next * 7 + 5) % 11));
      row.insert(row.end(), tokens.end() - static_cast<std::ptrdiff_t>(count), tokens.end());
    }
    if (scores) {
      logprobs_of(session, tokens);
    } else if (count == 1) {
      session.step(tokens);
    } else {
      session.prefill(tokens);
    }
  };
  const auto check = [&](const Session& which) {
    for (int b = 0; b < 2; ++b) {
      const std::vector<int>& row = all[static_cast<std::size_t>(b)];
      const std::size_t shown = std::min<std::size_t>(row.size(), kMost);
      const std::span<const int> recent = which.recent_tokens(b);
      EXPECT_EQ(std::vector<int>(recent.begin(), recent.end()),
                std::vector<int>(row.end() - static_cast<std::ptrdiff_t>(shown), row.end()));
    }
  };
  check(session);
  for (const std::size_t count : {1, 3, 1, 1, 200, 1, 255, 256, 257, 1, 1000, 1, 2, 100, 150, 100, 1}) {
    give(count, count % 3 == 0);
    check(session);
  }
  for (int i = 0; i < 2 * kMost + 3; ++i) {
    give(1, false);
    check(session);
  }
  check(session.clone());
  const std::vector<std::byte> state = session.save();
  session.restore(state);
  EXPECT_TRUE(session.recent_tokens(1).empty());
  all = {{}, {}};
  give(2, false);
  check(session);
  session.reset();
  EXPECT_TRUE(session.recent_tokens().empty());
}

TEST(Session, DrawsWhatTheSamplerDrawsForEverySequence) {
  for (const bool device_draws : {false, true}) {
    const auto log = logged({.draws = device_draws});
    Session session = toy_model(log).new_session(3);
    SamplerOptions o{.temperature = 4.0F, .seed = 9};
    std::vector<Sample> samples(3);
    EXPECT_EQ(refusal([&] { session.draw(o, 0, 0, samples); }),
              "draw: found a session at position 0, expected a prompt");
    session.prefill(std::vector<int>{1, 2, 3});
    const std::vector<std::byte> before = session.save();
    std::set<int> seen;
    for (std::uint64_t step = 0; step < 40; ++step) {
      session.draw(o, step, 100, samples);
      const std::vector<Sample> with = samples;
      session.draw(o, step, 100, samples, /*logprobs=*/false);
      Sampler sampler(o);
      for (std::size_t b = 0; b < 3; ++b) {
        const Sample expected = sampler.sample(session.logits().subspan(b * 11, 11), {}, step, 100 + b);
        EXPECT_EQ(with[b].token, expected.token);
        EXPECT_EQ(with[b].logprob, expected.logprob);
        EXPECT_EQ(samples[b].token, expected.token);
        EXPECT_EQ(samples[b].logprob, 0.0F);
        seen.insert(with[b].token);
      }
    }
    EXPECT_GT(seen.size(), 5U);
    EXPECT_EQ(session.save(), before);
    EXPECT_EQ(log->drawn, device_draws ? 80 : 0);

    o.repetition_penalty = 1.5F;
    EXPECT_EQ(refusal([&] { session.draw(o, 0, 0, samples); }), "draw: found a repetition penalty of 1.5, expected 1");
    o = {};
    o.top_p = 0.0F;
    EXPECT_NE(refusal([&] { session.draw(o, 0, 0, samples); }), "no error");
    EXPECT_EQ(refusal([&] { session.draw({}, 0, 0, std::span(samples).first(2)); }),
              "found 2 samples, expected one per sequence: 3");
  }
}

TEST(Session, AnUndrawableRowIsANumericFaultWhoeverDraws) {
  for (const bool device_draws : {false, true}) {
    const auto log = logged({.draws = device_draws});
    const Model model = toy_model(log, toy_config(), [](double, std::int64_t, int token) {
      return token == 4 ? std::numeric_limits<float>::quiet_NaN() : 0.0F;
    });
    Session session = model.new_session();
    session.step(std::vector<int>{1});
    Sample sample;
    EXPECT_EQ(refusal<NumericError>([&] {
                session.draw({}, 7, 0, {&sample, 1});
              }),
              "step 7: logit of token 4 is NaN, expected a finite number or -inf");
  }
}

TEST(Session, SavedAndRestoredItContinuesToTheBit) {
  for (const auto& [batch, consumed] : {std::pair{1, 9}, {3, 9}, {1, 0}}) {
    Session session = toy_session(batch);
    std::vector<int> tokens;
    for (int i = 0; i < 9 * batch; ++i) tokens.push_back(i % 11);
    if (consumed > 0) session.prefill(tokens);
    const std::vector<std::byte> saved = session.save();
    const std::vector<float> at_save = copy(session.logits());
    session.prefill(tokens);
    const std::vector<float> expected = copy(session.logits());

    Session other = toy_session(batch);
    other.step(std::vector<int>(static_cast<std::size_t>(batch), 2));
    other.restore(saved);
    EXPECT_EQ(other.position(), consumed);
    EXPECT_EQ(copy(other.logits()), at_save);
    EXPECT_EQ(other.save(), saved);
    other.prefill(tokens);
    EXPECT_EQ(copy(other.logits()), expected);
    EXPECT_EQ(other.save(), session.save());
  }
}

TEST(Session, ACloneOutlivesItsOriginalAndIsNotMadeByWayOfTheHost) {
  const auto log = logged();
  auto original = std::make_unique<Session>(toy_model(log).new_session(2));
  original->prefill(std::vector<int>{1, 2, 3, 4});
  Session copied = original->clone();
  EXPECT_EQ(log->through_host, 0);
  EXPECT_EQ(log->copies, 1);
  EXPECT_EQ(log->fetched, 0);
  EXPECT_EQ(copied.position(), 2);
  EXPECT_EQ(copied.prefill_stats().layer_tokens, original->prefill_stats().layer_tokens);
  const std::vector<std::byte> state = original->save();
  original.reset();
  EXPECT_EQ(copied.save(), state);
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
  const auto log = logged();
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
  EXPECT_TRUE(log->acquired.empty());  // refused before a slot was acquired

  SessionOptions o{.threads = 10000, .prefill = PrefillMode::kSteps, .max_sweeps = 3};
  EXPECT_EQ(model.new_session(2, o).batch(), 2);
  EXPECT_EQ(log->options.threads, 256);
  EXPECT_EQ(log->options.prefill, PrefillMode::kSteps);
  EXPECT_EQ(log->options.max_sweeps, 3);
  EXPECT_EQ(log->options.sweep_tolerance, 0.0F);  // the executor knows what is best
}

TEST(Model, WhatItComputesWithHasItsOptionsInRange) {
  EXPECT_EQ(refusal([] { (void)computed_with({}, {.prefill = static_cast<PrefillMode>(77)}); }),
            "session option prefill: found 77, expected a PrefillMode");
}

TEST(Model, LoadRefusesBadOptionsAndMissingFolders) {
  const auto refused = [](const LoadOptions& o) { return refusal([&] { Model::load("/nonexistent", o); }); };
  EXPECT_EQ(refused({.threads = -1}), "load option threads: found -1, expected >= 0");
  EXPECT_EQ(refused({.device = static_cast<Device>(77)}), "load option device: found 77, expected a Device");
  EXPECT_EQ(refused({.precision = static_cast<Precision>(77)}),
            "load option precision: found 77, expected a Precision");
  EXPECT_EQ(refused({.variant = {.expert = static_cast<Expert>(77)}}),
            "load option expert: found 77, expected an Expert");
  EXPECT_EQ(refused({.variant = {.calls = static_cast<Calls>(77)}}), "load option calls: found 77, expected a Calls");
  EXPECT_EQ(refused({.device = Device::kCpu, .precision = Precision::kF16}),
            "load option precision: found fp16 on the CPU, expected auto, fp32 or bf16");
  EXPECT_THROW(Model::load("/nonexistent"), std::system_error);
}

}  // namespace
}  // namespace mmrec::test
