// --sandbox: what is refused is refused, in every thread, and the programs do what they do without it. Where the kernel
// has no Landlock or the build cannot start with one thread, the programs say so and the rest is left out.
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "apps/common/sandbox.h"
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

namespace fs = std::filesystem;

class Sandboxed : public testing::Test {
 protected:
  Sandboxed() {
    // The leak sanitizer looks from a process of its own, which a sandbox refuses.
    const char* const given = std::getenv("ASAN_OPTIONS");
    ::setenv("ASAN_OPTIONS", ((given != nullptr ? given : "") + std::string(":detect_leaks=0")).c_str(), 1);
  }
  void SetUp() override {
    const Outcome outcome = generate({"--sandbox", "-p", "x", "-n", "1"});
    if (outcome.code != 0) {
      expect_refused(outcome, 1, {"--sandbox: "});
      GTEST_SKIP() << outcome.err;
    }
  }
  std::string file(const std::string& name) const { return folder_ / name; }
  void write(const std::string& name, const std::string& text) const { write_file(folder_ / name, text); }
  std::string read(const std::string& name) const { return read_file(folder_ / name); }
  /// The same output with and without, and something on it.
  void expect_same(const Words& arguments, const std::string& input = {}) const {
    const Outcome plain = run(arguments, input);
    const Outcome sandboxed = run(words(arguments, {"--sandbox"}), input);
    EXPECT_EQ(plain.code, 0) << joined(arguments) << plain.err;
    EXPECT_EQ(sandboxed.code, 0) << joined(arguments) << sandboxed.err;
    EXPECT_EQ(sandboxed.out, plain.out) << joined(arguments);
    EXPECT_EQ(sandboxed.err, plain.err) << joined(arguments);
  }

  TempFolder folder_;
};

long landlock_version() { return ::syscall(SYS_landlock_create_ruleset, nullptr, 0, 1); }

/// Counts what went through although it must not, and what is refused although it is needed, and names it on stderr.
class Tally {
 public:
  void refused(std::string_view what, long result, int error = EPERM) {
    if (result == -1 && errno == error) return;
    note(what, " is not refused", result);
  }
  void refused_to_open(int flags, std::initializer_list<fs::path> paths) {
    for (const fs::path& path : paths) {
      refused((flags == O_RDONLY ? "reading " : "writing ") + path.string(), ::open(path.c_str(), flags), EACCES);
    }
  }
  void allowed(std::string_view what, bool is_so) {
    if (!is_so) note(what, " is refused", -1);
  }
  int count() const { return count_; }

 private:
  void note(std::string_view what, std::string_view how, long result) {
    const std::string text = std::string(what) + std::string(how) + " (result " + std::to_string(result) + ", errno " +
                             std::to_string(errno) + ")\n";
    (void)!::write(STDERR_FILENO, text.data(), text.size());
    ++count_;
  }
  int count_ = 0;
};

// clang-format off
constexpr long kRefused[] = {
    SYS_process_vm_readv, SYS_process_vm_writev, SYS_mount, SYS_umount2, SYS_bpf, SYS_keyctl, SYS_add_key,
    SYS_perf_event_open, SYS_init_module, SYS_finit_module, SYS_setuid, SYS_setgid, SYS_setresuid, SYS_chroot,
    SYS_pivot_root, SYS_userfaultfd, SYS_shmget, SYS_shmat, SYS_mknodat, SYS_symlinkat, SYS_fchmod, SYS_fchmodat,
    SYS_fchown, SYS_fchownat, SYS_utimensat, SYS_truncate, SYS_setxattr, SYS_fsetxattr, SYS_fremovexattr, SYS_reboot,
    SYS_setns, SYS_kcmp, SYS_personality, SYS_setpriority, SYS_ioprio_set, SYS_get_robust_list, SYS_flock,
    SYS_inotify_init1, SYS_fanotify_init, SYS_quotactl, SYS_name_to_handle_at, SYS_open_by_handle_at, SYS_setsid,
    SYS_setpgid, SYS_msgget, SYS_semget, SYS_mq_open, SYS_capset, SYS_seccomp, SYS_timer_create, SYS_rt_sigqueueinfo,
};
// clang-format on
// io_uring_setup, open_tree, fsopen, pidfd_open, clone3, openat2, pidfd_getfd, process_madvise, mount_setattr,
// memfd_secret, fchmodat2, setxattrat, file_setattr
constexpr long kHidden[] = {425, 428, 430, 434, 435, 437, 438, 440, 442, 447, 452, 463, 469};
constexpr unsigned long kSetFlags = 0x40086602;       // FS_IOC_SETFLAGS
constexpr unsigned long kSetAttributes = 0x401C5820;  // FS_IOC_FSSETXATTR
constexpr unsigned long kTiocLinux = 0x541C;
constexpr unsigned long kRefusedIoctls[] = {TIOCSTI,   kTiocLinux, TIOCSPGRP, TIOCSCTTY, TIOCSWINSZ,    FIOASYNC,
                                            FIOSETOWN, SIOCSPGRP,  FIONBIO,   kSetFlags, kSetAttributes};

