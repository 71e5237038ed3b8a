// mmrec-cuda-bench: the speed of the CUDA kernels, each next to the bound that this device sets.
//
// Bounds are measured in the same run and in turn with the kernel, repetition by repetition, so that a change of clocks
// meets both: a copy (bytes read and written), a read, or a product of the matrix library. Operands are random; where
// they would fit into L2 a measurement goes through as many sets of them as do not. Times are medians by CUDA events.
// Longer than other files, because all cases are members of one class: they share operands, bounds and the table.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/bench/kernels.h"
#include "apps/common/cli.h"
#include "apps/common/output.h"
#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/logprobs/algo.h"
#include "kernels/cuda/recurrence/algo.h"
#include "kernels/cuda/runtime/cublaslt.h"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/scan/algo.h"

namespace mmrec::apps {
namespace {

using namespace mmrec::kernels;

struct Options {
  int repetitions = 11;
  bool quick = false;
  bool scan_ways = false;
  std::string only;
  std::string json;  // a file
};

constexpr const char* kHelp =
    "mmrec-cuda-bench [options]: times the CUDA kernels against copy, read and product speed\n"
    "  --only TEXT      only cases whose name contains TEXT\n"
    "  --repetitions N  timed repetitions of each case (default 11)\n"
    "  --quick          small shapes only, to see that everything runs\n"
    "  --scan-ways      every way of the scans where columns do not fill the device, and nothing else\n"
    "  --json FILE      the figures as JSON too\n"
    "  -h, --help       this text\n";

template <class T>
constexpr const char* kTypeName = std::is_same_v<T, float>     ? "fp32"
                                  : std::is_same_v<T, Float16> ? "fp16"
                                                               : "bf16";

constexpr std::pair<ScanAlgo, const char*> kScanAlgos[] = {{ScanAlgo::kLoad, "load"},
                                                           {ScanAlgo::kStaged, "staged"},
                                                           {ScanAlgo::kColumns, "columns"},
                                                           {ScanAlgo::kGroups, "groups"}};

/// What one second holds at best: bytes or floating-point operations of `work`.
struct Bound {
  const char* name;
  double work;
  std::function<void()> body;
};

struct Row {
  std::string name;
  std::string shape;
  double microseconds;
  double rate;  // GB/s or TFLOP/s
  const char* unit;
  const char* bound;
  double bound_rate;
  std::string note;
};

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options), timer_(cuda_), source_(copy_bytes_), target_(copy_bytes_) {
    const auto floats = static_cast<std::int64_t>(copy_bytes_ / sizeof(float));
    fill_random(cuda_, DType::kF32, source_.data(), floats, -1.0F, 1.0F, 1);
    fill_random(cuda_, DType::kF32, target_.data(), floats, -1.0F, 1.0F, 2);
  }

  void run() {
    if (options_.scan_ways) {
      scan_ways<float>();
      scan_ways<BFloat16>();
      return;
    }
    machine();
    scans();
    logprobs();
    hidden();
    matvecs();
    products();
    linear_ways();
    recurrence();
    rows_of_a_block();
    sampling();
  }
  void print() const;
  void write_json(Output& out) const;

 private:
  // --- Bounds --------------------------------------------------------------------------------------------------------

  Bound copy() {
    return {"copy", 2.0 * static_cast<double>(copy_bytes_),
            [this] { copy_by_runtime(cuda_, source_.data(), target_.data(), copy_bytes_); }};
  }
  Bound read() {
    return {"read", static_cast<double>(copy_bytes_), [this] { read_by_kernel(cuda_, source_.data(), copy_bytes_); }};
  }
  /// The matrix library's product of [m, k] by [n, k] in bf16. The operands stay; the first call makes them.
  Bound product(std::int64_t m, std::int64_t n, std::int64_t k) {
    if (operands_.size() == 0) {
      operands_ = random<BFloat16>(std::int64_t{1} << (options_.quick ? 24 : 29), -1.0F, 1.0F);
      result_ = DeviceBuffer<BFloat16>(std::size_t{1} << (options_.quick ? 23 : 30));
    }
    const Matmul job{.x = operands_.data(),
                     .x_stride = k,
                     .w = operands_.data() + m * k,
                     .y = result_.data(),
                     .y_stride = n,
                     .m = m,
                     .n = n,
                     .k = k,
                     .in = DType::kBF16,
                     .out = DType::kBF16};
    return {"product", 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
            [this, job] { matmul(cuda_, job); }};
  }
  Bound product() {
    const std::int64_t size = options_.quick ? 128 : 8192;
    return product(size, size, size);
  }

  // --- Measuring -----------------------------------------------------------------------------------------------------

  bool wanted(std::string_view name) const { return name.find(options_.only) != std::string_view::npos; }

  template <class T>
  DeviceBuffer<T> random(std::int64_t count, float low, float high) {
    DeviceBuffer<T> buffer(static_cast<std::size_t>(count));
    fill_random(cuda_, kDTypeOf<T>, buffer.data(), count, low, high, ++seed_);
    return buffer;
  }
  DeviceBuffer<int> targets(std::int64_t rows, std::int64_t vocab) {
    std::vector<int> host(static_cast<std::size_t>(rows));
    for (std::size_t i = 0; i < host.size(); ++i)
      host[i] = static_cast<int>(i * 7919 % static_cast<std::size_t>(vocab));
    DeviceBuffer<int> buffer(host.size());
    cuda_.upload(host.data(), buffer.data(), host.size());
    cuda_.synchronize();
    return buffer;
  }

