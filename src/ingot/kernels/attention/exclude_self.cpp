// Exclusive self attention: subtracts from each head's output the part along its own token's value (attention.h).
#include <cmath>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/attention/attention_segment.h"

namespace ingot {
namespace {

using detail::head_row;

constexpr int64_t kGrain = 32;   // tokens per task
constexpr double kTiny = 1e-12;  // the smallest divisor |v|

void check_heads(const char* op, const char* name, const Tensor& t, const Tensor& like, int64_t heads) {
  INGOT_CHECK_EQ(t.rank(), 3, op, ": rank of ", name);
  INGOT_CHECK_EQ(t.dtype, like.dtype, op, ": dtype of ", name);
  INGOT_CHECK(t.device == like.device, op, ": found ", name, " on ", t.device, ", expected ", like.device);
  const Shape want{like.size(0), heads, like.size(2)};
  INGOT_CHECK(t.shape == want, op, ": found ", name, " of shape ", t.shape, ", expected ", want);
  INGOT_CHECK(t.cols() <= 1 || t.step(2) == 1, op, ": found ", name, " with last stride ", t.step(2), ", expected 1");
}
void check_group(const char* op, const Tensor& y, const Tensor& v) {
  INGOT_CHECK_EQ(y.rank(), 3, op, ": rank of y");
  INGOT_CHECK_EQ(v.rank(), 3, op, ": rank of v");
  INGOT_CHECK(v.size(1) > 0 ? y.size(1) % v.size(1) == 0 : y.size(1) == 0, op, ": found ", y.size(1),
              " query heads and ", v.size(1), " key heads, expected a multiple");
  check_heads(op, "y", y, y, y.size(1));
  check_heads(op, "v", v, y, v.size(1));
}

// Eight partial sums in a fixed order, which the compiler may turn into a vector.
template <class T> T dot(const T* a, const T* b, int64_t n) {
  T part[8] = {};
  int64_t c = 0;
  for (; c + 8 <= n; c += 8)
    for (int i = 0; i < 8; ++i) part[i] += a[c + i] * b[c + i];
  for (int i = 0; c < n; ++c, ++i) part[i] += a[c] * b[c];
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

template <class T> void forward(const ExcludeSelf& a) {
  const int64_t heads = a.y.size(1), kv_heads = a.v.size(1), d = a.y.cols();
  parallel_for(a.y.size(0), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const T *y = head_row<T>(a.y, t, h), *v = head_row<T>(a.v, t, h / (heads / kv_heads));
        T* z = head_row<T>(a.z, t, h);
        const T length = std::max(std::sqrt(dot(v, v, d)), T(kTiny));
        const T along = dot(y, v, d) / length / length;
        for (int64_t c = 0; c < d; ++c) z[c] = y[c] - along * v[c];
      }
  });
}

// A token and a key head: u = v / length; below, `along_y` is y . u, and so on.
template <class T> void backward_group(const ExcludeSelfBackward& a, int64_t t, int64_t kv_head, T* du) {
  const int64_t group = a.y.size(1) / a.v.size(1), d = a.y.cols();
  const T* v = head_row<T>(a.v, t, kv_head);
  const T norm = std::sqrt(dot(v, v, d)), inverse = 1 / std::max(norm, T(kTiny));
  for (int64_t c = 0; c < d; ++c) du[c] = 0;
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    const T *y = head_row<T>(a.y, t, h), *dz = head_row<T>(a.dz, t, h);
    T* dy = head_row<T>(a.dy, t, h);
    const T along_y = dot(y, v, d) * inverse, along_dz = dot(dz, v, d) * inverse;
    for (int64_t c = 0; c < d; ++c) {
      const T g = dz[c];
      du[c] -= along_dz * y[c] + along_y * g;
      dy[c] = g - along_dz * inverse * v[c];
    }
  }
  // Where |v| is below the floor, u = v / floor is linear in v and has no projection term.
  const T along_du = norm > T(kTiny) ? dot(du, v, d) * inverse * inverse : T(0);
  T* dv = head_row<T>(a.dv, t, kv_head);
  for (int64_t c = 0; c < d; ++c) dv[c] = (a.write_dv ? T(0) : dv[c]) + (du[c] - along_du * v[c]) * inverse;
}

template <class T> void backward(const ExcludeSelfBackward& a) {
  const int64_t kv_heads = a.v.size(1), d = a.y.cols();
  parallel_for(a.y.size(0), kGrain, [&](int64_t begin, int64_t end) {
    T* du = static_cast<T*>(thread_scratch(0, d * int64_t(sizeof(T))));
    for (int64_t t = begin; t < end; ++t)
      for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) backward_group<T>(a, t, kv_head, du);
  });
}

}  // namespace

namespace cpu {
void exclude_self(const ExcludeSelf& a, Stream) {
  with_wide_float_type(a.y.dtype, "exclude_self", [&](auto t) { forward<decltype(t)>(a); });
}
void exclude_self_backward(const ExcludeSelfBackward& a, Stream) {
  with_wide_float_type(a.y.dtype, "exclude_self_backward", [&](auto t) { backward<decltype(t)>(a); });
}
}  // namespace cpu

namespace cuda {
void exclude_self(const ExcludeSelf& a, Stream stream);
void exclude_self_backward(const ExcludeSelfBackward& a, Stream stream);
}  // namespace cuda

void exclude_self(const ExcludeSelf& a, Stream stream) {
  check_group("exclude_self", a.y, a.v);
  check_heads("exclude_self", "z", a.z, a.y, a.y.size(1));
  INGOT_DISPATCH(ATTENTION, a.y.device, exclude_self, a, stream);
}

void exclude_self_backward(const ExcludeSelfBackward& a, Stream stream) {
  check_group("exclude_self_backward", a.y, a.v);
  check_heads("exclude_self_backward", "dz", a.dz, a.y, a.y.size(1));
  check_heads("exclude_self_backward", "dy", a.dy, a.y, a.y.size(1));
  check_heads("exclude_self_backward", "dv", a.dv, a.y, a.v.size(1));
  const Shape sums{a.y.size(1), a.y.size(0)};
  INGOT_CHECK(!a.delta || (a.y.device.kind == Device::cuda && a.delta.device == a.y.device && a.delta.shape == sums &&
                           a.delta.dtype == DType::f32 && a.delta.contiguous()),
              "exclude_self_backward: delta: found ", a.delta.shape, " of ", a.delta.dtype, " on ", a.delta.device,
              ", expected ", sums, " of f32, contiguous, on a GPU");
  INGOT_DISPATCH(ATTENTION, a.y.device, exclude_self_backward, a, stream);
}

}  // namespace ingot
