// --sandbox: takes from the running program what it does not need to read its inputs, to compute and to write its
// outputs.
//
// Must stay true: what is promised here the kernel refuses from then on, in this process and for good, or the call that
// was to bring it about throws. There is no half of it.
#pragma once

#include <filesystem>
#include <vector>

namespace mmrec::apps {

/// What a program still has to open by its name.
struct SandboxFiles {
  std::vector<std::filesystem::path> readable;  // files, and folders whose files are meant; links are followed
  std::vector<std::filesystem::path> outputs;   // files that are replaced: their folders may be read and written
  std::vector<std::filesystem::path> folders;   // may be read and written, are made if need be
  bool gpu = false;  // a driver is at work: all may be read, devices and what /proc has of own threads written
};

/// Landlock, for this thread and those that it starts: no other file is opened, made, removed or renamed, and none is
/// executed. Throws std::runtime_error where the kernel has none or there are other threads.
void restrict_files(const SandboxFiles& files);

/// A seccomp filter, for all threads: calls that neither computing nor files take fail (EPERM), such as those for
/// sockets, processes, memory and limits of other programs, mounts, keys, tracing, io_uring, another user, and typing
/// into the terminal. Throws std::runtime_error where the kernel has none.
void restrict_calls();

/// Both, around the loading of a model.
class Sandbox {
 public:
  /// Before it. Does nothing unless `wanted`. With a GPU calls are restricted by loaded(): the driver needs more of
  /// them while it starts.
  Sandbox(bool wanted, const SandboxFiles& files);
  void loaded() const;

 private:
  bool is_to_come_ = false;
};

}  // namespace mmrec::apps