  /// How many sets of operands of `bytes` L2 cannot keep.
  std::int64_t sets(std::int64_t bytes) const {
    return std::clamp<std::int64_t>(
        4 * static_cast<std::int64_t>(cuda_.l2_bytes()) / std::max<std::int64_t>(bytes, 1) + 1, 1, 64);
  }

  /// `work` bytes or floating-point operations of one call; body(i) works on the i-th set of operands, i counted
  /// without end. `each`: the body makes so many calls.
  void measure(const std::string& name, const std::string& shape, double work, const Bound& bound,
               const std::function<void(std::int64_t)>& body, const std::string& note = {}, double each = 1.0) {
    std::int64_t set = 0;
    const auto call = [&] { body(set++); };
    timer_.seconds(1, bound.body);
    timer_.seconds(2, call);
    // Calls too short to time are repeated.
    const double once = timer_.seconds(3, call);
    const int calls = static_cast<int>(std::clamp(5e-4 / once, 1.0, 256.0));
    std::vector<double> times, bound_times;
    for (int i = 0; i < options_.repetitions; ++i) {
      bound_times.push_back(timer_.seconds(1, bound.body));
      times.push_back(timer_.seconds(calls, call));
    }
    const double seconds = median_of(times) / each;
    const bool is_product = std::string_view(bound.name) == "product";
    const double scale = is_product ? 1e-12 : 1e-9;
    rows_.push_back({name, shape, seconds * 1e6, work / seconds * scale, is_product ? "TFLOP/s" : "GB/s", bound.name,
                     bound.work / median_of(bound_times) * scale, note});
    std::fprintf(stderr, ".");
  }

  // --- Cases ---------------------------------------------------------------------------------------------------------

  void machine() {
    const std::string size = fmt::format("{} MiB", copy_bytes_ >> 20);
    if (wanted("copy")) {
      measure("copy", size, copy().work, copy(), [this](std::int64_t) { copy().body(); });
      measure("copy by a plain kernel", size, copy().work, copy(),
              [this](std::int64_t) { copy_by_kernel(cuda_, source_.data(), target_.data(), copy_bytes_); });
    }
    if (wanted("read")) measure("read", size, read().work, read(), [this](std::int64_t) { read().body(); });
    if (wanted("product")) {
      for (const std::int64_t m :
           options_.quick ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{1024, 4096, 8192}) {
        const Bound bound = product(m, 8192, 8192);
        measure("product bf16", fmt::format("{} x 8192 x 8192", m), bound.work, product(),
                [&](std::int64_t) { bound.body(); });
      }
    }
  }

  template <class T>
  void scan(std::int64_t batch, std::int64_t time, std::int64_t dim, bool all) {
    const std::string decay = fmt::format("decay_scan {}", kTypeName<T>);
    const std::string product = fmt::format("exp_product_scan {}", kTypeName<T>);
    const std::string lse = fmt::format("logsumexp_scan {}", kTypeName<T>);
    if (!wanted(decay) && !wanted(product) && !wanted(lse)) return;
    const std::string shape = fmt::format("({}, {}, {})", batch, time, dim);
    const std::int64_t count = batch * time * dim;
    const auto bytes = static_cast<double>(count) * static_cast<double>(sizeof(T));
    const std::int64_t n = sets(3 * count * static_cast<std::int64_t>(sizeof(T)));
    const DeviceBuffer<T> first = random<T>(n * count, -0.1F, 0.0F);
    const DeviceBuffer<T> second = random<T>(n * count, -1.0F, 1.0F);
    DeviceBuffer<T> out(static_cast<std::size_t>(n * count));
    const auto in = [&](const DeviceBuffer<T>& buffer, std::int64_t i) {
      return SequenceView<const T, Device>(buffer.data() + i % n * count, batch, time, dim);
    };
    const auto to = [&](std::int64_t i) {
      return SequenceView<T, Device>(out.data() + i % n * count, batch, time, dim);
    };
    if (wanted(decay)) {
      measure(decay, shape, 3.0 * bytes, copy(),
              [&](std::int64_t i) { decay_scan<T>(cuda_, {.log_a = in(first, i), .b = in(second, i), .h = to(i)}); });
    }
    if (all && wanted(product)) {
      const DeviceBuffer<T> gamma = random<T>(n * count, 0.9F, 1.0F);
      measure(product, shape, 2.0 * bytes, copy(),
              [&](std::int64_t i) { exp_product_scan<T>(cuda_, {.gamma = in(gamma, i), .y = to(i)}); });
    }
    if (all && wanted(lse)) {
      measure(lse, shape, 2.0 * bytes, copy(),
              [&](std::int64_t i) { logsumexp_scan<T>(cuda_, {.x = in(second, i), .y = to(i)}); });
    }
  }

