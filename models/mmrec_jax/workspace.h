// What the forward pass of mmrec-jax works in: the activations of one chunk, as views, and what its runs are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/cpu/cpu.h"  // ops are called by their qualified names, which some backend must have declared
#include "kernels/ops.h"
#include "models/mmrec_jax/mmrec_jax.h"
#include "models/runtime/executor.h"
#include "models/runtime/schedule.h"
#include "models/runtime/tables.h"

namespace mmrec::models::jax {

/// Rows that products take together. Ragged: no whole tile.
struct Piece {
  std::int64_t first = 0;
  std::int64_t rows = 0;
  bool ragged = false;
};

template <class Backend, class A>
class Workspace {
 public:
  using Space = typename Backend::Space;
  template <class T>
  using Buffer = typename Backend::template Buffer<T>;
  template <class T>
  using Matrix = kernels::MatrixView<T, Space>;
  template <class Y>
  using Job = kernels::Linear<Space, A, Y>;

  /// Whether what enters a product is rounded, so that it needs memory of its own.
  static constexpr bool kRounds = !std::is_same_v<A, float>;

  Workspace(const Config& model_config, Backend& model_backend, std::int64_t product_tile)
      : config(model_config), backend(model_backend), slot(model_config), tile_(product_tile), tables_(model_backend) {}

  const Config& config;
  Backend& backend;
  SlotLayout slot;

  /// Memory for chunks of so many rows, of calls of up to call_rows tokens; false if it was there already. Where it
  /// throws, the next call begins anew.
  bool reserve(std::int64_t rows, std::int64_t call_rows) {
    const std::int64_t longest = config.bank ? std::max(call_rows, call_rows_) : call_rows_;
    rows = std::max(rows, rows_);
    if (rows == rows_ && longest == call_rows_) return false;
    rows_ = 0;
    const auto grow = [&]<class T>(Buffer<T>& buffer, std::int64_t count, std::int64_t width) {
      buffer = Buffer<T>();  // before the larger one comes
      buffer = backend.template allocate<T>(static_cast<std::size_t>(count * width));
    };
    grow(x_, rows, dim()), grow(zm_, rows, dim()), grow(gamma_, rows, dim()), grow(context_, rows, dim());
    grow(u_, rows, dim()), grow(qkvz_, rows, 4 * dim()), grow(attended_, rows, dim());
    grow(gate_hidden_, rows, 2 * config.gate_hidden_dim()), grow(ffn_, rows, config.ffn_dim()), grow(h_, rows, dim());
    if constexpr (kRounds) grow(h_rounded_, rows, dim());
    if constexpr (kHasLists) {
      grow(spaced_, rows, 1);
      if (config.bank) {
        const auto bytes =
            bank_scratch_bytes(backend, rows / longest + 1, longest, config.long_mem_len, dim(), sizeof(A));
        grow(scratch_, static_cast<std::int64_t>(bytes), 1);
      }
    }
    rows_ = rows, call_rows_ = longest;
    return true;
  }
  std::int64_t rows() const { return rows_; }

  // --- Activations, [rows, D] unless named.

  std::int64_t dim() const { return config.model_dim; }
  Matrix<float> x(std::int64_t rows) { return {x_.data(), rows, dim()}; }
  Matrix<A> u(std::int64_t rows) { return {u_.data(), rows, dim()}; }
  Matrix<A> qkvz(std::int64_t rows) { return {qkvz_.data(), rows, 4 * dim()}; }
  /// Number 0 to 3 of q, k, v, z.
  Matrix<A> part(std::int64_t rows, std::int64_t number) { return qkvz(rows).middle_cols(number * dim(), dim()); }
  Matrix<float> zm(std::int64_t rows) { return {zm_.data(), rows, dim()}; }
  Matrix<float> gamma(std::int64_t rows) { return {gamma_.data(), rows, dim()}; }
  Matrix<float> context(std::int64_t rows) { return {context_.data(), rows, dim()}; }
  /// Of the decay's network of z, 0, or of k, 1: [rows, G].
  Matrix<A> gate_hidden(std::int64_t rows, std::int64_t network) {
    const std::int64_t width = config.gate_hidden_dim();
    return {gate_hidden_.data() + network * width, rows, width, 2 * width};
  }
  Matrix<float> h(std::int64_t rows) { return {h_.data(), rows, dim()}; }
  /// The same memory for A = float.
  Matrix<A> h_rounded(std::int64_t rows) {
    if constexpr (kRounds) {
      return {h_rounded_.data(), rows, dim()};
    } else {
      return h(rows);
    }
  }
  /// Queries of the attention, then its output.
  Matrix<A> attended(std::int64_t rows) { return {attended_.data(), rows, dim()}; }
  Matrix<A> ffn(std::int64_t rows) { return {ffn_.data(), rows, config.ffn_dim()}; }  // [rows, F]
  std::byte* scratch() { return scratch_.data(); }
  std::size_t scratch_bytes() const { return scratch_.size(); }

