// Exclusive self attention: some lanes of a warp process a token's heads of one key head, with v in registers. Heads of
// 64 and 128 numbers, aligned to 16 bytes, are loaded as 16-byte vectors by a few lanes each; heads of other widths are
// loaded number by number by a whole warp.
#include "ingot/gpu/float_types.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/attention/attention.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMost = 16;  // elements of a head per lane of a warp, which allows heads of 512
constexpr float kTiny = 1e-12f;

struct Heads {
  char* data;           // null: none
  int64_t token, head;  // strides, bytes
};
Heads heads_of(const Tensor& t) {
  const int64_t size = size_of(t.dtype);
  return {static_cast<char*>(t.data), t.stride[0] * size, t.stride[1] * size};
}
template <class T> __device__ inline T* at(const Heads& h, int64_t token, int head) {
  return reinterpret_cast<T*>(h.data + token * h.token + head * h.head);
}

struct Params {
  Heads y, v, z, dz, dy, dv;  // forward: y, v, z; backward: all but z
  int64_t items;              // tokens times key heads
  int kv_heads, group, width;
  bool write_dv = false;
  float* delta = nullptr;  // (heads, tokens), or not wanted
  int64_t tokens = 0;
};

// A lane's elements of a head distributed over kLanes lanes. kRoom: numbers per lane; numbers beyond the width are
// zero, so the room changes no bit.
template <class T, int kRoom> struct ByNumber {
  using Type = T;
  static constexpr int kLanes = 32, kCount = kRoom;
  static __device__ void load(float (&x)[kCount], const T* from, int width) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int c = int(threadIdx.x % 32) + 32 * i;
      x[i] = c < width ? tile::to_float(from[c]) : 0.f;
    }
  }
  static __device__ void store(T* to, const float (&x)[kCount], int width) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int c = int(threadIdx.x % 32) + 32 * i;
      if (c < width) to[c] = tile::from_float<T>(x[i]);
    }
  }
};
template <class T, int kWidth> struct ByVector {
  using Type = T;
  static constexpr int kCount = 16 / int(sizeof(T)), kLanes = kWidth / kCount;
  static __device__ void load(float (&x)[kCount], const T* from, int) {
    tile::Vec<T, kCount> v;
    tile::load_streaming(v, from + threadIdx.x % kLanes * kCount);
    tile::to_float(v, x);
  }
  static __device__ void store(T* to, const float (&x)[kCount], int) {
    tile::store(to + threadIdx.x % kLanes * kCount, tile::from_float<T, kCount>(x), false);
  }
};

template <class Form> __device__ inline float dot(const float (&a)[Form::kCount], const float (&b)[Form::kCount]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Form::kCount; ++i) sum += a[i] * b[i];
#pragma unroll
  for (int step = Form::kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// Lanes past the last item compute the last item again without storing, because the shuffles need all lanes of the
// warp.
struct Item {
  int64_t token;
  int kv_head;
  bool there;
};
template <class Form> __device__ inline Item item_of(const Params& p) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / Form::kLanes, here = i < p.items ? i : p.items - 1;
  return {here / p.kv_heads, int(here % p.kv_heads), i < p.items};
}

template <class Form>
__global__ void __launch_bounds__(kThreads) exclude_self_forward(const __grid_constant__ Params p) {
  using T = typename Form::Type;
  constexpr int kCount = Form::kCount;
  const Item item = item_of<Form>(p);
  float v[kCount], y[kCount];
  Form::load(v, at<const T>(p.v, item.token, item.kv_head), p.width);
  const float length = fmaxf(sqrtf(dot<Form>(v, v)), kTiny);
  for (int h = item.kv_head * p.group; h < (item.kv_head + 1) * p.group; ++h) {
    Form::load(y, at<const T>(p.y, item.token, h), p.width);
    const float along = dot<Form>(y, v) / length / length;
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] -= along * v[i];
    if (item.there) Form::store(at<T>(p.z, item.token, h), y, p.width);
  }
}

