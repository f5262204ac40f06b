#pragma once
// The sums of a layer's product for 64 rows: their activation, in place, to the next layer's A, and the stores of y and
// of the values for training.
#include "ingot/kernels/mlp/parts/row_tile_product.cuh"

namespace ingot::cuda::mlp_parts {

// Columns 32 i to 32 i + 31 of the sums: activated; and to 16 bits, in the layout of A.
template <class T, class F, int kWidth>
__device__ __forceinline__ void activate_block(Sums<kWidth>& d, int i, float number) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    d[16 * i + j] = act_value<F, T>(d[16 * i + j], number);
    if constexpr (kernel_fit<F>.one_by_one) ptx::settle_in_turn(d[16 * i + j]);
  }
}
template <class T, int kWidth>
__device__ __forceinline__ void pack_block(Rows<kWidth>& a, const Sums<kWidth>& d, int i) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * (4 * i + j) + 2 * half;
      a[2 * i + j / 2][2 * (j % 2) + half] = ptx::pack(T{}, d[at], d[at + 1]);
    }
}

// Softplus of a pair of sums as fp16. The exponentials are fp32; e q(e) + max(x, 0) is then computed for both sums at
// once in fp16, with 2/3 of the instructions and of the register reads, which compete with the products' reads. This
// adds roundings of e, q and max(x, 0): a hidden value is off by 1.4 times its unavoidable rounding, nearly all of it
// by the rounding of max(x, 0); y of 3 to 5 layers by 1.25 times the error with one rounding per layer. Values saved in
// fp32 are not computed in this way.
template <class F> constexpr bool kHasPairForm = false;
template <> inline constexpr bool kHasPairForm<Softplus> = true;
template <class F, class T> constexpr bool kHasPairs = kHasPairForm<F>&& std::is_same_v<T, f16>;
template <class F, class T, Save kSave> constexpr bool kInPairs = kHasPairs<F, T>&& kSave != Save::any_type;
template <class F, class T, Save kSave> constexpr bool kStoresLater = kInPairs<F, T, kSave>&& kSave == Save::own_type;
template <class F, class T, Save kSave, Finish kFinish>
constexpr bool kInLog2e = kInPairs<F, T, kSave>&& kSave == Save::nothing&& kFinish != Finish::none;
// With kTimesLog2e the argument is x log2 e and the result softplus(x) log2 e. The root mean square of the errors is
// the same; the error of the left tail alone is 1.9 instead of 1.5 times a rounding, because the constant term is off
// by 0.4 units in the last place.
template <bool kTimesLog2e> __device__ __forceinline__ uint32_t softplus_pair(float x0, float x1) {
  const auto twice = [](uint32_t bits) { return bits << 16 | bits; };
  const auto exp2_of = [](float x) { return detail::fast_exp2(fabsf(x) * -(kTimesLog2e ? 1 : detail::kLog2e)); };
  const uint32_t e = ptx::pack(f16{}, exp2_of(x0), exp2_of(x1));
  // log1p_of_unit_4 in fp16: 0.041351, -0.15747, 0.30640, -0.49707, 1; or times log2 e, the best of its neighbours
  constexpr uint32_t kQ[2][5] = {{0x294b, 0xb10a, 0x34e7, 0xb7f4, 0x3c00}, {0x2ba3, 0xb346, 0x3711, 0xb9bb, 0x3dc5}};
  uint32_t q = ptx::multiply_add(f16{}, e, twice(kQ[kTimesLog2e][0]), twice(kQ[kTimesLog2e][1]));
#pragma unroll
  for (int i = 2; i < 5; ++i) q = ptx::multiply_add(f16{}, e, q, twice(kQ[kTimesLog2e][i]));
  return ptx::multiply_add(f16{}, e, q, ptx::pack_relu(f16{}, x0, x1));
}
template <int kWidth, bool kTimesLog2e>
__device__ __forceinline__ void softplus_block(Rows<kWidth>& a, const Sums<kWidth>& d, int i) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * (4 * i + j) + 2 * half;
      a[2 * i + j / 2][2 * (j % 2) + half] = softplus_pair<kTimesLog2e>(d[at], d[at + 1]);
    }
}

