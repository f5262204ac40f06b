#include "ingot/core/memory/allocator.h"

#include <sys/mman.h>

#include "ingot/core/check.h"
#include "ingot/core/memory/memory.h"

namespace ingot {
namespace {

class SystemMemory final : public Allocator {
 public:
  Device device() const override { return {}; }
  void* take(int64_t bytes) override {
    void* memory =
        mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail(ErrorCode::io, "arena: the system refused ", bytes, " bytes of memory");
    madvise(memory, size_t(bytes), MADV_HUGEPAGE);  // a hint; failure changes nothing
    return memory;
  }
  void give_back(void* memory, int64_t bytes) noexcept override { munmap(memory, size_t(bytes)); }
  bool gives_zeros() const override { return true; }
  int64_t available() const override { return available_memory(); }
};

}  // namespace

Allocator& system_memory() {
  static SystemMemory memory;
  return memory;
}

}  // namespace ingot
