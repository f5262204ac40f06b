#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/l2.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/row_units.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/copy/copy_plan.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kConverted = 8;  // elements that a thread converts: 16 bytes of a 16-bit type

struct VectorParams {
  tile::Rows from, to;
  tile::RowUnits units;
  bool evict_first;
};
struct ElementParams {
  const void* from;
  void* to;
  detail::Strided loops;
  int64_t count;
};

__device__ inline int64_t thread_number() { return int64_t(blockIdx.x) * kThreads + threadIdx.x; }

// --- whole vectors: rows that begin where 16 bytes can be moved at once
// ------------------------------------------------

__global__ void __launch_bounds__(kThreads) copy_words(const __grid_constant__ VectorParams p) {
  const uint32_t i = uint32_t(thread_number());
  if (i >= p.units.units) return;
  const tile::Division place = tile::place_of(p.units, i);
  tile::Vec<uint32_t, 4> v;
  tile::load(v, tile::at<const uint32_t, 4>(p.from, place));
  tile::store(tile::at<uint32_t, 4>(p.to, place), v, p.evict_first);
}

template <class S, class D>
__global__ void __launch_bounds__(kThreads) convert(const __grid_constant__ VectorParams p) {
  const uint32_t i = uint32_t(thread_number());
  if (i >= p.units.units) return;
  const tile::Division place = tile::place_of(p.units, i);
  tile::Vec<S, kConverted> v;
  tile::load(v, tile::at<const S, kConverted>(p.from, place));
  float x[kConverted];
  tile::to_float(v, x);
  tile::store(tile::at<D, kConverted>(p.to, place), tile::from_float<D>(x), p.evict_first);
}

__global__ void __launch_bounds__(kThreads)
    fill_words(const __grid_constant__ VectorParams p, uint32_t low, uint32_t high) {
  const uint32_t i = uint32_t(thread_number());
  if (i >= p.units.units) return;
  tile::Vec<uint32_t, 4> v;
  v.word[0][0] = v.word[0][2] = low;
  v.word[0][1] = v.word[0][3] = high;
  tile::store(tile::at<uint32_t, 4>(p.to, tile::place_of(p.units, i)), v, p.evict_first);
}

// --- elements one by one: any strides, any alignment
// -------------------------------------------------------------------

struct Places {
  int64_t from = 0, to = 0;
};
__device__ inline Places places_of(const detail::Strided& loops, int64_t i) {
  Places at;
#pragma unroll
  for (int d = kMaxRank - 1; d >= 0; --d) {
    const int64_t here = i % loops.dim[d];
    i /= loops.dim[d];
    at.from += here * loops.from[d];
    at.to += here * loops.to[d];
  }
  return at;
}

template <class D, class S> __device__ inline D converted(S x) {
  if constexpr (std::is_same_v<S, D>)
    return x;
  else if constexpr (std::is_same_v<D, double>)
    return double(tile::to_float(x));
  else if constexpr (std::is_same_v<S, double>)
    return tile::from_float<D>(float(x));
  else
    return tile::from_float<D>(tile::to_float(x));
}

template <class S, class D>
__global__ void __launch_bounds__(kThreads) copy_elements(const __grid_constant__ ElementParams p) {
  const int64_t i = thread_number();
  if (i >= p.count) return;
  const Places at = places_of(p.loops, i);
  static_cast<D*>(p.to)[at.to] = converted<D>(static_cast<const S*>(p.from)[at.from]);
}

template <class T>
__global__ void __launch_bounds__(kThreads) fill_elements(const __grid_constant__ ElementParams p, T value) {
  const int64_t i = thread_number();
  if (i < p.count) static_cast<T*>(p.to)[places_of(p.loops, i).to] = value;
}

// --- host
// --------------------------------------------------------------------------------------------------------------

// The operands as matrices, if their dimensions allow this. If slices without gaps lie apart from each other, such as
// one matrix of every document, each slice becomes one long row.
struct Operands {
  Tensor from, to;
};
Operands as_matrices(const Tensor& from, const Tensor& to) {
  const detail::Strided s = detail::strided(from, to);
  constexpr int kRow = kMaxRank - 2, kColumn = kMaxRank - 1;
  for (int d = 0; d < kRow; ++d)
    if (s.dim[d] != 1) return {from, to};
  const auto matrix = [&](const Tensor& t, const int64_t(&steps)[kMaxRank]) {
    Tensor m(t.data, t.dtype, {s.dim[kRow], s.dim[kColumn]}, t.device);
    m.stride[0] = s.dim[kRow] > 1 ? steps[kRow] : s.dim[kColumn];
    m.stride[1] = steps[kColumn];
    return m;
  };
  return {matrix(from, s.from), matrix(to, s.to)};
}

// Whether the rows of both operands begin aligned and are whole units of `unit` elements.
bool whole_vectors(const Tensor& from, const Tensor& to, int64_t unit) {
  for (const Tensor* t : {&from, &to})
    if (!t->rows_uniform() || !tile::rows_start_aligned(*t, 16)) return false;
  const bool one_row = tile::without_gaps(from) && tile::without_gaps(to);
  return (one_row ? to.numel() : to.cols()) % unit == 0;
}

