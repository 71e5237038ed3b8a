// Interrupts: SIGINT (Ctrl-C), SIGTERM and SIGHUP. SIGXFSZ is ignored, so that a write says what is wrong.
//
// Outside a GracefulScope an interrupt ends the program at once with 128 + the signal's number, which is right while a
// model loads or a prompt is read: nothing has been produced. Inside, the first interrupt only sets a flag, so that the
// token in work is finished, text flushed and timings printed; the second ends the program at once.
#pragma once

#include <string_view>

namespace mmrec::apps {

/// Installs the handlers. A signal that was ignored when the program started (nohup) stays ignored.
void handle_interrupts(std::string_view program);

/// 128 + the signal that asked for the end; 0 if none did.
int interrupt_exit_code();

/// As if none had: the first interrupt of a GracefulScope has been answered.
void forget_interrupt();

class GracefulScope {
 public:
  GracefulScope();
  ~GracefulScope();
  GracefulScope(const GracefulScope&) = delete;
  GracefulScope& operator=(const GracefulScope&) = delete;
};

/// A temporary file, or a folder that holds no others, one of up to eight that the handler removes where it ends the
/// program. `path` must stay valid until it is dropped.
void add_interrupt_cleanup(const char* path);
void drop_interrupt_cleanup(const char* path);
/// Removes them all, for an end that runs no destructors. Takes no memory; a signal handler may call it.
void clean_up_at_once();

}  // namespace mmrec::apps
