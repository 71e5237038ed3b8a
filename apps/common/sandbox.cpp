// Landlock by its system calls, for which glibc has no functions; seccomp by libseccomp. What the kernel's headers of
// the oldest supported system lack has its number here.
#include "apps/common/sandbox.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/capability.h>
#include <linux/landlock.h>
#include <sched.h>
#include <seccomp.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

#include "mmrec/errors.h"
#include "models/files/file.h"
#include "models/files/model_files.h"

namespace mmrec::apps {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(std::string_view what, int error) {
  if (error == ENOMEM) throw std::bad_alloc();
  throw std::runtime_error(fmt::format("--sandbox: {} ({})", what, std::generic_category().message(error)));
}

/// Capabilities of root's too. Nothing that is executed gives them back.
void give_up_privileges() {
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) fail("this kernel cannot give up privileges", errno);
  for (int capability = 0; ::prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0;) ++capability;  // root alone can
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  const __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {};
  if (::syscall(SYS_capset, &header, none) != 0) fail("cannot drop capabilities", errno);
}

/// Descriptors that a shell or a supervisor left open lead anywhere. The program's own are closed on exec.
void close_inherited(std::span<const NamedFile> files) {
  for (const std::string& name : models::names_in("/proc/self/fd")) {
    const int fd = std::stoi(name);
    const bool is_named = std::ranges::any_of(files, [&](const NamedFile& file) {  // as a shell names those of <(...)
      return file.path == "/dev/fd/" + name || file.path == "/proc/self/fd/" + name;
    });
    if (fd > STDERR_FILENO && !is_named && ::fcntl(fd, F_GETFD) == 0) (void)::close(fd);
  }
}

// --- Files -----------------------------------------------------------------------------------------------------------

constexpr std::uint64_t kRefer = 1U << 13;     // LANDLOCK_ACCESS_FS_REFER, since version 2
constexpr std::uint64_t kTruncate = 1U << 14;  // LANDLOCK_ACCESS_FS_TRUNCATE, since version 3
constexpr std::uint64_t kIoctl = 1U << 15;     // LANDLOCK_ACCESS_FS_IOCTL_DEV, since version 5
constexpr std::uint64_t kAllOfVersion1 = kRefer - 1;
constexpr std::uint64_t kReadFile = LANDLOCK_ACCESS_FS_READ_FILE | kIoctl;  // whether a device is a terminal is asked
constexpr std::uint64_t kReadAll = kReadFile | LANDLOCK_ACCESS_FS_READ_DIR;
constexpr std::uint64_t kWriteFile = LANDLOCK_ACCESS_FS_WRITE_FILE | kTruncate;
constexpr std::uint64_t kReplace =
    kWriteFile | LANDLOCK_ACCESS_FS_MAKE_REG | LANDLOCK_ACCESS_FS_REMOVE_FILE | LANDLOCK_ACCESS_FS_READ_DIR;
constexpr std::uint64_t kOfAFile = LANDLOCK_ACCESS_FS_EXECUTE | kWriteFile | kReadFile;

/// landlock_ruleset_attr of version 6. An older kernel takes it where what it does not know is 0.
struct RulesetAttributes {
  std::uint64_t handled_access_fs, handled_access_net, scoped;
};
constexpr std::uint64_t kTcp = 3;                // LANDLOCK_ACCESS_NET_BIND_TCP and _CONNECT_TCP, since version 4
constexpr std::uint64_t kSocketsAndSignals = 3;  // LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET and _SIGNAL, since version 6