template <class Kernel, class... More>
void launch_vectors(const char* op, Kernel kernel, const Tensor& from, const Tensor& to, int64_t unit, Stream stream,
                    More... more) {
  const bool one_row = tile::without_gaps(from) && tile::without_gaps(to);
  const int64_t rows = one_row ? 1 : to.rows(), cols = to.numel() / rows;
  const bool evict_first = to.bytes() > gpu::beyond_l2_bytes(gpu::device_limits(to.device));
  tile::for_each_launch(rows, cols / unit, one_row, [&](int64_t row, int64_t first, const tile::RowUnits& units) {
    const auto from_here = [&](const Tensor& t) { return tile::moved(tile::rows_of(t), row, first * unit, t.dtype); };
    VectorParams p{from_here(from), from_here(to), units, evict_first};
    if (from.dtype == to.dtype) {  // moved as words of 4 bytes, whatever the type
      p.from.stride = p.from.stride * size_of(from.dtype) / 4;
      p.to.stride = p.to.stride * size_of(to.dtype) / 4;
    }
    gpu::launch(
        op, kernel,
        {.grid = (int64_t(units.units) + kThreads - 1) / kThreads, .block = kThreads, .device = to.device.index},
        stream, p, more...);
  });
}

template <class Kernel, class... More>
void launch_elements(const char* op, Kernel kernel, const Tensor& from, const Tensor& to, Stream stream, More... more) {
  const ElementParams p{from.data, to.data, detail::strided(from, to), to.numel()};
  gpu::launch(op, kernel, {.grid = (p.count + kThreads - 1) / kThreads, .block = kThreads, .device = to.device.index},
              stream, p, more...);
}

// Calls use(T{}) with the unsigned type of `bytes` bytes.
template <class Use> void with_width(int64_t bytes, Use&& use) {
  switch (bytes) {
    case 1: return use(uint8_t{});
    case 2: return use(uint16_t{});
    case 4: return use(uint32_t{});
    default: return use(uint64_t{});
  }
}

void copy_same_type(const Copy& c, Stream stream) {
  const int64_t width = size_of(c.to.dtype);
  if (whole_vectors(c.from, c.to, 16 / width))
    return launch_vectors("copy", copy_words, c.from, c.to, 16 / width, stream);
  with_width(width, [&](auto word) {
    using T = decltype(word);
    launch_elements("copy", copy_elements<T, T>, c.from, c.to, stream);
  });
}

template <class S, class D> void copy_converted(const Copy& c, Stream stream) {
  if constexpr (std::is_same_v<S, D>) {
    copy_same_type(c, stream);
  } else {
    if constexpr (sizeof(S) <= 4 && sizeof(D) <= 4)
      if (whole_vectors(c.from, c.to, kConverted))
        return launch_vectors("copy", convert<S, D>, c.from, c.to, kConverted, stream);
    launch_elements("copy", copy_elements<S, D>, c.from, c.to, stream);
  }
}

struct CopyAtParams {
  const void* from;
  void* to;
  const int32_t* at;
  int64_t from_stride, to_stride, cols, rows, room;  // in elements
};
template <class T> __global__ void __launch_bounds__(kThreads) copy_rows_at(const __grid_constant__ CopyAtParams p) {
  const int64_t i = thread_number(), row = i / p.cols, column = i % p.cols, to = row + *p.at;
  if (row >= p.rows || to < 0 || to >= p.room) return;
  static_cast<T*>(p.to)[to * p.to_stride + column] = static_cast<const T*>(p.from)[row * p.from_stride + column];
}

}  // namespace

void copy_at(const CopyAt& c, Stream stream) {
  const int64_t cols = c.from.numel() / c.from.size(0);
  const CopyAtParams p{.from = c.from.data,
                       .to = c.to.data,
                       .at = c.at.ptr<int32_t>(),
                       .from_stride = c.from.step(0),
                       .to_stride = c.to.step(0),
                       .cols = cols,
                       .rows = c.from.size(0),
                       .room = c.to.size(0)};
  if (c.from.numel() == 0) return;
  with_width(size_of(c.to.dtype), [&](auto word) {
    gpu::launch("copy_at", copy_rows_at<decltype(word)>,
                {.grid = (c.from.numel() + kThreads - 1) / kThreads, .block = kThreads, .device = c.to.device.index},
                stream, p);
  });
}

void copy(const Copy& given, Stream stream) {
  if (given.to.numel() == 0) return;
  const auto [from, to] = as_matrices(given.from, given.to);
  const Copy c{.from = from, .to = to};
  if (c.from.dtype == c.to.dtype) return copy_same_type(c, stream);
  with_float_type(c.from.dtype, "copy", [&](auto source) {
    with_float_type(c.to.dtype, "copy",
                    [&](auto target) { copy_converted<decltype(source), decltype(target)>(c, stream); });
  });
}

void fill(const Fill& f, uint64_t pattern, Stream stream) {
  if (f.to.numel() == 0) return;
  const Tensor to = as_matrices(f.to, f.to).to;
  const int64_t width = size_of(to.dtype);
  if (whole_vectors(to, to, 16 / width)) {
    for (int64_t have = width; have < 8; have *= 2) pattern |= pattern << (8 * have);
    return launch_vectors("fill", fill_words, to, to, 16 / width, stream, uint32_t(pattern), uint32_t(pattern >> 32));
  }
  with_width(width, [&](auto word) {
    using T = decltype(word);
    launch_elements("fill", fill_elements<T>, to, to, stream, T(pattern));
  });
}

}  // namespace ingot::cuda
