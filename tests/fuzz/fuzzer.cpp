// libFuzzer's entry, for the harness of MMREC_FUZZ_SUBJECT.
#include "tests/fuzz/harness.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const mmrec::fuzz::Harness harness = mmrec::fuzz::harnesses().at(MMREC_FUZZ_SUBJECT);
  harness({reinterpret_cast<const char*>(data), size});
  return 0;
}
