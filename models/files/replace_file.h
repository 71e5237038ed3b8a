// Files that are there whole or as they were, whatever happens while they are written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace mmrec::models {

/// A file that takes the place of another, or of none, once it is complete. Until then it lies beside its target:
/// without a name if the file system can do that, else as ".mmrec-" and 16 hexadecimal digits. Of several at once the
/// last wins. All throw std::system_error with errno naming the path; the target is then as it was.
class Replacement {
 public:
  enum class Mode {
    kPrivate,  // 0600: its owner alone may read it
    kUsual,    // as the file that it replaces, or as open() makes a new one
  };
  /// If `path` is a symbolic link, the file that it leads to is replaced or made. Throws std::runtime_error if that is
  /// no regular file, and for whatever would stop commit() and shows already.
  Replacement(const std::filesystem::path& path, Mode mode);
  ~Replacement();
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  /// For writing.
  int descriptor() const { return fd_; }
  /// Writes all of `bytes` from byte `offset` on. Thread-safe.
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  /// Its name until commit(), if it has one. A signal handler may remove that file.
  const std::string& temporary() const { return temporary_; }
  /// Puts the file in its place once the disk has it, and has the disk take the folder too.
  void commit();

 private:
  [[noreturn]] void fail(const char* what, int error) const;

  std::filesystem::path path_, target_, folder_;
  std::string temporary_;
  bool has_name_ = false;
  int fd_ = -1;
};

/// Makes `bytes` the contents of `path` by a private Replacement, and throws as that does.
void replace_file(const std::filesystem::path& path, std::span<const std::byte> bytes);

/// What `path` leads to through symbolic links, whether it is there or not. The links must not go round in a circle.
std::filesystem::path followed(std::filesystem::path path);

}  // namespace mmrec::models
