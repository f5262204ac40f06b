#pragma once
// The results of the portable core: a warp reorders a panel of its 16 rows in shared memory, and its lanes store chunks
// of 16 bytes. Members and panels are WarpStore's (../tensor_store.cuh).
#include <cstdint>

#include "ingot/gpu/gemm/epilogue.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/memory.cuh"

namespace ingot::gemm::portable {

// A bank of matrices in memory. Strides in bytes.
struct Target {
  char* data = nullptr;
  int64_t stride = 0, batch_stride = 0;
  uint32_t rows = 0, columns = 0, element_bytes = 2;
  bool f16 = false;
  // Whether rows consist of whole aligned chunks of 16 bytes, of which the last may reach into the row's padding.
  // Otherwise elements are stored one by one.
  bool whole = true;
};
template <class T> Target target_of(const Tensor& t) {
  const Tensor bank = as_bank(t);
  constexpr int64_t kBytes = int64_t(sizeof(T));
  return {.data = static_cast<char*>(bank.data),
          .stride = bank.stride[1] * kBytes,
          .batch_stride = bank.stride[0] * kBytes,
          .rows = uint32_t(bank.size(1)),
          .columns = uint32_t(bank.size(2)),
          .element_bytes = uint32_t(kBytes),
          .f16 = t.dtype == DType::f16};
}

template <int kPanels> class PanelStore {
 public:
  __device__ __forceinline__ explicit PanelStore(WarpStaging<kPanels>& s) : panel_(ptx::shared_address(&s)) {}

  __device__ __forceinline__ void write(const uint32_t (&pairs)[16]) {
    __syncwarp();  // the panel may still be read
    const uint32_t to = at(lane() / 4, lane() % 4 * 4);
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half)
        ptx::store_shared((to ^ 16 * j) + half * kEightRows, {pairs[2 * j + half]});
  }
  __device__ __forceinline__ void write(const float (&d)[16]) {
    floats_ = true;
    __syncwarp();
    const uint32_t to = at(lane() / 4, lane() % 4 * 8);
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half)
        ptx::store_shared((to ^ 32 * j) + half * kEightRows,
                          {__float_as_uint(d[4 * j + 2 * half]), __float_as_uint(d[4 * j + 2 * half + 1])});
  }
  // send_turned() transposes.
  __device__ __forceinline__ void write_turned(const uint32_t (&pairs)[16]) { write(pairs); }
  __device__ __forceinline__ void arrange(const uint32_t (&chunks)[4][4], uint32_t (&pairs)[16]) {
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) ptx::store_shared(at(lane() / 8 + 4 * i, lane() % 8 * 16), chunks[i]);
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      uint32_t of_columns[4];
      ptx::ldmatrix(of_columns, at(lane() % 16, lane() / 16 * 16) ^ (i * 32));
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) pairs[4 * i + j] = of_columns[j];
    }
  }
  // A kernel contains this code once for each panel of a warp, so the rarely taken paths are loops of few instructions.
  // When these paths were unrolled, a warp took longer to fetch an epilogue's instructions than to execute them.
  __device__ __forceinline__ void send(const Target* to, uint32_t column, uint32_t row, uint32_t batch,
                                       bool add = false) {
    __syncwarp();
    const uint32_t first = column * to->element_bytes + lane() % 8 * 16, end = to->columns * to->element_bytes;
    if (first >= end) return;
    const Chunks chunks{to->data + batch * to->batch_stride + (row + lane() / 8) * to->stride + first, 4 * to->stride,
                        int32_t(to->rows) - int32_t(row + lane() / 8)};
    if (!to->whole) return store_elements(*to, chunks, min(16u, end - first), add);
    if (add) return floats_ ? add_floats(chunks) : add_pairs(*to, chunks);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (chunks.has(i)) {
        uint32_t w[4];
        load_chunk(w, i);
        store(chunks.at(i), w);
      }
  }
  // Stores the transposed panel, whose rows have 16 elements, at (row, column). A lane stores pairs: four neighbouring
  // lanes write 16 bytes of a row, and two stores in turn fill the row's 32 bytes, a sector of memory.
  __device__ __forceinline__ void send_turned(const Target* to, uint32_t column, uint32_t row, uint32_t batch) {
    __syncwarp();
    const uint32_t pair = column + lane() % 4 * 2;
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      uint32_t r[4];  // columns 16 j to 16 j + 7 of both halves of the rows, then the next eight columns
      ptx::ldmatrix_trans(r, at(lane() % 16, lane() / 16 * 16) ^ (j * 32));
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t y = row + 16 * j + i / 2 * 8 + lane() / 4, x = pair + i % 2 * 8;
        if (y < to->rows && x / 8 * 8 < to->columns)
          *reinterpret_cast<uint32_t*>(to->data + batch * to->batch_stride + y * to->stride + x * 2) = r[i];
      }
    }
  }
  __device__ __forceinline__ void end() {}

 private:
  static constexpr uint32_t kEightRows = 8 * 128;  // of a panel, after which the swizzle repeats

  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ uint32_t at(uint32_t row, uint32_t byte) const {
    return panel_ + tile::swizzled<tile::Swizzle::b128>(row, byte);
  }
  // A lane's chunks of 16 bytes in memory, one in every fourth row.
  struct Chunks {
    char* first;
    int64_t step;
    int32_t rows;  // remaining rows, counted from the lane's first row
    __device__ __forceinline__ bool has(int i) const { return 4 * i < rows; }
    __device__ __forceinline__ char* at(int i) const { return first + i * step; }
  };
  __device__ __forceinline__ void load_chunk(uint32_t (&w)[4], int i) const {
    // Four rows further down, the swizzle differs by one bit.
    ptx::load_shared(w, (at(lane() / 8, lane() % 8 * 16) ^ uint32_t(i % 2 * 64)) + uint32_t(i) * kEightRows / 2);
  }
  static __device__ __forceinline__ void store(char* p, const uint32_t (&w)[4]) {
    *reinterpret_cast<uint4*>(p) = make_uint4(w[0], w[1], w[2], w[3]);
  }
  // All loads are in flight before the first result is needed.
  __device__ __forceinline__ void add_floats(const Chunks& chunks) const {
    uint32_t old[4][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (chunks.has(i)) ptx::load_streaming(chunks.at(i), old[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (chunks.has(i)) {
        uint32_t w[4];
        load_chunk(w, i);
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = __float_as_uint(__uint_as_float(old[i][j]) + __uint_as_float(w[j]));
        store(chunks.at(i), w);
      }
  }
  // w += old, rounded once.
  static __device__ __forceinline__ uint32_t added(bool f16_, uint32_t old, uint32_t w) {
    float a, b, x, y;
    if (f16_) {
      ptx::unpack(f16{}, old, a, b), ptx::unpack(f16{}, w, x, y);
      return ptx::pack(f16{}, a + x, b + y);
    }
    ptx::unpack(bf16{}, old, a, b), ptx::unpack(bf16{}, w, x, y);
    return ptx::pack(bf16{}, a + x, b + y);
  }
  __device__ __forceinline__ void add_pairs(const Target& to, const Chunks& chunks) const {
#pragma unroll 1
    for (int i = 0; i < 4 && chunks.has(i); ++i) {
      uint32_t old[4], w[4];
      ptx::load_streaming(chunks.at(i), old);
      load_chunk(w, i);
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = added(to.f16, old[j], w[j]);
      store(chunks.at(i), w);
    }
  }
  // Stores the first `bytes` of each chunk, one element at a time.
  __device__ __forceinline__ void store_elements(const Target& to, const Chunks& chunks, uint32_t bytes,
                                                 bool add) const {
#pragma unroll 1
    for (int i = 0; i < 4 && chunks.has(i); ++i)
#pragma unroll 1
      for (uint32_t byte = 0; byte < bytes; byte += to.element_bytes) {
        uint32_t w[1];
        ptx::load_shared(w, at(lane() / 8 + 4 * i, lane() % 8 * 16) + byte / 4 * 4);
        char* const p = chunks.at(i) + byte;
        if (to.element_bytes == 4) {
          float& y = *reinterpret_cast<float*>(p);
          y = add ? y + __uint_as_float(w[0]) : __uint_as_float(w[0]);
        } else {
          uint16_t& y = *reinterpret_cast<uint16_t*>(p);
          const uint32_t x = byte % 4 == 0 ? w[0] & 0xffff : w[0] >> 16;
          y = uint16_t(add ? added(to.f16, y, x) : x);
        }
      }
  }
  bool floats_ = false;  // whether the panel holds fp32; the compiler knows this value
  uint32_t panel_;
};

// Has the members of WarpExchange (../tensor_store.cuh). The reads begin in await(), not in request().
class PanelExchange {
 public:
  static constexpr bool kRequests = false;
  static constexpr int kPanels = 2;
  using Memory = Staging<kPanels>;

  __device__ __forceinline__ PanelExchange(Memory& m, uint32_t warp) : store_(m.of[warp]) {}
  __device__ __forceinline__ void request(const Target*, const WarpAt&) {}
  // The loads of both panels are in flight before the first panel is needed.
  __device__ __forceinline__ void await(const Target* from, const WarpAt& at) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      load_panel(reinterpret_cast<const uint16_t*>(from->data + at.batch * from->batch_stride), from->stride / 2,
                 at.row, at.column + panel * 64, from->rows, from->columns, chunks_[panel]);
  }
  __device__ __forceinline__ void take(int panel, uint32_t (&pairs)[16]) { store_.arrange(chunks_[panel], pairs); }
  __device__ __forceinline__ void send(const uint32_t (&pairs)[16], int panel, const Target* to, const WarpAt& at) {
    store_.write(pairs);
    store_.send(to, at.column + panel * 64, at.row, at.batch);
  }
  __device__ __forceinline__ void end() {}

 private:
  PanelStore<kPanels> store_;
  uint32_t chunks_[kPanels][4][4];
};

}  // namespace ingot::gemm::portable
