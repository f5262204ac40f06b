#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/row_units.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/softcap/softcap.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 256;

struct Params {
  tile::Rows x, y;
  tile::RowUnits units;  // elements
  float cap;
};

template <class T> __global__ void __launch_bounds__(kThreads) softcap_kernel(const __grid_constant__ Params p) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= p.units.units) return;
  const tile::Division place = tile::place_of(p.units, i);
  const float x = tile::to_float(*tile::at<const T, 1>(p.x, place));
  *tile::at<T, 1>(p.y, place) = tile::from_float<T>(p.cap * tanhf(x / p.cap));
}

template <class T> void launch(const Softcap& a, Stream stream) {
  const bool one_row = tile::without_gaps(a.x) && tile::without_gaps(a.y);
  tile::for_each_launch(a.x.rows(), a.x.cols(), one_row, [&](int64_t row, int64_t unit, const tile::RowUnits& units) {
    const Params p{tile::moved(tile::rows_of(a.x), row, unit, a.x.dtype),
                   tile::moved(tile::rows_of(a.y), row, unit, a.y.dtype), units, float(a.cap)};
    gpu::launch(
        "softcap", softcap_kernel<T>,
        {.grid = (int64_t(units.units) + kThreads - 1) / kThreads, .block = kThreads, .device = a.x.device.index},
        stream, p);
  });
}

}  // namespace

void softcap(const Softcap& a, Stream stream) {
  switch (a.x.dtype) {
    case DType::f32: return launch<float>(a, stream);
    case DType::bf16: return launch<bf16>(a, stream);
    case DType::f16: return launch<f16>(a, stream);
    default: fail(ErrorCode::unsupported, "softcap: found dtype ", a.x.dtype, " on a GPU, expected f32, bf16 or f16");
  }
}

}  // namespace ingot::cuda
