// The memory of the forward pass of mmrec-jax: the activations of one chunk, as views, and the list of its runs.
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
#include "models/runtime/activation.h"
#include "models/runtime/executor.h"
#include "models/runtime/schedule.h"
#include "models/runtime/tables.h"

namespace mmrec::models::mmrec_jax {

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
  using Matrix = kernels::MatrixView<T, Space>;
  template <class Y>
  using Job = kernels::Linear<Space, A, Y>;

  Workspace(const Config& model_config, Backend& model_backend, std::int64_t product_tile)
      : config(model_config),
        backend(model_backend),
        slot(model_config),
        x(dim()),
        zm(dim()),
        gamma(dim()),
        context(dim()),
        h(dim()),
        u(dim()),
        qkvz(4 * dim()),
        attended(dim()),
        ffn(config.ffn_dim()),
        tile_(product_tile),
        h_rounded_(dim()),
        gate_hidden_(2 * config.gate_hidden_dim()),
        tables_(model_backend) {}

  const Config& config;
  Backend& backend;
  SlotLayout slot;
  /// Of a chunk's rows; widths D unless named.
  Activation<Backend, float> x, zm, gamma, context, h;
  Activation<Backend, A> u, qkvz;
  Activation<Backend, A> attended;  // queries of the attention, then its output
  Activation<Backend, A> ffn;       // [rows, F]

  /// Memory for chunks of so many rows, of calls of up to call_rows tokens; false if it was there already. Where it
  /// throws, the next call begins anew.
  bool reserve(std::int64_t rows, std::int64_t call_rows) {
    const std::int64_t longest = config.bank ? std::max(call_rows, call_rows_) : call_rows_;
    rows = std::max(rows, rows_);
    if (rows == rows_ && longest == call_rows_) return false;
    rows_ = 0;
    for (auto* activation : {&x, &zm, &gamma, &context, &h}) activation->reserve(backend, rows);
    for (auto* activation : {&u, &qkvz, &attended, &ffn, &gate_hidden_}) activation->reserve(backend, rows);
    if constexpr (kRounds<A>) h_rounded_.reserve(backend, rows);
    if constexpr (kHasLists) {
      spaced_ = {}, scratch_ = {};
      spaced_ = backend.template allocate<kernels::BankRun>(static_cast<std::size_t>(rows));
      if (config.bank) {
        const auto bytes =
            bank_scratch_bytes(backend, rows / longest + 1, longest, config.long_mem_len, dim(), sizeof(A));
        scratch_ = backend.template allocate<std::byte>(bytes);
      }
    }
    rows_ = rows, call_rows_ = longest;
    return true;
  }
  std::int64_t rows() const { return rows_; }

  std::int64_t dim() const { return config.model_dim; }
  /// Number 0 to 3 of q, k, v, z.
  Matrix<A> part(std::int64_t rows, std::int64_t number) { return qkvz(rows).middle_cols(number * dim(), dim()); }
  /// Hidden units of a decay network, [rows, G]: 0, which takes z, or 1, which takes k.
  Matrix<A> gate_hidden(std::int64_t rows, std::int64_t network) {
    const std::int64_t width = config.gate_hidden_dim();
    return gate_hidden_(rows).middle_cols(network * width, width);
  }
  /// The same memory for A = float.
  Matrix<A> h_rounded(std::int64_t rows) { return if_rounded<A>(h_rounded_, h)(rows); }
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
  Activation<Backend, A> h_rounded_, gate_hidden_;
  typename Backend::template Buffer<kernels::BankRun> spaced_;
  typename Backend::template Buffer<std::byte> scratch_;
  std::vector<kernels::BankRun> host_;
  std::vector<Piece> pieces_;
  kernels::BankRuns<Space> runs_;
  Tables<Backend> tables_;
};

}  // namespace mmrec::models::mmrec_jax
