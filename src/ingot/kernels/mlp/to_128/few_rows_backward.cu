// The few-rows backward variant: the networks it supports, the division of the work, its two launches.
#include <algorithm>

#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/mlp/to_128/few_rows_backward.h"

namespace ingot::cuda {
namespace to_128_few_rows_backward {
namespace {

using namespace to_128_few_rows;
using tile::Swizzle;

// The division of the work; a pure function of the rows.
struct Config {
  int block_rows = 32;  // of the chain: 16, 32 or 64
  int tile = 32;        // rows of a cluster's dW: 32 or 64
  int sum_stages = 1;
};
// A chain's block takes few rows as long as every block has an SM. Sums of more rows use larger tiles, because such
// sums wait for memory.
Config pick_config(int64_t rows) {
  if (rows <= kBlocks * kChunk) return {.block_rows = 16, .tile = 32, .sum_stages = 1};
  if (rows <= 2048) return {.block_rows = 16, .tile = 32, .sum_stages = 2};
  if (rows <= 4096) return {.block_rows = 32, .tile = 64, .sum_stages = 2};
  return {.block_rows = 64, .tile = 64, .sum_stages = 3};
}

constexpr int64_t chain_stage_bytes(int block_rows, int panels) {
  return int64_t(panels) * 128 * (kPanel * panels + block_rows);
}

Chain make_chain(const MlpBackward& m, const Config& c) {
  Chain a{
      .layers = int(m.layers.size()), .lowest = mlp_lowest_product(m), .act = m.act, .activate_last = m.activate_last};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    a.layer[l] = {.g = m.layers[l].g ? m.layers[l].g.data : nullptr,
                  .n = int(m.layers[l].w.rows()),
                  .keeps_dz = mlp_keeps_dz(m, l)};
    a.has_gain = a.has_gain || m.layers[l].g;
  }
  // 10 KB for the data beside the stages and the two tiles of dz.
  const int panels = mlp_panels(m);
  const int64_t left = kMlpSharedBytes - 10 * 1024 - 2 * panels * c.block_rows * 128;
  const int fit = int(left / chain_stage_bytes(c.block_rows, panels)), steps = a.layers - a.lowest;
  a.stages = std::max(1, std::min(fit, steps));
  return a;
}

Sums make_sums(const MlpBackward& m, const Config& c, bool after_chain) {
  Sums a{.chunks = int((m.x.rows() + kChunk - 1) / kChunk), .after_chain = after_chain};
  a.stages = std::min({c.sum_stages, kMaxSumStages, (a.chunks + kBlocks - 1) / kBlocks});
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const MlpLayer& grad = m.grads[l];
    a.layer[l] = {mlp_sum_layer(m.layers[l], m.grads[l])};
    if (mlp_trained(grad)) a.layer[l].tiles = int((m.layers[l].w.rows() + c.tile - 1) / c.tile);
    a.layer[l].dz_is_late = mlp_keeps_dz(m, l);
    a.want_db = a.want_db || grad.b;
  }
  return a;
}

void run(const MlpBackward& m, Stream stream) {
  const Config c = pick_config(m.x.rows());
  const int device = m.x.device.index, panels = mlp_panels(m);
  const auto box = [](int rows, int cols) {
    return gpu::TmaBox{.rows = rows, .cols = cols, .swizzle = cols == kPanel ? Swizzle::b128 : Swizzle::b64};
  };
  const Chain chain = make_chain(m, c);
  const bool is_f16 = m.x.dtype == DType::f16, has_chain = chain.lowest < chain.layers || chain.activate_last;
  if (has_chain) {
    const MlpChainMaps maps = mlp_chain_maps(m, box(c.block_rows, kPanel), box(kPanel * panels, kPanel));
    const ChainLaunch at{.rows = m.x.rows(), .block_rows = c.block_rows, .panels = panels, .device = device};
    is_f16 ? launch_chain<f16>(maps, chain, at, stream) : launch_chain<bf16>(maps, chain, at, stream);
  }
  const Sums sums = make_sums(m, c, has_chain);
  SumLaunch at{.tile = c.tile, .panels = panels, .device = device};
  for (size_t l = 0; l < m.layers.size(); ++l) at.tiles += sums.layer[l].tiles;
  if (at.tiles == 0) return;
  const MlpSumMaps maps = mlp_sum_maps(m, box(kChunk, c.tile), box(kChunk, kPanel));
  is_f16 ? launch_sums<f16>(maps, sums, at, stream) : launch_sums<bf16>(maps, sums, at, stream);
}

}  // namespace
}  // namespace to_128_few_rows_backward

using namespace to_128_few_rows_backward;

// Values not kept in x's type would need a third launch.
bool mlp_backward_to_128_few_rows_takes(const MlpBackward& m) {
  return mlp_backward_has_shape_and_slopes(m, kMlpTo128) && mlp_backward_has_values(m);
}

void mlp_backward_to_128_few_rows(const MlpBackward& m, Stream stream) {
  if (m.x.rows() == 0 || mlp_first_layer(m) == m.layers.size()) return;
  run(m, stream);
}

int64_t mlp_backward_to_128_few_rows_workspace_bytes(const MlpBackward& m) { return mlp_dz_bytes(m); }

}  // namespace ingot::cuda
