#pragma once
// The CUDA variants of the MLP (forms), the problems they support, and their common conventions. mlp.cu chooses among
// the forms. Arguments have passed the checks of mlp.cpp: any depth up to kMlpMaxLayers, widths in multiples of 8 up to
// 512. Each form has a folder and uses no other form's folder; parts/ holds the shared code. All forms except the
// portable one contain instructions of sm_90a.
//
//   MlpForm           widest  dtypes         forward                    backward
//   portable          512     f32 f16 bf16   portable/                  portable/
//   to_128_few_rows   128     f16 bf16       to_128/few_rows_forward    to_128/few_rows_backward
//   to_128            128     f16 bf16       to_128/many_rows           to_128/layer_pipeline
//   to_256            256     f16 bf16       to_256/forward, from 136   to_256/chain, sums
//   to_512            512     f16 bf16       to_512/forward, from 264   to_512/chain, sums
//   to_512_few_rows   512     f16 bf16       to_512/few_rows, from 264  to_512/few_rows_chain, few_rows_sums
//
// Contents of `saved` on a GPU: for every activated layer in order a contiguous (T, N_l) matrix in saved.dtype: the
// value h after the activation if the slope follows from h (has_slope_from_value), else the value z before the
// activation. All forms write and read the same contents, so any forward form may precede any backward form. A 16-bit h
// equals the next layer's input exactly.
// With weight norm, either W is formed in fp32 and rounded to x's type, as a 16-bit matrix product would see W, or the
// scale of a row multiplies the fp32 sums; each form chooses. Where blocks pass all weights through shared memory, a
// separate launch forms W in advance, in the workspace (parts/formed_weights.h).
#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"
#include "ingot/kernels/mlp/operands.h"

namespace ingot::cuda {

constexpr int kMlpMaxLayers = 8;
constexpr int kMlpTo128 = 128;                   // the widest layer of the forms to 128
constexpr int kMlpTo256 = 256;                   // the widest layer of the form to 256
constexpr int kMlpTo512 = 512;                   // the portable form takes as much
constexpr int kMlpPanel = 64;                    // columns: a 128-byte swizzle row of 16-bit elements
constexpr int64_t kMlpSharedBytes = 227 * 1024;  // limit of a block on sm_90

// A 16-bit network no wider than kMlpTo128, and its width in panels.
template <class M> bool mlp_is_to_128(const M& m) {
  return (m.x.dtype == DType::f16 || m.x.dtype == DType::bf16) && mlp_widest(m) <= kMlpTo128;
}
template <class M> int mlp_panels(const M& m) { return mlp_widest(m) <= kMlpPanel ? 1 : 2; }

// mma.sync, sm_80 and later.
void mlp_portable(const Mlp& m, Stream stream);
void mlp_backward_portable(const MlpBackward& m, Stream stream);
int64_t mlp_backward_portable_workspace_bytes(const MlpBackward& m);

// Every block holds all weights in shared memory, requested at once.
bool mlp_to_128_few_rows_takes(const Mlp& m);
void mlp_to_128_few_rows(const Mlp& m, Stream stream);

// Weights stay in shared memory or, in deep networks, stream through shared memory; activations stay in registers.
bool mlp_to_128_takes(const Mlp& m);
void mlp_to_128(const Mlp& m, Stream stream);

// Weights stream through shared memory; activations stay in registers.
bool mlp_to_256_takes(const Mlp& m);
void mlp_to_256(const Mlp& m, Stream stream);
// The inputs of a backward pass where nothing was kept and slopes do not follow from values: all layers activated,
// their values in m.saved and the last layer's values in m.y, with their slopes beside them, all in x's type, in a
// single launch. Any widths to 256.
void mlp_to_256_slopes(const Mlp& m, const Tensor& slopes, Stream stream);

// Weights stream through shared memory, where activations stay. With few rows, each block of a cluster computes a part
// of every layer's columns.
bool mlp_to_512_takes(const Mlp& m);
void mlp_to_512(const Mlp& m, Stream stream);
bool mlp_to_512_few_rows_takes(const Mlp& m);
void mlp_to_512_few_rows(const Mlp& m, Stream stream);

// Slopes that follow from values; the layers are spread over a cluster of blocks.
bool mlp_backward_to_128_takes(const MlpBackward& m);
void mlp_backward_to_128(const MlpBackward& m, Stream stream);
int64_t mlp_backward_to_128_workspace_bytes(const MlpBackward& m);

// Few rows, values kept in x's type: a chain of gradients with all weights in shared memory, then sums over all rows.
bool mlp_backward_to_128_few_rows_takes(const MlpBackward& m);
void mlp_backward_to_128_few_rows(const MlpBackward& m, Stream stream);
int64_t mlp_backward_to_128_few_rows_workspace_bytes(const MlpBackward& m);

// Slopes that follow from values, from kept arguments, or from a forward pass over x: a kernel for the chain of
// gradients, with weights streaming through shared memory, then a kernel for the sums over all rows.
bool mlp_backward_to_256_takes(const MlpBackward& m);
void mlp_backward_to_256(const MlpBackward& m, Stream stream);
int64_t mlp_backward_to_256_workspace_bytes(const MlpBackward& m);

// The same, except for slopes from a forward pass over x: the chain with a row's gradients in shared memory.
bool mlp_backward_to_512_takes(const MlpBackward& m);
void mlp_backward_to_512(const MlpBackward& m, Stream stream);
int64_t mlp_backward_to_512_workspace_bytes(const MlpBackward& m);

// The same for few rows and without weight norm: each block of a cluster computes a part of every layer's columns, and
// then a part of the sums over all rows.
bool mlp_backward_to_512_few_rows_takes(const MlpBackward& m);
void mlp_backward_to_512_few_rows(const MlpBackward& m, Stream stream);
int64_t mlp_backward_to_512_few_rows_workspace_bytes(const MlpBackward& m);

using gpu::sm_count;

// The choice of a form is a pure function of the operands' shapes, types and options and of the GPU's limits; below
// compute capability 8.0 the function throws.
enum class MlpForm { portable, to_128_few_rows, to_128, to_256, to_512, to_512_few_rows };
MlpForm pick_mlp_form(const Mlp& m, const gpu::Limits& limits);
MlpForm pick_mlp_form(const MlpBackward& m, const gpu::Limits& limits);
bool mlp_takes(const Mlp& m, MlpForm form);
bool mlp_takes(const MlpBackward& m, MlpForm form);

void mlp(const Mlp& m, Stream stream);
int64_t mlp_workspace_bytes(const Mlp& m);  // enough for the chosen form
void mlp_backward(const MlpBackward& m, Stream stream);
int64_t mlp_backward_workspace_bytes(const MlpBackward& m);

// For tests and benchmarks: runs a form by name; the operands must suit the form and are not checked otherwise.
void mlp_with(const Mlp& m, MlpForm form, Stream stream);
void mlp_backward_with(const MlpBackward& m, MlpForm form, Stream stream);
int64_t mlp_backward_workspace_bytes_with(const MlpBackward& m, MlpForm form);

}  // namespace ingot::cuda
