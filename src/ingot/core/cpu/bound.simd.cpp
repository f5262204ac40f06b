// Register-to-register multiply-adds and nothing else: the machine's bound for products.
#include "ingot/core/cpu/simd.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_SIMD {

// Twelve chains cover the latency of two multiply-add units. Returns the operations done.
double fma_loop_f32(int64_t rounds) {
  constexpr int kChains = 12;
  Vec<float> acc[kChains] = {};
  Vec<float> a = splat(0.9999999f), b = splat(1e-7f);
  for (int c = 0; c < kChains; ++c) asm volatile("" : "+v"(acc[c]));  // equal chains would be computed once
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));  // keeps the loop
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = acc[c] * a + b;  // a * b alone would be computed once for all chains
  }
  for (int c = 0; c < kChains; ++c) asm volatile("" ::"v"(acc[c]));
  return double(rounds) * kChains * kLanes<float> * 2;
}

#if defined(__AVX512F__)
__attribute__((target("avx512bf16"))) double fma_loop_bf16(int64_t rounds) {
  constexpr int kChains = 12;
  __m512 acc[kChains] = {};
  __m512bh a{}, b{};
  for (int c = 0; c < kChains; ++c) asm volatile("" : "+v"(acc[c]));  // equal chains would be computed once
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_dpbf16_ps(acc[c], a, b);
  }
  for (int c = 0; c < kChains; ++c) asm volatile("" ::"v"(acc[c]));
  return double(rounds) * kChains * 16 * 4;
}
#else
double fma_loop_bf16(int64_t) { return 0; }
#endif

}  // namespace ingot::INGOT_SIMD
