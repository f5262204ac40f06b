// Products on a GPU, by cuBLASLt or by the core (linear_config.h chooses). Activations, slopes and sums over rows that
// are not fused have kernels of their own.
#include <type_traits>

#include "ingot/gpu/cublaslt.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/float_types.h"
#include "ingot/gpu/gemm/operands.h"
#include "ingot/gpu/gemm/variant.h"
#include "ingot/gpu/generation.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/limits.h"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/cluster.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/linear/cuda/activated.h"
#include "ingot/kernels/linear/cuda/core_product.h"
#include "ingot/kernels/linear/cuda/linear_config.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/kernels/linear/sign_bits.h"

namespace ingot::cuda {
namespace {

using gemm::as_matrix;

// --- products

constexpr int kThreads = 256;

// A product over nothing: c = beta * add + bias.
template <class T>
__global__ void __launch_bounds__(kThreads) combine_kernel(T* c, int64_t c_stride, const T* add, int64_t add_stride,
                                                           const T* bias, float beta, int64_t rows, int64_t cols) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = i / cols, column = i % cols;
  if (row >= rows) return;
  float v = bias != nullptr ? tile::to_float(bias[column]) : 0;
  if (beta != 0) v += beta * tile::to_float(add[row * add_stride + column]);
  c[row * c_stride + column] = tile::from_float<T>(v);
}
void combine(const PlainProduct& p, Stream stream) {
  with_gpu_float_type(p.c.dtype, "matmul", [&](auto type) {
    using T = decltype(type);
    gpu::launch("matmul", combine_kernel<T>,
                {.grid = (p.c.numel() + kThreads - 1) / kThreads, .block = kThreads, .device = p.c.device.index},
                stream, p.c.ptr<T>(), p.c.row_stride(), p.beta != 0 ? p.add.ptr<T>() : nullptr,
                p.beta != 0 ? p.add.row_stride() : 0, p.bias ? p.bias.ptr<T>() : nullptr, p.beta, p.c.rows(),
                p.c.cols());
  });
}

// The number of products in a batch, and the distance between their operands.
struct Batch {
  int64_t count = 1, a = 0, b = 0, c = 0, add = 0;
};
bool by_cublaslt(const PlainProduct& p, Products products, const Tensor& workspace, Stream stream,
                 const Batch& batch = {}) {
  const auto matrix = [](const Tensor& t, int64_t step) { return gpu::LtMatrix{t.data, t.row_stride(), step}; };
  using Round = gpu::LtProduct::Round;
  return gpu::lt_product({.m = p.c.rows(),
                          .n = p.c.cols(),
                          .k = p.transpose_a ? p.a.rows() : p.a.cols(),
                          .batch = batch.count,
                          .type = p.a.dtype,
                          .out = p.c.dtype,
                          .transpose_a = p.transpose_a,
                          .transpose_b = p.transpose_b,
                          .a = matrix(p.a, batch.a),
                          .b = matrix(p.b, batch.b),
                          .c = p.beta != 0 ? matrix(p.add, batch.add) : matrix(p.c, batch.c),
                          .d = matrix(p.c, batch.c),
                          .bias = p.bias ? p.bias.data : nullptr,
                          .alpha = p.alpha,
                          .beta = p.beta,
                          .round = products == Products::bf16   ? Round::bf16
                                   : products == Products::tf32 ? Round::tf32
                                                                : Round::none,
                          .workspace = workspace ? workspace.data : nullptr,
                          .workspace_bytes = workspace ? workspace.numel() : 0},
                         p.c.device.index, stream);
}

const char* operand_refusal(const PlainProduct& p);

// cuBLASLt's kernels for 16-bit operands with unaligned rows round the product before they add the bias. For such
// operands, therefore, the bias is first written to c, and the product is then added to c.
bool by_cublaslt_rounded_once(const PlainProduct& p, Products products, const Tensor& workspace, Stream stream) {
  if (!p.bias || p.beta != 0 || !gemm::is_16_bit(p.a.dtype) || !gpu::lt_available() ||
      (gemm::rows_are_aligned(p.a) && gemm::rows_are_aligned(p.b)))
    return by_cublaslt(p, products, workspace, stream);
  combine(p, stream);
  PlainProduct onto_bias = p;
  onto_bias.beta = 1, onto_bias.add = p.c, onto_bias.bias = {};
  return by_cublaslt(onto_bias, products, workspace, stream);
}

void product(const char* op, const PlainProduct& p, Products products, const Tensor& workspace, Stream stream) {
  with_gpu_float_type(p.a.dtype, op, [](auto) {});
  if (p.c.numel() == 0) return;
  const int64_t k = p.transpose_a ? p.a.rows() : p.a.cols();
  if (k == 0) return combine(p, stream);
  const bool hopper = gemm::variant_on(p.c.device.index) == gemm::Variant::hopper;
  // The portable core writes rows that begin and end anywhere.
  const char* const refused = hopper ? core_refuses(p) : operand_refusal(p);
  const int64_t sms = gpu::sm_count(p.c.device.index);
  const int64_t added = core_adds(p) ? p.c.numel() * size_of(p.c.dtype) : 0;
  if (refused == nullptr && hopper &&
      core_is_faster({p.c.rows(), p.c.cols(), k}, core_combines(p), added, sms,
                     gpu::memory_bandwidth(p.c.device.index)))
    return core_product(p, sms, stream);
  if (by_cublaslt_rounded_once(p, products, workspace, stream)) return;
  INGOT_CHECK(refused == nullptr, op, ": found ", refused, ", expected 16-bit operands of aligned rows, or cuBLASLt (",
              gpu::lt_version(), ")");
  core_product(p, sms, stream);
}

// --- sums over rows: blocks of a cluster share the rows of 32 columns and add up in a fixed order

constexpr int kSumBlocks = 8, kSumWarps = kThreads / 32;

template <class T, class Sum>
__global__ void __launch_bounds__(kThreads)
    sum_rows_kernel(const T* dy, int64_t stride, int64_t rows, int64_t cols, Sum* db) {
  auto& of_warp = tile::shared<float[kSumWarps][32]>();
  auto& of_block = tile::shared<float[kSumBlocks][32], 1>();
  ptx::wait_for_earlier_kernels();
  const uint32_t rank = ptx::cluster_rank(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = int64_t(blockIdx.x / kSumBlocks) * 32 + lane;
  float sum = 0;
  if (column < cols)
#pragma unroll 4
    for (int64_t r = rank * kSumWarps + warp; r < rows; r += kSumBlocks * kSumWarps)
      sum += tile::to_float(dy[r * stride + column]);
  of_warp[warp][lane] = sum;
  __syncthreads();
  tile::sync_cluster();  // the first block has started
  if (warp == 0) {
    for (int w = 1; w < kSumWarps; ++w) sum += of_warp[w][lane];
    ptx::cluster_store(&of_block[rank][lane], 0, sum);
  }
  tile::sync_cluster();
  if (rank != 0 || warp != 0 || column >= cols) return;
  sum = of_block[0][lane];
  for (int b = 1; b < kSumBlocks; ++b) sum += of_block[b][lane];
  db[column] = tile::from_float<Sum>(tile::to_float(db[column]) + sum);
}
// Without clusters: a block takes all rows of few columns, whose rows its threads share, and the threads' sums are
// added in a fixed order. 16 columns of 16 bits are 32 bytes, one memory sector.
constexpr int kAloneColumns = 16, kAloneThreads = 1024, kAloneRows = kAloneThreads / kAloneColumns;
template <class T, class Sum>
__global__ void __launch_bounds__(kAloneThreads)
    sum_rows_alone_kernel(const T* dy, int64_t stride, int64_t rows, int64_t cols, Sum* db) {
  auto& of_row = tile::shared<float[kAloneRows][kAloneColumns]>();
  const uint32_t place = threadIdx.x % kAloneColumns, first = threadIdx.x / kAloneColumns;
  const int64_t column = int64_t(blockIdx.x) * kAloneColumns + place;
  float sum = 0;
  if (column < cols)
#pragma unroll 4
    for (int64_t r = first; r < rows; r += kAloneRows) sum += tile::to_float(dy[r * stride + column]);
  of_row[first][place] = sum;
  __syncthreads();
  if (first != 0 || column >= cols) return;
  for (int r = 1; r < kAloneRows; ++r) sum += of_row[r][place];
  db[column] = tile::from_float<Sum>(tile::to_float(db[column]) + sum);
}
void sum_rows(const Tensor& dy, const Tensor& db, Stream stream) {
  if (dy.rows() == 0 || dy.cols() == 0) return;
  with_gpu_float_type(dy.dtype, "linear_backward", [&](auto type) {
    using T = decltype(type);
    const auto launch = [&](auto sum) {
      using Sum = decltype(sum);
      if (!gpu::limits(dy.device.index).hopper) {
        gpu::launch("linear_backward", sum_rows_alone_kernel<T, Sum>,
                    {.grid = (dy.cols() + kAloneColumns - 1) / kAloneColumns,
                     .block = kAloneThreads,
                     .device = dy.device.index},
                    stream, dy.ptr<T>(), dy.row_stride(), dy.rows(), dy.cols(), db.ptr<Sum>());
        return;
      }
      gpu::launch("linear_backward", sum_rows_kernel<T, Sum>,
                  {.grid = (dy.cols() + 31) / 32 * kSumBlocks,
                   .block = kThreads,
                   .cluster = kSumBlocks,
                   .overlap = true,
                   .device = dy.device.index},
                  stream, dy.ptr<T>(), dy.row_stride(), dy.rows(), dy.cols(), db.ptr<Sum>());
    };
    if (db.dtype == DType::f32)
      launch(float{});
    else
      launch(type);
  });
}

// --- signs for products in which the core does not handle signs: a thread for each word

// use(bit, row, column) for the elements of a word inside the matrix.
template <class Use> __device__ void each_sign(int64_t word, int64_t rows, int64_t cols, Use&& use) {
  const int64_t block = word / sign_bits::kLanes, across = sign_bits::column_blocks(cols);
  const int64_t row0 = block / across * sign_bits::kRows, column0 = block % across * sign_bits::kColumns;
  for (int bit = 0; bit < 64; ++bit) {
    const sign_bits::Place at = sign_bits::place(int(word % sign_bits::kLanes), bit);
    if (row0 + at.row < rows && column0 + at.column < cols) use(bit, row0 + at.row, column0 + at.column);
  }
}
template <class T>
__global__ void __launch_bounds__(kThreads)
    keep_signs_kernel(const T* pre, int64_t stride, int64_t rows, int64_t cols, uint64_t* signs, int64_t words) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= words) return;
  uint64_t word = 0;
  each_sign(i, rows, cols, [&](int bit, int64_t row, int64_t column) {
    word |= uint64_t(tile::to_float(pre[row * stride + column]) > 0) << bit;
  });
  signs[i] = word;
}
void keep_signs(const Tensor& pre, const Tensor& signs, Stream stream) {
  const int64_t words = sign_bits::words(pre.rows(), pre.cols());
  if (words == 0) return;
  with_gpu_float_type(pre.dtype, "linear", [&](auto type) {
    using T = decltype(type);
    gpu::launch("linear", keep_signs_kernel<T>,
                {.grid = (words + kThreads - 1) / kThreads, .block = kThreads, .device = pre.device.index}, stream,
                pre.ptr<T>(), pre.row_stride(), pre.rows(), pre.cols(), static_cast<uint64_t*>(signs.data), words);
  });
}
template <class T, class F>
__global__ void __launch_bounds__(kThreads)
    slopes_kernel(T* dx, int64_t dx_stride, const T* y, int64_t y_stride, int64_t rows, int64_t cols,
                  const uint64_t* signs, int64_t words) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= words) return;
  const uint64_t word = signs[i];
  each_sign(i, rows, cols, [&](int bit, int64_t row, int64_t column) {
    T* const to = dx + row * dx_stride + column;
    const float value = tile::to_float(y[row * y_stride + column]);
    *to = tile::from_float<T>(tile::to_float(*to) * act_slope_from_value_and_sign<F, T>(value, word >> bit & 1));
  });
}
void multiply_by_slopes(Act act, const Tensor& dx, const Tensor& y, const Tensor& signs, Stream stream) {
  const int64_t words = sign_bits::words(dx.rows(), dx.cols());
  if (words == 0) return;
  with_gpu_float_type(dx.dtype, "linear_backward", [&](auto type) {
    using T = decltype(type);
    with_activation(act, [&](auto f) {
      using F = decltype(f);
      if constexpr (has_slope_from_value_and_sign<F>)
        gpu::launch("linear_backward", slopes_kernel<T, F>,
                    {.grid = (words + kThreads - 1) / kThreads, .block = kThreads, .device = dx.device.index}, stream,
                    dx.ptr<T>(), dx.row_stride(), y.ptr<T>(), y.row_stride(), dx.rows(), dx.cols(),
                    static_cast<const uint64_t*>(signs.data), words);
    });
  });
}

}  // namespace

