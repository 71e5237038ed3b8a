#include "engine/quantize/calibration.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "engine/session/access.h"
#include "mmrec/errors.h"
#include "models/architecture.h"

namespace mmrec::engine {
namespace {

/// R of RᵀR = H, of which the upper half is given and overwritten, by blocks of rows: threads take what the rows above
/// give to a block, then its rows follow one another. Throws NumericError naming `name`.
void factorize(std::vector<double>& h, std::size_t n, const std::string& name, kernels::ThreadPool& pool) {
  constexpr std::size_t kRows = 64;
  const auto subtract = [&](std::size_t above, std::size_t row) {
    const double* const from = h.data() + above * n;
    double* const to = h.data() + row * n;
    const double factor = from[row];
    for (std::size_t j = row; j < n; ++j) to[j] -= factor * from[j];
  };
  for (std::size_t first = 0; first < n; first += kRows) {
    const std::size_t last = std::min(first + kRows, n);
    pool.parallel_for(static_cast<std::int64_t>(last - first), 1, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::size_t above = 0; above < first; ++above) {
        for (std::int64_t i = begin; i < end; ++i) subtract(above, first + static_cast<std::size_t>(i));
      }
    });
    for (std::size_t row = first; row < last; ++row) {
      for (std::size_t above = first; above < row; ++above) subtract(above, row);
      double* const of_row = h.data() + row * n;
      if (!(of_row[row] > 0.0) || !std::isfinite(of_row[row])) {
        throw NumericError(fmt::format("calibration: the inputs of {} are not finite", name));
      }
      const double root = std::sqrt(of_row[row]);
      for (std::size_t j = row; j < n; ++j) of_row[j] /= root;
    }
  }
}

}  // namespace

SecondOrder second_order(std::span<const float> sum, std::size_t n, double damping, const std::string& name,
                         kernels::ThreadPool& pool) {
  SecondOrder found;
  found.order.resize(n);
  std::iota(found.order.begin(), found.order.end(), std::size_t{0});
  std::ranges::stable_sort(found.order, {}, [&](std::size_t i) { return sum[i * n + i]; });
  double trace = 0.0;
  for (std::size_t i = 0; i < n; ++i) trace += static_cast<double>(sum[i * n + i]);
  const double added = trace > 0.0 ? damping * trace / static_cast<double>(n) : 1.0;
  std::vector<double> h(n * n, 0.0);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = i; j < n; ++j) h[i * n + j] = static_cast<double>(sum[found.order[i] * n + found.order[j]]);
    h[i * n + i] += added;
  }
  factorize(h, n, name, pool);
  found.r.assign(h.begin(), h.end());
  return found;
}

Calibration::Calibration(const std::filesystem::path& folder, std::span<const int> tokens, double damping, int threads,
                         const std::function<bool(std::int64_t done)>& on_progress)
    : damping_(damping), cpu_(threads) {
  const std::unique_ptr<models::LoadedModel> model = models::load_model(folder, {}, {.threads = threads});
  check_ids(tokens, model->info().vocab_size, "calibration: ");
  model->visit_parts([&](const std::string& name, std::int64_t col, const kernels::WeightView<kernels::Host>& part) {
    const auto* const begin = static_cast<const std::byte*>(part.data);
    parts_[name].emplace(static_cast<std::size_t>(col), begin);
    begins_.insert(begin);
  });
  const models::ExecutionOptions options{.threads = threads, .observer = this};
  const models::Slots slot(model->on_cpu(), 1, options);
  const models::Run run{.slot = slot.first(), .rows = std::ssize(tokens)};
  slot.executor()->run({.tokens = tokens,
                        .runs = {&run, 1},
                        .progress = [&](std::span<const std::int64_t> done) { return on_progress(done[0]); },
                        .wants_logits = false},
                       options);
  for (auto& [begin, sums] : sums_) add_block(sums);
}

void Calibration::observe(std::span<const kernels::Linear<kernels::Host>> jobs) {
  const std::lock_guard lock(mutex_);
  for (const kernels::Linear<kernels::Host>& job : jobs) {
    if (job.weight.rows == 0) continue;
    const auto* const begin = static_cast<const std::byte*>(job.weight.data);
    const auto* const end = begin + kernels::bytes_of(job.weight.format, job.weight.rows, job.weight.cols);
    const auto part = begins_.lower_bound(begin);
    if (part == begins_.end() || *part >= end) continue;
    Sums& sums = sums_[begin];
    const auto cols = static_cast<std::size_t>(job.weight.cols);
    if (sums.end == nullptr) {
      sums.cols = job.weight.cols;
      sums.block.resize(cols * kBlock);
      sums.sum.resize(cols * cols);
    }
    sums.end = std::max(sums.end, end);
    for (std::int64_t r = 0; r < job.x.rows; ++r) {
      const float* const x = job.x.row(r);
      for (std::size_t c = 0; c < cols; ++c) sums.block[c * kBlock + static_cast<std::size_t>(sums.filled)] = x[c];
      if (++sums.filled == kBlock) add_block(sums);
    }
  }
}

void Calibration::add_block(Sums& sums) {
  const kernels::MatrixView<const float, kernels::Host> block(sums.block.data(), sums.cols, kBlock);
  const kernels::MatrixView<float, kernels::Host> sum(sums.sum.data(), sums.cols, sums.cols);
  const kernels::Linear<kernels::Host> product{
      .x = block, .weight = {block.data, kernels::DType::kF32, sums.cols, kBlock}, .y = sum, .residual = sum};
  kernels::linear(cpu_, {&product, 1});
  std::ranges::fill(sums.block, 0.0F);
  sums.filled = 0;
}

std::vector<ColumnInputs> Calibration::of(const std::string& name) {
  std::vector<ColumnInputs> all;
  for (const auto& [first, rows] : parts_[name]) {
    all.push_back({first, moments_of(rows, name)});
    if (all.back().moments == nullptr) return {};
  }
  return all;
}

const SecondOrder* Calibration::moments_of(const std::byte* rows, const std::string& name) {
  auto sums = sums_.upper_bound(rows);
  if (sums == sums_.begin() || (--sums)->second.end <= rows) return nullptr;
  SecondOrder& factor = sums->second.factor;
  if (factor.order.empty()) {
    factor = second_order(sums->second.sum, static_cast<std::size_t>(sums->second.cols), damping_, name, cpu_.pool());
    sums->second.sum = {};
  }
  return &factor;
}

}  // namespace mmrec::engine
