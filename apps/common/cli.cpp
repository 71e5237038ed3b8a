#include "apps/common/cli.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

#include "apps/common/output.h"
#include "kernels/cpu/thread_pool.h"
#include "mmrec/errors.h"
#include "models/files/utf8.h"

namespace mmrec::apps {
namespace {

std::string program_name = "mmrec";

// A descriptor that arrives closed would be handed to the first file opened, and results would be written into it. The
// stand-ins have the wrong direction on purpose: using them fails with EBADF.
void occupy_standard_descriptors() {
  if (fcntl(STDIN_FILENO, F_GETFD) < 0 && errno == EBADF) (void)open("/dev/null", O_WRONLY);
  if (fcntl(STDOUT_FILENO, F_GETFD) < 0 && errno == EBADF) (void)open("/dev/null", O_RDONLY);
  if (fcntl(STDERR_FILENO, F_GETFD) < 0 && errno == EBADF) (void)open("/dev/null", O_WRONLY);
}

// Memory for when there is no more: messages take some, and so do the destructors of nlohmann's JSON values, which end
// the process where they get none (end_for_want_of_memory). A small request that fails first is served from it too.
std::atomic<void*> kept_back = nullptr;

void release_kept_back() {
  void* const memory = kept_back.exchange(nullptr);
  if (memory == nullptr) throw std::bad_alloc();
  std::free(memory);  // NOLINT(cppcoreguidelines-no-malloc): operator new asks for it
}

void keep_memory_back() {
  constexpr std::size_t kBytes = std::size_t{512} << 10;
  kept_back = std::malloc(kBytes);  // NOLINT(cppcoreguidelines-no-malloc)
  std::set_new_handler(release_kept_back);
}

/// Nowhere to report a failure of this one to.
void write_to_stderr(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDERR_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(n));
  }
}

/// Drives a terminal, or changes the order or the lines of the text around it.
bool is_control(char32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2066 && code <= 0x2069);
}

/// What std::terminate does. What finds no memory and must not throw, as a destructor of a JSON value or of
/// sentencepiece's, ends the program here then, as it would have ended one call later.
[[noreturn]] void end_for_want_of_memory() {
  // Where what throws was inlined into what must not, GCC cleans up and comes here with an exception that is on its way
  // still, and that nobody can ask for: it is taken for this one if memory has run out before.
  bool is_memory = std::uncaught_exceptions() > 0 && kept_back == nullptr;
  try {
    if (const std::exception_ptr error = std::current_exception()) {
      is_memory = false;
      std::rethrow_exception(error);
    }
  } catch (const std::bad_alloc&) {
    is_memory = true;
  } catch (...) {  // a fault of the program's own
  }
  if (!is_memory) std::abort();
  clean_up_at_once();
  write_to_stderr(program_name);
  write_to_stderr(": out of memory\n");
  ::_exit(kOutOfMemory);
}

/// What the body returns, or the exit code of what it throws, which is said.
int run_and_report(std::string_view program, const std::function<int()>& body, std::string_view saves_memory) {
  const auto fail = [](ExitCode code, std::string_view text) {
    log_line(text);
    return static_cast<int>(code);
  };
  try {
    const int code = body();
    const int missing = kernels::missing_threads();
    if (missing > 0) warn(fmt::format("--threads: {} could not be started; the others were used", missing));
    return code;
  } catch (const StdoutClosed&) {
    return kStdoutClosed;
  } catch (const UsageError& error) {
    return fail(kUsage, fmt::format("{}. Try: {} -h", error.what(), program));
  } catch (const RejectedFile& error) {
    return fail(kRejected, error.what());
  } catch (const WriteError& error) {
    return fail(kOutputFault, error.what());
  } catch (const NumericError& error) {
    return fail(kNumericFault, error.what());
  } catch (const std::bad_alloc& error) {
    const std::string_view what = error.what();
    const bool is_gpu = what.find("GPU") != std::string_view::npos;
    return fail(kOutOfMemory, fmt::format("{}. Try: {}{}",
                                          what.starts_with("std::") ? "out of memory" : what,  // the host's says less
                                          saves_memory.empty() ? "" : fmt::format("a smaller --{}, or ", saves_memory),
                                          is_gpu ? "--precision bf16 or --device cpu" : "a machine with more memory"));
  } catch (const std::system_error& error) {
    return fail(means_no_memory(error.code()) ? kOutOfMemory : kRuntimeFault, error.what());
  } catch (const std::exception& error) {
    return fail(kRuntimeFault, error.what());
  }
}