template <class Form> __global__ void __launch_bounds__(kThreads) exclude_self_back(const __grid_constant__ Params p) {
  using T = typename Form::Type;
  constexpr int kCount = Form::kCount;
  const Item item = item_of<Form>(p);
  float v[kCount], y[kCount], dz[kCount], du[kCount] = {};
  Form::load(v, at<const T>(p.v, item.token, item.kv_head), p.width);
  const float norm = sqrtf(dot<Form>(v, v)), inverse = 1 / fmaxf(norm, kTiny);
  for (int h = item.kv_head * p.group; h < (item.kv_head + 1) * p.group; ++h) {
    Form::load(y, at<const T>(p.y, item.token, h), p.width);
    Form::load(dz, at<const T>(p.dz, item.token, h), p.width);
    const float along_y = dot<Form>(y, v) * inverse, along_dz = dot<Form>(dz, v) * inverse;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      du[i] -= along_dz * y[i] + along_y * dz[i];
      dz[i] -= along_dz * inverse * v[i];
    }
    if (item.there) Form::store(at<T>(p.dy, item.token, h), dz, p.width);
    if (p.delta == nullptr) continue;
      // Uses dy as rounded for storage.
#pragma unroll
    for (float& x : dz) x = tile::to_float(tile::from_float<T>(x));
    const float delta = dot<Form>(dz, y);
    if (item.there && threadIdx.x % Form::kLanes == 0) p.delta[h * p.tokens + item.token] = delta;
  }
  // Where |v| is below the floor, u = v / floor is linear in v and has no projection term.
  const float along_du = norm > kTiny ? dot<Form>(du, v) * inverse * inverse : 0.f;
  T* const dv = at<T>(p.dv, item.token, item.kv_head);
  if (p.write_dv) {
#pragma unroll
    for (float& x : y) x = 0;
  } else {
    Form::load(y, dv, p.width);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) y[i] += (du[i] - along_du * v[i]) * inverse;
  if (item.there) Form::store(dv, y, p.width);
}

Params params_of(const char* op, const Tensor& y, const Tensor& v) {
  INGOT_CHECK(y.size(2) <= 32 * kMost, op, ": found a head size of ", y.size(2), " on a GPU, expected at most ",
              32 * kMost);
  const int64_t kv_heads = v.size(1);
  return {.y = heads_of(y),
          .v = heads_of(v),
          .items = y.size(0) * kv_heads,
          .kv_heads = int(kv_heads),
          .group = int(kv_heads > 0 ? y.size(1) / kv_heads : 0),
          .width = int(y.size(2))};
}
bool in_vectors(const Heads& h) {
  return h.data == nullptr || (reinterpret_cast<uintptr_t>(h.data) % 16 == 0 && h.token % 16 == 0 && h.head % 16 == 0);
}
template <class Form> void launch(const char* op, void (*kernel)(Params), const Params& p, int device, Stream stream) {
  constexpr int kItems = kThreads / Form::kLanes;
  gpu::launch(op, kernel, {.grid = (p.items + kItems - 1) / kItems, .block = kThreads, .device = device}, stream, p);
}
// Calls go.operator()<Form>() with the variant for these heads.
template <class T, class Go> void with_form(const Params& p, Go&& go) {
  if (p.items == 0) return;
  const bool vectors =
      in_vectors(p.y) && in_vectors(p.v) && in_vectors(p.z) && in_vectors(p.dz) && in_vectors(p.dy) && in_vectors(p.dv);
  if (vectors && p.width == 64) return go.template operator()<ByVector<T, 64>>();
  if (vectors && p.width == 128) return go.template operator()<ByVector<T, 128>>();
  if (p.width <= 32 * 4) return go.template operator()<ByNumber<T, 4>>();
  go.template operator()<ByNumber<T, kMost>>();
}

}  // namespace

void exclude_self(const ExcludeSelf& a, Stream stream) {
  const char* op = "exclude_self";
  Params p = params_of(op, a.y, a.v);
  p.z = heads_of(a.z);
  with_gpu_float_type(a.y.dtype, op, [&]<class T>(T) {
    with_form<T>(p, [&]<class Form>() { launch<Form>(op, exclude_self_forward<Form>, p, a.y.device.index, stream); });
  });
}

void exclude_self_backward(const ExcludeSelfBackward& a, Stream stream) {
  const char* op = "exclude_self_backward";
  Params p = params_of(op, a.y, a.v);
  p.dz = heads_of(a.dz), p.dy = heads_of(a.dy), p.dv = heads_of(a.dv);
  p.write_dv = a.write_dv;
  p.delta = a.delta ? a.delta.ptr<float>() : nullptr;
  p.tokens = a.y.size(0);
  with_gpu_float_type(a.y.dtype, op, [&]<class T>(T) {
    with_form<T>(p, [&]<class Form>() { launch<Form>(op, exclude_self_back<Form>, p, a.y.device.index, stream); });
  });
}

}  // namespace ingot::cuda
