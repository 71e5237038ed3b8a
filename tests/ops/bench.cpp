// mmrec-kernel-bench and mmrec-cuda-bench: the speed of the op cases on one backend, each next to a limit of the
// machine. Long, because both backends are measured by it.
//
// Limits are measured in the same run and in turn with the op, repetition by repetition, so that a busy neighbour or a
// change of clocks meets both: a copy (bytes read and written), a read, or a product of the matrix library. Operands
// are random. If the last cache can hold them, calls take several sets of operands in turn. Times are medians: of CUDA
// events on a GPU, else of the host's clock.
#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string_view>

#include "apps/common/cli.h"
#include "apps/common/output.h"
#include "tests/ops/op_test.h"
#if defined(MMREC_TEST_CUDA)
#include "apps/bench/kernels.h"
#include "kernels/cuda/runtime/cublaslt.h"
#else
#include <oneapi/dnnl/dnnl.h>
#include <sys/mman.h>

#include <new>

#include "kernels/cpu/onednn_call.h"

// Large operands lie on huge pages where the system grants them.
void* operator new(std::size_t bytes, std::align_val_t align) {
  constexpr std::size_t kPage = std::size_t{2} << 20;
  const std::size_t to = bytes < 2 * kPage ? static_cast<std::size_t>(align) : kPage;
  void* const data = std::aligned_alloc(to, (bytes + to - 1) / to * to);
  if (data == nullptr) throw std::bad_alloc();
  if (to == kPage) madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }
#endif

namespace mmrec::kernels::test {
namespace {

#if defined(MMREC_TEST_CUDA)
constexpr const char* kProgram = "mmrec-cuda-bench";
#else
constexpr const char* kProgram = "mmrec-kernel-bench";
#endif

struct Options {
  int threads = 0;
  int repetitions = kOnCuda ? 11 : 9;
  bool quick = false, check = false, scan_ways = false, prints_json = false;
  std::string only;
  std::string json;  // a file
};

std::string help() {
  return fmt::format(
      "{} [options]: times the {} kernels against copy, read and {} speed\n"
      "  --only TEXT      only cases whose name contains TEXT\n"
      "  --repetitions N  timed repetitions of each case (default {})\n"
      "  --quick          small shapes only, to see that everything runs\n"
      "  --check          checks each result against its float64 reference before it is timed\n"
      "{}"
      "  -h, --help       this text\n",
      kProgram, kOnCuda ? "CUDA" : "CPU", kOnCuda ? "product" : "sgemm", Options{}.repetitions,
      kOnCuda ? "  --scan-ways      every way of the scans where columns do not fill the device, and nothing else\n"
                "  --json FILE      the figures as JSON too\n"
              : "  --threads N      threads (default: all processors this process may run on)\n"
                "  --json           one JSON object instead of the table\n");
}

/// Work that takes the machine as long as it must: bytes, or operations of a product.
struct Bound {
  const char* name;
  double work;
  std::function<void()> body;
};

struct Row {
  std::string name, shape;
  double seconds;
  double rate;  // in units
  const char* unit;
  const char* bound;
  double bound_rate;
  std::string note;
};

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
#if defined(MMREC_TEST_CUDA)
        timer_(on_),
#else
        on_(options.threads),
#endif
        source_(copy_bytes_),
        target_(copy_bytes_) {
#if defined(MMREC_TEST_CUDA)
    for (auto* buffer : {&source_, &target_}) {
      apps::fill_random(on_, DType::kF32, buffer->data(), static_cast<std::int64_t>(copy_bytes_ / sizeof(float)), -1.0F,
                        1.0F, 1);
    }
#endif
  }

  /// False if a check failed.
  bool run() {
    if (!options_.scan_ways) machine();
    for (const CaseTable table : case_tables()) {
      OpCases cases;
      table(on_, options_.quick, cases);
      for (const OpCase& c : cases) {
        if (c.forced != options_.scan_ways || !wanted(c.op)) continue;
        try {
          time(c);
        } catch (const std::invalid_argument&) {
          if (!c.forced) throw;  // else this algorithm does not take the shape
        }
      }
    }
    return !::testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed();
  }
  void print() const;
  nlohmann::ordered_json json() const;

 private:
  bool wanted(std::string_view name) const { return name.find(options_.only) != std::string_view::npos; }