// Everything the handler touches: lock-free atomics and a message made beforehand.
std::atomic<int> pending{0};
std::atomic<bool> graceful{false};
std::array<std::atomic<const char*>, 8> cleanup{};
char message[128];
std::size_t message_size = 0;

void replace_cleanup(const char* old, const char* with) {
  for (auto& file : cleanup) {
    const char* expected = old;
    if (file.compare_exchange_strong(expected, with)) return;
  }
}

extern "C" void on_interrupt(int signal) {
  if (graceful.load() && pending.exchange(signal) == 0) return;
  clean_up_at_once();
  (void)!write(STDERR_FILENO, message, message_size);
  _exit(128 + signal);
}

/// A signal that was ignored when the program started (nohup) stays ignored.
void handle_interrupts(std::string_view program) {
  const int n =
      std::snprintf(message, sizeof message, "%.*s: interrupted\n", static_cast<int>(program.size()), program.data());
  message_size = n < 0 ? 0 : std::min(static_cast<std::size_t>(n), sizeof message - 1);
  // A write beyond the limit of a file's size then fails as one to a full disk does.
  (void)std::signal(SIGXFSZ, SIG_IGN);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction old = {};
    sigaction(signal, nullptr, &old);
    if (old.sa_handler == SIG_IGN) continue;
    struct sigaction action = {};
    action.sa_handler = on_interrupt;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(signal, &action, nullptr);
  }
}

}  // namespace

bool means_no_memory(const std::error_code& code) {
  // EAGAIN is what starting a thread gives where its stack has no room.
  return code == std::errc::not_enough_memory || code == std::errc::resource_unavailable_try_again;
}

std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 2000;
  std::string line;
  for (std::string_view rest = text; !rest.empty();) {
    const models::Utf8Unit unit = models::first_unit(rest);
    const std::string_view bytes = rest.substr(0, unit.length);
    if (text.size() - rest.size() + bytes.size() > kLongest) return line + "…";
    if (bytes == "\n") {
      line += ' ';
    } else if (unit.valid && !is_control(unit.code)) {
      line += bytes;
    } else {
      for (const char byte : bytes) line += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    }
    rest.remove_prefix(unit.length);
  }
  return line;
}

const std::string& running_program() { return program_name; }

void log_line(std::string_view text) { write_to_stderr(fmt::format("{}: {}\n", program_name, printable(text))); }

void warn(std::string_view text) { log_line(fmt::format("warning: {}", text)); }

int run_program(std::string_view program, const std::function<int()>& body, std::string_view saves_memory) {
  program_name = program;
  try {
    std::set_terminate(end_for_want_of_memory);
    keep_memory_back();
    occupy_standard_descriptors();
    std::signal(SIGPIPE, SIG_IGN);
    handle_interrupts(program);
    return run_and_report(program, body, saves_memory);
  } catch (const std::bad_alloc&) {  // not even for the message
    write_to_stderr(program_name);
    write_to_stderr(": out of memory\n");
    return kOutOfMemory;
  }
}

int interrupt_exit_code() {
  const int signal = pending.load();
  return signal == 0 ? 0 : 128 + signal;
}

void forget_interrupt() { pending.store(0); }

GracefulScope::GracefulScope() { graceful.store(true); }
GracefulScope::~GracefulScope() { graceful.store(false); }

void clean_up_at_once() {
  for (const auto& file : cleanup) {
    if (const char* path = file.load()) (void)unlink(path);
  }
  for (const auto& folder : cleanup) {
    if (const char* path = folder.load()) (void)rmdir(path);
  }
}

RemovedAtInterrupt::RemovedAtInterrupt(std::vector<std::string> paths) : paths_(std::move(paths)) {
  for (const std::string& path : paths_) replace_cleanup(nullptr, path.c_str());
}
RemovedAtInterrupt::~RemovedAtInterrupt() {
  for (const std::string& path : paths_) replace_cleanup(path.c_str(), nullptr);
}

}  // namespace mmrec::apps
