// A run that loads, tokenises, prefills, draws, steps, scores, saves and restores is done again and again with one more
// of its allocations, threads or calls on files failing each time. Whatever fails, the run ends with a documented
// exception or with the right results; nothing leaks, files are the old or the new ones, and the next run goes well.
//
// At most some hundred faults of a kind are tried, spread over all of them; MMREC_FAULTS=all tries each.

#include <sched.h>

#include <cerrno>
#include <iostream>

#include "mmrec/generate.h"
#include "mmrec/model.h"
#include "mmrec/quantize.h"
#include "mmrec/scorer.h"
#include "mmrec/state_file.h"
#include "mmrec/tokenizer.h"
#include "tests/faults/faults.h"
#include "tests/support/model_folder.h"

namespace mmrec {
namespace {

using faults::Kind;

struct Results {
  std::vector<int> drawn;
  std::vector<float> logprobs;
  std::string text;
  std::vector<std::byte> state;
  bool operator==(const Results&) const = default;
};

std::int64_t descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

std::string open_files() {
  std::string names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    names += std::filesystem::read_symlink(entry.path(), ignored).string() + " ";
  }
  return names;
}

class Faults : public testing::TestWithParam<std::string> {
 protected:
  /// What is tried. Two threads, so that some are started.
  Results run() const {
    const std::filesystem::path folder = test::folder_of(GetParam());
    const Model model = Model::load(folder, {.device = Device::kCpu, .threads = 2});
    Results results;
    Session session = model.new_session(1, {.threads = 2});
    std::vector<int> tokens(20);
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int>(7 * i % 64);
    session.prefill(tokens);
    Sample sample;
    for (std::uint64_t step = 0; step < 3; ++step) {
      session.draw({.seed = 5}, step, 0, {&sample, 1});
      results.drawn.push_back(sample.token);
      session.step({&sample.token, 1});
    }
    if (GetParam() == "tiny") {
      const Tokenizer tokenizer = Tokenizer::load(folder);
      const std::vector<int> ids = tokenizer.encode("hello 🚀 world");
      session.prefill(ids);
      results.text = tokenizer.decode(ids) + generate(session, tokenizer, {.max_tokens = 3}).text;
    }
    Scorer scorer(model, {.session = {.threads = 2}});
    for (const DocumentScore& score : scorer.score(std::vector<std::vector<int>>{tokens, {1, 2, 3}})) {
      results.logprobs.insert(results.logprobs.end(), score.logprobs.begin(), score.logprobs.end());
    }
    write_state_file(state_, save_sequence(session, {.seed = 5}));
    Session other = model.new_session(1, {.threads = 1});
    restore_sequence(other, read_state_file(state_));
    results.state = other.clone().save();
    return results;
  }

  /// The error of a run under a plan, if it ended so; checks what must be true of any.
  void try_fault(const faults::Plan& plan, const Results& expected) {
    SCOPED_TRACE(testing::Message() << GetParam() << ": kind " << static_cast<int>(plan.kind) << ", call " << plan.nth
                                    << (plan.failures > 1 ? " and all after it" : ""));
    const std::int64_t before = descriptors();
    std::optional<Results> results;
    std::string error;
    faults::begin(plan);
    try {
      results = run();
    } catch (const std::bad_alloc&) {
      error = plan.kind == Kind::kAllocation ? "" : "bad_alloc";
    } catch (const std::system_error& fault) {
      const int code = fault.code().value();
      const bool right = plan.kind == Kind::kAllocation ? code == ENOMEM : code == plan.error && plan.kind == Kind::kIo;
      if (!right) error = std::string("system_error: ") + fault.what();
    } catch (const std::exception& fault) {
      if (plan.kind != Kind::kIo) error = std::string("another exception: ") + fault.what();
    }
    faults::end();
    EXPECT_EQ(error, "");
    if (results) {
      EXPECT_TRUE(*results == expected) << "other results";
    }
    EXPECT_EQ(descriptors(), before) << "files that were left open: " << open_files();
    const std::string now = test::read_file(state_);
    EXPECT_TRUE(now == old_state_ || now == new_state_) << "a damaged file";
    for (const auto& entry : std::filesystem::directory_iterator(own_.path())) {
      EXPECT_EQ(entry.path(), state_) << "a file that was left behind";
    }
  }
  std::int64_t blocks_after(const faults::Plan& plan, const Results& expected) {
    try_fault(plan, expected);
    return faults::live_blocks();
  }

