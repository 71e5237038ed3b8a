// What the emulation tells AddressSanitizer; nothing where it is off.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define MMREC_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MMREC_ADDRESS_SANITIZER 1
#endif
#endif

#if defined(MMREC_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

/// For inner loops over memory that was checked before: where the time goes.
#if defined(__clang__)
#define MMREC_NOT_INSTRUMENTED __attribute__((no_sanitize("address", "undefined")))
#else
#define MMREC_NOT_INSTRUMENTED __attribute__((no_sanitize_address, no_sanitize_undefined, optimize("O3")))
#endif

namespace mmrec::cuda_emulation {

inline void poison([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#if defined(MMREC_ADDRESS_SANITIZER)
  ASAN_POISON_MEMORY_REGION(data, bytes);
#endif
}
inline void unpoison([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#if defined(MMREC_ADDRESS_SANITIZER)
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
#endif
}

}  // namespace mmrec::cuda_emulation