  void scans() {
    if (!options_.quick) {
      scan<float>(1, 32768, 4096, true);
      scan<float>(1, 131072, 1024, false);
      scan<float>(8, 4096, 2048, false);
      scan<BFloat16>(1, 32768, 4096, true);
      scan<BFloat16>(1, 131072, 1024, false);
      scan<BFloat16>(8, 4096, 2048, false);
      scan<float>(1, 1048576, 16, true);
    }
    scan<float>(1, 4096, 1024, true);
    scan<float>(1, 65536, 16, true);
  }

  template <class T>
  void scan_ways() {
    struct Shape {
      std::int64_t batch, time, dim;
    };
    constexpr Shape kShapes[] = {{1, 4096, 1024}, {1, 2048, 2048},  {2, 4096, 1024},   {1, 16384, 512}, {1, 32768, 768},
                                 {1, 65536, 384}, {1, 65536, 128},  {1, 1048576, 64},  {64, 64, 512},   {7, 3000, 700},
                                 {8, 1024, 768},  {1, 32768, 4096}, {1, 131072, 1024}, {8, 4096, 2048}};
    for (const auto& [batch, time, dim] : kShapes) {
      if (options_.quick && batch * time * dim > 1 << 20) continue;
      const std::int64_t count = batch * time * dim;
      const auto bytes = static_cast<double>(count) * static_cast<double>(sizeof(T));
      const std::int64_t n = sets(3 * count * static_cast<std::int64_t>(sizeof(T)));
      const DeviceBuffer<T> log_a = random<T>(n * count, -0.1F, 0.0F);
      const DeviceBuffer<T> b = random<T>(n * count, -1.0F, 1.0F);
      DeviceBuffer<T> h(static_cast<std::size_t>(n * count));
      const DeviceBuffer<T> gamma = random<T>(n * count, 0.9F, 1.0F);
      const std::string shape = fmt::format("({}, {}, {})", batch, time, dim);
      const auto in = [&](const DeviceBuffer<T>& buffer, std::int64_t i) {
        return SequenceView<const T, Device>(buffer.data() + i % n * count, batch, time, dim);
      };
      const auto to = [&](std::int64_t i) {
        return SequenceView<T, Device>(h.data() + i % n * count, batch, time, dim);
      };
      algos_of(fmt::format("decay_scan {}", kTypeName<T>), shape, 3.0 * bytes, [&](std::int64_t i, auto... algo) {
        return decay_scan(cuda_, DecayScan<T, Device>{.log_a = in(log_a, i), .b = in(b, i), .h = to(i)}, algo...);
      });
      algos_of(fmt::format("exp_product_scan {}", kTypeName<T>), shape, 2.0 * bytes, [&](std::int64_t i, auto... algo) {
        return exp_product_scan(cuda_, ExpProductScan<T, Device>{.gamma = in(gamma, i), .y = to(i)}, algo...);
      });
      algos_of(fmt::format("logsumexp_scan {}", kTypeName<T>), shape, 2.0 * bytes, [&](std::int64_t i, auto... algo) {
        return logsumexp_scan(cuda_, LogSumExpScan<T, Device>{.x = in(b, i), .y = to(i)}, algo...);
      });
    }
  }

  /// Every algorithm that takes the operands of run(i, algo).
  template <class Run>
  void algos_of(const std::string& scan, const std::string& shape, double bytes, const Run& run) {
    const ScanAlgo chosen = run(0);
    for (const auto& [algo, name] : kScanAlgos) {
      try {
        run(0, algo);
      } catch (const std::invalid_argument&) {
        continue;  // not for this shape
      }
      measure(
          fmt::format("{} by {}", scan, name), shape, bytes, copy(), [&](std::int64_t i) { run(i, algo); },
          algo == chosen ? "chosen" : "");
    }
  }

  template <class T>
  void logprob(std::int64_t n, std::int64_t vocab) {
    const std::string forward = fmt::format("token_logprobs {}", kTypeName<T>);
    const std::string checked = fmt::format("token_logprobs checked {}", kTypeName<T>);
    const std::string backward = fmt::format("token_logprobs_backward {}", kTypeName<T>);
    if (!wanted(forward) && !wanted(checked) && !wanted(backward)) return;
    const std::string shape = fmt::format("({}, {})", n, vocab);
    const std::int64_t count = n * vocab;
    const auto bytes = static_cast<double>(count) * static_cast<double>(sizeof(T));
    const std::int64_t sets_of_logits = sets(count * static_cast<std::int64_t>(sizeof(T)));
    const DeviceBuffer<T> logits = random<T>(sets_of_logits * count, -10.0F, 10.0F);
    const DeviceBuffer<int> to = targets(n, vocab);
    DeviceBuffer<float> out(static_cast<std::size_t>(n));
    const auto op = [&](std::int64_t i) {
      return TokenLogprobs<T, int, Device>{.logits = {logits.data() + i % sets_of_logits * count, n, vocab},
                                           .targets = to.data(),
                                           .logprobs = out.data()};
    };
    if (wanted(forward)) {
      measure(forward, shape, bytes, read(), [&](std::int64_t i) { token_logprobs_unchecked(cuda_, op(i)); });
    }
    if (wanted(checked)) {
      measure(
          checked, shape, bytes, read(), [&](std::int64_t i) { token_logprobs(cuda_, op(i)); }, "waits for the host");
    }
    if (wanted(backward)) {
      const DeviceBuffer<float> grad = random<float>(n, -1.0F, 1.0F);
      DeviceBuffer<T> d(static_cast<std::size_t>(sets_of_logits * count));
      measure(
          backward, shape, 2.0 * bytes, copy(),
          [&](std::int64_t i) {
            token_logprobs_backward<T, int>(cuda_, {.logits = op(i).logits,
                                                    .targets = to.data(),
                                                    .grad = grad.data(),
                                                    .d_logits = {d.data() + i % sets_of_logits * count, n, vocab}});
          },
          "waits for the host");
    }
  }

