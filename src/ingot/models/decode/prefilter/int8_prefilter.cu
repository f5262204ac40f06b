#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/prefilter/int8_prefilter.h"

namespace ingot::decode {
namespace {

constexpr uint32_t kRowThreads = 16, kPrefilterThreads = 16 * kRowThreads;

struct PrefilterMemory {
  double part[2][kPrefilterThreads];
};
// Combines the values of the 16 threads of a row. Call after a barrier.
template <class Op> __device__ double of_row(const double (&part)[kPrefilterThreads], Op&& op) {
  const uint32_t first = threadIdx.x / kRowThreads * kRowThreads;
  double all = part[first];
  for (uint32_t j = 1; j < kRowThreads; ++j) all = op(all, part[first + j]);
  return all;
}

// One block processes one row tile at a time.
__global__ void __launch_bounds__(kPrefilterThreads) make_codes(Matrix head, Int8Prefilter to, double rounding) {
  auto& m = tile::shared<PrefilterMemory>();
  const uint32_t row = threadIdx.x / kRowThreads, j = threadIdx.x % kRowThreads, padded = 64 * head.weight_tiles;
  const auto add = [](double a, double b) { return a + b; };
  for (uint32_t row_tile = blockIdx.x; row_tile < head.row_tiles; row_tile += gridDim.x) {
    const uint8_t* const from = head.data + row_tile * head.row_tile_bytes;
    uint8_t* const codes = const_cast<uint8_t*>(to.codes.data) + row_tile * to.codes.row_tile_bytes;
    const auto number = [&](uint32_t c) {  // the order of operand A of mma.m16n8k16 (weight_tiles.h)
      const uint32_t k = c % 16;
      return float(*reinterpret_cast<const bf16*>(from + c / 64 * 2048 + c % 64 / 16 * 512 +
                                                  (row % 8 * 4 + k % 8 / 2) * 16 + (row / 8 + k / 8 * 2) * 4 +
                                                  k % 2 * 2));
    };
    double largest = 0;
    for (uint32_t c = j; c < head.cols; c += kRowThreads) {
      const double a = fabsf(number(c));
      largest = a <= largest ? largest : a;                   // a NaN is taken as the largest number, and
      if (!(largest < double(INFINITY))) largest = INFINITY;  // counts as infinite for the bound
    }
    m.part[0][threadIdx.x] = largest;
    __syncthreads();
    largest = of_row(m.part[0], [](double a, double b) { return a > b ? a : b; });
    const bool finite = largest < double(INFINITY);
    const float scale = finite ? float(largest / kLargestCode) : 0;
    double errors = 0, squares = 0;
    for (uint32_t c = j; c < padded; c += kRowThreads) {
      const double w = c < head.cols && finite ? double(number(c)) : 0;
      const uint32_t code = scale > 0 ? prefilter_code(w / double(scale)) : 0;
      codes[c / 64 * kPrefilterTileBytes + prefilter_place(row, c % 64)] = uint8_t(code);
      if (c >= head.cols) continue;  // padding columns are multiplied by zeros
      const double e = w - double(scale) * double(prefilter_value(code));
      errors += e * e, squares += w * w;
    }
    __syncthreads();
    m.part[0][threadIdx.x] = errors, m.part[1][threadIdx.x] = squares;
    __syncthreads();
    if (j == 0) {
      const double error = sqrt(of_row(m.part[0], add)), size = sqrt(of_row(m.part[1], add));
      // Includes the rounding of these sums in double precision and of the conversion to float.
      const double bound = (error + 2 * rounding * (size + error)) * (1 + 0x1p-20) + 0x1p-110;
      const_cast<PrefilterRow*>(to.rows)[16 * row_tile + row] = {scale, finite ? float(bound) : INFINITY};
    }
    __syncthreads();
  }
}

}  // namespace

Matrix prefilter_matrix(const Matrix& head, uint8_t* memory) {
  Matrix m = head;
  m.data = memory;
  m.row_tile_bytes = int64_t(head.weight_tiles) * kPrefilterTileBytes, m.matrix_bytes = m.row_tiles * m.row_tile_bytes;
  return m;
}

void make_prefilter(const Matrix& head, const Int8Prefilter& to, Stream stream) {
  if (head.row_tiles == 0) return;
  INGOT_CHECK(head.format == WeightFormat::bf16, "decode prefilter: found a head in ", head.format, ", expected bf16");
  gpu::launch("decode prefilter", make_codes,
              {.grid = std::min<int64_t>(head.row_tiles, 1 << 20),
               .block = kPrefilterThreads,
               .device = std::max(0, gpu::current_device())},
              stream, head, to, prefilter_rounding(head.cols));
}

}  // namespace ingot::decode
