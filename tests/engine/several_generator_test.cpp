// A generator on several devices, for which toy executors stand: each request gets what it gets alone, wherever it runs
// and whatever happens to others.

#include <stop_token>

#include "mmrec/generator.h"
#include "tests/engine/generator_queue.h"

namespace mmrec::test {
namespace {

struct Devices : ToyDevices {
  explicit Devices(std::size_t count, bool draw = false, const ToyExecutor::Logits& its_logits = {})
      : ToyDevices(count, toy_config(tokenizer().vocab_size()), its_logits) {
    for (const auto& log : logs) log->draws = draw;
  }
};

TEST(SeveralGenerator, EachRequestGetsWhatItGetsAloneWhicheverDeviceTakesIt) {
  for (const std::size_t count : {2U, 3U}) {
    for (const int slots : {1, 4}) {
      const Devices devices(count, slots == 4);
      Queue queue(devices.models, slots);
      EXPECT_EQ(queue.generator.slots(), slots * static_cast<int>(count));
      expect_each_as_alone(queue, static_cast<unsigned>(slots));
      for (const auto& log : devices.logs) EXPECT_FALSE(log->calls.empty()) << "every device has had work";
    }
  }
}

TEST(SeveralGenerator, FewRequestsAreSharedOut) {
  const Devices devices(3);
  Queue queue(devices.models, 64);
  for (int i = 0; i < 7; ++i) queue.submit(wish({1, kThe}, 3));
  queue.generator.run();
  std::multiset<std::size_t> joined;
  for (const auto& log : devices.logs) joined.insert(log->calls.at(0).size());
  EXPECT_EQ(joined, (std::multiset<std::size_t>{1, 3, 3}));
}

TEST(SeveralGenerator, APrefixOfOneDeviceServesAll) {
  const Devices devices(3);
  const auto prefix = std::make_shared<Session>(devices.models[1].new_session());
  prefix->prefill(std::vector<int>(40, kCat));
  Queue queue(devices.models, 2);
  expect_branches_as_alone(queue, prefix, 24);
}

// Callbacks that throw and cancel, requests that are cancelled from outside, and in the end a generator that goes while
// its devices are at work.
TEST(SeveralGenerator, WhatOneRequestDoesIsItsOwnMatter) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    std::mt19937 rng(seed);
    const Devices devices(1 + seed % 3);
    Queue queue(devices.models, 2);
    std::map<Generator::RequestId, Wish> good;
    for (Generator::RequestId id = 1; id <= 30; ++id) {
      Wish wanted = random_wish(rng);
      GeneratorRequest request = queue.request(wanted);
      switch (rng() % 4) {
        case 0:
          request.on_finish = [then = request.on_finish](GenerateResult result) {
            then(std::move(result));
            throw std::out_of_range("finish");
          };
          good.emplace(id, std::move(wanted));
          break;
        case 1:
          request.options.on_token = [left = rng() % 20](int, float) mutable {
            if (left-- == 0) throw std::out_of_range("token");
            return true;
          };
          break;
        case 2:
          request.options.on_token = [&queue, id, left = rng() % 20](int, float) mutable {
            if (left-- == 0) {
              EXPECT_TRUE(queue.generator.cancel(id));
            }
            return true;
          };
          break;
        default:
          good.emplace(id, std::move(wanted));
      }
      queue.generator.submit(std::move(request));
    }
    std::size_t throws = 0;
    for (bool goes_on = true; goes_on;) {
      try {
        goes_on = queue.generator.run_once();
      } catch (const std::out_of_range&) {
        ++throws;
      }
      if (rng() % 8 == 0) {
        const Generator::RequestId id = 1 + rng() % 30;
        if (queue.generator.cancel(id)) good.erase(id);
      }
    }
    EXPECT_EQ(queue.results.size(), 30U);
    EXPECT_GT(throws, 0U);
    EXPECT_LE(throws, 30U);
    for (const auto& [id, wanted] : good) {
      expect_same(queue.results.at(id), alone(wanted),
                  "seed " + std::to_string(seed) + " request " + std::to_string(id));
    }
    for (int i = 0; i < 9; ++i) queue.submit(wish({1}, -1));
    queue.generator.run_once();
  }
}