/// What reaches other processes, or changes what is behind a descriptor that may only be read.
void try_calls(Tally& tally, int input, const fs::path& folder) {
  const pid_t parent = ::getppid();
  const std::string outside = folder / "outside";
  char* const none[] = {nullptr};
  cpu_set_t processors;
  CPU_ZERO(&processors);
  CPU_SET(0, &processors);
  const sched_param usual = {};
  const f_owner_ex owner = {F_OWNER_PID, parent};
  const struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 0, .l_pid = 0};
  int number = parent;
  // Of no descriptor or process, so that nothing happens where it is not refused.
  for (const long call : kRefused) tally.refused("call " + std::to_string(call), ::syscall(call, -1, 0, 0, 0, 0));
  for (const long call : kHidden)
    tally.refused("call " + std::to_string(call), ::syscall(call, -1, 0, 0, 0, 0), ENOSYS);
  tally.refused("socket", ::socket(AF_INET, SOCK_STREAM, 0));
  tally.refused("socket of the host", ::socket(AF_UNIX, SOCK_STREAM, 0));
  tally.refused("fork", ::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
  tally.refused("namespaces",
                ::syscall(SYS_clone, CLONE_NEWUSER | CLONE_THREAD | CLONE_VM | CLONE_SIGHAND, 0, 0, 0, 0));
  tally.refused("unshare", ::unshare(CLONE_NEWUSER));
  tally.refused("execve", ::execve("/bin/true", none, none));
  tally.refused("execveat", ::syscall(SYS_execveat, AT_FDCWD, "/bin/true", none, none, 0));
  tally.refused("ptrace", ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr));
  tally.refused("kill of the parent", ::kill(parent, 0));
  tally.refused("kill of the group", ::kill(0, 0));
  tally.refused("kill of all", ::kill(-1, 0));
  tally.refused("tgkill of the parent", ::syscall(SYS_tgkill, parent, parent, 0));
  tally.refused("a limit of the parent", ::syscall(SYS_prlimit64, parent, 0, nullptr, nullptr));
  tally.refused("processors of the parent", ::sched_setaffinity(parent, sizeof processors, &processors));
  tally.refused("scheduler of the parent", ::sched_setscheduler(parent, SCHED_BATCH, &usual));
  tally.refused("scheduler's parameters of the parent", ::sched_setparam(parent, &usual));
  tally.refused("undumpable", ::prctl(PR_SET_DUMPABLE, 0));
  tally.refused("a program that runs as this user",
                ::open((folder / "out/program").c_str(), O_WRONLY | O_CREAT, S_ISUID | 0755));
  tally.refused("cutting a file short", ::open(outside.c_str(), O_RDONLY | O_TRUNC));
  tally.refused("F_SETOWN", ::fcntl(input, F_SETOWN, parent));
  tally.refused("F_SETOWN_EX", ::fcntl(input, F_SETOWN_EX, &owner));
  tally.refused("F_SETSIG", ::fcntl(input, F_SETSIG, SIGKILL));
  tally.refused("O_ASYNC", ::fcntl(input, F_SETFL, O_ASYNC));
  tally.refused("F_NOTIFY", ::fcntl(input, F_NOTIFY, 0));
  tally.refused("F_SETLEASE", ::fcntl(input, F_SETLEASE, F_RDLCK));
  tally.refused("F_SETLK", ::fcntl(input, F_SETLK, &lock));
  for (const unsigned long request : kRefusedIoctls) {
    tally.refused("ioctl " + std::to_string(request), ::ioctl(input, request, &number));
  }
  tally.allowed("asking for flags", ::fcntl(input, F_GETFL) >= 0);
  tally.allowed("not to wait", ::fcntl(input, F_SETFL, O_NONBLOCK) == 0);
  tally.allowed("asking what waits to be read", ::ioctl(input, FIONREAD, &number) == 0);
  tally.allowed("own processors", ::sched_setaffinity(0, sizeof processors, &processors) == 0);
}

