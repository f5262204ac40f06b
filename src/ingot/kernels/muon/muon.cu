// Muon on a GPU: three kernels before the iteration (momentum and the rows' squares; the matrices' norms; the first
// matrix of the iteration) and one kernel after the iteration. With bf16 products the iteration runs in f16 on the
// core, a launch for each product of a whole bank; with all further types, matrix by matrix through matmul().
#include <utility>

#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/gemm/variant.h"
#include "ingot/gpu/generation.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/muon/muon.h"
#include "ingot/kernels/muon/newton_schulz.h"

namespace ingot::cuda {
namespace {

#ifdef INGOT_EMULATE
using std::isfinite;
#endif

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr double kRowFloor = 1e-7, kNormFloor = 1e-7;

template <class Use> void with_gpu_type(DType t, const char* op, Use&& use) {
  switch (t) {
    case DType::f32: return use(float{});
    case DType::bf16: return use(bf16{});
    default: fail(ErrorCode::unsupported, op, ": found dtype ", t, " on a GPU, expected f32 or bf16");
  }
}

// A bank (B, R, C) of T with any strides of its rows.
template <class T> struct Bank {
  T* data = nullptr;
  int64_t matrix = 0, row = 0;
  __device__ T* at(int64_t b, int64_t r) const { return data + b * matrix + r * row; }
};
template <class T> Bank<T> bank_of(const Tensor& t) {
  if (!t) return {};
  return {t.ptr<T>(), t.stride[0], t.stride[1]};
}

// The rates of a step, read from the host's or the device's copy.
struct Rates {
  const double* device = nullptr;  // lr, mu, weight decay
  const double* factor = nullptr;
  double lr = 0, mu = 0, weight_decay = 0, grad_scale = 1;