  // ---- the machine's limits ----

  Bound copy() {
    return {"copy", 2.0 * static_cast<double>(copy_bytes_), [this] {
#if defined(MMREC_TEST_CUDA)
              apps::copy_by_runtime(on_, source_.data(), target_.data(), copy_bytes_);
#else
              on_.pool().parallel_for(static_cast<std::int64_t>(copy_bytes_), 16384,
                                      [&](std::int64_t begin, std::int64_t end, int) {
                                        std::memcpy(target_.data() + begin, source_.data() + begin,
                                                    static_cast<std::size_t>(end - begin));
                                      });
#endif
            }};
  }
  Bound read() {
    return {"read", static_cast<double>(copy_bytes_), [this] {
#if defined(MMREC_TEST_CUDA)
              apps::read_by_kernel(on_, source_.data(), copy_bytes_);
#else
              on_.pool().parallel_for(static_cast<std::int64_t>(copy_bytes_) / 256, 64,
                                      [&](std::int64_t begin, std::int64_t end, int thread) {
                                        // Integer sums side by side: the compiler makes vectors of them.
                                        const auto* p = reinterpret_cast<const std::uint64_t*>(source_.data());
                                        std::uint64_t sum[32] = {};
                                        for (std::int64_t i = 32 * begin; i < 32 * end; i += 32) {
                                          for (int line = 0; line < 32; line += 8) __builtin_prefetch(p + i + 1024 + line);
                                          for (int k = 0; k < 32; ++k) sum[k] += p[i + k];
                                        }
                                        for (int k = 1; k < 32; ++k) sum[0] += sum[k];
                                        sink_[thread % 16] = sum[0];
                                      });
#endif
            }};
  }
  /// The matrix library's product of [m, k] by [n, k]: of bf16 on a GPU, of fp32 on a CPU. Operands stay for the next.
  Bound product(std::int64_t m, std::int64_t n, std::int64_t k) {
    using T = std::conditional_t<kOnCuda, BFloat16, float>;
    const auto bytes = [](std::int64_t count) { return static_cast<std::size_t>(count) * sizeof(T); };
    if (operands_.size() < bytes((m + n) * k)) {
      const auto values = random_uniform<T>(static_cast<std::size_t>((m + n) * k), -1.0, 1.0);
      operands_ = Buffer<std::byte>(bytes((m + n) * k));
      on_.upload(reinterpret_cast<const std::byte*>(values.data()), operands_.data(), operands_.size());
    }
    if (result_.size() < bytes(m * n)) result_ = Buffer<std::byte>(bytes(m * n));
    const T* const x = reinterpret_cast<const T*>(operands_.data());
    T* const y = reinterpret_cast<T*>(result_.data());
#if defined(MMREC_TEST_CUDA)
    const Matmul job{.x = x,
                     .x_stride = k,
                     .w = x + m * k,
                     .y = y,
                     .y_stride = n,
                     .m = m,
                     .n = n,
                     .k = k,
                     .in = DType::kBF16,
                     .out = DType::kBF16};
    return {"product", product_flops(m, n, k), [this, job] { matmul(on_, job); }};
#else
    return {"sgemm", product_flops(m, n, k), [=, this] {
              on_.pool().parallel_for(n, 64, [&](std::int64_t begin, std::int64_t end, int) {
                const OneDnnCall call;
                (void)dnnl_sgemm('N', 'T', m, end - begin, k, 1.0F, x, k, x + (m + begin) * k, k, 0.0F, y + begin, n);
              });
            }};
#endif
  }
  Bound bound_of(const OpCase& c) {
    if (c.limit == Limit::kCopy) return copy();
    if (c.limit == Limit::kRead) return read();
    const auto [m, n, k] = c.product;
    const std::int64_t size = options_.quick ? 128 : kOnCuda ? 8192 : 2048;
    return m != 0 ? product(m, n, k) : product(size, size, size);
  }

  // ---- measuring ----

