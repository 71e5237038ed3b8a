// Landlock and seccomp by their system calls: glibc has no functions for them. What the kernel's headers of the oldest
// supported system lack has its number here.
#include "apps/sandbox.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

#include "apps/folder_names.h"

namespace mmrec::apps {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(std::string_view what, int error) {
  throw std::runtime_error(fmt::format("--sandbox: {} ({})", what, std::generic_category().message(error)));
}

/// Nothing that is executed gives rights back: both need it.
void give_up_privileges() {
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) fail("this kernel cannot give up privileges", errno);
}

// --- Files -----------------------------------------------------------------------------------------------------------

constexpr std::uint64_t kTruncate = 1U << 14;  // LANDLOCK_ACCESS_FS_TRUNCATE, since version 3
constexpr std::uint64_t kRefer = 1U << 13;     // LANDLOCK_ACCESS_FS_REFER, since version 2
constexpr std::uint64_t kAllOfVersion1 = kRefer - 1;
constexpr std::uint64_t kReadFile = LANDLOCK_ACCESS_FS_READ_FILE;
constexpr std::uint64_t kReadAll = kReadFile | LANDLOCK_ACCESS_FS_READ_DIR;
constexpr std::uint64_t kWriteFile = LANDLOCK_ACCESS_FS_WRITE_FILE | kTruncate;
constexpr std::uint64_t kReplace = kWriteFile | LANDLOCK_ACCESS_FS_MAKE_REG | LANDLOCK_ACCESS_FS_REMOVE_FILE;
constexpr std::uint64_t kOfAFile = LANDLOCK_ACCESS_FS_EXECUTE | kWriteFile | kReadFile;

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
  Rules() : version_(::syscall(SYS_landlock_create_ruleset, nullptr, 0, LANDLOCK_CREATE_RULESET_VERSION)) {
    if (version_ < 1) fail("this kernel does not restrict files. Needed: Landlock, in Linux since 5.13", errno);
    handled_ = kAllOfVersion1 | (version_ >= 2 ? kRefer : 0) | (version_ >= 3 ? kTruncate : 0);
    landlock_ruleset_attr attributes{};  // newer headers have more members
    attributes.handled_access_fs = handled_;
    rules_.emplace(::syscall(SYS_landlock_create_ruleset, &attributes, sizeof attributes, 0));
    if (rules_->get() < 0) fail("cannot restrict files", errno);
  }
  /// What is not there, or is a pipe, needs no rule.
  void allow(const fs::path& path, std::uint64_t access) {
    const Descriptor fd(::open(path.c_str(), O_PATH | O_CLOEXEC));
    struct stat status = {};
    if (fd.get() < 0 || ::fstat(fd.get(), &status) != 0) return;
    if (!S_ISDIR(status.st_mode)) access &= kOfAFile;
    const landlock_path_beneath_attr rule = {.allowed_access = access & handled_, .parent_fd = fd.get()};
    if (::syscall(SYS_landlock_add_rule, rules_->get(), LANDLOCK_RULE_PATH_BENEATH, &rule, 0) != 0 && errno != EBADFD) {
      fail(fmt::format("{}: cannot be named to the kernel", path.string()), errno);
    }
  }
  void enforce() const {
    if (::syscall(SYS_landlock_restrict_self, rules_->get(), 0) != 0) fail("cannot restrict files", errno);
  }

 private:
  long version_;
  std::uint64_t handled_ = 0;
  std::optional<Descriptor> rules_;
};

// --- Calls -----------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
constexpr std::uint32_t kMachine = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr std::uint32_t kMachine = AUDIT_ARCH_AARCH64;
#endif
constexpr std::uint32_t kFirstNewCall = 424;  // from here on libraries take ENOSYS for an older kernel
constexpr std::uint32_t kNewNamespaces = 0x7E020000;

