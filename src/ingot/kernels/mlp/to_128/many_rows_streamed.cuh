#pragma once
// The many-rows variant for networks larger than the shared memory of an SM: 128 wide, 6 to 8 layers. The chain of
// products and activations is the same as in to_128/many_rows.cuh, but the weights pass through a ring: position t of
// the block's work is layer t % layers of its tile t / layers, and lies in slot t % kSlots. All warpgroups of a block
// pass all positions, and may be a few layers apart. The warpgroups take turns to issue each layer's next copy.
//
// Weight norm scales the sums' columns, because W would have to be computed again at every pass.
#include "ingot/kernels/mlp/to_128/many_rows.cuh"

namespace ingot::cuda::to_128_many_rows {

constexpr int kDeepWidth = 128, kSlots = 4, kDeepLayers = kMlpMaxLayers;
constexpr uint32_t kLag = 2;  // positions before a slot is filled again, so that no warpgroup waits for slower
                              // warpgroups

template <class F> constexpr int deep_warpgroups() { return kernel_fit<F>.warpgroups_streaming; }

struct DeepLayout {
  uint32_t x, staging, bias, scale, barriers, size;
};
INGOT_HD constexpr DeepLayout deep_layout(int layers, int groups) {
  DeepLayout at = {};
  const uint32_t warps = uint32_t(groups) * 4, vector = uint32_t(layers) * kDeepWidth * uint32_t(sizeof(float));
  at.x = kSlots * weight_bytes<kDeepWidth>();
  at.staging = at.x + warps * x_bytes<kDeepWidth>();
  at.bias = at.staging + warps * kStagingBytes;
  at.scale = at.bias + vector;
  at.barriers = at.scale + vector;
  at.size = at.barriers + (2 * kSlots + kDeepLayers + warps) * uint32_t(sizeof(uint64_t));
  return at;
}

template <class T, int kGroups, bool kTimesLog2e> struct WeightRing {
  using Pieces = WeightPieces<T, kDeepWidth, 1>;  // of a warpgroup
  char* slots;
  uint64_t *full, *empty;  // of each slot: arrivals of every loading thread, and of each warp after its reads
  uint64_t* scaled;        // of each layer: arrivals of every thread computing its scales
  float *bias, *scale;
  uint32_t warpgroup;

  __device__ __forceinline__ char* slot(uint32_t t) const { return slots + t % kSlots * weight_bytes<kDeepWidth>(); }
  __device__ __forceinline__ bool mine(uint32_t t) const { return t % kGroups == warpgroup; }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(full + i, 128);
      ptx::mbarrier_init(empty + i, kGroups * 4);
    }
    for (int l = 0; l < kDeepLayers; ++l) ptx::mbarrier_init(scaled + l, 128);
  }
  __device__ __forceinline__ void load(const Params& p, uint32_t t) const {
    const int l = int(t % uint32_t(p.layers));
    Pieces::load(p.layer[l], l + 1 == p.layers, slot(t));
    ptx::cp_async_mbarrier_arrive(full + t % kSlots);
  }
  __device__ __forceinline__ void wait_for(uint32_t t) const {
    tile::wait_warp_or_trap(full + t % kSlots, t / kSlots % 2);
    ptx::fence_proxy_async_shared();
  }
  // The products of position t are complete, so its slot may be filled again. The warpgroup in turn fills the slot of
  // an earlier position, which all warpgroups have probably passed.
  __device__ __forceinline__ void pass(const Params& p, uint32_t t, uint32_t positions) const {
    if (lane() == 0) ptx::mbarrier_arrive(empty + t % kSlots);
    if (t < kLag || !mine(t) || t - kLag + kSlots >= positions) return;
    const uint32_t before = t - kLag;
    tile::wait_warp_or_trap(empty + before % kSlots, before / kSlots % 2);
    load(p, before + kSlots);
  }
  __device__ __forceinline__ void load_vectors(const Params& p) const {
    for (uint32_t i = threadIdx.x; i < uint32_t(p.layers) * kDeepWidth; i += 128 * kGroups) {
      const int l = int(i / kDeepWidth);
      const LayerParams& of = p.layer[l];
      const uint32_t c = i % kDeepWidth, n = l + 1 == p.layers ? last_feature(c) : c;
      const Domain domain = domain_of<kTimesLog2e>(l, p.layers);
      bias[i] = of.b == nullptr || n >= of.n ? 0 : domain.bias * tile::to_float(static_cast<const T*>(of.b)[n]);
      scale[i] = domain.sums * (of.g == nullptr || n >= of.n ? 1 : tile::to_float(static_cast<const T*>(of.g)[n]));
    }
    __syncthreads();
  }
  // In the first tile, while a layer's first products are computed.
  __device__ __forceinline__ void form_scale(const Params& p, uint32_t l) const {
    if (!mine(l)) return;
#pragma unroll 1
    for (int batch = 0; p.layer[l].g != nullptr && batch < Pieces::kBatches; ++batch) {
      const float inverse = Pieces::inverse_norm_of_own_row(slot(l), batch);
      if (Pieces::piece() % Pieces::kSame == 0) scale[l * kDeepWidth + Pieces::own_row(batch)] *= inverse;
    }
    ptx::mbarrier_arrive(scaled + l);
  }
  __device__ __forceinline__ void wait_for_scale(uint32_t l) const { tile::wait_warp_or_trap(scaled + l, 0); }
};