namespace {
const char* operand_refusal(const PlainProduct& p) {
  if (!gemm::is_16_bit(p.a.dtype)) return "operands of f32";
  if (!gemm::rows_are_aligned(p.a) || !gemm::rows_are_aligned(p.b))
    return "an operand whose rows do not begin at multiples of 16 bytes";
  return nullptr;
}
}  // namespace

const char* core_refuses(const PlainProduct& p) {
  if (const char* const refused = operand_refusal(p)) return refused;
  if (!gemm::rows_are_aligned(p.c)) return "a result whose rows do not begin at multiples of 16 bytes";
  if (!gemm::rows_are_whole(p.c)) return "a result whose rows are not whole 16 bytes";
  return nullptr;
}

void core_product(const PlainProduct& p, int64_t sms, Stream stream) {
  const gemm::Problem size{p.c.rows(), p.c.cols(), p.transpose_a ? p.a.rows() : p.a.cols()};
  const int form = pick_core_form(size, core_combines(p), sms);
  gemm::with_core(p.c.device.index, [&](auto core) {
    using Core = typename decltype(core)::type;
    gemm::with_16_bit_type(p.a.dtype, [&](auto type) { launch_core_product<Core, decltype(type)>(p, form, stream); });
  });
}

namespace {
PlainProduct plain(const MatMul& m) {
  return {.a = as_matrix(m.a),
          .b = as_matrix(m.b),
          .c = as_matrix(m.c),
          .transpose_a = m.transpose_a,
          .transpose_b = m.transpose_b,
          .alpha = float(m.alpha),
          .beta = float(m.beta),
          .add = as_matrix(m.add ? m.add : m.c),
          .bias = m.bias};
}
}  // namespace

