#pragma once
// Elements of rows, and the choice of the activation at run time.
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/mlp/parts/weight_norm.cuh"

namespace ingot::cuda {
namespace {

using namespace mlp_parts;

template <class T> constexpr int kPer = 16 / int(sizeof(T));  // elements of 16 bytes

// Two neighbouring elements of a row.
template <class T> __device__ inline void load_pair(const T* p, float (&v)[2]) {
  tile::Vec<T, 2> pair;
  tile::load(pair, p);
  tile::to_float(pair, v);
}
template <class T> __device__ inline void store_pair(T* p, float a, float b) {
  const float v[2] = {a, b};
  tile::store(p, tile::from_float<T>(v), false);
}

// Calls use(F{}) for the activation chosen at run time; uniform over the grid.
template <class Use, class... Fs> __device__ inline void with_act(Act act, Use&& use, ActivationList<Fs...>) {
  int i = 0;
  ((int(act) == i++ ? use(Fs{}) : void()), ...);
}
template <class Use> __device__ inline void with_act(Act act, Use&& use) { with_act(act, use, Activations{}); }

}  // namespace
}  // namespace ingot::cuda
