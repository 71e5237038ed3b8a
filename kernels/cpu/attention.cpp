// Attention over memory slots and to banks of past states, a task is a row; and what a call's states do to a bank.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {
namespace {

/// f(run, row of the run, thread) for the rows of all runs, which threads share; a row has `cols` elements of work.
template <class F>
void for_each_row(Cpu& cpu, const BankRuns<Host>& runs, std::int64_t cols, const F& f) {
  std::int64_t rows = 0;
  for (std::int64_t i = 0; i < runs.count; ++i) rows += runs.list[i].rows;
  cpu.pool().parallel_for(rows, rows_per_thread(cols), [&](std::int64_t begin, std::int64_t end, int thread) {
    for (std::int64_t i = 0; i < runs.count && end > 0; ++i) {  // both count from the run's first row
      const BankRun& run = runs.list[i];
      const std::int64_t last = std::min<std::int64_t>(end, run.rows);
      for (std::int64_t r = std::max<std::int64_t>(begin, 0); r < last; ++r) f(run, r, thread);
      begin -= run.rows;
      end -= run.rows;
    }
  });
}

}  // namespace

void memory_attention(Cpu& cpu, const MemoryAttention<Host>& op) {
  const auto attend = simd().attention.attend;
  const std::int64_t d = op.q.dim / op.heads;
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d - op.padding)));
  const std::int64_t slots = op.slots.time;
  const std::int64_t grain = rows_per_thread(2 * op.q.dim * slots);
  cpu.pool().parallel_for(op.q.batch * op.q.time, grain, [&](std::int64_t begin, std::int64_t end, int thread) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t b = r / op.q.time;
      const std::int64_t t = r % op.q.time;
      for (std::int64_t c = 0; c < op.heads * d; c += d) {
        attend(op.q.at(b, 0, t) + c, op.slots.at(b, 0, 0) + c, op.slots.time_stride, slots, 0, d, scale,
               cpu.scratch(thread), op.out.at(b, 0, t) + c);
      }
    }
  });
}

void bank_attention(Cpu& cpu, const BankAttention<Host>& op) {
  const auto attend = simd().attention.attend;
  const std::int64_t dim = op.q.cols;
  for_each_row(cpu, op.runs, 2 * dim * op.slots, [&](const BankRun& run, std::int64_t r, int thread) {
    const std::int64_t used = run.used_before(op.layer, op.slots);
    float* const out = op.out.row(run.first + r);
    if (used == 0) {
      std::fill_n(out, dim, 0.0F);
    } else {
      attend(op.q.row(run.first + r), run.bank, dim, used, op.slots - used, dim, op.scale, cpu.scratch(thread), out);
    }
  });
}

void bank_write(Cpu& cpu, const BankWrite<Host>& op) {
  const std::int64_t dim = op.h.cols;
  for_each_row(cpu, op.runs, dim, [&](const BankRun& run, std::int64_t r, int) {
    const std::int64_t at = run.used_before(op.layer, op.slots) + r;
    std::copy_n(op.h.row(run.first + r), dim, run.bank + (at < op.slots ? at : at - op.slots) * dim);
  });
}

}  // namespace mmrec::kernels
