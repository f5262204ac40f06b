#pragma once
// Epilogues process and store the sums. The core makes an object per consumer thread,
//     Epilogue(const Epilogue::Params&, Epilogue::Shared&, warp)     warp: 0 to 7
// and whole warps call, each for its own 16 rows:
//     epilogue(d, at)    with the sums of 64 rows x kN columns in wgmma's layout (ptx/wgmma.cuh)
//     epilogue.end()     after the last tile
// A warp waits for no further warps: WarpStore passes its 16 rows through its own panels of shared memory to tensor
// copies. Columns come in panels of 128 bytes: 64 of 16 bits, 32 of fp32.
#include <cstdint>
#include <type_traits>

#include "ingot/core/dtype.h"
#include "ingot/gpu/gemm/operand.cuh"
#include "ingot/gpu/gemm/operands.h"
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/tile/swizzle.cuh"

namespace ingot::gemm {

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

// The box of WarpStore's tensor maps, and the maps: for rows of whole 16 bytes, and for rows with padding at the end,
// which is written (operands.h).
template <class T>
constexpr gpu::TmaBox kStoreBox{.rows = kWarpRows, .cols = 128 / int(sizeof(T)), .swizzle = tile::Swizzle::b128};
template <class T> CUtensorMap store_map(const char* name, const Tensor& t) {
  check_whole_rows(name, t);
  return gpu::tensor_map(name, as_bank(t), kStoreBox<T>);
}
template <class T> CUtensorMap padded_store_map(const char* name, const Tensor& t) {
  check_padded_rows(name, t);
  return gpu::tensor_map(name, as_bank(t), kStoreBox<T>);
}
// For panels written by write_turned: the mirror image of a tile of a symmetric product.
constexpr gpu::TmaBox kTurnedBox{.rows = 64, .cols = kWarpRows, .swizzle = tile::Swizzle::b32};

// A warp's panels, used in turn: while the copy engine reads a panel, the warp writes the next.
template <int kPanels = 2> class WarpStore {
 public:
  __device__ __forceinline__ explicit WarpStore(WarpStaging<kPanels>& s) : panels_(ptx::shared_address(&s)) {}

  // 64 columns of 16 bits: pairs[2 * j] holds columns 8 * j + 2 * (lane % 4), + 1 of row lane / 4, pairs[2 * j + 1] the
  // same columns of row lane / 4 + 8: the fragment's order.
  __device__ __forceinline__ void write(const uint32_t (&pairs)[16]) {
    begin();
    const uint32_t to = panel() + tile::swizzled<tile::Swizzle::b128>(lane() % 16, lane() / 16 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::stmatrix(to ^ (i * 32), {pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]});
  }
  // 32 columns of fp32, in the fragment's order.
  __device__ __forceinline__ void write(const float (&d)[16]) {
    begin();
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::store_shared(panel() + tile::swizzled<tile::Swizzle::b128>(lane() / 4 + 8 * half, 32 * j + lane() % 4 * 8),
                          {__float_as_uint(d[4 * j + 2 * half]), __float_as_uint(d[4 * j + 2 * half + 1])});
  }
  // The same turned: a panel of 64 rows x 16 columns, for a map of kTurnedBox.
  __device__ __forceinline__ void write_turned(const uint32_t (&pairs)[16]) {
    begin();
    const uint32_t to = panel() + tile::swizzled<tile::Swizzle::b32>(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::stmatrix_trans(to + i * 512, {pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]});
  }
  // Reorders 64 columns of 16 bits read by an epilogue, from rows in memory order (load_panel) to the fragment's order.
  // The panel is free to be written again.
  __device__ __forceinline__ void arrange(const uint32_t (&chunks)[4][4], uint32_t (&pairs)[16]) {
    begin();
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      ptx::store_shared(panel() + tile::swizzled<tile::Swizzle::b128>(lane() / 8 + 4 * i, lane() % 8 * 16), chunks[i]);
    __syncwarp();
    const uint32_t from = panel() + tile::swizzled<tile::Swizzle::b128>(lane() % 16, lane() / 16 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t of_columns[4];
      ptx::ldmatrix(of_columns, from ^ (i * 32));
#pragma unroll
      for (int j = 0; j < 4; ++j) pairs[4 * i + j] = of_columns[j];
    }
  }
  // Stores the panel at (row, column) of the map's tensor, or adds the panel; parts beyond the tensor's edges are
  // dropped.
  __device__ __forceinline__ void send(const CUtensorMap* map, uint32_t column, uint32_t row, uint32_t batch,
                                       bool add = false) {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane() == 0) {
      const void* const from = __cvta_shared_to_generic(panel());
      if (add)
        ptx::tensor_add_3d(map, int(column), int(row), int(batch), from);
      else
        ptx::tensor_store_3d(map, int(column), int(row), int(batch), from);
      ptx::bulk_commit_group();
    }
    next_ = next_ + 1 == kPanels ? 0 : next_ + 1;
  }
  // Shared memory must live until the copies have read the panels.
  __device__ __forceinline__ void end() {
    if (lane() == 0) ptx::bulk_wait_group_read<0>();
  }

 private:
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ uint32_t panel() const { return panels_ + next_ * kWarpPanelBytes; }
  __device__ __forceinline__ void begin() {
    if (lane() == 0) ptx::bulk_wait_group_read<kPanels - 1>();
    __syncwarp();
  }
  uint32_t panels_, next_ = 0;
};

// 16 rows x 64 columns of 16 bits, the input of WarpStore::arrange(): lane l has 16 bytes of rows l / 8 + 4 i. Zeros
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
template <class T, class Finish = AsIs, int kMatrices = 1, int kPanels = 2> class Store {
 public:
  struct Params {
    CUtensorMap c[kMatrices];
    uint32_t columns = 0;  // of C
    bool add = false;
    typename Finish::Params finish;
  };
  using Shared = Staging<kPanels>;

  static Params params(const char* name, const Tensor& c, bool add = false, typename Finish::Params finish = {},
                       const Tensor& second = {}) {
    Params p{.columns = uint32_t(c.cols()), .add = add, .finish = finish};
    p.c[0] = store_map<T>(name, c);
    if constexpr (kMatrices == 2) p.c[1] = store_map<T>(name, second);
    return p;
  }
  __device__ __forceinline__ Store(const Params& p, Shared& s, uint32_t warp) : p_(p), out_(s.of[warp]) {}

  template <int kSums> __device__ __forceinline__ void operator()(float (&d)[kSums], const WarpAt& at) {
    constexpr int kColumns = 128 / int(sizeof(T)), kFloats = kColumns / 2;
    const uint32_t row = at.row + threadIdx.x % 32 / 4;
    const CUtensorMap* const c = &p_.c[kMatrices == 2 ? at.batch : 0];
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
  WarpStore<kPanels> out_;
};

}  // namespace ingot::gemm
