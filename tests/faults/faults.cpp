// What must stay true: nothing here allocates, and a call that does not fail is the C library's own. Descriptor 2 is
// left alone: it is where a program says what has failed. close() always closes.
#include "tests/faults/faults.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

// NOLINTBEGIN: names and parameters are the C library's, and macros repeat what differs by name alone
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* data, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);
void __libc_free(void* data);
}

namespace mmrec::faults {
namespace {

std::atomic<Kind> kind{Kind::kNone};
std::atomic<std::int64_t> nth{0}, failures{1}, calls{0}, blocks{0};
std::atomic<bool> struck{false}, traces{false};
std::atomic<int> error_code{EIO};

thread_local bool looks = false;

/// Whether sentencepiece is at work: some of its allocations must not fail, or protobuf ends the process.
bool inside_sentencepiece() {
  if (looks) return true;
  looks = true;
  void* frames[64];
  const int count = backtrace(frames, 64);
  bool found = false;
  for (int i = 0; i < count && !found; ++i) {
    Dl_info of;
    found = dladdr(frames[i], &of) != 0 && of.dli_fname != nullptr && std::strstr(of.dli_fname, "libsentencepiece");
  }
  looks = false;
  return found;
}

/// Counts a call of this kind; whether it fails.
bool strikes(Kind of) {
  if (kind.load(std::memory_order_relaxed) != of) return false;
  const std::int64_t call = calls.fetch_add(1) + 1;
  const std::int64_t at = nth.load(std::memory_order_relaxed);
  if (at == 0 || call < at || call - at >= failures.load(std::memory_order_relaxed)) return false;
  if (of == Kind::kAllocation && inside_sentencepiece()) return false;
  if (!struck.exchange(true) && traces.load()) {
    void* frames[64];
    const Kind planned = kind.exchange(Kind::kNone);
    backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
    kind = planned;
  }
  return true;
}
bool no_memory() {
  if (!strikes(Kind::kAllocation)) return false;
  errno = ENOMEM;
  return true;
}
/// Whether a call on a file fails, with errno.
bool fails(int fd, bool interruptible) {
  if (fd == STDERR_FILENO) return false;
  if (strikes(Kind::kIo)) {
    errno = error_code.load();
    return true;
  }
  if (interruptible && strikes(Kind::kInterrupt)) {
    errno = EINTR;
    return true;
  }
  return false;
}
std::size_t shortened(int fd, std::size_t count) {
  return fd != STDERR_FILENO && count > 1 && strikes(Kind::kShort) ? count / 2 : count;
}
void* counted(void* data) {
  if (data != nullptr) blocks.fetch_add(1, std::memory_order_relaxed);
  return data;
}
template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

Plan planned;  // of a program, for when it comes to its main()
int (*main_of_program)(int, char**, char**) = nullptr;

/// What libraries do before main() is not the program's: CUDA's registers kernels there, and bears no fault.
int main_with_plan(int count, char** arguments, char** environment) {
  if (planned.kind != Kind::kNone) begin(planned);
  return main_of_program(count, arguments, environment);
}

/// The plan of MMREC_FAULT, and its count to the file that MMREC_FAULT_COUNT names.
struct FromEnvironment {
  FromEnvironment() {
    void* frame = nullptr;
    (void)backtrace(&frame, 1);  // which loads a library when it is first called
    const char* text = std::getenv("MMREC_FAULT");
    if (text == nullptr) return;
    traces = std::getenv("MMREC_FAULT_TRACE") != nullptr;
    constexpr struct {
      std::string_view name;
      Kind kind;
      int error;
    } kKinds[] = {{"alloc", Kind::kAllocation, 0}, {"thread", Kind::kThread, 0},  {"eio", Kind::kIo, EIO},
                  {"enospc", Kind::kIo, ENOSPC},   {"emfile", Kind::kIo, EMFILE}, {"short", Kind::kShort, 0},
                  {"eintr", Kind::kInterrupt, 0},  {"eacces", Kind::kIo, EACCES}};
    char name[8] = {};
    long long nth = 0, failures = 1;
    if (std::sscanf(text, "%7[a-z]:%lld:%lld", name, &nth, &failures) < 2) return;
    for (const auto& known : kKinds) {
      if (known.name == name) planned = {known.kind, nth, failures, known.error};
    }
  }
  ~FromEnvironment() {
    const char* path = std::getenv("MMREC_FAULT_COUNT");
    const std::int64_t count = end();
    if (path == nullptr) return;
    const int fd = ::open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    char digits[24];
    const int size = std::snprintf(digits, sizeof digits, "%lld", static_cast<long long>(count));
    if (fd >= 0 && ::write(fd, digits, static_cast<std::size_t>(size)) == size) ::close(fd);
  }
} from_environment;

}  // namespace

void begin(const Plan& plan) {
  kind = Kind::kNone;
  nth = plan.nth;
  failures = plan.failures;
  error_code = plan.error;
  calls = 0;
  struck = false;
  kind = plan.kind;
}
std::int64_t end() {
  kind = Kind::kNone;
  return calls;
}
bool has_struck() { return struck; }
std::int64_t live_blocks() { return blocks; }

}  // namespace mmrec::faults

using namespace mmrec::faults;

// --- Environment -----------------------------------------------------------------------------------------------------

