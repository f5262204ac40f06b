#pragma once
// The functions of linear.simd.cpp and linear_tiles.simd.cpp, overloaded by type.
#include <cstdint>

#include "ingot/core/cpu/cpu.h"
#include "ingot/kernels/linear/cpu/linear.simd.h"

INGOT_SIMD_DECLARE(
    detail::GemmTile gemm_tile_f32(); detail::GemmTile gemm_tile_f64(); int64_t gemm_scratch_steps();
    void gemm_pack_f32(const detail::Gemm<float>& g, const detail::GemmChunk& c, const detail::GemmPackRange& r);
    void gemm_pack_f64(const detail::Gemm<double>& g, const detail::GemmChunk& c, const detail::GemmPackRange& r);
    void gemm_pack_a_f32(const detail::Gemm<float>& g, const detail::GemmChunk& c, const detail::GemmPackRange& r);
    void gemm_pack_a_f64(const detail::Gemm<double>& g, const detail::GemmChunk& c, const detail::GemmPackRange& r);
    void gemm_range_f32(const detail::Gemm<float>& g, const detail::GemmChunk& c, const detail::GemmRange& r,
                        float* scratch);
    void gemm_range_f64(const detail::Gemm<double>& g, const detail::GemmChunk& c, const detail::GemmRange& r,
                        double* scratch);
    void gemm_dot_f32(const detail::Gemm<float>& g, int64_t begin, int64_t end);
    void gemm_dot_f64(const detail::Gemm<double>& g, int64_t begin, int64_t end);
    void sum_columns_f32(const float* x, int64_t rows, int64_t stride, int64_t cols, float* sums);
    void sum_columns_f64(const double* x, int64_t rows, int64_t stride, int64_t cols, double* sums);)
INGOT_SIMD_TILES_DECLARE(detail::GemmTile gemm_tiles(); int64_t gemm_tiles_panel_bytes(int64_t steps);
                         void gemm_tiles_pack(const detail::Gemm<float>& g, const detail::GemmChunk& c,
                                              const detail::GemmPackRange& r);
                         void gemm_tiles_pack_a(const detail::Gemm<float>& g, const detail::GemmChunk& c,
                                                const detail::GemmPackRange& r);
                         void gemm_tiles_range(const detail::Gemm<float>& g, const detail::GemmChunk& c,
                                               const detail::GemmRange& r, float* scratch);)

namespace ingot::linear_cpu {

using detail::Gemm;
using detail::GemmChunk;
using detail::GemmPackRange;
using detail::GemmRange;
using detail::GemmTile;
using detail::panel_begin;

inline GemmTile tile_of(float) { return INGOT_SIMD_CALL(gemm_tile_f32); }
inline GemmTile tile_of(double) { return INGOT_SIMD_CALL(gemm_tile_f64); }
inline void pack(const Gemm<float>& g, const GemmChunk& c, const GemmPackRange& r) {
  INGOT_SIMD_CALL(gemm_pack_f32, g, c, r);
}
inline void pack(const Gemm<double>& g, const GemmChunk& c, const GemmPackRange& r) {
  INGOT_SIMD_CALL(gemm_pack_f64, g, c, r);
}
inline void pack_a(const Gemm<float>& g, const GemmChunk& c, const GemmPackRange& r) {
  INGOT_SIMD_CALL(gemm_pack_a_f32, g, c, r);
}
inline void pack_a(const Gemm<double>& g, const GemmChunk& c, const GemmPackRange& r) {
  INGOT_SIMD_CALL(gemm_pack_a_f64, g, c, r);
}
inline void multiply(const Gemm<float>& g, const GemmChunk& c, const GemmRange& r, float* s) {
  INGOT_SIMD_CALL(gemm_range_f32, g, c, r, s);
}
inline void multiply(const Gemm<double>& g, const GemmChunk& c, const GemmRange& r, double* s) {
  INGOT_SIMD_CALL(gemm_range_f64, g, c, r, s);
}
inline void dot_columns(const Gemm<float>& g, int64_t begin, int64_t end) {
  INGOT_SIMD_CALL(gemm_dot_f32, g, begin, end);
}
inline void dot_columns(const Gemm<double>& g, int64_t begin, int64_t end) {
  INGOT_SIMD_CALL(gemm_dot_f64, g, begin, end);
}
inline void sum_columns(const float* x, int64_t rows, int64_t stride, int64_t cols, float* sums) {
  INGOT_SIMD_CALL(sum_columns_f32, x, rows, stride, cols, sums);
}
inline void sum_columns(const double* x, int64_t rows, int64_t stride, int64_t cols, double* sums) {
  INGOT_SIMD_CALL(sum_columns_f64, x, rows, stride, cols, sums);
}

}  // namespace ingot::linear_cpu
