// What is written to banks of past states, and lists of runs made on the device (kernels/ops.h). Rows of a bank are
// read and written once.
#include <algorithm>

#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostGrid = 65535;

/// A block a row of a run.
__global__ void __launch_bounds__(kThreads) bank_write_kernel(const __grid_constant__ BankWrite<Device> op) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const BankRun run = op.runs.list[blockIdx.x];
  const std::int64_t dim = op.h.cols;
  const std::int64_t used = run.used_before(op.layer, op.slots);
  for (std::int64_t i = blockIdx.y; i < run.rows; i += gridDim.y) {
    const std::int64_t slot = used + i < op.slots ? used + i : used + i - op.slots;
    for (std::int64_t c = threadIdx.x; c < dim; c += kThreads) {
      run.bank[slot * dim + c] = __ldcg(op.h.row(run.first + i) + c);
    }
  }
}

__global__ void __launch_bounds__(kThreads) space_runs_kernel(const __grid_constant__ SpacedRuns<Device> op) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= op.count) return;
  BankRun run = op.first;
  run.first += static_cast<std::int32_t>(i) * run.rows;
  if (run.state != nullptr) run.state = bytes_further(run.state, i * op.apart);
  if (run.bank != nullptr) run.bank = bytes_further(run.bank, i * op.apart);
  op.list[i] = run;
}

}  // namespace

void space_runs(Cuda& cuda, const SpacedRuns<Device>& op) {
  const dim3 grid(static_cast<unsigned>(ceil_div(op.count, kThreads)));
  launch(cuda.stream(), {.grid = grid, .block = dim3(kThreads)}, space_runs_kernel, op);
}

void bank_write(Cuda& cuda, const BankWrite<Device>& op) {
  if (op.runs.count == 0 || op.runs.most_rows == 0) return;
  const dim3 grid(static_cast<unsigned>(op.runs.count),
                  static_cast<unsigned>(std::min<std::int64_t>(op.runs.most_rows, kMostGrid)));
  launch(cuda.stream(), overlapping(cuda, grid, dim3(kThreads)), bank_write_kernel, op);
}

}  // namespace mmrec::kernels
