#pragma once
// Scaled dot-product attention over packed segments (documents), for training, prefill and decode.
//   s[i,j] = scale * q_i . k_j,   s = softcap * tanh(s / softcap) where softcap > 0
//   out_i  = sum_j p[i,j] v_j,    p = softmax over the visible j, and over the head's sink, if any
//   lse_i  = log(sum_j exp(s[i,j]) [+ exp(sink)])
// Query head h reads key head h / (H / Hkv). Causal masks are aligned at the segment's end: query i of n sees the keys
// up to i + (m - n). window = w > 0 (causal only) restricts the query to the last w of these keys. A row without a
// visible key has out = 0 and lse = -inf (or the sink, if any) and no gradient. cu_q and cu_k start at 0. Rows from
// cu_q[S] or cu_k[S] on belong to no segment (padding): out = 0, lse = -inf, and their gradients are 0.
#include "ingot/core/tensor.h"

namespace ingot {

struct Attention {
  Tensor q;           // (Tq, H, D): last stride 1, any token and head stride
  Tensor k, v;        // (Tk, Hkv, D), (Tk, Hkv, Dv)
  Tensor cu_q, cu_k;  // (S + 1) i32: segment s is rows [cu[s], cu[s+1]); if cu_k is left out, cu_q is used
  Tensor sinks;       // (H) or left out; with 16-bit types also f32
  Tensor out;         // (Tq, H, Dv)
  Tensor lse;         // (H, Tq) f32 (f64 for f64), or left out
  double scale = 1;
  double softcap = 0;
  int64_t window = 0;
  bool causal = true;
  // A ring of keys per segment: segment s owns the rows [s * ring, (s + 1) * ring) of k and v, cu_k counts its visible
  // keys, and its i-th visible key is in row s * ring + (k_first[s] + i) % ring. With ring = 0 rows are packed, and
  // cu_k contains row numbers.
  int64_t ring = 0;
  Tensor k_first;  // (S) i32
};
void attention(const Attention& a, Stream stream);

// Gradients are written (dq, dk, dv) or accumulated (dsinks). Needs out and lse of the forward pass; no ring.
struct AttentionBackward {
  Tensor q, k, v, cu_q, cu_k, sinks, out, lse, dout;
  Tensor dq, dk, dv;       // shapes of q, k, v
  Tensor dsinks;           // (H) or left out; f32 beside 16-bit types
  bool add_dv = false;     // dv is added to instead of written; on a GPU only
  bool has_delta = false;  // the workspace begins with the sums of dout * out, (H, Tq) f32; on a GPU only
  double scale = 1, softcap = 0;
  int64_t window = 0;
  bool causal = true;
  // On a GPU, without `deterministic` and without softcap, a single kernel computes all gradients of heads up to 128
  // wide and adds dq in any order, so its last bits may differ from call to call.
  bool deterministic = true;
  // Every segment has Tq / S queries and Tk / S keys. The host does not read offsets on a GPU. A kernel may end with a
  // trap if the offsets contradict this flag.
  bool regular = false;
  Tensor workspace;  // u8, attention_backward_workspace_bytes(a); on a CPU none
  Tensor dlse;       // as lse: the gradient of lse, or left out; not beside has_delta
};
void attention_backward(const AttentionBackward& a, Stream stream);
int64_t attention_backward_workspace_bytes(const AttentionBackward& a);

// Exclusive self attention: z_h = y_h - (y_h . u) u with u = v / max(|v|, 1e-12), where v is the token's own value of
// the head's group.
//   dy = dz - (dz . u) u        dv += (du - (du . u) u) / |v|,   du = -sum_h [(dz_h . u) y_h + (y_h . u) dz_h]
struct ExcludeSelf {
  Tensor y, v, z;  // (T, H, D), (T, Hkv, D), (T, H, D); z may alias y, but the backward pass needs y
};
void exclude_self(const ExcludeSelf& a, Stream stream);
struct ExcludeSelfBackward {
  Tensor y, v, dz, dy;    // dy may alias dz
  Tensor dv;              // (T, Hkv, D) accumulated
  bool write_dv = false;  // dv is written instead
  Tensor delta;           // (H, T) f32: sums of dy * y, an input of attention_backward, or left out; on a GPU
};
void exclude_self_backward(const ExcludeSelfBackward& a, Stream stream);

int64_t flops(const Attention& a);  // counts visible pairs only

}  // namespace ingot
