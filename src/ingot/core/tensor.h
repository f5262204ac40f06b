#pragma once
// Tensor: a view of memory with a separate owner. A tensor carries dtype, device, shape and strides (in elements),
// is copied by value, and never frees. Device and Stream state where work happens.
#include <cstdint>
#include <initializer_list>

#include "ingot/core/dtype.h"

namespace ingot {

struct Device {
  enum Kind : uint8_t { cpu, cuda };
  Kind kind = cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};
inline std::ostream& operator<<(std::ostream& out, Device d) {
  if (d.kind == Device::cpu) return out << "cpu";
  return out << "cuda:" << d.index;
}

// A CUDA stream on a GPU; the CPU backend runs in the calling thread and its pool and ignores the stream.
struct Stream {
  void* handle = nullptr;
};

constexpr int kMaxRank = 4;

struct Shape {
  int rank = 0;
  int64_t dim[kMaxRank] = {};
  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes) {
    INGOT_CHECK(sizes.size() <= size_t(kMaxRank), "shape: found rank ", sizes.size(), ", expected at most ", kMaxRank);
    for (int64_t n : sizes) {
      INGOT_CHECK(n >= 0, "shape: found size ", n, " in dimension ", rank, ", expected at least 0");
      dim[rank++] = n;
    }
  }
  int64_t operator[](int i) const { return dim[i < 0 ? i + rank : i]; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= dim[i];
    return n;
  }
  bool operator==(const Shape& o) const {
    if (rank != o.rank) return false;
    for (int i = 0; i < rank; ++i)
      if (dim[i] != o.dim[i]) return false;
    return true;
  }
};
std::ostream& operator<<(std::ostream& out, const Shape& s);

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  Shape shape;
  int64_t stride[kMaxRank] = {};

  Tensor() = default;
  // A contiguous view of `p`.
  Tensor(void* p, DType t, Shape s, Device d = {}) : data(p), dtype(t), device(d), shape(s) {
    int64_t step = 1;
    for (int i = s.rank - 1; i >= 0; --i) {
      stride[i] = step;
      step *= s.dim[i];
    }
  }
  template <class T>
  Tensor(T* p, Shape s, Device d = {}) : Tensor(const_cast<std::remove_const_t<T>*>(p), dtype_of<T>, s, d) {}

  // False for an absent operand.
  explicit operator bool() const { return shape.rank > 0; }
  template <class T> T* ptr() const {
    INGOT_CHECK(dtype == dtype_of<T>, "tensor: found dtype ", dtype, ", expected ", dtype_of<T>);
    return static_cast<T*>(data);
  }
  int rank() const { return shape.rank; }
  int64_t size(int i) const { return shape[i]; }
  int64_t step(int i) const { return stride[i < 0 ? i + shape.rank : i]; }
  int64_t numel() const { return shape.numel(); }
  int64_t bytes() const { return numel() * size_of(dtype); }
  // A tensor seen as a matrix: all dimensions but the last are rows. rows_uniform() states whether all rows have the
  // same stride.
  int64_t cols() const { return shape.rank == 0 ? 0 : shape[-1]; }
  int64_t rows() const {
    int64_t n = shape.rank == 0 ? 0 : 1;
    for (int i = 0; i + 1 < shape.rank; ++i) n *= shape.dim[i];
    return n;
  }
  int64_t row_stride() const { return shape.rank >= 2 ? stride[shape.rank - 2] : cols(); }
  bool contiguous() const;
  bool rows_uniform() const;  // last stride 1, and leading dimensions collapse into a single dimension

  Tensor reshape(Shape s) const;                             // contiguous only
  Tensor slice(int axis, int64_t begin, int64_t end) const;  // [begin, end) of a dimension
  Tensor select(int axis, int64_t i) const;                  // drops the dimension
  Tensor row(int64_t i) const { return select(0, i); }
  Tensor split_last(int64_t outer) const;  // (..., C) -> (..., outer, C / outer)
};

// Fills with zeros, copies (same shape and dtype, any strides), converts between floating types. CPU tensors.
void fill_zero(const Tensor& t);
void copy(const Tensor& from, const Tensor& to);

}  // namespace ingot
