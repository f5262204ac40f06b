#include "ingot/kernels/muon/muon.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/muon/newton_schulz.h"

INGOT_SIMD_DECLARE(
    double muon_momentum_f32(const float* g, float* buf, float* u, int64_t n, float scale, float mu, bool nesterov);
    double muon_momentum_f64(const double* g, double* buf, double* u, int64_t n, double scale, double mu,
                             bool nesterov);
    double muon_squares_f32(const float* x, int64_t n); double muon_squares_f64(const double* x, int64_t n);
    void muon_scale_f32(float* x, int64_t n, float by); void muon_scale_f64(double* x, int64_t n, double by);
    void muon_update_f32(float* p, const float* x, int64_t n, float keep, float step);
    void muon_update_f64(double* p, const double* x, int64_t n, double keep, double step);)

namespace ingot {
namespace {

double momentum_row(const float* g, float* buf, float* u, int64_t n, float scale, float mu, bool nesterov) {
  return INGOT_SIMD_CALL(muon_momentum_f32, g, buf, u, n, scale, mu, nesterov);
}
double momentum_row(const double* g, double* buf, double* u, int64_t n, double scale, double mu, bool nesterov) {
  return INGOT_SIMD_CALL(muon_momentum_f64, g, buf, u, n, scale, mu, nesterov);
}
double squares_of_row(const float* x, int64_t n) { return INGOT_SIMD_CALL(muon_squares_f32, x, n); }
double squares_of_row(const double* x, int64_t n) { return INGOT_SIMD_CALL(muon_squares_f64, x, n); }
void scale_row(float* x, int64_t n, float by) { INGOT_SIMD_CALL(muon_scale_f32, x, n, by); }
void scale_row(double* x, int64_t n, double by) { INGOT_SIMD_CALL(muon_scale_f64, x, n, by); }
void update_row(float* p, const float* x, int64_t n, float keep, float step) {
  INGOT_SIMD_CALL(muon_update_f32, p, x, n, keep, step);
}
void update_row(double* p, const double* x, int64_t n, double keep, double step) {
  INGOT_SIMD_CALL(muon_update_f64, p, x, n, keep, step);
}

constexpr int64_t kRowGrainElements = 1 << 14;
int64_t row_grain(int64_t cols) { return std::max<int64_t>(1, kRowGrainElements / std::max<int64_t>(1, cols)); }

// Two copies of the matrix (each step reads one copy and writes the second), the squares of an iteration, and an fp64
// sum of squares per row.
struct MatrixBytes {
  int64_t x, square, squares, sums;
  int64_t total() const { return 2 * x + squares * square + sums; }
};
int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }
MatrixBytes matrix_bytes(int64_t rows, int64_t cols, DType dtype) {
  const int64_t small = std::min(rows, cols);
  return {round_up(rows * cols * size_of(dtype)), round_up(small * small * size_of(dtype)), squares_of(rows, cols),
          round_up(rows * 8)};
}
// Small matrices are processed in parallel, each by one thread, because a single small product rarely keeps all threads
// busy. Larger matrices, and banks with fewer matrices than threads, are divided inside their products.
constexpr int64_t kMostLanes = 8, kLaneBytes = 4 << 20;
constexpr int64_t kSmallMatrix = 128 * 512;  // elements: a product of this size feeds few threads
int64_t lanes_of(int64_t rows, int64_t cols, DType dtype) {
  return matrix_bytes(rows, cols, dtype).total() <= kLaneBytes ? kMostLanes : 1;
}

struct Workspace {
  Tensor x, other, square[kSquares];
  double* sums;
};
Workspace carve(const Tensor& memory, int64_t lane, int64_t rows, int64_t cols, DType dtype) {
  const MatrixBytes size = matrix_bytes(rows, cols, dtype);
  const int64_t small = std::min(rows, cols);
  char* at = static_cast<char*>(memory.data) + lane * size.total();
  Workspace w;
  w.x = Tensor(at, dtype, {rows, cols}, memory.device);
  w.other = Tensor(at + size.x, dtype, {rows, cols}, memory.device);
  for (int64_t i = 0; i < size.squares; ++i)
    w.square[i] = Tensor(at + 2 * size.x + i * size.square, dtype, {small, small}, memory.device);
  w.sums = reinterpret_cast<double*>(at + 2 * size.x + size.squares * size.square);
  return w;
}

// The square A = X X^T on the short side, without a transposition in memory.
void square_of(const Tensor& x, const Tensor& a, Products products, Stream stream) {
  const bool wide = x.size(0) <= x.size(1);
  matmul({.a = x, .b = x, .c = a, .transpose_a = !wide, .transpose_b = wide, .products = products, .symmetric = true},
         stream);
}
// c = b A + c A A
void polynomial(const Tensor& a, const Tensor& c, const Coefficients& co, Products products, Stream stream) {
  matmul({.a = a, .b = a, .c = c, .alpha = co.c, .beta = co.b, .products = products, .add = a, .symmetric = true},
         stream);
}
template <class T> void add_diagonal(const Tensor& t, T x) {
  for (int64_t i = 0; i < t.size(0); ++i) t.ptr<T>()[i * (t.row_stride() + 1)] += x;
}

// Iterates on x, which must be scaled already, and returns the tensor with the result: x or w.other.
Tensor iterate_on_matrix(Tensor x, const Workspace& w, const Coefficients& co, Products products, Stream stream) {
  const bool wide = x.size(0) <= x.size(1);
  const Tensor &a = w.square[0], &b = w.square[1];
  Tensor next = w.other;
  for (int step = 0; step < co.steps; ++step) {
    square_of(x, a, products, stream);
    polynomial(a, b, co, products, stream);
    matmul({.a = wide ? b : x, .b = wide ? x : b, .c = next, .beta = co.a, .products = products, .add = x}, stream);
    std::swap(x, next);
  }
  return x;
}

// Steps for long matrices, from x to y. With Q = a I + b A + c A A each step is X = Q X, so A becomes Q A Q; every Q is
// a polynomial in the first A, so all squares commute and all products are symmetric. X itself is multiplied once, by P
// = Q ... Q: 0.45 of the operations for 256 x 1,024. A's small eigenvalues have an absolute error, which each step
// multiplies by a^2. In X, however, this error is multiplied by the equally small singular values. bf16 would lose
// these eigenvalues.
template <class T>
void iterate_on_square(const Tensor& x, const Tensor& y, const Workspace& w, const Coefficients& co, int steps,
                       Stream stream) {
  const bool wide = x.size(0) <= x.size(1);
  Tensor a = w.square[0], q = w.square[1], p = w.square[2], spare = w.square[3];
  const Tensor& half = w.square[4];
  const auto product = [&](const Tensor& left, const Tensor& right, const Tensor& to) {
    matmul({.a = left, .b = right, .c = to, .symmetric = true}, stream);
  };
  square_of(x, a, Products::fp32, stream);
  for (int step = 0; step < steps; ++step) {
    polynomial(a, q, co, Products::fp32, stream);
    add_diagonal(q, T(co.a));
    if (step + 1 < steps) {
      product(q, a, half);
      product(half, q, a);
    }
    if (step == 0) {
      std::swap(p, q);
      continue;
    }
    product(q, p, spare);
    std::swap(p, spare);
  }
  matmul({.a = wide ? p : x, .b = wide ? x : p, .c = y}, stream);
}

template <class T>
Tensor iterate(const Tensor& x, const Workspace& w, const Coefficients& co, Products products, Stream stream) {
  constexpr double kMostGrowth = 512;  // all five steps of Muon's coefficients
  if (products != Products::fp32 || co.steps <= 1 || !iterates_on_square(x.size(0), x.size(1)))
    return iterate_on_matrix(x, w, co, products, stream);
  Tensor from = x, to = w.other;
  for (int steps : parts_on_square(co, kMostGrowth)) {
    iterate_on_square<T>(from, to, w, co, steps, stream);
    std::swap(from, to);
  }
  return from;
}

template <class T> T* row_of(const Tensor& t, int64_t r) { return static_cast<T*>(t.data) + r * t.row_stride(); }

constexpr double kRowFloor = 1e-7, kNormFloor = 1e-7;

template <class T>
void orthogonalise_and_apply(const Muon& m, const Tensor& p, const Tensor& g, const Tensor& momentum,
                             const Workspace& w, Stream stream) {
  const int64_t rows = p.size(0), cols = p.size(1);
  parallel_for(rows, row_grain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      w.sums[r] = momentum_row(row_of<T>(g, r), row_of<T>(momentum, r), row_of<T>(w.x, r), cols, T(m.grad_scale),
                               T(m.mu), m.nesterov);
  });
  const auto row_scale = [&](int64_t r) {
    return m.row_normalise ? 1 / std::max(std::sqrt(w.sums[r]), kRowFloor) : 1.0;
  };
  double squares = 0;
  for (int64_t r = 0; r < rows; ++r) squares += w.sums[r] * row_scale(r) * row_scale(r);
  const double inverse_norm = 1 / (std::sqrt(squares) + kNormFloor);
  parallel_for(rows, row_grain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) scale_row(row_of<T>(w.x, r), cols, T(row_scale(r) * inverse_norm));
  });
  const Tensor x = iterate<T>(w.x, w, {m.steps, m.a, m.b, m.c}, m.products, stream);
  const double keep = 1 - m.lr * m.weight_decay;
  const double step = m.lr * std::sqrt(std::max(1.0, double(rows) / double(cols)));
  parallel_for(rows, row_grain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) update_row(row_of<T>(p, r), row_of<T>(x, r), cols, T(keep), T(step));
  });
}

