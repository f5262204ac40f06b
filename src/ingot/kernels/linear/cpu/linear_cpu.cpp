// The CPU code of linear.h: forward, backward, packed weights and matrix products.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/linear/cpu/gemm_of.h"
#include "ingot/kernels/linear/cpu/linear_tiles.h"
#include "ingot/kernels/linear/cpu/product.h"
#include "ingot/kernels/linear/linear.h"

namespace ingot {
namespace {
std::atomic<bool> emulating_tiles = false;
}
void detail::emulate_tiles(bool on) { emulating_tiles = on; }
bool detail::tiles_emulated() { return emulating_tiles.load(std::memory_order_relaxed); }

namespace cpu {
namespace {

using namespace linear_cpu;
using detail::gemm_of;

Tensor part(const Tensor& t, int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end) {
  Tensor p(static_cast<char*>(t.data) + (row_begin * t.row_stride() + col_begin) * size_of(t.dtype), t.dtype,
           {row_end - row_begin, col_end - col_begin}, t.device);
  p.stride[0] = t.row_stride();
  return p;
}

template <class T> void keep_signs(const Tensor& pre, uint8_t* signs, int64_t stride) {
  for (int64_t r = 0; r < pre.rows(); ++r)
    for (int64_t c = 0; c < pre.cols(); ++c) signs[r * stride + c] = pre.row(r).ptr<T>()[c] > 0;
}
// dx *= f', where the slope follows from the value of f and the sign of its argument.
template <class T>
void multiply_by_slopes(Act act, const Tensor& dx, const Tensor& y, const uint8_t* signs, int64_t stride) {
  with_activation(act, [&](auto f) {
    using F = decltype(f);
    if constexpr (has_slope_from_value_and_sign<F>)
      for (int64_t r = 0; r < dx.rows(); ++r) {
        T* const to = dx.ptr<T>() + r * dx.row_stride();
        const T* const value = y.ptr<T>() + r * y.row_stride();
        for (int64_t c = 0; c < dx.cols(); ++c)
          to[c] *= F::slope_from_value_and_sign(value[c], signs[r * stride + c] != 0);
      }
  });
}
}  // namespace

void linear(const Linear& a, Stream stream) {
  with_wide_float_type(a.x.dtype, "linear", [&](auto type) {
    using T = decltype(type);
    const Tensor& out = a.pre ? a.pre : a.y;
    Gemm<T> g = gemm_of<T>(a.x, false, a.w, true, out, a.products);
    g.alpha = T(a.alpha);
    g.beta = T(a.accumulate);
    g.bias = a.b ? a.b.ptr<T>() : nullptr;
    g.thin = true;
    g.packed_b = a.w_packed.data;
    if (a.act == Act::identity && !a.pre) return product(g);
    product(g, [&](int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
      if (a.signs) keep_signs<T>(part(out, r0, r1, c0, c1), a.signs.ptr<uint8_t>() + r0 * g.n + c0, g.n);
      activate({.act = a.act, .x = part(out, r0, r1, c0, c1), .y = part(a.y, r0, r1, c0, c1)}, stream);
    });
  });
}

namespace {

// A product with these weights. The cut and the packing of b depend on b alone.
template <class T> Gemm<T> gemm_of_weights(const Tensor& w, Products products) {
  const Tensor x(nullptr, w.dtype, {1, w.cols()}), y(nullptr, w.dtype, {1, w.rows()});
  Gemm<T> g = gemm_of<T>(x, false, w, true, y, products);
  g.thin = true;
  return g;
}
template <class T> int64_t packed_bytes(const Tensor& w, Products products) {
  return with_kind(gemm_of_weights<T>(w, products), [](auto how, const Gemm<T>& g) {
    const Cut cut = decltype(how)::cut(g);
    return ceil_div(g.n, cut.n_chunk) * std::max<int64_t>(1, ceil_div(g.k, cut.k_chunk)) * cut.b_bytes;
  });
}
template <class T> void pack_weights(const LinearPack& a) {
  with_kind(gemm_of_weights<T>(a.w, a.products), [&](auto how, const Gemm<T>& g) {
    const Cut cut = decltype(how)::cut(g);
    char* to = static_cast<char*>(a.packed.data);
    if (cut.b_bytes == 0) return;
    each_chunk(g, cut, [&](GemmChunk chunk, int64_t col_panels) {
      chunk.packed = to;
      pack_chunk<decltype(how)>(g, chunk, 0, col_panels, g.n * g.k <= kSerialWork);
      to += cut.b_bytes;
    });
  });
}

// dx += (dy W) * f'(pre), a few rows at a time through a temporary, because the slope must not multiply the old dx.
template <class T> void add_sloped(const LinearBackward& a, Stream stream) {
  constexpr int64_t kRows = 128;
  const int64_t rows = a.dx.rows(), cols = a.dx.cols();
  // Slot 3 of the thread's scratch memory; product() uses other slots.
  T* memory = static_cast<T*>(thread_scratch(3, std::min(rows, kRows) * cols * int64_t(sizeof(T))));
  for (int64_t r = 0; r < rows; r += kRows) {
    const int64_t end = std::min(rows, r + kRows);
    const Tensor fresh(memory, {end - r, cols});
    product(gemm_of<T>(part(a.dy, r, end, 0, a.dy.cols()), false, a.w, false, fresh, a.products));
    activate_backward({.act = a.act, .dy = fresh, .x = part(a.pre, r, end, 0, cols), .dx = fresh}, stream);
    for (int64_t i = r; i < end; ++i) {
      T* to = a.dx.ptr<T>() + i * a.dx.row_stride();
      for (int64_t j = 0; j < cols; ++j) to[j] += memory[(i - r) * cols + j];
    }
  }
}

// dx = (dy W) * f'; each part of dx is multiplied by the slopes as soon as its product is complete.
template <class T> void input_gradient(const LinearBackward& a, Stream stream) {
  Gemm<T> g = gemm_of<T>(a.dy, false, a.w, false, a.dx, a.products);
  g.beta = T(a.accumulate_dx);
  if (a.signs) {
    product(g, [&](int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
      multiply_by_slopes<T>(a.act, part(a.dx, r0, r1, c0, c1), part(a.x, r0, r1, c0, c1),
                            a.signs.ptr<uint8_t>() + r0 * g.n + c0, g.n);
    });
  } else if (a.act == Act::identity || !a.pre) {
    product(g);
  } else {
    product(g, [&](int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
      const Tensor dx = part(a.dx, r0, r1, c0, c1);
      activate_backward({.act = a.act,
                         .dy = dx,
                         .x = part(a.pre, r0, r1, c0, c1),
                         .dx = dx,
                         .y = a.form_x ? part(a.x, r0, r1, c0, c1) : Tensor()},
                        stream);
    });
  }
}
template <class T> void add_bias_gradient(const LinearBackward& a) {
  const T* dy = a.dy.ptr<T>();
  T* db = a.db.ptr<T>();
  const int64_t rows = a.dy.rows(), stride = a.dy.row_stride(), n = a.dy.cols();
  parallel_for(n, rows * n <= kSerialWork ? n : 64,
               [&](int64_t begin, int64_t end) { sum_columns(dy + begin, rows, stride, end - begin, db + begin); });
}

template <class T> void backward(const LinearBackward& a, Stream stream) {
  // x is computed together with the slopes, where slopes are computed.
  const bool with_slopes = a.dx && !a.accumulate_dx && a.act != Act::identity;
  if (a.form_x && !with_slopes) activate({.act = a.act, .x = a.pre, .y = a.x}, stream);
  if (a.dx) {
    if (a.accumulate_dx && a.pre && a.act != Act::identity)
      add_sloped<T>(a, stream);
    else
      input_gradient<T>(a, stream);
  }
  if (a.dw) {
    Gemm<T> g = gemm_of<T>(a.dy, true, a.x, false, a.dw, a.products);
    g.beta = 1;
    product(g);
  }
  if (a.db) add_bias_gradient<T>(a);
}

}  // namespace

int64_t linear_packed_bytes(const Tensor& w, Products products) {
  return with_wide_float_type(w.dtype, "linear_packed_bytes",
                              [&](auto type) { return packed_bytes<decltype(type)>(w, products); });
}
void linear_pack(const LinearPack& a) {
  with_wide_float_type(a.w.dtype, "linear_pack", [&](auto type) { pack_weights<decltype(type)>(a); });
}

void linear_backward(const LinearBackward& a, Stream stream) {
  with_wide_float_type(a.dy.dtype, "linear_backward", [&](auto type) { backward<decltype(type)>(a, stream); });
}

void matmul(const MatMul& m, Stream) {
  with_wide_float_type(m.a.dtype, "matmul", [&](auto type) {
    using T = decltype(type);
    Gemm<T> g = gemm_of<T>(m.a, m.transpose_a, m.b, m.transpose_b, m.c, m.products);
    g.alpha = T(m.alpha);
    g.beta = T(m.beta);
    g.lower = m.symmetric;
    g.bias = m.bias ? m.bias.ptr<T>() : nullptr;
    if (m.add) {
      g.add = m.add.ptr<T>();
      g.ld_add = m.add.row_stride();
    }
    product(g);
    if (!m.symmetric) return;
    // Both halves have the same bits: the products commute and the sums run in the same order.
    parallel_for(g.m, g.m * g.n <= kSerialWork ? g.m : 64, [&](int64_t begin, int64_t end) {
      for (int64_t j0 = begin; j0 < g.n; j0 += 32)
        for (int64_t i = begin; i < end; ++i)
          for (int64_t j = std::max(i + 1, j0); j < std::min(g.n, j0 + 32); ++j)
            g.c[i * g.ldc + j] = g.c[j * g.ldc + i];
    });
  });
}

void matmul_each(const MatMul& m, Stream stream) {
  for (int64_t i = 0; i < m.a.size(0); ++i) cpu::matmul(detail::matmul_of(m, i), stream);
}

}  // namespace cpu

}  // namespace ingot