void matmul(const MatMul& m, Stream stream) {
  gpu::check_generation("matmul", gpu::device_limits(m.c.device));
  product("matmul", plain(m), m.products, m.workspace, stream);
}

void matmul_each(const MatMul& m, Stream stream) {
  gpu::check_generation("matmul_each", gpu::device_limits(m.c.device));
  const auto at = [&](int64_t i) {
    MatMul one = m;
    for (Tensor* t : {&one.a, &one.b, &one.c}) *t = t->row(i);
    return plain(one);
  };
  const PlainProduct first = at(0);
  const Batch batch{m.a.size(0), m.a.step(0), m.b.step(0), m.c.step(0), m.add ? 0 : m.c.step(0)};
  const int64_t k = first.transpose_a ? first.a.rows() : first.a.cols();
  if (first.c.numel() > 0 && k > 0 && by_cublaslt(first, m.products, m.workspace, stream, batch)) return;
  for (int64_t i = 0; i < batch.count; ++i) product("matmul_each", at(i), m.products, m.workspace, stream);
}

namespace {
// Whether the core supports the operands and is faster at this size.
bool is_fused(Act act, const Tensor& a, const Tensor& w, bool transpose_w, const Tensor& c, const Tensor& other) {
  if (!is_fused_activation(act) || c.numel() == 0 || a.cols() == 0) return false;
  const PlainProduct p{.a = a, .b = w, .c = c, .transpose_b = transpose_w};
  const PlainProduct kept{.a = a, .b = w, .c = other ? other : c};
  if (core_refuses(p) != nullptr || core_refuses(kept) != nullptr) return false;
  const int device = c.device.index;
  return !gpu::lt_available() || activated_is_faster({c.rows(), c.cols(), a.cols()},
                                                     gemm::tile_on(device, kActivatedTile), gpu::sm_count(device));
}
}  // namespace