void try_files(Tally& tally, int input, const fs::path& folder) {
  const auto opened = [](const fs::path& path, int flags) { return ::open(path.c_str(), flags | O_CLOEXEC, 0600); };
  const fs::path parent = "/proc/" + std::to_string(::getppid());
  tally.refused_to_open(
      O_RDONLY, {folder / "outside", folder / "out/other", folder / "model/x", folder / "model/notes", "/etc/passwd",
                 "/proc/self/root/etc/passwd", "/proc/kmsg", "/proc/1/status", parent / "environ", parent / "maps",
                 parent / "mem", parent / "cmdline", "/sys/kernel"});
  tally.refused_to_open(O_WRONLY, {folder / "outside", folder / "in", folder / "model/config.json",
                                   "/proc/self/coredump_filter", "/proc/self/mem", "/dev/full"});
  const std::string outside = folder / "outside";
  const std::string other = folder / "other";
  const std::string inside = folder / "out/written";
  tally.refused("making a file outside", opened(other, O_WRONLY | O_CREAT), EACCES);
  tally.refused("making a folder", ::mkdir(other.c_str(), 0700), EACCES);
  tally.refused("removing outside", ::unlink(outside.c_str()), EACCES);
  tally.refused("renaming outside", ::rename(outside.c_str(), other.c_str()), EACCES);
  tally.refused("another name for an input",
                ::linkat(AT_FDCWD, (folder / "in").c_str(), AT_FDCWD, (folder / "out/in").c_str(), 0), EXDEV);
  tally.refused("another name for an open input",
                ::linkat(AT_FDCWD, ("/proc/self/fd/" + std::to_string(input)).c_str(), AT_FDCWD,
                         (folder / "out/in").c_str(), AT_SYMLINK_FOLLOW),
                EXDEV);
  tally.allowed("reading an input", opened(folder / "in", O_RDONLY) >= 0);
  tally.allowed("reading a file of the model", opened(folder / "model/config.json", O_RDONLY) >= 0);
  tally.allowed("reading a link in the model", opened(folder / "model/tokenizer.model", O_RDONLY) >= 0);
  tally.allowed("own memory's size", opened("/proc/self/statm", O_RDONLY) >= 0);
  tally.allowed("the machine's memory", opened("/proc/meminfo", O_RDONLY) >= 0);
  tally.allowed("processors", opened("/sys/devices/system/cpu/online", O_RDONLY) >= 0);
  const fs::path locales = "/usr/lib/locale";
  tally.allowed("locales", !fs::exists(locales) || opened(locales, O_RDONLY) >= 0);
  const int written = opened(inside, O_WRONLY | O_CREAT);
  tally.allowed("writing an output", written >= 0 && ::write(written, "x", 1) == 1);
  tally.allowed("renaming an output", ::rename(inside.c_str(), (folder / "out/placed").c_str()) == 0);
}

void try_capabilities(Tally& tally) {
  std::ifstream status("/proc/thread-self/status");
  for (std::string line; std::getline(status, line);) {
    // Who is not root cannot take the bounding set away, and has no use for it.
    if (!line.starts_with("Cap") || (line.starts_with("CapBnd") && ::getuid() != 0)) continue;
    tally.allowed(line, line.find_first_not_of('0', line.find('\t') + 1) == std::string::npos);
  }
}

