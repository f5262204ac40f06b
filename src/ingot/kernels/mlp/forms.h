#pragma once
// The CUDA forms of the MLP, what each takes, and what they agree on. mlp.cu chooses among them. Arguments have passed
// the checks of mlp.cpp: any depth up to kMlpMaxLayers, widths in multiples of 8 up to 512. A form has a folder, and
// uses no other's; parts/ is what they share. All but the portable one hold instructions of sm_90a.
//
//   MlpForm           widest  dtypes         forward                    backward
//   portable          512     f32 f16 bf16   portable/                  portable/
//   to_128_few_rows   128     f16 bf16       to_128/few_rows_forward    to_128/few_rows_backward
//   to_128            128     f16 bf16       to_128/many_rows           to_128/layer_pipeline
//   to_256            256     f16 bf16       to_256/forward, from 136   to_256/chain, sums
//   to_512            512     f16 bf16       to_512/forward, from 264   to_512/chain, sums
//   to_512_few_rows   512     f16 bf16       to_512/few_rows, from 264  to_512/few_rows_chain, few_rows_sums
//
// What `saved` holds on a GPU, layer after layer for every activated layer, each a contiguous (T, N_l) matrix in
// saved.dtype: the value h after the activation where the slope follows from it (has_slope_from_value), otherwise the
// value z before it. All forms write and read the same, so that any forward may precede any backward. A 16-bit h is the
// h that the next layer multiplied.
// With weight norm, W is formed in fp32 and rounded to x's type, as a 16-bit matrix product would see it, or its row's
// scale multiplies the fp32 sums; which of the two is the form's choice. Where blocks pass all weights through shared
// memory, W is formed ahead, by a launch of its own, in the workspace (parts/formed_weights.h).
#include "ingot/gpu/device.h"
#include "ingot/kernels/mlp/operands.h"

namespace ingot::cuda {

constexpr int kMlpMaxLayers = 8;
constexpr int kMlpTo128 = 128;                   // the widest layer of the forms to 128
constexpr int kMlpTo256 = 256;                   // and so on
constexpr int kMlpTo512 = 512;                   // the portable one takes as much
constexpr int kMlpPanel = 64;                    // columns: one 128-byte swizzle row of 16-bit elements
constexpr int64_t kMlpSharedBytes = 227 * 1024;  // that a block may have, sm_90

// A 16-bit network no wider than kMlpTo128, and its width in panels.
template <class M> bool mlp_is_to_128(const M& m) {
  return (m.x.dtype == DType::f16 || m.x.dtype == DType::bf16) && mlp_widest(m) <= kMlpTo128;
}
template <class M> int mlp_panels(const M& m) { return mlp_widest(m) <= kMlpPanel ? 1 : 2; }

// mma.sync, sm_80 and later.
void mlp_portable(const Mlp& m, Stream stream);
void mlp_backward_portable(const MlpBackward& m, Stream stream);
int64_t mlp_backward_portable_workspace_bytes(const MlpBackward& m);

// Every block has all weights in shared memory, asked for at once.
bool mlp_to_128_few_rows_takes(const Mlp& m);
void mlp_to_128_few_rows(const Mlp& m, Stream stream);

// Weights stay in shared memory or, of deep networks, pass through it; activations stay in registers.
bool mlp_to_128_takes(const Mlp& m);
void mlp_to_128(const Mlp& m, Stream stream);

// Weights pass through shared memory; activations stay in registers.
bool mlp_to_256_takes(const Mlp& m);
void mlp_to_256(const Mlp& m, Stream stream);
// What a backward pass needs of a network of which nothing was kept, where slopes do not follow from values: all layers
// activated, their values in m.saved and the last one's in m.y, and their slopes beside them, all in x's type, in one
// launch. Of any widths to 256.
void mlp_to_256_slopes(const Mlp& m, const Tensor& slopes, Stream stream);

// Weights pass through shared memory, where activations stay. Of few rows, each block of a cluster has a part of every
// layer's columns.
bool mlp_to_512_takes(const Mlp& m);
void mlp_to_512(const Mlp& m, Stream stream);
bool mlp_to_512_few_rows_takes(const Mlp& m);
void mlp_to_512_few_rows(const Mlp& m, Stream stream);

// Slopes that follow from values: the layers lie on a cluster of blocks.
bool mlp_backward_to_128_takes(const MlpBackward& m);
void mlp_backward_to_128(const MlpBackward& m, Stream stream);
int64_t mlp_backward_to_128_workspace_bytes(const MlpBackward& m);

// Few rows, values kept in x's type: a chain of gradients with all weights at hand, then sums over all rows at once.
bool mlp_backward_to_128_few_rows_takes(const MlpBackward& m);
void mlp_backward_to_128_few_rows(const MlpBackward& m, Stream stream);
int64_t mlp_backward_to_128_few_rows_workspace_bytes(const MlpBackward& m);

// Slopes that follow from values or from what was kept: the chain with weights
// passing through shared memory, then, in the same launch, sums over all rows.
bool mlp_backward_to_256_takes(const MlpBackward& m);
void mlp_backward_to_256(const MlpBackward& m, Stream stream);
int64_t mlp_backward_to_256_workspace_bytes(const MlpBackward& m);

// The same, but for slopes of nothing but x: the chain with a row's gradients in
// shared memory.
bool mlp_backward_to_512_takes(const MlpBackward& m);
void mlp_backward_to_512(const MlpBackward& m, Stream stream);
int64_t mlp_backward_to_512_workspace_bytes(const MlpBackward& m);

// The same for few rows without weight norm: each block of a cluster has a part of every layer's columns, and then of
// the sums over all rows.
bool mlp_backward_to_512_few_rows_takes(const MlpBackward& m);
void mlp_backward_to_512_few_rows(const MlpBackward& m, Stream stream);
int64_t mlp_backward_to_512_few_rows_workspace_bytes(const MlpBackward& m);

using gpu::sm_count;

// Which form runs is a pure function of the operands' shapes, types and options and of the GPU's generation; below 8 it
// throws.
enum class MlpForm { portable, to_128_few_rows, to_128, to_256, to_512, to_512_few_rows };
MlpForm pick_mlp_form(const Mlp& m, int compute_major);
MlpForm pick_mlp_form(const MlpBackward& m, int compute_major);
bool mlp_takes(const Mlp& m, MlpForm form);
bool mlp_takes(const MlpBackward& m, MlpForm form);

void mlp(const Mlp& m, Stream stream);
int64_t mlp_workspace_bytes(const Mlp& m);  // of whichever form
void mlp_backward(const MlpBackward& m, Stream stream);
int64_t mlp_backward_workspace_bytes(const MlpBackward& m);

// For tests and benchmarks: a form by name; the operands must be what it takes, and are not checked otherwise.
void mlp_with(const Mlp& m, MlpForm form, Stream stream);
void mlp_backward_with(const MlpBackward& m, MlpForm form, Stream stream);
int64_t mlp_backward_workspace_bytes_with(const MlpBackward& m, MlpForm form);

}  // namespace ingot::cuda
