// A state file of any bytes is refused, or is one that encodes to the same bytes; and a session goes on from it, or
// refuses it and is as it was. The input is also tried with sizes and checksums made good: its own and those of the
// state in it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "mmrec/state_file.h"
#include "tests/engine/toy_executor.h"
#include "tests/fuzz/harness.h"

namespace {

using mmrec::fuzz::require;
using Bytes = std::span<const std::byte>;

void go_on(const mmrec::SavedSequence& saved) {
  static mmrec::Session session = mmrec::test::toy_session();
  session.reset();
  bool restored = false;
  try {
    mmrec::restore_sequence(session, saved);
    restored = true;
  } catch (const std::runtime_error& error) {
    mmrec::fuzz::require_line(error.what());
    require(session.position() == 0);
  }
  constexpr int kToken = 3;
  if (restored) require(session.position() >= 0 && session.save() == saved.state);
  session.step({&kToken, 1});
}

void restore(Bytes bytes) {
  mmrec::SavedSequence saved;
  try {
    saved = mmrec::decode_sequence(bytes);
  } catch (const std::runtime_error& error) {
    mmrec::fuzz::require_line(error.what());
    return;
  }
  const std::vector<std::byte> again = mmrec::encode_sequence(saved);
  require(std::equal(again.begin(), again.end(), bytes.begin(), bytes.end()));
  const mmrec::Sampler takes(saved.sampler);
  go_on(saved);
  saved.state = mmrec::fuzz::sealed(saved.state);
  go_on(saved);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Bytes input = std::as_bytes(std::span(data, size));
  restore(input);
  restore(mmrec::fuzz::sealed(input));
  return 0;
}