class Descriptor {
 public:
  explicit Descriptor(long fd) : fd_(static_cast<int>(fd)) {}
  ~Descriptor() {
    if (fd_ >= 0) (void)::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

class Rules {
 public:
  Rules() {
    const long version = ::syscall(SYS_landlock_create_ruleset, nullptr, 0, LANDLOCK_CREATE_RULESET_VERSION);
    if (version < 1) fail("this kernel does not restrict files. Needed: Landlock, in Linux since 5.13", errno);
    handled_ =
        kAllOfVersion1 | (version >= 2 ? kRefer : 0) | (version >= 3 ? kTruncate : 0) | (version >= 5 ? kIoctl : 0);
    const RulesetAttributes attributes = {.handled_access_fs = handled_,
                                          .handled_access_net = version >= 4 ? kTcp : 0,
                                          .scoped = version >= 6 ? kSocketsAndSignals : 0};
    rules_.emplace(::syscall(SYS_landlock_create_ruleset, &attributes, sizeof attributes, 0));
    if (rules_->get() < 0) fail("cannot restrict files", errno);
  }
  /// A path that does not exist needs no rule. A folder is an input only if it may be listed.
  void allow(const fs::path& path, std::uint64_t access, int flags = 0) {
    const Descriptor fd(::open(path.c_str(), O_PATH | O_CLOEXEC | flags));
    if (fd.get() < 0 && (errno == ENOENT || errno == ENOTDIR)) return;
    struct stat status = {};
    if (fd.get() < 0 || ::fstat(fd.get(), &status) != 0) fail(path.string() + ": cannot look at it", errno);
    if (!S_ISDIR(status.st_mode)) {
      access &= kOfAFile;
    } else if ((access & LANDLOCK_ACCESS_FS_READ_DIR) == 0) {
      return;
    }
    const landlock_path_beneath_attr rule = {.allowed_access = access & handled_, .parent_fd = fd.get()};
    if (::syscall(SYS_landlock_add_rule, rules_->get(), LANDLOCK_RULE_PATH_BENEATH, &rule, 0) == 0) return;
    // EBADFD: a pipe, or a socket, lies in no folder and needs no rule.
    if (errno != EBADFD) fail(path.string() + ": cannot be named to the kernel", errno);
  }
  /// The entries of a folder whose names are wanted, with all that is in them.
  template <class IsWanted>
  void allow_entries(const fs::path& folder, std::uint64_t access, IsWanted&& is_wanted) {
    for (const std::string& name : models::names_in(folder)) {
      if (is_wanted(name)) allow(folder / name, access);
    }
  }
  /// The rule is of the file that was looked at: a link that is put in its place later leads nowhere.
  void allow_model(const fs::path& folder) {
    for (const std::string& name : models::names_in(folder)) {
      if (!models::is_model_file(name)) continue;
      fs::path file;
      try {
        file = models::resolve_model_file(folder, name);
      } catch (const std::system_error& error) {
        if (error.code() == std::errc::no_such_file_or_directory) continue;  // a link to nothing
        throw;
      } catch (const std::runtime_error& error) {
        throw std::runtime_error(fmt::format("--sandbox: {}", error.what()));
      }
      allow(file, kReadFile, O_NOFOLLOW);
    }
  }
  void enforce() const {
    if (::syscall(SYS_landlock_restrict_self, rules_->get(), 0) != 0) fail("cannot restrict files", errno);
  }

 private:
  std::uint64_t handled_ = 0;
  std::optional<Descriptor> rules_;
};

/// Without capabilities root may not be able to write a file of another user's: said now, rather than when the result
/// is there.
void expect_writable(const fs::path& path, int how) {
  if (::access(path.c_str(), how) == 0 || errno == ENOENT) return;
  throw WriteError(fmt::format("{}: cannot write ({})", path.string(), std::generic_category().message(errno)));
}

/// An entry of /proc or /sys that the kernel forgets, as it does for want of memory, would come back without its rule.
void keep_open(const char* path) { (void)::open(path, O_PATH | O_CLOEXEC); }

/// A driver lists its GPUs, names its threads and opens libraries of its own.
void allow_gpu(Rules& rules) {
  rules.allow_entries("/", kReadAll, [](std::string_view name) { return name != "dev" && name != "proc"; });
  const auto is_process = [](std::string_view name) {
    return name.find_first_not_of("0123456789") == std::string_view::npos;
  };
  rules.allow_entries("/proc", kReadAll, [&](std::string_view name) { return !is_process(name); });
  rules.allow("/proc/self/task", kReadAll | kWriteFile);
  keep_open("/proc/self/task");
  rules.allow_entries("/dev", kReadAll | kWriteFile, [](std::string_view name) { return name.starts_with("nvidia"); });
  for (const char* path : {"/dev/zero", "/dev/random", "/dev/urandom"}) rules.allow(path, kReadFile);
}

// --- Calls -----------------------------------------------------------------------------------------------------------

constexpr int kFirstNewCall = 424;  // from here on libraries take ENOSYS for an older kernel
constexpr int kLastNewCall = 511;
constexpr std::uint32_t kNewNamespaces = 0x7E020000;
constexpr std::uint32_t kTiocLinux = 0x541C;  // TIOCLINUX

// What computing, threads, open files and a GPU's driver at work take. What changes a file's mode, owner, times or
// attributes is not among them: Landlock knows nothing of these.
// clang-format off
constexpr int kAllowed[] = {
    SYS_read, SYS_write, SYS_readv, SYS_writev, SYS_pread64, SYS_pwrite64, SYS_close, SYS_fstat, SYS_newfstatat,
    SYS_statx, SYS_lseek, SYS_dup, SYS_dup3, SYS_pipe2, SYS_ppoll, SYS_pselect6, SYS_eventfd2,
    SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait, SYS_fsync, SYS_fdatasync, SYS_ftruncate, SYS_fallocate,
    SYS_renameat, SYS_renameat2, SYS_linkat, SYS_unlinkat, SYS_mkdirat, SYS_readlinkat, SYS_getdents64,
    SYS_faccessat, SYS_faccessat2, SYS_statfs, SYS_fstatfs, SYS_fadvise64, SYS_getcwd, SYS_umask,
    // memory
    SYS_mmap, SYS_munmap, SYS_mprotect, SYS_mremap, SYS_madvise, SYS_brk, SYS_mlock, SYS_munlock, SYS_mincore,
    SYS_msync, SYS_membarrier, SYS_mbind, SYS_get_mempolicy, SYS_set_mempolicy, SYS_memfd_create,
    // threads and time
    SYS_futex, SYS_futex_waitv, SYS_set_robust_list, SYS_rseq, SYS_set_tid_address,
    SYS_sched_yield, SYS_sched_getaffinity, SYS_sched_getparam, SYS_sched_getscheduler,
    SYS_sched_get_priority_max, SYS_sched_get_priority_min, SYS_nanosleep,
    SYS_clock_nanosleep, SYS_clock_gettime, SYS_clock_getres, SYS_gettimeofday, SYS_times, SYS_exit, SYS_exit_group,
    SYS_restart_syscall, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_rt_sigpending,
    SYS_rt_sigtimedwait, SYS_sigaltstack,
    // what is asked of the system
    SYS_getpid, SYS_gettid, SYS_getppid, SYS_getuid, SYS_geteuid, SYS_getgid, SYS_getegid, SYS_getrusage, SYS_sysinfo,
    SYS_uname, SYS_getcpu, SYS_getrandom,
#if defined(__x86_64__)  // older names of the above
    SYS_stat, SYS_lstat, SYS_access, SYS_readlink, SYS_rename, SYS_unlink, SYS_rmdir, SYS_mkdir, SYS_dup2, SYS_pipe,
    SYS_poll, SYS_select, SYS_getdents, SYS_time, SYS_epoll_create, SYS_epoll_wait, SYS_arch_prctl,
#endif
};
// clang-format on

// A GPU's driver makes threads, sockets and child processes while it starts. It neither connects to others nor changes
// files.
// clang-format off
constexpr int kRefusedAtStart[] = {
    SYS_connect, SYS_sendto, SYS_execve, SYS_execveat, SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_kcmp,
    SYS_bpf, SYS_perf_event_open, SYS_userfaultfd, SYS_keyctl, SYS_add_key, SYS_request_key, SYS_unshare, SYS_setns,
    SYS_fchmod, SYS_fchmodat, SYS_fchown, SYS_fchownat, SYS_utimensat, SYS_truncate, SYS_setxattr, SYS_lsetxattr,
    SYS_fsetxattr, SYS_removexattr, SYS_lremovexattr, SYS_fremovexattr, SYS_setpriority, SYS_ioprio_set,
    425 /* io_uring_setup */, 452 /* fchmodat2 */, 463 /* setxattrat */, 466 /* removexattrat */, 469 /* file_setattr */,
#if defined(__x86_64__)  // older names of the above
    SYS_chmod, SYS_chown, SYS_lchown, SYS_utime, SYS_utimes, SYS_futimesat,
#endif
};
// clang-format on

/// Of a terminal: what it is, how wide, and the modes in which lines are edited. The last four are TCGETS2 to TCSETSF2,
/// as newer versions of glibc have them.
constexpr std::uint32_t kTerminalIoctls[] = {TCGETS,   TCSETS,     TCSETSW,    TCSETSF,    TIOCGWINSZ,
                                             FIONREAD, 0x802C542A, 0x402C542B, 0x402C542C, 0x402C542D};

/// `argument` of a call has `value` in the bits of `mask`. The kernel takes no more than the low half of these.
scmp_arg_cmp has(unsigned argument, std::uint32_t value, std::uint32_t mask = 0xFFFFFFFF) {
  return {.arg = argument, .op = SCMP_CMP_MASKED_EQ, .datum_a = mask, .datum_b = value};
}

constexpr std::uint32_t kRefuse = SCMP_ACT_ERRNO(EPERM);

class Filter {
 public:
  /// `otherwise`: what happens to a call that no rule is of.
  explicit Filter(std::uint32_t otherwise) : context_(::seccomp_init(otherwise), ::seccomp_release) {
    if (context_ == nullptr) throw std::bad_alloc();
    set(SCMP_FLTATR_ACT_BADARCH, SCMP_ACT_KILL_PROCESS);
    set(SCMP_FLTATR_CTL_TSYNC, 1);
    set(SCMP_FLTATR_CTL_OPTIMIZE, 2);  // a tree, not a list
  }
  void allow(int call, std::initializer_list<scmp_arg_cmp> conditions = {}) { add(SCMP_ACT_ALLOW, call, conditions); }
  void refuse(int call, std::initializer_list<scmp_arg_cmp> conditions = {}) { add(kRefuse, call, conditions); }
  void hide(int call) { add(SCMP_ACT_ERRNO(ENOSYS), call, {}); }
  void enforce() const {
    const int fault = ::seccomp_load(context_.get());
    if (fault != 0) fail("this kernel does not restrict calls. Needed: seccomp filters", -fault);
  }

 private:
  void set(scmp_filter_attr attribute, std::uint32_t value) {
    if (const int fault = ::seccomp_attr_set(context_.get(), attribute, value); fault != 0) {
      fail("cannot restrict calls", -fault);
    }
  }
  void add(std::uint32_t action, int call, std::initializer_list<scmp_arg_cmp> conditions) {
    const int fault = ::seccomp_rule_add_array(context_.get(), action, call, static_cast<unsigned>(conditions.size()),
                                               conditions.begin());
    if (fault != 0) fail(fmt::format("cannot restrict call {}", call), -fault);
  }

  std::unique_ptr<void, decltype(&::seccomp_release)> context_;
};

/// Writing takes Landlock's right to write. Cutting a file short while it is opened to be read does not, in its first
/// versions. A file that is made, by the mode behind the flags, is no program that runs as this user.
void allow_open(Filter& filter, int call, unsigned flags) {
  const scmp_arg_cmp plain = has(flags + 1, 0, S_ISUID | S_ISGID);
  filter.allow(call, {plain, has(flags, O_WRONLY, O_ACCMODE)});
  filter.allow(call, {plain, has(flags, O_RDWR, O_ACCMODE)});
  filter.allow(call, {plain, has(flags, 0, O_TRUNC)});
}

/// Nothing that has a signal sent, or that changes what is behind a descriptor.
void allow_on_descriptors(Filter& filter, bool gpu) {
  for (const int command : {F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD, F_SETFD, F_GETFL}) {
    filter.allow(SYS_fcntl, {has(1, static_cast<std::uint32_t>(command))});
  }
  filter.allow(SYS_fcntl, {has(1, F_SETFL), has(2, 0, O_ASYNC)});
  for (const std::uint32_t command : kTerminalIoctls) filter.allow(SYS_ioctl, {has(1, command)});
  if (!gpu) return;
  filter.allow(SYS_ioctl, {has(1, 'F' << 8, 0xFF00)});  // nvidia.ko's
  filter.allow(SYS_ioctl, {has(1, 0, 0xFFFFF800)});     // nvidia-uvm.ko's: plain numbers, and the two below
  for (const std::uint32_t command : {0x30000001U, 0x30000002U}) filter.allow(SYS_ioctl, {has(1, command)});
}

}  // namespace

void restrict_files(std::span<const NamedFile> files, const fs::path& model, bool gpu) {
  std::error_code none;
  const std::size_t threads = models::names_in("/proc/self/task").size();
  if (threads != 1) throw std::runtime_error(fmt::format("--sandbox: found {} threads, expected one", threads));
  close_inherited(files);
  give_up_privileges();
  Rules rules;
  if (!model.empty()) rules.allow_model(model);
  for (const NamedFile& file : files) {
    const fs::path path = file.path;
    if (path == "-") continue;
    if (file.as == Names::kInput) {
      rules.allow(path, kReadFile);
    } else if (file.as == Names::kFolder) {
      (void)::mkdir(path.c_str(), 0700);
      rules.allow(path, kReplace | kReadFile);
    } else {
      const bool is_replaced = !fs::exists(path, none) || fs::is_regular_file(path, none);
      const fs::path folder = fs::weakly_canonical(fs::absolute(path), none).parent_path();
      rules.allow(is_replaced ? folder : path, is_replaced ? kReplace : kWriteFile);
      expect_writable(is_replaced ? folder : path, is_replaced ? W_OK | X_OK : W_OK);
    }
  }
  // This process, processors, memory and its limits; descriptions of characters and terminals.
  for (const char* path : {"/proc/self", "/proc/meminfo", "/proc/cpuinfo", "/proc/stat", "/proc/sys/vm",
                           "/sys/devices/system", "/sys/fs/cgroup", "/sys/kernel/mm", "/usr/lib/locale",
                           "/usr/share/locale", "/etc/terminfo", "/lib/terminfo", "/usr/share/terminfo"}) {
    rules.allow(path, kReadAll);
    keep_open(path);
  }
  rules.allow("/dev/null", kReadFile | kWriteFile);
  if (gpu) allow_gpu(rules);
  rules.enforce();
}

void restrict_start() {
  Filter filter(SCMP_ACT_ALLOW);
  for (const int call : kRefusedAtStart) filter.refuse(call);
  for (const int command : {F_SETOWN, F_SETOWN_EX, F_SETSIG}) {
    filter.refuse(SYS_fcntl, {has(1, static_cast<std::uint32_t>(command))});
  }
  for (const std::uint32_t command : {std::uint32_t{TIOCSTI}, kTiocLinux}) filter.refuse(SYS_ioctl, {has(1, command)});
  filter.enforce();
}

void restrict_calls(bool gpu) {
  Filter filter(kRefuse);
  for (const int call : kAllowed) filter.allow(call);
  for (int call = kFirstNewCall; call <= kLastNewCall; ++call) {
    if (std::find(std::begin(kAllowed), std::end(kAllowed), call) == std::end(kAllowed)) filter.hide(call);
  }
  // Threads. clone3() is hidden, since a filter cannot see its flags: clone() is tried next.
  filter.allow(SYS_clone, {has(0, CLONE_THREAD, kNewNamespaces | CLONE_THREAD)});
  // These calls may name this process or thread only.
  const auto self = static_cast<std::uint32_t>(::getpid());
  for (const int call : {SYS_kill, SYS_tgkill}) filter.allow(call, {has(0, self)});
  for (const int call : {SYS_prlimit64, SYS_sched_setaffinity, SYS_sched_setparam, SYS_sched_setscheduler}) {
    filter.allow(call, {has(0, 0)});
  }
  filter.allow(SYS_prctl, {has(0, PR_SET_NAME)});
  allow_open(filter, SYS_openat, 2);
#if defined(__x86_64__)
  allow_open(filter, SYS_open, 1);
#endif
  allow_on_descriptors(filter, gpu);
  filter.enforce();
}

}  // namespace mmrec::apps
