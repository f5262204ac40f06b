#pragma once
// Warpgroup products: D (64 x N, fp32, in registers) = A (64 x 16) B (16 x N) + (accumulate ? D : 0), issued by all 128
// threads of 4 consecutive warps whose first is a multiple of 4. A is a descriptor (tile/descriptor.cuh) or registers,
// B a descriptor. Products run asynchronously:
//     wgmma_fence(); wgmma<...>(d, a, b, ...); ...; wgmma_commit_group(); wgmma_wait_group<0>();
// and no access to d or A's registers may stand between the fence and the wait: else ptxas serialises (C7510). Thread
// 32 * w + 4 * g + t of the warpgroup holds, for every 8 columns j:
//     d[4 * j + 0..1]   row 16 * w + g,       columns 8 * j + 2 * t and + 1
//     d[4 * j + 2..3]   row 16 * w + g + 8,   the same columns
// A in registers: a[0] (row g, k = 2t, 2t + 1), a[1] (row g + 8), a[2] (row g, k + 8), a[3] (row g + 8, k + 8); low
// half first. This is the layout of d: d[8 * i .. 8 * i + 7] packed in pairs is A for columns 16 * i .. 16 * i + 15.
#include <cstdint>
#include <type_traits>

#include "ingot/core/dtype.h"