// What computing, threads, open files and a GPU's driver at work take. Not chmod(), chown() and truncate() by name:
// Landlock knows nothing of them, or not in all versions.
// clang-format off
constexpr std::uint32_t kAllowed[] = {
    SYS_read, SYS_write, SYS_readv, SYS_writev, SYS_pread64, SYS_pwrite64, SYS_close, SYS_fstat, SYS_newfstatat,
    SYS_statx, SYS_lseek, SYS_fcntl, SYS_flock, SYS_dup, SYS_dup3, SYS_pipe2, SYS_ppoll, SYS_pselect6, SYS_eventfd2,
    SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait, SYS_fsync, SYS_fdatasync, SYS_ftruncate, SYS_fallocate,
    SYS_fchmod, SYS_renameat, SYS_renameat2, SYS_linkat, SYS_unlinkat, SYS_mkdirat, SYS_readlinkat, SYS_getdents64,
    SYS_faccessat, SYS_faccessat2, SYS_utimensat, SYS_statfs, SYS_fstatfs, SYS_fadvise64, SYS_getcwd, SYS_umask,
    // memory
    SYS_mmap, SYS_munmap, SYS_mprotect, SYS_mremap, SYS_madvise, SYS_brk, SYS_mlock, SYS_munlock, SYS_mincore,
    SYS_msync, SYS_membarrier, SYS_mbind, SYS_get_mempolicy, SYS_set_mempolicy, SYS_memfd_create,
    // threads and time
    SYS_futex, SYS_futex_waitv, SYS_set_robust_list, SYS_get_robust_list, SYS_rseq, SYS_set_tid_address,
    SYS_sched_yield, SYS_sched_getaffinity, SYS_sched_setaffinity, SYS_sched_getparam, SYS_sched_getscheduler,
    SYS_sched_setscheduler, SYS_sched_get_priority_max, SYS_sched_get_priority_min, SYS_nanosleep,
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

class Filter {
 public:
  Filter() {
    load(offsetof(seccomp_data, arch));
    unless(kMachine, SECCOMP_RET_KILL_PROCESS);
    load(offsetof(seccomp_data, nr));
    for (const std::uint32_t call : kAllowed) when(BPF_JEQ, call, SECCOMP_RET_ALLOW);
    when(BPF_JEQ, SYS_clone3, kUnknown);  // its flags are out of a filter's sight; clone() is tried next
    of_call(SYS_clone, 0, {{BPF_JSET, kNewNamespaces, kDenied}, {BPF_JSET, CLONE_THREAD, SECCOMP_RET_ALLOW}}, kDenied);
    of_call(SYS_ioctl, 1, {{BPF_JEQ, TIOCSTI, kDenied}, {BPF_JEQ, 0x541C /* TIOCLINUX */, kDenied}}, SECCOMP_RET_ALLOW);
    for (const auto call : std::initializer_list<std::uint32_t>{SYS_kill, SYS_tgkill}) {
      of_call(call, 0, {{BPF_JEQ, static_cast<std::uint32_t>(::getpid()), SECCOMP_RET_ALLOW}}, kDenied);
    }
    of_call(SYS_prlimit64, 0, {{BPF_JEQ, 0, SECCOMP_RET_ALLOW}}, kDenied);
    of_call(SYS_prctl, 0, {{BPF_JEQ, PR_SET_NAME, SECCOMP_RET_ALLOW}}, kDenied);
    // Cutting a file short takes no right to write in the first versions of Landlock if it is opened to be read.
    open_call(SYS_openat, 2);
#if defined(__x86_64__)
    open_call(SYS_open, 1);
#endif
    when(BPF_JGE, kFirstNewCall, kUnknown);
    code_.push_back(BPF_STMT(BPF_RET | BPF_K, kDenied));
  }
  sock_fprog program() { return {.len = static_cast<unsigned short>(code_.size()), .filter = code_.data()}; }

 private:
  static constexpr std::uint32_t kDenied = SECCOMP_RET_ERRNO | EPERM;
  static constexpr std::uint32_t kUnknown = SECCOMP_RET_ERRNO | ENOSYS;
  struct Case {
    std::uint16_t test;
    std::uint32_t value, verdict;
  };

  void load(std::size_t offset) {
    code_.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(offset)));
  }
  void when(std::uint16_t test, std::uint32_t value, std::uint32_t verdict) {
    code_.push_back(BPF_JUMP(static_cast<std::uint16_t>(BPF_JMP | BPF_K | test), value, 0, 1));
    code_.push_back(BPF_STMT(BPF_RET | BPF_K, verdict));
  }
  void unless(std::uint32_t value, std::uint32_t verdict) {
    code_.push_back(BPF_JUMP(BPF_JMP | BPF_K | BPF_JEQ, value, 1, 0));
    code_.push_back(BPF_STMT(BPF_RET | BPF_K, verdict));
  }
  /// By the low half of an argument, which is all that the kernel takes of these; both machines have it first.
  void of_call(std::uint32_t call, std::size_t argument, std::initializer_list<Case> cases, std::uint32_t otherwise) {
    code_.push_back(BPF_JUMP(BPF_JMP | BPF_K | BPF_JEQ, call, 0, static_cast<std::uint8_t>(2 * cases.size() + 2)));
    load(offsetof(seccomp_data, args) + argument * sizeof(std::uint64_t));
    for (const Case& one : cases) when(one.test, one.value, one.verdict);
    code_.push_back(BPF_STMT(BPF_RET | BPF_K, otherwise));
  }
  void open_call(std::uint32_t call, std::size_t flags) {
    of_call(call, flags, {{BPF_JSET, O_WRONLY | O_RDWR, SECCOMP_RET_ALLOW}, {BPF_JSET, O_TRUNC, kDenied}},
            SECCOMP_RET_ALLOW);
  }

  std::vector<sock_filter> code_;
};

}  // namespace