  // --- Slots

  template <class T>
  T* in_slot(Slot of, std::size_t offset) const {
    return reinterpret_cast<T*>(of + offset);
  }
  Matrix<float> logits(Slot first, std::int64_t count) const {
    return {in_slot<float>(first, slot.logits), count, config.vocab_size,
            static_cast<std::int64_t>(slot.bytes / sizeof(float))};
  }

  // --- The runs of a chunk

  /// Lays them out for all that follows. The longest first: devices take those together that follow each other.
  void begin(std::span<const Batch> batches) {
    host_.clear();
    pieces_.clear();
    for (const Batch& b : batches) {
      for (std::int64_t s = 0; s < b.sequences; ++s) {
        host_.push_back(run_of(b, s));
        add_piece(b.first_row + s * b.tokens, b.tokens);
      }
    }
    std::stable_sort(host_.begin(), host_.end(), [](const auto& a, const auto& b) { return a.rows > b.rows; });
    runs_ = {
        .list = host_.data(), .on_host = host_.data(), .count = std::ssize(host_), .most_rows = host_.front().rows};
    if constexpr (kHasLists) {
      if (batches.size() == 1) {  // nothing is sent, so that a step can be recorded
        space_runs(backend, kernels::SpacedRuns<Space>{.first = host_.front(),
                                                       .apart = static_cast<std::int64_t>(slot.bytes),
                                                       .count = runs_.count,
                                                       .list = spaced_.data()});
        runs_.list = spaced_.data();
        return;
      }
      tables_.clear();
      const auto at = tables_.template place<kernels::BankRun>(host_.size());
      std::copy(host_.begin(), host_.end(), tables_.host(at));
      tables_.send();
      runs_.list = tables_.device(at);
    }
  }
  const kernels::BankRuns<Space>& runs() const { return runs_; }
  std::span<const Piece> pieces() const { return pieces_; }

 private:
  // Whether the backend reads lists in memory of its own.
  static constexpr bool kHasLists = !std::is_same_v<Space, kernels::Host>;

  kernels::BankRun run_of(const Batch& b, std::int64_t sequence) const {
    const Slot of = b.slot + static_cast<std::size_t>(sequence) * slot.bytes;
    kernels::BankRun run{.first = static_cast<std::int32_t>(b.first_row + sequence * b.tokens),
                         .rows = static_cast<std::int32_t>(b.tokens),
                         .used = static_cast<std::int32_t>(used_rows(config, b.position))};
    if (config.bank) {
      run.bank = in_slot<float>(of, slot.bank);
    } else {
      run.state = in_slot<float>(of, slot.h);
    }
    return run;
  }
  // Whole tiles begin with a run; short runs are ragged together.
  void add_piece(std::int64_t first, std::int64_t rows) {
    const bool ragged = tile_ > 1 && rows < tile_;
    const bool joins = !pieces_.empty() && (tile_ == 1 || (ragged && pieces_.back().ragged));
    if (joins) {
      pieces_.back().rows += rows;
    } else {
      pieces_.push_back({first, rows, ragged});
    }
  }

  std::int64_t tile_;
  std::int64_t rows_ = 0, call_rows_ = 0;  // room in the activations, and of a call
  Buffer<float> x_, zm_, gamma_, context_, h_;
  Buffer<A> u_, qkvz_, gate_hidden_, h_rounded_, attended_, ffn_;
  Buffer<kernels::BankRun> spaced_;
  Buffer<std::byte> scratch_;
  std::vector<kernels::BankRun> host_;
  std::vector<Piece> pieces_;
  kernels::BankRuns<Space> runs_;
  Tables<Backend> tables_;
};

}  // namespace mmrec::models::jax
