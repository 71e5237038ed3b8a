// Multi-head softmax attention over memory slots; a task is one row of one sequence.
#include <cmath>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

void memory_attention(Cpu& cpu, const MemoryAttention<Host>& op) {
  const auto attend = simd().attention.attend;
  const std::int64_t d = op.q.dim / op.heads;
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d)));
  const std::int64_t slots = op.slots.time;
  cpu.pool().parallel_for(op.q.batch * op.q.time, rows_per_thread(2 * op.q.dim * slots),
                          [&](std::int64_t begin, std::int64_t end, int thread) {
                            float* values = cpu.scratch(thread);  // [d]
                            for (std::int64_t r = begin; r < end; ++r) {
                              const std::int64_t b = r / op.q.time;
                              const std::int64_t t = r % op.q.time;
                              for (std::int64_t head = 0; head < op.heads; ++head) {
                                attend(op.q.at(b, 0, t) + head * d, op.slots.at(b, 0, 0) + head * d,
                                       op.slots.time_stride, slots, 0, d, scale, values, op.out.at(b, 0, t) + head * d);
                              }
                            }
                          });
}

}  // namespace mmrec::kernels
