// Random weights of realistic scale, generated on the GPU, so that a benchmark needs no download.
#include <algorithm>
#include <cmath>

#include "ingot/core/rng.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/limits.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/weights/builder.h"

namespace ingot::decode {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float normal(uint32_t a, uint32_t b) {
  const float u = (float(a >> 8) + 0.5f) * 0x1p-24f, v = float(b >> 8) * 0x1p-24f;
  return sqrtf(-2 * __logf(u)) * __cosf(6.2831853f * v);
}
__device__ __forceinline__ std::array<uint32_t, 4> random4(uint64_t seed, int64_t i) {
  return Rng(seed, Purpose::init).block(uint64_t(i));
}

// One counter of the random generator gives two numbers.
template <class T>
__global__ void __launch_bounds__(kThreads) fill_numbers(T* to, int64_t n, float scale, float mean, uint64_t seed) {
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; 2 * i < n; i += int64_t(gridDim.x) * kThreads) {
    const auto r = random4(seed, i);
    to[2 * i] = T(normal(r[0], r[1]) * scale + mean);
    if (2 * i + 1 < n) to[2 * i + 1] = T(normal(r[2], r[3]) * scale + mean);
  }
}

// One counter of the random generator gives 16 bytes: e2m1 codes, or e4m3 numbers. In every run of `unit` chunks the
// last `tail` chunks are different: scale bytes of mxfp4, row scales of fp8.
struct Codes {
  uint8_t* to;
  int64_t chunks;       // chunks of 16 bytes
  uint32_t unit, tail;  // in chunks of 16 bytes
  uint32_t tail_word;
  bool fp8;
};
__global__ void __launch_bounds__(kThreads) fill_codes(Codes c, uint64_t seed) {
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < c.chunks; i += int64_t(gridDim.x) * kThreads) {
    auto r = random4(seed, i);
    // e4m3 numbers from 2^-2 to 2^2 of either sign
    if (c.fp8)
      for (int w = 0; w < 4; ++w)
        r[w] = (r[w] & 0x8f8f8f8fu) + 0x28282828u + (r[w] >> 2 & 0x08080808u) + (r[w] >> 3 & 0x08080808u);
    if (i % c.unit >= c.unit - c.tail) r = {c.tail_word, c.tail_word, c.tail_word, c.tail_word};
    *reinterpret_cast<uint4*>(c.to + 16 * i) = make_uint4(r[0], r[1], r[2], r[3]);
  }
}

int64_t most_blocks() { return int64_t(gpu::current_limits().sms) * 8; }
int device() { return std::max(0, gpu::current_device()); }

}  // namespace

void fill_normal(void* to, DType dtype, int64_t n, double scale, double mean, uint64_t seed, Stream stream) {
  const gpu::Launch at{.grid = std::min(most_blocks(), n / kThreads + 1), .block = kThreads, .device = device()};
  if (dtype == DType::f32)
    gpu::launch("synthetic numbers", fill_numbers<float>, at, stream, static_cast<float*>(to), n, float(scale),
                float(mean), seed);
  else
    gpu::launch("synthetic numbers", fill_numbers<bf16>, at, stream, static_cast<bf16*>(to), n, float(scale),
                float(mean), seed);
}

// The numbers that pad the last weight tile of a row are random too, because they are multiplied by zeros. Codes are
// uniform: their mean square is 8.56 for e2m1.
void fill_weight_tiles(const WeightMatrix& w, double scale, uint64_t seed, Stream stream) {
  const int64_t bytes = w.data.numel();
  if (w.format == WeightFormat::bf16) return fill_normal(w.data.data, DType::bf16, bytes / 2, scale, 0, seed, stream);
  Codes c{.to = w.data.ptr<uint8_t>(), .chunks = bytes / 16};
  if (w.format == WeightFormat::mxfp4) {
    const uint32_t exponent = uint32_t(127 + std::lround(std::log2(scale / std::sqrt(8.5625))));
    c.unit = 34, c.tail = 2, c.tail_word = exponent * 0x01010101u, c.fp8 = false;
  } else {
    c.unit = uint32_t(row_tile_bytes(w.format, w.cols()) / 16), c.tail = 4;
    c.tail_word = std::bit_cast<uint32_t>(float(scale / 1.5)), c.fp8 = true;
  }
  gpu::launch("synthetic weight tiles", fill_codes, {.grid = most_blocks(), .block = kThreads, .device = device()},
              stream, c, seed);
}

}  // namespace ingot::decode
