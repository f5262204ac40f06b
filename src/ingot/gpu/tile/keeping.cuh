#pragma once
// Loads of vectors with the hint to keep the lines in L2, with or without L1.
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/tile/vec.cuh"

namespace ingot::tile {

template <class T, int N> __device__ inline void load_keeping(Vec<T, N>& v, const T* p) {
#pragma unroll
  for (int i = 0; i < Vec<T, N>::kBytes / Vec<T, N>::kPiece; ++i)
    ptx::load_keeping(reinterpret_cast<const char*>(p) + i * Vec<T, N>::kPiece, v.word[i]);
}
template <class T, int N> __device__ inline void load_keeping_l2(Vec<T, N>& v, const T* p) {
#pragma unroll
  for (int i = 0; i < Vec<T, N>::kBytes / Vec<T, N>::kPiece; ++i)
    ptx::load_keeping_l2(reinterpret_cast<const char*>(p) + i * Vec<T, N>::kPiece, v.word[i]);
}

}  // namespace ingot::tile
