#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "execution.h"
#include "sanitizer.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace mmrec::cuda_emulation {
namespace {

// Memory is committed page by page as it is touched, so a generous size costs addresses only.
constexpr std::size_t kStackBytes = std::size_t{256} << 10;
constexpr std::size_t kGuardBytes = 4096;  // below the stack: an overflow faults instead of running into a neighbour

std::byte* allocate_stack() {
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
    // Two mappings a thread: 65,530 of them (vm.max_map_count) are those of 64 blocks of 512 threads at a time.
    fail("no address space for the stack of one more thread");
  }
  return static_cast<std::byte*>(memory) + kGuardBytes;
}

/// Where the next stack begins within its page. Stacks that all began at the same place would fight for the same lines
/// of the first-level cache.
std::size_t next_colour() {
  static std::size_t stacks = 0;
  return stacks++ % 64 * 64;
}

}  // namespace

// jump(&from, to): saves what a call must preserve and the stack pointer, then returns on the other stack.
#if defined(__x86_64__)
extern "C" void mmrec_emulation_jump(void** from, void* to);
asm(R"(
.text
.type mmrec_emulation_jump, @function
mmrec_emulation_jump:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size mmrec_emulation_jump, . - mmrec_emulation_jump
)");
namespace {
void jump(void** from, void* to) { mmrec_emulation_jump(from, to); }
/// The stack pointer of a stack on which jump() enters `function`.
void* prepare(std::byte* stack, void (*function)()) {
  auto* top = reinterpret_cast<std::uintptr_t*>(stack + kStackBytes - next_colour()) - 8;
  for (int i = 0; i < 8; ++i) top[i] = 0;  // six registers, the entry, the end of the chain of return addresses
  top[6] = reinterpret_cast<std::uintptr_t>(function);
  return top;
}
}  // namespace
#else
namespace {
void jump(void** from, void* to) {
  ucontext_t here;
  *from = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}
void* prepare(std::byte* stack, void (*function)()) {
  auto* context = new (stack) ucontext_t;  // at the end that the stack reaches last
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof(ucontext_t);
  context->uc_stack.ss_size = kStackBytes - sizeof(ucontext_t);
  makecontext(context, function, 0);
  return context;
}
}  // namespace
#endif

Fiber* Fiber::running_ = nullptr;

Fiber::Fiber(void (*entry)(void*), void* argument) : entry_(entry), argument_(argument) {
  std::byte* stack = allocate_stack();
  self_ = {prepare(stack, &Fiber::start), stack, kStackBytes, nullptr};
}

void Fiber::resume() {
  running_ = this;
  switch_stacks(resumer_, self_);
}

void Fiber::suspend() {
  Fiber& fiber = *running_;
  running_ = nullptr;
  switch_stacks(fiber.self_, fiber.resumer_);
}

void Fiber::start() {
#if defined(MMREC_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(nullptr, &running_->resumer_.stack, &running_->resumer_.stack_size);
#endif
  running_->entry_(running_->argument_);
}

void Fiber::switch_stacks(Context& from, Context& to) {
#if defined(MMREC_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_size);
  jump(&from.stack_pointer, to.stack_pointer);
  // Back on `from`. A fiber may have been resumed from another stack than before: learn where to return to.
  const void* stack = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(from.fake_stack, &stack, &size);
  if (running_ != nullptr && &from == &running_->self_) {
    running_->resumer_.stack = stack;
    running_->resumer_.stack_size = size;
  }
#else
  jump(&from.stack_pointer, to.stack_pointer);
#endif
}

}  // namespace mmrec::cuda_emulation