  double seconds(int calls, const std::function<void()>& body) {
#if defined(MMREC_TEST_CUDA)
    return timer_.seconds(calls, body);
#else
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) body();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / calls;
#endif
  }
  static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }

  void time(const OpCase& c) {
    std::vector<PreparedOp> sets;
    const double most = 4.0 * cache_bytes_ / c.work + 1.0;  // bytes that the last cache cannot hold
    const int count = c.sets != 0                  ? c.sets
                      : c.limit == Limit::kProduct ? 1
                                                   : static_cast<int>(std::clamp(most, 1.0, 64.0));
    for (int i = 0; i < count; ++i) sets.push_back(c.prepare());
    if (options_.check) {
      SCOPED_TRACE(c.op + " " + c.shape);
      sets[0].call();
      sets[0].check();
    }
    std::size_t turn = 0;
    std::string note = c.note + sets[0].note;
    if (c.op.starts_with("sample_tokens")) note = empty_kernel();
    measure(
        c.op, c.shape, sets[0].work != 0.0 ? sets[0].work : c.work, bound_of(c),
        [&] { sets[turn++ % sets.size()].call(); }, note, c.ops_in_call);
    Row& row = rows_.back();
    if (kOnCuda && c.product[0] != 0) row.note = fmt::format("{:.3f} x the product alone", row.bound_rate / row.rate);
  }

  void measure(const std::string& name, const std::string& shape, double work, const Bound& bound,
               const std::function<void()>& call, const std::string& note = {}, int ops = 1) {
    constexpr double kShortest = kOnCuda ? 5e-4 : 2e-3;  // shorter calls are repeated
    seconds(1, bound.body);
    seconds(2, call);
    const int calls = static_cast<int>(std::clamp(kShortest / seconds(3, call), 1.0, 256.0));
    std::vector<double> times, bound_times;
    for (int i = 0; i < options_.repetitions; ++i) {
      bound_times.push_back(seconds(1, bound.body));
      times.push_back(seconds(calls, call));
    }
    const double time = median(times) / ops;
    const bool is_product = bound.name != std::string_view("copy") && bound.name != std::string_view("read");
    const double scale = is_product && kOnCuda ? 1e-12 : 1e-9;
    rows_.push_back({name, shape, time, work / time * scale,
                     !is_product ? "GB/s"
                     : kOnCuda   ? "TFLOP/s"
                                 : "GFLOP/s",
                     bound.name, bound.work / median(bound_times) * scale, note});
    if (!options_.prints_json) std::fprintf(stderr, ".");
  }

  void machine() {
    const std::string size = fmt::format("{} MiB", copy_bytes_ >> 20);
    if (wanted("copy")) measure("copy", size, copy().work, copy(), copy().body);
    if (wanted("read")) measure("read", size, read().work, read(), read().body);
#if defined(MMREC_TEST_CUDA)
    if (wanted("copy")) {
      measure("copy by a plain kernel", size, copy().work, copy(),
              [this] { apps::copy_by_kernel(on_, source_.data(), target_.data(), copy_bytes_); });
    }
    if (options_.quick || !wanted("product")) return;
    for (const std::int64_t m : {1024, 4096, 8192}) {
      const Bound square = product(8192, 8192, 8192), bound = product(m, 8192, 8192);
      measure("product bf16", fmt::format("{} x 8192 x 8192", m), bound.work, square, bound.body);
    }
#endif
  }

  /// The time of an empty kernel among others in a graph, beside which short ops stand.
  std::string empty_kernel() {
#if defined(MMREC_TEST_CUDA)
    if (empty_.empty()) {
      constexpr int kRecorded = 32;
      const Graph graph(on_, [&] {
        for (int i = 0; i < kRecorded; ++i) apps::empty_kernel(on_);
      });
      std::vector<double> times;
      for (int i = 0; i < options_.repetitions + 2; ++i) {
        times.push_back(seconds(4, [&] { graph.launch(on_); }) / kRecorded);
      }
      empty_ = fmt::format("an empty kernel {:.2f} us", median(times) * 1e6);
    }
#endif
    return empty_;
  }

  const Options options_;
  const std::size_t copy_bytes_ = std::size_t{1} << (options_.quick ? 22 : kOnCuda ? 30 : 28);
#if defined(MMREC_TEST_CUDA)
  Cuda on_;
  apps::DeviceTimer timer_;
  const double cache_bytes_ = static_cast<double>(on_.l2_bytes());
#else
  Cpu on_;
  const double cache_bytes_ = 0.0;  // small shapes are timed as a caller meets them, in the cache
  volatile std::uint64_t sink_[16] = {};