  void logprobs() {
    if (!options_.quick) {
      logprob<BFloat16>(4096, 32000);
      logprob<BFloat16>(4096, 128256);
      logprob<BFloat16>(16384, 50304);
      logprob<float>(4096, 32000);
    }
    logprob<BFloat16>(64, 32000);
    logprob<float>(1, 128256);
  }

  /// Hidden states to log-probs beside the matrix library's product alone, which writes bf16 logits.
  void from_hidden(std::int64_t n, std::int64_t vocab, std::int64_t dim) {
    const std::string shape = fmt::format("({}, {}, D {})", n, vocab, dim);
    const char* const names[] = {"hidden_logprobs bf16", "hidden_logprobs by tiles bf16", "gemm_sm90 bf16"};
    if (std::none_of(std::begin(names), std::end(names), [&](const char* name) { return wanted(name); })) return;
    const DeviceBuffer<BFloat16> hidden = random<BFloat16>(n * dim, -1.0F, 1.0F);
    const DeviceBuffer<BFloat16> head = random<BFloat16>(vocab * dim, -0.05F, 0.05F);
    const DeviceBuffer<int> to = targets(n, vocab);
    DeviceBuffer<float> out(static_cast<std::size_t>(n));
    const HiddenLogprobs<Device, BFloat16> op{.hidden = {hidden.data(), n, dim},
                                              .head = {head.data(), DType::kBF16, vocab, dim},
                                              .targets = to.data(),
                                              .logprobs = out.data()};
    const Bound bound = product(n, vocab, dim);
    const auto time = [&](const char* name, const std::function<void(std::int64_t)>& body) {
      if (!wanted(name)) return;
      measure(name, shape, bound.work, bound, body);
      Row& row = rows_.back();
      row.note = fmt::format("{:.3f} x the product alone", row.bound_rate / row.rate);
    };
    time(names[0], [&](std::int64_t) { hidden_logprobs(cuda_, op); });
    time(names[1], [&](std::int64_t) { hidden_logprobs(cuda_, op, HiddenLogprobsAlgo::kByTiles); });
    if (gemm_sm90_supported(cuda_, op.hidden, op.head)) {
      time(names[2], [&](std::int64_t) {
        linear(cuda_, Linear<Device, BFloat16>{.x = op.hidden, .weight = op.head, .y = {result_.data(), n, vocab}},
               LinearAlgo::kManyRows);
      });
    }
  }

  void hidden() {
    if (!options_.quick) {
      from_hidden(4096, 32000, 2048);
      from_hidden(4096, 128256, 2048);
      from_hidden(16384, 50304, 2048);
    }
    from_hidden(512, 8000, 1024);
  }

