#pragma once
// The capabilities of this CPU, and the compiled variant of the vector code in use.
//
// A file <name>.simd.cpp is compiled once per level, each time into its own namespace INGOT_SIMD (simd_baseline:
// x86-64-v3 or plain aarch64; simd_avx512: x86-64-v4), and is called through INGOT_SIMD_CALL; a file
// <name>_tiles.simd.cpp once more, with AMX, and is called through INGOT_SIMD_TILES_CALL. Such a file includes only
// core/cpu/simd.h and plain structs: an inline function from a shared header, compiled with AVX-512 and then chosen by
// the linker for all callers, would crash on older CPUs. tools/check_simd_objects.py looks for such weak symbols.
#include <string>

namespace ingot {

enum class CpuLevel { baseline, avx512, avx512_bf16, avx512_amx };
// The level in use: the CPU's level, lowered by INGOT_CPU_LEVEL=baseline|avx512|avx512_bf16|avx512_amx. The last level
// needs the system's permission for AMX tiles, requested once.
CpuLevel cpu_level();
void set_cpu_level(CpuLevel level);  // for tests; never above the CPU's level
CpuLevel cpu_level_available();
const char* name_of(CpuLevel level);
std::string cpu_model();
int cpu_count();  // CPUs this process may run on

}  // namespace ingot

// INGOT_SIMD_DECLARE(void f(int64_t n, const float* x);) declares f in every level's namespace.
#ifdef INGOT_SIMD_AVX512
#define INGOT_SIMD_DECLARE(...)    \
  namespace ingot::simd_baseline { \
  __VA_ARGS__                      \
  }                                \
  namespace ingot::simd_avx512 {   \
  __VA_ARGS__                      \
  }
#define INGOT_SIMD_CALL(f, ...)                                                             \
  (::ingot::cpu_level() >= ::ingot::CpuLevel::avx512 ? ::ingot::simd_avx512::f(__VA_ARGS__) \
                                                     : ::ingot::simd_baseline::f(__VA_ARGS__))
#else
#define INGOT_SIMD_DECLARE(...)    \
  namespace ingot::simd_baseline { \
  __VA_ARGS__                      \
  }
#define INGOT_SIMD_CALL(f, ...) ::ingot::simd_baseline::f(__VA_ARGS__)
#endif

// The same for functions of <name>_tiles.simd.cpp.
#ifdef INGOT_SIMD_AMX
#define INGOT_SIMD_TILES_DECLARE(...) \
  INGOT_SIMD_DECLARE(__VA_ARGS__)     \
  namespace ingot::simd_amx {         \
  __VA_ARGS__                         \
  }
#define INGOT_SIMD_TILES_CALL(f, ...)                                                        \
  (::ingot::cpu_level() >= ::ingot::CpuLevel::avx512_amx ? ::ingot::simd_amx::f(__VA_ARGS__) \
                                                         : INGOT_SIMD_CALL(f __VA_OPT__(, ) __VA_ARGS__))
#else
#define INGOT_SIMD_TILES_DECLARE(...) INGOT_SIMD_DECLARE(__VA_ARGS__)
#define INGOT_SIMD_TILES_CALL(f, ...) INGOT_SIMD_CALL(f __VA_OPT__(, ) __VA_ARGS__)
#endif
