// Read access to files that nobody vouches for: regular files only, bounded positioned reads, errors instead of
// signals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mmrec::models {

/// An open regular file. Movable; reads are thread-safe.
class File {
 public:
  /// Opens without ever blocking. Throws std::system_error with errno if that fails and std::runtime_error if it is not
  /// a regular file (a folder, a FIFO, a device).
  static File open(const std::filesystem::path& path);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  const std::filesystem::path& path() const { return path_; }
  /// Bytes when it was opened.
  std::uint64_t size() const { return size_; }
  /// Fills `to` from byte `offset`. Throws std::system_error with errno, or std::runtime_error if the file ends before.
  void read(std::uint64_t offset, std::span<std::byte> to) const;

 private:
  File(std::filesystem::path path, int fd, std::uint64_t size) : path_(std::move(path)), fd_(fd), size_(size) {}

  std::filesystem::path path_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
};

/// The whole of a small text file. Throws as File does, and std::runtime_error beyond `max_bytes` (checked before
/// anything is allocated) or if the file is empty.
std::string read_text(const std::filesystem::path& path, std::uint64_t max_bytes);

/// At most `most` names of what is in a folder, in no order; none if it cannot be read, or those before a fault. Throws
/// std::bad_alloc. std::filesystem::directory_iterator cannot: libstdc++ allocates where it must not throw, and ends
/// the process.
std::vector<std::string> names_in(const std::filesystem::path& folder, std::size_t most = ~std::size_t{0});

/// What a file that begins with `start` seems to be instead, as the end of a message ("; this looks like ..."), or
/// nothing: a Git LFS pointer, a web page, a PyTorch checkpoint.
std::string content_hint(std::string_view start);

/// Throws std::runtime_error, with such a hint, unless `text` begins like a JSON object.
void require_json_object(std::string_view text, const std::string& name);

}  // namespace mmrec::models