  void try_all(Kind kind, bool forever, std::int64_t most, int error = EIO) {
    const Results expected = run();
    new_state_ = test::read_file(state_);
    old_state_ = "what was there before";
    run();
    faults::begin({kind});
    run();
    const std::int64_t calls = faults::end();
    ASSERT_GT(calls, 0);
    const char* wish = std::getenv("MMREC_FAULTS");
    if (wish != nullptr && std::string_view(wish) == "all") most = calls;
    const std::int64_t stride = std::max<std::int64_t>(1, calls / most);
    std::int64_t tried = 0;
    std::int64_t struck = 0;
    std::int64_t blocks = 0;
    for (std::int64_t nth = 1; nth <= calls && !HasFailure(); nth += stride, ++tried) {
      test::write_file(state_, old_state_);
      const faults::Plan plan{kind, nth, forever ? calls : 1, error};
      const std::int64_t now = blocks_after(plan, expected);
      struck += faults::has_struck() ? 1 : 0;
      // Caches may grow once; a leak grows every time.
      if (tried > 0 && now > blocks) {
        const std::int64_t second = blocks_after(plan, expected);
        const std::int64_t third = blocks_after(plan, expected);
        EXPECT_FALSE(now < second && second < third) << "call " << nth << " leaks";
        blocks = third;
      } else {
        blocks = now;
      }
      if (tried % 8 == 0) {
        EXPECT_TRUE(run() == expected) << "after call " << nth << " failed";
      }
    }
    EXPECT_TRUE(run() == expected);
    std::cout << "  " << struck << " of " << calls << " calls failed in turn\n";
  }

  test::TempFolder own_;
  const std::filesystem::path state_ = own_ / "state";
  std::string old_state_, new_state_;
};

TEST_P(Faults, EveryAllocation) { try_all(Kind::kAllocation, false, 150); }
TEST_P(Faults, EveryAllocationAndAllAfterIt) { try_all(Kind::kAllocation, true, 40); }
TEST_P(Faults, EveryThread) { try_all(Kind::kThread, false, 40); }
TEST_P(Faults, EveryThreadAndAllAfterIt) { try_all(Kind::kThread, true, 40); }
TEST_P(Faults, EveryCallOnAFile) { try_all(Kind::kIo, false, 60); }
TEST_P(Faults, AFullDisk) { try_all(Kind::kIo, false, 60, ENOSPC); }
TEST_P(Faults, NoMoreDescriptors) { try_all(Kind::kIo, true, 60, EMFILE); }
TEST_P(Faults, ShortReadsAndWritesGoOn) { try_all(Kind::kShort, false, 60); }
TEST_P(Faults, InterruptedCallsGoOn) { try_all(Kind::kInterrupt, false, 60); }

INSTANTIATE_TEST_SUITE_P(Host, Faults, testing::Values("tiny", "upstream/mmrec100m", "upstream/jax"),
                         [](const auto& info) { return info.param.substr(info.param.find('/') + 1); });

TEST(HostThreads, WeightsAreReadByThreadsForTheProcessorsThatMayBeUsed) {
  cpu_set_t all, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  CPU_ZERO(&one);
  for (int cpu = 0; CPU_COUNT(&one) == 0; ++cpu) {
    if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  faults::begin({Kind::kThread});
  Model::load(test::folder_of("tiny"), {.device = Device::kCpu});
  EXPECT_EQ(faults::end(), 0);
  ASSERT_EQ(sched_setaffinity(0, sizeof all, &all), 0);
}

TEST(HostMemory, ASessionThatFailsTakesNone) {
  const Model model = Model::load(test::folder_of("tiny"), {.device = Device::kCpu});
  const Session session = model.new_session(2, {.threads = 1});
  std::int64_t calls = 0;
  const auto blocks_after = [&](std::int64_t nth) {
    faults::begin({Kind::kAllocation, nth});
    try {
      (void)session.clone();
    } catch (const std::bad_alloc&) {
    }
    calls = faults::end();
    return faults::live_blocks();
  };
  blocks_after(0);
  for (std::int64_t nth = 1, all = calls; nth <= all; ++nth) {
    const std::int64_t first = blocks_after(nth), second = blocks_after(nth), third = blocks_after(nth);
    EXPECT_FALSE(first < second && second < third) << "call " << nth << " leaks";
  }
}

TEST(HostMemory, AModelIsQuantisedWholeOrNotAtAll) {
  const test::TempFolder own;
  const std::filesystem::path to = own / "quantised";
  std::int64_t calls = 0;
  const auto is_done = [&](std::int64_t nth) {
    bool done = false;
    faults::begin({Kind::kAllocation, nth});
    try {
      done = quantize_model(test::folder_of("tiny"), to, {.threads = 1}).complete;
    } catch (const std::bad_alloc&) {
    } catch (const std::system_error& error) {
      EXPECT_EQ(error.code(), std::errc::not_enough_memory) << error.what();
    }
    calls = faults::end();
    EXPECT_EQ(done, std::filesystem::exists(to)) << "call " << nth;
    std::filesystem::remove_all(to);
    return done;
  };
  EXPECT_TRUE(is_done(0));
  for (std::int64_t nth = 1, all = calls; nth <= all; nth += std::max<std::int64_t>(1, all / 300)) is_done(nth);
}

}  // namespace
}  // namespace mmrec
