// The way into Model and Session from below: both are made of runners, whoever makes those. Model::load uses it with
// the backends' runners, tests with toys. Not installed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "mmrec/model.h"
#include "mmrec/session.h"
#include "models/mmrec/config.h"
#include "models/runner.h"

namespace mmrec::engine {

/// Makes a runner at position 0. Called by any thread; keeps alive what its runners need.
using RunnerFactory = std::function<std::unique_ptr<models::Runner>(int batch, const models::RunnerOptions& options)>;

struct Access {
  /// A session on `runner`. `config` gives the state's shapes; `fingerprint` is the identity that saved states carry.
  static Session session(std::unique_ptr<models::Runner> runner, const models::Config& config,
                         std::uint64_t fingerprint);
  static Model model(ModelInfo info, const models::Config& config, RunnerFactory make_runner);
};

/// Throw std::invalid_argument naming the option, found and expected.
void check_batch(int batch);
void check_options(const SessionOptions& options);

/// The runner's words for the session's options. Requires: check_options(options) passed.
models::RunnerOptions runner_options(const SessionOptions& options);

}  // namespace mmrec::engine
