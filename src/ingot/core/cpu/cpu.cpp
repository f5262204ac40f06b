#include "ingot/core/cpu/cpu.h"

#include <sched.h>
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "ingot/core/check.h"

namespace ingot {
namespace {

constexpr CpuLevel kLevels[] = {CpuLevel::baseline, CpuLevel::avx512, CpuLevel::avx512_bf16, CpuLevel::avx512_amx};

#ifdef INGOT_SIMD_AMX
// A thread's tiles are 8 KB of state, which Linux (5.16 on) keeps only on request of a process. The permission covers
// running threads and later threads.
bool tiles_granted() {
#ifdef __linux__
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

CpuLevel cpu_level_available() {
#ifdef INGOT_SIMD_AVX512
  static const CpuLevel level = [] {
    __builtin_cpu_init();
    const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    if (!v4) return CpuLevel::baseline;
    if (!__builtin_cpu_supports("avx512bf16")) return CpuLevel::avx512;
#ifdef INGOT_SIMD_AMX
    if (tiles_granted()) return CpuLevel::avx512_amx;
#endif
    return CpuLevel::avx512_bf16;
  }();
  return level;
#else
  return CpuLevel::baseline;
#endif
}

const char* name_of(CpuLevel level) {
  switch (level) {
    case CpuLevel::baseline: return "baseline";
    case CpuLevel::avx512: return "avx512";
    case CpuLevel::avx512_bf16: return "avx512_bf16";
    case CpuLevel::avx512_amx: return "avx512_amx";
  }
  return "?";
}

namespace {
CpuLevel initial_level() {
  const char* wish = std::getenv("INGOT_CPU_LEVEL");
  if (wish == nullptr || *wish == 0) return cpu_level_available();
  for (CpuLevel level : kLevels)
    if (std::string(wish) == name_of(level)) return std::min(level, cpu_level_available());
  fail(ErrorCode::usage, "INGOT_CPU_LEVEL: found '", wish, "', expected baseline, avx512, avx512_bf16 or avx512_amx");
}
std::atomic<CpuLevel>& current() {
  static std::atomic<CpuLevel> level = initial_level();
  return level;
}
}  // namespace

CpuLevel cpu_level() { return current().load(std::memory_order_relaxed); }
void set_cpu_level(CpuLevel level) { current() = std::min(level, cpu_level_available()); }

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  return "unknown CPU";
}

int cpu_count() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace ingot
