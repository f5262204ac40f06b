#pragma once
// The portable kernels' arguments and the division of their work: plain structs and pure functions of sizes.
#include <algorithm>
#include <cstdint>

#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/mlp/forms.h"

namespace ingot::cuda {

constexpr int kPortableThreads = 256, kPortableBlocks = 2;  // threads per block; the most blocks on an SM
// A tile of a weight in shared memory is kPortableOut wide along the product's columns; a tile is used while the next
// is fetched.
constexpr int kPortableOut = 128, kPortableStages = 2;
// dW is divided into squares; a stage holds the same number of rows of both operands.
constexpr int kGradTile = 64, kGradStages = 3;

struct PortableLayer {
  const void *w = nullptr, *b = nullptr, *g = nullptr;
  int K = 0, N = 0;
  int scale_at = 0;       // start of the rows' scales in shared memory
  int64_t saved_at = 0;   // elements into `saved`
  void* dz = nullptr;     // (T, N): the gradient before the activation; null: dy itself
  void* input = nullptr;  // (T, K) the layer's input, recomputed for dW; null: the input lies in x or in `saved`
};

// The forward pass, and the chain of gradients down to x, by tiles of rows.
struct PortableRows {
  PortableLayer layer[kMlpMaxLayers];
  int depth = 0;
  int64_t rows = 0;
  const void *x = nullptr, *dy = nullptr;
  void *y = nullptr, *dx = nullptr, *saved = nullptr;
  int64_t x_stride = 0, y_stride = 0, dy_stride = 0, dx_stride = 0;
  Act act = Act::identity;
  bool activate_last = false, saved_f32 = false, saves_value = false, weight_norm = false;
  int stride = 0;  // elements between rows of the activations in shared memory
  // Backward: the layers whose forward values are recomputed; the lowest layer with a gradient.
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
  } layer[kMlpMaxLayers];
  int depth = 0, splits = 1, tiles = 0;
  int64_t rows = 0, rows_per_split = 0;
  float *partial = nullptr, *bias_partial = nullptr;  // (tiles, splits, 64 * 64), (blocks of 64 rows of W, splits, 64)
  uint32_t *tile_counter = nullptr, *block_counter = nullptr;
};

// --- pure functions ----------------------------------------------------------------------------------------------

struct PortableConfig {
  int rows = 64;        // rows of a tile
  int reduction = 128;  // terms of the sums in a tile of a weight
  int64_t smem = 0, grid = 1;
};
// Elements between rows: an odd multiple of 16 bytes, so that eight rows at the same column meet all banks.
constexpr int portable_stride(int widest, int element) { return (widest + 15) / 16 * 16 + 16 / element; }
// Terms of the sums in a tile of a weight. In 16 bits the lowest tile of rows also exists with kPortableNarrow terms,
// for networks with weight norm whose scales find no room beside wide tiles in 99 KB. The sums of a product are added
// in the same order, so the bits are the same.
constexpr int portable_reduction(int element) { return element == 2 ? 128 : 32; }
constexpr int kPortableNarrow = 64;
constexpr bool portable_has_narrow(int element) { return element == 2; }
// Bytes of a weight's tile; f32 rows are padded by 16 bytes in either orientation.
constexpr int64_t portable_weight_tile(int element, int reduction) {
  return int64_t(element == 2 ? reduction : reduction + 4) * kPortableOut * element;
}
constexpr int64_t portable_smem(int rows, int reduction, int stride, int element, int scales) {
  return kPortableStages * portable_weight_tile(element, reduction) + 2 * int64_t(rows) * stride * element +
         scales * int64_t(4);
}
// The heights of a tile in rows, from the height that reads shared memory least per product to the height that occupies
// the most SMs. The lowest tile fits in 99 KB up to 512 wide, in 16 bits with weight norm by narrow tiles of the
// weights.
constexpr int kPortableHeights = 3;
constexpr int portable_height(int element, int i) {
  constexpr int kHeights[2][kPortableHeights] = {{128, 64, 16}, {56, 32, 8}};
  return kHeights[element == 4][i];
}
// The highest tile of the chain of gradients, as an index. 16-bit chains of 128 rows are 6 % faster at 256 wide and no
// faster elsewhere, and take longest to compile.
constexpr int portable_backward_height(int element) { return element == 2 ? 1 : 0; }
// The most blocks on an SM by registers: two, but a single block with the highest 16-bit tiles.
constexpr int portable_blocks(int rows, int element) { return element == 2 && rows == 128 ? 1 : kPortableBlocks; }
// The highest fitting tile, from index `first` on, with a tile for every SM. Where the next lower tile fits twice on an
// SM and this tile does not, the lower tile is better: the activations of a block are hidden behind the second block's
// products.
inline PortableConfig pick_portable(int64_t rows, int stride, int element, int scales, const gpu::Limits& device,
                                    int first) {
  int reduction = portable_reduction(element);
  const auto smem = [&](int i) {
    return portable_smem(portable_height(element, i), reduction, stride, element, scales);
  };
  const auto per_sm = [&](int i) {
    return std::clamp<int64_t>(device.smem_per_sm / (smem(i) + 1024), 1,
                               portable_blocks(portable_height(element, i), element));
  };
  const auto tiles = [&](int i) { return (rows + portable_height(element, i) - 1) / portable_height(element, i); };
  int i = first;
  while (i + 1 < kPortableHeights && (smem(i) > device.smem_per_block || tiles(i) < device.sms)) ++i;
  if (i + 2 < kPortableHeights && per_sm(i) == 1 && per_sm(i + 1) == 2) ++i;
  if (smem(i) > device.smem_per_block && portable_has_narrow(element)) reduction = kPortableNarrow;
  return {.rows = portable_height(element, i),
          .reduction = reduction,
          .smem = smem(i),
          .grid = std::clamp<int64_t>(tiles(i), 1, device.sms * per_sm(i))};
}

// Two for each SM of an H200; the same on every GPU, so the sums are the same too.
constexpr int64_t kGradBlocks = 264;
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

// Launchers, one translation unit per element type. Forward and chain run by tiles of rows, grad by squares of every
// dW.
template <class T> void launch_portable_forward(const PortableRows& p, const PortableConfig& c, int device, Stream s);
template <class T> void launch_portable_chain(const PortableRows& p, const PortableConfig& c, int device, Stream s);
template <class T> void launch_portable_grad(const PortableGrad& p, int device, Stream s);

}  // namespace ingot::cuda