void restrict_files(const SandboxFiles& files) {
  std::error_code none;
  const std::size_t threads = names_in("/proc/self/task").size();
  if (threads != 1) throw std::runtime_error(fmt::format("--sandbox: found {} threads, expected one", threads));
  Rules rules;
  for (const fs::path& path : files.readable) {
    if (fs::is_directory(path, none)) {
      for (const std::string& name : names_in(path)) {
        if (fs::is_regular_file(path / name, none)) rules.allow(path / name, kReadFile);
      }
    } else {
      rules.allow(path, kReadFile);
    }
  }
  for (const fs::path& path : files.outputs) {
    const bool is_replaced = !fs::exists(path, none) || fs::is_regular_file(path, none);
    const fs::path folder = fs::weakly_canonical(fs::absolute(path), none).parent_path();
    rules.allow(is_replaced ? folder : path, is_replaced ? kReplace | kReadAll : kWriteFile);
  }
  for (const fs::path& path : files.folders) {
    (void)::mkdir(path.c_str(), 0700);
    rules.allow(path, kReplace | kReadAll);
  }
  // Processors, memory and limits; descriptions of terminals.
  for (const char* path : {"/proc", "/sys", "/etc/terminfo", "/lib/terminfo", "/usr/share/terminfo"}) {
    rules.allow(path, kReadAll);
  }
  rules.allow("/dev/null", kReadFile | kWriteFile);
  if (files.gpu) {
    rules.allow("/", kReadAll);
    rules.allow("/dev", kReadAll | kWriteFile);
    // The driver does not start where it cannot name its threads.
    rules.allow("/proc/self/task", kReadAll | kWriteFile);
  }
  give_up_privileges();
  rules.enforce();
}

void restrict_calls() {
  Filter filter;
  const sock_fprog program = filter.program();
  give_up_privileges();
  const long done = ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
  if (done < 0) fail("this kernel does not restrict calls. Needed: seccomp filters", errno);
  if (done > 0) fail("a thread cannot be restricted", EBUSY);
}

Sandbox::Sandbox(bool wanted, const SandboxFiles& files) : is_to_come_(wanted && files.gpu) {
  if (!wanted) return;
  restrict_files(files);
  if (!files.gpu) restrict_calls();
}

void Sandbox::loaded() const {
  if (is_to_come_) restrict_calls();
}

}  // namespace mmrec::apps
