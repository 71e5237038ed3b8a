// The thread pool. A region is announced by a new epoch; a worker enters it by raising the count in `ticket`, which the
// caller may close, and leaves it by raising `left`. Epoch and left are futex words (std::atomic wait), so that a
// thread spins for a moment and then sleeps.
//
// What must stay true: `body` is written only while no worker is inside a region, and read only inside.
// A worker that comes late finds the ticket closed or of a later epoch and stays out.
#include "kernels/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace mmrec::kernels {
namespace {

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::atomic<std::uint32_t> fork_count{0};
std::atomic<int> most_missing{0};
[[maybe_unused]] const int kRegistered =
    pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

SignalsBlocked::SignalsBlocked(bool profilers) {
  sigset_t blocked;
  sigfillset(&blocked);
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&blocked, signal);
  if (!profilers) sigdelset(&blocked, SIGPROF);
  (void)pthread_sigmask(SIG_BLOCK, &blocked, &before_);
}
SignalsBlocked::~SignalsBlocked() { (void)pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

int missing_threads() { return most_missing; }

std::uint32_t forks() { return fork_count.load(std::memory_order_relaxed); }

struct ThreadPool::Impl {
  using Word = std::atomic<std::uint32_t>;
  static constexpr std::chrono::microseconds kSpin{50};  // longer than the serial pieces of a decode step

  explicit Impl(int count) : threads(count), oversubscribed(count > available_processors()) {
    start();
    threads = 1 + static_cast<int>(workers->size());
  }
  ~Impl() { stop(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// Starts as many workers as the system has threads for.
  void start() {
    workers = std::make_unique<std::vector<std::thread>>();
    workers->reserve(static_cast<std::size_t>(threads - 1));
    try {
      const SignalsBlocked in_workers;
      for (int i = 1; i < threads; ++i) workers->emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {
      most_missing = std::max<int>(most_missing, threads - 1 - static_cast<int>(workers->size()));
    } catch (...) {
      stop();
      throw;
    }
  }

  void stop() {
    if (is_forked()) return leave_to_parent();
    stopping.store(true);
    epoch.fetch_add(1);
    epoch.notify_all();
    for (std::thread& worker : *workers) worker.join();
    workers->clear();
  }

  bool is_forked() const { return made_after != forks(); }
  /// What is no thread of this process can be neither joined nor let go.
  void leave_to_parent() { static_cast<void>(workers.release()); }
  void start_anew() {
    leave_to_parent();
    epoch.store(0);
    ticket.store(kClosed);
    left.store(0);
    arrived.store(0);
    stopping.store(false);
    made_after = forks();
    try {
      start();
      const std::size_t started = workers->size();
      if (started + 1 == static_cast<std::size_t>(threads)) return;
      stop();
      throw std::system_error(EAGAIN, std::generic_category(),
                              "cannot start thread " + std::to_string(started + 1) + " of " +
                                  std::to_string(threads - 1) + " after a fork");
    } catch (...) {
      --made_after;  // the next region tries again
      throw;
    }
  }

  /// Returns once word differs from old; what was written before that change is visible then.
  void wait_for_change(const Word& word, std::uint32_t old) const {
    // With more threads than processors a spinning thread would only keep the one it waits for from running.
    if (!oversubscribed) {
      std::chrono::steady_clock::time_point deadline{};
      for (int round = 0;; ++round) {
        for (int i = 0; i < 32; ++i) {
          if (word.load(std::memory_order_acquire) != old) return;
          relax();
        }
        const auto now = std::chrono::steady_clock::now();
        if (round == 0) {
          deadline = now + kSpin;
        } else if (now >= deadline) {
          break;
        }
      }
    }
    word.wait(old, std::memory_order_acquire);
  }

  /// True if the worker is now inside the region of this epoch.
  bool enter(std::uint32_t region) {
    std::uint64_t seen = ticket.load(std::memory_order_acquire);
    while (seen >> 32 == region && (seen & kClosed) == 0) {
      if (ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  void work(int thread) {
    std::uint32_t region = 0;
    for (;;) {
      wait_for_change(epoch, region);
      region = epoch.load(std::memory_order_acquire);
      if (stopping.load(std::memory_order_relaxed)) return;
      if (!enter(region)) continue;
      (*body)(thread);
      left.fetch_add(1);
      left.notify_one();
    }
  }

  void announce(const std::function<void(int)>& of_region) {
    if (is_forked()) start_anew();
    body = &of_region;
    left.store(0, std::memory_order_relaxed);
    const std::uint32_t region = epoch.load(std::memory_order_relaxed) + 1;
    ticket.store(static_cast<std::uint64_t>(region) << 32, std::memory_order_release);
    epoch.store(region);
    epoch.notify_all();  // no system call unless a worker sleeps
  }

  void wait_until_left(std::uint32_t count) const {
    for (;;) {
      const std::uint32_t now = left.load(std::memory_order_acquire);
      if (now == count) return;
      wait_for_change(left, now);
    }
  }

  static constexpr std::uint64_t kClosed = std::uint64_t{1} << 31;

  int threads;  // fixed once the pool is made
  const bool oversubscribed;
  const std::function<void(int)>* body = nullptr;  // of the region
  std::atomic<bool> stopping{false};
  alignas(64) Word epoch{0};                               // regions announced
  alignas(64) std::atomic<std::uint64_t> ticket{kClosed};  // epoch << 32 | closed | workers that entered
  alignas(64) Word left{0};                                // workers that have left the region
  alignas(64) Word arrived{0};                             // threads in the barrier
  alignas(64) Word phase{0};                               // barriers completed
  std::uint32_t made_after = forks();
  std::unique_ptr<std::vector<std::thread>> workers;
};

ThreadPool::ThreadPool(int threads) : impl_(std::make_unique<Impl>(threads < 1 ? 1 : threads)) {}
ThreadPool::~ThreadPool() = default;

int ThreadPool::available_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

int ThreadPool::threads() const { return impl_->threads; }

void ThreadPool::run_any(const std::function<void(int)>& body, bool sharing) {
  Impl& pool = *impl_;
  if (pool.threads > 1) pool.announce(body);
  body(0);
  if (pool.threads == 1) return;
  const auto all = static_cast<std::uint64_t>(pool.threads - 1);
  const std::uint64_t entered = sharing ? pool.ticket.fetch_or(Impl::kClosed) & (Impl::kClosed - 1) : all;
  pool.wait_until_left(static_cast<std::uint32_t>(entered));
}

void ThreadPool::barrier() {
  Impl& pool = *impl_;
  if (pool.threads == 1) return;
  const std::uint32_t phase = pool.phase.load(std::memory_order_relaxed);
  if (pool.arrived.fetch_add(1) + 1 == static_cast<std::uint32_t>(pool.threads)) {
    pool.arrived.store(0, std::memory_order_relaxed);
    pool.phase.fetch_add(1);
    pool.phase.notify_all();
  } else {
    pool.wait_for_change(pool.phase, phase);
  }
}

}  // namespace mmrec::kernels
