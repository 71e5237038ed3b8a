// --sandbox: what is refused is refused, in every thread, and the programs do what they do without it. Where the kernel
// has no Landlock or the build cannot start with one thread, the programs say so and the rest is left out.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "apps/sandbox.h"
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

namespace fs = std::filesystem;

class Sandboxed : public testing::Test {
 protected:
  Sandboxed() {
    std::string name = (fs::temp_directory_path() / "mmrec-sandbox-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    folder_ = name;
    // The leak sanitizer looks from a process of its own, which a sandbox refuses.
    const char* const given = std::getenv("ASAN_OPTIONS");
    ::setenv("ASAN_OPTIONS", ((given != nullptr ? given : "") + std::string(":detect_leaks=0")).c_str(), 1);
  }
  void TearDown() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  void SetUp() override {
    const Outcome outcome = run(generate_on_tiny({"--sandbox", "-p", "x", "-n", "1"}));
    if (outcome.code != 0) {
      expect_refused(outcome, 1, {"--sandbox: "});
      GTEST_SKIP() << outcome.err;
    }
  }
  std::string file(const std::string& name) const { return folder_ / name; }
  void write(const std::string& name, const std::string& text) const { std::ofstream(folder_ / name) << text; }
  std::string read(const std::string& name) const {
    std::ifstream in(folder_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  /// The same output with and without, and something on it.
  void expect_same(const Words& arguments, const std::string& input = {}) const {
    const Outcome plain = run(arguments, input);
    const Outcome sandboxed = run(words(arguments, {"--sandbox"}), input);
    EXPECT_EQ(plain.code, 0) << joined(arguments) << plain.err;
    EXPECT_EQ(sandboxed.code, 0) << joined(arguments) << sandboxed.err;
    EXPECT_EQ(sandboxed.out, plain.out) << joined(arguments);
    EXPECT_EQ(sandboxed.err, plain.err) << joined(arguments);
  }

  fs::path folder_;
};

/// Runs in a process of its own: the names of what went through, by exit code 1 on stderr.
int leaks(const fs::path& folder) {
  int count = 0;
  const auto refused = [&](const char* what, long result, int error = EPERM) {
    if (result == -1 && errno == error) return;
    (void)!::dprintf(STDERR_FILENO, "%s: result %ld, errno %d\n", what, result, errno);
    ++count;
  };
  const auto allowed = [&](const char* what, bool is_so) {
    if (is_so) return;
    (void)!::dprintf(STDERR_FILENO, "%s is refused (errno %d)\n", what, errno);
    ++count;
  };
  const std::string outside = folder / "outside";
  const std::string other = folder / "other";
  const std::string inside = folder / "out/written";
  char* const none[] = {nullptr};
  const auto try_all = [&] {
    refused("socket", ::socket(AF_INET, SOCK_STREAM, 0));
    refused("socket of the host", ::socket(AF_UNIX, SOCK_STREAM, 0));
    refused("fork", ::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
    refused("namespaces", ::syscall(SYS_clone, CLONE_NEWUSER | CLONE_THREAD | CLONE_VM | CLONE_SIGHAND, 0, 0, 0, 0));
    refused("clone3", ::syscall(SYS_clone3, nullptr, 0), ENOSYS);
    refused("unshare", ::unshare(CLONE_NEWUSER));
    refused("execve", ::execve("/bin/true", none, none));
    refused("execveat", ::syscall(SYS_execveat, AT_FDCWD, "/bin/true", none, none, 0));
    refused("ptrace", ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr));
    for (const auto& [name, number] :
         std::initializer_list<std::pair<const char*, long>>{{"process_vm_readv", SYS_process_vm_readv},
                                                             {"process_vm_writev", SYS_process_vm_writev},
                                                             {"mount", SYS_mount},
                                                             {"umount2", SYS_umount2},
                                                             {"bpf", SYS_bpf},
                                                             {"keyctl", SYS_keyctl},
                                                             {"add_key", SYS_add_key},
                                                             {"perf_event_open", SYS_perf_event_open},
                                                             {"init_module", SYS_init_module},
                                                             {"finit_module", SYS_finit_module},
                                                             {"setuid", SYS_setuid},
                                                             {"setgid", SYS_setgid},
                                                             {"setresuid", SYS_setresuid},
                                                             {"chroot", SYS_chroot},
                                                             {"pivot_root", SYS_pivot_root},
                                                             {"userfaultfd", SYS_userfaultfd},
                                                             {"shmget", SYS_shmget},
                                                             {"mknodat", SYS_mknodat},
                                                             {"symlinkat", SYS_symlinkat},
                                                             {"fchmodat", SYS_fchmodat},
                                                             {"fchownat", SYS_fchownat},
                                                             {"truncate", SYS_truncate},
                                                             {"setxattr", SYS_setxattr},
                                                             {"reboot", SYS_reboot},
                                                             {"setns", SYS_setns}}) {
      refused(name, ::syscall(number, 0, 0, 0, 0, 0));
    }
    refused("io_uring_setup", ::syscall(SYS_io_uring_setup, 1, nullptr), ENOSYS);
    refused("pidfd_getfd", ::syscall(438, 0, 0, 0), ENOSYS);
    refused("openat2", ::syscall(437, AT_FDCWD, outside.c_str(), nullptr, 0), ENOSYS);
    refused("kill of the parent", ::kill(::getppid(), 0));
    refused("a limit of the parent", ::syscall(SYS_prlimit64, ::getppid(), 0, nullptr, nullptr));
    refused("typing into a terminal", ::ioctl(STDIN_FILENO, TIOCSTI, "x"));
    refused("cutting a file short", ::open(outside.c_str(), O_RDONLY | O_TRUNC));
  };
  const auto try_files = [&] {
    refused("reading outside", ::open(outside.c_str(), O_RDONLY), EACCES);
    refused("writing outside", ::open(outside.c_str(), O_WRONLY), EACCES);
    refused("making a file outside", ::open(other.c_str(), O_WRONLY | O_CREAT, 0600), EACCES);
    refused("making a folder", ::mkdir(other.c_str(), 0700), EACCES);
    refused("removing outside", ::unlink(outside.c_str()), EACCES);
    refused("renaming outside", ::rename(outside.c_str(), other.c_str()), EACCES);
    refused("writing an input", ::open((folder / "in").c_str(), O_WRONLY), EACCES);
    const int read = ::open((folder / "in").c_str(), O_RDONLY);
    allowed("reading an input", read >= 0);
    const int written = ::open(inside.c_str(), O_WRONLY | O_CREAT, 0600);
    allowed("writing an output", written >= 0 && ::write(written, "x", 1) == 1);
    allowed("renaming an output", ::rename(inside.c_str(), (folder / "out/placed").c_str()) == 0);
  };
  apps::SandboxFiles files;
  files.readable = {folder / "in"};
  files.outputs = {folder / "out/placed"};
  apps::restrict_files(files);
  std::atomic<bool> is_restricted{false};
  std::thread before([&] {  // starts before calls are restricted
    is_restricted.wait(false);
    try_all();
    try_files();
  });
  apps::restrict_calls();
  try_all();
  try_files();
  is_restricted = true;
  is_restricted.notify_all();
  before.join();
  std::thread([&] { try_all(); }).join();
  return count;
}

/// What `work` returns in a process of its own.
template <class Work>
void expect_none_in_a_child(const Work& work) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int count = 99;
    try {
      count = work();
    } catch (const std::exception& error) {
      (void)!::dprintf(STDERR_FILENO, "%s\n", error.what());
    }
    ::_exit(count);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(Sandboxed, ADriverReadsAllAndNamesItsThreads) {
  write("outside", "untouched");
  expect_none_in_a_child([&] {
    apps::SandboxFiles files;
    files.gpu = true;
    apps::restrict_files(files);
    int failed = 0;
    std::thread([&] {  // as the driver does
      const std::string comm = "/proc/self/task/" + std::to_string(::gettid()) + "/comm";
      const int fd = ::open(comm.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
      failed += fd >= 0 && ::write(fd, "driver", 6) == 6 ? 0 : 1;
    })
        .join();
    failed += ::open(file("outside").c_str(), O_RDONLY) >= 0 ? 0 : 2;
    failed += ::open(file("outside").c_str(), O_WRONLY) >= 0 ? 4 : 0;
    failed += ::open("/proc/self/coredump_filter", O_WRONLY) >= 0 ? 8 : 0;
    failed += ::open(file("other").c_str(), O_WRONLY | O_CREAT, 0600) >= 0 ? 16 : 0;
    return failed;
  });
  EXPECT_EQ(read("outside"), "untouched");
}

TEST_F(Sandboxed, WhatIsNotNeededIsRefusedInEveryThread) {
  write("outside", "untouched");
  write("in", "read");
  fs::create_directory(file("out"));
  expect_none_in_a_child([&] { return leaks(folder_); });
  EXPECT_EQ(read("outside"), "untouched");
  EXPECT_FALSE(fs::exists(file("other")));
}

TEST_F(Sandboxed, TextIsTheSame) {
  const Words greedy = {"-q", "-s", "3", "-n", "12"};
  expect_same(generate_on_tiny(words(greedy, {"-p", "Alice was", "-t", "3"})));
  expect_same(generate_on_tiny(greedy), "from a pipe");
  expect_same(generate_on_tiny(words(greedy, {"--lines"})), "one\ntwo\n");
  expect_same(generate_on_tiny(words(greedy, {"--interactive"})), "one\n/undo\ntwo\n/quit\n");
  write("prompt", "Alice was");
  expect_same(
      generate_on_tiny(words(greedy, {"-f", file("prompt"), "-o", file("text"), "--state-out", file("state")})));
  EXPECT_FALSE(read("text").empty());
  expect_same(generate_on_tiny(words(greedy, {"--state-in", file("state"), "-p", " and", "--num-samples", "3"})));
  expect_same(generate_on_tiny(words(greedy, {"-p", "Alice was", "--prefix-cache", file("cache")})));
  EXPECT_EQ(std::distance(fs::directory_iterator(file("cache")), {}), 1);
}

TEST_F(Sandboxed, ScoresAreTheSame) {
  write("a", "hello world");
  write("b", "{\"text\": \"one\"}\n{\"text\": \"two three\"}\n");
  expect_same(ppl_on_tiny({"-q", "--per-token", file("a"), "-"}), "more text");
  expect_same(ppl_on_tiny({"-q", "--format", "csv", "--per-doc", "--split-by", "jsonl", file("b"), "-o", file("csv"),
                           "--html", file("html"), "--plot", file("svg"), "--save-logprobs", file("all")}));
  EXPECT_FALSE(read("csv").empty() || read("html").empty() || read("svg").empty() || read("all").empty());
  const Words again = ppl_on_tiny(
      {"-q", "--format", "jsonl", "--split-by", "jsonl", file("b"), "-o", file("r.jsonl"), "--resume", "--sandbox"});
  EXPECT_EQ(run(again).code, 0);
  EXPECT_EQ(run(again).code, 0);
}

TEST_F(Sandboxed, LinksToFilesElsewhereAreRead) {
  fs::create_directory(file("model"));
  for (const auto& entry : fs::directory_iterator(kTiny)) {
    fs::create_symlink(fs::absolute(entry.path()), folder_ / "model" / entry.path().filename());
  }
  expect_same({kGenerate, "-m", file("model"), "--device", "cpu", "-q", "-s", "1", "-p", "x", "-n", "3"});
}

}  // namespace
}  // namespace mmrec::test
