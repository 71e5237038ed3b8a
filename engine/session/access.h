// Makes models and sessions of executors, and reaches into them. Model::load uses it with the executors of backends,
// tests with toy executors; scorer and generator give their work to a model's executor. Not installed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "mmrec/model.h"
#include "mmrec/session.h"
#include "models/runtime/executor.h"
#include "models/runtime/host_state.h"

namespace mmrec::engine {

struct Access {
  /// A session of `batch` sequences in slots of `executor`, whose states have `layout`; `fingerprint` is the identity
  /// that saved states carry.
  static Session session(std::shared_ptr<models::Executor> executor, models::StateLayout layout,
                         std::int64_t vocab_size, std::uint64_t fingerprint, int batch,
                         const models::ExecutionOptions& options);
  using SessionImpl = Session::Impl;  // engine/session/session_impl.h
  static SessionImpl& impl(Session& session);
  /// `executor` keeps the weights alive.
  static Model model(ModelInfo info, models::StateLayout layout, std::shared_ptr<models::Executor> executor);
  static const std::shared_ptr<models::Executor>& executor(const Model& model);
  static const models::StateLayout& layout(const Model& model);
  static const models::Slots& slots(const Session& session);
};

/// Throw std::invalid_argument naming the option, found and expected.
void check_batch(int batch);
/// `what` stands before "token": "prompt ". The first id is token `first`.
void check_ids(std::span<const int> ids, std::int64_t vocab, std::string_view what, std::size_t first = 0);
/// At least one, and all of them one model.
void check_replicas(std::span<const Model> models);
/// The executor's words for the session's options.
models::ExecutionOptions execution_options(const SessionOptions& options);

}  // namespace mmrec::engine