void check_bank(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  INGOT_CHECK(t.dtype == like.dtype, op, ": ", name, ": found dtype ", t.dtype, ", expected ", like.dtype);
  INGOT_CHECK(t.device == like.device, op, ": ", name, ": found it on ", t.device, ", expected ", like.device);
  INGOT_CHECK(t.shape == like.shape, op, ": ", name, ": found ", t.shape, ", expected ", like.shape);
  INGOT_CHECK(t.cols() <= 1 || t.step(-1) == 1, op, ": ", name, ": found last stride ", t.step(-1), ", expected 1");
}
void check_workspace(const char* op, const Tensor& t, int64_t bytes, Device device) {
  INGOT_CHECK(t.device == device, op, ": workspace: found it on ", t.device, ", expected ", device);
  INGOT_CHECK(t.dtype == DType::u8 && t.contiguous() && t.numel() >= bytes, op, ": workspace: found ", t.numel(),
              " elements of ", t.dtype, ", expected at least ", bytes, " contiguous bytes");
  INGOT_CHECK(reinterpret_cast<uintptr_t>(t.data) % 16 == 0, op,
              ": workspace: found an address not aligned to 16 bytes, expected an aligned one");
}

void check_numbers(const char* what, const Tensor& t, int64_t n, Device device) {
  INGOT_CHECK(!t || (t.dtype == DType::f64 && t.shape == Shape{n} && t.contiguous() && t.device == device), what,
              ": found ", t.dtype, " of shape ", t.shape, " on ", t.device, ", expected ", n, " of f64 on ", device);
}

}  // namespace

