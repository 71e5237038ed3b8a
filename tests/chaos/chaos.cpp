// A shared library that delays threads at random. A test gets it by LD_PRELOAD, with MMREC_CHAOS=SEED. Its own thread
// interrupts the others by a signal at any instruction, also between two atomic operations. Calls on mutexes,
// conditions, futexes and threads are delayed before and after.
//
// A correct program does the same with it, slower. The seed draws the delays. The kernel still decides the rest, so a
// seed does not repeat a run. Nothing here allocates.
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <new>

// NOLINTBEGIN: names and parameters are the C library's
namespace {

constexpr int kSignal = SIGURG;  // ignored where it comes late
constexpr std::size_t kMostThreads = 1024;

std::array<std::atomic<pid_t>, kMostThreads> threads{};
std::atomic<std::uint64_t> seed{0}, at_calls{0}, at_instructions{0}, sequence{0};
std::atomic<bool> is_on{false};

/// splitmix64. A thread's draws depend on the seed and on the order in which threads began.
struct Random {
  std::uint64_t state = 0;
  std::uint64_t next() {
    if (state == 0) state = seed.load() * 0x9E3779B97F4A7C15U + sequence.fetch_add(1) + 1;
    std::uint64_t z = (state += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }
};
// Not of the kind that is allocated when it is first touched: a signal may be what touches it.
__attribute__((tls_model("initial-exec"))) thread_local Random random_of_thread;

int (*yield)() = nullptr;

void rest(std::uint64_t nanoseconds) {
  const timespec time = {.tv_sec = 0, .tv_nsec = static_cast<long>(nanoseconds)};
  (void)::nanosleep(&time, nullptr);
}

/// Nothing mostly; the processor to others; some microseconds; now and then longer than any spinning lasts.
void hold_up(std::uint64_t draw) {
  const std::uint64_t kind = draw % 64;
  const std::uint64_t length = draw >> 32;
  if (kind < 4) yield();
  if (kind >= 4 && kind < 8) rest(length % 100'000);
  if (kind == 8 && length % 4 == 0) rest(length % 2'000'000);
}
void maybe() {
  if (!is_on.load(std::memory_order_relaxed)) return;
  const int error = errno;
  at_calls.fetch_add(1, std::memory_order_relaxed);
  hold_up(random_of_thread.next());
  errno = error;
}
extern "C" void on_signal(int) {
  const int error = errno;
  at_instructions.fetch_add(1, std::memory_order_relaxed);
  hold_up(random_of_thread.next() % 9 | random_of_thread.next() << 32);  // the draw's kind is never "nothing"
  errno = error;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

/// Of a thread: it may be interrupted as long as this is there.
struct Registered {
  Registered() {
    const pid_t self = ::gettid();
    for (auto& slot : threads) {
      pid_t none = 0;
      if (slot.compare_exchange_strong(none, self)) {
        place = &slot;
        return;
      }
    }
  }
  ~Registered() {
    if (place != nullptr) place->store(0);
  }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;
  std::atomic<pid_t>* place = nullptr;
};

/// Interrupts one thread after another, at random, until the process ends.
void* interrupt_others(void*) {
  const pid_t process = ::getpid();
  for (;;) {
    std::size_t used = 0;
    while (used < kMostThreads && threads[used].load() != 0) ++used;  // the first gap ends it: few are ever there
    // A thread some thousand times in a second at most, or one alone would come to nothing on a busy machine.
    rest(20'000 + random_of_thread.next() % (2'000'000 / (used + 1)));
    if (used == 0) continue;
    const pid_t thread = threads[random_of_thread.next() % used].load();
    if (thread != 0) (void)::tgkill(process, thread, kSignal);
  }
}

struct Start {
  void* (*function)(void*);
  void* argument;
};
std::array<Start, kMostThreads> starts;
std::atomic<std::size_t> next_start{0};

void* started(void* argument) {
  const Start start = *static_cast<const Start*>(argument);
  sigset_t own;
  sigemptyset(&own);
  sigaddset(&own, kSignal);  // which the library's threads block
  (void)pthread_sigmask(SIG_UNBLOCK, &own, nullptr);
  const Registered registered;
  maybe();
  return start.function(start.argument);
}

const Registered* main_thread = nullptr;
alignas(Registered) std::byte main_memory[sizeof(Registered)];

__attribute__((constructor)) void begin() {
  const char* const wish = std::getenv("MMREC_CHAOS");
  if (wish == nullptr) return;
  seed = std::strtoull(wish, nullptr, 10);
  yield = next<int()>("sched_yield");
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  ::sigaction(kSignal, &action, nullptr);
  main_thread = new (main_memory) Registered;
  pthread_t thread{};
  if (next<decltype(pthread_create)>("pthread_create")(&thread, nullptr, interrupt_others, nullptr) != 0) std::abort();
  ::pthread_detach(thread);
  is_on = true;
}
__attribute__((destructor)) void end() {
  if (!is_on.exchange(false)) return;
  std::fprintf(stderr, "chaos: seed %llu, threads held up at %llu calls and at %llu instructions\n",
               static_cast<unsigned long long>(seed), static_cast<unsigned long long>(at_calls),
               static_cast<unsigned long long>(at_instructions));
}

}  // namespace

extern "C" {

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
  static auto* const original = next<decltype(pthread_create)>("pthread_create");
  if (!is_on.load()) return original(thread, attributes, start, argument);
  maybe();
  // Taken before it is needed again: a thousand starts later.
  Start& mine = starts[next_start.fetch_add(1) % kMostThreads];
  mine = {start, argument};
  const int done = original(thread, attributes, started, &mine);
  maybe();
  return done;
}

#define MMREC_AROUND(name, parameters, arguments)              \
  int name parameters {                                        \
    static auto* const original = next<int parameters>(#name); \
    maybe();                                                   \
    const int done = original arguments;                       \
    maybe();                                                   \
    return done;                                               \
  }
MMREC_AROUND(pthread_mutex_lock, (pthread_mutex_t * mutex) noexcept, (mutex))
MMREC_AROUND(pthread_mutex_trylock, (pthread_mutex_t * mutex) noexcept, (mutex))
MMREC_AROUND(pthread_mutex_unlock, (pthread_mutex_t * mutex) noexcept, (mutex))
MMREC_AROUND(pthread_cond_signal, (pthread_cond_t * condition) noexcept, (condition))
MMREC_AROUND(pthread_cond_broadcast, (pthread_cond_t * condition) noexcept, (condition))
MMREC_AROUND(pthread_cond_wait, (pthread_cond_t * condition, pthread_mutex_t* mutex), (condition, mutex))
MMREC_AROUND(pthread_cond_clockwait,
             (pthread_cond_t * condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* time),
             (condition, mutex, clock, time))
MMREC_AROUND(pthread_join, (pthread_t thread, void** result), (thread, result))
MMREC_AROUND(sched_yield, () noexcept, ())
#undef MMREC_AROUND

/// What std::atomic's wait() and notify_one() call.
long syscall(long number, ...) noexcept {
  static auto* const original = next<long(long, ...)>("syscall");
  va_list all;
  va_start(all, number);
  long a[6];
  for (long& one : a) one = va_arg(all, long);
  va_end(all);
  if (number == SYS_futex) maybe();
  const long done = original(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (number == SYS_futex) maybe();
  return done;
}

}  // extern "C"
// NOLINTEND
