#pragma once
// The launches of a step that depend on how a matrix is stored: one source file per format (decode_*.cu).
#include "ingot/models/gpt_oss/decode/state.h"

namespace ingot::gpt_oss_decode {

// y = norm(x) W^T + b for T rows; `best` (of the head): the largest of the last row.
struct NormProduct {
  const float* x;
  int64_t x_stride;
  const float *weight, *bias;  // bias may be null
  Matrix w;
  float* y;
  int64_t y_stride;
  uint32_t T;
  float eps;
  uint64_t* best = nullptr;
  uint32_t* arrived = nullptr;
  State* state = nullptr;
  uint32_t vocab = 0, advance = 0;  // ids that may win; what the position grows by
};
// x += columns W^T + b
struct ResidualProduct {
  const char* columns;
  const float* bias;
  Matrix w;
  float* x;
  int64_t x_stride;
  uint32_t T;
};
struct GateUp {
  const float* x;
  int64_t x_stride;
  const float *weight, *bias;  // (C), (E, 2 I)
  Matrix w;
  char* hidden;  // (T k) columns of I, in the order `down` takes
  WeightFormat down;
  routing::Lists lists;
  uint32_t T, most;  // most: experts there can be
  float eps, limit, alpha;
};
struct Down {
  const char* hidden;
  const float* bias;  // (E, C)
  Matrix w;
  float* x;
  int64_t x_stride;
  routing::Lists lists;
  uint32_t T, k, most;
};

template <WeightFormat F> struct Phases {
  static void norm_product(const NormProduct& p, Stream stream);
  static void residual_product(const ResidualProduct& p, Stream stream);
  static void gate_up(const GateUp& p, Stream stream);
  static void down(const Down& p, Stream stream);
};

}  // namespace ingot::gpt_oss_decode
