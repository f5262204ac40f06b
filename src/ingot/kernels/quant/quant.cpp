#include "ingot/kernels/quant/quant.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/kernels/quant/quant.simd.h"
#include "ingot/kernels/quant/weight_tiles.h"

INGOT_SIMD_DECLARE(
    void stored_dots_bf16(const detail::StoredDots& a); void stored_dots_fp8(const detail::StoredDots& a);
    void stored_dots_mxfp4(const detail::StoredDots& a); void stored_widen_bf16(const detail::StoredWiden& a);
    void stored_widen_fp8(const detail::StoredWiden& a); void stored_widen_mxfp4(const detail::StoredWiden& a);
    void weight_tile_dots_bf16(const detail::WeightTileDots& a);
    void weight_tile_dots_fp8(const detail::WeightTileDots& a);
    void weight_tile_dots_mxfp4(const detail::WeightTileDots& a);
    void weight_tile_widen_bf16(const detail::WeightTileWiden& a);
    void weight_tile_widen_fp8(const detail::WeightTileWiden& a);
    void weight_tile_widen_mxfp4(const detail::WeightTileWiden& a); void narrow_mxfp4(const detail::NarrowMxfp4& a);)

namespace ingot {

// --- numbers -----------------------------------------------------------------------------------------------------
namespace {
constexpr float kE2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
constexpr float kE4m3Max = 448;
}  // namespace

float e2m1_value(int code) { return (code & 8) != 0 ? -kE2m1[code & 7] : kE2m1[code & 7]; }

int e2m1_nearest(float x) {
  const float m = std::abs(x);
  // Halfway to the next magnitude; at the middle itself the even code wins.
  int code = 0;
  while (code < 7) {
    const float middle = (kE2m1[code] + kE2m1[code + 1]) / 2;
    if (m < middle || (m == middle && code % 2 == 0)) break;
    ++code;
  }
  return code | (std::signbit(x) ? 8 : 0);
}

float e4m3_value(uint8_t byte) {
  const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
  if ((byte & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  const float m = exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(float(8 + mantissa), exponent - 10);
  return (byte & 0x80) != 0 ? -m : m;
}

uint8_t e4m3_nearest(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return sign | 0x7f;
  const float m = std::min(std::abs(x), kE4m3Max);
  if (m < 0x1p-6f) return sign | uint8_t(std::nearbyint(m * 0x1p9f));  // subnormal; 8 is the smallest normal number
  // Rounds as bf16 does: adds half of the last kept place, less one if the last kept bit is even.
  uint32_t u = std::bit_cast<uint32_t>(m);
  u += 0x7ffffu + ((u >> 20) & 1);
  return sign | uint8_t((u >> 20) - (120u << 3));
}

float e8m0_value(uint8_t scale) {
  if (scale == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(1.f, int(scale) - 127);
}

namespace {
const std::array<float, 256>& exponents() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> t;
    for (int s = 0; s < 256; ++s) t[size_t(s)] = e8m0_value(uint8_t(s));
    return t;
  }();
  return table;
}
}  // namespace

// --- views -------------------------------------------------------------------------------------------------------

const char* name_of(WeightFormat f) {
  switch (f) {
    case WeightFormat::f64: return "f64";
    case WeightFormat::f32: return "f32";
    case WeightFormat::bf16: return "bf16";
    case WeightFormat::fp8: return "fp8";
    case WeightFormat::mxfp4: return "mxfp4";
  }
  return "?";
}
std::ostream& operator<<(std::ostream& out, WeightFormat f) { return out << name_of(f); }

namespace {
bool is_plain(WeightFormat f) { return f == WeightFormat::f64 || f == WeightFormat::f32 || f == WeightFormat::bf16; }
DType data_type(WeightFormat f) {
  switch (f) {
    case WeightFormat::f64: return DType::f64;
    case WeightFormat::f32: return DType::f32;
    case WeightFormat::bf16: return DType::bf16;
    default: return DType::u8;
  }
}
WeightFormat format_of(DType t) {
  if (t == DType::f64) return WeightFormat::f64;
  if (t == DType::f32) return WeightFormat::f32;
  INGOT_CHECK(t == DType::bf16, "weights: found dtype ", t, ", expected f64, f32 or bf16");
  return WeightFormat::bf16;
}
}  // namespace

WeightMatrix::WeightMatrix(const Tensor& plain) : format(format_of(plain.dtype)), data(plain) {}

WeightMatrix WeightMatrix::at(int64_t expert) const {
  WeightMatrix w = *this;
  w.data = data.select(0, expert);
  if (scales) w.scales = scales.select(0, expert);
  return w;
}
WeightMatrix WeightMatrix::row_range(int64_t begin, int64_t end) const {
  WeightMatrix w = *this;
  if (!in_weight_tiles()) {
    w.data = data.slice(0, begin, end);
    if (scales) w.scales = scales.slice(0, begin, end);
    return w;
  }
  INGOT_CHECK(begin % kWeightTileRows == 0 && (end % kWeightTileRows == 0 || end == n), "weights: found rows ", begin,
              " to ", end, " of weight tiles, expected multiples of ", kWeightTileRows);
  w.data = data.slice(0, begin / kWeightTileRows, row_tile_count(end));
  w.n = end - begin;
  return w;
}

namespace {
void check_weight_tiles(const WeightMatrix& w, const char* op, const char* name) {
  INGOT_CHECK(has_weight_tiles(w.format), op, ": ", name, ": found weight tiles of ", w.format,
              ", expected bf16, fp8 or mxfp4");
  INGOT_CHECK(w.data.rank() == 2 || w.data.rank() == 3, op, ": ", name, ": found weight tiles of shape ", w.data.shape,
              ", expected (row tiles, bytes), or one dimension more for a bank");
  INGOT_CHECK(
      w.data.dtype == DType::u8 && w.data.contiguous() && !w.scales && w.data.size(-2) == row_tile_count(w.n) &&
          w.data.size(-1) == row_tile_bytes(w.format, w.k) && (w.format != WeightFormat::mxfp4 || w.k % kMxBlock == 0),
      op, ": ", name, ": found ", w.format, " weight tiles of shape ", w.data.shape, " and dtype ", w.data.dtype,
      ", expected ", Shape{row_tile_count(w.n), row_tile_bytes(w.format, w.k)}, " u8 for ", w.n, " rows of ", w.k);
}
}  // namespace

void check(const WeightMatrix& w, const char* op, const char* name) {
  if (w.in_weight_tiles()) return check_weight_tiles(w, op, name);
  const int rank = w.format == WeightFormat::mxfp4 ? 3 : 2;
  INGOT_CHECK(w.data.rank() == rank || w.data.rank() == rank + 1, op, ": ", name, ": found ", w.format,
              " numbers of shape ", w.data.shape, ", expected ", rank, " dimensions, or one more for a bank");
  INGOT_CHECK_EQ(w.data.dtype, data_type(w.format), op, ": ", name, ": dtype of ", w.format, " numbers");
  INGOT_CHECK(w.data.contiguous(), op, ": ", name, ": found numbers that are not contiguous, expected contiguous");
  Shape want = w.data.shape;
  if (is_plain(w.format)) {
    INGOT_CHECK(!w.scales, op, ": ", name, ": found scales with ", w.format, " numbers, expected none");
    return;
  }
  --want.rank;
  const DType scale_type = w.format == WeightFormat::fp8 ? DType::f32 : DType::u8;
  if (w.format == WeightFormat::mxfp4)
    INGOT_CHECK_EQ(w.data.size(-1), kMxBlock / 2, op, ": ", name, ": bytes of an mxfp4 block");
  INGOT_CHECK(w.scales && w.scales.shape == want && w.scales.dtype == scale_type && w.scales.contiguous(), op, ": ",
              name, ": found scales of shape ", w.scales.shape, " and dtype ", w.scales.dtype, ", expected ", want, " ",
              scale_type, ", contiguous");
  INGOT_CHECK(w.scales.device == w.data.device, op, ": ", name, ": found scales on ", w.scales.device, ", expected ",
              w.data.device);
}

int64_t weight_bytes(WeightFormat f, int64_t rows, int64_t cols) {
  switch (f) {
    case WeightFormat::fp8: return rows * cols + rows * 4;
    case WeightFormat::mxfp4:
      INGOT_CHECK(cols % kMxBlock == 0, "weights: found rows of ", cols, " numbers, expected a multiple of ", kMxBlock,
                  " for mxfp4");
      return rows * (cols / 2 + cols / kMxBlock);
    default: return rows * cols * size_of(data_type(f));
  }
}

// --- widening ----------------------------------------------------------------------------------------------------
namespace {

const char* row_bytes(const WeightMatrix& w, int64_t n) {
  const int64_t bytes = w.format == WeightFormat::mxfp4 ? w.cols() / 2 : w.cols() * size_of(w.data.dtype);
  return static_cast<const char*>(w.data.data) + n * bytes;
}
const void* row_scales(const WeightMatrix& w, int64_t n) {
  if (!w.scales) return nullptr;
  const int64_t bytes = w.format == WeightFormat::mxfp4 ? w.cols() / kMxBlock : 4;
  return static_cast<const char*>(w.scales.data) + n * bytes;
}

void widen_rows(const WeightMatrix& w, int64_t begin, int64_t end, float* out, int64_t out_row) {
  const detail::StoredWiden a{row_bytes(w, begin), row_scales(w, begin), exponents().data(), out, w.cols(), out_row,
                              end - begin};
  if (w.format == WeightFormat::bf16)
    INGOT_SIMD_CALL(stored_widen_bf16, a);
  else if (w.format == WeightFormat::fp8)
    INGOT_SIMD_CALL(stored_widen_fp8, a);
  else if (w.format == WeightFormat::mxfp4)
    INGOT_SIMD_CALL(stored_widen_mxfp4, a);
  else
    for (int64_t n = begin; n < end; ++n)
      std::copy_n(reinterpret_cast<const float*>(row_bytes(w, n)), w.cols(), out + (n - begin) * out_row);
}

// Whole row tiles, each row of `cols` numbers in the order of weight_tile_column(). Offsets of rows are multiples
// of 16.
void widen_bands(const WeightMatrix& w, int64_t begin, int64_t end, float* out, int64_t cols) {
  const int64_t bytes = w.data.size(-1);
  const detail::WeightTileWiden a{w.data.ptr<uint8_t>() + begin / kWeightTileRows * bytes,
                                  exponents().data(),
                                  out,
                                  cols / kWeightTileCols,
                                  bytes,
                                  cols,
                                  row_tile_count(end - begin)};
  if (w.format == WeightFormat::bf16)
    INGOT_SIMD_CALL(weight_tile_widen_bf16, a);
  else if (w.format == WeightFormat::fp8)
    INGOT_SIMD_CALL(weight_tile_widen_fp8, a);
  else
    INGOT_SIMD_CALL(weight_tile_widen_mxfp4, a);
}

// Rows of x with their columns in the order of a format's weight tiles, with zeros after the last column. Uses the
// caller's scratch memory.
float* in_weight_tile_order(const Tensor& x, WeightFormat f) {
  const int64_t rows = x.rows(), cols = x.cols(), padded = weight_tile_padded_cols(cols);
  float* to = static_cast<float*>(thread_scratch(1, rows * padded * int64_t(sizeof(float))));
  int column[kWeightTileCols];
  for (int i = 0; i < kWeightTileCols; ++i) column[i] = detail::weight_tile_column(f, i);
  parallel_for(rows, std::max<int64_t>(1, 65536 / std::max<int64_t>(1, cols)), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t q = 0; q < padded; q += kWeightTileCols) {
        const float* from = x.ptr<float>() + t * x.row_stride() + q;
        for (int i = 0; i < kWeightTileCols; ++i) to[t * padded + q + i] = q + column[i] < cols ? from[column[i]] : 0.f;
      }
  });
  return to;
}

// A number of weight tiles, exactly.
double weight_tile_number(const WeightMatrix& w, int64_t n, int64_t k) {
  const uint8_t* row_tile = w.data.ptr<uint8_t>() + n / kWeightTileRows * w.data.size(-1);
  const detail::WeightTilePlace place = detail::weight_tile_place(w.format, n % kWeightTileRows, k);
  const uint8_t* at = row_tile + place.byte;
  if (w.format == WeightFormat::bf16) return float(*reinterpret_cast<const bf16*>(at));
  const uint8_t* scale = row_tile + detail::weight_tile_scale_place(w.format, n % kWeightTileRows, k, w.k);
  if (w.format == WeightFormat::fp8) return double(e4m3_value(*at)) * *reinterpret_cast<const float*>(scale);
  return double(e2m1_value(place.high ? *at >> 4 : *at & 15)) * e8m0_value(*scale);
}

// A number, exactly, for the oracle.
double number(const WeightMatrix& w, int64_t n, int64_t k) {
  if (w.in_weight_tiles()) return weight_tile_number(w, n, k);
  switch (w.format) {
    case WeightFormat::f64: return w.data.ptr<double>()[n * w.cols() + k];
    case WeightFormat::f32: return w.data.ptr<float>()[n * w.cols() + k];
    case WeightFormat::bf16: return float(w.data.ptr<bf16>()[n * w.cols() + k]);
    case WeightFormat::fp8:
      return double(e4m3_value(w.data.ptr<uint8_t>()[n * w.cols() + k])) * w.scales.ptr<float>()[n];
    case WeightFormat::mxfp4: break;
  }
  const uint8_t byte = w.data.ptr<uint8_t>()[(n * w.cols() + k) / 2];
  return double(e2m1_value(k % 2 == 0 ? byte & 15 : byte >> 4)) *
         e8m0_value(w.scales.ptr<uint8_t>()[(n * w.cols() + k) / kMxBlock]);
}

void check_matrix(const char* op, const WeightMatrix& w, const Tensor& like) {
  check(w, op, "w");
  INGOT_CHECK(!w.is_bank(), op, ": w: found a bank of shape ", w.data.shape, ", expected one matrix");
  INGOT_CHECK(w.data.device == like.device, op, ": found weights on ", w.data.device, ", expected ", like.device);
}

}  // namespace

