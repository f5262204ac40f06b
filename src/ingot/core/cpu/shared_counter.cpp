#include "ingot/core/cpu/shared_counter.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "ingot/core/check.h"

namespace ingot {

SharedCounter::SharedCounter() : descriptor_(::memfd_create("ingot counter", MFD_CLOEXEC)) {
  if (descriptor_ < 0 || ::ftruncate(descriptor_, sizeof(int64_t)) != 0)
    fail(ErrorCode::io, "ranks: a shared counter: ", std::strerror(errno));
  map();
}
SharedCounter::SharedCounter(int descriptor) : descriptor_(descriptor) { map(); }
SharedCounter::~SharedCounter() {
  ::munmap(value_, sizeof *value_);
  ::close(descriptor_);
}

void SharedCounter::map() {
  void* const at = ::mmap(nullptr, sizeof *value_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (at == MAP_FAILED) fail(ErrorCode::io, "ranks: a shared counter: ", std::strerror(errno));
  value_ = static_cast<int64_t*>(at);
}
int64_t SharedCounter::next() { return std::atomic_ref<int64_t>(*value_).fetch_add(1, std::memory_order_relaxed); }

}  // namespace ingot