  /// The matrices that a decoded token of a whole model goes through, one dependent product after another in a graph.
  template <class A>
  void matvec_chain(std::int64_t dim, std::int64_t layers, std::int64_t vocab, std::int64_t rows) {
    const std::string name = fmt::format("matvec chain {}", kTypeName<A>);
    if (!wanted(name)) return;
    struct Step {
      std::int64_t out, in;
    };
    std::vector<Step> steps;
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      for (const Step step :
           {Step{4 * dim, dim}, {2 * dim, dim}, {dim, dim}, {dim, dim}, {4 * dim, dim}, {dim, 4 * dim}}) {
        steps.push_back(step);
      }
    }
    steps.push_back({vocab, dim});
    std::int64_t elements = 0;
    for (const Step& step : steps) elements += step.out * step.in;
    const float range = 1.0F / std::sqrt(static_cast<float>(dim));
    const DeviceBuffer<A> weights = random<A>(elements, -range, range);
    DeviceBuffer<A> x[2] = {random<A>(rows * std::max(vocab, 4 * dim), -1.0F, 1.0F),
                            random<A>(rows * std::max(vocab, 4 * dim), -1.0F, 1.0F)};
    const auto ops = [&] {
      const A* w = weights.data();
      for (std::size_t i = 0; i < steps.size(); ++i) {
        const Linear<Device, A> job{.x = {x[i % 2].data(), rows, steps[i].in},
                                    .weight = {w, kDTypeOf<A>, steps[i].out, steps[i].in},
                                    .y = {x[1 - i % 2].data(), rows, steps[i].out}};
        linear(cuda_, std::span<const Linear<Device, A>>(&job, 1));
        w += steps[i].out * steps[i].in;
      }
    };
    ops();  // loads the kernels, which a recording cannot
    cuda_.synchronize();
    const Graph graph(cuda_, ops);
    measure(name, fmt::format("D {} x {} + {}, {} rows", dim, layers, vocab, rows),
            static_cast<double>(elements) * static_cast<double>(sizeof(A)), copy(),
            [&](std::int64_t) { graph.launch(cuda_); });
  }

  void matvecs() {
    if (!options_.quick) {
      for (const std::int64_t rows : {1, 2, 4, 8}) matvec_chain<BFloat16>(2048, 16, 32000, rows);
      matvec_chain<BFloat16>(1024, 12, 32000, 1);
      matvec_chain<float>(1024, 12, 32000, 1);
      matvec_chain<BFloat16>(2048, 16, 32000, 64);
    }
    matvec_chain<BFloat16>(256, 2, 4000, 1);
  }

  /// The products of a prefilled chunk, by the matrix library and, where there is one, by a kernel of our own.
  void products() {
    if (!wanted("linear bf16") && !wanted("gemm_sm90 layer bf16")) return;
    struct Shape {
      std::int64_t rows, out, in;
    };
    std::vector<Shape> shapes = {{256, 512, 512}};
    if (!options_.quick) {
      for (const std::int64_t dim : {1024, 4096}) {
        for (const Shape s : {Shape{4096, 4 * dim, dim},
                              {4096, dim, dim},
                              {4096, dim / 4, dim},
                              {4096, dim, 4 * dim},
                              {1024, 2 * dim, dim}}) {
          shapes.push_back(s);
        }
      }
    }
    for (const Shape& s : shapes) {
      const std::string shape = fmt::format("{} x {} x {}", s.rows, s.out, s.in);
      const double flops = 2.0 * static_cast<double>(s.rows) * static_cast<double>(s.out) * static_cast<double>(s.in);
      const DeviceBuffer<BFloat16> x = random<BFloat16>(s.rows * s.in, -1.0F, 1.0F);
      const DeviceBuffer<BFloat16> w = random<BFloat16>(s.out * s.in, -0.05F, 0.05F);
      const DeviceBuffer<float> bias = random<float>(s.out, -1.0F, 1.0F);
      DeviceBuffer<BFloat16> y(static_cast<std::size_t>(s.rows * s.out));
      const Linear<Device, BFloat16> job{.x = {x.data(), s.rows, s.in},
                                         .weight = {w.data(), DType::kBF16, s.out, s.in},
                                         .bias = bias.data(),
                                         .y = {y.data(), s.rows, s.out},
                                         .activation = Activation::kGelu};
      if (wanted("linear bf16")) {
        measure("linear bf16 + bias, gelu", shape, flops, product(),
                [&](std::int64_t) { linear(cuda_, std::span<const Linear<Device, BFloat16>>(&job, 1)); });
      }
      if (wanted("gemm_sm90 layer bf16") && gemm_sm90_supported(cuda_, job.x, job.weight)) {
        measure("gemm_sm90 layer bf16", shape, flops, product(), [&](std::int64_t) {
          linear(cuda_, Linear<Device, BFloat16>{.x = job.x, .weight = job.weight, .y = job.y}, LinearAlgo::kManyRows);
        });
      }
    }
  }

  /// A matrix that L2 does not hold, times few and more rows by every way that takes them; the one that linear takes is
  /// marked.
  void linear_ways() {
    constexpr const char* kName = "linear ways bf16";
    if (!wanted(kName)) return;
    const std::int64_t out = options_.quick ? 512 : 16384;
    const std::int64_t in = options_.quick ? 512 : 4096;
    const DeviceBuffer<BFloat16> w = random<BFloat16>(out * in, -0.05F, 0.05F);
    for (const std::int64_t rows : {8, 64, 128, 256}) {
      const DeviceBuffer<BFloat16> x = random<BFloat16>(rows * in, -1.0F, 1.0F);
      DeviceBuffer<BFloat16> y(static_cast<std::size_t>(rows * out));
      const Linear<Device, BFloat16> job{
          .x = {x.data(), rows, in}, .weight = {w.data(), DType::kBF16, out, in}, .y = {y.data(), rows, out}};
      const bool sm90 = gemm_sm90_supported(cuda_, job.x, job.weight);
      const auto time = [&](LinearAlgo way, const char* name, bool takes) {
        if (!takes) return;
        const std::string shape = fmt::format("{} x {} x {} by {}", rows, out, in, name);
        measure(
            kName, shape, static_cast<double>(w.size_bytes()), read(), [&](std::int64_t) { linear(cuda_, job, way); },
            choose_linear(cuda_, job) == way ? "own" : "");
      };
      time(LinearAlgo::kMatvec, "matvec", rows <= kTileColumns);
      time(LinearAlgo::kFewRows, "few_rows", sm90 && rows <= kFewRows);
      time(LinearAlgo::kManyRows, "many_rows", sm90);
      time(LinearAlgo::kLibrary, "library", true);
    }
  }

  /// The operands of a window of the recurrence, alive gates.
  template <class A>
  struct Window {
    std::int64_t time, dim;
    DeviceBuffer<A> z, zm;
    DeviceBuffer<float> gamma, h, bias;
    DeviceBuffer<A> h_rounded, weight;

    GateInputs<Device, A> in() {
      GateInputs<Device, A> inputs{.z = {z.data(), 1, time, dim},
                                   .zm = {zm.data(), 1, time, dim},
                                   .gamma = {gamma.data(), 1, time, dim},
                                   .h = {h.data(), 1, time + 1, dim},
                                   .h_rounded = {h_rounded.data(), 1, time + 1, dim}};
      if constexpr (std::is_same_v<A, float>) inputs.h_rounded = inputs.h;
      return inputs;
    }
    WeightView<Device> gates() const { return {weight.data(), kDTypeOf<A>, 2 * dim, dim}; }
  };
  template <class A>
  Window<A> window(std::int64_t time, std::int64_t dim) {
    const float range = 1.0F / std::sqrt(static_cast<float>(dim));
    return {time,
            dim,
            random<A>(time * dim, -1.0F, 1.0F),
            random<A>(time * dim, -1.0F, 1.0F),
            random<float>(time * dim, 0.1F, 0.9F),
            random<float>((time + 1) * dim, -1.0F, 1.0F),
            random<float>(dim, -range, range),
            random<A>((time + 1) * dim, -1.0F, 1.0F),
            random<A>(2 * dim * dim, -range, range)};
  }

  template <class A>
  void recurrence_of(std::int64_t time, std::int64_t dim, std::int64_t window_tokens) {
    const std::string type = kTypeName<A>;
    const std::string shape = fmt::format("T {}, D {}", time, dim);
    const auto elements = static_cast<double>(time * dim);
    const double gate_flops = 4.0 * static_cast<double>(dim) * static_cast<double>(dim);  // of a token
    if (!wanted("gated_recurrence " + type) && !wanted("gated_scan " + type) && !wanted("gated_sweep_sm90 " + type) &&
        !wanted("gated_sweeps " + type)) {
      return;
    }
    Window<A> w = window<A>(time, dim);
    DeviceBuffer<float> change(static_cast<std::size_t>(2 * time));
    if (wanted("gated_recurrence " + type)) {
      measure("gated_recurrence " + type, shape, gate_flops * static_cast<double>(time), product(), [&](std::int64_t) {
        gated_recurrence<A>(cuda_, {.in = w.in(), .gate_weight = w.gates(), .gate_bias = w.bias.data()});
      });
      Row& row = rows_.back();
      row.note = fmt::format("{:.3f} us a token", row.microseconds / static_cast<double>(time));
    }
    DeviceBuffer<float> gate = random<float>(2 * time * dim, -1.0F, 1.0F);
    if (wanted("gated_scan " + type)) {
      // z, zm, gamma, both gates and the old h in; h and its rounding out.
      const double bytes =
          elements * static_cast<double>(2 * sizeof(A) + 4 + 8 + 4 + 4 + (sizeof(A) == 4 ? 0 : sizeof(A)));
      measure("gated_scan " + type, shape, bytes, copy(), [&](std::int64_t) {
        gated_scan_raising<A>(cuda_,
                              {.in = w.in(),
                               .gate = {gate.data(), 1, time, 2 * dim},
                               .change = change.data(),
                               .magnitude = change.data() + time},
                              nullptr);
      });
    }
    if constexpr (!std::is_same_v<A, float>) {
      DeviceBuffer<A> next(static_cast<std::size_t>((time + 1) * dim));
      const GatedSweep<Device, A> sweep{.in = w.in(),
                                        .h_rounded_next = {next.data(), 1, time + 1, dim},
                                        .gate_weight = w.gates(),
                                        .gate_bias = w.bias.data(),
                                        .change = change.data(),
                                        .magnitude = change.data() + time};
      const SweepAlgo chosen = choose_sweep(cuda_, sweep);
      if (wanted("gated_sweep_sm90 " + type) && chosen != SweepAlgo::kProductAndScan) {
        for (const SweepAlgo way : {SweepAlgo::kNarrowTiles, SweepAlgo::kWideTiles}) {
          measure(
              "gated_sweep_sm90 " + type, shape, gate_flops * static_cast<double>(time), product(),
              [&](std::int64_t) { gated_sweep_sm90(cuda_, sweep, way); },
              fmt::format("{} tiles{}", way == SweepAlgo::kNarrowTiles ? "narrow" : "wide",
                          way == chosen ? ", chosen" : ""));
        }
      }
    }
    if (wanted("gated_sweeps " + type)) {
      const GatedSweeps<Device, A> op{.in = w.in(),
                                      .gate_weight = w.gates(),
                                      .gate_bias = w.bias.data(),
                                      .tolerance = std::is_same_v<A, float> ? 1e-5F : 1e-3F,
                                      .gate = {gate.data(), window_tokens, 2 * dim},
                                      .change = change.data()};
      const SweepCounts counts = gated_sweeps(cuda_, op);
      measure(
          fmt::format("gated_sweeps {}", type), fmt::format("{}, windows of {}", shape, window_tokens),
          gate_flops * static_cast<double>(counts.token_sweeps), product(),
          [&](std::int64_t) { gated_sweeps(cuda_, op); },
          fmt::format("{:.2f} sweeps a token, {} fallbacks of {}",
                      static_cast<double>(counts.token_sweeps) / static_cast<double>(time), counts.fallbacks,
                      counts.windows));
    }
  }

  void recurrence() {
    if (!options_.quick) {
      for (const std::int64_t dim : {1024, 2048, 4096}) recurrence_of<BFloat16>(4096, dim, 1024);
      for (const std::int64_t window_tokens : {256, 512, 2048, 4096}) {
        if (wanted("gated_sweeps bf16")) recurrence_of<BFloat16>(4096, 1024, window_tokens);
      }
      recurrence_of<float>(4096, 1024, 1024);
    }
    recurrence_of<BFloat16>(256, 256, 128);
  }

  /// What a prefilled chunk does beside products and recurrence, bf16.
  void rows_of_a_block() {
    const std::int64_t n = options_.quick ? 64 : 4096;
    for (const std::int64_t dim :
         options_.quick ? std::vector<std::int64_t>{256} : std::vector<std::int64_t>{1024, 4096}) {
      const std::string shape = fmt::format("{} x {}", n, dim);
      const auto elements = static_cast<double>(n * dim);
      const std::int64_t copies = sets(14 * n * dim);
      const auto offset = [&, copies](std::int64_t i) { return i % copies * n * dim; };
      const DeviceBuffer<float> x = random<float>(copies * n * dim, -1.0F, 1.0F);
      const DeviceBuffer<float> weight = random<float>(dim, 0.5F, 1.5F);
      DeviceBuffer<BFloat16> half = random<BFloat16>(copies * n * dim, -1.0F, 1.0F);
      DeviceBuffer<float> out(static_cast<std::size_t>(copies * n * dim));
      if (wanted("rmsnorm bf16")) {
        measure("rmsnorm bf16", shape, 6.0 * elements, copy(), [&](std::int64_t i) {
          rmsnorm<BFloat16>(cuda_, {x.data() + offset(i), n, dim}, weight.data(), {half.data() + offset(i), n, dim});
        });
      }
      if (wanted("block_residual bf16")) {
        measure("block_residual bf16", shape, 14.0 * elements, copy(), [&](std::int64_t i) {
          block_residual<BFloat16>(cuda_, {.x = {x.data() + offset(i), 1, n, dim},
                                           .h = {x.data() + offset(i + 1), 1, n, dim},
                                           .v = {half.data() + offset(i), 1, n, dim},
                                           .bias = weight.data(),
                                           .y = {out.data() + offset(i), 1, n, dim}});
        });
      }
      if (wanted("decay_gate")) {
        measure("decay_gate", shape, 12.0 * elements, copy(), [&](std::int64_t i) {
          decay_gate(cuda_, {.a = {x.data() + offset(i), n, dim},
                             .c = {x.data() + offset(i + 1), n, dim},
                             .gamma = {out.data() + offset(i), n, dim}});
        });
      }
      if (wanted("segment_sum")) {
        DeviceBuffer<double> sum(static_cast<std::size_t>(dim));
        cuda_.zero(sum.data(), sum.size_bytes());
        measure("segment_sum", shape, 4.0 * elements, read(), [&](std::int64_t i) {
          segment_sum(cuda_, {.x = {x.data() + offset(i), 1, n, dim}, .sum = {sum.data(), 1, dim}});
        });
      }
    }
  }

  /// Draws one after another in a recorded graph, where a launch takes no time of the host's; an empty kernel the same
  /// way beside them. Logits are normal with a deviation of 3.
  void sampling() {
    constexpr std::int64_t kRecorded = 32;
    constexpr int kRecent = 64;
    struct Chain {
      const char* name;
      SamplerOptions options;
    };
    const Chain chains[] = {
        {"top-k 40, top-p 0.92, penalty", {.top_p = 0.92F, .min_p = 0.0F, .repetition_penalty = 1.05F}},
        {"top-p 0.95", {.top_k = 0, .min_p = 0.0F}},
        {"greedy", {.temperature = 0.0F}}};
    const auto any = [&] {
      return std::any_of(std::begin(chains), std::end(chains),
                         [&](const Chain& chain) { return wanted(fmt::format("sample_tokens {}", chain.name)); });
    };
    if (!any()) return;
    std::vector<double> empty_times;
    {
      const Graph graph(cuda_, [&] {
        for (std::int64_t i = 0; i < kRecorded; ++i) empty_kernel(cuda_);
      });
      for (int i = 0; i < options_.repetitions + 2; ++i) {
        empty_times.push_back(timer_.seconds(4, [&] { graph.launch(cuda_); }) / static_cast<double>(kRecorded));
      }
    }
    const std::string empty = fmt::format("an empty kernel {:.2f} us", median_of(empty_times) * 1e6);
    for (const std::int64_t vocab :
         options_.quick ? std::vector<std::int64_t>{1000} : std::vector<std::int64_t>{8192, 32000, 128256}) {
      for (const std::int64_t batch : {1, 64}) {
        DeviceBuffer<float> logits(static_cast<std::size_t>(batch * vocab));
        {
          std::mt19937_64 rng(++seed_);
          std::normal_distribution<float> normal(0.0F, 3.0F);
          std::vector<float> host(logits.size());
          for (float& x : host) x = normal(rng);
          cuda_.upload(host.data(), logits.data(), host.size());
        }
        DeviceBuffer<int> recent(static_cast<std::size_t>(batch * kRecent));
        DeviceBuffer<int> tokens(static_cast<std::size_t>(batch));
        DeviceBuffer<SampleRule> rules(static_cast<std::size_t>(batch));
        for (const Chain& chain : chains) {
          const std::string name = fmt::format("sample_tokens {}", chain.name);
          if (!wanted(name)) continue;
          std::vector<int> ids(recent.size());
          for (std::size_t i = 0; i < ids.size(); ++i) {
            ids[i] = static_cast<int>(i * 7919 % static_cast<std::size_t>(vocab));
          }
          cuda_.upload(ids.data(), recent.data(), ids.size());
          std::vector<SampleRule> host;
          for (std::int64_t b = 0; b < batch; ++b) {
            host.push_back({.options = chain.options,
                            .sequence = static_cast<std::uint64_t>(b),
                            .recent = recent.data() + b * kRecent,
                            .recent_count = kRecent});
          }
          cuda_.upload(host.data(), rules.data(), host.size());
          const SampleTokens<Device> op{
              .logits = {logits.data(), batch, vocab}, .rules = rules.data(), .tokens = tokens.data()};
          sample_tokens(cuda_, op);  // a first launch may load code
          const Graph graph(cuda_, [&] {
            for (std::int64_t i = 0; i < kRecorded; ++i) sample_tokens(cuda_, op);
          });
          measure(
              name, fmt::format("({}, {})", batch, vocab), static_cast<double>(4 * batch * vocab), read(),
              [&](std::int64_t) { graph.launch(cuda_); }, empty, static_cast<double>(kRecorded));
        }
      }
    }
  }

  const Options options_;
  const std::size_t copy_bytes_ = std::size_t{1} << (options_.quick ? 22 : 30);
  Cuda cuda_;
  DeviceTimer timer_;
  DeviceBuffer<std::byte> source_, target_;
  DeviceBuffer<BFloat16> operands_, result_;  // of product()
  std::uint32_t seed_ = 10;
  std::vector<Row> rows_;
};

