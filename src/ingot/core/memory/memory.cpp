#include "ingot/core/memory/memory.h"

#include <algorithm>
#include <fstream>

#include "ingot/core/check.h"
#include "ingot/core/progress.h"

namespace ingot {
namespace {

// Returns the number after `key` in a file of lines "key number ...", or -1.
int64_t number_after(const char* path, const std::string& key) {
  std::ifstream in(path);
  std::string word;
  for (std::string line; std::getline(in, line);)
    if (line.rfind(key, 0) == 0) return std::strtoll(line.c_str() + key.size(), nullptr, 10);
  return -1;
}
// Reads a file with a single number. Returns -1 for "max" and where the file is absent.
int64_t number_in(const char* path) {
  std::ifstream in(path);
  int64_t n = -1;
  return in >> n ? n : -1;
}

}  // namespace

int64_t available_memory() {
  const int64_t system = number_after("/proc/meminfo", "MemAvailable:");
  int64_t available = system < 0 ? -1 : system * 1024;
  if (const int64_t most = number_in("/sys/fs/cgroup/memory.max"); most >= 0) {
    // The control group counts cached file pages as used, although the system can reclaim these pages.
    const int64_t used = std::max<int64_t>(0, number_after("/sys/fs/cgroup/memory.stat", "anon "));
    available = available < 0 ? most - used : std::min(available, most - used);
  }
  return available;
}

int64_t resident_memory() {
  const int64_t kilobytes = number_after("/proc/self/status", "VmRSS:");
  return kilobytes < 0 ? -1 : kilobytes * 1024;
}

void require_memory(int64_t bytes, const std::string& what, const Allocator& from) {
  const int64_t available = from.available();
  const Device device = from.device();
  const std::string where = device.kind == Device::cpu ? "" : detail::concat(" on ", device);
  if (available >= 0 && bytes > available)
    fail(ErrorCode::unsupported, what, " needs ", format_bytes(double(bytes)), " of memory", where, ", found ",
         format_bytes(double(available)), " available");
}

}  // namespace ingot
