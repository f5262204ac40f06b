#pragma once
// The CUDA forms of the MLP, and what they agree on. mlp.cu chooses among them; each says what it takes. Arguments have
// passed the checks of mlp.cpp.
//
// What `saved` holds on a GPU, layer after layer for every activated layer, each a contiguous (T, N_l) matrix in
// saved.dtype: the value h after the activation where the slope follows from it (has_slope_from_value), otherwise the
// value z before it. All forms write and read the same, so that any forward may precede any backward. A 16-bit h is the
// h that the next layer multiplied.
// With weight norm, W is formed in fp32 and rounded to x's type, as a 16-bit matrix product would see it, or its row's
// scale multiplies the fp32 sums; which of the two is the form's choice.
#include "ingot/kernels/mlp/mlp_operands.h"

namespace ingot::cuda {

constexpr int kMlpMaxLayers = 8;
constexpr int kMlpFastWidth = 128;               // the widest layer of the few-rows and sm90 forms
constexpr int kMlpWideWidth = 256;               // of the wide ones
constexpr int kMlpBroadWidth = 512;              // of the broad ones; the portable one takes as much
constexpr int kMlpPanel = 64;                    // columns: one 128-byte swizzle row of 16-bit elements
constexpr int64_t kMlpSharedBytes = 227 * 1024;  // that a block may have, sm_90

// A 16-bit network no wider than kMlpFastWidth, and its width in panels.
template <class M> bool mlp_fast_type(const M& m) {
  return (m.x.dtype == DType::f16 || m.x.dtype == DType::bf16) && mlp_widest(m) <= kMlpFastWidth;
}
template <class M> int mlp_panels(const M& m) { return mlp_widest(m) <= kMlpPanel ? 1 : 2; }

// Any depth up to kMlpMaxLayers, widths in multiples of 8 up to 512, f16, bf16 and f32; mma.sync, sm_80 and later.
void mlp_portable(const Mlp& m, Stream stream);
void mlp_backward_portable(const MlpBackward& m, Stream stream);
int64_t mlp_backward_portable_workspace_bytes(const MlpBackward& m);

// Few rows, widths up to 128, f16 and bf16, sm_90a: every block has all weights in shared memory, asked for at once.
bool mlp_few_rows_takes(const Mlp& m);
void mlp_few_rows(const Mlp& m, Stream stream);

// Many rows, widths up to 128, f16 and bf16, sm_90a: weights stay in shared memory or, of deep networks, pass through
// it; activations stay in registers.
bool mlp_sm90_takes(const Mlp& m);
void mlp_sm90(const Mlp& m, Stream stream);

// Widest layer 136 to 256, f16 and bf16, sm_90a: weights pass through shared memory; activations stay in registers.
bool mlp_wide_takes(const Mlp& m);
void mlp_wide(const Mlp& m, Stream stream);

// Widest layer 264 to 512, f16 and bf16, sm_90a: weights pass through shared memory, where activations stay. Of few
// rows, each block of a cluster has a part of every layer's columns.
bool mlp_broad_takes(const Mlp& m);
void mlp_broad(const Mlp& m, Stream stream);
bool mlp_broad_few_rows_takes(const Mlp& m);
void mlp_broad_few_rows(const Mlp& m, Stream stream);

// Widths up to 128, f16 and bf16, slopes that follow from values, sm_90a: the layers lie on a cluster of blocks.
bool mlp_backward_sm90_takes(const MlpBackward& m);
void mlp_backward_sm90(const MlpBackward& m, Stream stream);
int64_t mlp_backward_sm90_workspace_bytes(const MlpBackward& m);

// Few rows, values kept in x's type: a chain of gradients with all weights at hand, then sums over all rows at once.
bool mlp_few_rows_backward_takes(const MlpBackward& m);
void mlp_few_rows_backward(const MlpBackward& m, Stream stream);
int64_t mlp_few_rows_backward_workspace_bytes(const MlpBackward& m);

// Widths up to 256, f16 and bf16, slopes that follow from values or from what was kept, sm_90a: the chain with weights
// passing through shared memory, then, in the same launch, sums over all rows.
bool mlp_wide_backward_takes(const MlpBackward& m);
void mlp_wide_backward(const MlpBackward& m, Stream stream);
int64_t mlp_wide_backward_workspace_bytes(const MlpBackward& m);

// Widths up to 512, otherwise as the wide one, but for slopes of nothing but x: the chain with a row's gradients in
// shared memory.
bool mlp_broad_backward_takes(const MlpBackward& m);
void mlp_broad_backward(const MlpBackward& m, Stream stream);
int64_t mlp_broad_backward_workspace_bytes(const MlpBackward& m);

int sm_count(int device);  // asked for at every launch, as the runtime remembers it

// Which form runs is a pure function of the operands' shapes, types and options and of the GPU's generation; below 8 it
// throws.
enum class MlpForm { portable, few_rows, sm90, wide, broad, broad_few_rows };
MlpForm pick_mlp_form(const Mlp& m, int compute_major);
MlpForm pick_mlp_form(const MlpBackward& m, int compute_major);
bool mlp_takes(const Mlp& m, MlpForm form);
bool mlp_takes(const MlpBackward& m, MlpForm form);

void mlp(const Mlp& m, Stream stream);
void mlp_backward(const MlpBackward& m, Stream stream);
int64_t mlp_backward_workspace_bytes(const MlpBackward& m);

// For tests and benchmarks: a form by name; the operands must be what it takes, and are not checked otherwise.
void mlp_with(const Mlp& m, MlpForm form, Stream stream);
void mlp_backward_with(const MlpBackward& m, MlpForm form, Stream stream);
int64_t mlp_backward_workspace_bytes_with(const MlpBackward& m, MlpForm form);

}  // namespace ingot::cuda