  __device__ double scale() const { return factor != nullptr ? grad_scale * *factor : grad_scale; }
  __device__ double rate() const { return device != nullptr ? device[0] : lr; }
  __device__ float momentum() const { return float(device != nullptr ? device[1] : mu); }
  __device__ double decay() const { return device != nullptr ? device[2] : weight_decay; }
};

struct SumMemory {
  double of_warp[kWarps];
};
// Every thread gets the same sum, in an order fixed by the threads' numbers.
__device__ double block_sum(double v) {
  auto& [of_warp] = tile::shared<SumMemory>();
  for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync(~0u, v, mask);
  __syncthreads();  // of_warp may still be read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int w = 0; w < kWarps; ++w) v += of_warp[w];
  return v;
}

template <class T> struct Gradients {
  Bank<const T> g;
  Bank<T> momentum;  // empty: the gradient is used directly
  int64_t rows = 0, cols = 0;
  bool nesterov = false, row_normalise = false;
};
// An element of the matrix to make orthogonal: the momentum, which already includes the gradient; with Nesterov, the
// gradient plus mu times that momentum.
template <class T> __device__ float moved(const Gradients<T>& a, float g, float momentum, float mu) {
  return a.nesterov ? g + mu * momentum : momentum;
}

// A block per row: momentum = mu momentum + g, and the sum of squares of the result.
template <class T>
__global__ void __launch_bounds__(kThreads) momentum_kernel(const Gradients<T> a, const Rates rates, double* squares) {
  ptx::wait_for_earlier_kernels();
  const double scale = rates.scale();
  if (!isfinite(scale)) {  // the step is discarded; the following kernels read zeros
    if (threadIdx.x == 0) squares[blockIdx.x] = 0;
    return;
  }
  const int64_t b = blockIdx.x / a.rows, r = blockIdx.x % a.rows;
  const T* const g = a.g.at(b, r);
  T* const momentum = a.momentum.data != nullptr ? a.momentum.at(b, r) : nullptr;
  const float mu = rates.momentum();
  double sum = 0;
  for (int64_t c = threadIdx.x; c < a.cols; c += kThreads) {
    float u = tile::to_float(g[c]) * float(scale);
    if (momentum != nullptr) {
      momentum[c] = tile::from_float<T>(mu * tile::to_float(momentum[c]) + u);
      u = moved(a, u, tile::to_float(momentum[c]), mu);
    }
    sum += double(u) * u;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

__device__ double row_scale(double squares, bool normalise) {
  return normalise ? 1 / fmax(sqrt(squares), kRowFloor) : 1;
}
// One block per matrix: 1 / (its Frobenius norm + floor) from the squares of its rows.
__global__ void __launch_bounds__(kThreads)
    norm_kernel(const double* squares, int64_t rows, bool normalise, double* inverse) {
  ptx::wait_for_earlier_kernels();
  const double* const of_row = squares + blockIdx.x * rows;
  double sum = 0;
  for (int64_t r = threadIdx.x; r < rows; r += kThreads) {
    const double scale = row_scale(of_row[r], normalise);
    sum += of_row[r] * scale * scale;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) inverse[blockIdx.x] = 1 / (sqrt(sum) + kNormFloor);
}
// A block per row: x = the row that momentum_kernel squared, scaled by row, by matrix, and by x_scale.
template <class T, class X>
__global__ void __launch_bounds__(kThreads) start_kernel(const Gradients<T> a, const Rates rates, const double* squares,
                                                         const double* inverse, Bank<X> x, double x_scale) {
  ptx::wait_for_earlier_kernels();
  const double scale = rates.scale();
  const int64_t b = blockIdx.x / a.rows, r = blockIdx.x % a.rows;
  X* const to = x.at(b, r);
  if (!isfinite(scale)) {
    for (int64_t c = threadIdx.x; c < a.cols; c += kThreads) to[c] = tile::from_float<X>(0);
    return;
  }
  const T* const g = a.g.at(b, r);
  const T* const momentum = a.momentum.data != nullptr ? a.momentum.at(b, r) : nullptr;
  const float mu = rates.momentum(),
              times = float(row_scale(squares[blockIdx.x], a.row_normalise) * inverse[b] * x_scale);
  for (int64_t c = threadIdx.x; c < a.cols; c += kThreads) {
    float u = tile::to_float(g[c]) * float(scale);
    if (momentum != nullptr) u = moved(a, u, tile::to_float(momentum[c]), mu);
    to[c] = tile::from_float<X>(u * times);
  }
}
// One block per row: p = p (1 - lr decay) - lr by x.
template <class T, class X>
__global__ void __launch_bounds__(kThreads)
    update_kernel(Bank<T> p, Bank<const X> x, const Rates rates, double by, int64_t rows, int64_t cols) {
  ptx::wait_for_earlier_kernels();
  if (!isfinite(rates.scale())) return;
  const int64_t b = blockIdx.x / rows, r = blockIdx.x % rows;
  const float keep = float(1 - rates.rate() * rates.decay()), step = float(rates.rate() * by);
  T* const to = p.at(b, r);
  const X* const from = x.at(b, r);
  for (int64_t c = threadIdx.x; c < cols; c += kThreads)
    to[c] = tile::from_float<T>(keep * tile::to_float(to[c]) - step * tile::to_float(from[c]));
}
template <class T, class X>
__global__ void __launch_bounds__(kThreads) write_back_kernel(Bank<T> to, Bank<const X> x, float by, int64_t cols) {
  ptx::wait_for_earlier_kernels();
  for (int64_t c = threadIdx.x; c < cols; c += kThreads)
    to.at(0, blockIdx.x)[c] = tile::from_float<T>(by * tile::to_float(x.at(0, blockIdx.x)[c]));
}

// --- the memory of a bank's iteration

DType iterated_type(DType dtype, Products products) { return products == Products::bf16 ? DType::f16 : dtype; }
int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

struct Room {
  IterationBank bank;
  double *squares, *inverse;
  int64_t bytes = 0;
};
// Rows begin at multiples of 16 bytes, as tensor copies require. Without memory, only counts the bytes.
Room carve(const Tensor& memory, int64_t count, int64_t rows, int64_t cols, DType dtype) {
  Room room;
  char* const begin = memory ? static_cast<char*>(memory.data) : nullptr;
  const auto take = [&](int64_t bytes) {
    char* const at = begin + room.bytes;
    room.bytes += aligned(bytes);
    return at;
  };
  const auto bank = [&](int64_t r, int64_t c) {
    const int64_t stride = (c + 7) / 8 * 8;
    Tensor t(take(count * r * stride * size_of(dtype)), dtype, {count, r, c}, memory.device);
    t.stride[0] = r * stride, t.stride[1] = stride;
    return t;
  };
  const int64_t side = std::min(rows, cols);
  room.bank.x = bank(rows, cols), room.bank.other = bank(rows, cols);
  for (int i = 0; i < squares_of(rows, cols); ++i) room.bank.square[size_t(i)] = bank(side, side);
  room.squares = reinterpret_cast<double*>(take(count * rows * 8));
  room.inverse = reinterpret_cast<double*>(take(count * 8));
  return room;
}

// Steps on each matrix alone, through matmul(). Returns the tensor that holds the result.
Tensor iterate_by_matmul(const IterationBank& bank, const Coefficients& co, Products products, Stream stream) {
  Tensor x = bank.x, other = bank.other;
  const bool wide = x.size(1) <= x.size(2);
  const double by = 1 / bank.scale;
  for (int step = 0; step < co.steps; ++step, std::swap(x, other))
    for (int64_t i = 0; i < x.size(0); ++i) {
      const Tensor from = x.select(0, i), to = other.select(0, i), a = bank.square[0].select(0, i),
                   q = bank.square[1].select(0, i);
      matmul({.a = from,
              .b = from,
              .c = a,
              .transpose_a = !wide,
              .transpose_b = wide,
              .alpha = by,
              .products = products,
              .symmetric = true},
             stream);
      matmul(
          {.a = a, .b = a, .c = q, .alpha = co.c * by, .beta = co.b, .products = products, .add = a, .symmetric = true},
          stream);
      matmul({.a = wide ? q : from,
              .b = wide ? from : q,
              .c = to,
              .alpha = by,
              .beta = co.a,
              .products = products,
              .add = from},
             stream);
    }
  return x;
}
Tensor iterate(const IterationBank& bank, const Coefficients& co, Products products, Stream stream) {
  const int device = bank.x.device.index;
  if (bank.x.dtype != DType::f16) return iterate_by_matmul(bank, co, products, stream);
  Tensor x;
  gemm::with_core(device, [&](auto core) { x = launch_iteration<typename decltype(core)::type>(bank, co, stream); });
  return x;
}

template <class T, class X> void start(const Gradients<T>& a, const Rates& rates, const Room& room, Stream stream) {
  const int64_t count = room.bank.x.size(0);
  const int device = room.bank.x.device.index;
  const gpu::Launch rows{.grid = count * a.rows, .block = kThreads, .overlap = true, .device = device};
  gpu::launch("muon", momentum_kernel<T>, rows, stream, a, rates, room.squares);
  gpu::launch("muon", norm_kernel, {.grid = count, .block = kThreads, .overlap = true, .device = device}, stream,
              static_cast<const double*>(room.squares), a.rows, a.row_normalise, room.inverse);
  gpu::launch("muon", start_kernel<T, X>, rows, stream, a, rates, static_cast<const double*>(room.squares),
              static_cast<const double*>(room.inverse), bank_of<X>(room.bank.x), room.bank.scale);
}

// Calls use(T, X): the types of the parameters and of the iterated matrices.
template <class Use> void with_types(DType dtype, DType iterated, const char* op, Use&& use) {
  with_gpu_type(dtype, op, [&](auto type) {
    if (iterated == DType::f16) return use(type, f16{});
    use(type, type);
  });
}

}  // namespace

int64_t muon_workspace_bytes(int64_t count, int64_t rows, int64_t cols, DType dtype, Device device) {
  const Tensor none(nullptr, DType::u8, {0}, device);
  return carve(none, count, rows, cols, dtype).bytes;  // f16 needs no more
}

void muon(const Muon& m, Stream stream) {
  gpu::check_generation("muon", gpu::device_limits(m.p.device));
  const DType iterated = iterated_type(m.p.dtype, m.products);
  const int64_t count = m.p.size(0), rows = m.p.size(1), cols = m.p.size(2);
  const Coefficients co{m.steps, m.a, m.b, m.c};
  Room room = carve(m.workspace, count, rows, cols, iterated);
  if (iterated == DType::f16) room.bank.scale = iteration_scale("muon", co);
  const Rates rates{.device = m.rates ? m.rates.ptr<double>() : nullptr,
                    .factor = m.factor ? m.factor.ptr<double>() : nullptr,
                    .lr = m.lr,
                    .mu = m.mu,
                    .weight_decay = m.weight_decay,
                    .grad_scale = m.grad_scale};
  with_types(m.p.dtype, iterated, "muon", [&](auto type, auto work) {
    using T = decltype(type);
    using X = decltype(work);
    start<T, X>({.g = bank_of<const T>(m.g),
                 .momentum = bank_of<T>(m.momentum),
                 .rows = rows,
                 .cols = cols,
                 .nesterov = m.nesterov,
                 .row_normalise = m.row_normalise},
                rates, room, stream);
    const Tensor x = iterate(room.bank, co, m.products, stream);
    const double by = std::sqrt(std::max(1.0, double(rows) / double(cols))) / room.bank.scale;
    gpu::launch("muon", update_kernel<T, X>,
                {.grid = count * rows, .block = kThreads, .overlap = true, .device = m.p.device.index}, stream,
                bank_of<T>(m.p), bank_of<const X>(x), rates, by, rows, cols);
  });
}

void newton_schulz(const NewtonSchulz& n, Stream stream) {
  gpu::check_generation("newton_schulz", gpu::device_limits(n.x.device));
  const DType iterated = iterated_type(n.x.dtype, n.products);
  const int64_t rows = n.x.size(0), cols = n.x.size(1);
  const Coefficients co{n.steps, n.a, n.b, n.c};
  Room room = carve(n.workspace, 1, rows, cols, iterated);
  if (iterated == DType::f16) room.bank.scale = iteration_scale("newton_schulz", co);
  Tensor bank = n.x;
  bank.shape = {1, rows, cols};
  bank.stride[0] = rows * n.x.row_stride(), bank.stride[1] = n.x.row_stride(), bank.stride[2] = 1;
  with_types(n.x.dtype, iterated, "newton_schulz", [&](auto type, auto work) {
    using T = decltype(type);
    using X = decltype(work);
    start<T, X>({.g = bank_of<const T>(bank), .rows = rows, .cols = cols}, {}, room, stream);
    const Tensor x = iterate(room.bank, co, n.products, stream);
    gpu::launch("newton_schulz", write_back_kernel<T, X>,
                {.grid = rows, .block = kThreads, .overlap = true, .device = n.x.device.index}, stream,
                bank_of<T>(bank), bank_of<const X>(x), float(1 / room.bank.scale), cols);
  });
}

}  // namespace ingot::cuda
