// Fibers: functions that give up the processor where they choose to and go on from there later, each on its own stack.
#pragma once

#include <cstddef>

namespace mmrec::cuda_emulation {

/// A stack with a function on it that runs from resume() to suspend() and again. Make it, resume it from one thread of
/// the host at a time; never destroyed, because it is pooled.
class Fiber {
 public:
  /// `entry(argument)` must not return: a fiber that has nothing to do suspends.
  Fiber(void (*entry)(void*), void* argument);
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Runs the fiber until it suspends. Called from outside of fibers.
  void resume();
  /// Brings what resume() will read of the stack into the caches.
  void prefetch() const {
    for (int line = 0; line < 4; ++line) {
      __builtin_prefetch(static_cast<const std::byte*>(self_.stack_pointer) + line * 64, 1);
    }
  }
  /// Returns to where the running fiber was resumed.
  static void suspend();

 private:
  /// Where a stack was left, and what AddressSanitizer wants to know of it.
  struct Context {
    void* stack_pointer = nullptr;
    const void* stack = nullptr;
    std::size_t stack_size = 0;
    void* fake_stack = nullptr;
  };
  static void start();
  static void switch_stacks(Context& from, Context& to);

  void (*entry_)(void*);
  void* argument_;
  Context self_;
  Context resumer_;
  static Fiber* running_;
};

}  // namespace mmrec::cuda_emulation