namespace cpu {

void dequantise(const WeightMatrix& w, const Tensor& out, Stream) {
  const int64_t rows = w.rows(), cols = w.cols(), stride = out.row_stride();
  parallel_for(rows, std::max<int64_t>(1, 65536 / std::max<int64_t>(1, cols)), [&](int64_t begin, int64_t end) {
    if (out.dtype == DType::f32 && w.format != WeightFormat::f64 && !w.in_weight_tiles())
      return widen_rows(w, begin, end, out.ptr<float>() + begin * stride, stride);
    for (int64_t n = begin; n < end; ++n)
      for (int64_t k = 0; k < cols; ++k)
        if (out.dtype == DType::f64)
          out.ptr<double>()[n * stride + k] = number(w, n, k);
        else
          out.ptr<float>()[n * stride + k] = float(number(w, n, k));
  });
}

// --- narrowing ---------------------------------------------------------------------------------------------------
namespace {

void encode_row(const float* x, const WeightMatrix& w, int64_t n) {
  const int64_t cols = w.cols();
  switch (w.format) {
    case WeightFormat::f64: std::copy_n(x, cols, w.data.ptr<double>() + n * cols); return;
    case WeightFormat::f32: std::copy_n(x, cols, w.data.ptr<float>() + n * cols); return;
    case WeightFormat::bf16:
      for (int64_t k = 0; k < cols; ++k) w.data.ptr<bf16>()[n * cols + k] = bf16(x[k]);
      return;
    case WeightFormat::fp8: {
      float top = 0;
      for (int64_t k = 0; k < cols; ++k) top = std::max(top, std::abs(x[k]));
      float scale = top / kE4m3Max;
      if (!(scale >= std::numeric_limits<float>::min())) scale = 1;  // the row consists of zeros, or nearly so
      w.scales.ptr<float>()[n] = scale;
      for (int64_t k = 0; k < cols; ++k) w.data.ptr<uint8_t>()[n * cols + k] = e4m3_nearest(x[k] / scale);
      return;
    }
    case WeightFormat::mxfp4:
      INGOT_SIMD_CALL(narrow_mxfp4, {.x = x,
                                     .bytes = w.data.ptr<uint8_t>() + n * cols / 2,
                                     .scales = w.scales.ptr<uint8_t>() + n * cols / kMxBlock,
                                     .k = cols});
      return;
  }
}

}  // namespace

void quantise(const Tensor& x, const WeightMatrix& w, Stream) {
  const int64_t cols = w.cols();
  parallel_for(w.rows(), std::max<int64_t>(1, 16384 / std::max<int64_t>(1, cols)), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float* row = x.ptr<float>() + n * x.row_stride();
      for (int64_t k = 0; k < cols; ++k)
        if (!std::isfinite(row[k]))
          fail(ErrorCode::numeric, "quantise: found ", row[k], " in row ", n, ", column ", k,
               ", expected finite numbers");
      encode_row(row, w, n);
    }
  });
}

