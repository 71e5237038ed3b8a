// What the processors can do.
#include "apps/bench/peaks.h"

#include <oneapi/dnnl/dnnl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "apps/common/stopwatch.h"
#include "kernels/cpu/onednn_call.h"
#include "kernels/cpu/thread_pool.h"
#include "models/files/interrupted.h"

namespace mmrec::apps {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr int kReadPasses = 6;
constexpr int kProducts = 4;
constexpr int kProductSize = 2048;

// Several independent sums, so that loads and not additions set the pace; widened for the processor at hand below.
[[gnu::always_inline]] inline std::uint64_t sum_words(const std::uint64_t* words, std::size_t count) {
  constexpr std::size_t kLanes = 32;
  std::uint64_t lanes[kLanes] = {};
  for (std::size_t i = 0; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += words[i + lane];
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t lane : lanes) sum += lane;
  return sum;
}

std::uint64_t sum_plain(const std::uint64_t* words, std::size_t count) { return sum_words(words, count); }

#if defined(__x86_64__)
[[gnu::target("avx2"), gnu::optimize("O3")]] std::uint64_t sum_avx2(const std::uint64_t* words, std::size_t count) {
  return sum_words(words, count);
}
[[gnu::target("avx512f,prefer-vector-width=512"), gnu::optimize("O3")]] std::uint64_t sum_avx512(
    const std::uint64_t* words, std::size_t count) {
  return sum_words(words, count);
}
#endif

using Sum = std::uint64_t (*)(const std::uint64_t*, std::size_t);

Sum widest_sum() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return sum_avx512;
  if (__builtin_cpu_supports("avx2")) return sum_avx2;
#endif
  return sum_plain;
}

std::size_t buffer_bytes() {
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  const std::size_t wanted = cache > 0 ? 4 * static_cast<std::size_t>(cache) : 0;
  return std::clamp(wanted, 512 * kMiB, 2048 * kMiB);
}

struct Free {
  void operator()(void* p) const { std::free(p); }  // NOLINT(cppcoreguidelines-no-malloc): untouched pages
};

/// Seconds of the fastest of several passes: in each all threads begin `work` together. Each prepares itself first.
double best_seconds(int threads, int passes, const std::function<void(int)>& prepare,
                    const std::function<void(int)>& work) {
  double best = std::numeric_limits<double>::max();
  Stopwatch watch;
  std::barrier together(threads);
  const auto run = [&](int thread) {
    prepare(thread);
    for (int pass = 0; pass < passes; ++pass) {
      together.arrive_and_wait();
      if (thread == 0) watch.lap();
      together.arrive_and_wait();
      work(thread);
      together.arrive_and_wait();
      if (thread == 0) best = std::min(best, watch.lap());
    }
  };
  std::vector<std::jthread> team;
  for (int thread = 1; thread < threads; ++thread) team.emplace_back(run, thread);
  run(0);
  return best;
}

double read_bandwidth(int threads) {
  const std::size_t share = buffer_bytes() / static_cast<std::size_t>(threads) / 4096 * 4096;
  const std::size_t words = share / sizeof(std::uint64_t);
  const std::unique_ptr<void, Free> buffer(std::aligned_alloc(4096, share * static_cast<std::size_t>(threads)));
  if (!buffer) throw std::bad_alloc();
  const auto of_thread = [&](int thread) {
    return static_cast<std::uint64_t*>(buffer.get()) + static_cast<std::size_t>(thread) * words;
  };
  const Sum sum = widest_sum();
  std::atomic<std::uint64_t> sink{0};  // keeps the sums from being optimised away
  // Touched first by the thread that reads it.
  const auto fill = [&](int thread) { std::fill_n(of_thread(thread), words, std::uint64_t{1}); };
  const double best =
      best_seconds(threads, kReadPasses, fill, [&](int thread) { sink += sum(of_thread(thread), words); });
  return static_cast<double>(share * static_cast<std::size_t>(threads)) / best;
}

double sgemm_rate(int threads) {
  constexpr std::size_t kElements = std::size_t{kProductSize} * kProductSize;
  std::vector<float> a(kElements, 0.5F);
  std::vector<float> b(kElements, 0.25F);
  std::vector<float> c(kElements);
  std::atomic<bool> failed{false};
  const auto multiply = [&](int thread) {
    const kernels::OneDnnCall call;
    const std::int64_t first = std::int64_t{kProductSize} * thread / threads;
    const std::int64_t rows = std::int64_t{kProductSize} * (thread + 1) / threads - first;
    if (dnnl_sgemm('N', 'T', rows, kProductSize, kProductSize, 1.0F, a.data() + first * kProductSize, kProductSize,
                   b.data(), kProductSize, 0.0F, c.data() + first * kProductSize, kProductSize) != dnnl_success) {
      failed = true;
    }
  };
  const double best = best_seconds(threads, kProducts, multiply, multiply);  // the first one makes code
  if (failed) throw std::bad_alloc();
  constexpr double kSize = kProductSize;
  return 2.0 * kSize * kSize * kSize / best;
}

}  // namespace

Peaks measure_machine() {
  const int threads = kernels::ThreadPool::available_processors();
  return {.read_bytes_per_second = read_bandwidth(threads), .product_flops = sgemm_rate(threads)};
}

Peaks measure_machine_apart() {
  int ends[2];
  if (pipe(ends) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  const pid_t child = fork();
  if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (child == 0) {
    try {
      const Peaks peaks = measure_machine();
      _exit(write(ends[1], &peaks, sizeof peaks) == ssize_t{sizeof peaks} ? 0 : 1);
    } catch (const std::exception&) {
      _exit(1);
    }
  }
  (void)close(ends[1]);
  Peaks peaks;
  const ssize_t n = models::uninterrupted([&] { return read(ends[0], &peaks, sizeof peaks); });
  (void)close(ends[0]);
  (void)waitpid(child, nullptr, 0);
  if (n != ssize_t{sizeof peaks}) throw std::bad_alloc();  // the one thing the measurement can run out of
  return peaks;
}

}  // namespace mmrec::apps