namespace cpu {

void muon(const Muon& call, Stream stream) {
  Muon m = call;
  if (m.factor) m.grad_scale *= *m.factor.ptr<double>();
  if (m.rates)
    m.lr = m.rates.ptr<double>()[0], m.mu = m.rates.ptr<double>()[1], m.weight_decay = m.rates.ptr<double>()[2];
  if (!std::isfinite(m.grad_scale)) return;
  const int64_t count = m.p.size(0), rows = m.p.size(1), cols = m.p.size(2);
  with_wide_float_type(m.p.dtype, "muon", [&](auto type) {
    using T = decltype(type);
    // The results have the same bits for any number of lanes and any assignment of matrices to lanes.
    int64_t lanes = std::min(count, lanes_of(rows, cols, m.p.dtype));
    if (lanes < thread_count() && rows * cols > kSmallMatrix) lanes = 1;
    lanes = std::min<int64_t>(lanes, thread_count());
    std::atomic<int64_t> next = 0;
    const auto work = [&](int64_t lane) {
      const Workspace w = carve(m.workspace, lane, rows, cols, m.p.dtype);
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
        orthogonalise_and_apply<T>(m, m.p.select(0, i), m.g.select(0, i), m.momentum.select(0, i), w, stream);
    };
    parallel_tasks(lanes, work);
  });
}

void newton_schulz(const NewtonSchulz& n, Stream stream) {
  const int64_t rows = n.x.size(0), cols = n.x.size(1);
  with_wide_float_type(n.x.dtype, "newton_schulz", [&](auto type) {
    using T = decltype(type);
    const Workspace w = carve(n.workspace, 0, rows, cols, n.x.dtype);
    parallel_for(rows, row_grain(cols), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) w.sums[r] = squares_of_row(row_of<T>(n.x, r), cols);
    });
    double squares = 0;
    for (int64_t r = 0; r < rows; ++r) squares += w.sums[r];
    const T scale = T(1 / (std::sqrt(squares) + kNormFloor));
    for (int64_t r = 0; r < rows; ++r) scale_row(row_of<T>(n.x, r), cols, scale);
    const Tensor x = iterate<T>(n.x, w, {n.steps, n.a, n.b, n.c}, n.products, stream);
    if (x.data != n.x.data) copy(x, n.x);
  });
}

}  // namespace cpu