// --- products ----------------------------------------------------------------------------------------------------
namespace {

constexpr int64_t kWidenedRows = 64;  // of w at a time: 64 rows of some thousand numbers stay in the second-level cache
constexpr int64_t kTaskNumbers = 65536;  // weights read by a task of a few rows of x

void linear_plain(const StoredLinear& a) {
  parallel_for(a.y.rows(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t n = 0; n < a.y.cols(); ++n) {
        double sum = a.b ? a.b.ptr<double>()[n] : 0;
        for (int64_t k = 0; k < a.x.cols(); ++k) sum += a.x.ptr<double>()[t * a.x.row_stride() + k] * number(a.w, n, k);
        a.y.ptr<double>()[t * a.y.row_stride() + n] = sum;
      }
  });
}

// The 16 even numbers of every block first, then the 16 odd ones: the order of decoded codes.
const float* split_blocks(const Tensor& x) {
  const int64_t rows = x.rows(), cols = x.cols();
  float* to = static_cast<float*>(thread_scratch(0, rows * cols * int64_t(sizeof(float))));
  for (int64_t t = 0; t < rows; ++t) {
    const float* from = x.ptr<float>() + t * x.row_stride();
    for (int64_t b = 0; b < cols; b += kMxBlock)
      for (int64_t i = 0; i < kMxBlock / 2; ++i) {
        to[t * cols + b + i] = from[b + 2 * i];
        to[t * cols + b + kMxBlock / 2 + i] = from[b + 2 * i + 1];
      }
  }
  return to;
}

