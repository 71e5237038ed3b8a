// Files that are there whole or as they were, whatever happens while they are written.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace mmrec::models {

/// Makes `bytes` the contents of `path`, which its owner alone may read and write (mode 0600). They are written beside
/// it, to a file without a name where the file system has such, and put in its place when the disk has them; then the
/// folder is written to the disk too. Where `path` is a symbolic link what it points to is replaced. Of several at once
/// the last wins. Throws std::system_error with errno naming the path, and std::runtime_error where the target is no
/// regular file; the target is then as it was.
void replace_file(const std::filesystem::path& path, std::span<const std::byte> bytes);

}  // namespace mmrec::models