#endif
  Buffer<std::byte> source_, target_;
  Buffer<std::byte> operands_, result_;  // of product()
  std::string empty_;
  std::vector<Row> rows_;

 public:
  std::string device() const {
#if defined(MMREC_TEST_CUDA)
    return on_.name();
#else
    return fmt::format("{}, {} threads", cpu_instruction_set(), on_.threads());
#endif
  }
};

void Bench::print() const {
  std::string text = fmt::format("\n{}\n{:<44} {:<32} {:>10} {:>9} {:<8} {}\n", device(), "kernel", "shape",
                                 kOnCuda ? "us" : "ms", "rate", "", "share");
  for (const Row& r : rows_) {
    text += fmt::format("{:<44} {:<32} {:>10.3f} {:>9.1f} {:<8} {:>5.1f} % of {} {:.1f}{}{}\n", r.name, r.shape,
                        r.seconds * (kOnCuda ? 1e6 : 1e3), r.rate, r.unit, 100.0 * r.rate / r.bound_rate, r.bound,
                        r.bound_rate, r.note.empty() ? "" : "; ", r.note);
  }
  apps::Output out;
  out.write(text);
  out.commit();
}

nlohmann::ordered_json Bench::json() const {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Row& r : rows_) {
    rows.push_back({{"name", r.name},
                    {"shape", r.shape},
                    {kOnCuda ? "us" : "ms", r.seconds * (kOnCuda ? 1e6 : 1e3)},
                    {"rate", r.rate},
                    {"unit", r.unit},
                    {"bound", r.bound},
                    {"bound_rate", r.bound_rate},
                    {"share", r.rate / r.bound_rate},
                    {"note", r.note}});
  }
#if defined(MMREC_TEST_CUDA)
  return {{"schema", "mmrec-cuda-bench/1"}, {"device", device()}, {"rows", rows}};
#else
  return {{"instruction_set", cpu_instruction_set()}, {"threads", on_.threads()}, {"rows", rows}};
#endif
}

/// A positive integer, whole.
bool parse(std::string_view text, int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() && value > 0;
}

int bench_main(int argc, char** argv) {
  Options options;
  std::map<std::string_view, bool*> flags = {{"--quick", &options.quick}, {"--check", &options.check}};
  std::map<std::string_view, std::string*> texts = {{"--only", &options.only}};
  std::map<std::string_view, int*> numbers = {{"--repetitions", &options.repetitions}};
  if (kOnCuda) {
    flags["--scan-ways"] = &options.scan_ways;
    texts["--json"] = &options.json;
  } else {
    flags["--json"] = &options.prints_json;
    numbers["--threads"] = &options.threads;
  }
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "-h" || argument == "--help") {
      apps::Output out;
      out.write(help());
      out.commit();
      return apps::kOk;
    }
    if (const auto flag = flags.find(argument); flag != flags.end()) {
      *flag->second = true;
    } else if (const auto text = texts.find(argument); text != texts.end() && i + 1 < argc) {
      *text->second = argv[++i];
    } else if (const auto number = numbers.find(argument);
               number != numbers.end() && i + 1 < argc && parse(argv[i + 1], *number->second)) {
      ++i;
    } else {
      throw apps::UsageError(fmt::format("cannot use '{}'", argument));
    }
  }
  std::optional<apps::Output> file;
  if (!options.json.empty()) file.emplace(std::filesystem::path(options.json));
#if defined(MMREC_TEST_CUDA)
  if (const std::string reason = cuda_unusable_reason(); !reason.empty()) {
    throw std::runtime_error("no usable CUDA device (" + reason + ")");
  }
#endif
  Bench bench(options);
  const bool correct = bench.run();
  if (!options.prints_json) bench.print();
  if (options.prints_json) file.emplace();
  if (file) {
    file->write(bench.json().dump(1) + "\n");
    file->commit();
  }
  if (!correct) throw std::runtime_error("a result differs from its reference");
  return apps::kOk;
}

}  // namespace
}  // namespace mmrec::kernels::test

int main(int argc, char** argv) {
  using namespace mmrec;
  return apps::run_program(kernels::test::kProgram, [&] { return kernels::test::bench_main(argc, argv); });
}
