#include "apps/common/signals.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>

namespace mmrec::apps {
namespace {

// Everything the handler touches: lock-free atomics and a message made beforehand.
std::atomic<int> pending{0};
std::atomic<bool> graceful{false};
std::array<std::atomic<const char*>, 8> cleanup{};
char message[128];
std::size_t message_size = 0;

extern "C" void on_interrupt(int signal) {
  if (graceful.load() && pending.exchange(signal) == 0) return;
  clean_up_at_once();
  (void)!write(STDERR_FILENO, message, message_size);
  _exit(128 + signal);
}

}  // namespace

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

void add_interrupt_cleanup(const char* path) {
  for (auto& file : cleanup) {
    const char* none = nullptr;
    if (file.compare_exchange_strong(none, path)) return;
  }
}
void drop_interrupt_cleanup(const char* path) {
  for (auto& file : cleanup) {
    const char* expected = path;
    if (file.compare_exchange_strong(expected, nullptr)) return;
  }
}

}  // namespace mmrec::apps