/// Adds a name to the file that MMREC_FAULT_READS names: libraries ask before this one is set up.
static void note_read(const char* name) {
  const char* path = next<char*(const char*)>("getenv")("MMREC_FAULT_READS");
  const int fd = path == nullptr ? -1 : ::open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (fd < 0) return;
  (void)(::write(fd, name, std::strlen(name)) + ::write(fd, "\n", 1));
  ::close(fd);
}
#define MMREC_ENVIRONMENT(name)                                    \
  extern "C" char* name(const char* variable) noexcept {           \
    static auto* const original = next<char*(const char*)>(#name); \
    note_read(variable);                                           \
    return original(variable);                                     \
  }
MMREC_ENVIRONMENT(getenv)
MMREC_ENVIRONMENT(secure_getenv)
#undef MMREC_ENVIRONMENT

// --- Memory ----------------------------------------------------------------------------------------------------------
extern "C" int __libc_start_main(int (*main)(int, char**, char**), int count, char** arguments, void (*init)(),
                                 void (*fini)(), void (*loader_fini)(), void* stack_end) {
  using namespace mmrec::faults;
  main_of_program = main;
  return next<decltype(__libc_start_main)>("__libc_start_main")(main_with_plan, count, arguments, init, fini,
                                                                loader_fini, stack_end);
}

extern "C" {

void* malloc(std::size_t bytes) { return no_memory() ? nullptr : counted(__libc_malloc(bytes)); }
void* calloc(std::size_t count, std::size_t bytes) {
  return no_memory() ? nullptr : counted(__libc_calloc(count, bytes));
}
void* realloc(void* data, std::size_t bytes) {
  if (no_memory()) return nullptr;
  void* moved = __libc_realloc(data, bytes);
  if (data == nullptr) return counted(moved);
  if (moved == nullptr && bytes == 0) blocks.fetch_sub(1, std::memory_order_relaxed);
  return moved;
}
void* memalign(std::size_t alignment, std::size_t bytes) {
  return no_memory() ? nullptr : counted(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** data, std::size_t alignment, std::size_t bytes) {
  void* found = memalign(alignment, bytes);
  if (found == nullptr) return ENOMEM;
  *data = found;
  return 0;
}
void free(void* data) {
  if (data != nullptr) blocks.fetch_sub(1, std::memory_order_relaxed);
  __libc_free(data);
}

// --- Threads ---------------------------------------------------------------------------------------------------------

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
  static auto* const original = next<decltype(pthread_create)>("pthread_create");
  return strikes(Kind::kThread) ? EAGAIN : original(thread, attributes, start, argument);
}

// --- Files -----------------------------------------------------------------------------------------------------------

#define MMREC_OPEN(name)                                                   \
  int name(const char* path, int flags, ...) {                             \
    static auto* const original = next<int(const char*, int, ...)>(#name); \
    va_list rest;                                                          \
    va_start(rest, flags);                                                 \
    const auto mode = va_arg(rest, mode_t);                                \
    va_end(rest);                                                          \
    return fails(-1, true) ? -1 : original(path, flags, mode);             \
  }
MMREC_OPEN(open)
MMREC_OPEN(open64)
#undef MMREC_OPEN

/// A call that gives -1 and errno if it fails.
#define MMREC_CALL(result, name, parameters, arguments, fd, interruptible) \
  result name parameters {                                                 \
    static auto* const original = next<result parameters>(#name);          \
    return fails(fd, interruptible) ? -1 : original arguments;             \
  }
#define MMREC_TRANSFER(name, pointer) \
  MMREC_CALL(ssize_t, name, (int fd, pointer data, std::size_t count), (fd, data, shortened(fd, count)), fd, true)
#define MMREC_TRANSFER_AT(name, pointer)                                             \
  MMREC_CALL(ssize_t, name, (int fd, pointer data, std::size_t count, off_t offset), \
             (fd, data, shortened(fd, count), offset), fd, true)
MMREC_TRANSFER(read, void*)
MMREC_TRANSFER(write, const void*)
MMREC_TRANSFER_AT(pread, void*)
MMREC_TRANSFER_AT(pread64, void*)
MMREC_TRANSFER_AT(pwrite, const void*)
MMREC_TRANSFER_AT(pwrite64, const void*)
MMREC_CALL(int, fsync, (int fd), (fd), fd, true)
MMREC_CALL(int, fdatasync, (int fd), (fd), fd, true)
MMREC_CALL(int, ftruncate, (int fd, off_t length) noexcept, (fd, length), fd, true)
MMREC_CALL(int, fstat, (int fd, struct stat* status) noexcept, (fd, status), -1, false)
MMREC_CALL(int, stat, (const char* path, struct stat* status) noexcept, (path, status), -1, false)
MMREC_CALL(int, lstat, (const char* path, struct stat* status) noexcept, (path, status), -1, false)
MMREC_CALL(int, rename, (const char* from, const char* to) noexcept, (from, to), -1, false)
MMREC_CALL(int, linkat, (int from_folder, const char* from, int to_folder, const char* to, int flags) noexcept,
           (from_folder, from, to_folder, to, flags), -1, false)
MMREC_CALL(int, mkdir, (const char* path, mode_t mode) noexcept, (path, mode), -1, false)
MMREC_CALL(int, mkostemp, (char* name, int flags), (name, flags), -1, true)
#undef MMREC_TRANSFER_AT
#undef MMREC_TRANSFER
#undef MMREC_CALL

int close(int fd) {
  static auto* const original = next<int(int)>("close");
  const bool failed = fails(fd, true);
  const int error = errno;
  const int done = original(fd);
  if (!failed) return done;
  errno = error;
  return -1;
}

int posix_fallocate(int fd, off_t offset, off_t length) {
  static auto* const original = next<int(int, off_t, off_t)>("posix_fallocate");
  return fails(fd, true) ? errno : original(fd, offset, length);
}

}  // extern "C"
// NOLINTEND