namespace cuda {
void muon(const Muon& m, Stream stream);
void newton_schulz(const NewtonSchulz& n, Stream stream);
int64_t muon_workspace_bytes(int64_t count, int64_t rows, int64_t cols, DType dtype, Device device);
}  // namespace cuda

void muon(const Muon& m, Stream stream) {
  INGOT_CHECK(m.p.rank() == 3, "muon: p: found ", m.p.shape, ", expected (B, R, C)");
  check_bank("muon", "p", m.p, m.p);
  check_bank("muon", "g", m.g, m.p);
  check_bank("muon", "momentum", m.momentum, m.p);
  check_numbers("muon: factor", m.factor, 1, m.p.device);
  check_numbers("muon: rates", m.rates, 3, m.p.device);
  INGOT_CHECK_GE(m.steps, 0, "muon: steps");
  if (m.p.numel() == 0) return;
  check_workspace("muon", m.workspace,
                  muon_workspace_bytes(m.p.size(0), m.p.size(1), m.p.size(2), m.p.dtype, m.p.device), m.p.device);
  INGOT_DISPATCH(MUON, m.p.device, muon, m, stream);
}

void newton_schulz(const NewtonSchulz& n, Stream stream) {
  INGOT_CHECK(n.x.rank() == 2, "newton_schulz: x: found ", n.x.shape, ", expected (R, C)");
  check_bank("newton_schulz", "x", n.x, n.x);
  INGOT_CHECK_GE(n.steps, 0, "newton_schulz: steps");
  if (n.x.numel() == 0) return;
  check_workspace("newton_schulz", n.workspace,
                  muon_workspace_bytes(1, n.x.size(0), n.x.size(1), n.x.dtype, n.x.device), n.x.device);
  INGOT_DISPATCH(MUON, n.x.device, newton_schulz, n, stream);
}

int64_t muon_workspace_bytes(int64_t count, int64_t rows, int64_t cols, DType dtype, Device device) {
  if constexpr (INGOT_HAS_CUDA(MUON))
    if (device.kind == Device::cuda) return cuda::muon_workspace_bytes(count, rows, cols, dtype, device);
  return std::min(count, lanes_of(rows, cols, dtype)) * matrix_bytes(rows, cols, dtype).total();
}

}  // namespace ingot
