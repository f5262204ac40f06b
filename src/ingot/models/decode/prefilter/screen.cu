#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/prefilter/screen.h"

namespace ingot::decode {
namespace {

constexpr uint32_t kRowThreads = 16, kScreenThreads = 16 * kRowThreads;

struct ScreenMemory {
  double part[2][kScreenThreads];
};
// Of 16 threads of a row, after a barrier.
template <class Op> __device__ double of_row(const double (&part)[kScreenThreads], Op&& op) {
  const uint32_t first = threadIdx.x / kRowThreads * kRowThreads;
  double all = part[first];
  for (uint32_t j = 1; j < kRowThreads; ++j) all = op(all, part[first + j]);
  return all;
}

// A band a block.
__global__ void __launch_bounds__(kScreenThreads) make_codes(Matrix head, Screen to, double rounding) {
  auto& m = tile::shared<ScreenMemory>();
  const uint32_t row = threadIdx.x / kRowThreads, j = threadIdx.x % kRowThreads, padded = 64 * head.weight_tiles;
  const auto add = [](double a, double b) { return a + b; };
  for (uint32_t band = blockIdx.x; band < head.bands; band += gridDim.x) {
    const uint8_t* const from = head.data + band * head.band_bytes;
    uint8_t* const codes = const_cast<uint8_t*>(to.codes.data) + band * to.codes.band_bytes;
    const auto number = [&](uint32_t c) {  // of the A operand of mma.m16n8k16 (weight_tiles.h)
      const uint32_t k = c % 16;
      return float(*reinterpret_cast<const bf16*>(from + c / 64 * 2048 + c % 64 / 16 * 512 +
                                                  (row % 8 * 4 + k % 8 / 2) * 16 + (row / 8 + k / 8 * 2) * 4 +
                                                  k % 2 * 2));
    };
    double largest = 0;
    for (uint32_t c = j; c < head.cols; c += kRowThreads) {
      const double a = fabsf(number(c));
      largest = a <= largest ? largest : a;                   // a NaN is taken, and
      if (!(largest < double(INFINITY))) largest = INFINITY;  // becomes what it is to a bound
    }
    m.part[0][threadIdx.x] = largest;
    __syncthreads();
    largest = of_row(m.part[0], [](double a, double b) { return a > b ? a : b; });
    const bool finite = largest < double(INFINITY);
    const float scale = finite ? float(largest / kLargestCode) : 0;
    double errors = 0, squares = 0;
    for (uint32_t c = j; c < padded; c += kRowThreads) {
      const double w = c < head.cols && finite ? double(number(c)) : 0;
      const uint32_t code = scale > 0 ? screen_code(w / double(scale)) : 0;
      codes[c / 64 * kScreenWeightTile + screen_place(row, c % 64)] = uint8_t(code);
      if (c >= head.cols) continue;  // meets zeros
      const double e = w - double(scale) * double(screen_value(code));
      errors += e * e, squares += w * w;
    }
    __syncthreads();
    m.part[0][threadIdx.x] = errors, m.part[1][threadIdx.x] = squares;
    __syncthreads();
    if (j == 0) {
      const double error = sqrt(of_row(m.part[0], add)), size = sqrt(of_row(m.part[1], add));
      // With what these sums of doubles, and a float, round.
      const double bound = (error + 2 * rounding * (size + error)) * (1 + 0x1p-20) + 0x1p-110;
      const_cast<ScreenRow*>(to.rows)[16 * band + row] = {scale, finite ? float(bound) : INFINITY};
    }
    __syncthreads();
  }
}

}  // namespace

Matrix screen_matrix(const Matrix& head, uint8_t* memory) {
  Matrix m = head;
  m.data = memory;
  m.band_bytes = int64_t(head.weight_tiles) * kScreenWeightTile, m.matrix_bytes = m.bands * m.band_bytes;
  return m;
}

void make_screen(const Matrix& head, const Screen& to, Stream stream) {
  if (head.bands == 0) return;
  INGOT_CHECK(head.format == WeightFormat::bf16, "decode screen: found a head in ", head.format, ", expected bf16");
  gpu::launch("decode screen", make_codes,
              {.grid = std::min<int64_t>(head.bands, 1 << 20),
               .block = kScreenThreads,
               .device = std::max(0, gpu::current_device())},
              stream, head, to, screen_rounding(head.cols));
}

}  // namespace ingot::decode