/// Runs in a process of its own.
int leaks(const fs::path& folder) {
  Tally tally;
  const int inherited = ::open((folder / "outside").c_str(), O_RDWR);
  const std::vector<apps::NamedFile> files = {{{}, folder / "in", apps::Names::kInput},
                                              {{}, folder / "out/placed", apps::Names::kOutput}};
  apps::restrict_files(files, folder / "model", false);
  tally.refused("an inherited descriptor", ::write(inherited, "x", 1), EBADF);
  const int input = ::open((folder / "in").c_str(), O_RDONLY | O_CLOEXEC);
  const auto try_all = [&] {
    try_calls(tally, input, folder);
    try_files(tally, input, folder);
    try_capabilities(tally);
  };
  std::atomic<bool> is_restricted{false};
  std::thread before([&] {  // starts before calls are restricted
    is_restricted.wait(false);
    try_all();
  });
  apps::restrict_calls();
  try_all();
  is_restricted = true;
  is_restricted.notify_all();
  before.join();
  std::thread(try_all).join();
  return tally.count();
}

/// `work` returns 0 in a process of its own.
template <class Work>
void expect_none_in_a_child(const Work& work) {
  GTEST_FLAG_SET(death_test_style, "fast");
  EXPECT_EXIT(std::_Exit(work()), testing::ExitedWithCode(0), "");
}

