#pragma once
// Warp-wide tensor core products, fp32 accumulation: D (16 x 8) += A (16 x K) B (K x 8). With lane = 4 * g + t:
//   d[0..1]   row g,     columns 2t, 2t + 1      d[2..3]   row g + 8, the same
//   16 bit    a[0] row g, a[1] row g + 8: k = 2t, 2t + 1;   a[2], a[3] the same rows: k + 8
//             b[0] column g: k = 2t, 2t + 1;   b[1]: k + 8                                     (low half first)
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include <cstdint>

#include "ingot/core/dtype.h"

namespace ingot::ptx {

__device__ inline void mma_m16n8k16(bf16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma_m16n8k16(f16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace ingot::ptx
#endif