void few_rows(const StoredLinear& a) {
  const bool mx = a.w.format == WeightFormat::mxfp4;
  const float* x = mx ? split_blocks(a.x) : a.x.ptr<float>();
  const int64_t x_row = mx ? a.x.cols() : a.x.row_stride();
  parallel_for(a.y.cols(), std::max<int64_t>(16, kTaskNumbers / std::max<int64_t>(1, a.x.cols())),
               [&](int64_t begin, int64_t end) {
                 const detail::StoredDots d{row_bytes(a.w, begin),
                                            row_scales(a.w, begin),
                                            exponents().data(),
                                            x,
                                            a.b ? a.b.ptr<float>() + begin : nullptr,
                                            a.y.ptr<float>() + begin,
                                            a.x.cols(),
                                            x_row,
                                            a.y.row_stride(),
                                            end - begin,
                                            int(a.x.rows())};
                 if (a.w.format == WeightFormat::bf16)
                   INGOT_SIMD_CALL(stored_dots_bf16, d);
                 else if (a.w.format == WeightFormat::fp8)
                   INGOT_SIMD_CALL(stored_dots_fp8, d);
                 else
                   INGOT_SIMD_CALL(stored_dots_mxfp4, d);
               });
}

void few_rows_of_weight_tiles(const StoredLinear& a) {
  const int64_t padded = weight_tile_padded_cols(a.x.cols()), bytes = a.w.data.size(-1);
  const float* x = in_weight_tile_order(a.x, a.w.format);
  const int64_t grain = std::max<int64_t>(kWeightTileRows, kTaskNumbers / padded / kWeightTileRows * kWeightTileRows);
  parallel_for(a.y.cols(), grain, [&](int64_t begin, int64_t end) {
    const detail::WeightTileDots d{a.w.data.ptr<uint8_t>() + begin / kWeightTileRows * bytes,
                                   exponents().data(),
                                   x,
                                   a.b ? a.b.ptr<float>() + begin : nullptr,
                                   a.y.ptr<float>() + begin,
                                   padded / kWeightTileCols,
                                   bytes,
                                   padded,
                                   a.y.row_stride(),
                                   end - begin,
                                   int(a.x.rows())};
    if (a.w.format == WeightFormat::bf16)
      INGOT_SIMD_CALL(weight_tile_dots_bf16, d);
    else if (a.w.format == WeightFormat::fp8)
      INGOT_SIMD_CALL(weight_tile_dots_fp8, d);
    else
      INGOT_SIMD_CALL(weight_tile_dots_mxfp4, d);
  });
}

