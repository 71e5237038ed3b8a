// Files are read and replaced whole, or the system's reason is told, whichever of its calls fails: the calls are
// interposed here, each fails when a test says so.
#include "models/files/file.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <string>

#include "models/files/model_files.h"
#include "models/files/replace_file.h"
#include "tests/support/model_folder.h"

namespace {

/// What the next calls of one name do instead: `times` of them, after `passed`, fail with `error`; 0 ends the file.
struct Fault {
  std::string_view call;
  int error = 0;
  int times = 0;
  int passed = 0;
};
thread_local Fault fault;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables): seen by C functions

bool fails(std::string_view call) {
  if (fault.times == 0 || fault.call != call || fault.passed-- > 0) return false;
  fault.passed = 0;
  --fault.times;
  errno = fault.error;
  return true;
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// NOLINTBEGIN(readability-inconsistent-declaration-parameter-name): the system's are reserved
extern "C" {

int fstat(int fd, struct stat* status) {
  static auto* const next = real<int(int, struct stat*)>("fstat");
  return fails("fstat") ? -1 : next(fd, status);
}
ssize_t pread(int fd, void* to, size_t size, off_t offset) {
  static auto* const next = real<ssize_t(int, void*, size_t, off_t)>("pread");
  if (fails("pread")) return fault.error == 0 ? 0 : -1;
  return next(fd, to, size, offset);
}
ssize_t pwrite(int fd, const void* from, size_t size, off_t offset) {
  static auto* const next = real<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  return fails("pwrite") ? -1 : next(fd, from, size, offset);
}
int fsync(int fd) {
  static auto* const next = real<int(int)>("fsync");
  return fails("fsync") ? -1 : next(fd);
}
int close(int fd) {
  static auto* const next = real<int(int)>("close");
  const bool is_failure = fails("close");
  const int error = errno;
  const int result = next(fd);
  if (is_failure) errno = error;
  return is_failure ? -1 : result;
}
int access(const char* path, int mode) {
  static auto* const next = real<int(const char*, int)>("access");
  return fails("access") ? -1 : next(path, mode);
}
int linkat(int from_fd, const char* from, int to_fd, const char* to, int flags) {
  static auto* const next = real<int(int, const char*, int, const char*, int)>("linkat");
  return fails("linkat") ? -1 : next(from_fd, from, to_fd, to, flags);
}
int rename(const char* from, const char* to) noexcept {
  static auto* const next = real<int(const char*, const char*)>("rename");
  return fails("rename") ? -1 : next(from, to);
}
DIR* opendir(const char* path) {
  static auto* const next = real<DIR*(const char*)>("opendir");
  return fails("opendir") ? nullptr : next(path);
}
int open(const char* path, int flags, ...) {
  static auto* const next = real<int(const char*, int, ...)>("open");
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return fails("open") ? -1 : next(path, flags, mode);
}
}
// NOLINTEND(readability-inconsistent-declaration-parameter-name)

namespace mmrec::models {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::expect_says;
using test::read_file;
using test::TempFolder;
using test::write_file;

/// The code of the std::system_error that `action` throws while `call` fails.
template <class Action>
std::error_code code_while(const Fault& as, std::string_view says, const Action& action) {
  fault = as;
  try {
    action();
  } catch (const std::system_error& error) {
    fault = {};
    expect_says(error.what(), {says});
    return error.code();
  }
  fault = {};
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

bool has_files_without_a_name(const fs::path& folder) {
  const int fd = ::open(folder.c_str(), O_TMPFILE | O_WRONLY, 0600);
  if (fd >= 0) ::close(fd);
  return fd >= 0;
}

std::size_t files_in(const fs::path& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

TEST(Files, ReadingTellsTheSystemsReason) {
  const TempFolder folder;
  const fs::path path = folder / "file";
  write_file(path, "12345678");
  const auto read = [&] { EXPECT_EQ(read_text(path, 100), "12345678"); };
  EXPECT_EQ(code_while({"open", EMFILE, 1}, "cannot open", read), std::errc::too_many_files_open);
  EXPECT_EQ(code_while({"fstat", EIO, 1}, "cannot read its status", read), std::errc::io_error);
  EXPECT_EQ(code_while({"pread", EIO, 1}, "cannot read", read), std::errc::io_error);
  fault = {"pread", EINTR, 3};
  read();
  fault = {"pread", 0, 1};
  expect_says(error_of(read), {"ends at byte 0 (expected 8 bytes): it became shorter while being read"});
  expect_says(error_of([&] { read_text(path, 7); }), {"file is too large (found 8 bytes, expected at most 7)"});
  write_file(path, "");
  expect_says(error_of([&] { read_text(path, 7); }), {"file is empty"});
}

TEST(Files, AFileMovesWithWhatItHolds) {
  const TempFolder folder;
  write_file(folder / "a", "first");
  write_file(folder / "b", "second one");
  File a = File::open(folder / "a");
  File b = File::open(folder / "b");
  a = std::move(b);
  std::array<char, 6> start{};
  a.read(0, std::as_writable_bytes(std::span(start)));
  EXPECT_EQ(std::string_view(start.data(), start.size()), "second");
  EXPECT_EQ(a.size(), 10U);
  EXPECT_EQ(a.path(), folder / "b");
}

TEST(Files, AHintSaysWhatAFileLooksLike) {
  EXPECT_EQ(content_hint(""), "");
  EXPECT_EQ(content_hint(" \n"), "");
  EXPECT_EQ(content_hint("{}"), "");
  expect_says(content_hint("version https://git-lfs.github.com/spec/v1"), {"Git LFS pointer"});
  expect_says(content_hint("PK\x03\x04"), {"PyTorch checkpoint"});
  expect_says(content_hint("\x80\x02"), {"PyTorch checkpoint"});
  expect_says(content_hint("\r\n <!DOCTYPE html>"), {"web page"});
}

TEST(Files, ReplacingLeavesOneFileWithTheNewBytes) {
  const TempFolder folder;
  const fs::path path = folder / "file";
  replace_file(path, bytes("one"));
  EXPECT_EQ(read_file(path), "one");
  fault = {"open", EOPNOTSUPP, 1};  // no files without a name there
  replace_file(path, bytes("two"));
  EXPECT_EQ(read_file(path), "two");
  fault = {"pwrite", EINTR, 2};
  replace_file(path, bytes("four"));
  fault = {"close", EINTR, 1};
  replace_file(path, bytes("five"));
  for (const int error : {EINVAL, EROFS}) {  // folders that cannot be synced
    fault = {"fsync", error, 1, 1};
    replace_file(path, bytes("six"));
    EXPECT_EQ(fault.times, 0);
  }
  EXPECT_EQ(read_file(path), "six");
  EXPECT_EQ(files_in(folder.path()), 1U);
}

TEST(Files, ReplacingThatFailsLeavesTheFileAsItWas) {
  const TempFolder folder;
  const fs::path path = folder / "file";
  write_file(path, "old");
  const auto replace = [&] { replace_file(path, bytes("new")); };
  EXPECT_EQ(code_while({"pwrite", ENOSPC, 1}, "cannot write", replace), std::errc::no_space_on_device);
  EXPECT_EQ(code_while({"fsync", EIO, 1}, "cannot write to the disk", replace), std::errc::io_error);
  EXPECT_EQ(code_while({"close", EIO, 1}, "cannot write", replace), std::errc::io_error);
  EXPECT_EQ(code_while({"rename", EACCES, 1}, "cannot replace", replace), std::errc::permission_denied);
  if (has_files_without_a_name(folder.path())) {
    EXPECT_EQ(code_while({"linkat", EACCES, 1}, "cannot create a file beside it", replace),
              std::errc::permission_denied);
  }
  const TempFolder other;
  EXPECT_EQ(code_while({}, "cannot create a file beside it", [&] { replace_file(other / "no/file", bytes("x")); }),
            std::errc::no_such_file_or_directory);
  EXPECT_EQ(code_while({"access", EACCES, 1}, "cannot write", replace), std::errc::permission_denied);
  std::string far = folder.path().string();  // whose name beside it is too long
  while (far.size() < PATH_MAX - 20) far += "/.";
  for (const auto& [place, code] :
       std::vector<std::pair<std::string, std::errc>>{{"", std::errc::no_such_file_or_directory},
                                                      {folder.path(), std::errc::is_a_directory},
                                                      {folder / std::string(256, 'x'), std::errc::filename_too_long},
                                                      {far + "/x", std::errc::filename_too_long}}) {
    EXPECT_EQ(code_while({}, "cannot", [&, to = place] { replace_file(to, bytes("x")); }), code);
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(files_in(folder.path()), 1U);
}

TEST(Files, ATemporaryFileWithANameIsRemoved) {
  const TempFolder folder;
  const fs::path path = folder / "file";
  struct ::rlimit limit {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlim_t was = std::exchange(limit.rlim_cur, 1);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::error_code code =
      code_while({"open", EOPNOTSUPP, 1}, "cannot write", [&] { replace_file(path, bytes("new")); });
  limit.rlim_cur = was;
  EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(code, std::errc::file_too_large);
  EXPECT_EQ(files_in(folder.path()), 0U);
}

TEST(Files, AFolderThatCannotBeSyncedIsSaidAfterTheFileIsInPlace) {
  const TempFolder folder;
  const fs::path path = folder / "file";
  const auto replace = [&] { replace_file(path, bytes("new")); };
  EXPECT_EQ(code_while({"open", EMFILE, 1, 1}, "cannot open its folder", replace), std::errc::too_many_files_open);
  EXPECT_EQ(code_while({"fsync", EIO, 1, 1}, "cannot write its folder to the disk", replace), std::errc::io_error);
  EXPECT_EQ(read_file(path), "new");
  fault = {"open", EACCES, 1, 1};  // a folder that may be written but not read
  replace_file(path, bytes("newer"));
  EXPECT_EQ(fault.times, 0);
  EXPECT_EQ(read_file(path), "newer");
}

TEST(Files, AReplacedFileKeepsItsMode) {
  const TempFolder folder;
  write_file(folder / "file", "old");
  fs::permissions(folder / "file", fs::perms{0640});
  fault = {"open", EOPNOTSUPP, 1};  // a name while it is written
  Replacement file(folder / "file", Replacement::Mode::kUsual);
  EXPECT_TRUE(fs::exists(file.temporary()));
  EXPECT_TRUE(fs::equivalent(file.temporary(), "/proc/self/fd/" + std::to_string(file.descriptor())));
  file.commit();
  EXPECT_EQ(fs::status(folder / "file").permissions(), fs::perms{0640});
  EXPECT_EQ(files_in(folder.path()), 1U);
}

TEST(Files, ACircleOfLinksIsFollowedToNoEnd) {
  const TempFolder folder;
  fs::create_symlink("b", folder / "a");
  fs::create_symlink("a", folder / "b");
  EXPECT_TRUE(fs::is_symlink(followed(folder / "a")));
  EXPECT_THROW(replace_file(folder / "a", bytes("x")), std::system_error);
  EXPECT_TRUE(fs::is_symlink(folder / "a"));
}

TEST(Files, AFolderIsListedAfterInterruptions) {
  const TempFolder folder;
  write_file(folder / "file", "x");
  fault = {"opendir", EINTR, 2};
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"file"});
  EXPECT_EQ(fault.times, 0);
  fault = {"opendir", ENOMEM, 1};
  EXPECT_THROW(names_in(folder.path()), std::bad_alloc);
}

TEST(Files, AModelFolderHasFilesOfTheseNamesAlone) {
  for (const char* name : {"config.json", "tokenizer.model", "model.safetensors", "part-2.safetensors"}) {
    EXPECT_TRUE(is_model_file(name)) << name;
  }
  for (const char* name : {"", "config.jso", "id_rsa", "safetensors", "model.safetensors.bak"}) {
    EXPECT_FALSE(is_model_file(name)) << name;
  }
}

TEST(Files, ReplacingGoesThroughALinkAndByABareName) {
  const TempFolder folder;
  write_file(folder / "file", "old");
  fs::create_symlink("file", folder / "link");
  replace_file(folder / "link", bytes("new"));
  EXPECT_EQ(read_file(folder / "file"), "new");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  fs::create_symlink("new", folder / "dangling");
  replace_file(folder / "dangling", bytes("made"));
  EXPECT_EQ(read_file(folder / "new"), "made");
  EXPECT_TRUE(fs::is_symlink(folder / "dangling"));
  expect_says(error_of([&] { replace_file("/dev/null", bytes("x")); }), {"expected a regular file to replace"});
  const fs::path here = fs::current_path();
  fs::current_path(folder.path());
  replace_file("bare", bytes("name"));
  fs::current_path(here);
  EXPECT_EQ(read_file(folder / "bare"), "name");
}

}  // namespace
}  // namespace mmrec::models
