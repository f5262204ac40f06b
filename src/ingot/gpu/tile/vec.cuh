#pragma once
// Vec<T, N>: N elements in memory order, packed in registers. Memory traffic goes in pieces of up to 16 bytes.
#include "ingot/core/dtype.h"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/memory.cuh"

namespace ingot::tile {

template <class T, int N> struct Vec {
  static constexpr int kBytes = N * int(sizeof(T));
  static constexpr int kPiece = kBytes < 16 ? kBytes : 16;  // bytes per load or store, and the alignment needed
  static_assert(kBytes % kPiece == 0 && kPiece >= 4, "a vector is whole 4-, 8- or 16-byte pieces");
  uint32_t word[kBytes / kPiece][kPiece / 4] = {};
};

template <class T, int N> __device__ inline void load_streaming(Vec<T, N>& v, const T* p) {
#pragma unroll
  for (int i = 0; i < Vec<T, N>::kBytes / Vec<T, N>::kPiece; ++i)
    ptx::load_streaming(reinterpret_cast<const char*>(p) + i * Vec<T, N>::kPiece, v.word[i]);
}

// Loads through L1, for data that other blocks of the SM also read.
template <class T, int N> __device__ inline void load(Vec<T, N>& v, const T* p) {
  struct alignas(Vec<T, N>::kPiece) Piece {
    uint32_t w[Vec<T, N>::kPiece / 4];
  };
#pragma unroll
  for (int i = 0; i < Vec<T, N>::kBytes / Vec<T, N>::kPiece; ++i) {
    const Piece piece = reinterpret_cast<const Piece*>(p)[i];
#pragma unroll
    for (int k = 0; k < Vec<T, N>::kPiece / 4; ++k) v.word[i][k] = piece.w[k];
  }
}

template <class T, int N> __device__ inline void store(T* p, const Vec<T, N>& v, bool evict_first) {
  struct alignas(Vec<T, N>::kPiece) Piece {
    uint32_t w[Vec<T, N>::kPiece / 4];
  };
#pragma unroll
  for (int i = 0; i < Vec<T, N>::kBytes / Vec<T, N>::kPiece; ++i) {
    if (evict_first) {
      ptx::store_evict_first(reinterpret_cast<char*>(p) + i * Vec<T, N>::kPiece, v.word[i]);
    } else {
      Piece piece;
#pragma unroll
      for (int k = 0; k < Vec<T, N>::kPiece / 4; ++k) piece.w[k] = v.word[i][k];
      reinterpret_cast<Piece*>(p)[i] = piece;
    }
  }
}

template <class T, int N> __device__ inline void to_float(const Vec<T, N>& v, float (&x)[N]) {
  const uint32_t* word = v.word[0];
#pragma unroll
  for (int i = 0; i < N; i += 4 / int(sizeof(T))) {
    if constexpr (sizeof(T) == 4)
      x[i] = __uint_as_float(word[i]);
    else
      ptx::unpack(T{}, word[i / 2], x[i], x[i + 1]);
  }
}

template <class T, int N> __device__ inline Vec<T, N> from_float(const float (&x)[N]) {
  Vec<T, N> v;
  uint32_t* word = v.word[0];
#pragma unroll
  for (int i = 0; i < N; i += 4 / int(sizeof(T))) {
    if constexpr (sizeof(T) == 4)
      word[i] = __float_as_uint(x[i]);
    else
      word[i / 2] = ptx::pack(T{}, x[i], x[i + 1]);
  }
  return v;
}

// An element, with the hardware's conversions.
__device__ inline float to_float(float x) { return x; }
template <class T> __device__ inline float to_float(T x) {
  float low, high;
  ptx::unpack(T{}, x.bits, low, high);
  return low;
}
template <class T> __device__ inline T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    T t;
    t.bits = uint16_t(ptx::pack(T{}, x, 0.f));
    return t;
  }
}

}  // namespace ingot::tile
