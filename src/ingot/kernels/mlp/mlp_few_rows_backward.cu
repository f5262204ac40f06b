// The few-rows backward form: what it takes, how the work is cut, its two launches.
#include <algorithm>

#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/mlp/mlp_backward.h"
#include "ingot/kernels/mlp/mlp_few_rows_backward.h"

namespace ingot::cuda {
namespace few_rows_backward {
namespace {

using namespace few_rows;
using tile::Swizzle;

// How the work is cut; a pure function of the rows.
struct Config {
  int block_rows = 32;  // of the chain: 16, 32 or 64
  int tile = 32;        // rows of a dW that a cluster sums: 32 or 64
  int sum_stages = 1;
};
// A chain's block takes few rows as long as there is an SM for each; sums of more rows want larger tiles, as they then
// wait for memory.
Config pick_config(int64_t rows) {
  if (rows <= kBlocks * kChunk) return {.block_rows = 16, .tile = 32, .sum_stages = 1};
  if (rows <= 2048) return {.block_rows = 16, .tile = 32, .sum_stages = 2};
  if (rows <= 4096) return {.block_rows = 32, .tile = 64, .sum_stages = 2};
  return {.block_rows = 64, .tile = 64, .sum_stages = 3};
}

// Of dz of the top layer there is dy, unless that layer is activated.
bool keeps_dz(const MlpBackward& m, size_t l) { return mlp_trained(m.grads[l]) && mlp_activated(m, l); }

constexpr int64_t chain_stage_bytes(int block_rows, int panels) {
  return int64_t(panels) * 128 * (kPanel * panels + block_rows);
}

ChainMaps make_chain_maps(const MlpBackward& m, const Chain& a, const Config& c) {
  const gpu::TmaBox rows{.rows = c.block_rows, .cols = kPanel, .swizzle = Swizzle::b128};
  const gpu::TmaBox weights{.rows = kPanel * mlp_panels(m), .cols = kPanel, .swizzle = Swizzle::b128};
  ChainMaps maps{};
  maps.dy = gpu::tensor_map("mlp_backward: dy", mlp_matrix(m.dy), rows);
  if (m.dx) maps.dx = gpu::tensor_map("mlp_backward: dx", mlp_matrix(m.dx), rows);
  for (size_t l = size_t(a.lowest); l < m.layers.size(); ++l)
    maps.w[l] = gpu::tensor_map("mlp_backward: w", m.layers[l].w, weights);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    if (mlp_activated(m, l)) maps.h[l] = gpu::tensor_map("mlp_backward: saved", mlp_layer_part(m, m.saved, l), rows);
    if (keeps_dz(m, l))
      maps.dz[l] = gpu::tensor_map("mlp_backward: workspace", mlp_layer_part(m, m.workspace, l), rows);
  }
  return maps;
}
Chain make_chain(const MlpBackward& m, const Config& c) {
  Chain a{.layers = int(m.layers.size()),
          .lowest = m.dx ? 0 : int(mlp_first_layer(m)) + 1,
          .act = m.act,
          .activate_last = m.activate_last};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    a.layer[l] = {
        .g = m.layers[l].g ? m.layers[l].g.data : nullptr, .n = int(m.layers[l].w.rows()), .keeps_dz = keeps_dz(m, l)};
    a.has_gain = a.has_gain || m.layers[l].g;
  }
  // 10 KB are what lies beside the stages and the two tiles of dz.
  const int panels = mlp_panels(m);
  const int64_t left = kMlpSharedBytes - 10 * 1024 - 2 * panels * c.block_rows * 128;
  const int fit = int(left / chain_stage_bytes(c.block_rows, panels)), steps = a.layers - a.lowest;
  a.stages = std::max(1, std::min(fit, steps));
  return a;
}

SumMaps make_sum_maps(const MlpBackward& m, const Sums& a, const Config& c) {
  const gpu::TmaBox inputs{.rows = kChunk, .cols = kPanel, .swizzle = Swizzle::b128};
  const gpu::TmaBox gradients{.rows = kChunk, .cols = c.tile, .swizzle = c.tile == 64 ? Swizzle::b128 : Swizzle::b64};
  SumMaps maps{};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    if (a.layer[l].tiles == 0) continue;
    maps.h[l] =
        gpu::tensor_map("mlp_backward: input", l == 0 ? mlp_matrix(m.x) : mlp_layer_part(m, m.saved, l - 1), inputs);
    maps.dz[l] = gpu::tensor_map("mlp_backward: dz",
                                 keeps_dz(m, l) ? mlp_layer_part(m, m.workspace, l) : mlp_matrix(m.dy), gradients);
  }
  return maps;
}
Sums make_sums(const MlpBackward& m, const Config& c, bool after_chain) {
  Sums a{.chunks = int((m.x.rows() + kChunk - 1) / kChunk), .after_chain = after_chain};
  a.stages = std::min({c.sum_stages, kMaxSumStages, (a.chunks + kBlocks - 1) / kBlocks});
  const auto at = [](const Tensor& t) { return t ? static_cast<float*>(t.data) : nullptr; };
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const MlpLayer &layer = m.layers[l], &grad = m.grads[l];
    a.layer[l] = {.v = layer.w.data,
                  .g = layer.g ? layer.g.data : nullptr,
                  .dw = at(grad.w),
                  .db = at(grad.b),
                  .dg = at(grad.g),
                  .n = int(layer.w.rows()),
                  .k = int(layer.w.cols()),
                  .tiles = mlp_trained(grad) ? int((layer.w.rows() + c.tile - 1) / c.tile) : 0,
                  .dz_is_late = keeps_dz(m, l)};
    a.want_db = a.want_db || grad.b;
  }
  return a;
}

