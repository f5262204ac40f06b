#pragma once
// The plan of the portable kernels: the operands' addresses, the parts of the workspace, the division of the work.
#include "ingot/kernels/mlp/portable/portable.h"

namespace ingot::cuda {

// The part of the plan that forward and backward have in common.
template <class M> PortableRows portable_rows(const M& m, int& scales) {
  PortableRows p;
  p.depth = int(m.layers.size());
  p.rows = m.x.rows();
  p.x = m.x.data, p.x_stride = m.x.row_stride();
  p.act = m.act, p.activate_last = m.activate_last;
  p.saved = m.saved.data;
  p.saved_f32 = m.saved && m.saved.dtype == DType::f32;
  p.saves_value = slope_follows_from_value(m.act);
  int64_t saved_at = 0;
  scales = 0;
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const MlpLayer& layer = m.layers[l];
    PortableLayer& to = p.layer[l];
    to.w = layer.w.data, to.b = layer.b.data, to.g = layer.g.data;
    to.N = int(layer.w.rows()), to.K = int(layer.w.cols());
    to.saved_at = saved_at, to.scale_at = scales;
    if (mlp_activated(m, l)) saved_at += p.rows * to.N;
    if (layer.g) scales += to.N;
    p.weight_norm |= bool(layer.g);
  }
  p.stride = portable_stride(int(mlp_widest(m)), int(size_of(m.x.dtype)));
  return p;
}

// The plan of the backward pass with its workspace; without memory it only computes sizes.
struct PortableBackward {
  PortableRows rows;
  PortableGrad grad;
  int scales = 0;
  int64_t bytes = 0;

  explicit PortableBackward(const MlpBackward& m) : base_(static_cast<char*>(m.workspace.data)), m_(m) {
    rows = portable_rows(m, scales);
    first_layer();
    place_activations();
    cut_gradients();
  }

 private:
  static int grad_tiles(int width) { return (width + kGradTile - 1) / kGradTile; }
  void* take(int64_t elements, int64_t size) {
    const int64_t begin = bytes;
    bytes += (elements * size + 127) / 128 * 128;
    return base_ == nullptr ? nullptr : base_ + begin;
  }
  void first_layer() {
    rows.first = int(mlp_first_layer(m_));
    if (m_.dx) rows.dx = m_.dx.data, rows.dx_stride = m_.dx.row_stride();
    rows.dy = m_.dy.data, rows.dy_stride = m_.dy.row_stride();
  }
  void place_activations() {
    const int64_t T = rows.rows, size = size_of(m_.x.dtype);
    if (!m_.saved) {
      rows.recomputed = m_.activate_last ? rows.depth : rows.depth - 1;
      rows.saved = take(mlp_saved_elements(T, m_.layers, m_.activate_last), size);
    }
    const bool form_inputs = !rows.saves_value || (m_.saved && m_.saved.dtype != m_.x.dtype);
    for (int l = 0; l < rows.depth; ++l) {
      PortableLayer& layer = rows.layer[l];
      if (mlp_activated(m_, size_t(l))) layer.dz = take(T * layer.N, size);
      if (l > 0 && form_inputs) layer.input = take(T * layer.K, size);
    }
  }
  void cut_gradients() {
    const int64_t size = size_of(m_.x.dtype);
    int blocks = 0;
    grad.depth = rows.depth, grad.rows = rows.rows;
    for (int l = 0; l < rows.depth; ++l) {
      const PortableLayer& from = rows.layer[l];
      const MlpLayer& into = m_.grads[size_t(l)];
      PortableGrad::Layer& to = grad.layer[l];
      to.N = from.N, to.K = from.K, to.v = from.w, to.g = from.g;
      to.dz = from.dz, to.dz_stride = from.N;
      if (!mlp_activated(m_, size_t(l))) to.dz = rows.dy, to.dz_stride = rows.dy_stride;
      to.h = rows.x, to.h_stride = rows.x_stride;
      if (l > 0) {
        to.h_stride = from.K;
        to.h = from.input != nullptr ? from.input
                                     : static_cast<const char*>(rows.saved) + rows.layer[l - 1].saved_at * size;
      }
      to.dw = static_cast<float*>(into.w.data);
      to.db = static_cast<float*>(into.b.data);
      to.dg = static_cast<float*>(into.g.data);
      if (from.g != nullptr || m_.layers[size_t(l)].g)
        to.whole = static_cast<float*>(take(int64_t(from.N) * from.K, sizeof(float)));
      to.first_tile = grad.tiles, to.first_block = blocks;
      grad.tiles += grad_tiles(to.N) * grad_tiles(to.K);
      blocks += grad_tiles(to.N);
    }
    const PortableSplit split = pick_split(rows.rows, grad.tiles);
    grad.splits = split.splits, grad.rows_per_split = split.rows_per_split;
    rows.counter_count = grad.tiles + blocks;
    rows.counters = grad.tile_counter = static_cast<uint32_t*>(take(rows.counter_count, sizeof(uint32_t)));
    grad.block_counter = grad.tile_counter + grad.tiles;
    if (grad.splits == 1) return;
    grad.partial = static_cast<float*>(take(int64_t(grad.tiles) * grad.splits * kGradTile * kGradTile, sizeof(float)));
    grad.bias_partial = static_cast<float*>(take(int64_t(blocks) * grad.splits * kGradTile, sizeof(float)));
  }

  char* base_;
  const MlpBackward& m_;
};

}  // namespace ingot::cuda
