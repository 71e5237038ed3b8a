// Requests that go as they should.
#include "mmrec/generator.h"

#include "tests/engine/generator_queue.h"

namespace mmrec::test {
namespace {

TEST(Generator, EachRequestGetsWhatItGetsAloneWhoeverJoinsAndLeaves) {
  for (const auto& [device_draws, device_steps] : {std::pair{false, false}, {true, false}, {true, true}}) {
    for (const int slots : {1, 2, 5, 16}) {
      const auto log = logged({.draws = device_draws, .steps = device_steps});
      Queue queue(model_with(log), slots);
      expect_each_as_alone(queue, static_cast<unsigned>(slots));
      std::set<FinishReason> reasons;
      for (const auto& [id, result] : queue.results) reasons.insert(result.finish_reason);
      EXPECT_EQ(reasons.size(), 4U) << "all reasons but an error";
      EXPECT_EQ(log->acquired, std::vector<int>{slots + slots / 2}) << "memory is taken once";
      EXPECT_EQ(log->drawn > 0, device_draws);
    }
  }
}

TEST(Generator, ARoundIsOnePrefillOneStepAndOneDraw) {
  const auto log = logged({.draws = true});
  Queue queue(model_with(log), 3);
  queue.submit(wish({1, 2, 3}, 2));
  queue.submit(wish({4}, 4));
  queue.submit(wish({5, 6}, 4));
  EXPECT_EQ(queue.generator.waiting(), 3U);
  EXPECT_TRUE(queue.generator.run_once());
  EXPECT_EQ(log->calls, (std::vector<std::vector<std::int64_t>>{{3, 1, 2}}));
  EXPECT_EQ(queue.generator.running(), 3U);
  queue.submit(wish({7, 7, 7, 7}, 1));
  queue.submit(wish({8, 8}, 2));
  EXPECT_TRUE(queue.generator.run_once());
  EXPECT_EQ(log->calls.size(), 3U);
  EXPECT_EQ(log->calls[1], (std::vector<std::int64_t>{1, 1, 1})) << "those that are there";
  EXPECT_EQ(log->calls[2], (std::vector<std::int64_t>{4})) << "the one for whom there is a place";
  EXPECT_EQ(queue.order, (std::vector<Generator::RequestId>{1}));
  EXPECT_TRUE(queue.generator.run_once());
  EXPECT_EQ(log->calls[3], (std::vector<std::int64_t>{1, 1}));
  EXPECT_EQ(log->calls[4], (std::vector<std::int64_t>{2}));
  EXPECT_EQ(queue.order, (std::vector<Generator::RequestId>{1, 4}));
  EXPECT_TRUE(queue.generator.run_once());
  EXPECT_EQ(log->calls[5], (std::vector<std::int64_t>{1, 1}));
  EXPECT_FALSE(queue.generator.run_once());
  EXPECT_FALSE(queue.generator.run_once());
  EXPECT_EQ(log->calls.size(), 7U) << "no token is consumed that nobody goes on from";
  EXPECT_EQ(log->drawn, 5);
  EXPECT_EQ(log->fetched, 0);
  EXPECT_EQ(queue.results.size(), 5U);
  EXPECT_GT(queue.generator.prefill_stats().layer_tokens, 0);
}

TEST(Generator, WhereStepsGoByThemselvesTheNextIsUnderWayWhileTextIsLookedAt) {
  const auto log = logged({.draws = true, .steps = true});
  Queue queue(model_with(log), 2);
  Wish stopped = wish({1, 2}, 30);
  std::size_t calls_when_asked = 0;
  GeneratorRequest request = queue.request(stopped);
  request.options.on_token = [&](int, float) {
    calls_when_asked = log->calls.size();
    return false;
  };
  queue.generator.submit(std::move(request));
  queue.submit(wish({3, 4}, 2));
  EXPECT_TRUE(queue.generator.run_once());
  EXPECT_EQ(calls_when_asked, 2U) << "a prefill and a step";
  EXPECT_EQ(log->calls[1], (std::vector<std::int64_t>{1, 1}));
  EXPECT_FALSE(queue.generator.run_once());
  EXPECT_EQ(log->calls.size(), 2U) << "no step after the last token";
  EXPECT_EQ(queue.results.at(1).tokens.size(), 1U);
  expect_same(queue.results.at(2), alone(wish({3, 4}, 2)));
}

TEST(Generator, PromptsOfThoseWhoComeNextAreConsumedTogetherAndNoSlotWaitsForThem) {
  constexpr std::size_t kSlots = 8;  // and 4 places for those who come next
  const auto log = logged({.draws = true, .steps = true});
  Queue queue(model_with(log), kSlots);
  std::vector<Wish> wishes;
  for (std::int64_t i = 0; i < 8; ++i) wishes.push_back(wish({1, 2}, i < 5 ? 2 + 2 * i : 90));
  for (int i = 0; i < 10; ++i) wishes.push_back(wish({3, 4, 5}, 90));
  for (const Wish& wanted : wishes) queue.submit(wanted);
  const auto prefills = [&] {
    return std::count_if(log->calls.begin(), log->calls.end(), [](const auto& call) { return call.front() > 1; });
  };
  queue.generator.run_once();
  EXPECT_EQ(log->calls.at(0).size(), 12U);
  EXPECT_EQ(queue.generator.running(), kSlots);
  EXPECT_EQ(queue.generator.waiting(), 10U) << "four of them have consumed their prompts";
  for (int round = 2; round <= 8; ++round) queue.generator.run_once();
  EXPECT_EQ(queue.results.size(), 4U);
  EXPECT_EQ(prefills(), 1) << "those who left had heirs";
  queue.generator.run_once();
  EXPECT_EQ(prefills(), 2);
  EXPECT_EQ(log->calls.end()[-2], (std::vector<std::int64_t>{3, 3, 3, 3}));
  EXPECT_EQ(queue.generator.waiting(), 6U);
  for (int round = 10; round <= 11; ++round) queue.generator.run_once();
  EXPECT_EQ(queue.results.size(), 5U);
  EXPECT_EQ(prefills(), 2) << "a place is free for one of two";
  for (const std::vector<std::int64_t>& call : log->calls) {
    if (call.front() == 1) {
      EXPECT_EQ(call.size(), kSlots) << "no slot is free while somebody waits";
    }
  }
  queue.generator.run();
  expect_alone(queue.results, wishes);
}

TEST(Generator, ThoseWhoHaveConsumedTheirPromptsMayBeCancelledBeforeTheyHaveASlot) {
  Queue queue(model_with(), 4);
  for (int i = 0; i < 5; ++i) queue.submit(wish({1, kThe}, 20));
  queue.generator.run_once();
  EXPECT_EQ(queue.generator.waiting(), 1U);
  EXPECT_TRUE(queue.generator.cancel(5));
  queue.generator.run_once();
  EXPECT_EQ(queue.results.at(5).finish_reason, FinishReason::kCancelled);
  EXPECT_TRUE(queue.results.at(5).tokens.empty());
  EXPECT_EQ(queue.generator.waiting(), 0U);
}

TEST(Generator, ALongPromptIsConsumedInPiecesWhileOthersGoOn) {
  constexpr std::int64_t kPiece = 16;
  const auto log = logged({.piece = kPiece});
  Queue queue(model_with(log), 4);
  std::vector<Wish> wishes = {wish({1, kThe}, 60), wish(std::vector<int>(300, kCat), 5),
                              wish(std::vector<int>(7, kS), 5), wish(std::vector<int>(100, kDot), 5)};
  queue.submit(wishes[0]);
  EXPECT_TRUE(queue.generator.run_once());
  for (std::size_t i = 1; i < wishes.size(); ++i) queue.submit(wishes[i]);
  std::size_t calls = log->calls.size();
  int pieces = 0;
  while (queue.generator.run_once()) {
    std::int64_t rows = 0;
    for (; calls < log->calls.size(); ++calls) {
      const std::vector<std::int64_t>& call = log->calls[calls];
      rows += std::accumulate(call.begin(), call.end(), std::int64_t{0});
      pieces += call.front() > 1 ? 1 : 0;
    }
    if (queue.results.contains(1)) break;
    EXPECT_LE(rows, kPiece + 4) << "and a step";
  }
  queue.generator.run();
  EXPECT_GT(pieces, 20);
  EXPECT_EQ(queue.order, (std::vector<Generator::RequestId>{3, 4, 2, 1}));
  expect_alone(queue.results, wishes);
}

TEST(Generator, ALongPromptCanBeCancelledBetweenItsPieces) {
  const auto log = logged({.piece = 1});
  Queue queue(model_with(log), 2);
  Wish wanted = wish(std::vector<int>(4000, kCat), 5);
  wanted.most_asked = 4;
  queue.submit(wanted);
  for (int rounds = 0; queue.generator.run_once(); ++rounds) ASSERT_LT(rounds, 10);
  EXPECT_EQ(queue.results.at(1).finish_reason, FinishReason::kCancelled);
  EXPECT_TRUE(queue.results.at(1).tokens.empty());
}

TEST(Generator, RowsWithARepetitionPenaltyAreDrawnWhereTheirLogitsAre) {
  const auto log = logged({.draws = true});
  Queue queue(model_with(log), 4);
  std::vector<Wish> wishes;
  for (const bool is_penalised : {false, true, true, false}) {
    wishes.push_back(wish({1, kThe}, 10));
    if (is_penalised) wishes.back().options.sampler.repetition_penalty = 1.3F;
    queue.submit(wishes.back());
  }
  queue.generator.run();
  EXPECT_EQ(log->drawn, 10);
  EXPECT_EQ(log->fetched, 0);
  expect_alone(queue.results, wishes);
}

TEST(Generator, TakesNoMoreMemoryThanItMay) {
  const auto log = logged();
  const Model model = model_with(log);
  const std::size_t one = ToyExecutor(toy_config(tokenizer().vocab_size())).slot_bytes();
  EXPECT_EQ(Generator(model, tokenizer()).slots(), 3) << "what the executor likes";
  EXPECT_EQ(Generator(model, tokenizer(), {.slots = 7}).slots(), 7);
  EXPECT_EQ(Generator(model, tokenizer(), {.requests = 2}).slots(), 2);
  EXPECT_EQ(Generator(model, tokenizer(), {.requests = 99}).slots(), 3);
  EXPECT_EQ(Generator(model, tokenizer(), {.slots = 7, .requests = 2}).slots(), 7) << "it was asked for";
  EXPECT_EQ(Generator(model, tokenizer(), {.slots = 7, .memory_bytes = 2 * one + 1}).slots(), 2);
  EXPECT_EQ(Generator(model, tokenizer(), {.memory_bytes = 100 * one}).slots(), 3);
  EXPECT_THROW(Generator(model, tokenizer(), {.memory_bytes = one - 1}), std::invalid_argument);
  EXPECT_THROW(Generator(model, tokenizer(), {.slots = -1}), std::invalid_argument);
  EXPECT_THROW(Generator(model, tokenizer(), {.slots = 65537}), std::invalid_argument);
  EXPECT_THROW(Generator(model, tokenizer(), {.session = {.max_sweeps = 0}}), std::invalid_argument);
}

TEST(Generator, BranchesOfOnePrefixAreCopiedWhereItLies) {
  const auto log = logged();
  const Model model = model_with(log);
  const auto prefix = std::make_shared<Session>(model.new_session());
  std::vector<int> text(300, kCat);  // more than a session remembers
  text.back() = kByte0 + 0xC3;       // half a character
  prefix->prefill(text);
  const std::vector<std::byte> before = prefix->save();
  log->through_host = 0;

  Queue queue(model, 2);
  expect_branches_as_alone(queue, prefix, 12);
  EXPECT_EQ(log->through_host, 0);
  EXPECT_EQ(prefix.use_count(), 1) << "nothing keeps it";
  EXPECT_EQ(prefix->save(), before);
}

TEST(Generator, GoesOnFromASavedStateAndWhatItsContextSays) {
  const Model model = model_with();
  Session session = model.new_session();
  const std::vector<int> text = {1, kThe, kCat, kByte0 + 0xC3};
  session.prefill(text);
  for (const bool is_told : {false, true}) {
    for (const std::vector<int>& more : {std::vector<int>{}, {kByte0 + 0xA9, kS}}) {
      Wish wanted = wish(more, 20);
      wanted.options.sampler.repetition_penalty = 1.5F;
      std::vector<int> all = text;
      all.insert(all.end(), more.begin(), more.end());
      Session restored = model.new_session();
      restored.restore(session.save());
      if (!more.empty()) restored.prefill(more);
      Queue queue(model);
      GeneratorRequest request = queue.request(wanted);
      request.state = session.save();
      if (is_told) request.options.context = text;
      queue.generator.submit(std::move(request));
      queue.generator.run();
      if (is_told) wanted.options.context = all;
      expect_same(queue.results.at(1), generate(restored, tokenizer(), wanted.make()));
    }
  }
}

TEST(Generator, AStartThatHasMovedOnIsAnErrorOfThatRequest) {
  const Model model = model_with();
  const auto prefix = std::make_shared<Session>(model.new_session());
  prefix->prefill(std::vector<int>{1, 2});
  Queue queue(model);
  GeneratorRequest request = queue.request(wish({3}));
  request.start = prefix;
  queue.generator.submit(std::move(request));
  queue.submit(wish({1}));
  prefix->step(std::vector<int>{4});
  queue.generator.run();
  EXPECT_EQ(queue.results.at(1).finish_reason, FinishReason::kError);
  EXPECT_EQ(queue.results.at(1).error, "start: found the session at position 3, expected 2, where it was");
  expect_same(queue.results.at(2), alone(wish({1})));
}

TEST(Generator, CancelledRequestsKeepWhatTheyHave) {
  Queue queue(model_with(), 2);
  const Wish wanted = wish({1, kThe}, 20);
  const Generator::RequestId running = queue.submit(wanted);
  queue.submit(wanted);
  const Generator::RequestId waiting = queue.submit(wanted);
  const Generator::RequestId last = queue.submit(wanted);
  for (int i = 0; i < 5; ++i) queue.generator.run_once();
  EXPECT_TRUE(queue.generator.cancel(running));
  EXPECT_TRUE(queue.generator.cancel(waiting));
  EXPECT_FALSE(queue.generator.cancel(waiting + 100));
  EXPECT_TRUE(queue.results.empty()) << "callbacks come in rounds";
  queue.generator.run_once();
  EXPECT_EQ(queue.results.size(), 2U);
  EXPECT_FALSE(queue.generator.cancel(running)) << "it is finished";
  queue.generator.run();
  Wish cut = wanted;
  cut.most_asked = 5;
  expect_same(queue.results.at(running), alone(cut));
  cut.most_asked = 0;
  expect_same(queue.results.at(waiting), alone(cut));
  expect_same(queue.results.at(2), alone(wanted));
  expect_same(queue.results.at(last), alone(wanted));
}

TEST(Generator, CallbacksMaySubmitAndCancel) {
  Queue queue(model_with(), 2);
  const Wish wanted = wish({1, kThe}, 6);
  std::vector<int> tokens;
  GeneratorRequest first = queue.request(wanted);
  first.options.on_token = [&](int token, float) {
    tokens.push_back(token);
    EXPECT_THROW(queue.generator.run_once(), std::logic_error);
    EXPECT_THROW(queue.generator.run(), std::logic_error);
    if (tokens.size() == 1) queue.submit(wanted);  // 4
    if (tokens.size() == 2) {
      EXPECT_TRUE(queue.generator.cancel(2));
    }  // runs, and has its turn after this one
    if (tokens.size() == 3) {
      EXPECT_TRUE(queue.generator.cancel(3));
    }  // runs since 2 has gone
    if (tokens.size() == 4) {
      EXPECT_TRUE(queue.generator.cancel(1));
    }  // itself
    return true;
  };
  queue.generator.submit(std::move(first));
  queue.submit(wanted);
  GeneratorRequest third = queue.request(wanted);
  third.on_finish = [&, then = third.on_finish](GenerateResult result) {
    then(std::move(result));
    GeneratorRequest none = queue.request(wish({1}, 0));  // finishes as it joins, and would so on for ever in one round
    none.on_finish = [&, then = none.on_finish](GenerateResult result) {
      then(std::move(result));
      EXPECT_FALSE(queue.generator.cancel(5));
    };
    EXPECT_EQ(queue.generator.submit(std::move(none)), 5U);
  };
  queue.generator.submit(std::move(third));
  queue.generator.run();
  const auto expect_cut = [&](Generator::RequestId id, int asked) {
    Wish cut = wanted;
    cut.most_asked = asked;
    expect_same(queue.results.at(id), alone(cut), "request " + std::to_string(id));
  };
  ASSERT_EQ(queue.results.size(), 5U);
  expect_cut(1, 4);
  expect_cut(2, 1);
  expect_cut(3, 0);
  expect_same(queue.results.at(4), alone(wanted));
}

TEST(Generator, WithNothingToDoItDoesNothing) {
  const auto log = logged();
  Queue queue(model_with(log));
  EXPECT_FALSE(queue.generator.run_once());
  queue.generator.submit({.prompt = {1}, .options = {.max_tokens = 2}});  // without callbacks
  Generator moved = std::move(queue.generator);
  moved.run();
  EXPECT_EQ(log->calls.size(), 2U);
  moved.submit({.prompt = {1}});
  moved.run_once();  // and goes with a request that runs
}

}  // namespace
}  // namespace mmrec::test