TEST_F(Sandboxed, ADriverReadsAllButProcessesAndNamesItsThreads) {
  write("outside", "untouched");
  expect_none_in_a_child([&] {
    Tally tally;
    apps::restrict_files({}, {}, true);
    std::thread([&] {  // as the driver does
      const std::string comm = "/proc/self/task/" + std::to_string(::gettid()) + "/comm";
      const int fd = ::open(comm.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
      tally.allowed("a thread's name", fd >= 0 && ::write(fd, "driver", 6) == 6);
    })
        .join();
    const int read = ::open(file("outside").c_str(), O_RDONLY);
    tally.allowed("reading all files", read >= 0);
    tally.allowed("reading devices' numbers", ::open("/proc/devices", O_RDONLY) >= 0);
    const std::string parent = "/proc/" + std::to_string(::getppid());
    tally.refused_to_open(O_RDONLY, {parent + "/environ", parent + "/cmdline", "/dev/full"});
    tally.refused_to_open(O_WRONLY, {file("outside"), "/proc/self/coredump_filter", "/dev/full"});
    tally.refused("making a file", ::open(file("other").c_str(), O_WRONLY | O_CREAT, 0600), EACCES);
    if (landlock_version() >= 4) {  // before calls are restricted, too
      const sockaddr_in port = {.sin_family = AF_INET, .sin_port = 1, .sin_addr = {}, .sin_zero = {}};
      const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
      tally.refused("TCP", ::connect(fd, reinterpret_cast<const sockaddr*>(&port), sizeof port), EACCES);
    }
    if (landlock_version() >= 6) tally.refused("a signal to the parent", ::kill(::getppid(), 0));
    apps::restrict_start();
    int number = 0;
    const sockaddr_un local = {.sun_family = AF_UNIX, .sun_path = "/run/none"};
    const int own = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
    tally.allowed("a socket of its own", own >= 0 && ::bind(own, reinterpret_cast<const sockaddr*>(&local), 2) == 0);
    tally.refused("a socket of others", ::connect(own, reinterpret_cast<const sockaddr*>(&local), sizeof local));
    tally.refused("fchmod", ::fchmod(-1, 0));
    tally.refused("F_SETOWN", ::fcntl(read, F_SETOWN, ::getppid()));
    tally.refused("TIOCSTI", ::ioctl(read, TIOCSTI, &number));
    apps::restrict_calls(true);
    tally.refused("a driver's ioctl at a file", ::ioctl(read, 0xC00846C8UL, &number), ENOTTY);
    tally.refused("FS_IOC_SETFLAGS", ::ioctl(read, kSetFlags, &number));
    tally.refused("TIOCSTI", ::ioctl(read, TIOCSTI, &number));
    return tally.count();
  });
  EXPECT_EQ(read("outside"), "untouched");
}

TEST_F(Sandboxed, WhatIsNotNeededIsRefusedInEveryThread) {
  write("outside", "untouched");
  write("in", "read");
  for (const char* name : {"out", "model"}) fs::create_directory(file(name));
  write("out/other", "of others");
  write("model/config.json", "{}");
  write("model/notes", "no file of a model");
  fs::create_symlink(file("outside"), file("model/x"));
  fs::create_symlink("config.json", file("model/tokenizer.model"));
  expect_none_in_a_child([&] { return leaks(folder_.path()); });
  EXPECT_EQ(read("outside"), "untouched");
  EXPECT_FALSE(fs::exists(file("other")));
  EXPECT_EQ(read("out/other"), "of others");
}

TEST_F(Sandboxed, TextIsTheSame) {
  const Words greedy = {"-q", "-s", "3", "-n", "12"};
  expect_same(generate_on_tiny(words(greedy, {"-p", "Alice was", "-t", "3"})));
  expect_same(generate_on_tiny(greedy), "from a pipe");
  expect_same(generate_on_tiny(words(greedy, {"--lines"})), "one\ntwo\n");
  expect_same(generate_on_tiny(words(greedy, {"--interactive"})), "one\n/undo\ntwo\n/quit\n");
  expect_same(generate_on_tiny(words(greedy, {"--interactive", "--state-out", file("state")})),
              "one\n/save " + file("turn") + "\ntwo\n/load " + file("turn") + "\nthree\n/quit\n");
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

TEST_F(Sandboxed, AModelInACacheOfDownloadsIsRead) {
  const fs::path snapshot = folder_ / "models--x--y/snapshots/0123";
  fs::create_directories(snapshot);
  fs::create_directory(folder_ / "models--x--y/blobs");
  for (const auto& entry : fs::directory_iterator(kTiny)) {
    const fs::path name = entry.path().filename();
    fs::copy_file(entry.path(), folder_ / "models--x--y/blobs" / name);
    fs::create_symlink("../../blobs" / name, snapshot / name);
  }
  expect_same({kGenerate, "-m", snapshot, "--device", "cpu", "-q", "-s", "1", "-p", "x", "-n", "3"});
}

TEST_F(Sandboxed, ARuleThatCannotBeMadeEndsTheProgram) {
  fs::copy(kTiny, file("model"));
  const Words words = {kPpl, "-m", file("model"), "--device", "cpu", "-q", "--sandbox"};
  write("in", "text");
  write("secret", "{}");
  fs::create_symlink(file("secret"), file("model/tokenizer_config.json"));
  expect_refused(run(test::words(words, {file("in")})), 1,
                 {"--sandbox: ", "tokenizer_config.json", "link out of the model folder"});
  fs::remove(file("model/tokenizer_config.json"));
  EXPECT_EQ(run(test::words(words, {file("in")})).code, 0);

  // Root's capabilities, which would let it in, are gone before.
  fs::create_directory(file("locked"));
  write("locked/in", "text");
  fs::permissions(file("locked"), fs::perms::none);
  expect_refused(run(test::words(words, {file("locked/in")})), 1, {"--sandbox: ", "locked/in", "Permission denied"});
  fs::permissions(file("locked"), fs::perms::owner_read | fs::perms::owner_exec);
  if (::getuid() == 0) {
    const Words saving = {"--sandbox", "-p", "x", "-n", "1", "--state-out", file("locked/state")};
    expect_refused(generate(saving), 5, {"locked: cannot write (Permission denied)"});
  }
  fs::permissions(file("locked"), fs::perms::owner_all);
}

TEST_F(Sandboxed, APipeOfTheShellIsRead) {
  const std::string command = joined(ppl_on_tiny({"-q", "--sandbox"})) + "<(echo hello world)";
  EXPECT_EQ(run({"/bin/bash", "-c", command}).code, 0);
}

}  // namespace
}  // namespace mmrec::test
