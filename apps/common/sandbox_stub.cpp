// --sandbox where the system has neither Landlock nor seccomp, or the build found no headers or library for them.
#include <stdexcept>

#include "apps/common/sandbox.h"

namespace mmrec::apps {

void restrict_files(std::span<const NamedFile>, const std::filesystem::path&, bool) {
  throw std::runtime_error(
      "--sandbox: not in this build. Needed: Linux on x86-64 or AArch64, with linux/landlock.h and libseccomp");
}
void restrict_start() { restrict_files({}, {}, false); }
void restrict_calls(bool gpu) { restrict_files({}, {}, gpu); }

}  // namespace mmrec::apps