void Bench::print() const {
  std::string text = fmt::format("\n{}\n{:<44} {:<32} {:>10} {:>9} {:<8} {}\n", cuda_.name(), "kernel", "shape", "us",
                                 "rate", "", "share");
  for (const Row& r : rows_) {
    text += fmt::format("{:<44} {:<32} {:>10.2f} {:>9.1f} {:<8} {:>5.1f} % of {} {:.1f}{}{}\n", r.name, r.shape,
                        r.microseconds, r.rate, r.unit, 100.0 * r.rate / r.bound_rate, r.bound, r.bound_rate,
                        r.note.empty() ? "" : "; ", r.note);
  }
  Output out;
  out.write(text);
  out.commit();
}

void Bench::write_json(Output& out) const {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Row& r : rows_) {
    rows.push_back({{"name", r.name},
                    {"shape", r.shape},
                    {"us", r.microseconds},
                    {"rate", r.rate},
                    {"unit", r.unit},
                    {"bound", r.bound},
                    {"bound_rate", r.bound_rate},
                    {"share", r.rate / r.bound_rate},
                    {"note", r.note}});
  }
  const nlohmann::ordered_json json = {{"schema", "mmrec-cuda-bench/1"}, {"device", cuda_.name()}, {"rows", rows}};
  out.write(json.dump(1) + "\n");
  out.commit();
}

