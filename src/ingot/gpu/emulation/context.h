#pragma once
// The state in which a fiber continues. On x86-64 a switch takes a dozen instructions: swapcontext() asks the kernel
// for the signal mask each time, which took two thirds of the emulated tests' time. Other CPUs use swapcontext().
#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace ingot::emulation {

#if defined(__x86_64__)
namespace detail {
// Saves the registers that a callee must preserve, except the modes of floating-point arithmetic (no kernel changes
// these).
__attribute__((naked, noinline, no_sanitize("address", "thread", "undefined"))) inline void change_stack(
    void** /*leaving*/, void* /*entering*/) {
  asm(R"(
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
    ret
  )");
}
}  // namespace detail

class Context {
 public:
  // The first switch to this state calls `main` on the given stack; `main` never returns.
  void start_at(char* stack, size_t bytes, void (*main)()) {
    // Six registers, the return address of change_stack(), and a null return address of `main` as the end of a
    // backtrace.
    void** const top = reinterpret_cast<void**>(uintptr_t(stack + bytes) / 16 * 16);
    for (int i = 1; i <= 8; ++i) top[-i] = nullptr;
    top[-2] = reinterpret_cast<void*>(main);
    at_ = top - 8;
  }
  void change_to(Context& other) { detail::change_stack(&at_, other.at_); }

 private:
  void* at_ = nullptr;
};
#else
class Context {
 public:
  void start_at(char* stack, size_t bytes, void (*main)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, main, 0);
    // AddressSanitizer's version of swapcontext() clears its records of the stack that is named here, which takes
    // longer than the kernels themselves. Therefore no stack is named here, and start_switch_fiber tells the sanitizer
    // which stack is in use.
    context_.uc_stack = {};
  }
  void change_to(Context& other) { swapcontext(&context_, &other.context_); }

 private:
  ucontext_t context_;
};
#endif

}  // namespace ingot::emulation