// A matrix in memory for a tile's rows.
struct Target {
  char* rows;
  int64_t stride_bytes;
  uint32_t cols;
};
// Stores the last product's columns from the sums: 16 bytes per thread, because of the permutation.
template <class T, int kWidth>
__device__ __forceinline__ void store_last(const Sums<kWidth>& d, Target to, int64_t first, int64_t rows) {
  const uint32_t q = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first + lane() / 4 + 8 * half;
    if (row >= rows) continue;
    char* line = to.rows + row * to.stride_bytes + q * 16;
    uint32_t w[kWidth / 32][4];
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        w[i][j] = ptx::pack(T{}, d[4 * (4 * i + j) + 2 * half], d[4 * (4 * i + j) + 2 * half + 1]);
    if (to.cols == kWidth) {  // the compiler makes four plain stores of this form only
#pragma unroll
      for (int i = 0; i < kWidth / 32; ++i) ptx::store_streaming(line + 64 * i, w[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth / 32; ++i)
        if (32 * i + 8 * q < to.cols) ptx::store_streaming(line + 64 * i, w[i]);
    }
  }
}
// Stores columns 32 i to 32 i + 31 of another product from the layout of A, through the warp's shared memory: 16 bytes
// per lane.
template <int kWidth>
__device__ __forceinline__ void store_block(const Rows<kWidth>& a, int i, char* staging, Target to, int64_t first,
                                            int64_t rows) {
  // Chunks are moved by row / 2, so that both directions meet all banks.
  const auto place = [&](uint32_t row, uint32_t chunk) { return row * 64 + (chunk ^ row / 2 % 4) * 16; };
#pragma unroll
  for (int t = 0; t < 2; ++t)
    ptx::stmatrix(ptx::shared_address(staging) + place(matrix_row(), 2 * t + matrix_chunk()), a[2 * i + t]);
  __syncwarp();
  const uint32_t chunk = lane() % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t row = lane() / 4 + 8 * half;
    const uint4 v = *reinterpret_cast<const uint4*>(staging + place(row, chunk));
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    if (first + row < rows && 32 * i + 8 * chunk < to.cols)
      ptx::store_streaming(to.rows + (first + row) * to.stride_bytes + 64 * i + chunk * 16, w);
  }
  __syncwarp();
}
// The same if all products' columns are permuted like the last product's: 16 bytes per thread without staging.
template <int kWidth>
__device__ __forceinline__ void store_turned_block(const Rows<kWidth>& a, int i, Target to, int64_t first,
                                                   int64_t rows) {
  const uint32_t q = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first + lane() / 4 + 8 * half;
    const uint32_t w[4] = {a[2 * i][half], a[2 * i][2 + half], a[2 * i + 1][half], a[2 * i + 1][2 + half]};
    if (row < rows && 32 * i + 8 * q < to.cols)
      ptx::store_streaming(to.rows + row * to.stride_bytes + 64 * i + q * 16, w);
  }
}
// The same columns of any product, unpermuted in fp32.
template <int kWidth>
__device__ __forceinline__ void store_block_f32(const Sums<kWidth>& d, int i, bool turned, Target to, int64_t first,
                                                int64_t rows) {
  const uint32_t q = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first + lane() / 4 + 8 * half;
    if (row >= rows) continue;
    char* line = to.rows + row * to.stride_bytes;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t column = 32 * i + (turned ? 8 * q + 2 * j : 8 * j + 2 * q);
      const int at = 4 * (4 * i + j) + 2 * half;
      const uint32_t w[2] = {__float_as_uint(d[at]), __float_as_uint(d[at + 1])};
      if (column < to.cols) ptx::store_streaming(line + column * 4, w);
    }
  }
}

