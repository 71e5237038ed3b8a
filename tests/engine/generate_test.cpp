// generate(): ends, stops, log-probs, sampling chains and progress, on a toy executor. Long, because
// one call makes all these promises.
#include "mmrec/generate.h"

#include "mmrec/errors.h"
#include "mmrec/model.h"
#include "tests/engine/generator_queue.h"
#include "tests/engine/sessions.h"
#include "tests/engine/toy_executor.h"
#include "tests/support/compare.h"
#include "tests/support/refusal.h"

namespace mmrec::test {
namespace {

GenerateOptions greedy(std::int64_t max_tokens = 100) {
  return {.sampler = {.temperature = 0.0F}, .max_tokens = max_tokens, .eos_token_ids = {kEos}};
}

/// What generate makes of a script, with on_text's pieces, which are `parts`, checked against the text.
GenerateResult play(std::vector<int> script, GenerateOptions options, const std::vector<int>& prompt = {1},
                    std::vector<std::string>* parts = nullptr) {
  const auto start = static_cast<std::int64_t>(prompt.size());
  const Model model = scripted_model(std::move(script), tokenizer().vocab_size(), start);
  Session session = begun(model, prompt);
  std::string received;
  if (!options.on_text) {
    options.on_text = [&](std::string_view text) {
      EXPECT_FALSE(text.empty());
      received += text;
      if (parts != nullptr) parts->emplace_back(text);
      return true;
    };
    GenerateResult result = generate(session, tokenizer(), options);
    EXPECT_EQ(received, result.text);
    EXPECT_EQ(result.logprobs.size(), result.tokens.size());
    // Every drawn token but the last was consumed; the end of the sequence was the last.
    const bool at_eos = result.finish_reason == FinishReason::kEndOfSequence;
    const auto consumed = static_cast<std::int64_t>(result.tokens.size()) - (at_eos || result.tokens.empty() ? 0 : 1);
    EXPECT_EQ(session.position(), start + consumed);
    return result;
  }
  return generate(session, tokenizer(), options);
}

TEST(Generate, StopsAtTheEndOfTheSequence) {
  const GenerateResult r = play({kThe, kCat, kS, kDot, kEos}, greedy());
  EXPECT_EQ(r.text, "the cats.");
  EXPECT_EQ(r.tokens, (std::vector<int>{kThe, kCat, kS, kDot}));
  EXPECT_EQ(r.finish_reason, FinishReason::kEndOfSequence);
  EXPECT_NEAR(r.logprobs[0], -std::log1p(262.0 * std::exp(-20.0)), 1e-6);
}

TEST(Generate, StopsAtTheLength) {
  EXPECT_EQ(play({kThe, kCat, kEos}, greedy(1)).text, "the");
  using enum FinishReason;
  for (const auto& [most, reason] : {std::pair{1, kLength}, {3, kEndOfSequence}, {-1, kEndOfSequence}}) {
    EXPECT_EQ(play({kThe, kCat, kEos}, greedy(most)).finish_reason, reason);
  }
  const GenerateResult none = play({kThe}, greedy(0));
  EXPECT_TRUE(none.text.empty() && none.tokens.empty() && none.logprobs.empty());
  EXPECT_EQ(none.finish_reason, FinishReason::kLength);
  // Without an end of sequence its token is text like any other: none.
  GenerateOptions o = greedy(4);
  o.eos_token_ids.clear();
  EXPECT_EQ(play({kThe, kEos, kCat, kCat}, o).text, "the cat cat");
}

TEST(Generate, StopStringsMatchAcrossTokens) {
  GenerateOptions o = greedy();
  o.stop = {"cats"};
  GenerateResult r = play({kThe, kCat, kS, kDot, kEos}, o);
  EXPECT_EQ(r.text, "the ");
  EXPECT_EQ(r.tokens, (std::vector<int>{kThe, kCat, kS}));
  EXPECT_EQ(r.finish_reason, FinishReason::kStopString);
  // What looked like its beginning comes out when it is not.
  r = play({kThe, kCat, kDot, kEos}, o);
  EXPECT_EQ(r.text, "the cat.");
  EXPECT_EQ(r.finish_reason, FinishReason::kEndOfSequence);
  // Held back at the end: it comes out then, once.
  r = play({kThe, kCat, kEos}, o);
  EXPECT_EQ(r.text, "the cat");
  o.stop = {"t", "the"};
  EXPECT_EQ(play({kThe}, o).text, "");
}

TEST(Generate, CharactersComeOutWhole) {
  std::vector<std::string> parts;
  play({kByte0 + 0xC3, kByte0 + 0xA9, kByte0 + 0xE2, kByte0 + 0x82, kEos}, greedy(), {1}, &parts);
  EXPECT_EQ(parts, (std::vector<std::string>{"\xC3\xA9", "\xEF\xBF\xBD"}));
  // A character begun by the prompt is completed.
  EXPECT_EQ(play({kByte0 + 0xA9, kEos}, greedy(), {1, kByte0 + 0xC3}).text, "\xC3\xA9");
  // A stop string can appear in the last flush.
  GenerateOptions o = greedy(2);
  o.stop = {"\xEF\xBF\xBD"};
  const GenerateResult r = play({kThe, kByte0 + 0xE2}, o);
  EXPECT_EQ(r.text, "the");
  EXPECT_EQ(r.finish_reason, FinishReason::kStopString);
}

TEST(Generate, Cancels) {
  GenerateOptions o = greedy();
  int asked = 0;
  o.cancelled = [&] { return ++asked > 2; };
  o.stop = {"cat!"};
  const GenerateResult r = play({kThe, kCat, kS}, o);
  EXPECT_EQ(r.text, "the cat");  // what was held back comes out
  EXPECT_EQ(r.finish_reason, FinishReason::kCancelled);

  o = greedy();
  std::string received;
  o.on_text = [&](std::string_view text) {
    received += text;
    return received.size() < 5;
  };
  const GenerateResult by_text = play({kThe, kCat, kS}, o);
  EXPECT_EQ(by_text.finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(by_text.text, "the cat");
  EXPECT_EQ(received, by_text.text);
}

TEST(Generate, TokensComeAsTheyAreDrawn) {
  GenerateOptions o = greedy();
  std::vector<int> tokens;
  std::vector<float> logprobs;
  std::string text;
  o.on_text = [&](std::string_view more) {
    text += more;
    return true;
  };
  o.on_token = [&](int token, float logprob) {
    EXPECT_EQ(text, tokens.empty() ? "" : "the") << "before its text";
    tokens.push_back(token);
    logprobs.push_back(logprob);
    return tokens.size() < 2;
  };
  const GenerateResult r = play({kThe, kCat, kS}, o);
  EXPECT_EQ(r.finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(r.text, "the");
  EXPECT_EQ(r.tokens, (std::vector<int>{kThe, kCat}));
  EXPECT_EQ(tokens, r.tokens);
  EXPECT_EQ(logprobs, r.logprobs);
  o.logprobs = false;
  tokens.clear(), logprobs.clear(), text.clear();
  play({kThe, kEos}, o);
  EXPECT_EQ(logprobs, std::vector<float>{0.0F});
}

TEST(Generate, TheLikeliestTokensOfEachDraw) {
  // The model knows more ids than the tokenizer; every fourth logit ties with its neighbour.
  const int vocab = tokenizer().vocab_size() + 30;
  const auto logit = [](double summary, std::int64_t position, int token) {
    return static_cast<float>(std::sin(summary + static_cast<double>(position) + std::floor(token / 4.0)) * 3.0);
  };
  const Model model = toy_model(nullptr, toy_config(vocab), logit);
  for (const int wanted : {1, 5, vocab + 100}) {
    Session session = begun(model, std::vector{1, kThe});
    GenerateOptions o{.sampler = {.temperature = 3.0F}, .max_tokens = 12};
    o.sampler.repetition_penalty = 1.3F;  // none of this is in a log-prob
    o.top_logprobs = wanted;
    const GenerateResult r = generate(session, tokenizer(), o);
    ASSERT_EQ(r.tokens.size(), 12U);
    const auto row = static_cast<std::size_t>(std::min(wanted, tokenizer().vocab_size()));
    ASSERT_EQ(r.top_logprobs.size(), r.tokens.size() * row);
    Session again = begun(model, std::vector{1, kThe});
    for (std::size_t i = 0; i < r.tokens.size(); ++i) {
      const std::span<const float> logits = again.logits();
      std::vector<std::pair<float, int>> order;
      order.reserve(logits.size());
      for (int t = 0; t < tokenizer().vocab_size(); ++t) order.emplace_back(-logits[static_cast<std::size_t>(t)], t);
      std::sort(order.begin(), order.end());
      for (std::size_t k = 0; k < row; ++k) {
        const Sample& found = r.top_logprobs[i * row + k];
        EXPECT_EQ(found.token, order[k].second) << i << " " << k;
        EXPECT_NEAR(found.logprob, logprob_under(logits, found.token), 1e-6);
        if (found.token == r.tokens[i]) {
          EXPECT_NEAR(found.logprob, r.logprobs[i], 1e-6);
        }
      }
      again.step(std::span(&r.tokens[i], 1));
    }
    // Nothing else is other for it.
    Session plain = begun(model, std::vector{1, kThe});
    o.top_logprobs = 0;
    const GenerateResult without = generate(plain, tokenizer(), o);
    EXPECT_EQ(without.tokens, r.tokens);
    EXPECT_TRUE(without.top_logprobs.empty());
    o.top_logprobs = -1;
    EXPECT_THROW(generate(plain, tokenizer(), o), std::invalid_argument);
  }
}

TEST(Generate, IdsTheTokenizerDoesNotKnowAreNeverDrawn) {
  const Model model = toy_model(nullptr, toy_config(tokenizer().vocab_size() + 50),
                                [](double, std::int64_t, int token) { return static_cast<float>(token); });
  Session session = model.new_session();
  const std::vector<int> prompt = {1, tokenizer().vocab_size() + 3};
  session.prefill(prompt);
  GenerateOptions o = greedy(3);
  EXPECT_EQ(generate(session, tokenizer(), o).tokens, std::vector<int>(3, tokenizer().vocab_size() - 1));
  session.reset();
  session.prefill(prompt);
  o.sampler.vocab_limit = 7;
  EXPECT_EQ(generate(session, tokenizer(), o).tokens, std::vector<int>(3, 6));
}

TEST(Generate, CutShortSavedAndContinuedItDrawsTheSame) {
  const Model model = model_with();
  GenerateOptions o{.sampler = {.temperature = 5.0F, .top_k = 0, .repetition_penalty = 1.2F, .seed = 77},
                    .max_tokens = 40};
  const std::vector<int> prompt = {1, kThe};
  Session whole = begun(model, prompt);
  const GenerateResult expected = generate(whole, tokenizer(), o);
  ASSERT_EQ(expected.tokens.size(), 40U);

  Session first = begun(model, prompt);
  o.max_tokens = 15;
  const GenerateResult a = generate(first, tokenizer(), o);
  Session second = model.new_session();
  second.restore(first.save());
  second.step({&a.tokens.back(), 1});
  std::vector<int> so_far = prompt;
  so_far.insert(so_far.end(), a.tokens.begin(), a.tokens.end());
  o.max_tokens = 25;
  const std::vector<int> rest(expected.tokens.begin() + 15, expected.tokens.end());
  EXPECT_EQ(std::vector<int>(expected.tokens.begin(), expected.tokens.begin() + 15), a.tokens);
  o.context = so_far;
  GenerateResult b = generate(second, tokenizer(), o);
  EXPECT_EQ(b.tokens, rest);
  EXPECT_EQ(a.text + b.text, expected.text);
  // The session that was not saved needs not be told, nor does its clone.
  o.context = {};
  first.step({&a.tokens.back(), 1});
  Session clone = first.clone();
  for (Session* session : {&first, &clone}) {
    b = generate(*session, tokenizer(), o);
    EXPECT_EQ(b.tokens, rest);
    EXPECT_EQ(a.text + b.text, expected.text);
  }

  o.sequence = 1;
  Session other = begun(model, prompt);
  EXPECT_NE(generate(other, tokenizer(), o).tokens,
            std::vector<int>(expected.tokens.begin(), expected.tokens.begin() + 25));
}

TEST(Generate, ARestoredSessionThatIsNotToldGoesOnWithinAText) {
  const Model model = scripted_model({kCat, kEos}, tokenizer().vocab_size(), 2);
  Session session = begun(model, std::vector<int>{1, kByte0 + 0xC3});
  Session restored = model.new_session();
  restored.prefill(std::vector<int>{kThe});  // forgotten
  restored.restore(session.save());
  EXPECT_EQ(generate(session, tokenizer(), greedy()).text, "\xEF\xBF\xBD cat");
  EXPECT_TRUE(restored.recent_tokens().empty());
  EXPECT_EQ(generate(restored, tokenizer(), greedy()).text, " cat");
}

TEST(Generate, APromptLongerThanWhatASessionRemembersIsStillThePromptItWas) {
  const std::vector<int> tail = {kByte0 + 0xE2, kByte0 + 0x82};  // two bytes of three
  for (const int before : {Session::kRecentTokens - 3, Session::kRecentTokens - 2, Session::kRecentTokens, 1000}) {
    std::vector<int> prompt(static_cast<std::size_t>(before), kByte0 + 0x82);
    prompt.front() = 1;
    prompt.insert(prompt.end(), tail.begin(), tail.end());
    EXPECT_EQ(play({kByte0 + 0xAC, kCat, kEos}, greedy(), prompt).text, "\xE2\x82\xAC cat") << before;
  }
}

TEST(Generate, TheContextGivenCountsInsteadOfWhatTheSessionRemembers) {
  const Model model = model_with(nullptr, [](double, std::int64_t, int token) {
    return token == kCat ? 2.0F : token == kS ? 1.5F : 0.0F;
  });
  GenerateOptions o = greedy(1);
  o.sampler.repetition_penalty = 2.0F;
  const auto first_of = [&](const std::vector<int>& prompt, const std::vector<int>& context) {
    Session session = begun(model, prompt);
    o.context = context;
    return generate(session, tokenizer(), o).tokens.front();
  };
  EXPECT_EQ(first_of({1, kThe}, {}), kCat);
  EXPECT_EQ(first_of({1, kCat}, {}), kS);
  EXPECT_EQ(first_of({1, kCat}, {1, kThe}), kCat);
  EXPECT_EQ(first_of({1, kThe}, {kCat}), kS);
}

TEST(Generate, WithoutLogProbsTheDeviceDrawsTheSameTokens) {
  for (const bool device_draws : {false, true}) {
    for (const float penalty : {1.0F, 1.2F}) {
      const auto log = logged({.draws = device_draws});
      const Model model = model_with(log);
      GenerateOptions o{
          .sampler = {.temperature = 5.0F, .repetition_penalty = penalty, .seed = 78}, .sequence = 3, .max_tokens = 30};
      const std::vector<int> prompt = {1, kThe};
      Session with = begun(model, prompt);
      const GenerateResult expected = generate(with, tokenizer(), o);
      EXPECT_EQ(log->drawn, device_draws ? 30 : 0);
      EXPECT_EQ(log->fetched, device_draws ? 0 : 30);
      ASSERT_EQ(expected.logprobs.size(), expected.tokens.size());
      Session scored = model.new_session();
      const std::vector<float> scores = logprobs_of(scored, [&] {
        std::vector<int> all = prompt;
        all.insert(all.end(), expected.tokens.begin(), expected.tokens.end());
        return all;
      }());
      for (std::size_t i = 0; i < expected.logprobs.size(); ++i) {
        EXPECT_NEAR(expected.logprobs[i], scores[prompt.size() + i], 1e-5F);
      }

      o.logprobs = false;
      log->drawn = 0;
      log->fetched = 0;
      Session without = begun(model, prompt);
      const GenerateResult result = generate(without, tokenizer(), o);
      EXPECT_EQ(result.tokens, expected.tokens);
      EXPECT_EQ(result.text, expected.text);
      EXPECT_TRUE(result.logprobs.empty());
      EXPECT_EQ(without.save(), with.save());
      EXPECT_EQ(log->drawn, device_draws ? 30 : 0);
      EXPECT_EQ(log->fetched, device_draws ? 0 : 30);
    }
  }
}

// Wherever it ends, nothing shows of a step that was under way: results, state and what the session draws next.
TEST(Generate, ASequenceThatDrawsAheadEndsAsOneThatDoesNot) {
  struct Ending {
    const char* name;
    std::function<void(GenerateOptions&, int& calls)> set;
  };
  const Ending endings[] = {
      {"length", [](GenerateOptions&, int&) {}},
      {"penalty",
       [](GenerateOptions& o, int&) { o.sampler.repetition_penalty = 1.5F, o.sampler.repetition_window = 7; }},
      {"one token", [](GenerateOptions& o, int&) { o.max_tokens = 1; }},
      {"no token", [](GenerateOptions& o, int&) { o.max_tokens = 0; }},
      {"end of sequence",
       [](GenerateOptions& o, int&) {
         o.eos_token_ids = {kCat, kS};
       }},
      {"stop string",
       [](GenerateOptions& o, int&) {
         o.stop = {"cat", "the"};
       }},
      {"cancelled late", [](GenerateOptions& o, int& n) { o.cancelled = [&n] { return ++n == 70; }; }},
      {"cancelled at once", [](GenerateOptions& o, int&) { o.cancelled = [] { return true; }; }},
      {"receiver", [](GenerateOptions& o, int& n) { o.on_text = [&n](std::string_view) { return ++n < 40; }; }},
      {"fault", [](GenerateOptions& o, int& n) {
         o.on_text = [&n](std::string_view) -> bool { return ++n < 33 ? true : throw std::out_of_range("enough"); };
       }}};
  for (const Ending& ending : endings) {
    for (const std::uint64_t seed : {1U, 2U, 3U}) {
      SCOPED_TRACE(ending.name);
      std::vector<std::byte> expected_state;
      GenerateResult expected;
      for (const bool ahead : {false, true}) {
        const auto log = logged({.ahead = ahead});
        const Model model = model_with(log);
        GenerateOptions o{.sampler = {.temperature = 5.0F, .top_k = 0, .top_p = 1.0F, .seed = seed}, .max_tokens = 100};
        int calls = 0;
        ending.set(o, calls);
        Session session = begun(model, std::vector<int>{1, kThe});
        GenerateResult result;
        try {
          result = generate(session, tokenizer(), o);
        } catch (const std::out_of_range&) {
          result.text = "thrown";
        }
        if (!ahead) {
          expected = result;
          expected_state = session.save();
          continue;
        }
        expect_same(result, expected);
        EXPECT_EQ(session.save(), expected_state);
        const auto recent = session.recent_tokens();
        EXPECT_EQ(recent.size(), static_cast<std::size_t>(session.position()));
      }
    }
  }
}

TEST(Generate, ANumericFaultNamesItsStepAndEndsWhatIsDrawnAheadToo) {
  std::vector<std::byte> expected;
  for (const bool ahead : {false, true}) {
    const auto log = logged({.ahead = ahead});
    const Model model = model_with(log, [](double, std::int64_t position, int token) {
      return position == 40 ? std::nanf("") : static_cast<float>(token % 5);
    });
    Session session = begun(model, std::vector<int>{1, kThe});
    EXPECT_EQ(refusal<NumericError>([&] { generate(session, tokenizer(), {.max_tokens = 100}); }),
              "step 40: logit of token 0 is NaN, expected a finite number or -inf");
    EXPECT_EQ(session.position(), 40);
    if (!ahead) expected = session.save();
    EXPECT_EQ(session.save(), expected);
  }
}

TEST(Generate, RefusesWhatCannotBe) {
  const Model model = scripted_model({kThe}, tokenizer().vocab_size());
  Session session = model.new_session();
  const std::vector<int> prompt = {1};
  EXPECT_THROW(generate(session, tokenizer(), greedy()), std::invalid_argument);  // position 0
  session.prefill(prompt);
  const std::vector<std::byte> before = session.save();
  const auto refused = [&](auto change) {
    GenerateOptions o = greedy();
    change(o);
    EXPECT_THROW(generate(session, tokenizer(), o), std::invalid_argument);
  };
  refused([](GenerateOptions& o) { o.max_tokens = -2; });
  refused([](GenerateOptions& o) { o.stop = {"x", ""}; });
  refused([](GenerateOptions& o) { o.stop = {"\xFF"}; });
  refused([](GenerateOptions& o) { o.eos_token_ids = {9999}; });
  refused([](GenerateOptions& o) { o.eos_token_ids = {-1}; });
  refused([](GenerateOptions& o) { o.sampler.top_p = 0.0F; });
  refused([](GenerateOptions& o) { o.sampler.vocab_limit = -1; });
  const std::vector<int> bad = {-1};
  refused([&](GenerateOptions& o) { o.context = bad; });
  EXPECT_EQ(session.save(), before);
  Session pair = begun(model, std::vector<int>{1, 1}, 2);
  EXPECT_THROW(generate(pair, tokenizer(), greedy()), std::invalid_argument);
}

TEST(Generate, FinishReasonsHaveNames) {
  using enum FinishReason;
  for (const auto& [reason, name] : {std::pair{kLength, "length"},
                                     {kEndOfSequence, "eos"},
                                     {kStopString, "stop"},
                                     {kCancelled, "cancelled"},
                                     {kError, "error"}}) {
    EXPECT_EQ(to_string(reason), name);
  }
}

}  // namespace
}  // namespace mmrec::test
