#pragma once
// What the portable kernels are told, and how their work is cut: plain structs and pure functions of sizes.
#include <algorithm>
#include <cstdint>

#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/mlp/mlp.h"

namespace ingot::cuda {

constexpr int kPortableLayers = 8;
constexpr int kPortableThreads = 256, kPortableBlocks = 2;  // per block; blocks that an SM holds at least, by registers
// A tile of a weight in shared memory is kPortableOut wide along what a product gives; tiles are fetched ahead.
constexpr int kPortableOut = 128, kPortableStages = 3;
// dW is cut into squares; a stage holds as many rows of both operands.
constexpr int kGradTile = 64;

struct PortableLayer {
  const void *w = nullptr, *b = nullptr, *g = nullptr;
  int K = 0, N = 0;
  int scale_at = 0;       // where the rows' scales begin in shared memory
  int64_t saved_at = 0;   // elements into `saved`
  void* dz = nullptr;     // (T, N): the gradient before the activation; null: dy itself
  void* input = nullptr;  // (T, K) the layer's input formed again for dW; null: it lies in x or in `saved`
};

// The forward pass, and the chain of gradients down to x, by tiles of rows.
struct PortableRows {
  PortableLayer layer[kPortableLayers];
  int depth = 0;
  int64_t rows = 0;
  const void *x = nullptr, *dy = nullptr;
  void *y = nullptr, *dx = nullptr, *saved = nullptr;
  int64_t x_stride = 0, y_stride = 0, dy_stride = 0, dx_stride = 0;
  Act act = Act::identity;
  bool activate_last = false, saved_f32 = false, saves_value = false, weight_norm = false;
  int stride = 0;  // elements between rows of the activations in shared memory
  // Backward: the layers whose forward values are formed again; the lowest layer with a gradient.
  int recomputed = 0, first = 0;
  uint32_t* counters = nullptr;
  int counter_count = 0;
};

// All dW and db at once.
struct PortableGrad {
  struct Layer {
    const void *dz = nullptr, *h = nullptr, *v = nullptr, *g = nullptr;
    int64_t dz_stride = 0, h_stride = 0;
    int K = 0, N = 0;
    float *dw = nullptr, *db = nullptr, *dg = nullptr;
    float* whole = nullptr;  // (N, K) for dW before the weight norm's backward
    int first_tile = 0, first_block = 0;
  } layer[kPortableLayers];
  int depth = 0, splits = 1, tiles = 0;
  int64_t rows = 0, rows_per_split = 0;
  float *partial = nullptr, *bias_partial = nullptr;  // (tiles, splits, 64 * 64), (blocks of 64 rows of W, splits, 64)
  uint32_t *tile_counter = nullptr, *block_counter = nullptr;
};

// --- pure functions ----------------------------------------------------------------------------------------------

struct PortableDevice {
  int sms = 132;
  int64_t smem_per_block = 227 * 1024, smem_per_sm = 228 * 1024;
};
struct PortableConfig {
  int rows = 64;  // rows of one tile
  int64_t smem = 0, grid = 1;
};
// Elements between rows: an odd multiple of 16 bytes, so that eight rows at the same column meet all banks.
constexpr int portable_stride(int widest, int element) { return (widest + 15) / 16 * 16 + 16 / element; }
constexpr int portable_reduction(int element) { return element == 2 ? 64 : 32; }
// Bytes of a weight's tile; f32 rows are padded by 16 bytes, whichever way it lies.
constexpr int64_t portable_weight_tile(int element) {
  return element == 2 ? int64_t(64) * kPortableOut * 2 : int64_t(32 + 4) * kPortableOut * 4;
}
constexpr int64_t portable_smem(int rows, int stride, int element, int scales) {
  return kPortableStages * portable_weight_tile(element) + 2 * int64_t(rows) * stride * element + scales * int64_t(4);
}
// Rows of a tile: two heights per type, both of which fit 99 KB of shared memory up to 128 wide, the low one up to 512.
constexpr int portable_high_tile(int element) { return element == 2 ? 64 : 32; }
constexpr int portable_low_tile(int element) { return element == 2 ? 16 : 8; }
// The higher tile where it fits and leaves no SM without one.
inline PortableConfig pick_portable(int64_t rows, int stride, int element, int scales, const PortableDevice& device) {
  PortableConfig best;
  for (int height : {portable_high_tile(element), portable_low_tile(element)}) {
    const int64_t smem = portable_smem(height, stride, element, scales), tiles = (rows + height - 1) / height;
    best = {.rows = height, .smem = smem, .grid = tiles};
    if (smem <= device.smem_per_block && tiles >= device.sms) break;
  }
  const int64_t per_sm = std::clamp<int64_t>(device.smem_per_sm / (best.smem + 1024), 1, kPortableBlocks);
  best.grid = std::clamp<int64_t>(best.grid, 1, device.sms * per_sm);
  return best;
}

constexpr int64_t kGradBlocks = 264;  // two for each SM of an H200; the same everywhere, so that sums are too
struct PortableSplit {
  int splits = 1;
  int64_t rows_per_split = kGradTile;
};
inline PortableSplit pick_split(int64_t rows, int tiles) {
  const int64_t chunks = std::max<int64_t>((rows + kGradTile - 1) / kGradTile, 1);
  const int64_t wanted = std::clamp<int64_t>(kGradBlocks / tiles, 1, (chunks + 3) / 4);
  const int64_t per = (chunks + wanted - 1) / wanted;
  return {.splits = int((chunks + per - 1) / per), .rows_per_split = per * kGradTile};
}

// Launchers, one translation unit per element type. `rows_forward` and `rows_backward` run the chain by tiles of rows.
template <class T> void launch_portable_forward(const PortableRows& p, const PortableConfig& c, int device, Stream s);
template <class T> void launch_portable_chain(const PortableRows& p, const PortableConfig& c, int device, Stream s);
template <class T> void launch_portable_grad(const PortableGrad& p, int device, Stream s);

}  // namespace ingot::cuda