void linear(const Linear& a, Stream stream) {
  gpu::check_generation("linear", gpu::device_limits(a.x.device));
  if (is_fused(a.act, as_matrix(a.x), as_matrix(a.w), true, as_matrix(a.y), as_matrix(a.pre))) {
    Linear m = a;
    for (Tensor* t : {&m.x, &m.w, &m.y, &m.pre}) *t = as_matrix(*t);
    return gemm::with_core(a.x.device.index, [&](auto core) {
      using Core = typename decltype(core)::type;
      gemm::with_16_bit_type(a.x.dtype, [&](auto type) { launch_activated<Core, decltype(type)>(m, stream); });
    });
  }
  const Tensor out = a.pre ? a.pre : a.y;
  product("linear",
          {.a = as_matrix(a.x),
           .b = as_matrix(a.w),
           .c = as_matrix(out),
           .transpose_b = true,
           .alpha = float(a.alpha),
           .beta = a.accumulate ? 1.f : 0.f,
           .add = as_matrix(out),
           .bias = a.b},
          a.products, a.workspace, stream);
  if (a.signs) keep_signs(as_matrix(out), a.signs, stream);
  if (a.act != Act::identity || a.pre) activate({.act = a.act, .x = out, .y = a.y}, stream);
}

void linear_backward(const LinearBackward& a, Stream stream) {
  gpu::check_generation("linear_backward", gpu::device_limits(a.dy.device));
  if (a.dx) {
    const bool sloped = a.act != Act::identity && (a.pre || a.signs);
    INGOT_CHECK(!sloped || !a.accumulate_dx, "linear_backward: found accumulate_dx with the slopes of ", name_of(a.act),
                " on a GPU, expected one of the two");
    const Tensor dx = as_matrix(a.dx), kept = as_matrix(a.signs ? a.x : a.pre);
    const bool fused = sloped && is_fused(a.act, as_matrix(a.dy), as_matrix(a.w), false, dx, kept);
    if (fused) {
      LinearBackward m = a;
      for (Tensor* t : {&m.dy, &m.x, &m.w, &m.dx, &m.pre}) *t = as_matrix(*t);
      gemm::with_core(a.dy.device.index, [&](auto core) {
        using Core = typename decltype(core)::type;
        gemm::with_16_bit_type(a.dy.dtype, [&](auto type) { launch_sloped<Core, decltype(type)>(m, stream); });
      });
    } else {
      product("linear_backward",
              {.a = as_matrix(a.dy), .b = as_matrix(a.w), .c = dx, .beta = a.accumulate_dx ? 1.f : 0.f, .add = dx},
              a.products, a.workspace, stream);
      if (sloped && a.signs)
        multiply_by_slopes(a.act, dx, kept, a.signs, stream);
      else if (sloped)
        activate_backward({.act = a.act, .dy = a.dx, .x = a.pre, .dx = a.dx}, stream);
    }
  }
  if (a.dw) {
    const Tensor dw = as_matrix(a.dw);
    product("linear_backward",
            {.a = as_matrix(a.dy), .b = as_matrix(a.x), .c = dw, .transpose_a = true, .beta = 1, .add = dw}, a.products,
            a.workspace, stream);
  }
  if (a.db) sum_rows(as_matrix(a.dy), a.db, stream);
}

}  // namespace ingot::cuda
