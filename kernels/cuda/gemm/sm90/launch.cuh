// Launches of the product for sm_90a (mainloop.cuh).
#pragma once

#include "kernels/cuda/gemm/sm90/mainloop.cuh"

namespace mmrec::kernels {

/// Adds the product of x, `batch` matrices of `rows` rows, and w, kParts matrices of `columns` rows, as job `job`, the
/// jobs before which are set.
template <class Tile, int kJobs>
void set_gemm_job(GemmJobs<kJobs>& jobs, int job, const MatrixStack& x, const MatrixStack& w) {
  using Layout = GemmLayout<Tile>;
  const GemmProblem problem = gemm_problem<Tile>(x.depth, x.rows, w.rows, x.columns);
  jobs.x[job] = make_tensor_map(x, Layout::kRows);
  jobs.w[job] = make_tensor_map(w, Layout::kWBoxRows, Layout::kWBoxParts);
  jobs.problem[job] = problem;
  jobs.tiles = (job == 0 ? 0 : jobs.end[job - 1]) + problem.batch * problem.row_tiles * problem.column_tiles;
  jobs.end[job] = jobs.tiles;
}

/// Launches the products. With `persistent` as many clusters as fit the device take several tiles each; otherwise a
/// cluster has one tile, in the order of tiles.
template <class Tile, class T, class Epilogue, int kJobs>
void launch_gemm_sm90(Cuda& cuda, const GemmJobs<kJobs>& jobs, const typename Epilogue::Parameters& parameters,
                      bool persistent, GemmSkip skip = {}) {
  using Layout = GemmLayout<Tile>;
  const int clusters = persistent ? std::min(jobs.tiles, cuda.processors() / Tile::kClusterRows) : jobs.tiles;
  const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(clusters * Tile::kClusterRows)),
                               .block = dim3(Layout::kThreads),
                               .shared_bytes = Layout::shared_bytes(Epilogue::kSharedBytes),
                               .cluster = Tile::kClusterRows,
                               .overlap_predecessor = true};
  launch(cuda.stream(), config, gemm_sm90_kernel<Tile, T, Epilogue, kJobs>, jobs, skip, parameters);
}
template <class Tile, class T, class Epilogue>
void launch_gemm_sm90(Cuda& cuda, const MatrixStack& x, const MatrixStack& w,
                      const typename Epilogue::Parameters& parameters, bool persistent, GemmSkip skip = {}) {
  GemmJobs<1> jobs;
  set_gemm_job<Tile>(jobs, 0, x, w);
  launch_gemm_sm90<Tile, T, Epilogue>(cuda, jobs, parameters, persistent, skip);
}

}  // namespace mmrec::kernels