// Converts columns 32 i to 32 i + 31 of a hidden layer from finished sums to the next layer's A. save(i) is called when
// the values for the backward pass are complete: in `d`, or for all types except fp32 in `a`.
template <class T, class F, int kWidth, Save kSave, bool kTimesLog2e, class SaveBlock>
__device__ __forceinline__ void form_block(Sums<kWidth>& d, Rows<kWidth>& a, int i, bool f32, float number,
                                           SaveBlock&& save) {
  constexpr bool kSaves = kSave != Save::nothing;
  if constexpr (kSaves && !has_slope_from_value<F>) {
    if (!f32) pack_block<T, kWidth>(a, d, i);
    save(i);
  }
  if constexpr (kInPairs<F, T, kSave>) {
    softplus_block<kWidth, kTimesLog2e>(a, d, i);
  } else {
    activate_block<T, F, kWidth>(d, i, number);
    pack_block<T, kWidth>(a, d, i);
  }
  if constexpr (kSaves && has_slope_from_value<F> && !kStoresLater<F, T, kSave>) save(i);
}
// Converts a hidden layer's sums to the next layer's A and stores the values for the backward pass. kTurned: columns
// are permuted like the last layer's.
template <class T, class F, int kWidth, Save kSave, Finish kFinish, bool kTurned = false>
__device__ __forceinline__ void activate(Sums<kWidth>& d, Rows<kWidth>& a, const Params& p, int l, const Vectors& of,
                                         char* staging, int64_t first) {
  constexpr bool kTimesLog2e = kInLog2e<F, T, kSave, kFinish>;
  const bool f32 = kSave == Save::any_type && p.saved_f32;
  const int64_t element = f32 ? 4 : 2;
  const Target saved = {static_cast<char*>(p.layer[l].saved), p.layer[l].n * element, p.layer[l].n};
  const auto save = [&](int i) {
    if (f32)
      store_block_f32<kWidth>(d, i, kTurned, saved, first, p.rows);
    else if constexpr (kTurned)
      store_turned_block<kWidth>(a, i, saved, first, p.rows);
    else
      store_block<kWidth>(a, i, staging, saved, first, p.rows);
  };
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i) {
    finish_block<kWidth, kFinish>(d, i, of, l, domain_of<kTimesLog2e>(l, p.layers).sums);
    form_block<T, F, kWidth, kSave, kTimesLog2e>(d, a, i, f32, p.number, save);
  }
}
// Stores the saved parts of A, while the next layer's products run.
template <class T, class F, int kWidth, Save kSave, bool kTurned = false>
__device__ __forceinline__ void store_later(const Rows<kWidth>& a, const Params& p, int l, char* staging,
                                            int64_t first) {
  if constexpr (kStoresLater<F, T, kSave>) {
    const Target saved = {static_cast<char*>(p.layer[l].saved), p.layer[l].n * 2, p.layer[l].n};
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i)
      if constexpr (kTurned)
        store_turned_block<kWidth>(a, i, saved, first, p.rows);
      else
        store_block<kWidth>(a, i, staging, saved, first, p.rows);
  }
}
// Converts the last layer's sums to y.
template <class T, class F, int kWidth, Save kSave, Finish kFinish>
__device__ __forceinline__ void finish(Sums<kWidth>& d, const Params& p, const Vectors& of, int64_t first) {
  constexpr bool kTimesLog2e = kInLog2e<F, T, kSave, kFinish>, kSaves = kSave != Save::nothing;
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i)
    finish_block<kWidth, kFinish>(d, i, of, p.layers - 1, domain_of<kTimesLog2e>(p.layers - 1, p.layers).sums);
  const LayerParams& layer = p.layer[p.layers - 1];
  const auto save = [&] {
    if (kSave == Save::any_type && p.saved_f32) {
#pragma unroll
      for (int i = 0; i < kWidth / 32; ++i)
        store_block_f32<kWidth>(d, i, true, {static_cast<char*>(layer.saved), layer.n * 4, layer.n}, first, p.rows);
    } else {
      store_last<T, kWidth>(d, {static_cast<char*>(layer.saved), layer.n * 2, layer.n}, first, p.rows);
    }
  };
  if (p.activate_last) {
    if constexpr (kSaves && !has_slope_from_value<F>) save();
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i) activate_block<T, F, kWidth>(d, i, p.number);
    if constexpr (kSaves && has_slope_from_value<F>) save();
    if (kSaves && p.y == layer.saved) return;  // a recomputation of values needs the last values only once
  }
  store_last<T, kWidth>(d, {static_cast<char*>(p.y), p.y_stride_bytes, layer.n}, first, p.rows);
}

}  // namespace ingot::cuda::mlp_parts
