// The choice of the gated products that the core computes, and of their kernels.
#include <algorithm>
#include <initializer_list>

#include "ingot/gpu/cublaslt.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/gemm/operands.h"
#include "ingot/gpu/gemm/variant.h"
#include "ingot/gpu/limits.h"
#include "ingot/kernels/swiglu/gated.h"

namespace ingot::cuda {
namespace {

using gemm::as_matrix;
using gemm::with_16_bit_type;

bool is_aligned(std::initializer_list<Tensor> operands) {
  for (const Tensor& t : operands)
    if (t && !gemm::rows_are_aligned(t)) return false;
  return true;
}
bool is_whole(std::initializer_list<Tensor> results) {
  for (const Tensor& t : results)
    if (t && !gemm::rows_are_whole(t)) return false;
  return true;
}

// Whether the GPU and the number of rows suit gated_few_rows().
bool has_few_rows(const GatedLinear& g) {
  return gemm::variant_on(g.x.device.index) == gemm::Variant::hopper && g.x.rows() <= kFewGatedRows;
}

}  // namespace

bool gated_linear_is_fused(const GatedLinear& g) {
  const int64_t rows = g.x.rows(), channels = g.x.cols(), hidden = g.transposed ? g.w_gate.cols() : g.w_gate.rows();
  const int device = g.x.device.index;
  if (gemm::variant_on(device) == gemm::Variant::none || !gemm::is_16_bit(g.x.dtype) || rows * channels * hidden == 0)
    return false;
  if (!is_aligned({g.x, g.w_gate, g.w_up, g.h, g.gate, g.up}) || !is_whole({g.h, g.gate})) return false;
  return !gpu::lt_available() || has_few_rows(g) ||
         gated_is_faster(rows, hidden, channels, gemm::tile_on(device, kGatedTile), gpu::sm_count(device));
}

void gated_linear(const GatedLinear& g, Stream stream) {
  GatedLinear m = g;
  for (Tensor* t : {&m.x, &m.w_gate, &m.w_up, &m.h, &m.gate, &m.up}) *t = as_matrix(*t);
#ifndef INGOT_EMULATE
  if (has_few_rows(m)) return gated_few_rows(m, stream);
#endif
  gemm::with_core(g.x.device.index, [&](auto core) {
    using Core = typename decltype(core)::type;
    with_16_bit_type(g.x.dtype, [&](auto type) { launch_gated<Core, decltype(type)>(m, stream); });
  });
}

namespace {
bool is_fused(const GatedGradients& g, const gemm::Problem& p) {
  const int device = g.dgate.device.index;
  if (gemm::variant_on(device) == gemm::Variant::none || !gemm::is_16_bit(g.dgate.dtype) || p.m * p.n * p.k == 0)
    return false;
  return !gpu::lt_available() || (!gemm::waits_for_memory(p, gpu::memory_bandwidth(device)) &&
                                  gemm::efficiency(p, gemm::tile_on(device, kGatedTile), gpu::sm_count(device)) >= 0.7);
}
GatedGradients as_matrices(const GatedGradients& g) {
  GatedGradients m = g;
  for (Tensor* t : {&m.dgate, &m.dup, &m.x, &m.w_gate, &m.w_up, &m.dx, &m.dw_gate, &m.dw_up}) *t = as_matrix(*t);
  return m;
}
}  // namespace

bool gated_dx_is_fused(const GatedGradients& g) {
  const gemm::Problem p{g.dx.rows(), g.dx.cols(), 2 * g.dgate.cols()};
  return is_aligned({g.dgate, g.dup, g.w_gate, g.w_up, g.dx}) && is_whole({g.dx}) && is_fused(g, p);
}
bool gated_dw_is_fused(const GatedGradients& g) {
  if (!g.dw_gate || !g.dw_up || g.dw_gate.dtype != g.dw_up.dtype) return false;
  const gemm::Problem p{g.dw_gate.rows(), g.dw_gate.cols(), g.x.rows(), 2};
  return is_aligned({g.dgate, g.dup, g.x, g.dw_gate, g.dw_up}) && is_whole({g.dw_gate}) && is_fused(g, p);
}
void gated_dx(const GatedGradients& g, Stream stream) {
  gemm::with_core(g.dx.device.index, [&](auto core) {
    using Core = typename decltype(core)::type;
    with_16_bit_type(g.dx.dtype, [&](auto type) { launch_gated_dx<Core, decltype(type)>(as_matrices(g), stream); });
  });
}
void gated_dw(const GatedGradients& g, Stream stream) {
  gemm::with_core(g.x.device.index, [&](auto core) {
    using Core = typename decltype(core)::type;
    with_16_bit_type(g.x.dtype, [&](auto type) { launch_gated_dw<Core, decltype(type)>(as_matrices(g), stream); });
  });
}

}  // namespace ingot::cuda