void many_rows(const StoredLinear& a, Stream stream) {
  // The order of columns does not matter to sums if both operands have the same order.
  const bool weight_tiles = a.w.in_weight_tiles();
  const int64_t cols = weight_tiles ? weight_tile_padded_cols(a.x.cols()) : a.x.cols();
  const Tensor x = weight_tiles ? Tensor(in_weight_tile_order(a.x, a.w.format), {a.x.rows(), cols}) : a.x;
  parallel_for(a.y.cols(), kWidenedRows, [&](int64_t begin, int64_t end) {
    float* wide = static_cast<float*>(thread_scratch(0, kWidenedRows * cols * int64_t(sizeof(float))));
    if (weight_tiles)
      widen_bands(a.w, begin, end, wide, cols);
    else
      widen_rows(a.w, begin, end, wide, cols);
    linear({.x = x,
            .w = Tensor(wide, {end - begin, cols}),
            .b = a.b ? a.b.slice(0, begin, end) : Tensor(),
            .y = a.y.slice(a.y.rank() - 1, begin, end)},
           stream);
  });
}

}  // namespace

void stored_linear(const StoredLinear& a, Stream stream) {
  if (a.x.dtype == DType::f64) return linear_plain(a);
  if (a.y.numel() == 0) return;
  if (a.w.format == WeightFormat::f32) return linear({.x = a.x, .w = a.w.data, .b = a.b, .y = a.y}, stream);
  if (a.x.rows() <= detail::kStoredRows) return a.w.in_weight_tiles() ? few_rows_of_weight_tiles(a) : few_rows(a);
  many_rows(a, stream);
}

}  // namespace cpu

