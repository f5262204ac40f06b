#include "ingot/kernels/copy/copy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ingot/core/dispatch.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/copy/copy_plan.h"

namespace ingot {
namespace {

bool is_floating(DType t) { return t == DType::f64 || t == DType::f32 || t == DType::bf16 || t == DType::f16; }

template <class T> uint64_t bits_of(T v) {
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof(T));
  return bits;
}
template <class T> uint64_t integer_bits(double v) {
  // The upper bound is 2^63, because a double can represent 2^63 but not the largest int64_t.
  const double low = double(std::numeric_limits<T>::min()), beyond = std::ldexp(1.0, std::numeric_limits<T>::digits);
  INGOT_CHECK(v >= low && v < beyond && v == std::floor(v), "fill: found value ", v, ", expected one that ",
              dtype_of<T>, " can hold");
  return bits_of(T(v));
}
// The bits of the value as stored.
uint64_t pattern_of(DType t, double v) {
  switch (t) {
    case DType::f64: return bits_of(v);
    case DType::f32: return bits_of(float(v));
    case DType::bf16: return bits_of(bf16(float(v)));
    case DType::f16: return bits_of(f16(float(v)));
    case DType::i64: return integer_bits<int64_t>(v);
    case DType::i32: return integer_bits<int32_t>(v);
    case DType::u32: return integer_bits<uint32_t>(v);
    case DType::u16: return integer_bits<uint16_t>(v);
    case DType::u8: return integer_bits<uint8_t>(v);
  }
  return 0;
}

void check_copy(const Copy& c) {
  INGOT_CHECK(c.from && c.to, "copy: found no ", c.from ? "to" : "from", ", expected two tensors");
  INGOT_CHECK(c.from.shape == c.to.shape, "copy: found from of shape ", c.from.shape, ", expected ", c.to.shape,
              " as to has");
  INGOT_CHECK(c.from.dtype == c.to.dtype || (is_floating(c.from.dtype) && is_floating(c.to.dtype)),
              "copy: found dtypes ", c.from.dtype, " and ", c.to.dtype, ", expected one, or two floating types");
  INGOT_CHECK(c.from.device != c.to.device || !detail::may_overlap(c.from, c.to), "copy: found operands of shape ",
              c.to.shape, " that share memory, expected them apart");
}

// Copies from host to GPU or from GPU to host.
void transfer(const Copy& c, Stream stream) {
  INGOT_CHECK(c.from.device.kind == Device::cpu || c.to.device.kind == Device::cpu, "copy: found tensors on ",
              c.from.device, " and ", c.to.device, ", expected one device, or the cpu on one side");
  INGOT_CHECK_EQ(c.from.dtype, c.to.dtype, "copy: dtype between ", c.from.device, " and ", c.to.device);
#if defined(INGOT_CUDA_BUILD) || defined(INGOT_EMULATED_DEVICE)
  const Device device = c.from.device.kind == Device::cuda ? c.from.device : c.to.device;
  const bool one_row = c.from.contiguous() && c.to.contiguous();
  INGOT_CHECK(one_row || (detail::rows_apart(c.from) && detail::rows_apart(c.to)), "copy: found strides of shape ",
              c.to.shape, " between ", c.from.device, " and ", c.to.device,
              ", expected rows one stride apart that do not overlap");
  const int64_t width = size_of(c.to.dtype), rows = one_row ? 1 : c.to.rows();
  gpu::copy_rows({.to = c.to.data,
                  .from = c.from.data,
                  .to_step = c.to.row_stride() * width,
                  .from_step = c.from.row_stride() * width,
                  .rows = rows,
                  .row_bytes = c.to.bytes() / rows,
                  .device = device.index},
                 stream);
#else
  detail::no_cuda("copy", c.from.device.kind == Device::cuda ? c.from.device : c.to.device);
#endif
}

}  // namespace

namespace cpu {
namespace {

void copy(const Copy& c, Stream) { ingot::copy(c.from, c.to); }

template <class T> void fill_with(const Tensor& t, uint64_t pattern) {
  T v;
  std::memcpy(&v, &pattern, sizeof(T));
  const detail::Strided s = detail::strided(t, t);
  T* to = static_cast<T*>(t.data);
  for (int64_t i = 0; i < s.dim[0]; ++i)
    for (int64_t j = 0; j < s.dim[1]; ++j)
      for (int64_t k = 0; k < s.dim[2]; ++k) {
        T* row = to + i * s.to[0] + j * s.to[1] + k * s.to[2];
        for (int64_t l = 0; l < s.dim[3]; ++l) row[l * s.to[3]] = v;
      }
}
void copy_at(const CopyAt& c, Stream) {
  const int64_t at = *c.at.ptr<int32_t>();
  const int64_t begin = std::max<int64_t>(0, -at), end = std::min(c.from.size(0), c.to.size(0) - at);
  if (begin < end) ingot::copy(c.from.slice(0, begin, end), c.to.slice(0, at + begin, at + end));
}
void fill(const Fill& f, uint64_t pattern, Stream) {
  if (pattern == 0) return fill_zero(f.to);
  switch (size_of(f.to.dtype)) {
    case 1: return fill_with<uint8_t>(f.to, pattern);
    case 2: return fill_with<uint16_t>(f.to, pattern);
    case 4: return fill_with<uint32_t>(f.to, pattern);
    default: return fill_with<uint64_t>(f.to, pattern);
  }
}

}  // namespace
}  // namespace cpu

namespace cuda {
void copy(const Copy& c, Stream stream);
void copy_at(const CopyAt& c, Stream stream);
void fill(const Fill& f, uint64_t pattern, Stream stream);
}  // namespace cuda

void copy(const Copy& c, Stream stream) {
  check_copy(c);
  if (c.from.device != c.to.device) {
    if (c.to.numel() > 0) transfer(c, stream);
    return;
  }
  INGOT_DISPATCH(COPY, c.to.device, copy, c, stream);
}

void copy_at(const CopyAt& c, Stream stream) {
  const auto row_of = [](const Tensor& t) { return t.rank() > 0 && t.size(0) > 0 ? t.row(0) : Tensor(); };
  INGOT_CHECK(c.from.rank() >= 2 && c.from.rank() == c.to.rank(), "copy_at: found from of shape ", c.from.shape,
              " and to of shape ", c.to.shape, ", expected rows of one shape");
  INGOT_CHECK(c.from.dtype == c.to.dtype && c.from.device == c.to.device && c.at.device == c.to.device,
              "copy_at: found ", c.from.dtype, " on ", c.from.device, ", expected ", c.to.dtype, " on ", c.to.device);
  INGOT_CHECK(c.at.dtype == DType::i32 && c.at.numel() == 1, "copy_at: found at of shape ", c.at.shape, " and dtype ",
              c.at.dtype, ", expected (1) of i32");
  if (c.from.size(0) == 0 || c.to.size(0) == 0) return;
  const Tensor a = row_of(c.from), b = row_of(c.to);
  INGOT_CHECK(a.shape == b.shape && a.contiguous() && b.contiguous(), "copy_at: found rows of shapes ", a.shape,
              " and ", b.shape, ", expected one shape without gaps");
  INGOT_DISPATCH(COPY, c.to.device, copy_at, c, stream);
}

void fill(const Fill& f, Stream stream) {
  INGOT_CHECK(f.to, "fill: found no tensor, expected one");
  const uint64_t pattern = pattern_of(f.to.dtype, f.value);
  INGOT_DISPATCH(COPY, f.to.device, fill, f, pattern, stream);
}

}  // namespace ingot
