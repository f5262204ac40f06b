// Exclusive self attention: a warp takes a token's heads of one key head, v in registers.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/attention/attention.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMost = 16;  // elements of a head to a lane: heads of 512
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
};

// A lane's elements of a head: lane, lane + 32, ... Room for few makes narrow heads cheap: what is not there is zero,
// so the room changes no bit.
template <int kRoom> struct Lane {
  float x[kRoom];
  template <class T> __device__ void load(const T* from, int width) {
#pragma unroll
    for (int i = 0; i < kRoom; ++i) {
      const int c = int(threadIdx.x % 32) + 32 * i;
      x[i] = c < width ? tile::to_float(from[c]) : 0.f;
    }
  }
  template <class T> __device__ void store(T* to, int width) const {
#pragma unroll
    for (int i = 0; i < kRoom; ++i) {
      const int c = int(threadIdx.x % 32) + 32 * i;
      if (c < width) to[c] = tile::from_float<T>(x[i]);
    }
  }
};
template <int kRoom> __device__ inline float warp_dot(const Lane<kRoom>& a, const Lane<kRoom>& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kRoom; ++i) sum += a.x[i] * b.x[i];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

struct Item {
  int64_t token;
  int kv_head;
  bool there;
};
__device__ inline Item item_of(const Params& p) {
  const int64_t i = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  return {i / p.kv_heads, int(i % p.kv_heads), i < p.items};
}

template <class T, int kRoom>
__global__ void __launch_bounds__(kThreads) exclude_self_forward(const __grid_constant__ Params p) {
  const Item item = item_of(p);
  if (!item.there) return;
  Lane<kRoom> v, y;
  v.load(at<const T>(p.v, item.token, item.kv_head), p.width);
  const float length = fmaxf(sqrtf(warp_dot(v, v)), kTiny);
  for (int h = item.kv_head * p.group; h < (item.kv_head + 1) * p.group; ++h) {
    y.load(at<const T>(p.y, item.token, h), p.width);
    const float along = warp_dot(y, v) / length / length;
#pragma unroll
    for (int i = 0; i < kRoom; ++i) y.x[i] -= along * v.x[i];
    y.store(at<T>(p.z, item.token, h), p.width);
  }
}

template <class T, int kRoom>
__global__ void __launch_bounds__(kThreads) exclude_self_back(const __grid_constant__ Params p) {
  const Item item = item_of(p);
  if (!item.there) return;
  Lane<kRoom> v, y, dz, du = {};
  v.load(at<const T>(p.v, item.token, item.kv_head), p.width);
  const float norm = sqrtf(warp_dot(v, v)), inverse = 1 / fmaxf(norm, kTiny);
  for (int h = item.kv_head * p.group; h < (item.kv_head + 1) * p.group; ++h) {
    y.load(at<const T>(p.y, item.token, h), p.width);
    dz.load(at<const T>(p.dz, item.token, h), p.width);
    const float along_y = warp_dot(y, v) * inverse, along_dz = warp_dot(dz, v) * inverse;
#pragma unroll
    for (int i = 0; i < kRoom; ++i) {
      du.x[i] -= along_dz * y.x[i] + along_y * dz.x[i];
      dz.x[i] -= along_dz * inverse * v.x[i];
    }
    dz.store(at<T>(p.dy, item.token, h), p.width);
  }
  // Where |v| is below the floor, u = v / floor is linear in v and has no projection term.
  const float along_du = norm > kTiny ? warp_dot(du, v) * inverse * inverse : 0.f;
  y.load(at<const T>(p.dv, item.token, item.kv_head), p.width);
#pragma unroll
  for (int i = 0; i < kRoom; ++i) y.x[i] += (du.x[i] - along_du * v.x[i]) * inverse;
  y.store(at<T>(p.dv, item.token, item.kv_head), p.width);
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
void launch(const char* op, void (*kernel)(Params), const Params& p, int device, Stream stream) {
  if (p.items == 0) return;
  gpu::launch(op, kernel, {.grid = (p.items + kWarps - 1) / kWarps, .block = kThreads, .device = device}, stream, p);
}

template <class T> void forward(const char* op, const Params& p, int device, Stream stream) {
  launch(op,
         p.width <= 64    ? exclude_self_forward<T, 2>
         : p.width <= 128 ? exclude_self_forward<T, 4>
                          : exclude_self_forward<T, kMost>,
         p, device, stream);
}
template <class T> void backward(const char* op, const Params& p, int device, Stream stream) {
  launch(op,
         p.width <= 64    ? exclude_self_back<T, 2>
         : p.width <= 128 ? exclude_self_back<T, 4>
                          : exclude_self_back<T, kMost>,
         p, device, stream);
}

}  // namespace

void exclude_self(const ExcludeSelf& a, Stream stream) {
  const char* op = "exclude_self";
  Params p = params_of(op, a.y, a.v);
  p.z = heads_of(a.z);
  switch (a.y.dtype) {
    case DType::f32: return forward<float>(op, p, a.y.device.index, stream);
    case DType::bf16: return forward<bf16>(op, p, a.y.device.index, stream);
    case DType::f16: return forward<f16>(op, p, a.y.device.index, stream);
    default: fail(ErrorCode::unsupported, op, ": found dtype ", a.y.dtype, " on a GPU, expected f32, bf16 or f16");
  }
}

void exclude_self_backward(const ExcludeSelfBackward& a, Stream stream) {
  const char* op = "exclude_self_backward";
  Params p = params_of(op, a.y, a.v);
  p.dz = heads_of(a.dz), p.dy = heads_of(a.dy), p.dv = heads_of(a.dv);
  switch (a.y.dtype) {
    case DType::f32: return backward<float>(op, p, a.y.device.index, stream);
    case DType::bf16: return backward<bf16>(op, p, a.y.device.index, stream);
    case DType::f16: return backward<f16>(op, p, a.y.device.index, stream);
    default: fail(ErrorCode::unsupported, op, ": found dtype ", a.y.dtype, " on a GPU, expected f32, bf16 or f16");
  }
}

}  // namespace ingot::cuda
