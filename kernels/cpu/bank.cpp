// Attention to banks of past states, a task is a row of a run; and what a call's states do to them.
#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {
namespace {

/// f(run, first, last) for the rows of runs that lie in [begin, end) of all runs' rows, counted without gaps.
template <class F>
void for_rows(const BankRuns<Host>& runs, std::int64_t begin, std::int64_t end, const F& f) {
  for (std::int64_t i = 0; i < runs.count && end > 0; ++i) {
    const BankRun& run = runs.list[i];
    const std::int64_t last = std::min<std::int64_t>(end, run.rows);
    if (begin < last) f(run, std::max<std::int64_t>(begin, 0), last);
    begin -= run.rows;
    end -= run.rows;
  }
}

std::int64_t rows_of(const BankRuns<Host>& runs) {
  std::int64_t rows = 0;
  for (std::int64_t i = 0; i < runs.count; ++i) rows += runs.list[i].rows;
  return rows;
}

}  // namespace

void bank_attention(Cpu& cpu, const BankAttention<Host>& op) {
  const auto attend = simd().attention.attend;
  const std::int64_t dim = op.q.cols;
  cpu.pool().parallel_for(
      rows_of(op.runs), rows_per_thread(2 * dim * op.slots), [&](std::int64_t begin, std::int64_t end, int thread) {
        for_rows(op.runs, begin, end, [&](const BankRun& run, std::int64_t first, std::int64_t last) {
          const std::int64_t used = run.used_before(op.layer, op.slots);
          for (std::int64_t r = run.first + first; r < run.first + last; ++r) {
            if (used == 0) {
              std::fill_n(op.out.row(r), dim, 0.0F);
            } else {
              attend(op.q.row(r), run.bank, dim, used, op.slots - used, dim, op.scale, cpu.scratch(thread),
                     op.out.row(r));
            }
          }
        });
      });
}

void bank_write(Cpu& cpu, const BankWrite<Host>& op) {
  const std::int64_t dim = op.h.cols;
  cpu.pool().parallel_for(rows_of(op.runs), rows_per_thread(dim), [&](std::int64_t begin, std::int64_t end, int) {
    for_rows(op.runs, begin, end, [&](const BankRun& run, std::int64_t first, std::int64_t last) {
      const std::int64_t used = run.used_before(op.layer, op.slots);
      for (std::int64_t i = first; i < last; ++i) {
        const std::int64_t slot = used + i < op.slots ? used + i : used + i - op.slots;
        std::copy_n(op.h.row(run.first + i), dim, run.bank + slot * dim);
      }
    });
  });
}

}  // namespace mmrec::kernels