namespace ingot::ptx {

// The index of an operand with consecutive addresses: K, or M (of A) and N (of B).
enum class Major : uint32_t { k = 0, mn = 1 };

#ifdef __CUDACC__

// Orders earlier accesses to registers and shared memory before the following products.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// At most N groups are left running.
template <int N> __device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// The compiler moves no access to these registers across this point: after a wait, before d is read.
template <int N> __device__ __forceinline__ void fence_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> __device__ __forceinline__ void fence_registers(uint32_t (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// The operand list of d for N = 8, 16, ... 256: the template's text and the registers, four to a step of 8 columns.
#define INGOT_D_TEXT_8 "%0, %1, %2, %3"
#define INGOT_D_TEXT_16 INGOT_D_TEXT_8 ", %4, %5, %6, %7"
#define INGOT_D_TEXT_24 INGOT_D_TEXT_16 ", %8, %9, %10, %11"
#define INGOT_D_TEXT_32 INGOT_D_TEXT_24 ", %12, %13, %14, %15"
#define INGOT_D_TEXT_40 INGOT_D_TEXT_32 ", %16, %17, %18, %19"
#define INGOT_D_TEXT_48 INGOT_D_TEXT_40 ", %20, %21, %22, %23"
#define INGOT_D_TEXT_56 INGOT_D_TEXT_48 ", %24, %25, %26, %27"
#define INGOT_D_TEXT_64 INGOT_D_TEXT_56 ", %28, %29, %30, %31"
#define INGOT_D_TEXT_72 INGOT_D_TEXT_64 ", %32, %33, %34, %35"
#define INGOT_D_TEXT_80 INGOT_D_TEXT_72 ", %36, %37, %38, %39"
#define INGOT_D_TEXT_88 INGOT_D_TEXT_80 ", %40, %41, %42, %43"
#define INGOT_D_TEXT_96 INGOT_D_TEXT_88 ", %44, %45, %46, %47"
#define INGOT_D_TEXT_104 INGOT_D_TEXT_96 ", %48, %49, %50, %51"
#define INGOT_D_TEXT_112 INGOT_D_TEXT_104 ", %52, %53, %54, %55"
#define INGOT_D_TEXT_120 INGOT_D_TEXT_112 ", %56, %57, %58, %59"
#define INGOT_D_TEXT_128 INGOT_D_TEXT_120 ", %60, %61, %62, %63"
#define INGOT_D_TEXT_136 INGOT_D_TEXT_128 ", %64, %65, %66, %67"
#define INGOT_D_TEXT_144 INGOT_D_TEXT_136 ", %68, %69, %70, %71"
#define INGOT_D_TEXT_152 INGOT_D_TEXT_144 ", %72, %73, %74, %75"
#define INGOT_D_TEXT_160 INGOT_D_TEXT_152 ", %76, %77, %78, %79"
#define INGOT_D_TEXT_168 INGOT_D_TEXT_160 ", %80, %81, %82, %83"
#define INGOT_D_TEXT_176 INGOT_D_TEXT_168 ", %84, %85, %86, %87"
#define INGOT_D_TEXT_184 INGOT_D_TEXT_176 ", %88, %89, %90, %91"
#define INGOT_D_TEXT_192 INGOT_D_TEXT_184 ", %92, %93, %94, %95"
#define INGOT_D_TEXT_200 INGOT_D_TEXT_192 ", %96, %97, %98, %99"
#define INGOT_D_TEXT_208 INGOT_D_TEXT_200 ", %100, %101, %102, %103"
#define INGOT_D_TEXT_216 INGOT_D_TEXT_208 ", %104, %105, %106, %107"
#define INGOT_D_TEXT_224 INGOT_D_TEXT_216 ", %108, %109, %110, %111"
#define INGOT_D_TEXT_232 INGOT_D_TEXT_224 ", %112, %113, %114, %115"
#define INGOT_D_TEXT_240 INGOT_D_TEXT_232 ", %116, %117, %118, %119"
#define INGOT_D_TEXT_248 INGOT_D_TEXT_240 ", %120, %121, %122, %123"
#define INGOT_D_TEXT_256 INGOT_D_TEXT_248 ", %124, %125, %126, %127"
#define INGOT_D_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define INGOT_D_8 INGOT_D_FOUR(0)
#define INGOT_D_16 INGOT_D_8, INGOT_D_FOUR(4)
#define INGOT_D_24 INGOT_D_16, INGOT_D_FOUR(8)
#define INGOT_D_32 INGOT_D_24, INGOT_D_FOUR(12)
#define INGOT_D_40 INGOT_D_32, INGOT_D_FOUR(16)
#define INGOT_D_48 INGOT_D_40, INGOT_D_FOUR(20)
#define INGOT_D_56 INGOT_D_48, INGOT_D_FOUR(24)
#define INGOT_D_64 INGOT_D_56, INGOT_D_FOUR(28)
#define INGOT_D_72 INGOT_D_64, INGOT_D_FOUR(32)
#define INGOT_D_80 INGOT_D_72, INGOT_D_FOUR(36)
#define INGOT_D_88 INGOT_D_80, INGOT_D_FOUR(40)
#define INGOT_D_96 INGOT_D_88, INGOT_D_FOUR(44)
#define INGOT_D_104 INGOT_D_96, INGOT_D_FOUR(48)
#define INGOT_D_112 INGOT_D_104, INGOT_D_FOUR(52)
#define INGOT_D_120 INGOT_D_112, INGOT_D_FOUR(56)
#define INGOT_D_128 INGOT_D_120, INGOT_D_FOUR(60)
#define INGOT_D_136 INGOT_D_128, INGOT_D_FOUR(64)
#define INGOT_D_144 INGOT_D_136, INGOT_D_FOUR(68)
#define INGOT_D_152 INGOT_D_144, INGOT_D_FOUR(72)
#define INGOT_D_160 INGOT_D_152, INGOT_D_FOUR(76)
#define INGOT_D_168 INGOT_D_160, INGOT_D_FOUR(80)
#define INGOT_D_176 INGOT_D_168, INGOT_D_FOUR(84)
#define INGOT_D_184 INGOT_D_176, INGOT_D_FOUR(88)
#define INGOT_D_192 INGOT_D_184, INGOT_D_FOUR(92)
#define INGOT_D_200 INGOT_D_192, INGOT_D_FOUR(96)
#define INGOT_D_208 INGOT_D_200, INGOT_D_FOUR(100)
#define INGOT_D_216 INGOT_D_208, INGOT_D_FOUR(104)
#define INGOT_D_224 INGOT_D_216, INGOT_D_FOUR(108)
#define INGOT_D_232 INGOT_D_224, INGOT_D_FOUR(112)
#define INGOT_D_240 INGOT_D_232, INGOT_D_FOUR(116)
#define INGOT_D_248 INGOT_D_240, INGOT_D_FOUR(120)
#define INGOT_D_256 INGOT_D_248, INGOT_D_FOUR(124)

// One instruction: D's registers are operands 0 to n / 2 - 1, so the numbers of the further operands depend on n.
#define INGOT_WGMMA_SS(n, type, a_, b_, p_, ta_, tb_)                                                          \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " p_ ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type \
               "." type " {" INGOT_D_TEXT_##n "}, " a_ ", " b_ ", p, 1, 1, " ta_ ", " tb_ ";}"                 \
               : INGOT_D_##n                                                                                   \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kMajorA)), "n"(int(kMajorB))                    \
               : "memory")
#define INGOT_WGMMA_RS(n, type, a0_, a1_, a2_, a3_, b_, p_, tb_)                                                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " p_ ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type      \
               "." type " {" INGOT_D_TEXT_##n "}, {" a0_ ", " a1_ ", " a2_ ", " a3_ "}, " b_ ", p, 1, 1, " tb_ ";}" \
               : INGOT_D_##n                                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kMajorB))        \
               : "memory")
// X(n, then the numbers of the seven operands after d)
#define INGOT_WGMMA_ALL(X)                                       \
  X(8, "%4", "%5", "%6", "%7", "%8", "%9", "%10")                \
  X(16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")           \
  X(24, "%12", "%13", "%14", "%15", "%16", "%17", "%18")         \
  X(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")         \
  X(40, "%20", "%21", "%22", "%23", "%24", "%25", "%26")         \
  X(48, "%24", "%25", "%26", "%27", "%28", "%29", "%30")         \
  X(56, "%28", "%29", "%30", "%31", "%32", "%33", "%34")         \
  X(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")         \
  X(72, "%36", "%37", "%38", "%39", "%40", "%41", "%42")         \
  X(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")         \
  X(88, "%44", "%45", "%46", "%47", "%48", "%49", "%50")         \
  X(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")         \
  X(104, "%52", "%53", "%54", "%55", "%56", "%57", "%58")        \
  X(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62")        \
  X(120, "%60", "%61", "%62", "%63", "%64", "%65", "%66")        \
  X(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")        \
  X(136, "%68", "%69", "%70", "%71", "%72", "%73", "%74")        \
  X(144, "%72", "%73", "%74", "%75", "%76", "%77", "%78")        \
  X(152, "%76", "%77", "%78", "%79", "%80", "%81", "%82")        \
  X(160, "%80", "%81", "%82", "%83", "%84", "%85", "%86")        \
  X(168, "%84", "%85", "%86", "%87", "%88", "%89", "%90")        \
  X(176, "%88", "%89", "%90", "%91", "%92", "%93", "%94")        \
  X(184, "%92", "%93", "%94", "%95", "%96", "%97", "%98")        \
  X(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102")     \
  X(200, "%100", "%101", "%102", "%103", "%104", "%105", "%106") \
  X(208, "%104", "%105", "%106", "%107", "%108", "%109", "%110") \
  X(216, "%108", "%109", "%110", "%111", "%112", "%113", "%114") \
  X(224, "%112", "%113", "%114", "%115", "%116", "%117", "%118") \
  X(232, "%116", "%117", "%118", "%119", "%120", "%121", "%122") \
  X(240, "%120", "%121", "%122", "%123", "%124", "%125", "%126") \
  X(248, "%124", "%125", "%126", "%127", "%128", "%129", "%130") \
  X(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// Both operands from shared memory. T: bf16 or f16.
template <class T, int N, Major kMajorA = Major::k, Major kMajorB = Major::k>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma has 8 to 256 columns in steps of 8");
#define INGOT_CASE(n, o0, o1, o2, o3, o4, o5, o6)    \
  if constexpr (N == n) {                            \
    if constexpr (std::is_same_v<T, bf16>)           \
      INGOT_WGMMA_SS(n, "bf16", o0, o1, o2, o3, o4); \
    else                                             \
      INGOT_WGMMA_SS(n, "f16", o0, o1, o2, o3, o4);  \
  }
  INGOT_WGMMA_ALL(INGOT_CASE)
#undef INGOT_CASE
}

// A from registers, always row-major.
template <class T, int N, Major kMajorB = Major::k>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma has 8 to 256 columns in steps of 8");
#define INGOT_CASE(n, o0, o1, o2, o3, o4, o5, o6)            \
  if constexpr (N == n) {                                    \
    if constexpr (std::is_same_v<T, bf16>)                   \
      INGOT_WGMMA_RS(n, "bf16", o0, o1, o2, o3, o4, o5, o6); \
    else                                                     \
      INGOT_WGMMA_RS(n, "f16", o0, o1, o2, o3, o4, o5, o6);  \
  }
  INGOT_WGMMA_ALL(INGOT_CASE)
#undef INGOT_CASE
}

#endif
}  // namespace ingot::ptx
