#pragma once
// A tile of 64 rows in the registers of a warpgroup: shared code of the forward forms for Hopper. row_tile_product.cuh
// loads x and multiplies, row_tile_output.cuh activates and stores; here are the turns of warpgroups, and launches.
#include "ingot/kernels/mlp/parts/row_tile_output.cuh"

namespace ingot::cuda::mlp_parts {

// Turns at issuing a layer's products. With few tiles per warpgroup all warpgroups would stay in the same layer after
// the start, and wait for the tensor cores together and then for the activation's units. Turns prevent this.
template <int kGroups> struct Turns {
  bool on;
  uint32_t warpgroup;
  __device__ __forceinline__ void take() const {
    if (on) ptx::barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void pass() const {
    if (on) ptx::barrier_arrive(warpgroup == kGroups - 1 ? 1 : 2 + warpgroup, 256);
  }
  __device__ __forceinline__ void start() const {
    if (warpgroup == kGroups - 1) pass();
  }
  // At the end: the block's first warpgroup may have had a tile more than this warpgroup. `tile`: the next tile of this
  // warpgroup.
  __device__ __forceinline__ void end(uint32_t tile, uint32_t tiles, int layers) const {
    const bool is_short = on && tile - warpgroup * gridDim.x < tiles;
    for (int l = 0; is_short && l < layers; ++l) {
      take();
      pass();
    }
  }
};

// Shared code of launchers: use(the activation's formula, operands), and a launch.
struct Operands {
  Params p;
  CUtensorMap x_map;
  int device;
};
template <class Use> void with_operands(const Mlp& m, Use&& use) {
  if (m.x.rows() == 0) return;
  const gpu::TmaBox of_warp{.rows = kWarpRows, .cols = 64, .swizzle = tile::Swizzle::b128};
  const Operands o{mlp_forward_params(m), gpu::tensor_map("mlp: x", mlp_matrix(m.x), of_warp), m.x.device.index};
  with_formula(m.act, [&](auto f) { use(f, o); });
}
// use(std::integral_constant<Save, ...>): the stored values are part of the type where a formula depends on the stored
// values.
template <class T, class F, bool kSave, class Use> void with_save(const Params& p, Use&& use) {
  if constexpr (!kSave) return use(std::integral_constant<Save, Save::nothing>());
  if constexpr (kSave && kHasPairs<F, T>)
    if (!p.saved_f32) return use(std::integral_constant<Save, Save::own_type>());
  if constexpr (kSave) use(std::integral_constant<Save, Save::any_type>());
}
inline void launch_blocks(void (*kernel)(Params, CUtensorMap), int groups, uint32_t smem, const Operands& o,
                          Stream stream) {
  gpu::launch("mlp", kernel,
              {.grid = std::min<int64_t>((o.p.rows + kTileRows - 1) / kTileRows, sm_count(o.device)),
               .block = 128 * groups,
               .smem = smem,
               .overlap = true,
               .device = o.device},
              stream, o.p, o.x_map);
}

}  // namespace ingot::cuda::mlp_parts
