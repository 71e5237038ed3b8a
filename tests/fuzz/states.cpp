// Saved states. The input is also tried with correct sizes and checksums, so that the reader gets past them.
#include <algorithm>

#include "engine/session/state_format.h"
#include "mmrec/state_file.h"
#include "models/mmrec/state.h"
#include "tests/engine/toy_executor.h"
#include "tests/fuzz/harness.h"
#include "tests/support/sealed_bytes.h"

namespace {

using mmrec::fuzz::accepted;
using mmrec::fuzz::require;
using Bytes = std::span<const std::byte>;

mmrec::models::Config config() {
  mmrec::models::Config config;
  config.num_layers = 1;
  config.model_dim = 3;
  config.memory_slots = 2;
  config.memory_segment = 5;
  config.vocab_size = 4;
  return config;
}
const mmrec::engine::StateShape kShape = {0x1122334455667788, 2, mmrec::models::state_layout(config())};

void restore(Bytes bytes) {
  const auto state = accepted([&] { return mmrec::engine::decode_state(bytes, kShape); });
  if (state) require(std::ranges::equal(mmrec::engine::encode_state(*state, kShape), bytes));
}

/// A session continues from the sequence, or refuses it and is as it was.
void go_on(const mmrec::SavedSequence& saved) {
  static mmrec::Session session = mmrec::test::toy_session();
  session.reset();
  if (mmrec::fuzz::takes([&] { mmrec::restore_sequence(session, saved); })) {
    require(session.position() >= 0 && session.save() == saved.state);
  } else {
    require(session.position() == 0);
  }
  constexpr int kToken = 3;
  session.step({&kToken, 1});
}

void restore_file(Bytes bytes) {
  auto saved = accepted([&] { return mmrec::decode_sequence(bytes); });
  if (!saved) return;
  require(std::ranges::equal(mmrec::encode_sequence(*saved), bytes));
  const mmrec::Sampler takes(saved->sampler);
  go_on(*saved);
  saved->state = mmrec::test::sealed(saved->state);
  go_on(*saved);
}

}  // namespace

// A saved state of any bytes is refused, or is one that encodes to the same bytes.
MMREC_FUZZ(state) {
  const Bytes bytes = std::as_bytes(std::span(input));
  restore(bytes);
  restore(mmrec::test::sealed(bytes));
}

// A state file of any bytes is refused, or encodes to the same bytes; and a session continues from it, or refuses it
// and is as it was.
MMREC_FUZZ(state_file) {
  const Bytes bytes = std::as_bytes(std::span(input));
  restore_file(bytes);
  restore_file(mmrec::test::sealed(bytes));
}
