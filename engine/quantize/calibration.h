// Second moments of the inputs of each matrix on a text. Rounding by second order needs them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "kernels/cpu/cpu.h"

namespace mmrec::engine {

/// Of the inputs x of a matrix with n columns: H = Σ x xᵀ with `damping` of its mean diagonal added to the diagonal.
/// The rows and columns of H are sorted by the diagonal, the largest last; column `order[i]` of the matrix is number i.
/// Then RᵀR = H.
struct SecondOrder {
  std::vector<std::size_t> order;  // [n]
  std::vector<float> r;            // [n, n], R, which is 0 below the diagonal
};
/// From Σ x xᵀ [n, n]. Throws NumericError naming `name` if that is not finite.
SecondOrder second_order(std::span<const float> sum, std::size_t n, double damping, const std::string& name,
                         kernels::ThreadPool& pool);

/// Of the inputs of some columns of a matrix, from `first` on.
struct ColumnInputs {
  std::size_t first = 0;
  const SecondOrder* moments = nullptr;
};

/// Runs a model over a text on the CPU, and sums x xᵀ for each matrix that it multiplies x by.
class Calibration final : kernels::LinearObserver {
 public:
  /// Of the model in `folder`. `on_progress` gets the tokens done; false ends the text there. Throws as Model::load.
  Calibration(const std::filesystem::path& folder, std::span<const int> tokens, double damping, int threads,
              const std::function<bool(std::int64_t done)>& on_progress);

  /// Of the inputs of NAME.weight, whose columns may be multiplied apart; none where some had no inputs.
  std::vector<ColumnInputs> of(const std::string& name);

 private:
  /// Sums for one matrix, which may be stacked of several tensors.
  struct Sums {
    const std::byte* end = nullptr;  // of its weights
    std::int64_t cols = 0;
    std::int64_t filled = 0;
    std::vector<float> block;  // [cols, kBlock], some x as columns
    std::vector<float> sum;    // [cols, cols]
    SecondOrder factor;        // once it is asked for
  };
  static constexpr std::int64_t kBlock = 512;

  void observe(std::span<const kernels::Linear<kernels::Host>> jobs) override;
  void add_block(Sums& sums);
  /// Of the rows of weights that begin at `rows`; null where they had no inputs.
  const SecondOrder* moments_of(const std::byte* rows, const std::string& name);

  double damping_;
  kernels::Cpu cpu_;
  std::mutex mutex_;
  std::map<std::string, std::map<std::size_t, const std::byte*>> parts_;  // of tensors: first column, and the weights
  std::set<const std::byte*> begins_;                                     // of the parts' weights
  std::map<const std::byte*, Sums> sums_;                                 // by where the weights of a product begin
};

}  // namespace mmrec::engine
