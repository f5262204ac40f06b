#pragma once
// Epilogues process and store the sums. The core makes an object per consumer thread,
//     Epilogue(const Epilogue::Params&, Epilogue::Shared&, warp)     warp: 0 to 7
// and whole warps call, each for its own 16 rows:
//     epilogue(d, at)    with the sums of 64 rows x kN columns in wgmma's layout (ptx/wgmma.cuh)
//     epilogue.end()     after the last tile
// An epilogue that reads a matrix of the result's shape may declare
//     epilogue.request(at)    before the tile's products: the core's form for Hopper calls this to start the reads
// Columns come in panels of 128 bytes: 64 of 16 bits, 32 of fp32. An epilogue serves both forms of the core, which it
// takes as a parameter (core.cuh, portable/core.cuh):
//     Core::Target           a result in memory: a tensor map, or an address with strides and edges
//     Core::PanelStore<n>    writes a warp's panels to targets, through shared memory (WarpStaging<n>)
//     Core::PanelExchange    reads a warp's panels from a target, and writes panels of the same shape
#include <cstdint>
#include <type_traits>

#include "ingot/core/dtype.h"
#include "ingot/gpu/gemm/operands.h"
#include "ingot/gpu/gemm/shape.h"
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/tile/swizzle.cuh"

namespace ingot::gemm {

struct HopperCore;

// The place of the warp's sums: fragment element d[4 * j + e] is row `row` + lane / 4 + (e < 2 ? 0 : 8), column
// `column` + 8 * j + lane % 4 * 2 + e % 2.
struct WarpAt {
  uint32_t batch, row, row_end, column;
};

constexpr int kWarpRows = 16;
constexpr uint32_t kWarpPanelBytes = kWarpRows * 128;
constexpr int kConsumerWarps = kConsumerThreads / 32;
template <int kPanels = 2> struct WarpStaging { alignas(1024) char panel[kPanels][kWarpPanelBytes]; };
template <int kPanels = 2> struct Staging { WarpStaging<kPanels> of[kConsumerWarps]; };

// 16 rows x 64 columns of 16 bits, the input of PanelStore::arrange(): lane l has 16 bytes of rows l / 8 + 4 i. Zeros
// beyond `rows` and `columns`; rows begin at multiples of 16 bytes and columns are whole eights.
template <class T>
__device__ __forceinline__ void load_panel(const T* from, int64_t stride, uint32_t row, uint32_t column, uint32_t rows,
                                           uint32_t columns, uint32_t (&chunks)[4][4]) {
  const uint32_t lane = threadIdx.x % 32, c = column + lane % 8 * 8;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t r = row + lane / 8 + 4 * i;
#pragma unroll
    for (uint32_t& word : chunks[i]) word = 0;
    if (r < rows && c < columns) ptx::load_streaming(from + int64_t(r) * stride + c, chunks[i]);
  }
}

// 64 columns of a fragment, rounded to T.
template <class T> __device__ __forceinline__ void pack(const float (&d)[32], uint32_t (&pairs)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) pairs[i] = ptx::pack(T{}, d[2 * i], d[2 * i + 1]);
}

// The sums unchanged.
struct AsIs {
  struct Params {};
  static __device__ __forceinline__ float2 value(const Params&, uint32_t, uint32_t, float2 sums) { return sums; }
};

// C = f(sums), or C += f(sums), element by element, in T. f is Finish::value(params, row, column, sums of this and the
// next column), also called for rows and columns beyond C's. C's rows must be whole multiples of 16 bytes. With two
// matrices C of equal shape, batch 0 is the first and batch 1 the second.
template <class T, class Finish = AsIs, int kMatrices = 1, int kPanels = 2, class Core = HopperCore> class Store {
 public:
  struct Params {
    typename Core::Target c[kMatrices];
    uint32_t columns = 0;  // of C
    bool add = false;
    typename Finish::Params finish;
  };
  using Shared = Staging<kPanels>;

  static Params params(const char* name, const Tensor& c, bool add = false, typename Finish::Params finish = {},
                       const Tensor& second = {}) {
    Params p;
    p.columns = uint32_t(c.cols()), p.add = add, p.finish = finish;
    p.c[0] = Core::template target<T>(name, c);
    if constexpr (kMatrices == 2) p.c[1] = Core::template target<T>(name, second);
    return p;
  }
  __device__ __forceinline__ Store(const Params& p, Shared& s, uint32_t warp) : p_(p), out_(s.of[warp]) {}

  template <int kSums> __device__ __forceinline__ void operator()(float (&d)[kSums], const WarpAt& at) {
    constexpr int kColumns = 128 / int(sizeof(T)), kFloats = kColumns / 2;
    const uint32_t row = at.row + threadIdx.x % 32 / 4;
    const typename Core::Target* const c = &p_.c[kMatrices == 2 ? at.batch : 0];
#pragma unroll
    for (int panel = 0; panel < kSums * 2 / kColumns; ++panel) {
      const uint32_t column = at.column + panel * kColumns;
      if (column >= p_.columns) break;
      float v[kFloats];
#pragma unroll
      for (int i = 0; i < kFloats; i += 2) {
        const float2 y = Finish::value(p_.finish, row + i % 4 * 4, column + i / 4 * 8 + threadIdx.x % 4 * 2,
                                       {d[panel * kFloats + i], d[panel * kFloats + i + 1]});
        v[i] = y.x, v[i + 1] = y.y;
      }
      if constexpr (std::is_same_v<T, float>) {
        out_.write(v);
      } else {
        uint32_t pairs[16];
        pack<T>(v, pairs);
        out_.write(pairs);
      }
      out_.send(c, column, at.row, kMatrices == 2 ? 0 : at.batch, p_.add);
    }
  }
  __device__ __forceinline__ void end() { out_.end(); }

 private:
  const Params& p_;
  typename Core::template PanelStore<kPanels> out_;
};

}  // namespace ingot::gemm
