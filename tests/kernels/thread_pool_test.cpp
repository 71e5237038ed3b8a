// The thread pool: every thread once per region, ranges that cover, barriers that order, idle threads that wake.
#include "kernels/cpu/thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "tests/support/prelude.h"

namespace mmrec::kernels {
namespace {

class Pool : public testing::TestWithParam<int> {};

TEST_P(Pool, RunsTheBodyOnceOnEveryThread) {
  ThreadPool pool(GetParam());
  ASSERT_EQ(pool.threads(), GetParam());
  std::vector<int> calls(static_cast<std::size_t>(pool.threads()), 0);  // one entry per thread: no races
  const std::thread::id caller = std::this_thread::get_id();
  std::thread::id first;
  for (int region = 0; region < 500; ++region) {
    pool.run([&](int thread) {
      ++calls[static_cast<std::size_t>(thread)];
      if (thread == 0) first = std::this_thread::get_id();
    });
  }
  for (const int count : calls) EXPECT_EQ(count, 500);
  EXPECT_EQ(first, caller);
}

TEST_P(Pool, RegionsSeeWhatEarlierRegionsWrote) {
  ThreadPool pool(GetParam());
  const auto n = static_cast<std::size_t>(pool.threads());
  std::vector<long> values(n, 0);
  std::vector<long> next(n, 0);
  for (int region = 0; region < 300; ++region) {  // each region reads all that the one before wrote
    pool.run([&](int thread) {
      next[static_cast<std::size_t>(thread)] = std::accumulate(values.begin(), values.end(), 0L) % 1000 + thread + 1;
    });
    std::swap(values, next);
  }
  std::vector<long> expected(n, 0);
  for (int region = 0; region < 300; ++region) {
    const long sum = std::accumulate(expected.begin(), expected.end(), 0L) % 1000;
    for (std::size_t i = 0; i < n; ++i) expected[i] = sum + static_cast<long>(i) + 1;
  }
  EXPECT_EQ(values, expected);
}

TEST_P(Pool, BarrierSeparatesPhases) {
  ThreadPool pool(GetParam());
  const auto n = static_cast<std::size_t>(pool.threads());
  std::vector<int> phase(n, 0);
  std::atomic<int> errors{0};
  pool.run([&](int thread) {
    for (int p = 1; p <= 200; ++p) {
      phase[static_cast<std::size_t>(thread)] = p;
      pool.barrier();
      for (const int other : phase) errors += other != p ? 1 : 0;
      pool.barrier();
    }
  });
  EXPECT_EQ(errors, 0);
}

TEST_P(Pool, ParallelForCoversEachIndexOnce) {
  ThreadPool pool(GetParam());
  for (const std::int64_t count : {0, 1, 2, 7, 63, 64, 65, 1000}) {
    for (const std::int64_t grain : {1, 3, 16, 2000}) {
      std::vector<int> hits(static_cast<std::size_t>(count), 0);
      std::atomic<int> misplaced{0};
      pool.parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end, int thread) {
        misplaced += begin % grain != 0 || thread < 0 || thread >= pool.threads() ? 1 : 0;
        for (std::int64_t i = begin; i < end; ++i) ++hits[static_cast<std::size_t>(i)];
      });
      for (const int hit : hits) ASSERT_EQ(hit, 1) << count << " by " << grain;
      EXPECT_EQ(misplaced, 0);
    }
  }
}

TEST_P(Pool, SharingWaitsForAllWhoEntered) {
  ThreadPool pool(GetParam());
  for (int region = 0; region < 50; ++region) {
    std::atomic<int> entered{0};
    std::atomic<int> done{0};
    pool.run_sharing([&](int thread) {
      ++entered;
      if (thread == 0) {  // give the others a chance to come, but leave before they are done
        for (int i = 0; i < 1000 && entered < 2 && pool.threads() > 1; ++i) std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(300));
      }
      ++done;
    });
    ASSERT_EQ(done, entered) << "region " << region;
    ASSERT_GE(done, 1);
  }
}

TEST_P(Pool, RegionsOfBothKindsAlternate) {
  ThreadPool pool(GetParam());
  for (int region = 0; region < 2000; ++region) {
    std::atomic<int> next{0};
    std::atomic<int> taken{0};
    pool.run_sharing([&](int) {
      while (next.fetch_add(1) < 10) ++taken;
    });
    ASSERT_EQ(taken, 10);
    std::atomic<int> calls{0};
    pool.run([&](int) { ++calls; });
    ASSERT_EQ(calls, pool.threads());
  }
}

TEST_P(Pool, WakesAfterSleeping) {
  ThreadPool pool(GetParam());
  std::atomic<int> calls{0};
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));  // longer than any spinning
    pool.run([&](int) { ++calls; });
  }
  EXPECT_EQ(calls, 5 * pool.threads());
}

TEST_P(Pool, IsDestroyedUnused) { const ThreadPool pool(GetParam()); }

TEST_P(Pool, WorkersLeaveSignalsToTheHost) {
  const auto mask = [] {
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    return blocked;
  };
  ThreadPool pool(GetParam());
  std::vector<sigset_t> masks(static_cast<std::size_t>(pool.threads()));
  pool.run([&](int thread) { masks[static_cast<std::size_t>(thread)] = mask(); });
  const sigset_t caller = mask();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGUSR1, SIGCHLD, SIGPROF, SIGSEGV, SIGBUS}) {
    const bool is_left = signal != SIGPROF && signal != SIGSEGV && signal != SIGBUS;
    EXPECT_EQ(sigismember(&caller, signal), 0);
    for (std::size_t i = 0; i < masks.size(); ++i) {
      EXPECT_EQ(sigismember(&masks[i], signal), i != 0 && is_left ? 1 : 0) << strsignal(signal) << ", thread " << i;
    }
  }
}

#if !defined(__SANITIZE_THREAD__)  // which starts no threads after a fork
TEST_P(Pool, AForkedProcessHasThreadsOfItsOwn) {
  ThreadPool used(GetParam());
  std::optional<ThreadPool> dropped(GetParam());
  std::atomic<int> calls{0};
  const auto region = [&](ThreadPool& pool) {
    pool.run([&](int) {
      ++calls;
      pool.barrier();
    });
  };
  // Every thread is past its start: AddressSanitizer's allocator keeps the lock that a thread held when it is forked.
  region(used);
  region(*dropped);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    for (int i = 0; i < 3; ++i) region(used);
    dropped.reset();
    ThreadPool fresh(GetParam());
    region(fresh);
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      region(used);
      _exit(calls == 7 * GetParam() ? 0 : 1);
    }
    int status = 1;
    waitpid(grandchild, &status, 0);
    _exit(calls == 6 * GetParam() && status == 0 ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  region(used);
  EXPECT_EQ(calls, 3 * GetParam());
}
#endif

INSTANTIATE_TEST_SUITE_P(Threads, Pool, testing::Values(1, 2, 5, 16));

}  // namespace
}  // namespace mmrec::kernels