template <class T, class F, int kGroups, Save kSave>
__global__ void __launch_bounds__(128 * kGroups, 1)
    mlp_to_128_streamed_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap x_map) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kWidth = kDeepWidth;
  const DeepLayout at = deep_layout(p.layers, kGroups);
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + at.barriers);
  ArrivingRows<kWidth> x{shared + at.x + warp * x_bytes<kWidth>(), barriers + 2 * kSlots + kDeepLayers + warp};
  char* const staging = shared + at.staging + warp * kStagingBytes;
  const WeightRing<T, kGroups, kInLog2e<F, T, kSave, Finish::scale_and_bias>> ring{
      shared,
      barriers,
      barriers + kSlots,
      barriers + 2 * kSlots,
      reinterpret_cast<float*>(shared + at.bias),
      reinterpret_cast<float*>(shared + at.scale),
      warp / 4};
  const uint32_t tiles = uint32_t((p.rows + kTileRows - 1) / kTileRows), step = gridDim.x * kGroups;
  uint32_t tile = blockIdx.x + gridDim.x * (warp / 4);
  // The rounds of the first warpgroup, which has the most; further warpgroups may have a round without a tile.
  const uint32_t positions = (tiles - blockIdx.x + step - 1) / step * uint32_t(p.layers);

  if (threadIdx.x == 0) ring.init();
  if (lane() == 0) ptx::mbarrier_init(x.barrier, 1);
  ptx::fence_mbarrier_init();
  __syncthreads();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  if (tile < tiles && warp < 4) x.load(x_map, tile);
  for (uint32_t t = warp / 4; t < kSlots; t += kGroups) ring.load(p, t);  // there are more layers than slots
  if (tile < tiles && warp >= 4) x.load(x_map, tile);
  ring.load_vectors(p);
  const uint64_t descriptor =
      tile::operand_descriptor<tile::Major::k, tile::Swizzle::b128>(ptx::shared_address(shared));
  const uint32_t weights = uint32_t(descriptor), upper = uint32_t(descriptor >> 32);
  constexpr uint32_t kSlotStep = weight_bytes<kWidth>() >> 4;

  const Vectors vectors = {ring.bias, ring.scale};
  Rows<kWidth> a;
  Sums<kWidth> d;
  for (uint32_t t = 0; t < positions; tile += step) {
    if (tile < tiles) x.take(a);
    for (int l = 0; l < p.layers; ++l, ++t) {
      const bool normalises = p.has_gain && t < uint32_t(p.layers);
      ring.wait_for(t);
      if (tile >= tiles) {
        if (normalises) ring.form_scale(p, t);
        ring.pass(p, t, positions);
        if (normalises) ring.wait_for_scale(t);  // before this warp refills the slot with the scales' operands
        continue;
      }
      multiply<T, kWidth>(d, a, weights + t % kSlots * kSlotStep, upper);
      if (normalises) ring.form_scale(p, t);
      if (l == 0 && tile + step < tiles) {
        __syncwarp();  // all lanes have finished reading the memory of the next rows
        x.load(x_map, tile + step);
      }
      wait<kWidth>(d, a);
      ring.pass(p, t, positions);
      if (normalises) ring.wait_for_scale(t);
      if (l + 1 < p.layers)
        activate<T, F, kWidth, kSave, Finish::scale_and_bias>(d, a, p, l, vectors, staging, first_row(tile));
    }
    if (tile < tiles) finish<T, F, kWidth, kSave, Finish::scale_and_bias>(d, p, vectors, first_row(tile));
  }
}

template <class T, class F, Save kSave> void launch_deep_as(const Operands& o, Stream stream) {
  constexpr int kGroups = deep_warpgroups<F>();
  static_assert(deep_layout(kDeepLayers, kGroups).size <= kMlpSharedBytes, "the ring must fit the shared memory");
  launch_blocks(mlp_to_128_streamed_kernel<T, F, kGroups, kSave>, kGroups, deep_layout(o.p.layers, kGroups).size, o,
                stream);
}

}  // namespace ingot::cuda::to_128_many_rows

namespace ingot::cuda {

template <class T, bool kSave> void launch_mlp_to_128_streamed(const Mlp& m, Stream stream) {
  using namespace to_128_many_rows;
  // Over so many layers the errors of values computed in pairs would add up to more than training tolerates.
  constexpr Save kWhat = kSave ? Save::any_type : Save::nothing;
  with_operands(m, [&](auto f, const Operands& o) { launch_deep_as<T, decltype(f), kWhat>(o, stream); });
}

}  // namespace ingot::cuda
