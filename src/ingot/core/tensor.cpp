#include "ingot/core/tensor.h"

#include <cstring>

namespace ingot {

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  out << '(';
  for (int i = 0; i < s.rank; ++i) out << (i ? ", " : "") << s.dim[i];
  return out << ')';
}

bool Tensor::contiguous() const {
  int64_t step = 1;
  for (int i = shape.rank - 1; i >= 0; --i) {
    if (shape.dim[i] != 1 && stride[i] != step) return false;
    step *= shape.dim[i];
  }
  return true;
}

bool Tensor::rows_uniform() const {
  if (shape.rank == 0) return false;
  if (shape[-1] > 1 && step(-1) != 1) return false;
  for (int i = 0; i + 2 < shape.rank; ++i)
    if (shape.dim[i] > 1 && stride[i] != stride[i + 1] * shape.dim[i + 1]) return false;
  return true;
}

Tensor Tensor::reshape(Shape s) const {
  INGOT_CHECK(contiguous(), "reshape: found a strided tensor of shape ", shape, ", expected a contiguous one");
  INGOT_CHECK(s.numel() == numel(), "reshape: found shape ", shape, ", expected as many elements as ", s);
  return Tensor(data, dtype, s, device);
}

Tensor Tensor::slice(int axis, int64_t begin, int64_t end) const {
  INGOT_CHECK(axis >= 0 && axis < rank() && 0 <= begin && begin <= end && end <= shape.dim[axis], "slice: found [",
              begin, ", ", end, ") of dimension ", axis, ", expected it inside shape ", shape);
  Tensor t = *this;
  t.data = static_cast<char*>(data) + begin * stride[axis] * size_of(dtype);
  t.shape.dim[axis] = end - begin;
  return t;
}

Tensor Tensor::select(int axis, int64_t i) const {
  Tensor t = slice(axis, i, i + 1);
  for (int k = axis; k + 1 < rank(); ++k) {
    t.shape.dim[k] = t.shape.dim[k + 1];
    t.stride[k] = t.stride[k + 1];
  }
  --t.shape.rank;
  return t;
}

Tensor Tensor::split_last(int64_t outer) const {
  INGOT_CHECK(rank() >= 1 && rank() < kMaxRank && outer > 0 && cols() % outer == 0, "split_last: found shape ", shape,
              ", expected a last dimension divisible by ", outer);
  Tensor t = *this;
  const int last = rank() - 1;
  const int64_t inner = cols() / outer;
  t.shape.rank = rank() + 1;
  t.shape.dim[last] = outer;
  t.shape.dim[last + 1] = inner;
  t.stride[last + 1] = stride[last];
  t.stride[last] = inner * stride[last];
  return t;
}

namespace {
// Calls use(offset of row in a, offset of row in b) for each innermost row.
template <class Use> void for_each_row(const Tensor& a, const Tensor& b, Use&& use) {
  int64_t index[kMaxRank] = {};
  const int64_t rows = a.rows();
  for (int64_t r = 0; r < rows; ++r) {
    int64_t offset_a = 0, offset_b = 0;
    for (int i = 0; i + 1 < a.rank(); ++i) {
      offset_a += index[i] * a.stride[i];
      offset_b += index[i] * b.stride[i];
    }
    use(offset_a, offset_b);
    for (int i = a.rank() - 2; i >= 0 && ++index[i] == a.shape.dim[i]; --i) index[i] = 0;
  }
}
}  // namespace

void fill_zero(const Tensor& t) {
  INGOT_CHECK(t.device.kind == Device::cpu, "fill_zero: found a tensor on ", t.device, ", expected cpu");
  if (t.numel() == 0) return;
  const int64_t width = size_of(t.dtype);
  if (t.contiguous()) {
    std::memset(t.data, 0, size_t(t.bytes()));
    return;
  }
  for_each_row(t, t, [&](int64_t at, int64_t) {
    for (int64_t c = 0; c < t.cols(); ++c)
      std::memset(static_cast<char*>(t.data) + (at + c * t.step(-1)) * width, 0, size_t(width));
  });
}

void copy(const Tensor& from, const Tensor& to) {
  INGOT_CHECK(from.device.kind == Device::cpu && to.device.kind == Device::cpu, "copy: found tensors on ", from.device,
              " and ", to.device, ", expected cpu");
  INGOT_CHECK(from.shape == to.shape, "copy: found shape ", from.shape, ", expected ", to.shape);
  if (from.numel() == 0) return;
  const auto at = [](const Tensor& t, int64_t i) { return static_cast<char*>(t.data) + i * size_of(t.dtype); };
  if (from.dtype == to.dtype && from.contiguous() && to.contiguous()) {
    std::memmove(to.data, from.data, size_t(from.bytes()));
  } else if (from.dtype == to.dtype) {
    for_each_row(from, to, [&](int64_t a, int64_t b) {
      for (int64_t c = 0; c < from.cols(); ++c)
        std::memcpy(at(to, b + c * to.step(-1)), at(from, a + c * from.step(-1)), size_t(size_of(from.dtype)));
    });
  } else {
    with_float_type(from.dtype, "copy", [&](auto source) {
      with_float_type(to.dtype, "copy", [&](auto target) {
        using S = decltype(source);
        using D = decltype(target);
        for_each_row(from, to, [&](int64_t a, int64_t b) {
          for (int64_t c = 0; c < from.cols(); ++c)
            to.ptr<D>()[b + c * to.step(-1)] = D(accum_t<D>(from.ptr<S>()[a + c * from.step(-1)]));
        });
      });
    });
  }
}

}  // namespace ingot