// --- the entry points --------------------------------------------------------------------------------------------

void dequantise(const WeightMatrix& w, const Tensor& out, Stream stream) {
  const char* op = "dequantise";
  check_matrix(op, w, out);
  INGOT_CHECK(out.dtype == DType::f32 || out.dtype == DType::f64, op, ": found an output of ", out.dtype,
              ", expected f32 or f64");
  INGOT_CHECK(out.rank() == 2 && out.rows() == w.rows() && out.cols() == w.cols() && out.rows_uniform(), op,
              ": found an output of shape ", out.shape, ", expected ", Shape{w.rows(), w.cols()}, ", row-major");
  INGOT_DISPATCH_CPU_ONLY(out.device, dequantise, w, out, stream);
}

void quantise(const Tensor& x, const WeightMatrix& w, Stream stream) {
  const char* op = "quantise";
  check_matrix(op, w, x);
  INGOT_CHECK(!w.in_weight_tiles(), op, ": found a matrix in weight tiles, expected one in rows");
  INGOT_CHECK_EQ(x.dtype, DType::f32, op, ": dtype of x");
  INGOT_CHECK(x.rank() == 2 && x.rows() == w.rows() && x.cols() == w.cols() && x.rows_uniform(), op,
              ": found numbers of shape ", x.shape, ", expected ", Shape{w.rows(), w.cols()}, ", row-major");
  INGOT_DISPATCH_CPU_ONLY(x.device, quantise, x, w, stream);
}

void stored_linear(const StoredLinear& a, Stream stream) {
  const char* op = "stored_linear";
  INGOT_CHECK(a.x && a.w && a.y, op, ": found an operand missing, expected x, w and y");
  check_matrix(op, a.w, a.x);
  const bool on_cpu = a.x.device.kind == Device::cpu;
  INGOT_CHECK(!on_cpu || a.x.dtype == DType::f32 || a.x.dtype == DType::f64, op, ": found x of ", a.x.dtype,
              ", expected f32 or f64 on a cpu");
  INGOT_CHECK(!on_cpu || a.x.dtype == DType::f64 || a.w.format != WeightFormat::f64, op,
              ": found f64 weights with f32 operands, expected both in f64");
  INGOT_CHECK_EQ(a.x.cols(), a.w.cols(), op, ": columns of x");
  INGOT_CHECK(a.x.rank() == 2 && a.x.rows_uniform(), op, ": found x of shape ", a.x.shape,
              ", expected (T, K), row-major");
  INGOT_CHECK(a.y.rank() == 2 && a.y.rows() == a.x.rows() && a.y.cols() == a.w.rows() && a.y.rows_uniform() &&
                  a.y.dtype == a.x.dtype,
              op, ": found y of shape ", a.y.shape, " and dtype ", a.y.dtype, ", expected ",
              Shape{a.x.rows(), a.w.rows()}, " ", a.x.dtype, ", row-major");
  INGOT_CHECK(a.y.device == a.x.device, op, ": found y on ", a.y.device, ", expected ", a.x.device);
  if (a.b) {
    INGOT_CHECK(a.b.shape == Shape{a.w.rows()} && a.b.dtype == a.x.dtype && a.b.contiguous(), op, ": found b of shape ",
                a.b.shape, " and dtype ", a.b.dtype, ", expected ", Shape{a.w.rows()}, " ", a.x.dtype, ", contiguous");
    INGOT_CHECK(a.b.device == a.x.device, op, ": found b on ", a.b.device, ", expected ", a.x.device);
  }
  INGOT_DISPATCH_CPU_ONLY(a.x.device, stored_linear, a, stream);
}

}  // namespace ingot