/// A positive integer, whole.
bool parse(std::string_view text, int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() && value > 0;
}

int bench_main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const std::string_view value = i + 1 < argc ? argv[i + 1] : "";
    if (argument == "-h" || argument == "--help") {
      Output out;
      out.write(kHelp);
      out.commit();
      return kOk;
    }
    if (argument == "--quick") {
      options.quick = true;
    } else if (argument == "--scan-ways") {
      options.scan_ways = true;
    } else if (argument == "--only" && i + 1 < argc) {
      options.only = argv[++i];
    } else if (argument == "--json" && i + 1 < argc) {
      options.json = argv[++i];
    } else if (argument == "--repetitions" && parse(value, options.repetitions)) {
      ++i;
    } else {
      throw UsageError(fmt::format("cannot use '{}'", argument));
    }
  }
  std::optional<Output> json;
  if (!options.json.empty()) json.emplace(std::filesystem::path(options.json));
  if (const std::string reason = cuda_unusable_reason(); !reason.empty()) {
    throw std::runtime_error("no usable CUDA device (" + reason + ")");
  }
  Bench bench(options);
  bench.run();
  bench.print();
  if (json) bench.write_json(*json);
  return kOk;
}

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  return mmrec::apps::run_program("mmrec-cuda-bench", [&] { return mmrec::apps::bench_main(argc, argv); });
}
