#pragma once
// Tells the sanitizers about fibers: AddressSanitizer needs the stack in use; ThreadSanitizer treats each fiber as a
// separate thread, synchronised with further fibers by barriers alone.
#include <algorithm>
#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace ingot::emulation {

#if defined(__SANITIZE_THREAD__)
inline void tsan_acquire(void* p) { __tsan_acquire(p); }
inline void tsan_release(void* p) { __tsan_release(p); }
inline void tsan_ignore() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
inline void tsan_heed() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
#else
inline void tsan_acquire(void*) {}
inline void tsan_release(void*) {}
inline void tsan_ignore() {}
inline void tsan_heed() {}
#endif
// The scheduler's own memory is shared by all fibers without locks.
struct Silence {
  Silence() { tsan_ignore(); }
  ~Silence() { tsan_heed(); }
  Silence(const Silence&) = delete;
  Silence& operator=(const Silence&) = delete;
};
struct Attention {
  Attention() { tsan_heed(); }
  ~Attention() { tsan_ignore(); }
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;
};

#if defined(__SANITIZE_ADDRESS__)
inline void asan_forbid(const void* p, size_t bytes) { __asan_poison_memory_region(p, bytes); }
inline void asan_allow(const void* p, size_t bytes) { __asan_unpoison_memory_region(p, bytes); }
#else
inline void asan_forbid(const void*, size_t) {}
inline void asan_allow(const void*, size_t) {}
#endif

class SanitizedFiber {
 public:
  SanitizedFiber() = default;
  SanitizedFiber(const SanitizedFiber&) = delete;
  SanitizedFiber& operator=(const SanitizedFiber&) = delete;
#if defined(__SANITIZE_THREAD__)
  // An abandoned fiber keeps its thread, because ThreadSanitizer would complain about such an end.
  ~SanitizedFiber() {
    if (!owned_ || !ended_) return;
    void* const now = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(thread_, __tsan_switch_to_fiber_no_sync);
    tsan_heed();
    __tsan_switch_to_fiber(now, __tsan_switch_to_fiber_no_sync);
    __tsan_destroy_fiber(thread_);
  }
#endif

  void is_main() {
#if defined(__SANITIZE_THREAD__)
    thread_ = __tsan_get_current_fiber();
#endif
  }
  // Before a fiber starts on this stack.
  void prepare(char* stack, size_t bytes) {
    stack_ = stack;
    bytes_ = bytes;
    fake_stack_ = nullptr;
#if defined(__SANITIZE_THREAD__)
    if (!owned_) thread_ = __tsan_create_fiber(0);
    owned_ = true;
#endif
  }
  // Called before the stack serves the next fiber: clears the poisoned bytes. A normally ended fiber leaves the
  // poisoned bytes of its last frames.
  void allow_stack(char* stack, size_t bytes) const {
    const size_t left = ended_ ? std::min(kLastFrames, bytes) : bytes;
    asan_allow(stack + bytes - left, left);
  }
  void leave(SanitizedFiber& next, bool for_ever) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &fake_stack_, next.stack_, next.bytes_);
#endif
    left_ = this;
    ended_ = for_ever;
#if defined(__SANITIZE_THREAD__)  // last, because the following accesses count as the next fiber's
    __tsan_switch_to_fiber(next.thread_, __tsan_switch_to_fiber_no_sync);
#endif
  }
  void enter() {
#if defined(__SANITIZE_ADDRESS__)
    const void* stack = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(fake_stack_, &stack, &bytes);
    note_left(stack, bytes);
#endif
  }
  void enter_first() {
    if (!silent_) tsan_ignore();
    silent_ = true;
    enter();
  }

 private:
  static constexpr size_t kLastFrames = 8 << 10;

  // AddressSanitizer reports the main context's stack at the first switch to a fiber.
  static void note_left(const void* stack, size_t bytes) {
    if (left_ != nullptr && left_->stack_ == nullptr) {
      left_->stack_ = static_cast<const char*>(stack);
      left_->bytes_ = bytes;
    }
  }

  static inline thread_local SanitizedFiber* left_ = nullptr;
  const char* stack_ = nullptr;
  size_t bytes_ = 0;
  void* fake_stack_ = nullptr;
  bool silent_ = false, ended_ = false;
#if defined(__SANITIZE_THREAD__)
  void* thread_ = nullptr;
  bool owned_ = false;
#endif
};

}  // namespace ingot::emulation