// Requests are cancelled by threads that do nothing else, at any moment of a round.
TEST(SeveralGenerator, OtherThreadsCancelWhatTheyLike) {
  constexpr std::size_t kRequests = 24;
  std::vector<Wish> wishes;
  std::vector<GenerateResult> expected;
  for (std::size_t i = 0; i < kRequests; ++i) {
    wishes.push_back(wish({1, kThe, static_cast<int>(7 + i)}, 40));
    wishes.back().options.sampler.seed = i;
    expected.push_back(alone(wishes.back()));
  }
  int cancelled = 0;
  for (unsigned seed = 0; seed < 9; ++seed) {
    const Devices devices(1 + seed % 3, seed % 2 == 0);
    Queue queue(devices.models, 2);
    std::vector<std::atomic<bool>> is_cancelled(kRequests);
    std::atomic<int> tokens = 0;
    for (std::size_t i = 0; i < kRequests; ++i) {
      GeneratorRequest request = queue.request(wishes[i]);
      request.options.cancelled = [&, i] { return is_cancelled[i].load(); };
      request.options.on_token = [&](int, float) { return ++tokens > 0; };
      queue.generator.submit(std::move(request));
    }
    {
      std::vector<std::jthread> others;
      for (unsigned thread = 0; thread < 2; ++thread) {
        others.emplace_back([&, thread](const std::stop_token& stop) {
          std::mt19937 rng(2 * seed + thread);
          for (int n = 0; n < 6; ++n) {
            for (const int until = tokens + static_cast<int>(rng() % 60); tokens < until && !stop.stop_requested();) {
              std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
            is_cancelled[rng() % kRequests] = true;
          }
        });
      }
      queue.generator.run();
    }
    ASSERT_EQ(queue.results.size(), kRequests);
    for (std::size_t i = 0; i < kRequests; ++i) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " request " + std::to_string(i + 1));
      const GenerateResult& found = queue.results.at(i + 1);
      if (found.finish_reason == FinishReason::kCancelled) {  // what it has is what as many tokens give
        EXPECT_TRUE(is_cancelled[i]);
        ++cancelled;
        Wish fewer = wishes[i];
        fewer.options.max_tokens = std::ssize(found.tokens);
        GenerateResult same = alone(fewer);
        same.finish_reason = FinishReason::kCancelled;
        expect_same(found, same);
      } else {  // or it was finished before
        expect_same(found, expected[i]);
      }
    }
  }
  EXPECT_GT(cancelled, 0);
}

TEST(SeveralGenerator, ADeviceThatFailsEndsWhatItHadAndNoOthers) {
  std::atomic<bool> is_broken = false;
  Devices devices(1, false, logits_unless(is_broken));
  devices.models.push_back(model_with());
  const Wish wanted = wish({1, kThe}, 200);
  Queue queue(devices.models, 2);
  for (int i = 0; i < 4; ++i) queue.submit(wanted);
  for (int i = 0; i < 3; ++i) queue.generator.run_once();
  is_broken = true;
  EXPECT_THROW(queue.generator.run(), std::runtime_error);
  is_broken = false;
  queue.generator.run();
  int broken = 0;
  for (Generator::RequestId id = 1; id <= 4; ++id) {
    const GenerateResult& found = queue.results.at(id);
    if (found.finish_reason == FinishReason::kError) {
      ++broken;
      EXPECT_EQ(found.error, "the device is gone");
    } else {
      expect_same(found, alone(wanted));
    }
  }
  EXPECT_EQ(broken, 2);
}

TEST(SeveralGenerator, TakesOneModelOnly) {
  EXPECT_THROW(Generator(std::vector<Model>(), tokenizer()), std::invalid_argument);
  const Model stranger = toy_model(nullptr, toy_config(tokenizer().vocab_size()), {}, Device::kCpu, 5);
  EXPECT_THROW(Generator(std::vector{model_with(), stranger}, tokenizer()), std::invalid_argument);
}

}  // namespace
}  // namespace mmrec::test
