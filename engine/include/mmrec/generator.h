// Generating for many requests at once: they join and leave a batch that keeps running (continuous batching).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "mmrec/export.h"
#include "mmrec/generate.h"
#include "mmrec/model.h"

namespace mmrec {

/// What a Generator has room for.
struct GeneratorOptions {
  /// The most sequences that run at once, on each device. 0: as many as are fastest there, at most 1,024. Half as many
  /// more, at most 64, consume their prompts before a slot is free. By default all states take at most a fifth of a
  /// GPU's free memory, or 384 MiB on a CPU. 0..65536.
  int slots = 0;
  /// If known, how many requests there will be: by default no device has more slots. 0: not known.
  std::uint64_t requests = 0;
  /// What the states of all of these may take of a device's memory; 0: no limit. There must be room for one.
  std::uint64_t memory_bytes = 0;
  SessionOptions session = {};  ///< of the sequences
};

/// What to continue, and how.
struct GeneratorRequest {
  /// Consumed before anything is drawn. At least one token unless there is a state to go on from.
  std::vector<int> prompt = {};
  /// As for generate(). `context` are the tokens that the state below has consumed, or the last of them: by default
  /// start->recent_tokens(), and none of `state`. The prompt need not be told again.
  GenerateOptions options = {};
  /// A session of batch 1 of the same model, on any of the generator's devices: the sequence begins with a copy of its
  /// state, made on the device where it stays there, so that any number of requests can go on from one prefix. Not
  /// changed; must stand where it stands now until the request
  /// has left the queue.
  std::shared_ptr<const Session> start = {};
  /// Or the bytes of one, as from Session::save.
  std::vector<std::byte> state = {};
  /// Receives the result, once.
  std::function<void(GenerateResult)> on_finish = {};
};

/// Runs many requests together, one token of each at a time. A request's result is that of generate() on a session of
/// its own with the same prompt, options and state, whenever others come and go: to the bit where docs/numerics.md says
/// that neighbours change none.
///
/// On several devices a request runs on one, the first to have room beside its share of the others; which one makes no
/// difference to its result. Devices compute in threads of their own, also between calls of run_once().
///
/// Requests wait in the order of submit(). The memory of all states is taken when the generator is made, whatever is
/// submitted later. Not thread-safe; the model may be used by others meanwhile.
///
/// Callbacks are called in run_once(), in its thread, between calls of their device, and may submit() and cancel(),
/// also their own request; what they submit joins in a later round. They must not call run_once() or run()
/// (std::logic_error), nor destroy or move the generator. What a callback throws cancels its request like an answer of
/// false; run_once() completes the round for all others and throws it then, the first if there are several. It can be
/// called again.
class MMREC_EXPORT Generator {
 public:
  /// Of a request: from 1 on, in the order of submit().
  using RequestId = std::uint64_t;

  /// Throws std::invalid_argument for an option out of range, std::bad_alloc, std::system_error where CUDA fails.
  Generator(const Model& model, Tokenizer tokenizer, const GeneratorOptions& options = {});
  /// On all devices of `models`, which are one model, as from Model::load_on_gpus. Throws std::invalid_argument where
  /// there is none, or where they differ in fingerprint, device, precision or calls, and as above.
  Generator(std::vector<Model> models, Tokenizer tokenizer, const GeneratorOptions& options = {});
  /// Requests, waiting and running, go along. Not from a callback.
  Generator(Generator&&) noexcept;
  /// Drops the requests it had.
  Generator& operator=(Generator&&) noexcept;
  /// Requests that are not finished are dropped; nothing is called. Waits for what several devices have under way.
  ~Generator();

  /// Queues a request; numbers rise from 1. Throws std::invalid_argument naming the field, found and expected, and
  /// std::runtime_error for a state that Session::restore would refuse; then nothing has changed.
  RequestId submit(GeneratorRequest request);

  /// Draws no more tokens for a request: in this round or the next it finishes as if options.cancelled had said so.
  /// False where no such request is waiting or running.
  bool cancel(RequestId id);

  /// One round: requests join, several together, and their prompts are consumed, long ones in pieces over several
  /// rounds. All other sequences take a step together, and the next token of each is drawn. Returns whether
  /// anything is left to do. Several devices have rounds of their own: it returns when one is done, or more, and others
  /// go on.
  ///
  /// A request whose logits cannot be drawn from (NaN) finishes with kError, the others go on. Where a call of the
  /// device fails, the requests in that call finish with kError and run_once() throws that in the end.
  bool run_once();
  /// Rounds until all requests are finished, those that callbacks submit among them. Throws what run_once() throws.
  void run();

  int slots() const;            ///< of all devices
  std::size_t waiting() const;  ///< requests without a slot; some may have consumed their prompts
  std::size_t running() const;  ///< requests with one
  /// What prefilling has cost so far.
  PrefillStats prefill_stats() const;

 private:
  struct MMREC_NO_EXPORT Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mmrec
