// A scorer on several devices, for which toy executors stand: what comes out is what one gives, whatever happens.
//
// Longer than other files: what is tested with whole documents is tested with documents in parts.

#include <stop_token>

#include "tests/engine/sessions.h"
#include "tests/engine/toy_executor.h"
#include "tests/support/refusal.h"

namespace mmrec::test {
namespace {

/// Short ones that make several blocks, some without a token to score.
Documents random_documents(std::mt19937& rng, std::size_t count) {
  Documents documents(count);
  for (auto& document : documents) {
    document = random_tokens(11, rng() % 9 == 0 ? rng() % 2 : rng() % (rng() % 50 == 0 ? 300 : 12), rng);
  }
  return documents;
}

struct Devices : ToyDevices {
  explicit Devices(std::size_t count, const ToyExecutor::Logits& its_logits = {}, Device device = Device::kCpu)
      : ToyDevices(count, toy_config(), its_logits, device) {}
  /// A device that says it is a GPU has a thread of its own if documents come one by one.
  static Devices gpu() { return Devices(1, {}, Device::kCuda); }
  /// The calls of all of them, sorted.
  std::vector<std::vector<std::int64_t>> calls() const {
    std::vector<std::vector<std::int64_t>> all;
    for (const auto& log : logs) all.insert(all.end(), log->calls.begin(), log->calls.end());
    std::sort(all.begin(), all.end());
    return all;
  }
};

/// What a stream's callbacks do at some point.
enum class Fault { kNone, kNextThrows, kBadId, kScoreThrows, kScoreEnough, kProgressThrows, kProgressEnough };

struct Streamed {
  std::vector<DocumentScore> scores;
  std::string end;
  std::int64_t tokens = 0;
  std::size_t asked = 0;       // of progress
  std::size_t most_ahead = 0;  // documents that were read and not handed over
};

/// Scores a stream and holds it to what is promised of callbacks: in this thread, in order. If there are `parts`, the
/// documents come from them.
Streamed stream(std::vector<Model> models, const Documents& documents, int batch, Fault fault = Fault::kNone,
                std::size_t at = 0, const Scorer::NextPart& parts = {}) {
  Streamed found;
  const std::thread::id here = std::this_thread::get_id();
  std::size_t given = 0;
  ScorerOptions options{.batch = batch};
  options.on_progress = [&](std::int64_t tokens, double) {
    EXPECT_EQ(std::this_thread::get_id(), here);
    found.tokens += tokens;
    if (++found.asked != at) return true;
    if (fault == Fault::kProgressThrows) throw std::out_of_range("progress");
    return fault != Fault::kProgressEnough;
  };
  Scorer scorer(std::move(models), options);
  const auto next = [&](std::vector<int>& ids) {
    EXPECT_EQ(std::this_thread::get_id(), here);
    if (fault == Fault::kNextThrows && given == at) throw std::out_of_range("next");
    if (given == documents.size()) return false;
    ids = documents[given];
    if (fault == Fault::kBadId && given == at) ids.push_back(99);
    ++given;
    found.most_ahead = std::max(found.most_ahead, given - found.scores.size());
    return true;
  };
  const auto on_score = [&](std::size_t document, std::vector<int>& ids, DocumentScore& score) {
    EXPECT_EQ(std::this_thread::get_id(), here);
    EXPECT_EQ(document, found.scores.size());
    EXPECT_EQ(ids, documents[document]);
    EXPECT_TRUE(score.complete);
    found.scores.push_back(std::move(score));
    if (fault == Fault::kScoreThrows && document == at) throw std::out_of_range("score");
    return fault != Fault::kScoreEnough || document != at;
  };
  const std::string thrown = refusal<std::logic_error>([&] {
    const bool is_whole = parts ? scorer.score_parts(parts, on_score) : scorer.score_stream(next, on_score);
    found.end = is_whole ? "all" : "cancelled";
  });
  if (found.end.empty()) found.end = thrown;
  return found;
}

TEST(SeveralScorer, ScoresAndGroupsAreThoseOfOneDevice) {
  std::mt19937 rng(1);
  for (const int batch : {0, 1, 7}) {
    const Documents documents = random_documents(rng, 6'000);  // many blocks
    const Devices one(1);
    const Streamed expected = stream(one.models, documents, batch);
    EXPECT_EQ(expected.end, "all");
    for (const Devices& several : {Devices::gpu(), Devices(2), Devices(3)}) {
      const Streamed found = stream(several.models, documents, batch);
      EXPECT_EQ(found.end, "all");
      EXPECT_EQ(found.tokens, expected.tokens);
      ASSERT_EQ(found.scores.size(), documents.size());
      expect_begins(found.scores, expected.scores);
      EXPECT_TRUE(several.calls() == one.calls());
      if (several.models.size() == 1) continue;

      ScorerOptions options{.batch = batch};
      Scorer scorer(several.models, options);
      expect_begins(scorer.score(documents), expected.scores);
      Scorer alone(toy_model(), options);
      alone.score(documents);
      EXPECT_EQ(scorer.prefill_stats().layer_tokens, alone.prefill_stats().layer_tokens);
    }
  }
  EXPECT_TRUE(Scorer(Devices(2).models).score({}).empty());
}

TEST(SeveralScorer, AStreamIsReadAheadNoFurtherThanItMay) {
  std::vector<int> lengths(40, 3);
  lengths[5] = lengths[30] = static_cast<int>(Scorer::kReadAheadTokens - 20);  // read ahead thrice
  Documents documents;
  for (const int length : lengths) documents.emplace_back(length, 1);
  const Streamed found = stream(Devices(1).models, documents, 0);
  EXPECT_EQ(found.scores.size(), documents.size());
  EXPECT_LT(found.most_ahead, documents.size());
}

TEST(SeveralScorer, WhatAStreamsOwnerDoesEndsItAsOnOneDevice) {
  std::mt19937 rng(2);
  const Documents documents = random_documents(rng, 6'000);
  const std::vector<DocumentScore> all = Scorer(toy_model()).score(documents);
  for (int trial = 0; trial < 2; ++trial) {
    for (const Fault fault : {Fault::kNextThrows, Fault::kBadId, Fault::kScoreThrows, Fault::kScoreEnough,
                              Fault::kProgressThrows, Fault::kProgressEnough}) {
      const bool is_progress = fault == Fault::kProgressThrows || fault == Fault::kProgressEnough;
      const std::size_t at = is_progress ? 1 + rng() % 50 : rng() % documents.size();
      const Streamed expected = stream(Devices(1).models, documents, 64, fault, at);
      EXPECT_NE(expected.end, "all");
      if (is_progress) {
        EXPECT_EQ(expected.asked, at) << "is not asked again";
      } else if (fault == Fault::kScoreThrows || fault == Fault::kScoreEnough) {
        EXPECT_EQ(expected.scores.size(), at + 1);
      }
      for (const Devices& several : {Devices::gpu(), Devices(2), Devices(3)}) {
        const Streamed found = stream(several.models, documents, 64, fault, at);
        expect_begins(found.scores, all);
        // Progress of several is told together, and who is at work goes on for a while: how much is done then may
        // differ, and nothing else does.
        if (!is_progress || found.asked >= at) {
          EXPECT_EQ(found.end, expected.end);
        }
        if (!is_progress) {
          EXPECT_EQ(found.scores.size(), expected.scores.size());
        }
      }
    }
  }
}

// Small enough for threads that are held up at every turn (tests/chaos): groups of all sizes, several blocks of a
// stream, and calls that another thread ends at any moment.
TEST(SeveralScorer, AnotherThreadEndsACall) {
  std::mt19937 rng(4);
  const Documents documents = random_documents(rng, 17'000);
  const std::vector<DocumentScore> expected = Scorer(toy_model()).score(documents);
  for (unsigned trial = 0; trial < 9; ++trial) {
    const Devices devices(1 + trial % 3);
    std::atomic<bool> is_cancelled = false;
    std::atomic<std::int64_t> tokens = 0;
    ScorerOptions options{.batch = 64 << (trial % 2)};
    options.on_progress = [&](std::int64_t done, double) {
      tokens += done;
      return !is_cancelled;
    };
    Scorer scorer(devices.models, options);
    std::vector<DocumentScore> found;
    bool is_whole = false;
    std::size_t given = 0;
    {
      // The first calls are left alone.
      const std::int64_t until =
          trial < 3 ? std::numeric_limits<std::int64_t>::max() : static_cast<std::int64_t>(rng() % 150'000);
      const std::jthread other([&, until](const std::stop_token& stop) {
        while (tokens < until && !stop.stop_requested()) std::this_thread::sleep_for(std::chrono::microseconds(20));
        if (!stop.stop_requested()) is_cancelled = true;
      });
      is_whole = scorer.score_stream(stream_of(documents, given),
                                     [&](std::size_t document, std::vector<int>&, DocumentScore& score) {
                                       EXPECT_EQ(document, found.size());
                                       found.push_back(std::move(score));
                                       return true;
                                     });
    }
    expect_begins(found, expected);
    EXPECT_TRUE(is_whole ? found.size() == documents.size() : is_cancelled.load());
  }
}

TEST(SeveralScorer, ADeviceThatFailsEndsTheCall) {
  std::mt19937 rng(3);
  const Documents documents = random_documents(rng, 3'000);
  const auto expected = Scorer(toy_model()).score(documents);
  for (const std::size_t count : {1U, 2U, 3U}) {
    for (int trial = 0; trial < 10; ++trial) {
      std::atomic<long> left = 1 + static_cast<long>(rng() % 100'000);
      Devices devices(count, [&](double summary, std::int64_t, int token) {
        if (--left == 0) throw std::runtime_error("the device is gone");
        return static_cast<float>(std::sin(summary + 0.7 * token));
      });
      ScorerOptions options{.batch = 5};
      Scorer scorer(devices.models, options);
      EXPECT_THROW(scorer.score(documents), std::runtime_error);
      EXPECT_EQ(scorer.score(documents).size(), documents.size()) << "can be called again";
    }
  }
  Devices short_of_memory(2);
  short_of_memory.logs[1]->most_slots = 1;
  expect_begins(Scorer(short_of_memory.models).score(documents), expected);
  ScorerOptions two{.batch = 2};
  short_of_memory.logs[0]->most_slots = 1;
  EXPECT_THROW(Scorer(short_of_memory.models, two).score(documents), std::bad_alloc);
}

// A device stands still until nobody else can do anything more: others have scored all that may be read ahead of it,
// and of a GPU alone documents are read meanwhile.
TEST(SeveralScorer, ASlowDeviceHoldsNobodyUpAndMemoryIsBounded) {
  constexpr std::size_t kBlock = 8 * 3;  // documents of a block: eight groups of what the toy executor likes
  constexpr std::size_t kBlocks = 8;
  struct Case {
    std::size_t count;
    Device device;
    std::size_t most;  // that are read while the first group is at work, and not handed over
  };
  for (const Case& one : {Case{2, Device::kCpu, 5 * kBlock}, Case{1, Device::kCuda, 3 * kBlock}}) {
    std::atomic<std::size_t> given = 0;
    std::atomic<std::size_t> received = 0;
    std::atomic<bool> is_stuck = false;
    std::atomic<bool> was_stuck_alone = false;
    const auto logits = [&](double, std::int64_t, int) {
      if (!is_stuck.exchange(true)) {  // a group of the first block, which cannot be handed over whole
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (given < one.most && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        was_stuck_alone = given == one.most && received < kBlock;
      }
      return 0.0F;
    };
    Scorer scorer(Devices(one.count, logits, one.device).models);
    EXPECT_TRUE(scorer.score_stream(
        [&](std::vector<int>& ids) {
          if (given == kBlocks * kBlock) return false;
          EXPECT_LE(given - received, one.most);
          ids = {1, 2};
          ++given;
          return true;
        },
        [&](std::size_t, auto&, auto&) { return ++received > 0; }));
    EXPECT_TRUE(was_stuck_alone) << one.count;
    EXPECT_EQ(received, kBlocks * kBlock);
  }
}

/// Parts of documents, cut anywhere, as score_parts() asks for them.
class Parts {
 public:
  Parts(const Documents& documents, unsigned seed) : documents_(documents), rng_(seed) {}
  bool next(std::vector<int>& ids, bool& goes_on) {
    EXPECT_TRUE(ids.empty());
    EXPECT_FALSE(goes_on);
    if (document_ == documents_.size()) return false;
    const std::vector<int>& all = documents_[document_];
    const std::size_t count = std::min<std::size_t>(rng_() % 5 == 0 ? rng_() % 3 : rng_() % 120'000, all.size() - at_);
    ids.assign(all.begin() + static_cast<std::ptrdiff_t>(at_), all.begin() + static_cast<std::ptrdiff_t>(at_ + count));
    at_ += count;
    goes_on = at_ < all.size() || rng_() % 4 == 0;  // also where nothing is left
    if (!goes_on) ++document_, at_ = 0;
    return true;
  }
  std::size_t document() const { return document_; }
  std::size_t at() const { return at_; }

 private:
  const Documents& documents_;
  std::mt19937 rng_;
  std::size_t document_ = 0, at_ = 0;
};

TEST(SeveralScorer, PartsGiveTheScoresAndGroupsOfWholeDocuments) {
  std::mt19937 rng(2);
  Documents documents = random_documents(rng, 300);
  for (const auto& [at, tokens] : {std::pair<std::size_t, std::size_t>{0, 270'000}, {120, 1'100'000}, {121, 300'000}}) {
    documents[at] = random_tokens(11, tokens, rng);
  }
  const auto groups_of = [](const Devices& devices) {
    std::vector<std::vector<std::int64_t>> groups;
    for (const auto& call : devices.calls()) {
      if (call.size() > 1) groups.push_back(call);  // others may be pieces
    }
    return groups;
  };
  for (const int batch : {0, 7}) {
    const Devices one(1);
    const Streamed expected = stream(one.models, documents, batch);
    for (const Devices& devices : {Devices(1), Devices::gpu(), Devices(2)}) {
      Parts parts(documents, static_cast<unsigned>(batch));
      const auto next = [&](std::vector<int>& ids, bool& goes_on) { return parts.next(ids, goes_on); };
      const Streamed found = stream(devices.models, documents, batch, Fault::kNone, 0, next);
      EXPECT_EQ(found.end, "all");
      ASSERT_EQ(found.scores.size(), documents.size());
      expect_begins(found.scores, expected.scores);
      EXPECT_EQ(found.tokens, expected.tokens);
      EXPECT_EQ(groups_of(devices), groups_of(one)) << batch;
    }
  }
}

TEST(SeveralScorer, ALongDocumentIsScoredBeforeItsEndComes) {
  for (const auto& [count, device, batch] :
       {std::tuple{1, Device::kCpu, 0}, {1, Device::kCuda, 0}, {2, Device::kCpu, 0}, {1, Device::kCpu, 2}}) {
    std::atomic<bool> has_begun = false;
    const auto logits = [&](double, std::int64_t, int) {
      has_begun = true;
      return 0.0F;
    };
    const Devices devices(static_cast<std::size_t>(count), logits, device);
    int given = 0;
    const auto next = [&](std::vector<int>& ids, bool& goes_on) {
      if (given == 10) return false;
      if (given == 9) {  // of other threads
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (!has_begun && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        EXPECT_TRUE(has_begun);
      }
      ids.assign(50'000, 3);
      goes_on = ++given < 10;
      return true;
    };
    const ScorerOptions options{.batch = batch};
    EXPECT_TRUE(Scorer(devices.models, options).score_parts(next, [](std::size_t, auto&, auto&) { return true; }));
  }
}

TEST(SeveralScorer, ADocumentWhoseRestDoesNotComeIsDropped) {
  std::mt19937 rng(7);
  Documents documents = random_documents(rng, 60);
  documents[40].assign(800'000, 5);
  const Streamed expected = stream(Devices(1).models, documents, 0);
  enum class End { kCut, kThrows, kBadId };
  for (const End end : {End::kCut, End::kThrows, End::kBadId}) {
    for (const std::size_t after : {std::size_t{1}, std::size_t{200'000}, std::size_t{500'000}}) {
      for (const Devices& devices : {Devices(1), Devices::gpu(), Devices(2)}) {
        Parts parts(documents, 9);
        std::size_t bad_at = 0;
        const auto next = [&](std::vector<int>& ids, bool& goes_on) {
          const bool ends = parts.document() == 40 && parts.at() >= after;
          if (ends && end == End::kCut) return false;
          if (ends && end == End::kThrows) throw std::out_of_range("next");
          bad_at = parts.at();
          const bool is_there = parts.next(ids, goes_on);
          if (ends && end == End::kBadId) ids.insert(ids.begin(), 99);
          return is_there;
        };
        const Streamed found = stream(devices.models, documents, 0, Fault::kNone, 0, next);
        EXPECT_EQ(found.end, end == End::kCut ? "cancelled"
                             : end == End::kThrows
                                 ? "next"
                                 : "document 40: token " + std::to_string(bad_at) + " has id 99, expected 0..10");
        if (end == End::kCut) {
          EXPECT_EQ(found.scores.size(), 40U);
        }
        expect_begins(found.scores, expected.scores);
      }
    }
  }
}

TEST(SeveralScorer, TakesOneModelOnly) {
  EXPECT_THROW(Scorer(std::vector<Model>()), std::invalid_argument);
  const auto with = [](const Model& second) { return refusal([&] { Scorer(std::vector{toy_model(), second}); }); };
  EXPECT_EQ(with(toy_model(nullptr, toy_config(), {}, Device::kCpu, 5)),
            "model 1: found fingerprint 0000000000000005 on the CPU in fp32, expected model 0's fingerprint "
            "1122334455667788 on the CPU in fp32");
  EXPECT_NE(with(toy_model(nullptr, toy_config(), {}, Device::kCpu, kToyFingerprint, {.calls = Calls::kWhole})),
            "no error");
}

}  // namespace
}  // namespace mmrec::test
