// --sandbox: takes from the running program what it does not need to read its inputs, to compute and to write its
// outputs.
//
// Must stay true: the kernel refuses what is promised here from then on, in this process and for good. A restriction or
// a rule that cannot be made throws: the program never goes on with less.
#pragma once

#include <filesystem>
#include <span>

#include "apps/common/named_files.h"

namespace mmrec::apps {

/// Closes what the program inherited beside the standard descriptors and the files named, and drops all capabilities.
/// Then Landlock, for this thread and those that it starts: no other file is opened, made, removed or renamed, and none
/// is executed; signals and abstract sockets stay inside. Throws std::runtime_error where the kernel has no Landlock,
/// where there are other threads, or where a file that is there cannot be named to it; WriteError where an output
/// could not be written. Of `files` inputs may be read and outputs replaced: other files of an output's folder may be
/// written too. Folders are made if need be, and files in them read and written. Of the folder `model` its own files of
/// known names may be read. `gpu`: a driver is at work, so all but devices and other processes may be read, and GPUs
/// written.
void restrict_files(std::span<const NamedFile> files, const std::filesystem::path& model, bool gpu);

/// A seccomp filter for the start of a GPU's driver: calls that reach others, and that it does not take, fail with
/// EPERM. Those are connecting to sockets, tracing, programs, keys, and modes, owners, times and attributes of files.
/// Throws as restrict_calls() does.
void restrict_start();

/// A seccomp filter, for all threads: calls that neither computing nor files take fail with EPERM. Those are sockets,
/// processes, signals, priorities and limits of others, modes, owners, times and attributes of files, mounts, keys,
/// tracing, io_uring, another user, and typing into the terminal. `gpu`: a driver's ioctls are allowed. Throws
/// std::runtime_error where the kernel has no filters.
void restrict_calls(bool gpu = false);

}  // namespace mmrec::apps