void run(const MlpBackward& m, Stream stream) {
  const Config c = pick_config(m.x.rows());
  const int device = m.x.device.index, panels = mlp_panels(m);
  const Chain chain = make_chain(m, c);
  const bool is_f16 = m.x.dtype == DType::f16, has_chain = chain.lowest < chain.layers || chain.activate_last;
  if (has_chain) {
    const ChainMaps maps = make_chain_maps(m, chain, c);
    const ChainLaunch at{.rows = m.x.rows(), .block_rows = c.block_rows, .panels = panels, .device = device};
    is_f16 ? launch_chain<f16>(maps, chain, at, stream) : launch_chain<bf16>(maps, chain, at, stream);
  }
  const Sums sums = make_sums(m, c, has_chain);
  SumLaunch at{.tile = c.tile, .panels = panels, .device = device};
  for (size_t l = 0; l < m.layers.size(); ++l) at.tiles += sums.layer[l].tiles;
  if (at.tiles == 0) return;
  const SumMaps maps = make_sum_maps(m, sums, c);
  is_f16 ? launch_sums<f16>(maps, sums, at, stream) : launch_sums<bf16>(maps, sums, at, stream);
}

}  // namespace
}  // namespace few_rows_backward

using namespace few_rows_backward;

// Values that were not kept in x's type would cost a third launch.
bool mlp_few_rows_backward_takes(const MlpBackward& m) { return mlp_backward_is_fast(m) && mlp_backward_has_values(m); }

void mlp_few_rows_backward(const MlpBackward& m, Stream stream) {
  if (m.x.rows() == 0 || mlp_first_layer(m) == m.layers.size()) return;
  run(m, stream);
}

// dz of every layer but a top one that is not activated, in x's type.
int64_t mlp_few_rows_backward_workspace_bytes(const MlpBackward& m) {
  int64_t columns = 0;
  for (size_t l = 0; l < m.layers.size(); ++l)
    if (mlp_activated(m, l)) columns += m.layers[l].w.rows();
  return m.x.rows() * columns * size_of(m.x.dtype);
}

}  // namespace ingot::cuda
