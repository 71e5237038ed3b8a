// mmrec-kernel-bench: the speed of the public kernels on the CPU, each next to the bound that this machine sets.
//
// Bounds are measured in the same run and in turn with the kernel, repetition by repetition, so that a busy neighbour
// or a clock change meets both: a copy (bytes read and written) for the scans and the backward, a read-only sum for the
// log-probs, a plain sgemm of the same product for log-probs from hidden states. Operands are random, lie far beyond
// the last-level cache unless the shape is small, and are backed by huge pages where the system grants them. Times are
// medians.
#include <oneapi/dnnl/dnnl.h>
#include <sys/mman.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/one_thread.h"

namespace {

using namespace mmrec::kernels;

struct Options {
  int threads = 0;
  int repetitions = 9;
  bool json = false;
  bool quick = false;
  std::string only;
};

constexpr const char* kHelp =
    "mmrec-kernel-bench [options]: times the CPU kernels against copy, read and sgemm speed\n"
    "  --threads N      threads (default: all processors this process may run on)\n"
    "  --repetitions N  timed repetitions of each case (default 9)\n"
    "  --only TEXT      only cases whose name contains TEXT\n"
    "  --quick          small shapes only, to see that everything runs\n"
    "  --json           one JSON object instead of the table\n"
    "  -h, --help       this text\n";

/// Anonymous memory, huge pages asked for. Owns it; moves only.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(std::max<std::size_t>(bytes, 1)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    madvise(data_, bytes_, MADV_HUGEPAGE);
  }
  ~Memory() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Memory& operator=(Memory&&) = delete;

  template <class T>
  T* as() {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// `count` values, uniform in [low, high).
template <class T>
Memory random_values(Cpu& cpu, std::int64_t count, float low, float high) {
  Memory memory(static_cast<std::size_t>(count) * sizeof(T));
  T* p = memory.as<T>();
  cpu.pool().parallel_for(count, 4096, [&](std::int64_t begin, std::int64_t end, int) {
    std::uint64_t s = static_cast<std::uint64_t>(begin) * 0x9e3779b97f4a7c15U + 88172645463325252U;
    for (std::int64_t i = begin; i < end; ++i) {
      s ^= s << 13;
      s ^= s >> 7;
      s ^= s << 17;
      p[i] = from_float<T>(low + (high - low) * static_cast<float>(s >> 40) * 0x1p-24F);
    }
  });
  return memory;
}

using Clock = std::chrono::steady_clock;

double seconds(const std::function<void()>& body) {
  const auto begin = Clock::now();
  body();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

/// What one repetition moves (or computes) per second at best.
struct Bound {
  const char* name;
  double work;  // bytes or floating-point operations
  std::function<void()> body;
};

struct Row {
  std::string name;
  std::string shape;
  double milliseconds;
  double rate;  // GB/s or GFLOP/s
  const char* unit;
  const char* bound;
  double bound_rate;
};

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        cpu_(options.threads),
        source_(random_values<float>(cpu_, kCopyFloats, -1.0F, 1.0F)),
        target_(random_values<float>(cpu_, kCopyFloats, -1.0F, 1.0F)) {}

  void run() {
    machine();
    scans();
    logprobs();
    hidden();
  }
  void print() const;

 private:
  static constexpr std::int64_t kCopyFloats = std::int64_t{64} << 20;  // 256 MiB

  Bound copy() {
    return {"copy", 2.0 * static_cast<double>(source_.bytes()), [this] {
              cpu_.pool().parallel_for(kCopyFloats, 4096, [&](std::int64_t begin, std::int64_t end, int) {
                std::memcpy(target_.as<float>() + begin, source_.as<float>() + begin,
                            static_cast<std::size_t>(end - begin) * sizeof(float));
              });
            }};
  }
  Bound read() {
    return {"read", static_cast<double>(source_.bytes()), [this] {
              cpu_.pool().parallel_for(kCopyFloats, 4096, [&](std::int64_t begin, std::int64_t end, int thread) {
                // Integer sums in lanes: the compiler makes vectors of them.
                const auto* p = source_.as<std::uint64_t>();
                std::uint64_t sum[32] = {};
                for (std::int64_t i = begin / 2; i < end / 2; i += 32) {
                  for (std::int64_t line = 0; line < 32; line += 8) __builtin_prefetch(p + i + 1024 + line);
                  for (std::int64_t k = 0; k < 32; ++k) sum[k] += p[i + k];
                }
                for (std::int64_t k = 1; k < 32; ++k) sum[0] += sum[k];
                sink_[thread % 16] = sum[0];
              });
            }};
  }

  bool wanted(const std::string& name) const { return name.find(options_.only) != std::string::npos; }

  /// `work` in bytes or floating-point operations of one call.
  void measure(std::string name, std::string shape, double work, const char* unit, const Bound& bound,
               const std::function<void()>& body) {
    bound.body();
    body();
    std::vector<double> bound_times, times;
    for (int i = 0; i < options_.repetitions; ++i) {
      bound_times.push_back(seconds(bound.body));
      // Calls too short to time are repeated.
      int calls = 1;
      double t = seconds(body);
      while (t < 2e-3) {
        calls *= 2;
        t = seconds([&] {
          for (int k = 0; k < calls; ++k) body();
        });
      }
      times.push_back(t / calls);
    }
    const double t = median(times);
    rows_.push_back({std::move(name), std::move(shape), t * 1e3, work / t * 1e-9, unit, bound.name,
                     bound.work / median(bound_times) * 1e-9});
    if (!options_.json) std::fprintf(stderr, ".");
  }

  void machine() {
    if (wanted("copy")) measure("copy", "256 MiB", copy().work, "GB/s", copy(), copy().body);
    if (wanted("read")) measure("read", "256 MiB", read().work, "GB/s", read(), read().body);
  }

  template <class T>
  void scan(const std::string& type, std::int64_t batch, std::int64_t time, std::int64_t dim) {
    const std::int64_t count = batch * time * dim;
    const std::string shape =
        "(" + std::to_string(batch) + ", " + std::to_string(time) + ", " + std::to_string(dim) + ")";
    const auto bytes = static_cast<double>(count) * static_cast<double>(sizeof(T));
    const std::string names[] = {"decay_scan " + type, "exp_product_scan " + type, "logsumexp_scan " + type};
    if (!wanted(names[0]) && !wanted(names[1]) && !wanted(names[2])) return;
    Memory log_a = random_values<T>(cpu_, count, -0.1F, 0.0F);
    Memory b = random_values<T>(cpu_, count, -1.0F, 1.0F);
    Memory h = random_values<T>(cpu_, count, 0.9F, 1.0F);
    const auto in = [&](Memory& m) { return SequenceView<const T, Host>(m.as<T>(), batch, time, dim); };
    const SequenceView<T, Host> out(h.as<T>(), batch, time, dim);
    if (wanted(names[0])) {
      measure(names[0], shape, 3.0 * bytes, "GB/s", copy(), [&] {
        decay_scan<T>(cpu_, {in(log_a), in(b), out, nullptr, nullptr});
      });
    }
    Memory gamma = random_values<T>(cpu_, count, 0.9F, 1.0F);
    if (wanted(names[1])) {
      measure(names[1], shape, 2.0 * bytes, "GB/s", copy(), [&] {
        exp_product_scan<T>(cpu_, {in(gamma), out, {}, nullptr, nullptr});
      });
    }
    if (wanted(names[2])) {
      measure(names[2], shape, 2.0 * bytes, "GB/s", copy(), [&] {
        logsumexp_scan<T>(cpu_, {in(b), out, nullptr, nullptr});
      });
    }
  }

  void scans() {
    if (!options_.quick) {
      scan<float>("fp32", 1, 32768, 4096);
      scan<BFloat16>("bf16", 1, 32768, 4096);
      scan<float>("fp32", 1, 131072, 1024);
      scan<float>("fp32", 8, 4096, 2048);
      scan<float>("fp32", 1, 1048576, 16);
      scan<BFloat16>("bf16", 1, 1048576, 16);
    }
    scan<float>("fp32", 1, 4096, 1024);
    scan<float>("fp32", 1, 1024, 512);
    scan<float>("fp32", 1, 65536, 16);
  }

  template <class T>
  void logprob(const std::string& type, std::int64_t n, std::int64_t vocab) {
    const std::string shape = "(" + std::to_string(n) + ", " + std::to_string(vocab) + ")";
    const std::string names[] = {"token_logprobs " + type, "token_logprobs_backward " + type};
    if (!wanted(names[0]) && !wanted(names[1])) return;
    Memory logits = random_values<T>(cpu_, n * vocab, -10.0F, 10.0F);
    const MatrixView<const T, Host> in(logits.as<T>(), n, vocab);
    std::vector<int> targets(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < targets.size(); ++i)
      targets[i] = static_cast<int>(i * 7919 % static_cast<std::size_t>(vocab));
    std::vector<float> logprobs(targets.size()), grad(targets.size(), 0.5F);
    const auto bytes = static_cast<double>(n * vocab) * static_cast<double>(sizeof(T));
    if (wanted(names[0])) {
      measure(names[0], shape, bytes, "GB/s", read(), [&] {
        token_logprobs<T, int>(cpu_, {in, targets.data(), logprobs.data()});
      });
    }
    if (wanted(names[1])) {
      Memory d = random_values<T>(cpu_, n * vocab, -1.0F, 1.0F);
      // Logits twice (the row's sum comes first), gradients once.
      measure(names[1], shape, 3.0 * bytes, "GB/s", copy(), [&] {
        token_logprobs_backward<T, int>(cpu_, {in, targets.data(), grad.data(), {d.as<T>(), n, vocab}});
      });
    }
  }

  void logprobs() {
    if (!options_.quick) {
      logprob<float>("fp32", 1024, 32000);
      logprob<BFloat16>("bf16", 4096, 32000);
      logprob<BFloat16>("bf16", 1024, 128256);
      logprob<Float16>("fp16", 1024, 50304);
    }
    logprob<float>("fp32", 64, 32000);
    logprob<float>("fp32", 1, 128256);
  }

  template <class T>
  void from_hidden(const std::string& type, DType dtype, std::int64_t n, std::int64_t vocab, std::int64_t dim) {
    const std::string name = "hidden_logprobs " + type;
    if (!wanted(name)) return;
    const std::string shape =
        "(" + std::to_string(n) + ", " + std::to_string(vocab) + ", D " + std::to_string(dim) + ")";
    Memory hidden = random_values<float>(cpu_, n * dim, -1.0F, 1.0F);
    Memory head = random_values<T>(cpu_, vocab * dim, -0.05F, 0.05F);
    Memory wide = random_values<float>(cpu_, vocab * dim, -0.05F, 0.05F);
    Memory logits(static_cast<std::size_t>(n * vocab) * sizeof(float));
    std::vector<int> targets(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < targets.size(); ++i)
      targets[i] = static_cast<int>(i * 7919 % static_cast<std::size_t>(vocab));
    std::vector<float> logprobs(targets.size());
    const double flops = 2.0 * static_cast<double>(n * vocab) * static_cast<double>(dim);
    // The bound: the whole product by the matrix library, an fp32 head, logits written, vocabulary over the threads.
    const Bound gemm{"sgemm", flops, [&] {
                       cpu_.pool().parallel_for(vocab, 64, [&](std::int64_t begin, std::int64_t end, int) {
                         const OneThread alone;
                         (void)dnnl_sgemm('N', 'T', n, end - begin, dim, 1.0F, hidden.as<float>(), dim,
                                          wide.as<float>() + begin * dim, dim, 0.0F, logits.as<float>() + begin, vocab);
                       });
                     }};
    measure(name, shape, flops, "GFLOP/s", gemm, [&] {
      hidden_logprobs(
          cpu_, {{hidden.as<float>(), n, dim}, {head.as<T>(), dtype, vocab, dim}, targets.data(), logprobs.data()});
    });
  }

  void hidden() {
    if (!options_.quick) {
      from_hidden<float>("fp32", DType::kF32, 512, 32000, 1024);
      from_hidden<BFloat16>("bf16", DType::kBF16, 512, 32000, 1024);
      from_hidden<BFloat16>("bf16", DType::kBF16, 128, 32000, 2048);
    }
    from_hidden<float>("fp32", DType::kF32, 128, 8000, 512);
    from_hidden<float>("fp32", DType::kF32, 7, 8000, 512);
  }

  const Options options_;
  Cpu cpu_;
  Memory source_, target_;
  std::vector<Row> rows_;
  volatile std::uint64_t sink_[16] = {};
};

void Bench::print() const {
  const std::string_view isa = cpu_instruction_set();
  const int threads = const_cast<Cpu&>(cpu_).threads();
  if (options_.json) {
    std::printf("{\"instruction_set\": \"%.*s\", \"threads\": %d, \"rows\": [", static_cast<int>(isa.size()),
                isa.data(), threads);
    const char* separator = "";
    for (const Row& r : rows_) {
      std::printf(
          "%s\n  {\"name\": \"%s\", \"shape\": \"%s\", \"ms\": %.4f, \"rate\": %.2f, \"unit\": \"%s\", \"bound\": "
          "\"%s\", "
          "\"bound_rate\": %.2f, \"share\": %.4f}",
          separator, r.name.c_str(), r.shape.c_str(), r.milliseconds, r.rate, r.unit, r.bound, r.bound_rate,
          r.rate / r.bound_rate);
      separator = ",";
    }
    std::printf("\n]}\n");
    return;
  }
  std::printf("\n%.*s, %d threads\n%-30s %-24s %10s %10s %-8s %14s\n", static_cast<int>(isa.size()), isa.data(),
              threads, "kernel", "shape", "ms", "rate", "", "share");
  for (const Row& r : rows_) {
    std::printf("%-30s %-24s %10.3f %10.1f %-8s %4.0f %% of %s %.1f\n", r.name.c_str(), r.shape.c_str(), r.milliseconds,
                r.rate, r.unit, 100.0 * r.rate / r.bound_rate, r.bound, r.bound_rate);
  }
}

/// The exit code once all is printed.
int written() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return 0;
  std::perror("mmrec-kernel-bench: stdout: cannot write");
  return 5;
}

/// A positive integer, whole.
bool parse(std::string_view text, int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() && value > 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    const std::string_view next = i + 1 < argc ? argv[i + 1] : "";
    if (arg == "-h" || arg == "--help") {
      std::fputs(kHelp, stdout);
      return written();
    }
    if (arg == "--json") {
      options.json = true;
    } else if (arg == "--quick") {
      options.quick = true;
    } else if (arg == "--only" && i + 1 < argc) {
      options.only = argv[++i];
    } else if ((arg == "--threads" && parse(next, options.threads)) ||
               (arg == "--repetitions" && parse(next, options.repetitions))) {
      ++i;
    } else {
      std::fprintf(stderr, "mmrec-kernel-bench: cannot use '%s'\n%s", argv[i], kHelp);
      return 2;
    }
  }
  try {
    Bench bench(options);
    bench.run();
    bench.print();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "mmrec-kernel-bench: %s\n", e.what());
    return 1;
  }
  return written();
}
